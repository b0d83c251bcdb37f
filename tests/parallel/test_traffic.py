"""What the start line says of each axis is what a step sends, within 2 %."""

from __future__ import annotations

import sys
from dataclasses import replace
from typing import Any

import pytest

from fms_fsdp.config import BatchPlan, OptimConfig, ParallelConfig
from fms_fsdp.data.batch import Batch
from fms_fsdp.observe.metrics import Clock
from fms_fsdp.optim.optimizers import build_optimizers
from fms_fsdp.parallel.parallelize import parallelize
from fms_fsdp.predict.communication import bytes_sent
from fms_fsdp.predict.shares import axis_bytes, share_of
from fms_fsdp.state import Progress, TrainState
from fms_fsdp.train import TrainStep, train_step
from tests.cli import ROOT
from tests.distributed.launch import run_ranks
from tests.parallel.layouts import CPU, ROWS, SHAPE, Case, mesh_of, rows_of

sys.path.insert(0, str(ROOT / "benchmarks"))
from bench_parallel import Sent  # noqa: E402

SEQ = 256
WIDE = dict(hidden_size=128, ffn_hidden_size=256, vocab_size=512, max_seq_len=SEQ)
CASES = {
    "tp x fsdp": Case(dict(tp_size=2)),
    "tp with copied keys": Case(dict(tp_size=4), shape=dict(num_kv_heads=2)),
    "copied keys without sequence": Case(
        dict(tp_size=4, sequence_parallel=False), shape=dict(num_kv_heads=1)
    ),
    "tp without sequence": Case(dict(tp_size=2, sequence_parallel=False)),
    "tp recomputing": Case(dict(tp_size=2), common=dict(recompute="blocks"), accum=2),
    "fsdp by segments": Case({}, common=dict(recompute="blocks", recompute_segment=2), accum=2),
    "pp x tp": Case(dict(tp_size=2, pp_size=2)),
    "pp x fsdp": Case(dict(pp_size=2, pp_schedule="interleaved")),
    "cp x fsdp": Case(dict(cp_size=2)),
    "cp gather x fsdp": Case(dict(cp_size=2, cp_method="gather")),
    "cp x tp": Case(dict(cp_size=2, tp_size=2), common=dict(recompute="blocks")),
}


def measured(case: Case) -> tuple[dict[str, float], dict[str, int]]:
    """Bytes that this rank sent in a step by axis, and those that were predicted (collective)."""
    section = ParallelConfig(**{**case.common, **case.flags})
    config, mesh = replace(SHAPE, **WIDE, **case.shape), mesh_of(section)
    model = parallelize(config, section, mesh, device=CPU, precision=case.precision, seed=5)
    rows = ROWS // mesh.size("dp")
    batch = BatchPlan(rows // case.accum, case.accum, mesh.size("dp"))
    recipe = TrainStep(mesh, CPU, lambda step, tokens, base: 1e-3, batch.batch_size, 1.0, False)
    nothing: Any = None
    state = TrainState(model, build_optimizers(OptimConfig(), model), nothing, Progress(0, 2))
    first = mesh.place("dp") * rows
    columns = Batch(*(column[first : first + rows].repeat(1, SEQ // 16) for column in rows_of(0, config)))
    train_step(recipe, state, columns, Clock(CPU))
    with Sent(mesh) as counted:
        train_step(recipe, state, columns, Clock(CPU))
    dims, place = mesh.dims, mesh.place("pp")
    predicted = axis_bytes(config, dims, section, case.precision, batch, SEQ, place)
    share = share_of(config, dims, section, place)
    return counted.sent, predicted | bytes_sent(config, dims, case.precision, case.accum, share)


def all_measured() -> dict[str, tuple[dict[str, float], dict[str, int]]]:
    return {name: measured(case) for name, case in CASES.items()}


def test_bytes_of_every_axis_are_those_predicted() -> None:
    for found in run_ranks(all_measured, 4):
        for name, (sent, predicted) in found.items():
            counted = {axis: size for axis, size in sent.items() if axis and size}
            assert counted.keys() == predicted.keys(), (name, counted, predicted)
            assert counted == pytest.approx(predicted, rel=0.02), name
