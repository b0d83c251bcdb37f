"""The bytes that a rank sends in a step to reduce gradients and to gather weights: arithmetic alone.

    all-gather and reduce-scatter among s ranks   (s - 1) / s of the whole tensor
    all-reduce among r ranks                      twice (r - 1) / r of it

That is the least any algorithm sends; a rank receives as much. The scalars of losses and norms are left out,
and so are the rows that pad a parameter whose rows the ranks do not divide.

Source: https://github.com/NVIDIA/nccl-tests/blob/master/doc/PERFORMANCE.md
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from fms_fsdp.config import NUM_BYTES, Precision
from fms_fsdp.config.axes import ParallelDims
from fms_fsdp.models.flops import num_params, num_params_by_unit
from fms_fsdp.models.variants import LlamaConfig

if TYPE_CHECKING:
    from fms_fsdp.predict.shares import Share


def bytes_sent(
    config: LlamaConfig, dims: ParallelDims, precision: Precision, accum: int, share: Share | None = None
) -> dict[str, int]:
    """Bytes that a rank sends in a step of `accum` micro-steps over the axes of FSDP; axes of one rank send
    none. `share`: what a rank of tp and pp holds of the model."""
    shards, replicas = dims.size("shard"), dims.dp_replicate
    blocks = config.num_layers * num_params_by_unit(config)["block"]
    whole = num_params(config)
    if share is not None:
        whole, blocks = share.params, share.layers * share.units["block"]
    gathered = whole
    if not dims.keeps_weights:  # blocks for the backward pass again; the head stays, the embedding need not
        gathered = accum * (whole + blocks)
    scattered = whole * (accum if dims.sync_each_micro_step else 1)
    in_group = NUM_BYTES[precision.compute] * gathered + NUM_BYTES[precision.reduce] * scattered
    reduced = 2 * NUM_BYTES[precision.reduce] * whole // shards
    sent = {
        "shard" if dims.cp > 1 else "dp_shard": in_group * (shards - 1) // shards,
        "dp_replicate": reduced * (replicas - 1) // replicas,
    }
    return {axis: size for axis, size in sent.items() if size}
