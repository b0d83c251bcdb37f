"""AdamW and Adam over weights or moments in bf16, which are rounded up or down by chance.

In bf16 a weight that should move by less than 1/512 of itself stays where it is if it is rounded to nearest.
Rounded by chance, up with a probability that is its share of the way, it moves as it should on average.

    (seed, step, name) ── key ── row ── column ── 16 bits for a weight ── 16 bits for each of its moments

The bits are a function of the entry's place in the whole tensor, not of a generator, so they are the same on
any number of ranks, and after a resume.

Source: Zamirai et al., "Revisiting BFloat16 Training", https://arxiv.org/abs/2010.06192;
https://github.com/skeeto/hash-prospector (the mixing).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch

from fms_fsdp.config import OptimConfig, Precision
from fms_fsdp.config.values import joined
from fms_fsdp.data.order.permute import derive_key, hash64
from fms_fsdp.errors import UserError
from fms_fsdp.optim.shards import Pair, ShardOptimizer, State
from fms_fsdp.runtime import HostCopy
from fms_fsdp.sharded import Tensors, local_part, local_parts, place_of

_LARGEST = 0x7F7FFFFF  # the bits of the largest finite fp32 number
# Without them torch's compiler writes fp32 copies of all results to memory and reads them again.
_ONE_KERNEL: dict[str, str | int | bool | Callable[..., object]] = {
    "realize_reads_threshold": 64,
    "realize_opcount_threshold": 1000,
}


def check_rounding(precision: Precision, section: OptimConfig) -> None:
    """Raises UserError for an optimizer that cannot keep weights or moments in bf16 so that they move."""
    kept = "where weights or moments are kept in bf16 (--precision, --param_dtype, --optimizer_state_dtype)"
    if section.optimizer not in ("adamw", "adam"):
        raise UserError(
            f"--optimizer ({section.optimizer}) must be adamw or adam {kept}; use one of them, or keep fp32"
        )
    if section.optimizer_kwargs:
        raise UserError(
            f"--optimizer_kwargs ({joined(section.optimizer_kwargs)}) must be left out {kept}; leave out the "
            "flag, or keep fp32"
        )
    if precision.state == "bf16" and not precision.stochastic_rounding and section.adam_beta2 > 0.99:
        raise UserError(
            f"--adam_beta2 ({section.adam_beta2:g}) must be at most 0.99 where moments in bf16 are rounded "
            "to nearest, or the second moment stops short; lower the value, or leave out "
            "--stochastic_rounding=False"
        )


class RoundedAdamW(ShardOptimizer):
    """AdamW in fp32 over numbers that are kept in fp32 or bf16; with `decoupled` off, Adam.

        w = (1 − rate · decay) w      Adam: g = g + decay · w
        m = β1 m + (1 − β1) g      v = β2 v + (1 − β2) g²
        w = w − rate / (1 − β1ᵗ) · m / (√v / √(1 − β2ᵗ) + ε)

    Every operation rounds once, so that its bits do not depend on where shards begin. `names`: those of the
    parameters. Gradients are fp32 or bf16. `compiled`: the step is one kernel a parameter, not a piece of it
    at a time. As torch's fused kernels it divides gradients by `grad_scale` and changes nothing where
    `found_inf` is set, on the device; the count of steps learns of that when the next step begins.
    Source: Loshchilov and Hutter, https://arxiv.org/abs/1711.05101.
    """

    kept = ("exp_avg", "exp_avg_sq")
    _step_supports_amp_scaling = True
    found_inf: torch.Tensor | None = None
    grad_scale: torch.Tensor | None = None
    _last: HostCopy | None = None  # `found_inf` of the last step

    def __init__(
        self,
        groups: Any,
        lr: float,
        betas: Pair,
        eps: float,
        weight_decay: float,
        *,
        names: Mapping[str, torch.Tensor],
        precision: Precision,
        seed: int,
        decoupled: bool = True,
        compiled: bool = False,
    ) -> None:
        self._seed, self._kind, self._compiled = seed, (decoupled, precision.stochastic_rounding), compiled
        self._move = compiled_move() if compiled else move
        self._dtype = torch.bfloat16 if precision.state == "bf16" else torch.float32
        self._hashes = {parameter: hash64(name) for name, parameter in names.items()}
        super().__init__(groups, lr=lr, betas=betas, eps=eps, weight_decay=weight_decay)

    def new_state(self, parameter: torch.Tensor, group: dict[str, Any]) -> State:
        return {name: torch.zeros_like(parameter, dtype=self._dtype) for name in self.kept}

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self._count_last()
        super().step()
        self._last = None if self.found_inf is None else HostCopy(self.found_inf)

    def state_dict(self) -> dict[str, Any]:
        self._count_last()
        return super().state_dict()

    def _count_last(self) -> None:
        """Takes the last step back from the counts if the step changed nothing. The device has computed the
        answer by now, so reading it waits for nothing."""
        last, self._last = self._last, None
        if last is not None and last.read():
            for state in self.state.values():
                state["step"] -= 1

    def update(self, group: dict[str, Any], step: int, parameters: Tensors, states: list[State]) -> None:
        device = local_part(parameters[0]).device
        numbers = self._numbers(group, step, device)
        for parameter, state in zip(parameters, states, strict=True):
            kept = local_parts((parameter, state["exp_avg"], state["exp_avg_sq"], parameter.grad))
            key = derive_key(self._seed, step, self._hashes[parameter]) >> 33
            integers = partial(torch.arange, dtype=torch.int32, device=device)
            place = [integers(part.start, part.stop) for part in place_of(parameter)]
            key_tensor = torch.full((), key, dtype=torch.int32, device=device)
            # entries that are in fp32 at a time; compiled code has a few at hand, of any number
            at_once = kept[0].numel() if self._compiled else 1 << (18 if device.type == "cpu" else 25)
            rows = max(1, at_once // max(1, math.prod(kept[0].shape[1:])))
            split = (torch.split(tensor, rows) for tensor in (*kept, place[0]))
            for *parts, index in zip(*split, strict=True):
                if parts[0].numel():
                    where = (key_tensor, index, *place[1:])
                    self._move(parts, numbers, where, self.grad_scale, *self._kind)

    def _numbers(self, group: dict[str, Any], step: int, device: torch.device) -> Tensors:
        """Returns the numbers that `move` multiplies by, on the device, where `found_inf` chooses."""
        (beta1, beta2), rate, decay = group["betas"], group["lr"], group["weight_decay"]
        root, share = math.sqrt(1 - beta2**step), rate / (1 - beta1**step)
        moves = [1 - rate * decay, decay, beta1, 1 - beta1, beta2, 1 - beta2, root, group["eps"], share, 0.0]
        stays = [1.0, 0.0, 1.0, 0.0, 1.0, 0.0, root, group["eps"], 0.0, 1.0]
        both = torch.tensor([moves, stays], dtype=torch.float32).to(device, non_blocking=True)
        chosen = both[0] if self.found_inf is None else torch.where(self.found_inf > 0, both[1], both[0])
        return [number.clone() for number in chosen]


def move(
    kept: Sequence[torch.Tensor],
    numbers: Sequence[torch.Tensor],
    place: Sequence[torch.Tensor],
    grad_scale: torch.Tensor | None,
    decoupled: bool,
    by_chance: bool,
) -> None:
    """The formulas above on a part of a parameter, its moments and its gradient, in place. What stays does so
    to the last bit: rounding keeps what bf16 holds.

    `numbers` are scalars: beside a tensor of ten numbers compiled code would be made anew for a part of ten
    rows. `place`: that of `draw`.
    """
    shrinks, decay, beta1, rest1, beta2, rest2, root, eps, rate, stays = numbers
    weight, mean, square, gradient = wide = [part.float() for part in kept]  # fp32 ones are changed in place
    if grad_scale is not None:
        gradient.div_(grad_scale)
    gradient.masked_fill_(stays > 0, 0.0)  # after the scale, which is not finite either then
    if decoupled:
        weight.mul_(shrinks)
    else:
        gradient.add_(weight * decay)
    mean.mul_(beta1).add_(gradient * rest1)
    square.mul_(beta2).add_(gradient.square_().mul_(rest2))
    divisor = torch.sqrt(square, out=gradient).div_(root).add_(eps)
    weight.sub_(torch.div(mean, divisor, out=gradient).mul_(rate))
    draws: tuple[torch.Tensor | None, ...] = (None, None, None)
    if by_chance:
        of_weight = draw(*place)
        of_moments = _mixed(of_weight.clone())  # the moments share a draw, whose halves they take
        draws = (of_weight, of_moments, of_moments >> 16)
    for narrow, exact, drawn in zip(kept[:3], wide[:3], draws, strict=True):
        if narrow.dtype == torch.bfloat16:
            narrow.copy_(exact if drawn is None else round_by_chance(exact, drawn))


def compiled_move() -> Callable[..., None]:
    """`move` as one kernel, which holds for parameters of all shapes."""
    return torch.compile(move, fullgraph=True, dynamic=True, options=_ONE_KERNEL)


def draw(key: torch.Tensor, *place: torch.Tensor) -> torch.Tensor:
    """32 random bits (int32) for each entry of a part of a tensor. `key`: from 0 to 2^31. `place`: for each
    dim the part's indices in the whole tensor; all are int32.

    Indices that code of torch 2.11 compiles for a GPU counts itself have 64 bits, whatever their dtype.
    """
    drawn = key
    for index in place:
        drawn = _mixed(drawn.unsqueeze(-1) ^ index)
    return drawn


def _mixed(x: torch.Tensor) -> torch.Tensor:
    """As `dropout` mixes, in place. Products wrap around at 32 bits, which is four times as fast."""
    x.bitwise_xor_((x >> 16).bitwise_and_(0xFFFF)).mul_(0x21F0AAAD)
    x.bitwise_xor_((x >> 15).bitwise_and_(0x1FFFF)).mul_(0x735A2D97)
    return x.bitwise_xor_((x >> 15).bitwise_and_(0x1FFFF))


def round_by_chance(values: torch.Tensor, drawn: torch.Tensor) -> torch.Tensor:
    """fp32 numbers that bf16 holds: each value's neighbours, by the lower 16 bits of `drawn` (int32).

    16 bits are added below the last one that is kept, and the carry decides. It never reaches infinity: what
    is finite stays so. Infinities and (quiet) NaN stay.
    """
    bits = values.view(torch.int32)
    room = _LARGEST - (bits & 0x7FFFFFFF)  # below 0 for what is not finite
    noise = torch.minimum(drawn & 0xFFFF, room).clamp_(min=0)
    return noise.add_(bits).bitwise_and_(-0x10000).view(torch.float32)
