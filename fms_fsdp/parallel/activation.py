"""Recomputation: what the backward pass computes again, so that the forward pass need not keep it.

    blocks   chosen blocks keep their input only; of segments of several blocks the first one
    ops      every block keeps its input and the results of some operations

The third way, `cheap`, is the compiler's (compile.py).
Source: Chen et al. 2016, "Training deep nets with sublinear memory cost", https://arxiv.org/abs/1604.06174.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Sequence
from fractions import Fraction
from functools import partial
from itertools import groupby
from typing import Any

import torch
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
    CheckpointImpl,
    checkpoint_wrapper,
)
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

from fms_fsdp.config import ParallelConfig
from fms_fsdp.models.flops import keeps_product
from fms_fsdp.models.llama import Call, Llama, in_turn

# a warning of what we do on purpose: what a block computes again has no operation in place
logging.getLogger("torch._higher_order_ops.wrap").setLevel(logging.ERROR)
_ATEN = torch.ops.aten
_PRODUCTS = {_ATEN.mm.default, _ATEN.addmm.default, _ATEN._scaled_mm.default}
_ATTENTION = {
    _ATEN._scaled_dot_product_flash_attention.default,
    _ATEN._scaled_dot_product_flash_attention_for_cpu.default,
    _ATEN._scaled_dot_product_efficient_attention.default,
    _ATEN._scaled_dot_product_cudnn_attention.default,
    torch.ops.higher_order.flex_attention,
}


def select_blocks(num_blocks: int, share: Fraction, segment: int = 1) -> list[bool]:
    """Whether each block recomputes: `floor(num_blocks * share)` of them, at least one, evenly spaced.

    Block i is chosen where i * share passes a whole number; 1/k chooses every k-th. 1/2 of 6: the 2nd, 4th
    and 6th. Blocks of a `segment`, so many in a row, are chosen together.
    """
    count = -(-num_blocks // segment)
    share = max(share, Fraction(1, count))
    chosen = [int((i + 1) * share) > int(i * share) for i in range(count)]
    return [chosen[layer // segment] for layer in range(num_blocks)]


def apply_recomputation(model: Llama, section: ParallelConfig, *, compiled: bool) -> None:
    """Wraps the chosen blocks in place, for `blocks` and `ops`.

    Blocks that will be `compiled` get a policy also where nothing is kept: without one torch 2.11 keeps what
    products in autograd functions of our own give.
    """
    settings: dict[str, Any] = {"preserve_rng_state": False}  # the model draws no random numbers
    kept = section.kept_ops()
    if section.recomputes == "ops" or compiled:
        contexts: Callable[..., Any] = create_selective_checkpoint_contexts
        settings["context_fn"] = lambda: contexts(_policy(kept))
    chosen = select_blocks(model.config.num_layers, section.recomputed_share, section.segment)
    if section.segment > 1:
        model.pass_blocks = partial(_by_segments, size=section.segment, chosen=chosen)
        return
    for layer, block in list(model.blocks.items()):
        if chosen[int(layer)]:
            kind = CheckpointImpl.NO_REENTRANT
            model.blocks[layer] = checkpoint_wrapper(block, checkpoint_impl=kind, **settings)


def _by_segments(
    x_BSD: torch.Tensor, calls: Sequence[Call], size: int, chosen: list[bool]
) -> torch.Tensor:
    """x_BSD behind the blocks, `size` of which share one recomputation; the last segment, or that of a stage
    of a pipeline, may have fewer. FSDP gathers a segment's blocks together (`blocks_per_group`): within the
    recomputation its hooks find them gathered, as its backward pass has begun."""
    again = partial(checkpoint, in_turn, use_reentrant=False, preserve_rng_state=False)
    for place, segment in groupby(calls, lambda call: int(call[0]) // size):
        x_BSD = (again if chosen[place * size] else in_turn)(x_BSD, list(segment))
    return x_BSD


def _policy(kept: Collection[str]) -> Callable[..., CheckpointPolicy]:
    """A policy that decides for each operation, in the order of the pass, whether the result is kept.

    Of the products every second one: k, o and up of q, k, v, o, gate, up, down; in long rows only k and o.
    The result of the last one is not needed by the backward pass.
    """
    num_products = {False: 0, True: 0}  # by whether it is the recomputation

    def policy(context: Any, operation: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        keep = "attention" in kept and operation in _ATTENTION
        if operation in _PRODUCTS:
            num_products[context.is_recompute] += 1
            keep = keeps_product(kept, num_products[context.is_recompute] - 1)
        return CheckpointPolicy.MUST_SAVE if keep else CheckpointPolicy.PREFER_RECOMPUTE

    return policy
