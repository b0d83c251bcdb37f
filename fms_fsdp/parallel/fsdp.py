"""Sharding with FSDP2: one unit per block or group of blocks, and the synchronisation and clipping of sharded
gradients.

    untied:  embed │ block 0 │ … │ block n-1 │ head (final norm, output weight, loss)  root: nothing
    tied:            block 0 │ … │ block n-1                                          root: embed, final norm
    A table of biases of distances is in the root.

    fsdp, hsdp   every micro-step: gather a unit in the forward and again in the backward pass, reduce-scatter
    zero2        gather once a step; every micro-step: reduce-scatter
    zero1        gather once a step, reduce-scatter once a step

A tied embedding is used at both ends, so it stays gathered in the root for the whole step. Under `ddp` every
shard group has one rank: the same code path and the same precision policy, with only an all-reduce left.
The policy gathers copies in the dtype of products (precision.py).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from itertools import groupby
from typing import cast

import torch
from torch import nn
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, OffloadPolicy, fully_shard

from fms_fsdp.config import ParallelConfig, Precision
from fms_fsdp.distributed.dtensor import global_norm, local_shards
from fms_fsdp.distributed.mesh import Mesh
from fms_fsdp.models.llama import Llama
from fms_fsdp.parallel.precision import fsdp_policy


def apply_fsdp(model: Llama, section: ParallelConfig, mesh: Mesh, precision: Precision) -> None:
    """Shards the model in place, unit by unit. Collective: every rank."""
    pinned = torch.cuda.is_available()
    shard = partial(
        fully_shard,
        mesh=mesh.fsdp_mesh,
        mp_policy=fsdp_policy(precision),
        offload_policy=CPUOffloadPolicy(pin_memory=pinned)
        if section.cpu_offload
        else OffloadPolicy(),
    )
    reshard, size = not mesh.dims.keeps_weights, section.blocks_per_group
    by_group = groupby(model.blocks, lambda layer: int(layer) // size)
    groups = [[*map(model.blocks.__getitem__, group)] for _, group in by_group]
    for group in groups:
        shard(group, reshard_after_forward=reshard)
    if not model.config.tie_embeddings:
        if model.embed is not None:
            shard(model.embed, reshard_after_forward=reshard)
            # a lookup's gradient needs no weight
            cast(FSDPModule, model.embed).set_unshard_in_backward(False)
        if model.head is not None:
            shard(model.head, reshard_after_forward=False)
    shard(model)
    _set_prefetch([cast(FSDPModule, group[0]) for group in groups], section.fsdp_prefetch)


def _set_prefetch(groups: list[FSDPModule], depth: int) -> None:
    """Every group gathers the `depth` groups that follow it, in the forward and in the backward pass."""
    for i, group in enumerate(groups):
        group.set_modules_to_forward_prefetch(groups[i + 1 : i + 1 + depth])
        group.set_modules_to_backward_prefetch(groups[max(0, i - depth) : i][::-1])


def set_gradient_sync(model: nn.Module, last_micro_step: bool, mesh: Mesh) -> None:
    """Call before each micro-step's forward: says what waits for the last micro-step.

    The all-reduce over replicas (hsdp, ddp) always waits. The reduce-scatter within a shard group does not,
    so that gradients accumulate in shards, unless `sync_each_micro_step` is off: then they accumulate whole.
    Weights that are kept are freed after the last micro-step.
    """
    if not isinstance(model, FSDPModule):
        return
    if mesh.size("dp_replicate") > 1:
        model.set_requires_all_reduce(last_micro_step)
    if not mesh.dims.sync_each_micro_step:
        model.set_requires_gradient_sync(last_micro_step)
    if mesh.dims.keeps_weights:
        model.set_reshard_after_backward(last_micro_step)


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """A context in which the model evaluates: forward passes without a backward pass. At its end the model
    trains again if it trained before, and gathered weights, which else a backward pass frees, are freed."""
    was_training = model.training
    model.eval()
    try:
        yield
    finally:
        model.train(was_training)
        free_gathered(model)


def free_gathered(model: nn.Module) -> None:
    """Frees the weights that FSDP has gathered and that no backward pass will free."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


@torch.no_grad()
def clip_grad_norm(
    parameters: Iterable[torch.Tensor],
    max_norm: float,
    mesh: Mesh,
    loss_scale: torch.Tensor | float = 1.0,
) -> torch.Tensor:
    """The `global_norm` of the gradients before clipping; larger ones are scaled in place. `max_norm` 0 clips
    none. The gradients hold a `loss_scale`, which is taken out of gradients and norm.

    What lies on the CPU is not touched where the factor is 1: that saves a pass over the gradients.
    """
    gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
    total = global_norm(gradients, mesh) / loss_scale
    if max_norm > 0 or isinstance(loss_scale, torch.Tensor):
        parts = local_shards(gradients)
        clip = (
            (max_norm / (total + 1e-6)).clamp(max=1.0) if max_norm > 0 else torch.ones_like(total)
        )
        factor = (clip / loss_scale).to(parts[0].device)
        if factor.device.type != "cpu" or factor != 1:
            torch._foreach_mul_(parts, factor)
    return total
