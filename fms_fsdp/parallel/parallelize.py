"""The parallel recipe: the order in which a model becomes a sharded, recomputing, compiled one.

    stage (meta) → precision → tp → cp → recomputation → compile per block → fully_shard → allocate → init

The order matters: a checkpointed block is compiled as a whole, and FSDP's hooks stay outside of the compiled
code. Initialisation comes last because each rank then fills only its shards. A rank of a pipeline has one or
more stages, each made so; without a pipeline the model is the only stage.
"""

from __future__ import annotations

from typing import cast

import torch

from fms_fsdp.config import ParallelConfig, Precision
from fms_fsdp.distributed.mesh import Mesh
from fms_fsdp.models.init import init_weights
from fms_fsdp.models.llama import Llama, build_model
from fms_fsdp.models.variants import LlamaConfig
from fms_fsdp.parallel.activation import apply_recomputation
from fms_fsdp.parallel.compile import apply_compile, compiles
from fms_fsdp.parallel.fsdp import apply_fsdp
from fms_fsdp.parallel.precision import apply_precision, cast_weights, sum_gradients_in_fp32


def parallelize(
    config: LlamaConfig,
    section: ParallelConfig,
    mesh: Mesh,
    *,
    device: torch.device,
    precision: Precision,
    seed: int,
) -> Llama:
    """The model of this rank, initialised and ready to train; the weights are the same on any mesh.

    Collective: every rank. It is built without memory, so no rank ever holds more than its shards, unless
    `low_cpu_fsdp` is off: then each rank fills a whole model on the CPU first. In a pipeline the model is one
    of this rank's stages.
    """

    def build(layers: range | None) -> Llama:
        return _build_stage(config, layers, section, mesh, device, precision, seed)

    if mesh.size("pp") == 1:
        return build(None)
    from fms_fsdp.parallel.pipeline import build_pipeline

    pipeline = build_pipeline(config, section, mesh, precision, device, build)
    return cast(Llama, pipeline)  # has a Llama's methods, and runs its stages as one


def _build_stage(
    config: LlamaConfig,
    layers: range | None,
    section: ParallelConfig,
    mesh: Mesh,
    device: torch.device,
    precision: Precision,
    seed: int,
) -> Llama:
    """The part of the model that holds these layers, or the whole model."""
    compiled = compiles(section, device)
    with torch.device("meta" if section.low_cpu_fsdp else "cpu"):
        model = build_model(config, layers)
    if not section.low_cpu_fsdp:
        init_weights(model, seed)
    cast_weights(model, precision)
    if mesh.device_mesh is None:
        apply_precision(model, precision)
    if precision.float8:
        from fms_fsdp.extras.float8 import apply_float8

        apply_float8(model, precision.float8)
    if mesh.size("tp") > 1:
        from fms_fsdp.parallel.tensor import apply_tp

        apply_tp(model, mesh, section)
    if mesh.size("cp") > 1:
        from fms_fsdp.parallel.context import apply_cp

        apply_cp(model, mesh, section)
    if section.recomputes in ("ops", "blocks"):
        apply_recomputation(model, section, compiled=compiled)
    if compiled:
        apply_compile(model, recompute=section.recomputes == "cheap")
    if mesh.device_mesh is not None:
        apply_fsdp(model, section, mesh, precision)
    if section.low_cpu_fsdp:
        model.to_empty(device="cpu" if section.cpu_offload else device)
        init_weights(model, seed)
    elif not section.cpu_offload:
        model.to(device)
    model.rope = model.rope.to(device)
    if precision.gradients != precision.weights:
        sum_gradients_in_fp32(model)
    if section.debug_sync_blocks:
        from fms_fsdp.extras.sync_blocks import sync_blocks

        sync_blocks(model, device)
    return model
