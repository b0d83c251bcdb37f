"""The optimizers of a run as one: a list, each with groups and their base rates, and one rule for bad steps.

A step whose gradient is not finite changes nothing: no weight, no state, no count. Optimizers with a fused
kernel, and those that round, leave it out on the device; for every other one the host reads the verdict and
leaves out the call.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cache, partial
from typing import Any

import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_optimizer_state_dict

from fms_fsdp.config import FP32, NUM_BYTES, OptimConfig, Precision
from fms_fsdp.config.values import joined
from fms_fsdp.errors import UserError
from fms_fsdp.models.flops import num_params, num_params_by_unit
from fms_fsdp.models.init import clean_name
from fms_fsdp.models.variants import LlamaConfig
from fms_fsdp.optim.registry import BUILDERS, Build, load_builder, read_settings
from fms_fsdp.parts import load_part
from fms_fsdp.sharded import local_part

_STAND_IN = 256  # rows and columns of a matrix whose state is looked at before the model is built
_FLAT = StateDictOptions(flatten_optimizer_state_dict=True)


class Optimizers:
    """Several optimizers over one model; each parameter belongs to one optimizer."""

    def __init__(self, model: nn.Module, parts: Sequence[torch.optim.Optimizer]) -> None:
        self._model, self.parts = model, list(parts)
        for part in self.parts:
            for group in part.param_groups:
                group["base_lr"] = float(group["lr"])

    @property
    def clip_by_themselves(self) -> bool:
        """Whether `step` clips: fused kernels of GPUs scale the gradient while they read it."""
        return all(_skips_by_itself(part) and _device_of(part).type == "cuda" for part in self.parts)

    def step(
        self,
        rate: Callable[[float], float],
        grad_norm: torch.Tensor,
        max_norm: float = 0.0,
        loss_scale: torch.Tensor | float = 1.0,
    ) -> None:
        """One step with the rate `rate(base rate)` of each group, unless `grad_norm` is not finite.

        Where the optimizers `clip_by_themselves`, gradients still hold a `loss_scale`, which `grad_norm` does
        not, and those of a norm above `max_norm` are scaled down to it; 0 scales none.
        """
        is_bad, scale = ~torch.isfinite(grad_norm), None
        if self.clip_by_themselves and (max_norm > 0 or isinstance(loss_scale, torch.Tensor)):
            clip = ((grad_norm + 1e-6) / max_norm).clamp(min=1.0) if max_norm > 0 else 1.0
            scale = clip * loss_scale  # kernels divide by it
        host_skips = not all(map(_skips_by_itself, self.parts)) and bool(is_bad.item())
        for part in self.parts:
            for group in part.param_groups:
                if isinstance(group["lr"], torch.Tensor):
                    group["lr"].fill_(rate(group["base_lr"]))
                else:
                    group["lr"] = rate(group["base_lr"])
            if _skips_by_itself(part):  # two names of torch.amp.GradScaler
                part.found_inf = is_bad.to(_device_of(part), torch.float32)  # type: ignore[attr-defined]
                part.grad_scale = scale  # type: ignore[attr-defined]
                part.step()
            elif not host_skips:
                part.step()

    def zero_grad(self) -> None:
        """Drops all gradients."""
        for part in self.parts:
            part.zero_grad(set_to_none=True)

    def before_step(self, call: Callable[[], None]) -> None:
        """Lets `call` run before each step of the first optimizer, when the gradients are whole."""
        self.parts[0].register_step_pre_hook(lambda *_: call())

    def state_dict(self) -> dict[str, torch.Tensor]:
        """`<parameter>.<key>` → tensor, by name, as sharded as the parameters are; the tensors in use, but
        for quantized ones, which are stored as fp32, so that they fit any sharding."""
        lazy = [part for part in self.parts if not part.state]
        state = {name: as_saved(value) for name, value in self.tensors_in_use().items()}
        for part in lazy:
            part.state.clear()  # torch has filled it by a step without gradient; its own first step does
        return state

    def tensors_in_use(self) -> dict[str, torch.Tensor]:
        """The state itself, by the names of `state_dict`."""
        found: dict[str, Any] = get_optimizer_state_dict(self._model, self.parts, options=_FLAT)
        return {key[6:]: found[key] for key in sorted(found) if key.startswith("state.")}

    @torch.no_grad()
    def load_state_dict(self, state: Mapping[str, torch.Tensor]) -> None:
        """Takes over a state of the form of `state_dict`; groups and rates stay as this launch made them."""
        for name, value in self.tensors_in_use().items():
            local_part(value).copy_(local_part(state[name]))


def as_saved(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor that a checkpoint holds for a tensor of the state: a quantized tensor becomes fp32."""
    whole: torch.Tensor = load_part("quantized").dequantized(tensor) if _is_quantized(tensor) else tensor
    return whole


def num_bytes(tensor: torch.Tensor) -> int:
    """Bytes that this rank's part takes in memory."""
    count: int = local_part(tensor).nbytes
    if _is_quantized(tensor):
        count = load_part("quantized").num_bytes(tensor)
    return count


def _is_quantized(tensor: torch.Tensor) -> bool:
    """Whether several plain tensors stand behind this tensor, as in torchao."""
    return hasattr(local_part(tensor), "tensor_attrs")


def _device_of(optimizer: torch.optim.Optimizer) -> torch.device:
    device: torch.device = optimizer.param_groups[0]["params"][0].device
    return device


def _skips_by_itself(optimizer: torch.optim.Optimizer) -> bool:
    return bool(getattr(optimizer, "_step_supports_amp_scaling", False))  # torch's name for it


