"""Products in bf16 on weights that are rounded up or down by chance, once a step; the fp32 weights stay.

    a step begins    weight = fp32 weight rounded by chance, in place; its lower 16 bits are laid aside
    micro-steps      casting the weight to bf16 loses nothing: every gather and every cast sees the same bits
    before the move  weight = the fp32 weight again

The optimizer, checkpoints, evaluations and exports see the fp32 weights, which an evaluation rounds to
nearest. Rounded to nearest in training too, products see nothing of a weight that has moved by less than
1/512 of itself; rounded by chance, they see it on average. What is drawn depends on the seed, the step, and
the name and the place of an entry in the whole tensor, so it is the same on any number of ranks, and after a
resume.

Source: `mixed_precisionSR` of AWS NeuronX Distributed,
https://awsdocs-neuron.readthedocs-hosted.com/en/latest/libraries/nxd-training/.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import nn

from fms_fsdp.data.order.permute import derive_key, hash64
from fms_fsdp.extras.rounded import draw, round_by_chance
from fms_fsdp.models.init import clean_name
from fms_fsdp.sharded import local_part, place_of

_AT_ONCE = {"cpu": 1 << 18}  # entries whose draws exist at a time
Change = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], None]


class RoundedCopy:
    """The weights of a model, fp32, which it can hide behind copies that bf16 can hold. `lower`: what it lays
    aside, int16, 2 bytes for each entry of this rank."""

    def __init__(self, model: nn.Module, seed: int) -> None:
        self._seed = seed
        named = {clean_name(name): p for name, p in model.named_parameters() if p.requires_grad}
        self._parameters = {hash64(f"copy of {name}"): parameter for name, parameter in named.items()}
        self._lower = {
            key: torch.empty_like(local_part(parameter), dtype=torch.int16, requires_grad=False)
            for key, parameter in self._parameters.items()
        }

    @contextmanager
    def of_step(self, step: int) -> Iterator[None]:
        """A context in which the weights are the rounded ones of this step."""
        self._change(step, _hide)
        try:
            yield
        finally:
            self._change(step, _show)

    @torch.no_grad()
    def _change(self, step: int, change: Change) -> None:
        """Calls `change` with pieces of each weight, their lower bits, and what is drawn for them."""
        for key, parameter in self._parameters.items():
            part, lower = local_part(parameter), self._lower[key]
            device = part.device
            place = [
                torch.arange(dim.start, dim.stop, dtype=torch.int32, device=device)
                for dim in place_of(parameter)
            ]
            of_step = torch.full(
                (), derive_key(self._seed, step, key) >> 33, dtype=torch.int32, device=device
            )
            rows = max(1, _AT_ONCE.get(device.type, 1 << 25) // max(1, math.prod(part.shape[1:])))
            pieces = (torch.split(tensor, rows) for tensor in (part, lower, place[0]))
            for weight, low, index in zip(*pieces, strict=True):
                if weight.numel():
                    change(weight, low, draw(of_step, index, *place[1:]))


def _hide(weight: torch.Tensor, lower: torch.Tensor, drawn: torch.Tensor) -> None:
    lower.copy_(weight.view(torch.int32))  # of 32 bits the lower 16 stay
    weight.copy_(round_by_chance(weight, drawn))


def _show(weight: torch.Tensor, lower: torch.Tensor, drawn: torch.Tensor) -> None:
    """The inverse, to the bit: the same draw tells whether there was a carry. Numbers that are not finite, or
    above the largest of bf16, which a training does not survive, may come back as others."""
    low = lower.int().bitwise_and_(0xFFFF)
    carry = drawn.bitwise_and_(0xFFFF).add_(low).bitwise_and_(0x10000)
    weight.view(torch.int32).sub_(carry).add_(low)
