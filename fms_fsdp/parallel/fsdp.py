"""Sharding with FSDP2: one unit per block, and what the training loop needs to know about sharded gradients.

    untied:  embed │ block 0 │ … │ block n-1 │ head (final norm, output weight, loss)        root: nothing
    tied:            block 0 │ … │ block n-1                                                 root: embed, final norm

A tied embedding is used at both ends, so it stays gathered in the root for the whole step. Under `ddp` every shard group has one rank: the same
code path and the same precision policy, with only an all-reduce left. Weights and optimizer state are fp32; the policy gathers bf16 copies.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import cast

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecisionPolicy,
    OffloadPolicy,
    fully_shard,
)
from torch.distributed.tensor import DTensor

from fms_fsdp.config import ParallelConfig
from fms_fsdp.mesh import Layout
from fms_fsdp.models.llama import Llama


def precision_policy(section: ParallelConfig, mixed_precision: bool) -> MixedPrecisionPolicy:
    """bf16 weights for compute and gradients reduced in `reduce_dtype`; inputs are not cast, so the rotary table stays fp32."""
    reduce_dtype = torch.bfloat16 if section.reduce_dtype == "bf16" else torch.float32
    return MixedPrecisionPolicy(
        param_dtype=torch.bfloat16 if mixed_precision else None,
        reduce_dtype=reduce_dtype,
        cast_forward_inputs=False,
    )


def apply_fsdp(
    model: Llama, section: ParallelConfig, layout: Layout, mesh: DeviceMesh, *, mixed_precision: bool
) -> None:
    """Shards the model in place, unit by unit. Collective: every rank."""
    policy = precision_policy(section, mixed_precision)
    offload = (
        CPUOffloadPolicy(pin_memory=torch.cuda.is_available()) if section.cpu_offload else OffloadPolicy()
    )
    reshard = section.reshard_after_forward and layout.dp_shard > 1
    for block in model.blocks:
        fully_shard(block, mesh=mesh, mp_policy=policy, offload_policy=offload, reshard_after_forward=reshard)
    if not model.config.tie_embeddings:
        fully_shard(
            model.embed, mesh=mesh, mp_policy=policy, offload_policy=offload, reshard_after_forward=reshard
        )
        cast(FSDPModule, model.embed).set_unshard_in_backward(False)  # a lookup's gradient needs no weight
        fully_shard(
            model.head, mesh=mesh, mp_policy=policy, offload_policy=offload, reshard_after_forward=False
        )
    fully_shard(model, mesh=mesh, mp_policy=policy, offload_policy=offload)
    _set_prefetch(cast("list[FSDPModule]", list(model.blocks)), section.fsdp_prefetch)


def _set_prefetch(blocks: list[FSDPModule], depth: int) -> None:
    """Every block gathers the `depth` blocks that follow it, in the forward and in the backward pass."""
    if depth == 0:
        return
    for i, block in enumerate(blocks):
        block.set_modules_to_forward_prefetch(blocks[i + 1 : i + 1 + depth])
        block.set_modules_to_backward_prefetch(blocks[max(0, i - depth) : i][::-1])


def set_gradient_sync(model: nn.Module, last_micro_step: bool, layout: Layout) -> None:
    """Call before each micro-step's forward: the all-reduce over replicas (hsdp, ddp) waits for the last micro-step.

    The reduce-scatter within a shard group runs every micro-step, so that gradients accumulate in fp32 shards, not in whole copies.
    """
    if layout.dp_replicate > 1:
        cast(FSDPModule, model).set_requires_all_reduce(last_micro_step)


def reshard(model: nn.Module) -> None:
    """Frees gathered weights that only a backward pass would free: after forward passes without one."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


@torch.no_grad()
def global_norm(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """The 2-norm of all tensors together, an fp32 scalar alike on all ranks, without a host sync (collective under sharding: every rank).

    Assumes what FSDP2 does: all on one mesh, sharded over its last axis, replicated over the others.
    """
    total: torch.Tensor = torch.linalg.vector_norm(
        torch.stack(list(torch._foreach_norm(local_shards(tensors), dtype=torch.float32)))
    )
    if isinstance(first := tensors[0], DTensor):
        mesh = first.device_mesh
        squared = total.square().to(
            mesh.device_type
        )  # under CPU offload the shards live elsewhere than the process group
        dist.all_reduce(squared, group=mesh.get_group(mesh.ndim - 1))
        total = squared.sqrt()
    return total


def local_shards(tensors: Iterable[torch.Tensor]) -> list[torch.Tensor]:
    """This rank's part of each tensor, which shares its memory."""
    return [tensor.to_local() if isinstance(tensor, DTensor) else tensor for tensor in tensors]


@torch.no_grad()
def clip_grad_norm(parameters: Iterable[torch.Tensor], max_norm: float) -> torch.Tensor:
    """The `global_norm` of the gradients before clipping; they are scaled in place. `max_norm` 0 only measures."""
    gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
    total = global_norm(gradients)
    if max_norm > 0:
        shards = local_shards(gradients)
        torch._foreach_mul_(shards, (max_norm / (total + 1e-6)).clamp(max=1.0).to(shards[0].device))
    return total
