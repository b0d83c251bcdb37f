"""Trackers get what they should, and one that raises or hangs harms nobody."""

from __future__ import annotations

import json
import logging
import resource
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from fms_fsdp.config import LogConfig, OptimConfig, TrainConfig
from fms_fsdp.metrics import trackers
from fms_fsdp.metrics.trackers import QUEUE_SIZE, BackgroundTracker, Record, open_trackers
from tests.cli import ROOT, TINY, metrics, status, trained

RECORD: Record = {
    "step": 20,
    "attempt": 1,
    "tokens_seen": 40960,
    "samples_seen": 640,
    "time": 1.5,
    "loss": 2.5,
    "lr": 1e-3,
    "step_time_ms": 12.0,
    "grad_norm": float("nan"),
    "finish_at": "tomorrow",
}


class Recorder:
    """Keeps its records, and calls `take` for each."""

    def __init__(self, take: Callable[[], object] = lambda: None) -> None:
        self.take = take
        self.records: list[Record] = []
        self.closed_in = ""

    def write(self, record: Record) -> None:
        self.records.append(record)
        self.take()

    def close(self) -> None:
        self.closed_in = threading.current_thread().name


@pytest.fixture
def logged(caplog: pytest.LogCaptureFixture) -> pytest.LogCaptureFixture:
    caplog.set_level(logging.INFO, "fms_fsdp")
    return caplog


def test_records_arrive_in_order_in_another_thread() -> None:
    kept = Recorder()
    background = BackgroundTracker("kept", lambda: kept)
    for step in range(50):
        background.write({"step": step})
    background.close()
    assert [record["step"] for record in kept.records] == list(range(50))
    assert kept.closed_in == "tracker kept"


def test_tracker_gets_its_metrics_at_intervals() -> None:
    kept = Recorder()
    background = BackgroundTracker("kept", lambda: kept, ("loss", "*_ms@10"))
    for step in (1, 6, 11, 12, 25):
        background.write({**RECORD, "step": step, "data_ms": 2.0})
        background.write({"step": step, "save_ms": 3.0} if step > 6 else {"step": step})
    background.close()
    named = {"loss": [1, 6, 11, 12, 25], "save_ms": [11, 25]}
    named |= {"data_ms": [1, 11, 25], "step_time_ms": [1, 11, 25]}
    for name, steps in named.items():
        assert [record["step"] for record in kept.records if name in record] == steps
    progress = {"step", "attempt", "tokens_seen", "samples_seen", "time"}
    assert {name for record in kept.records for name in record} == progress | named.keys()


def test_raising_tracker_is_switched_off_once(logged: pytest.LogCaptureFixture) -> None:
    def fail() -> None:
        raise SystemExit("the server\nis gone")

    raising = Recorder(fail)
    background = BackgroundTracker("broken", lambda: raising)
    for _ in range(3):
        background.write(RECORD)
        time.sleep(0.05)
    background.close()
    assert logged.messages == ["tracker broken is switched off: SystemExit: the server is gone"]
    assert len(raising.records) == 1 and background.dropped == 0


