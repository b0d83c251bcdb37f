"""The optimizer behind a name, and the arguments that flags and `--optimizer_kwargs` give the optimizer.

The arguments of a builder are read from its signature, so nothing here repeats them.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from importlib.util import find_spec
from typing import Any

import torch

from fms_fsdp.config import OptimConfig
from fms_fsdp.config.flag import Flag
from fms_fsdp.config.values import coerce, must_be_one_of, shown
from fms_fsdp.errors import UserError
from fms_fsdp.parts import load_part

Build = Callable[..., torch.optim.Optimizer]
PARTS = {  # of extras/, as module:class
    "adafactor": "factored:Adafactor",
    "lamb": "layerwise:Lamb",
    "rprop": "elementwise:Rprop",
    "novograd": "layerwise:NovoGrad",
    "madgrad": "elementwise:Madgrad",
    "sgd": "elementwise:SGD",
    "sm3": "factored:SM3",
}
BUILDERS = PARTS | {  # torch's own work on sharded tensors, entry by entry
    "adamw": "torch.optim:AdamW",
    "adam": "torch.optim:Adam",
    "muon": "fms_fsdp.optim.muon:Muon",
    "adamw8bit": "torchao.optim:AdamW8bit",
    "adagrad": "torch.optim:Adagrad",
    "adadelta": "torch.optim:Adadelta",
    "adamax": "torch.optim:Adamax",
    "rmsprop": "torch.optim:RMSprop",
}
_FUSED = ("adamw", "adam")
_FLAGS = {  # an argument → the flags that set it
    "lr": ("learning_rate",),
    "betas": ("adam_beta1", "adam_beta2"),
    "eps": ("adam_eps",),
    "weight_decay": ("weight_decay",),
}
_NO_CHOICE = {"foreach", "fused", "maximize", "capturable", "differentiable", "decoupled_weight_decay"}
_TYPES: dict[str, Any] = {"bool": bool, "int": int, "float": float}


def load_builder(name: str) -> Build:
    """The function that builds the optimizer of that name, or of the form module:function.

    Raises:
        UserError: its package is not installed, or there is no such module or function.
    """
    if name in PARTS:
        part: Build = load_part(PARTS[name])
        return part
    package = BUILDERS.get(name, name).partition(".")[0]
    if name in BUILDERS and find_spec(package) is None:
        raise UserError(f"--optimizer ({name}) needs the package {package}; pip install {package}")
    build: Build = load_part(BUILDERS.get(name, name), flag="--optimizer")
    try:
        takes = inspect.signature(build).parameters
    except (ValueError, TypeError) as error:
        raise UserError(f"--optimizer ({shown(name)}) must be a function: {error}") from None
    if not takes:
        raise UserError(f"--optimizer ({shown(name)}) must have an argument: the parameters to optimize")
    return build


def read_settings(name: str, section: OptimConfig) -> dict[str, Any]:
    """The arguments of the builder beside the groups: arguments that have a flag, and, for the optimizer that
    the section names, `--optimizer_kwargs`.

    Raises:
        UserError: a key is unknown, has a flag or a value of another type, or a flag was set that the
            builder does not take.
    """
    _, *signature = inspect.signature(load_builder(name)).parameters.values()
    several = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    taken = {each.name: each for each in signature if each.kind not in several}
    settings = {}
    for key, flags in _FLAGS.items():
        values = tuple(getattr(section, flag) for flag in flags)
        # the eps of some is two numbers, which no flag holds
        if key in taken and (len(values) == 2 or not isinstance(taken[key].default, tuple)):
            settings[key] = values if len(values) == 2 else values[0]
        elif name not in BUILDERS and values != tuple(getattr(OptimConfig(), flag) for flag in flags):
            raise UserError(f"--{flags[0]} has no effect on --optimizer={name}, which takes no {key}")
    known = [key for key in taken if key not in _NO_CHOICE | settings.keys()]
    for item in section.optimizer_kwargs if name == section.optimizer else ():
        key, equals, text = item.partition("=")
        quoted = f"--optimizer_kwargs ({shown(item)})"
        if not equals:
            raise UserError(f"{quoted} must be of the form key=value")
        if key in _FLAGS and key not in known and key in taken:
            raise UserError(f"{quoted} must not set what has a flag; use --{' and --'.join(_FLAGS[key])}")
        if key not in known and not any(each.kind is each.VAR_KEYWORD for each in signature):
            rule = must_be_one_of(known, key, cutoff=0.0) if known else "must be left out"
            raise UserError(f"{quoted}, an argument of --optimizer={name}, {rule}")
        settings[key] = _read_value(taken[key], text) if key in taken else text
    if name in BUILDERS and {"foreach", "fused"} & taken.keys():
        settings["fused" if name in _FUSED else "foreach"] = True
    return settings


def _read_value(parameter: inspect.Parameter, text: str) -> Any:
    """The text as the type that the signature says; numbers of a tuple are separated by colons."""
    if isinstance(parameter.default, tuple):
        return coerce(Flag((), "", name="optimizer_kwargs", type=tuple[float, ...]), text.replace(":", ","))
    declared = getattr(parameter.annotation, "__name__", parameter.annotation)
    kind = _TYPES.get(declared, type(parameter.default))
    if kind not in _TYPES.values():
        return text
    return coerce(Flag(None, "", name="optimizer_kwargs", type=kind), text)
