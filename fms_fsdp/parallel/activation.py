"""Activation checkpointing: which blocks keep only their input, and recompute the rest for the gradient."""

from __future__ import annotations

from fractions import Fraction

from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import CheckpointImpl, checkpoint_wrapper

from fms_fsdp.models.llama import Llama


def select_blocks(num_blocks: int, share: Fraction) -> list[bool]:
    """For each block whether it recomputes: `floor(num_blocks * share)` of them, at least one, evenly spaced.

    Block i is chosen where i * share passes a whole number; 1/k chooses every k-th. 1/2 of 6: the 2nd, 4th
    and 6th.
    """
    share = max(share, Fraction(1, num_blocks))
    return [int((i + 1) * share) > int(i * share) for i in range(num_blocks)]


def apply_activation_checkpointing(model: Llama, share: Fraction) -> None:
    """Wraps the chosen blocks in place."""
    chosen = select_blocks(len(model.blocks), share)
    for layer, recomputes in zip(list(model.blocks), chosen, strict=True):
        if recomputes:
            model.blocks[layer] = checkpoint_wrapper(
                model.blocks[layer],
                checkpoint_impl=CheckpointImpl.NO_REENTRANT,
                preserve_rng_state=False,  # the model draws no random numbers
            )