def test_hanging_tracker_does_not_block_training(
    logged: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(trackers, "CLOSE_TIMEOUT_S", 0.3)
    free = threading.Event()
    background = BackgroundTracker("stuck", lambda: Recorder(lambda: free.wait(60)))
    begin = time.monotonic()
    background.write(RECORD)
    while not background._queue.empty():
        time.sleep(0.01)  # it has taken the first
    for _ in range(QUEUE_SIZE + 7):
        background.write(RECORD)
    background.close()
    assert time.monotonic() - begin < 5 and background.dropped == 7
    assert logged.messages == [
        "tracker stuck did not finish within 0 s; the run ends without it",
        "tracker stuck was too slow: dropped 7 records",
    ]
    free.set()


def started(step: int = 0, samples: int = 0, tokens: int = 0) -> Any:
    """What trackers read of the state at the start of a launch."""
    return SimpleNamespace(step=step, sequences_seen=samples, tokens_seen=tokens)


def board(folder: Path, *records: Record, start: Any = None) -> EventAccumulator:
    """Writes the records of a launch into a run directory, and reads them as TensorBoard does."""
    section = LogConfig(trackers=("tensorboard",), output_dir=str(folder))
    config = TrainConfig(optim=OptimConfig(learning_rate=2e-3), log=section)
    (background,) = open_trackers(config, start or started())
    for record in records:
        background.write(record)
    background.close()
    return EventAccumulator(str(folder / "tensorboard")).Reload()


def points(events: EventAccumulator, tag: str) -> list[tuple[int, float]]:
    return [(event.step, event.value) for event in events.Scalars(tag)]


def test_tensorboard_has_numbers_over_three_axes(tmp_path: Path) -> None:
    progress = {"step": 20, "tokens_seen": 40960, "samples_seen": 640, "attempt": 1, "time": 1.5}
    more = {"mem_gib": 1.0, "epoch/web": 0.25, "mfu": 0.5, "gpu_clock_mhz": 1980.0}
    evaluated = {"eval/web/loss": 3.0, "eval/loss": 3.0, "test/web/loss": 3.5}
    text = {"samples": "# a text"}
    events = board(tmp_path, RECORD | more, progress | evaluated, progress | text)
    names = "loss/loss loss/lr time_ms/step_time_ms memory/mem_gib data/epoch/web speed/mfu"
    names += " speed/gpu_clock_mhz eval/web/loss eval/loss eval/test/web/loss"
    assert set(events.Tags()["scalars"]) == set(names.split())
    assert points(events, "loss/loss") == [(20, 2.5)]
    assert events.Scalars("loss/lr")[0].wall_time == 1.5
    assert set(events.Tags()["tensors"]) == {"config/text_summary", "samples/text_summary"}
    for axis, step in (("by_tokens", 40960), ("by_samples", 640)):
        copy = EventAccumulator(str(tmp_path / "tensorboard" / axis)).Reload()
        assert points(copy, f"{axis}/mfu") == [(step, 0.5)]
        assert len(copy.Tags()["scalars"]) == len(names.split())


def test_tensorboard_drops_points_after_resume_step(tmp_path: Path) -> None:
    """A run that went back to a checkpoint was a zigzag: steps 10, 20, 30, 40, 30 of one curve."""

    def record(step: int, loss: float) -> Record:
        place = {"step": step, "tokens_seen": 64 * step, "samples_seen": step, "time": 0.0}
        return place | {"loss": loss}

    board(tmp_path, *(record(step, 9.0) for step in (10, 20, 30, 40)))
    time.sleep(1.1)  # TensorBoard reads the files in the order of the seconds in their names
    events = board(tmp_path, record(30, 2.0), start=started(20, 20, 64 * 20))
    assert points(events, "loss/loss") == [(10, 9.0), (20, 9.0), (30, 2.0)]
    events = EventAccumulator(str(tmp_path / "tensorboard" / "by_tokens")).Reload()
    assert points(events, "by_tokens/loss") == [(640, 9.0), (1280, 9.0), (1920, 2.0)]


def test_tensorboard_folder_of_another_run_is_named(
    tmp_path: Path, logged: pytest.LogCaptureFixture
) -> None:
    """All points of the first run disappeared without a line."""
    for name in ("a", "a", "b"):
        assert not logged.messages
        (tmp_path / name).mkdir(exist_ok=True)
        log = {"tensorboard_dir": str(tmp_path / "board"), "output_dir": str(tmp_path / name)}
        trackers.TensorBoardTracker(
            TrainConfig(log=LogConfig(trackers=("tensorboard",), **log)),
            {"step": 0, "samples_seen": 0, "tokens_seen": 0},
        ).close()
    (message,) = logged.messages
    assert f"board has the points of another run ({tmp_path / 'a'})" in message


def test_full_disk_switches_tensorboard_off(
    tmp_path: Path, logged: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]
) -> None:
    _, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    config = TrainConfig(log=LogConfig(trackers=("tensorboard",), output_dir=str(tmp_path)))
    (background,) = open_trackers(config, started())
    resource.setrlimit(resource.RLIMIT_FSIZE, (2000, hard))
    try:
        begin = time.monotonic()
        while background._thread.is_alive() and time.monotonic() - begin < 40:
            background.write(RECORD)
            time.sleep(0.02)
        background.close()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (hard, hard))
    (message,) = logged.messages
    assert "tensorboard is switched off: OSError" in message
    assert "Traceback" not in capfd.readouterr().err


