"""Trains a small model in any layout of the axes, so that tests can compare it with one process.

`compare(world, cases)` starts one group of ranks, trains every case in it, one after the other, and compares
each with the same case on one process.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from fms_fsdp.config import FP32, OptimConfig, ParallelConfig, Precision, PrecisionConfig
from fms_fsdp.data.batch import IGNORED_LABEL, Batch
from fms_fsdp.distributed.dims import plan_dims
from fms_fsdp.distributed.dtensor import local_shard, shard_slices
from fms_fsdp.distributed.mesh import Mesh
from fms_fsdp.distributed.runtime import gather_objects
from fms_fsdp.distributed.world import World
from fms_fsdp.metrics.interval import IntervalMetrics
from fms_fsdp.metrics.timer import PhaseTimer
from fms_fsdp.models.config import TransformerConfig
from fms_fsdp.models.init import clean_name
from fms_fsdp.optim.loss_scale import LossScale
from fms_fsdp.optim.optimizers import build_optimizers
from fms_fsdp.optim.stochastic_rounding import RoundedWeights
from fms_fsdp.parallel.parallelize import parallelize
from fms_fsdp.state import TrainState
from fms_fsdp.train import StepSettings, train_step
from tests.distributed.launch import run_ranks

SEQ, VOCAB, ROWS = 16, 131, 8
SHAPE = TransformerConfig(4, 64, 96, 8, 4, VOCAB, max_seq_len=SEQ)
CPU = torch.device("cpu")


@dataclass(frozen=True)
class Case:
    """`flags`: of ParallelConfig, in the layout; `common`: of ParallelConfig on one process too. `shape`:
    changes of the model. `accum`: micro-steps. `documents`: attention stays within a document."""

    flags: Mapping[str, Any]
    common: Mapping[str, Any] = field(default_factory=dict)
    shape: Mapping[str, Any] = field(default_factory=dict)
    optim: Mapping[str, Any] = field(default_factory=dict)
    precision: Precision = FP32
    accum: int = 1
    steps: int = 3
    documents: bool = False
    loss_abs: float = 1e-5
    norm_rel: float = 1e-4


@dataclass(frozen=True)
class Trained:
    losses: list[float]
    norms: list[float]
    weights: dict[str, str]  # parameter → digest of its initial values


def rows_of(step: int, config: TransformerConfig) -> Batch:
    """The global batch of a step: masked labels, unevenly, and documents of uneven lengths."""
    generator = torch.Generator().manual_seed(step)
    tokens = torch.randint(0, config.vocab_size, (ROWS, SEQ), generator=generator)
    labels = tokens.roll(-1, 1)
    for row in range(ROWS):
        labels[row, : row % 5] = IGNORED_LABEL
    ids = torch.zeros(ROWS, SEQ, dtype=torch.int32)
    for row in range(ROWS):
        for cut in {3 + row % 4, 7, 12 - row % 3}:
            ids[row, cut:] += 1
    positions = torch.stack(
        [
            torch.cat(
                [torch.arange(n) for n in part.unique_consecutive(return_counts=True)[1].tolist()]
            )
            for part in ids
        ]
    ).int()
    return Batch(tokens, labels, positions, ids)


def mesh_of(section: ParallelConfig) -> Mesh:
    size, rank = (dist.get_world_size(), dist.get_rank()) if dist.is_initialized() else (1, 0)
    return Mesh(plan_dims(section, "tiny", World(rank, rank, size, size)), rank, "cpu")


def train_case(case: Case, *, alone: bool = False) -> Trained:
    """Losses, gradient norms and initial weights of the case, alike on all ranks (collective)."""
    section = ParallelConfig(**{**case.common, **({} if alone else case.flags)})
    config = replace(SHAPE, **case.shape)
    mesh = mesh_of(section)
    model = parallelize(config, section, mesh, device=CPU, precision=case.precision, seed=5)
    digests = digests_of(model, mesh)
    optim = OptimConfig(**case.optim)
    optimizers = build_optimizers(optim, model, case.precision, 5)
    rows = ROWS // mesh.size("dp")
    settings = StepSettings(
        mesh,
        CPU,
        lambda step, tokens, base: 1e-3,
        rows // case.accum,
        1.0,
        case.documents,
        dropout_seed=7 if config.has_dropout else None,
    )
    nothing: Any = None
    is_fp16 = case.precision.compute == "fp16"
    scale = LossScale(PrecisionConfig(loss_scale=1024.0), CPU) if is_fp16 else None
    state = TrainState(model, optimizers, nothing, case.steps, loss_scale=scale)
    if case.precision.rounded_copy:
        state.rounding = RoundedWeights(model, 5).rounded
    losses, norms = [], []
    for step in range(case.steps):
        first = mesh.axis_rank("dp") * rows
        batch = Batch(*(column[first : first + rows] for column in rows_of(step, config)))
        result = train_step(settings, state, batch, PhaseTimer(CPU))
        state.count(ROWS, ROWS * SEQ)
        interval = IntervalMetrics(mesh, CPU)
        interval.add(result)
        values = interval.read(result, 0.0, 0, {})
        losses.append(values["loss"])
        norms.append(values["grad_norm"])
    return Trained(losses, norms, digests)


def digests_of(model: nn.Module, mesh: Mesh) -> dict[str, str]:
    """A digest of every parameter of the whole model, whose parts all ranks bring together (collective)."""
    parts = [
        (clean_name(name), tuple(p.shape), shard_slices(p), local_shard(p).detach().float().clone())
        for name, p in model.named_parameters()
    ]
    whole: dict[str, torch.Tensor] = {}
    for some in gather_objects(parts):
        for name, shape, place, part in some:
            whole.setdefault(name, torch.full(shape, math.nan))[place] = part
    return {
        name: hashlib.sha256(whole[name].numpy().tobytes()).hexdigest() for name in sorted(whole)
    }


def train_all(cases: Mapping[str, Case]) -> dict[str, Trained | str]:
    """Every case in turn, on the ranks of one group; a text where one was refused or failed on all ranks."""
    return {name: train_case(case) for name, case in cases.items()}


def compare(world: int, cases: Mapping[str, Case]) -> None:
    """Asserts that every case trains on `world` ranks as it does on one process."""
    by_rank = run_ranks(train_all, world, dict(cases))
    for name, case in cases.items():
        wanted = train_case(case, alone=True)
        for found in (some[name] for some in by_rank):
            assert found.weights == wanted.weights, name
            assert found.losses == pytest.approx(wanted.losses, abs=case.loss_abs, rel=0), name
            assert found.norms == pytest.approx(wanted.norms, rel=case.norm_rel), name
