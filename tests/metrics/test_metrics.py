"""Each metric against slow arithmetic, and what the records look like on disk and on the screen."""

from __future__ import annotations

import math
import resource
import sys
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from fms_fsdp.config import BatchPlan, TrainConfig, TrainingConfig
from fms_fsdp.config.values import short
from fms_fsdp.console import LINE_WIDTH, TIME_WIDTH
from fms_fsdp.distributed.axes import ParallelDims
from fms_fsdp.distributed.dtensor import global_norm
from fms_fsdp.distributed.mesh import Mesh
from fms_fsdp.metrics.hardware import (
    EnergyMeter,
    Utilization,
    advice_on_memory,
    diagnostics,
    memory_stats,
)
from fms_fsdp.metrics.interval import IntervalMetrics, count_zero_gradients
from fms_fsdp.metrics.timer import PhaseTimer
from fms_fsdp.run.logger import MetricsFile, report_line
from fms_fsdp.state import StepResult
from tests.specs import resolved

CPU = torch.device("cpu")
ALONE = Mesh(ParallelDims("none"), 0, "cpu")
RECORD = {
    "step": 20,
    "loss": 2.5,
    "loss_mean": 2.6,
    "lr": 1e-3,
    "grad_norm": 0.5,
    "tokens_seen": 40960,
    "step_time_ms": 395.4,
    "tokens_per_sec": 9872.0,
    "tokens_per_sec_per_device": 1234.4,
    "mfu": 0.25,
    "peak_mem_gib": 131.2,
    "eta_s": 40.0,
}


def step(loss_sum: float, num_labels: int, grad_norm: float) -> StepResult:
    loss, labels, norm, requests = (
        torch.tensor(each) for each in (loss_sum, num_labels, grad_norm, [0])
    )
    return StepResult(loss, labels, norm, requests)