def build_optimizers(
    section: OptimConfig,
    model: nn.Module,
    precision: Precision = FP32,
    seed: int = 0,
    *,
    compiled: bool = False,
) -> Optimizers:
    """The optimizers that `--optimizer` names, with their state, so that a checkpoint can be loaded into it.

    Muon takes the matrices of the blocks, AdamW then all others; every other optimizer takes all parameters.
    One of the user's own may make its state at its first step. `seed` is that of rounding by chance, whose
    step may be `compiled`.

    Raises:
        UserError: a flag does not fit the optimizer, or it needs what is not there.
    """
    named = {clean_name(name): p for name, p in model.named_parameters() if p.requires_grad}
    name = section.optimizer
    if precision.is_rounded:
        part = load_part("rounded")
        part.check_rounding(precision, section)
        rounded = partial(part.RoundedAdamW, names=named, precision=precision, seed=seed)
        build = partial(rounded, decoupled=name == "adamw", compiled=compiled)
        return Optimizers(model, [_build_part(name, section, named, build)])
    if name != "muon":
        return Optimizers(model, [_build_part(name, section, named)])
    hidden, others = dict[str, torch.Tensor](), dict[str, torch.Tensor]()
    for name, parameter in named.items():
        part_of = hidden if parameter.ndim == 2 and name.startswith("blocks.") else others
        part_of[name] = parameter
    if not hidden:
        raise UserError("--optimizer (muon) needs matrices in blocks, and the model has none; use adamw")
    parts = [_build_part("muon", section, hidden)]
    return Optimizers(model, parts + ([_build_part("adamw", section, others)] if others else []))


def _build_part(
    name: str, section: OptimConfig, named: Mapping[str, torch.Tensor], own: Build | None = None
) -> torch.optim.Optimizer:
    """One optimizer over these parameters: a group of parameters that decay and a group of others."""
    build, settings = own or load_builder(name), read_settings(name, section)
    if own or any(parameter.is_meta for parameter in named.values()):
        settings.pop("fused", None)  # no kernel there
    groups: dict[float, dict[str, Any]] = {}
    for key, parameter in named.items():
        of_embedding = key.startswith(("embed.", "distance_bias."))
        decays = section.decay_norms if parameter.ndim < 2 else section.decay_embeddings or not of_embedding
        decay = section.weight_decay if decays else 0.0
        groups.setdefault(decay, {"params": [], "weight_decay": decay})["params"].append(parameter)
    part = build(list(groups.values()), **settings)
    if name in BUILDERS and not part.state:
        _make_state(part, build, settings)
    return part


def _make_state(part: torch.optim.Optimizer, build: Build, settings: Mapping[str, Any]) -> None:
    """Makes the state that an optimizer of torch makes at the first step: a count of steps, and zeros.

    One step of a parameter made for this purpose shows the names of the state. Optimizers of torchao would
    compile in that step; the names of their state are known.
    """
    if hasattr(part, "_new_buffer"):
        load_part("quantized").make_state(part, settings)
        return
    probe = nn.Parameter(torch.zeros(1))
    probe.grad = torch.zeros(1)
    stepped = build([probe], **settings)
    stepped.step()
    for group in part.param_groups:
        for parameter in group["params"]:
            state, device = part.state[parameter], parameter.device if settings.get("fused") else None
            for name in stepped.state[probe]:
                state[name] = torch.zeros((), dtype=torch.float32, device=device)
                if name != "step":
                    state[name] = torch.zeros_like(parameter, memory_format=torch.preserve_format)


@cache
def state_of_stand_in(section: OptimConfig, precision: Precision = FP32) -> dict[str, torch.Tensor]:
    """The state that the optimizers keep of a model of one matrix in a block and one outside, by name. Made
    once in a process.

    Raises:
        UserError: the flags name no optimizer that can be built, or settings that it does not take.
    """
    dtype = torch.bfloat16 if precision.weights == "bf16" else torch.float32
    with torch.device("meta"):  # so that no random number is drawn
        linear = partial(nn.Linear, _STAND_IN, _STAND_IN, bias=False, dtype=dtype)
        model = nn.ModuleDict({"blocks": linear(), "embed": linear()}).to_empty(device="cpu")
    try:
        state = build_optimizers(section, model, precision).tensors_in_use()
        for name, value in state.items():
            if not isinstance(value, torch.Tensor):
                raise TypeError(f"the state must be tensors, to be saved, and {name} is no tensor")
    except (ArithmeticError, AttributeError, LookupError, RuntimeError, TypeError, ValueError) as error:
        if isinstance(error, UserError) and str(error).startswith("--"):
            raise
        kwargs = f" --optimizer_kwargs={joined(section.optimizer_kwargs)}" if section.optimizer_kwargs else ""
        raise UserError(f"--optimizer={section.optimizer}{kwargs} cannot be built: {error}") from error
    return state


def state_bytes(
    section: OptimConfig, config: LlamaConfig, precision: Precision = FP32, *, saved: bool = False
) -> int:
    """About the bytes of the optimizers' state of the whole model: in memory, or in a checkpoint."""
    units, total = num_params_by_unit(config), 0.0
    counts = {"blocks": config.num_layers * units["block"], "embed": units["embed"] + units["head"]}
    for name, value in state_of_stand_in(section, precision).items():
        size = num_bytes(as_saved(value) if saved else value)
        total += size / _STAND_IN**2 * counts[name.partition(".")[0]] if value.ndim else 0
    return round(total)


def checkpoint_bytes(section: OptimConfig, config: LlamaConfig, precision: Precision) -> int:
    """About the bytes of a checkpoint: weights and the optimizers' state."""
    weights = NUM_BYTES[precision.weights] * num_params(config)
    return weights + state_bytes(section, config, precision, saved=True)
