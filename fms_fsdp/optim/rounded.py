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
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from fms_fsdp.config.precision import Precision
from fms_fsdp.data.order.permute import derive_key, hash64
from fms_fsdp.models.init import local_part
from fms_fsdp.optim.shards import Pair, ShardOptimizer, State, Tensors, shards_of

_LARGEST = 0x7F7FFFFF  # the bits of the largest finite fp32 number


class RoundedAdamW(ShardOptimizer):
    """AdamW in fp32 over numbers that are kept in fp32 or bf16; with `decoupled` off, Adam.

        w = (1 − rate · decay) w      Adam: g = g + decay · w
        m = β1 m + (1 − β1) g      v = β2 v + (1 − β2) g²
        w = w − rate / (1 − β1ᵗ) · m / (√v / √(1 − β2ᵗ) + ε)

    Every operation rounds once, so that its bits do not depend on where shards begin. `names`: those of the
    parameters. Gradients are fp32 or bf16. Source: Loshchilov and Hutter, https://arxiv.org/abs/1711.05101.
    """

    kept = ("exp_avg", "exp_avg_sq")

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
    ) -> None:
        self._seed, self._decoupled = seed, decoupled
        self._by_chance = precision.stochastic_rounding
        self._dtype = torch.bfloat16 if precision.state == "bf16" else torch.float32
        self._hashes = {parameter: hash64(name) for name, parameter in names.items()}
        super().__init__(groups, lr=lr, betas=betas, eps=eps, weight_decay=weight_decay)

    def new_state(self, parameter: torch.Tensor, group: dict[str, Any]) -> State:
        return {name: torch.zeros_like(parameter, dtype=self._dtype) for name in self.kept}

    def update(self, group: dict[str, Any], step: int, parameters: Tensors, states: list[State]) -> None:
        for parameter, state in zip(parameters, states, strict=True):
            kept = shards_of((parameter, state["exp_avg"], state["exp_avg_sq"], parameter.grad))
            key = derive_key(self._seed, step, self._hashes[parameter]) >> 33
            first, *others = (place.start for place in local_part(parameter)[1])
            at_once = 1 << (18 if kept[0].device.type == "cpu" else 25)  # entries that are in fp32 at a time
            rows = max(1, at_once // max(1, math.prod(kept[0].shape[1:])))
            for parts in zip(*(torch.split(tensor, rows) for tensor in kept), strict=True):
                wide = [part.float() for part in parts]  # fp32 ones are changed in place
                self._move(group, step, *wide)
                self._write(parts[:3], wide[:3], key, (first, *others))
                first += rows

    def _move(self, group: dict[str, Any], step: int, *wide: torch.Tensor) -> None:
        """The formulas above; the gradient becomes the update."""
        weight, mean, square, gradient = wide
        beta1, beta2 = group["betas"]
        if self._decoupled:
            weight.mul_(1 - group["lr"] * group["weight_decay"])
        else:
            gradient.add_(weight * group["weight_decay"])
        mean.mul_(beta1).add_(gradient * (1 - beta1))
        square.mul_(beta2).add_(gradient.square_().mul_(1 - beta2))
        root = torch.sqrt(square, out=gradient).div_(math.sqrt(1 - beta2**step)).add_(group["eps"])
        weight.sub_(torch.div(mean, root, out=gradient).mul_(group["lr"] / (1 - beta1**step)))

    def _write(self, kept: Sequence[torch.Tensor], exact: Tensors, key: int, offset: Sequence[int]) -> None:
        """Writes what is kept in bf16; the moments share a draw, whose halves they take."""
        draws: tuple[torch.Tensor | None, ...] = (None, None, None)
        if self._by_chance:
            of_weight = draw(key, offset, exact[0])
            of_moments = _mixed(of_weight.clone())
            draws = (of_weight, of_moments, of_moments >> 16)
        for narrow, wide, drawn in zip(kept, exact, draws, strict=True):
            if narrow.dtype == torch.bfloat16:
                narrow.copy_(wide if drawn is None else round_by_chance(wide, drawn))


def draw(key: int, offset: Sequence[int], like: torch.Tensor) -> torch.Tensor:
    """32 random bits (int32) for each entry of a part that begins at `offset` in the whole tensor; `key` <
    2^31."""
    drawn = torch.full((), key, dtype=torch.int32, device=like.device)
    for first, size in zip(offset, like.shape, strict=True):
        index = torch.arange(first, first + size, dtype=torch.int32, device=like.device)
        drawn = _mixed(drawn.unsqueeze(-1) ^ index)
    return drawn


def _mixed(x: torch.Tensor) -> torch.Tensor:
    """As `models.dropout` mixes, in place. Products wrap around at 32 bits, which is four times as fast."""
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
