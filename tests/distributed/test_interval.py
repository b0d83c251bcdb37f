"""Metrics of several ranks: the mean loss weighs every label of every rank alike."""

from __future__ import annotations

import torch

from fms_fsdp.distributed.axes import ParallelDims
from fms_fsdp.distributed.mesh import Mesh
from fms_fsdp.metrics.interval import IntervalMetrics
from fms_fsdp.state import StepResult
from tests.distributed.launch import run_ranks

LOSS_SUMS = [[6.0, 1.0, 100.0], [2.0, 9.0, 100.0]]  # by rank, by step
LABELS, NORMS = (
    [4, 8, 16],
    [1.5, 0.5, float("inf")],
)  # of all ranks, by step; the last step is skipped


def read_on_rank() -> dict[str, float]:
    import torch.distributed as dist

    rank = dist.get_rank()
    interval = IntervalMetrics(
        Mesh(ParallelDims("ddp", dp_replicate=2), rank, "cpu"), torch.device("cpu")
    )
    for loss_sum, labels, norm in zip(LOSS_SUMS[rank], LABELS, NORMS, strict=True):
        numbers = (torch.tensor(number) for number in (loss_sum, labels, norm, [0]))
        last = StepResult(*numbers, extra_sums=(torch.tensor(loss_sum / 4),))
        interval.add(last)
    return interval.read(last, 10.0 * (rank + 1), rank, {})


def test_mean_loss_weighs_all_labels_equally() -> None:
    first, second = run_ranks(read_on_rank, 2)
    assert first == second
    assert first["loss_mean"] == (6 + 2 + 1 + 9) / (4 + 8) and first["loss"] == 200 / 16
    assert (
        first["grad_norm_max"] == 1.5 and first["skipped_steps"] == 1 and first["energy_j"] == 30.0
    )
    assert first["masked_rows"] == 1 and first["z_loss"] == 50 / 16
