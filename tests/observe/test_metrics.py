"""Records on disk and on the screen."""

from __future__ import annotations

import json
from pathlib import Path

import torch

from fms_fsdp.observe.metrics import Clock, MetricsFile, TensorBoard, report_line
from fms_fsdp.observe.peak import measure_matmul_flops

RECORD = {
    "attempt": 1,
    "step": 20,
    "loss": 2.5,
    "lr": 1e-3,
    "grad_norm": 0.5,
    "tokens_seen": 40960,
    "tokens_per_sec_per_device": 1234.5,
    "mfu": 0.25,
    "step_time_ms": 500.0,
    "data_wait_ms": 0.25,
    "peak_mem_gib": 1.5,
    "data_fingerprint": "00ff",
}


def test_a_torn_last_line_is_cut_at_the_start(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1}\n{"step": 2, "lo')
    file = MetricsFile(path)
    file.write({"step": 2, "loss": float("nan")})
    file.close()
    assert [json.loads(line) for line in path.read_text().splitlines()] == [{"step": 1}, {"step": 2, "loss": None}]


def test_a_file_that_is_one_torn_line_becomes_empty(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"ste')
    MetricsFile(path).close()
    assert path.read_text() == ""


def test_the_report_line_reads_like_a_sentence() -> None:
    line = report_line(RECORD, num_steps=100)
    for part in (
        "step  20/100",
        "loss 2.5000",
        "41k tokens",
        "1,234 tok/s",
        "mfu 25.0 %",
        "step 500 ms",
        "0:00:40 left",
    ):
        assert part in line, line
    assert "mfu" not in report_line(RECORD | {"mfu": None}, num_steps=100)


def test_tensorboard_gets_every_number(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    board = TensorBoard(tmp_path)
    board.write(RECORD | {"mfu": None})
    board.close()
    events = EventAccumulator(str(tmp_path)).Reload()
    assert set(events.Tags()["scalars"]) == {f"train/{name}" for name in RECORD} - {
        "train/mfu",
        "train/step",
        "train/attempt",
        "train/data_fingerprint",
    }
    (event,) = events.Scalars("train/loss")
    assert (event.step, event.value) == (20, 2.5)


def test_the_clock_leaves_pauses_out_and_starts_anew() -> None:
    clock = Clock()
    clock.step_done(0.5)
    clock.step_done(1.5)
    clock.pause(-10.0)  # ten seconds in the past, instead of sleeping for them
    step_s, wait_s = clock.read()
    assert 5.0 <= step_s < 5.1 and wait_s == 1.0
    assert clock.read()[0] < 0.1


def test_the_matmul_rate_is_positive() -> None:
    assert measure_matmul_flops(torch.float32, size=128, rounds=2) > 1e6
