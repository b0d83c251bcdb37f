"""Initial weights: a function of (seed, parameter name, row) alone, so the same bits on any number of ranks
and in every layout.

    parameter ── rows 0..255 ── generator(seed, name, 0) ─┐
              ── rows 256..511 ─ generator(seed, name, 1) ─┼─ a rank draws only the blocks that hold its rows
              ── …                                         ┘

Values are drawn on the CPU in fp32, whatever the device, and copied; besides the shard itself, only
a few row blocks are in memory.
"""

from __future__ import annotations

import hashlib
import math
from concurrent.futures import ThreadPoolExecutor

import torch

from fms_fsdp.distributed.dtensor import local_shard, shard_slices
from fms_fsdp.models.llama import Llama

_BLOCK_ROWS = 256
_WRAPPER_PREFIXES = ("_recomputed.", "_orig_mod.")


def clean_name(name: str) -> str:
    """Returns a parameter's name without the prefixes that activation checkpointing and compilation add."""
    for prefix in _WRAPPER_PREFIXES:
        name = name.replace(prefix, "")
    return name


@torch.no_grad()
def init_weights(model: Llama, seed: int) -> None:
    """Fills every parameter in place: norm weights 1, biases 0, matrices normal with `init_std`; the
    matrices that write to the residual stream (o_proj, down_proj) with `init_std / sqrt(2 num_layers)`,
    if `residual_scaled_init`. A user's tensors of more dims count as matrices.

    Works on plain and sharded (DTensor) parameters; not collective. Source: Radford et al. 2019
    (GPT-2), section 2.3, for the depth scaling.
    """
    config = model.config
    depth = 2 * config.num_layers if config.residual_scaled_init else 1
    for full_name, parameter in model.named_parameters():
        name = clean_name(full_name)
        if name.endswith("bias"):
            parameter.zero_()
        elif parameter.ndim < 2:
            parameter.fill_(1.0)
        else:
            residual = name.endswith(("o_proj.weight", "down_proj.weight"))
            std = config.init_std / math.sqrt(depth) if residual else config.init_std
            _fill_normal(parameter, std, f"{seed}:{name}")


def _fill_normal(parameter: torch.Tensor, std: float, key: str) -> None:
    """Fills the rows of this rank, and its slices of further dims, with normal values, drawn block by
    block on all threads of torch."""
    local = local_shard(parameter).detach()  # no_grad does not reach the pool's threads
    rows, *others = shard_slices(parameter)
    num_rows, *other_sizes = parameter.shape
    first_row = rows.start

    def fill(block: int) -> None:
        digest = hashlib.blake2b(f"{key}:{block}".encode(), digest_size=8).digest()
        generator = torch.Generator().manual_seed(int.from_bytes(digest, "big"))
        start = block * _BLOCK_ROWS
        size = min(_BLOCK_ROWS, num_rows - start)
        values = torch.empty(size, *other_sizes, device="cpu")
        values.normal_(0.0, std, generator=generator)
        low = max(first_row, start)
        high = min(first_row + len(local), start + len(values))
        drawn = values[low - start : high - start]
        local[low - first_row : high - first_row].copy_(drawn[:, *others])

    if local.numel():
        blocks = range(first_row // _BLOCK_ROWS, -(-(first_row + len(local)) // _BLOCK_ROWS))
        with ThreadPoolExecutor(torch.get_num_threads()) as pool:
            list(pool.map(fill, blocks))