def test_empty_wandb_id_starts_a_new_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """After a crash, "Run ID cannot be empty" switched wandb off in every later launch."""
    ids: list[str | None] = []

    def init(**settings: Any) -> Any:
        ids.append(settings["id"])
        return SimpleNamespace(id="a1", define_metric=lambda *_, **__: None)

    monkeypatch.setitem(sys.modules, "wandb", SimpleNamespace(init=init, Settings=lambda **_: None))
    (tmp_path / "wandb.id").touch()
    config = TrainConfig(log=LogConfig(output_dir=str(tmp_path)))
    for _ in range(2):
        trackers.WandbTracker(config, {})
    assert ids == [None, "a1"]


def test_every_metric_has_its_group(tmp_path: Path) -> None:
    """The group for names that match no pattern has losses, gradients and the learning rate."""
    argv = ("--num_steps=1", "--eval_interval=1", "--eval_steps=1", "--diagnostics=True")
    trained(*TINY, *argv, "--log_num_zeros=True", f"--output_dir={tmp_path}")
    tags = EventAccumulator(str(tmp_path / "tensorboard")).Reload().Tags()["scalars"]
    groups = {tag.partition("/")[0] for tag in tags}
    assert groups == set("loss eval speed time_ms memory data".split())
    kept = "loss loss_mean perplexity grad_norm grad_norm_mean grad_norm_max skipped_steps"
    kept += " grad_zeros lr"
    assert {tag[5:] for tag in tags if tag.startswith("loss/")} == set(kept.split())


def test_none_opens_no_tracker() -> None:
    assert open_trackers(TrainConfig(log=LogConfig(trackers=("none",))), started()) == []


@pytest.mark.slow
def test_run_survives_a_failed_tracker_login(tmp_path: Path) -> None:
    pytest.importorskip("wandb")
    argv = [*TINY, "--trackers=wandb,tensorboard", "--num_steps=3", f"--output_dir={tmp_path}"]
    folders = {"WANDB_CONFIG_DIR": str(tmp_path), "HOME": str(tmp_path)}
    output = trained(*argv, WANDB_MODE="online", WANDB_API_KEY="", **folders)
    assert output.count("tracker wandb is switched off") == 1 and len(metrics(tmp_path)) == 3


HANGING = """
import atexit, os, runpy, sys, time
sys.path.insert(0, os.getcwd())
from fms_fsdp.metrics import trackers
def hang(*_):
    atexit.register(time.sleep, 1000)
    time.sleep(1000)
trackers.TRACKERS["wandb"] = hang
trackers.CLOSE_TIMEOUT_S = 0.5
sys.argv[0] = "main_training.py"
runpy.run_path("main_training.py", run_name="__main__")
"""


@pytest.mark.slow
def test_launch_ends_despite_a_hanging_tracker(tmp_path: Path) -> None:
    """With its own exit status; no exit handler of the client can wait."""
    script = tmp_path / "hanging.py"
    script.write_text(HANGING)
    argv = [*TINY, "--trackers=wandb", "--num_steps=2", f"--output_dir={tmp_path}"]
    command = [sys.executable, str(script), *argv]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert result.returncode == 0 and "tracker wandb did not finish" in result.stdout, result.stderr
    assert status(tmp_path)["status"] == "finished" and len(metrics(tmp_path)) == 2
    assert json.loads((tmp_path / "metrics.jsonl").read_text().splitlines()[-1])["event"] == "end"
