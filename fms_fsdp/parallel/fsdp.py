"""Sharding with FSDP2: one unit per block, and what the training loop needs to know about sharded gradients.

    untied:  embed │ block 0 │ … │ block n-1 │ head (final norm, output weight, loss)  root: nothing
    tied:            block 0 │ … │ block n-1                                          root: embed, final norm

A tied embedding is used at both ends, so it stays gathered in the root for the whole step. Under `ddp` every
shard group has one rank: the same code path and the same precision policy, with only an all-reduce left.
Weights and optimizer state are fp32; the policy gathers bf16 copies.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import partial
from typing import cast

import torch
from torch import nn
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, OffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor

from fms_fsdp.config import ParallelConfig
from fms_fsdp.mesh import Mesh
from fms_fsdp.models.llama import Llama
from fms_fsdp.parallel.precision import fsdp_policy


def apply_fsdp(model: Llama, section: ParallelConfig, mesh: Mesh, *, mixed_precision: bool) -> None:
    """Shards the model in place, unit by unit. Collective: every rank."""
    pinned = torch.cuda.is_available()
    shard = partial(
        fully_shard,
        mesh=mesh.device_mesh,
        mp_policy=fsdp_policy(section, mixed_precision),
        offload_policy=CPUOffloadPolicy(pin_memory=pinned) if section.cpu_offload else OffloadPolicy(),
    )
    reshard = section.reshard_after_forward and mesh.size("dp_shard") > 1
    for block in model.blocks.values():
        shard(block, reshard_after_forward=reshard)
    if not model.config.tie_embeddings:
        if model.embed is not None:
            shard(model.embed, reshard_after_forward=reshard)
            # a lookup's gradient needs no weight
            cast(FSDPModule, model.embed).set_unshard_in_backward(False)
        if model.head is not None:
            shard(model.head, reshard_after_forward=False)
    shard(model)
    _set_prefetch(cast("list[FSDPModule]", list(model.blocks.values())), section.fsdp_prefetch)


def _set_prefetch(blocks: list[FSDPModule], depth: int) -> None:
    """Every block gathers the `depth` blocks that follow it, in the forward and in the backward pass."""
    if depth == 0:
        return
    for i, block in enumerate(blocks):
        block.set_modules_to_forward_prefetch(blocks[i + 1 : i + 1 + depth])
        block.set_modules_to_backward_prefetch(blocks[max(0, i - depth) : i][::-1])


def set_gradient_sync(model: nn.Module, last_micro_step: bool, mesh: Mesh) -> None:
    """Call before each micro-step's forward: the all-reduce over replicas (hsdp, ddp) waits for the last
    micro-step.

    The reduce-scatter within a shard group runs every micro-step, so that gradients accumulate in fp32
    shards, not in whole copies.
    """
    if mesh.size("dp_replicate") > 1:
        cast(FSDPModule, model).set_requires_all_reduce(last_micro_step)


def reshard(model: nn.Module) -> None:
    """Frees gathered weights that only a backward pass would free: after forward passes without one."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


@torch.no_grad()
def global_norm(tensors: Sequence[torch.Tensor], mesh: Mesh) -> torch.Tensor:
    """The 2-norm of all tensors together, an fp32 scalar alike on all ranks, without a host sync (collective:
    every rank).

    Exact on any mesh: a part that several ranks of one replica hold counts once, and one all-reduce adds
    up the squares of all parts.
    """
    by_copies: dict[int, list[torch.Tensor]] = {}
    for tensor in tensors:
        by_copies.setdefault(num_copies(tensor, mesh), []).append(tensor)
    norms = {copies: _local_norm(local_shards(some)) for copies, some in by_copies.items()}
    if mesh.device_mesh is None:
        return norms[1]
    # under CPU offload the shards lie elsewhere than the process group works
    device = mesh.device_mesh.device_type
    squared = sum(
        (norm.square().to(device) / copies for copies, norm in norms.items()), torch.zeros((), device=device)
    )
    return mesh.sum(squared, "replica").sqrt()


def num_copies(tensor: torch.Tensor, mesh: Mesh) -> int:
    """How many ranks of one replica of the model, and of one stage of it, hold this part of the tensor."""
    shards = 1
    if isinstance(tensor, DTensor):
        for size, placement in zip(tensor.device_mesh.shape, tensor.placements, strict=True):
            shards *= size if placement.is_shard() else 1
    return mesh.size("replica") // mesh.size("pp") // shards


def _local_norm(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    norms = torch._foreach_norm(list(tensors), dtype=torch.float32)
    total: torch.Tensor = torch.linalg.vector_norm(torch.stack(list(norms)))
    return total


def local_shards(tensors: Iterable[torch.Tensor]) -> list[torch.Tensor]:
    """This rank's part of each tensor, which shares its memory."""
    return [tensor.to_local() if isinstance(tensor, DTensor) else tensor for tensor in tensors]


@torch.no_grad()
def clip_grad_norm(parameters: Iterable[torch.Tensor], max_norm: float, mesh: Mesh) -> torch.Tensor:
    """The `global_norm` of the gradients before clipping; they are scaled in place. `max_norm` 0 only
    measures."""
    gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
    total = global_norm(gradients, mesh)
    if max_norm > 0:
        shards = local_shards(gradients)
        torch._foreach_mul_(shards, (max_norm / (total + 1e-6)).clamp(max=1.0).to(shards[0].device))
    return total
