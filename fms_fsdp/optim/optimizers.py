"""The optimizers of a run as one: a list, each with groups and their base rates, and one rule for bad steps.

A step whose gradient is not finite changes nothing: no weight, no state, no count. Optimizers with a fused
kernel leave it out on the device; for every other one the host reads the verdict and leaves out the call.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)

from fms_fsdp.config import OptimConfig

STATE_BYTES = 8  # a parameter, of AdamW: two fp32 moments
_FLAT = StateDictOptions(flatten_optimizer_state_dict=True)


class Optimizers:
    """Several optimizers over one model, each over parameters of its own."""

    def __init__(self, model: nn.Module, parts: Sequence[torch.optim.Optimizer]) -> None:
        self._model, self.parts = model, list(parts)
        for part in self.parts:
            for group in part.param_groups:
                group["base_lr"] = group["lr"]

    def step(self, rate: Callable[[float], float], grad_norm: torch.Tensor) -> None:
        """One step with the rate `rate(base rate)` of each group, unless `grad_norm` is not finite."""
        host_says = True
        if not all(_skips_by_itself(part) for part in self.parts):
            host_says = bool(torch.isfinite(grad_norm).item())
        for part in self.parts:
            for group in part.param_groups:
                group["lr"] = rate(group["base_lr"])
            if _skips_by_itself(part):
                device = part.param_groups[0]["params"][0].device
                bad = (~torch.isfinite(grad_norm)).to(device, torch.float32)
                part.found_inf = bad  # type: ignore[attr-defined]  # as torch.amp.GradScaler sets it
                part.step()
            elif host_says:
                part.step()

    def zero_grad(self) -> None:
        """Drops all gradients."""
        for part in self.parts:
            part.zero_grad(set_to_none=True)

    def before_step(self, call: Callable[[], None]) -> None:
        """Lets `call` run before each step of the first optimizer, when the gradients are whole."""
        self.parts[0].register_step_pre_hook(lambda *_: call())

    def state_dict(self) -> dict[str, Any]:
        """`<parameter>.<key>` → value, by name, as sharded as the parameters are; the tensors in use."""
        flat = dict(sorted(get_optimizer_state_dict(self._model, self.parts, options=_FLAT).items()))
        return {key.removeprefix("state."): value for key, value in flat.items() if key.startswith("state.")}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Takes over a state of the form of `state_dict`; groups and rates stay those of this launch."""
        now = get_optimizer_state_dict(self._model, self.parts, options=_FLAT)
        groups = {key: value for key, value in now.items() if not key.startswith("state.")}
        flat = groups | {f"state.{key}": value for key, value in state.items()}
        set_optimizer_state_dict(self._model, self.parts, flat, options=_FLAT)


def _skips_by_itself(optimizer: torch.optim.Optimizer) -> bool:
    return bool(getattr(optimizer, "_step_supports_amp_scaling", False))  # set by torch's fused optimizers


def build_optimizers(section: OptimConfig, model: nn.Module) -> Optimizers:
    """AdamW over all parameters, fused, with its state allocated, so that a checkpoint can be loaded into it.

    Decay applies to tensors of two or more dims only.
    Source: Loshchilov and Hutter, "Decoupled weight decay regularization", https://arxiv.org/abs/1711.05101.
    """
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    groups = [
        {"params": [p for p in parameters if p.ndim >= 2], "weight_decay": section.weight_decay},
        {"params": [p for p in parameters if p.ndim < 2], "weight_decay": 0.0},
    ]
    adamw = torch.optim.AdamW(
        [group for group in groups if group["params"]],
        lr=section.learning_rate,
        betas=(section.adam_beta1, section.adam_beta2),
        eps=section.adam_eps,
        fused=True,
    )
    for parameter in parameters:
        adamw.state[parameter] = {
            "step": torch.zeros((), dtype=torch.float32, device=parameter.device),
            "exp_avg": torch.zeros_like(parameter, memory_format=torch.preserve_format),
            "exp_avg_sq": torch.zeros_like(parameter, memory_format=torch.preserve_format),
        }
    return Optimizers(model, [adamw])


def state_sizes(names: dict[str, torch.Size]) -> Iterator[tuple[str, torch.Size]]:
    """Names and sizes of the state that `build_optimizers` keeps of parameters of these names and sizes."""
    for name, size in names.items():
        yield f"{name}.step", torch.Size()
        yield f"{name}.exp_avg", size
        yield f"{name}.exp_avg_sq", size
