"""Dropout whose masks are a function of the place of each number, not of a generator.

    (seed, step, row) ── row_keys ── layer_keys ── place ── position ── channel ── kept or not

So they are the same on any number of devices, compiled or not, and when a block is computed again.
Keys are 32-bit numbers in int64 tensors: their products stay below 2^63, so nothing ever overflows.

Source: Srivastava et al. 2014 (dropout); https://github.com/skeeto/hash-prospector (the mixing).
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from torch import nn

from fms_fsdp.data.permute import derive_key, mix64

_MASK = 0xFFFFFFFF


def row_keys(seed: int, step: int, first_row: int, num_rows: int) -> torch.Tensor:
    """A key for each of `num_rows` rows of the global batch, from `first_row` on: (B,), on the CPU."""
    rows = np.arange(first_row, first_row + num_rows, dtype=np.uint64)
    keys = mix64(rows ^ np.uint64(derive_key(seed, step))) >> np.uint64(32)
    return torch.from_numpy(keys.astype(np.int64))


def layer_keys(keys_B: torch.Tensor, layer: int) -> torch.Tensor:
    """The keys of one layer. They are made outside of its block: compiled code is shared among layers."""
    return _mixed(keys_B + layer + 1)


def _mixed(x: torch.Tensor) -> torch.Tensor:
    x = ((x ^ (x >> 16)) * 0x21F0AAAD) & _MASK
    x = ((x ^ (x >> 15)) * 0x735A2D97) & _MASK
    return x ^ (x >> 15)


class Dropout(nn.Module):
    """x, of which a share `rate` is 0 and the rest larger by 1 / (1 - rate); without keys, x.

    `place` tells the uses within a layer apart. `parts`: for a dim of which x is this rank's part, the
    function from the size of the part to its indices in the whole, as ranges one behind the other.
    """

    def __init__(self, rate: float, place: int) -> None:
        super().__init__()
        self.rate, self.place = rate, place
        self.parts: dict[int, Callable[[int], list[range]]] = {}

    def forward(self, x: torch.Tensor, keys_B: torch.Tensor | None) -> torch.Tensor:
        if keys_B is None or not self.rate:
            return x
        drawn = _mixed(keys_B ^ (self.place << 16))
        for dim, size in enumerate(x.shape[1:], 1):
            indices = self.parts[dim](size) if dim in self.parts else [range(size)]
            index = torch.cat(
                [torch.arange(r.start + 1, r.stop + 1, device=x.device) for r in indices]
            )
            drawn = _mixed(drawn.unsqueeze(-1) ^ _mixed(index))
        return torch.where(drawn >= int(self.rate * 2**32), x * (1 / (1 - self.rate)), 0.0)
