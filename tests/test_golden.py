"""Golden values: the first losses of a fixed run on the batches in golden_batches.npz.

A refactor leaves them equal. A deliberate change of numerics updates them and says why. The batches
are stored, so that a change of the data order does not change the losses.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import torch

from fms_fsdp.config import FP32, ModelConfig, OptimConfig, ParallelConfig
from fms_fsdp.data.batch import Batch
from fms_fsdp.distributed.axes import ParallelDims
from fms_fsdp.distributed.mesh import Mesh
from fms_fsdp.metrics.timer import PhaseTimer
from fms_fsdp.models.variants import resolve_model
from fms_fsdp.optim.optimizers import build_optimizers
from fms_fsdp.optim.schedules import Milestones, Schedule
from fms_fsdp.parallel.parallelize import parallelize
from fms_fsdp.state import TrainState
from fms_fsdp.train import StepSettings, train_step

GOLDEN = [
    6.299267292022705,
    5.813310146331787,
    6.250054359436035,
    5.816108703613281,
    5.821201324462891,
]


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def golden_batches() -> Iterator[Batch]:
    """Yields five batches of 4 sequences of 64 tokens."""
    columns = np.load(Path(__file__).with_name("golden_batches.npz"))
    names = {"tokens": "i8", "labels": "i8", "positions": "i4", "document_ids": "i4"}
    arrays = (columns[name].astype(kind) for name, kind in names.items())
    for batch in zip(*arrays, strict=True):
        yield Batch(*map(torch.from_numpy, batch))


def first_losses(grad_accum_steps: int) -> list[float]:
    """Returns the losses of five fp32 steps of `tiny` on the stored batches, on one thread."""
    cpu, mesh = torch.device("cpu"), Mesh(ParallelDims("none"), 0, "cpu")
    config = resolve_model(ModelConfig(model_variant="tiny"), seq_length=64)
    model = parallelize(config, ParallelConfig(), mesh, device=cpu, precision=FP32, seed=1)
    schedule = Schedule(OptimConfig(learning_rate=1e-2), Milestones(False, 2, 2, 5))
    settings = StepSettings(
        mesh, cpu, schedule, 4 // grad_accum_steps, grad_clip=1.0, document_mask=False
    )
    optimizers, results = build_optimizers(OptimConfig(learning_rate=1e-2), model), []
    state = TrainState(model, optimizers, cast(Any, SimpleNamespace()), 5)
    for batch in golden_batches():
        results.append(train_step(settings, state, batch, PhaseTimer(cpu)))
        state.count(4, 4 * 64)
    return [(result.loss_sum / result.num_labels).item() for result in results]


def test_golden_losses_are_equal() -> None:
    """Recorded with torch 2.13 on x86-64. Another build can round differently, so it compares to 1e-5."""
    assert first_losses(1) == pytest.approx(GOLDEN, rel=1e-5)


def test_accumulation_changes_rounding_alone() -> None:
    first = first_losses(1)
    assert first_losses(1) == first
    assert first_losses(4) == pytest.approx(first, rel=1e-5)