@pytest.mark.parametrize("before", ['{"step": 1}\n', "", '{"step": 1}\n' * 9000])
def test_torn_last_line_is_removed(tmp_path: Path, before: str) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text(before + '{"step": 2, "lo' + "s" * (len(before) // 10))
    file = MetricsFile(path)
    file.write({"step": 2, "loss": float("nan")})
    file.close()
    assert path.read_text() == before + '{"step": 2, "loss": null}\n'


def test_unwritable_file_is_a_problem_not_an_error(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    file = MetricsFile(path)
    file.write({"step": 1})
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (path.stat().st_size + 5, limits[1]))
    try:
        for step in (2, 3):
            file.write({"step": step})
        assert file.problem == f"{path} cannot be written: File too large"
        file.close()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    MetricsFile(path).close()  # removes the torn line
    assert path.read_text() == '{"step": 1}\n'


def test_interval_means_leave_out_skipped_steps() -> None:
    skipped = step(math.nan, 10, math.nan)
    steps = [step(30.0, 10, 1.0), step(8.0, 4, 5.0), skipped, step(7.0, 7, math.inf)]
    steps.append(step(12.0, 6, 3.0))
    interval = IntervalMetrics(ALONE, CPU)
    for taken in steps:
        interval.add(taken)
    values = interval.read(steps[-1], 2.5, 3, {"param_norm": torch.tensor(7.0)})
    assert values == {
        "loss": 2.0,
        "loss_mean": (30 + 8 + 12) / (10 + 4 + 6),
        "perplexity": math.exp(2.0),
        "grad_norm": 3.0,
        "grad_norm_mean": 3.0,
        "grad_norm_max": 5.0,
        "skipped_steps": 2,
        "masked_rows": 3,
        "energy_j": 2.5,
        "param_norm": 7.0,
    }
    for taken in (steps[0], step(0.0, 0, 0.0)):  # without a label
        interval.add(taken)
    again = interval.read(steps[0], 0.0, 0, {})
    assert (again["loss_mean"], again["grad_norm_max"], again["skipped_steps"]) == (3.0, 1.0, 0)
    interval.add(skipped)
    none = interval.read(skipped, 0.0, 0, {})
    assert math.isnan(none["loss_mean"]) and math.isnan(none["grad_norm_max"])
    assert none["skipped_steps"] == 1
    empty = replace(step(0.0, 0, 0.0), extra_sums=(torch.tensor(0.0),))
    assert math.isnan(interval.read(empty)["z_loss"])


def test_norm_and_zeros_equal_a_flat_vector() -> None:
    torch.manual_seed(0)
    parameters = [torch.nn.Parameter(torch.randn(5, 3)), torch.nn.Parameter(torch.randn(7))]
    parameters[0].grad = torch.tensor([[0.0, 1.0, 0.0]]).repeat(5, 1)
    flat = torch.cat([parameter.detach().flatten() for parameter in parameters])
    assert global_norm(parameters, ALONE).item() == pytest.approx(flat.norm().item())
    assert count_zero_gradients(parameters, ALONE).item() == 10


def test_utilization_is_achieved_over_peak() -> None:
    known = Utilization(model=6_000_000, matmul=5_000_000, hardware=8_000_000, peak_flops=1e12)
    expected = {"tflops_per_device": 0.06, "mfu": 0.06, "mfu_matmul": 0.05, "hfu": 0.08}
    assert known.metrics(10_000.0) == pytest.approx(expected)
    assert Utilization(6_000_000, 5_000_000, 8_000_000, None).metrics(10_000.0) == {
        "tflops_per_device": 0.06
    }


def test_timer_splits_time_into_phases() -> None:
    timer, begin = PhaseTimer(CPU), time.perf_counter()
    sleeps = {"data": 0.02, "forward": 0.015, "backward": 0.025, "clip": 0.005, "optimizer": 0.01}
    for phase, seconds in (2 * [*sleeps.items()]) + [("eval", 0.04), ("checkpoint", 0.03)]:
        time.sleep(seconds)
        timer.mark(phase)
    passed_ms = 1000 * (time.perf_counter() - begin)
    times = timer.read()  # of two steps
    least = {"data_wait": 20, "forward_backward": 40, "forward": 15, "backward": 25, "clip": 5}
    for name, ms in (least | {"optimizer": 10, "eval": 20, "checkpoint": 15}).items():
        assert times[f"{name}_ms"] >= ms
    phases = ("data_wait", "forward_backward", "clip", "optimizer")
    step_ms = times["step_time_ms"]
    assert step_ms == pytest.approx(sum(times[f"{name}_ms"] for name in phases))
    total_ms = 2 * (step_ms + times["eval_ms"] + times["checkpoint_ms"])
    assert total_ms == pytest.approx(passed_ms, rel=0.05) and times["logging_ms"] == 0
    assert timer.read()["step_time_ms"] == 0 and timer.totals["data"] >= 0.04


def test_pending_gpu_work_is_step_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its host runs ahead: a save after a step that is not reported waits for the steps first."""
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: time.sleep(0.05))
    clock = PhaseTimer(torch.device("cuda"))
    for part in ("device", "checkpoint"):
        clock.mark(part)
    times = clock.read()
    assert times["step_time_ms"] >= 50 and times["checkpoint_ms"] < 25


def test_memory_is_below_its_peak() -> None:
    found = memory_stats(CPU)
    assert 0 < found["mem_gib"] <= found["peak_mem_gib"] < 1000


def test_report_line_has_its_numbers() -> None:
    progress: Any = SimpleNamespace(step=20, num_steps=100, steps_in_launch=20)
    words = "step 20/100  loss 2.6000  lr 1.00e-03  norm 0.50  "
    one = report_line({**RECORD, "masked_rows": 0}, progress, 1, 140 * 2**30)
    assert one == f"{words}395 ms  9,872 tok/s  mfu 25%  131/140 GiB  40s left"
    small = {**RECORD, "peak_mem_gib": 0.4}
    del small["mfu"]
    eight = report_line({**small, "masked_rows": 0}, progress, 8, 0)
    assert eight == f"{words}395 ms  9,872 tok/s (1,234 each)  410 MiB  40s left"
    masked = report_line({**small, "masked_rows": 3}, progress, 8, 0)
    assert masked == f"{words}3 masked  395 ms  9,872 tok/s  410 MiB  40s left"
    progress.steps_in_launch = 1  # it compiles
    line = report_line({**RECORD, "masked_rows": 0}, progress, 8, 0)
    assert "tok/s" not in line and "left" not in line and "masked" not in line


def test_report_line_fits_with_large_numbers() -> None:
    """A run of weeks on thousands of GPUs, whose loss has exploded."""
    state: Any = SimpleNamespace(step=1_234_567, num_steps=2_000_000, steps_in_launch=20)
    large = {
        "loss_mean": 12345.6789,
        "grad_norm": 1.2345e17,
        "masked_rows": 12,
        "step_time_ms": 123_456.0,
        "tokens_per_sec": 87_654_321.0,
        "tokens_per_sec_per_device": 12_345.0,
        "peak_mem_gib": 131.0,
        "eta_s": 1_234_567.0,
    }
    record = {**RECORD, **large}
    line = report_line(record, state, 4096, 140 * 2**30)
    assert len(line) <= LINE_WIDTH - TIME_WIDTH
    assert line.startswith(
        "step 1234567/2000000  loss 12345.6789  lr 1.00e-03  12 masked  87.7M tok/s"
    )
    assert line.endswith("  14d6h left")


@pytest.mark.parametrize(
    ("peak_gib", "micro_batch", "batch_size"),
    [
        (8.0, 2, 16),
        (8.0, 1, 8),  # early in a ramp of micro-batches
        (20.0, 2, 6),
        (26.3, 1, None),  # the ramp ends at as many
        (26.5, 2, None),
        (70.0, 2, None),
    ],
)
def test_empty_gpu_is_advised_a_batch(
    peak_gib: float, micro_batch: int, batch_size: int | None
) -> None:
    run = resolved(TrainConfig(), batch=BatchPlan(2, 4, 8), device="cuda")
    advice = advice_on_memory(run, micro_batch, peak_gib, 79 * 2**30)
    assert bool(advice) is (batch_size is not None)
    if advice:
        assert advice.startswith(f"a step uses {peak_gib:.1f} of 79.0 GiB of the GPU; ")
        assert f"--batch_size={batch_size} would fit" in advice


def test_advised_batch_keeps_the_global_batch() -> None:
    """16 sequences were advised where a step has 4 per rank, and the next launch was rejected."""
    cfg = TrainConfig(training=TrainingConfig(global_batch_size=32))
    run = resolved(cfg, batch=BatchPlan(2, 2, 8), device="cuda")
    assert "--batch_size=4 would fit" in advice_on_memory(run, 2, 8.0, 79 * 2**30)
    assert advice_on_memory(replace(run, batch=BatchPlan(4, 1, 8)), 4, 8.0, 79 * 2**30) == ""


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (999_600, "1M"),
        (999_400, "999k"),
        (99_950, "100k"),
        (0, "0"),
        (-12_000, "-12k"),
        (3e-5, "3e-5"),
    ],
)
def test_short_number_is_rounded_before_its_unit(value: float, text: str) -> None:
    assert short(value, 3) == text


def test_energy_meter_survives_a_failing_counter() -> None:
    readings = iter([1.0, 4.0])
    meter = EnergyMeter(CPU, lambda: next(readings))
    assert meter.read_joules() == 3.0
    assert meter.read_joules() == 0.0  # exhausted: StopIteration
    assert EnergyMeter(CPU).read_joules() == 0.0


def test_gpu_is_read_by_nvml(monkeypatch: pytest.MonkeyPatch) -> None:
    joules = iter([5000, 7500])
    nvml = SimpleNamespace(
        nvmlInit=lambda: None,
        nvmlDeviceGetHandleByUUID=lambda uuid: uuid,
        nvmlDeviceGetTotalEnergyConsumption=lambda handle: (
            next(joules) if handle == "GPU-a1" else None
        ),
    )
    monkeypatch.setitem(sys.modules, "pynvml", nvml)
    monkeypatch.setattr(
        torch.cuda, "get_device_properties", lambda device: SimpleNamespace(uuid="a1")
    )
    monkeypatch.setattr(torch.cuda, "temperature", lambda device: 61)
    monkeypatch.setattr(torch.cuda, "clock_rate", lambda device: 1 / 0)
    gpu = torch.device("cuda", 0)
    found = diagnostics(gpu)
    assert found["gpu_temperature_c"] == 61 and "gpu_clock_mhz" not in found
    assert found["host_rss_gib"] == pytest.approx(memory_stats(CPU)["mem_gib"], rel=0.1)
    assert EnergyMeter(gpu).read_joules() == 2.5
