"""What a reporter makes of the world it is in."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from fms_fsdp.config import BatchPlan, LogConfig, TrainConfig
from fms_fsdp.mesh import Mesh, ParallelDims
from fms_fsdp.models.flops import flops_per_token
from fms_fsdp.models.llama import Llama
from fms_fsdp.models.variants import VARIANTS
from fms_fsdp.observe import report
from fms_fsdp.optim.optimizers import build_optimizers
from fms_fsdp.run.plan import Plan
from fms_fsdp.run.resume import Start
from fms_fsdp.runtime import Phases, World

TIMES = {"step_time_ms": 500.0, "eval_ms": 0.0, "checkpoint_ms": 0.0, "logging_ms": 0.0}


@pytest.mark.parametrize(
    "dims", [ParallelDims("none", 2, 4), ParallelDims("none", 1, 8), ParallelDims("none", 8, 1)]
)
def test_rates_and_mfu_are_those_of_one_of_all_devices(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, dims: ParallelDims
) -> None:
    """Eight ranks train 8 x 3 rows of 4,096 tokens in half a second, on devices of 1 PFLOP/s."""
    monkeypatch.setattr(report, "peak_flops", lambda device, dtype: 1e15)
    config, cpu = VARIANTS["tiny"], torch.device("cpu")
    world, batch = World(0, 0, 8, 8), BatchPlan(3, 1, dims.size("dp"))
    cfg = TrainConfig(log=LogConfig(output_dir=str(tmp_path), trackers=("none",)))
    found = Plan(world, cpu, dims, batch, None, config, False, Start(None, False, ""), 10)
    model = Llama(config)
    reporter = report.build_reporter(
        cfg,
        found,
        Mesh(dims, 0, "cpu"),
        model,
        build_optimizers(cfg.optim, model),
        attempt=1,
        phases=Phases(),
        learning_rate=lambda step: 1e-3,
        stream=None,
    )
    record = reporter._record(5, {"energy_j": 0.0}, TIMES)
    assert record["tokens_per_sec"] == pytest.approx(24 * 4096 / 0.5)
    assert record["tokens_per_sec_per_device"] == pytest.approx(3 * 4096 / 0.5)
    flops = flops_per_token(config, 4096)
    assert record["mfu"] == pytest.approx(3 * 4096 / 0.5 * flops / 1e15)
    assert record["tflops_per_device"] == pytest.approx(1000 * record["mfu"])
    assert record["tokens_seen"] == 5 * 24 * 4096 and record["eta_s"] == pytest.approx(2.5)
    reporter.close()
