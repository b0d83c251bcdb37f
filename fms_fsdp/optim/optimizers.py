"""Builds the optimizer that --optimizer names, and runs its steps.

A step whose gradient norm is not finite changes no weight, no state and no step count. Fused
optimizers (AdamW, Adam) and those of sharded_optimizers.py skip on the device. For the others (SGD,
Adagrad, Adadelta, Adamax, RMSprop, Rprop, a user's own) the host reads the norm and skips the call:
DTensors have no fused SGD and Adagrad (torch 2.13), and the rest is not fused.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from functools import cache, partial
from typing import Any

import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_optimizer_state_dict

from fms_fsdp.config import FP32, OptimConfig, Precision
from fms_fsdp.config.flag import Flag, coerce
from fms_fsdp.config.values import joined, must_be_one_of, shown
from fms_fsdp.distributed.dtensor import local_shard, local_shards
from fms_fsdp.distributed.torch_private import multiply_, unscales_gradients
from fms_fsdp.errors import UserError
from fms_fsdp.models.config import TransformerConfig
from fms_fsdp.models.flops import num_params_by_unit
from fms_fsdp.models.init import clean_name
from fms_fsdp.packages import import_function

Factory = Callable[..., torch.optim.Optimizer]
TORCH_OPTIMIZERS: dict[str, Factory] = {  # exact on DTensors
    "adamw": torch.optim.AdamW,
    "adam": torch.optim.Adam,
    "sgd": torch.optim.SGD,
    "adagrad": torch.optim.Adagrad,
    "adadelta": torch.optim.Adadelta,
    "adamax": torch.optim.Adamax,
    "rmsprop": torch.optim.RMSprop,
}
_FLAGS = {  # argument -> the flags that set it
    "lr": ("learning_rate",),
    "betas": ("adam_beta1", "adam_beta2"),
    "eps": ("adam_eps",),
    "weight_decay": ("weight_decay",),
}
_FIXED = {"foreach", "fused", "maximize", "capturable", "differentiable", "decoupled_weight_decay"}
_EXAMPLE_SIZE = 256  # rows and columns of the matrices that show the size of the state
_FLAT = StateDictOptions(flatten_optimizer_state_dict=True)


class Optimizers:
    """One or several torch optimizers over one model; each parameter belongs to one of them."""

    def __init__(self, model: nn.Module, optimizers: Sequence[torch.optim.Optimizer]) -> None:
        self._model = model
        self.optimizers = list(optimizers)
        for optimizer in self.optimizers:
            for group in optimizer.param_groups:
                group["base_lr"] = float(group["lr"])

    def step(
        self,
        learning_rate: Callable[[float], float],
        grad_norm: torch.Tensor,
        clip_factor: torch.Tensor | None = None,
    ) -> None:
        """Updates the weights, unless `grad_norm` is not finite.

        Args:
            learning_rate: maps the base learning rate of a group to its learning rate in this step.
            clip_factor: multiplies the gradients: in the GPU kernel of an optimizer that supports it,
                which reads them anyway, else in place before.
        """
        is_bad = ~torch.isfinite(grad_norm)
        skips_on_host = not all(map(_skips_on_device, self.optimizers)) and bool(is_bad.item())
        optimizers: list[Any] = self.optimizers
        for optimizer in optimizers:
            for group in optimizer.param_groups:
                if isinstance(group["lr"], torch.Tensor):
                    group["lr"].fill_(learning_rate(group["base_lr"]))
                else:
                    group["lr"] = learning_rate(group["base_lr"])
            params = [param for group in optimizer.param_groups for param in group["params"]]
            skips_on_device = _skips_on_device(optimizer)
            if skips_on_device:
                optimizer.found_inf = is_bad.to(params[0].device, torch.float32)
            if clip_factor is not None:
                if _divides_gradients(optimizer) and params[0].device.type == "cuda":
                    optimizer.grad_scale = 1 / clip_factor  # it divides by this
                else:
                    scale_gradients(params, clip_factor)
            if skips_on_device or not skips_on_host:
                optimizer.step()

    def zero_grad(self) -> None:
        """Frees all gradients."""
        for optimizer in self.optimizers:
            optimizer.zero_grad(set_to_none=True)

    def tensors(self) -> dict[str, torch.Tensor]:
        """Returns the live state as `<parameter>.<key>` -> tensor, sharded as the parameters are."""
        found: dict[str, Any] = get_optimizer_state_dict(
            self._model, self.optimizers, options=_FLAT
        )
        tensors = {}
        for key in sorted(found):
            if key.startswith("state."):
                tensors[clean_name(key.removeprefix("state."))] = found[key]
        return tensors

    def state_dict(self) -> dict[str, torch.Tensor]:
        """Returns `tensors()`, but leaves an optimizer that has not created its state without state.

        torch creates the state by a step with gradients and a learning rate of 0. Without a weight
        decay of 0 too, coupled decay would become momentum.
        """
        without_state = [optimizer for optimizer in self.optimizers if not optimizer.state]
        groups = [group for optimizer in without_state for group in optimizer.param_groups]
        decays = [group.get("weight_decay", 0.0) for group in groups]
        for group in groups:
            group["weight_decay"] = 0.0
        state = self.tensors()
        for group, decay in zip(groups, decays, strict=True):
            group["weight_decay"] = decay
        for optimizer in without_state:
            optimizer.state.clear()
        return state

    @torch.no_grad()
    def load_state_dict(self, state: Mapping[str, torch.Tensor]) -> None:
        """Copies a state of the form of `state_dict`; groups and learning rates do not change."""
        for name, value in self.tensors().items():
            local_shard(value).copy_(local_shard(state[name]))


def _divides_gradients(optimizer: torch.optim.Optimizer) -> bool:
    """Returns whether the optimizer reads `found_inf` and `grad_scale` on the device."""
    return unscales_gradients(optimizer) or getattr(optimizer, "divides_gradients", False)


def _skips_on_device(optimizer: torch.optim.Optimizer) -> bool:
    return _divides_gradients(optimizer) or getattr(optimizer, "skips_on_device", False)


@torch.no_grad()
def scale_gradients(params: Sequence[torch.Tensor], factor: torch.Tensor) -> None:
    """Multiplies gradients in place."""
    shards = local_shards([param.grad for param in params if param.grad is not None])
    factor = factor.to(params[0].device)
    # On a CPU the comparison costs no sync and saves a pass over the gradients.
    if shards and (factor.device.type != "cpu" or factor != 1):
        multiply_(shards, factor)


def build_optimizers(
    config: OptimConfig,
    model: nn.Module,
    precision: Precision = FP32,
    seed: int = 0,
    *,
    compiled: bool = False,
) -> Optimizers:
    """Builds the optimizers with their state, so that a checkpoint can be loaded.

    Muon updates the matrices of the blocks and AdamW everything else; other optimizers update all
    parameters. `seed` is for stochastic rounding, whose step may be `compiled`.

    Raises:
        UserError: a flag does not fit the optimizer, or its package is not installed.
    """
    params = {clean_name(name): p for name, p in model.named_parameters() if p.requires_grad}
    name = config.optimizer
    if precision.is_rounded:
        from fms_fsdp.optim.stochastic_rounding import RoundedAdamW, check_rounding

        check_rounding(precision, config)
        factory = partial(
            RoundedAdamW,
            names=params,
            precision=precision,
            seed=seed,
            decoupled=name == "adamw",
            compiled=compiled,
        )
        return Optimizers(model, [_build(name, config, params, factory)])
    if name != "muon":
        return Optimizers(model, [_build(name, config, params)])
    hidden_matrices = {}
    others = {}
    for key, param in params.items():
        if param.ndim == 2 and key.startswith("blocks."):
            hidden_matrices[key] = param
        else:
            others[key] = param
    if not hidden_matrices:
        raise UserError("--optimizer=muon requires matrices in blocks; use --optimizer=adamw")
    optimizers = [_build("muon", config, hidden_matrices)]
    if others:
        optimizers.append(_build("adamw", config, others))
    return Optimizers(model, optimizers)


def _build(
    name: str,
    config: OptimConfig,
    params: Mapping[str, torch.Tensor],
    factory: Factory | None = None,
) -> torch.optim.Optimizer:
    """Builds one optimizer with a group of parameters that decay and a group of those that do not."""
    arguments = optimizer_arguments(name, config)
    if factory is None:
        factory = find_factory(name)
        if name in ("adamw", "adam"):
            arguments["fused"] = not any(p.is_meta for p in params.values())
        elif ":" not in name and "foreach" in inspect.signature(factory).parameters:
            arguments["foreach"] = True  # torch's default for DTensors is a loop
    groups: dict[float, dict[str, Any]] = {}  # by weight decay
    for key, param in params.items():
        if param.ndim < 2:  # norms and biases
            decays = config.decay_norms
        elif key.startswith(("embed.", "distance_bias.")):
            decays = config.decay_embeddings
        else:
            decays = True
        decay = config.weight_decay if decays else 0.0
        group = groups.setdefault(decay, {"params": [], "weight_decay": decay})
        group["params"].append(param)
    optimizer = factory(list(groups.values()), **arguments)
    if ":" not in name and not optimizer.state and not arguments.get("dampening"):
        _create_state(optimizer, factory, arguments)
    return optimizer


def _create_state(
    optimizer: torch.optim.Optimizer, factory: Factory, arguments: Mapping[str, Any]
) -> None:
    """Creates the state that an elementwise optimizer of torch creates in its first step.

    A step of one number with gradient 0 shows names and initial values. Dampened SGD is excluded:
    its first momentum is the gradient itself, undampened.
    """
    probe = nn.Parameter(torch.zeros(1))
    probe.grad = torch.zeros(1)
    example = factory([probe], **arguments)
    example.step()
    for group in optimizer.param_groups:
        for param in group["params"]:
            step_device = param.device if arguments.get("fused") else None
            for key, value in example.state[probe].items():
                if key == "step":
                    initial = torch.zeros((), dtype=torch.float32, device=step_device)
                else:
                    initial = torch.full_like(param, value.item())
                optimizer.state[param][key] = initial


def own_optimizers() -> dict[str, Factory]:
    """Returns the optimizers that torch lacks, or that torch cannot run on DTensors."""
    from fms_fsdp.optim import sharded_optimizers as own
    from fms_fsdp.optim.muon import Muon

    return {
        "muon": Muon,
        "adafactor": own.Adafactor,
        "lamb": own.Lamb,
        "rprop": own.Rprop,
        "novograd": own.NovoGrad,
        "madgrad": own.Madgrad,
        "sm3": own.SM3,
    }


def find_factory(name: str) -> Factory:
    """Returns the factory of a name, or the function or class of `module:function`.

    Raises:
        UserError: it cannot be imported, or takes no parameters to optimize.
    """
    if name in TORCH_OPTIMIZERS:
        return TORCH_OPTIMIZERS[name]
    if ":" not in name:
        return own_optimizers()[name]
    factory: Factory = import_function(name, "--optimizer")
    try:
        takes = inspect.signature(factory).parameters
    except (ValueError, TypeError) as error:
        raise UserError(
            f"--optimizer={shown(name)} is not a function ({error}); name a function or a class"
        ) from None
    if not takes:
        raise UserError(
            f"--optimizer={shown(name)} must take the parameters as its argument; add it, or name "
            "another function"
        )
    return factory


def optimizer_arguments(name: str, config: OptimConfig) -> dict[str, Any]:
    """Returns the keyword arguments of an optimizer from the flags and --optimizer_kwargs.

    Raises:
        UserError: a key of --optimizer_kwargs is unknown, has a flag of its own or a value of another
            type, or a flag is set that the optimizer does not take.
    """
    _, *signature = inspect.signature(find_factory(name)).parameters.values()
    taken = {p.name: p for p in signature if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)}
    arguments: dict[str, Any] = {}
    for key, flags in _FLAGS.items():
        values = tuple(getattr(config, flag) for flag in flags)
        defaults = tuple(getattr(OptimConfig(), flag) for flag in flags)
        if key == "betas" and key in taken:
            arguments[key] = values
        # the eps of torch's Adafactor is two numbers, which no flag can express
        elif key in taken and not isinstance(taken[key].default, tuple):
            arguments[key] = values[0]
        elif ":" in name and values != defaults:
            changed = [
                flag for flag in flags if getattr(config, flag) != getattr(OptimConfig(), flag)
            ]
            raise UserError(
                f"--{changed[0]} has no effect on --optimizer={name}, which takes no {key}; remove it"
            )
    free = [key for key in taken if key not in _FIXED | arguments.keys()]
    takes_any = any(p.kind is p.VAR_KEYWORD for p in signature)
    kwargs = config.optimizer_kwargs if name == config.optimizer else ()  # not for Muon's AdamW
    for item in kwargs:
        key, equals, text = item.partition("=")
        if not equals:
            raise UserError(
                f"--optimizer_kwargs={shown(item)} must have the form key=value; write e.g. momentum=0.9"
            )
        if key in arguments:
            own = " and --".join(_FLAGS.get(key, (key,)))
            raise UserError(f"--optimizer_kwargs={shown(item)} has a flag of its own; use --{own}")
        if key not in free and not takes_any:
            rule = "must be removed: it takes none"
            if free:
                rule = must_be_one_of(free, key, cutoff=0.0)
            raise UserError(f"--optimizer_kwargs={shown(item)} of --optimizer={name} {rule}")
        arguments[key] = _parse(text, taken[key]) if key in taken else text
    return arguments


def _parse(text: str, parameter: inspect.Parameter) -> Any:
    """Returns the text as the type of the parameter; numbers of a tuple are separated by colons."""
    name = f"optimizer_kwargs={parameter.name}"  # as an error shows it
    if isinstance(parameter.default, tuple):
        row = Flag((), "", name=name, type=tuple[float, ...])
        return coerce(row, text.replace(":", ","))
    declared = getattr(parameter.annotation, "__name__", parameter.annotation)
    kind = {"bool": bool, "int": int, "float": float}.get(declared, type(parameter.default))
    if kind not in (bool, int, float):
        return text
    return coerce(Flag(None, "", name=name, type=kind), text)


@cache
def example_state(config: OptimConfig, precision: Precision = FP32) -> dict[str, torch.Tensor]:
    """Returns the optimizer state of one matrix in a block and one outside, by name.

    Raises:
        UserError: the optimizer cannot be built from the flags.
    """
    dtype = torch.bfloat16 if precision.weights == "bf16" else torch.float32
    with torch.device("meta"):  # draws no random numbers
        linear = partial(nn.Linear, _EXAMPLE_SIZE, _EXAMPLE_SIZE, bias=False, dtype=dtype)
        model = nn.ModuleDict({"blocks": linear(), "embed": linear()}).to_empty(device="cpu")
    try:
        optimizers = build_optimizers(config, model, precision)
        before = _group_values(optimizers)
        state = optimizers.tensors()  # creates what the first step creates, by a step
        changed = [key for key, value in _group_values(optimizers) if (key, value) not in before]
        if changed:
            raise TypeError(
                f"a step changes {changed[0]!r} of its groups, which a checkpoint does not store"
            )
        if not all(isinstance(value, torch.Tensor) for value in state.values()):
            raise TypeError("its state contains values that are not tensors and cannot be saved")
    except (
        ArithmeticError,
        AttributeError,
        LookupError,
        RuntimeError,
        TypeError,
        ValueError,
    ) as error:
        if isinstance(error, UserError) and str(error).startswith("--"):
            raise
        kwargs = config.optimizer_kwargs
        argument = str(error).partition("=")[0]
        is_about_argument = any(item.startswith(f"{argument}=") for item in kwargs)
        if isinstance(error, UserError) and is_about_argument:
            raise UserError(f"--optimizer_kwargs={error}") from error
        built = f"--optimizer={config.optimizer}"
        if kwargs:
            built += f" --optimizer_kwargs={joined(kwargs)}"
        remedy = "correct --optimizer_kwargs"
        if ":" in config.optimizer:
            remedy = "correct the function or --optimizer_kwargs"
        raise UserError(f"{built} cannot be built: {error}; {remedy}") from error
    return state


def _group_values(optimizers: Optimizers) -> list[tuple[str, str]]:
    """Returns the arguments of all groups by name, as text."""
    values = []
    for optimizer in optimizers.optimizers:
        for group in optimizer.param_groups:
            values += [(key, repr(value)) for key, value in group.items() if key != "params"]
    return values


def state_bytes(config: OptimConfig, model: TransformerConfig, precision: Precision = FP32) -> int:
    """Estimates the bytes of the full optimizer state."""
    units = num_params_by_unit(model)
    in_blocks = model.num_layers * units["block"]
    outside = units["embed"] + units["head"]
    total = 0.0
    for name, value in example_state(config, precision).items():
        if value.ndim:  # step counts are not worth counting
            bytes_per_param = value.nbytes / _EXAMPLE_SIZE**2
            total += bytes_per_param * (in_blocks if name.startswith("blocks.") else outside)
    return round(total)
