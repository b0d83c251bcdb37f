"""Launches that are resolved without their machine and their data."""

from __future__ import annotations

import torch

from fms_fsdp.config import FP32, BatchPlan, Precision, TrainConfig
from fms_fsdp.config.axes import ParallelDims
from fms_fsdp.models.variants import VARIANTS, LlamaConfig
from fms_fsdp.runtime import World
from fms_fsdp.spec.data import Inputs
from fms_fsdp.spec.machine import Machine
from fms_fsdp.spec.origin import Origin
from fms_fsdp.spec.resolve import Spec, resolve

ALONE, ONE_ROW, ONE_PROCESS, FRESH = ParallelDims("none"), BatchPlan(1, 1, 1), World(0, 0, 1, 1), Origin()


def resolved(
    cfg: TrainConfig,
    *,
    model: LlamaConfig = VARIANTS["tiny"],
    dims: ParallelDims = ALONE,
    batch: BatchPlan = ONE_ROW,
    world: World = ONE_PROCESS,
    precision: Precision = FP32,
    device: str = "cpu",
    optimizer_bytes: int = 0,
    origin: Origin = FRESH,
) -> Spec:
    """The spec of a launch on synthetic data, on a machine of which nothing is asked."""
    machine = Machine(world, torch.device(device), dims, batch, precision)
    return resolve(cfg, machine, Inputs(None, model, optimizer_bytes, (), None, {}), origin)
