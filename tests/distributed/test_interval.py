"""Metrics of several ranks: the mean loss weighs every label of every rank alike."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch

from fms_fsdp.data.batch import Batch, empty_batch
from fms_fsdp.distributed.axes import ParallelDims
from fms_fsdp.distributed.mesh import Mesh
from fms_fsdp.errors import read_failed
from fms_fsdp.metrics.interval import IntervalMetrics, describe_data
from fms_fsdp.state import StepResult
from tests.distributed.launch import run_ranks

LOSS_SUMS = [[6.0, 1.0, 100.0], [2.0, 9.0, 100.0]]  # by rank, by step
LABELS, NORMS = (
    [4, 8, 16],
    [1.5, 0.5, float("inf")],
)  # of all ranks, by step; the last step is skipped


def read_on_rank() -> tuple[dict[str, float], str]:
    """Returns the metrics, and what is said of a batch that rank 1 cannot read again."""
    import torch.distributed as dist

    rank = dist.get_rank()
    mesh = Mesh(ParallelDims("ddp", dp_replicate=2), rank, "cpu")
    interval = IntervalMetrics(mesh, torch.device("cpu"))
    for loss_sum, labels, norm in zip(LOSS_SUMS[rank], LABELS, NORMS, strict=True):
        numbers = (torch.tensor(number) for number in (loss_sum, labels, norm, [0]))
        last = StepResult(*numbers, extra_sums=(torch.tensor(loss_sum / 4),))
        interval.add(last)
    metrics = interval.read(last, 10.0 * (rank + 1), rank, {})

    def read_again(step: int) -> Batch:
        if rank == 1:
            raise read_failed("a.arrow", "Input/output error")
        return empty_batch(1, 8)

    stream: Any = SimpleNamespace(batch_at=read_again, documents=lambda step: ["a:0"])
    return metrics, describe_data(stream, mesh, 3)


def test_all_labels_weigh_equally_and_ranks_agree() -> None:
    (first, said), (second, said_by_other) = run_ranks(read_on_rank, 2)
    assert first == second
    assert first["loss_mean"] == (6 + 2 + 1 + 9) / (4 + 8) and first["loss"] == 200 / 16
    assert (
        first["grad_norm_max"] == 1.5 and first["skipped_steps"] == 1 and first["energy_j"] == 30.0
    )
    assert first["masked_rows"] == 1 and first["z_loss"] == 50 / 16
    # The other ranks waited for rank 1 in a collective.
    assert said == said_by_other
    assert said.startswith("The data cannot be read again (rank 1: a.arrow cannot be read")
