"""What the start line says of each axis is what a step sends, within 2 %."""

from __future__ import annotations

import re
import sys
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, NamedTuple

import pytest

from fms_fsdp.config import BF16, FP32, BatchPlan, OptimConfig, ParallelConfig
from fms_fsdp.data.batch import Batch
from fms_fsdp.distributed.dims import plan_dims
from fms_fsdp.distributed.world import World
from fms_fsdp.metrics.timer import PhaseTimer
from fms_fsdp.models.variants import VARIANTS
from fms_fsdp.optim.optimizers import build_optimizers
from fms_fsdp.parallel.parallelize import parallelize
from fms_fsdp.predict.memory import Step
from fms_fsdp.predict.meter import ModelSetup
from fms_fsdp.predict.speed import rank_cost, sent, sent_by, sent_summary
from fms_fsdp.state import TrainState
from fms_fsdp.train import StepSettings, train_step
from tests.cli import ROOT
from tests.distributed.launch import run_ranks
from tests.parallel.layouts import CPU, ROWS, SHAPE, mesh_of, rows_of

sys.path.insert(0, str(ROOT / "benchmarks"))
from bench_parallel import Sent  # noqa: E402

SEQ = 256
WIDE = dict(hidden_size=128, ffn_hidden_size=256, vocab_size=512, max_seq_len=SEQ)


class Case(NamedTuple):
    """`flags` of ParallelConfig, `shape`: changes of the model, `accum`: micro-steps."""

    flags: Mapping[str, Any]
    shape: Mapping[str, Any] = {}
    accum: int = 1


CASES = {
    "tp x fsdp": Case(dict(tp_size=2)),
    "tp with copied keys": Case(dict(tp_size=4), shape=dict(num_kv_heads=2)),
    "copied keys without sequence": Case(
        dict(tp_size=4, sequence_parallel=False), shape=dict(num_kv_heads=1)
    ),
    "tp recomputing": Case(dict(tp_size=2, recompute="blocks"), accum=2),
    "fsdp by segments": Case(dict(recompute="blocks", recompute_segment=2), accum=2),
    "pp x tp": Case(dict(tp_size=2, pp_size=2)),
    "pp x fsdp": Case(dict(pp_size=2, pp_schedule="interleaved")),
    "cp x fsdp": Case(dict(cp_size=2)),
    "cp gather x fsdp": Case(dict(cp_size=2, cp_method="gather")),
    "cp x tp": Case(dict(cp_size=2, tp_size=2, recompute="blocks")),
    # FSDP gathers and reduces in every schedule of a pipeline: those of one were counted for all
    "pp x fsdp accumulating": Case(dict(pp_size=2, sharding_strategy="fsdp"), accum=2),
    "pp x hsdp accumulating": Case(
        dict(pp_size=2, sharding_strategy="hsdp", hsdp_shard_size=1), accum=2
    ),
    "pp x ddp accumulating": Case(dict(pp_size=2, sharding_strategy="ddp"), accum=2),
}


def measured(case: Case) -> tuple[dict[str, float], dict[str, int]]:
    """Bytes that this rank sent in a step by axis, and those that were predicted (collective)."""
    section = ParallelConfig(**case.flags)
    config, mesh = replace(SHAPE, **WIDE, **case.shape), mesh_of(section)
    model = parallelize(config, section, mesh, device=CPU, precision=FP32, seed=5)
    rows = ROWS // mesh.size("dp")
    batch = BatchPlan(rows // case.accum, case.accum, mesh.size("dp"))
    settings = StepSettings(
        mesh, CPU, lambda step, tokens, base: 1e-3, batch.batch_size, 1.0, False
    )
    nothing: Any = None
    state = TrainState(model, build_optimizers(OptimConfig(), model), nothing, 2)
    first = mesh.axis_rank("dp") * rows
    columns = Batch(
        *(column[first : first + rows].repeat(1, SEQ // 16) for column in rows_of(0, config))
    )
    train_step(settings, state, columns, PhaseTimer(CPU))
    with Sent(mesh) as counted:
        train_step(settings, state, columns, PhaseTimer(CPU))
    shape = ModelSetup(config, section, FP32, mesh.dims, SEQ, False, "cpu")
    step, place = Step(shape, batch.batch_size, case.accum), mesh.axis_rank("pp")
    predicted = sent_by(step, place, rank_cost(shape, place, step.micro_batch))
    return counted.sent, dict(predicted)


def all_measured(
    cases: Mapping[str, Case],
) -> dict[str, tuple[dict[str, float], dict[str, int]]]:
    return {name: measured(case) for name, case in cases.items()}


@pytest.mark.slow
def test_bytes_of_every_axis_are_those_predicted() -> None:
    for found in run_ranks(all_measured, 4, CASES):
        for name, (counted, predicted) in found.items():
            counted = {axis: size for axis, size in counted.items() if axis and size}
            assert counted.keys() == predicted.keys(), (name, counted, predicted)
            assert counted == pytest.approx(predicted, rel=0.02), name


def test_printed_pipeline_bytes_are_the_maximum() -> None:
    """The first stage sends only forward."""
    section, seq = ParallelConfig(tp_size=2, pp_size=8, sharding_strategy="fsdp"), 4096
    dims = plan_dims(section, "70b", World(0, 0, 64, 8))
    step = Step(ModelSetup(VARIANTS["70b"], section, BF16, dims, seq), 256, 1)
    printed = re.search(r"pp ([\d.]+) GiB", sent_summary(sent(step)))
    ranks = (
        sent_by(step, place, rank_cost(step.setup, place, step.micro_batch))["pp"]
        for place in range(dims.pp)
    )
    assert printed is not None and float(printed[1]) == pytest.approx(max(ranks) / 2**30, rel=0.01)
