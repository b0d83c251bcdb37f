"""Golden values: the first losses of a fixed run.

A refactor leaves them equal. A deliberate change of numerics updates them and says why.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from fms_fsdp.config import FP32, DataConfig, ModelConfig, OptimConfig, ParallelConfig
from fms_fsdp.config.axes import ParallelDims
from fms_fsdp.data.stream import build_stream
from fms_fsdp.mesh import Mesh
from fms_fsdp.models.variants import resolve_model
from fms_fsdp.observe.metrics import Clock
from fms_fsdp.optim.optimizers import build_optimizers
from fms_fsdp.optim.schedules import Corners, Schedule
from fms_fsdp.parallel.parallelize import parallelize
from fms_fsdp.state import Progress, TrainState
from fms_fsdp.train import TrainStep, train_step

GOLDEN = [6.299267292022705, 5.813310146331787, 6.250054359436035, 5.816108703613281, 5.821201324462891]


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def first_losses(grad_accum_steps: int) -> list[float]:
    """Losses of five fp32 steps of `tiny` on 4 rows of 64 synthetic tokens, on one thread."""
    cpu, mesh = torch.device("cpu"), Mesh(ParallelDims("none"), 0, "cpu")
    config = resolve_model(ModelConfig(model_variant="tiny"), seq_length=64)
    model = parallelize(config, ParallelConfig(), mesh, device=cpu, precision=FP32, seed=1)
    section = DataConfig(use_dummy_dataset=True, seq_length=64)
    sizes = dict(global_batch_size=4, dp_rank=0, dp_size=1)
    schedule = Schedule(OptimConfig(learning_rate=1e-2), Corners(False, 2, 2, 5))
    recipe = TrainStep(mesh, cpu, schedule, 4 // grad_accum_steps, grad_clip=1.0, document_mask=False)
    optimizers, results = build_optimizers(OptimConfig(learning_rate=1e-2), model), []
    with build_stream(section, None, seed=1, vocab_size=config.vocab_size, **sizes) as stream:
        state = TrainState(model, optimizers, stream, Progress(0, 5))
        for _ in range(5):
            results.append(train_step(recipe, state, stream.next_batch(), Clock(cpu)))
            state.progress.count(4, 4 * 64)
    return [(result.loss_sum / result.num_labels).item() for result in results]


def test_the_first_five_losses_are_those_on_record() -> None:
    """Recorded with torch 2.13 on x86-64. Another build can round differently, so it compares to 1e-5."""
    assert first_losses(1) == pytest.approx(GOLDEN, rel=1e-5)


def test_the_run_repeats_to_the_last_bit_and_accumulation_changes_rounding_alone() -> None:
    first = first_losses(1)
    assert first_losses(1) == first
    assert first_losses(4) == pytest.approx(first, rel=1e-5)
