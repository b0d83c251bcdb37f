"""What a reporter makes of the world it is in."""

from __future__ import annotations

import math
import time
from dataclasses import replace
from datetime import datetime
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from fms_fsdp.config import BatchPlan, LogConfig, OptimConfig, TrainConfig
from fms_fsdp.data.batch import empty_batch
from fms_fsdp.distributed.axes import ParallelDims
from fms_fsdp.distributed.mesh import Mesh
from fms_fsdp.metrics.hardware import find_utilization
from fms_fsdp.metrics.timer import PhaseTimer
from fms_fsdp.models.flops import flops_per_token
from fms_fsdp.models.llama import Llama
from fms_fsdp.models.variants import VARIANTS
from fms_fsdp.optim.optimizers import build_optimizers
from fms_fsdp.run.logger import MetricLogger
from fms_fsdp.state import TrainState
from fms_fsdp.tools.report_command import MAX_SOURCES, OTHER_SOURCES, load_run
from tests.cli import events, metrics, run
from tests.data.corpora import write_corpus
from tests.specs import launch_of, resolved

TIMES = {"step_time_ms": 500.0, "eval_ms": 0.0, "checkpoint_ms": 0.0, "logging_ms": 0.0}


@pytest.mark.parametrize(
    ("device", "peak_tflops", "name", "expected"),
    [
        ("cpu", None, "", None),
        ("cpu", 2.5, "", 2.5e12),
        ("cuda", None, "NVIDIA H200", 989e12),
        ("cuda", None, "NVIDIA GB200", 2500e12),
        ("cuda", None, "NVIDIA GH200 480GB", 989e12),
        ("cuda", None, "NVIDIA H20", None),
        ("cuda", 148.0, "NVIDIA H20", 148e12),
    ],
)
def test_peak_is_the_flag_or_a_known_gpu(
    device: str,
    peak_tflops: float | None,
    name: str,
    expected: float | None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A CPU's was measured, and gave an mfu of 451 %."""
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: name)
    run = resolved(TrainConfig(log=LogConfig(peak_tflops=peak_tflops)), device=device)
    assert find_utilization(run, torch.device(device)).peak_flops == expected


@pytest.mark.parametrize("dims", [ParallelDims("none", 2, 4), ParallelDims("none", 1, 8)])
def test_rates_and_mfu_are_per_device(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, dims: ParallelDims
) -> None:
    """Eight ranks train 8 x 3 rows of 4,096 tokens in half a second, on devices of 1 PFLOP/s."""
    config, cpu = VARIANTS["tiny"], torch.device("cpu")
    batch = BatchPlan(3, 1, dims.size("dp"))
    log = LogConfig(output_dir=str(tmp_path), trackers=("none",), peak_tflops=1000.0)
    cfg = TrainConfig(log=log)
    run = resolved(cfg, model=config, dims=dims, batch=batch, world_size=8)
    model = Llama(config)
    stream: Any = SimpleNamespace(consumption=dict)
    state = TrainState(model, build_optimizers(cfg.optim, model), stream, 10)
    state.sequences_at_end = 10 * 24
    for _ in range(5):
        state.count(24, 24 * 4096)
    mesh = Mesh(dims, 0, "cpu")
    monkeypatch.setattr(mesh, "sum", lambda tensor, axis: tensor)  # there is one process
    metrics = MetricLogger(launch_of(run), mesh, state, PhaseTimer(cpu))
    state.current.batch = empty_batch(3, 4096)
    record = metrics._measure(state, {"energy_j": 0.0}, TIMES)
    assert record["tokens_per_sec"] == pytest.approx(24 * 4096 / 0.5)
    assert record["tokens_per_sec_per_device"] == pytest.approx(3 * 4096 / 0.5)
    flops = flops_per_token(config, 4096)
    assert record["mfu"] == pytest.approx(3 * 4096 / 0.5 * flops / 1e15)
    assert record["tflops_per_device"] == pytest.approx(1000 * record["mfu"])
    assert state.tokens_seen == 5 * 24 * 4096 and record["eta_s"] == pytest.approx(2.5)
    assert state.sequences_seen == 5 * 24
    state.sequences_at_end = 24 * 20_000
    state.count(24, 24 * 4096)
    record = metrics._measure(state, {"energy_j": 0.0}, TIMES)
    finish_at = datetime.strptime(record["finish_at"], "%Y-%m-%d %H:%M")
    seconds = (finish_at - datetime.now()).total_seconds()
    assert record["eta_s"] > 600 and abs(seconds - record["eta_s"]) < 90
    state.sequences_at_end = 10**16
    state.count(24, 24 * 4096)
    clock = time.time()
    monkeypatch.setattr(time, "time", lambda: clock - 3600)  # set back
    record = metrics._measure(state, {"energy_j": 1.0}, TIMES)
    assert "finish_at" not in record and record["power_w"] < 1e6
    metrics.close()


def test_zero_gradients_are_of_the_same_step(tmp_path: Path) -> None:
    """A step that the host skips has none; it had those of the step before."""
    log = LogConfig(output_dir=str(tmp_path), trackers=("none",), log_num_zeros=True)
    cfg = TrainConfig(log=replace(log, report_interval=1), optim=OptimConfig(optimizer="sgd"))
    model, mesh = Llama(VARIANTS["tiny"]), Mesh(ParallelDims("none"), 0, "cpu")
    optimizers = build_optimizers(cfg.optim, model)
    state = TrainState(model, optimizers, SimpleNamespace(consumption=dict), 10)  # type: ignore[arg-type]
    cpu = torch.device("cpu")
    logger = MetricLogger(launch_of(resolved(cfg)), mesh, state, PhaseTimer(cpu))
    result: Any = SimpleNamespace(loss_scale=None)
    found = []
    for norm in (1.0, math.nan):
        for parameter in model.parameters():
            parameter.grad = torch.zeros_like(parameter)
        optimizers.step(lambda base: base, torch.tensor(norm))
        found.append(logger._replicated(result))
    assert found == [{"grad_zeros": sum(p.numel() for p in model.parameters())}, {}]
    logger.close()


@pytest.mark.slow
def test_many_sources_are_in_every_tenth_report(tmp_path: Path) -> None:
    names = [f"s{number:02d}" for number in range(MAX_SOURCES + 2)]
    write_corpus(tmp_path / "data", dict.fromkeys(names, [200]))
    folder = tmp_path / "run"
    flags = (
        f"--data_path={tmp_path}/data --output_dir={folder} --global_batch_size=2 --num_steps=25"
    )
    flags += " --model_variant=tiny --seq_length=32 --report_interval=1 --trackers=none"

    def steps_with_sources() -> list[int]:
        return [step for step, record in metrics(folder).items() if "tokens/s00" in record]

    assert run(*flags.split(), "--exit_step=13").returncode == 75
    assert steps_with_sources() == [1, 11]
    (end,) = events(folder, "end")
    assert sum(end[f"tokens/{name}"] for name in names) == 13 * 2 * 32
    assert run(*flags.split()).returncode == 0
    assert steps_with_sources() == [1, 11, 14, 24, 25]
    assert "tokens/s00" not in events(folder, "end")[1]

    page = load_run(folder)
    curves = {name: curve for name, curve in page["series"].items() if name.startswith("tokens/")}
    assert len(curves) == MAX_SOURCES and OTHER_SOURCES in curves
    assert sum(values[-1] for _, values in curves.values()) == 25 * 2 * 32
    assert all(steps == [1, 11, 14, 24, 25] for steps, _ in curves.values())
    assert not any("tokens/" in details for *_, details in page["events"])
