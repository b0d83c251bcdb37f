"""The parallel recipe: the order in which a model becomes a sharded, recomputing, compiled one.

    build (meta) → activation checkpointing → compile per block → fully_shard → allocate → initialise

The order matters: a checkpointed block is compiled as a whole, and FSDP's hooks stay outside of the compiled code. Initialisation comes last
because each rank then fills only its shards.
"""

from __future__ import annotations

import torch
from torch.distributed.device_mesh import DeviceMesh

from fms_fsdp.config import ParallelConfig, parse_selective_checkpointing
from fms_fsdp.mesh import Layout
from fms_fsdp.models.init import init_weights
from fms_fsdp.models.llama import Llama
from fms_fsdp.models.variants import LlamaConfig
from fms_fsdp.parallel.activation import apply_activation_checkpointing
from fms_fsdp.parallel.compile import apply_compile
from fms_fsdp.parallel.fsdp import apply_fsdp


def check_attention(attn_impl: str, device: torch.device) -> None:
    """Raises ValueError for a backend of attention that the device lacks."""
    if device.type == "cpu" and attn_impl == "efficient":
        raise ValueError("--attn_impl (efficient) exists on GPU only; choose one of: auto, flash, math")


def parallelize(
    config: LlamaConfig,
    section: ParallelConfig,
    layout: Layout,
    mesh: DeviceMesh | None,
    *,
    device: torch.device,
    mixed_precision: bool,
    seed: int,
) -> Llama:
    """The model of this rank, initialised and ready to train; its weights are the same whatever the layout. Collective: every rank.

    Under `none` no process group is needed. `low_cpu_fsdp` builds on the meta device, so no rank ever holds a whole sharded model.
    """
    check_attention(config.attn_impl, device)
    with torch.device("meta" if section.low_cpu_fsdp else "cpu"):
        model = Llama(config)
    model.compute_dtype = torch.bfloat16 if mixed_precision else torch.float32
    if not section.low_cpu_fsdp:
        init_weights(model, seed)
    if section.fsdp_activation_checkpointing:
        apply_activation_checkpointing(model, parse_selective_checkpointing(section.selective_checkpointing))
    if section.use_torch_compile:
        apply_compile(model)
    if mesh is not None:
        apply_fsdp(model, section, layout, mesh, mixed_precision=mixed_precision)
    if section.low_cpu_fsdp:
        model.to_empty(device="cpu" if section.cpu_offload else device)
        model.rope = model.rope.to(device)
        init_weights(model, seed)
    elif section.cpu_offload:
        model.rope = model.rope.to(device)
    else:
        model.to(device)
    return model
