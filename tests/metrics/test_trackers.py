"""Trackers get what they should, and one that raises or hangs harms nobody."""

from __future__ import annotations

import json
import logging
import resource
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from fms_fsdp.config import LogConfig, OptimConfig, TrainConfig
from fms_fsdp.metrics import trackers
from fms_fsdp.metrics.trackers import QUEUE_SIZE, BackgroundTracker, Record, open_trackers
from tests.cli import ROOT, TINY, metrics, run, status, trained

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
    """Keeps what it gets."""

    def __init__(self) -> None:
        self.records: list[Record] = []
        self.closed_in = ""

    def write(self, record: Record) -> None:
        self.records.append(record)

    def close(self) -> None:
        self.closed_in = threading.current_thread().name


class Raising(Recorder):
    def write(self, record: Record) -> None:
        super().write(record)
        raise SystemExit("the server\nis gone")


class Hanging(Recorder):
    def __init__(self, free: threading.Event) -> None:
        super().__init__()
        self.free = free

    def write(self, record: Record) -> None:
        self.free.wait(60)


@pytest.fixture
def logged(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> pytest.LogCaptureFixture:
    monkeypatch.setattr(logging.getLogger("fms_fsdp"), "propagate", True)
    caplog.set_level(logging.INFO, "fms_fsdp")
    return caplog


def test_records_arrive_in_order_in_the_trackers_own_thread() -> None:
    kept = Recorder()
    background = BackgroundTracker("kept", lambda: kept)
    for step in range(50):
        background.write({"step": step})
    background.close()
    assert [record["step"] for record in kept.records] == list(
        range(50)
    ) and kept.closed_in == "tracker kept"


def test_a_tracker_gets_the_metrics_it_is_named() -> None:
    kept = Recorder()
    background = BackgroundTracker("kept", lambda: kept, ("lr", "*_ms"))
    background.write(RECORD)
    background.close()
    places = {"step", "attempt", "tokens_seen", "samples_seen", "time"}
    assert set(kept.records[0]) == places | {"lr", "step_time_ms"}


def test_a_tracker_gets_each_metric_at_most_as_often_as_said() -> None:
    kept = Recorder()
    background = BackgroundTracker("kept", lambda: kept, ("loss", "*_ms@10"))
    for step in (1, 6, 11, 12, 25):
        background.write({"step": step, "loss": 1.0, "data_ms": 2.0})
        background.write({"step": step, "save_ms": 3.0} if step > 6 else {"step": step})
    background.close()
    steps = {
        name: [r["step"] for r in kept.records if name in r]
        for name in ("loss", "data_ms", "save_ms")
    }
    assert steps == {"loss": [1, 6, 11, 12, 25], "data_ms": [1, 11, 25], "save_ms": [11, 25]}


@pytest.mark.parametrize("text", ["*_ms@", "*_ms@0", "@5", "a@b"])
def test_a_metric_with_a_wrong_interval_is_refused(text: str) -> None:
    result = run(*TINY, f"--tracker_metrics=loss,{text}")
    assert result.returncode == 2 and "--tracker_metrics=" in result.stderr


def test_a_tracker_that_raises_is_told_once_and_switched_off(
    logged: pytest.LogCaptureFixture,
) -> None:
    raising = Raising()
    background = BackgroundTracker("broken", lambda: raising)
    for _ in range(3):
        background.write(RECORD)
        time.sleep(0.05)
    background.close()
    assert logged.messages == ["tracker broken is switched off: SystemExit: the server is gone"]
    assert len(raising.records) == 1 and background.dropped == 0


def test_a_tracker_that_hangs_holds_nobody_up(
    logged: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(trackers, "CLOSE_TIMEOUT_S", 0.3)
    free = threading.Event()
    background = BackgroundTracker("stuck", lambda: Hanging(free))
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


def test_a_tracker_whose_start_hangs_holds_nobody_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trackers, "CLOSE_TIMEOUT_S", 0.2)
    free = threading.Event()

    def connect() -> Recorder:
        free.wait(60)
        return Recorder()

    begin = time.monotonic()
    background = BackgroundTracker("far", connect)
    background.write(RECORD)
    background.close()
    assert time.monotonic() - begin < 5
    free.set()


def started(step: int = 0, samples: int = 0, tokens: int = 0) -> Any:
    """What trackers read of the state at the start of a launch."""
    return SimpleNamespace(step=step, samples_seen=samples, tokens_seen=tokens)


def board(folder: Path, *records: Record, start: Any = None, **flags: Any) -> EventAccumulator:
    """What TensorBoard reads of a launch that wrote the records into a run folder."""
    section = LogConfig(trackers=("tensorboard",), output_dir=str(folder), **flags)
    config = TrainConfig(optim=OptimConfig(learning_rate=2e-3), log=section)
    place = Path(section.tensorboard_dir or folder / "tensorboard")
    (background,) = open_trackers(config, start or started())
    for record in records:
        background.write(record)
    background.close()
    return EventAccumulator(str(place)).Reload()


def points(events: EventAccumulator, tag: str) -> list[tuple[int, float]]:
    return [(event.step, event.value) for event in events.Scalars(tag)]


def test_tensorboard_gets_every_number_over_three_axes(tmp_path: Path) -> None:
    place = {"step": 20, "tokens_seen": 40960, "samples_seen": 640, "attempt": 1, "time": 1.5}
    more = {"mem_gib": 1.0, "epoch/web": 0.25, "mfu": 0.5, "gpu_clock_mhz": 1980.0}
    folder = tmp_path / "b"
    events = board(
        tmp_path,
        RECORD | more,
        place | {"eval/web/loss": 3.0, "eval/loss": 3.0, "test/web/loss": 3.5},
        place | {"samples": "# a text"},
        tensorboard_dir=str(folder),
    )
    names = {"loss/loss", "loss/lr", "time_ms/step_time_ms", "memory/mem_gib", "data/epoch/web"}
    names |= {
        "speed/mfu",
        "speed/gpu_clock_mhz",
        "eval/web/loss",
        "eval/loss",
        "eval/test/web/loss",
    }
    assert set(events.Tags()["scalars"]) == names
    assert (
        points(events, "loss/loss") == [(20, 2.5)] and events.Scalars("loss/lr")[0].wall_time == 1.5
    )
    assert set(events.Tags()["tensors"]) == {"config/text_summary", "samples/text_summary"}
    for axis, step in (("by_tokens", 40960), ("by_samples", 640)):
        copy = EventAccumulator(str(folder / axis)).Reload()
        assert points(copy, f"{axis}/mfu") == [(step, 0.5)] and len(copy.Tags()["scalars"]) == len(
            names
        )


def test_tensorboard_drops_points_that_a_resumed_run_makes_again(tmp_path: Path) -> None:
    def record(step: int, loss: float) -> Record:
        place = {"step": step, "tokens_seen": 64 * step, "samples_seen": step, "time": 0.0}
        return place | {"loss": loss}

    board(tmp_path, *(record(step, 9.0) for step in (10, 20, 30, 40)))
    start = started(20, 20, 64 * 20)
    events = board(tmp_path, record(30, 2.0), start=start)
    assert points(events, "loss/loss") == [(10, 9.0), (20, 9.0), (30, 2.0)]
    events = EventAccumulator(str(tmp_path / "tensorboard" / "by_tokens")).Reload()
    assert points(events, "by_tokens/loss") == [(640, 9.0), (1280, 9.0), (1920, 2.0)]


def test_full_disk_switches_tensorboard_off_in_one_line(
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
    assert (
        len(logged.messages) == 1 and "tensorboard is switched off: OSError" in logged.messages[0]
    )
    assert "Traceback" not in capfd.readouterr().err


def test_tensorboard_curves_never_go_back(tmp_path: Path) -> None:
    """A run that went back to a checkpoint was a zigzag: steps 10, 20, 30, 40, 30 of one curve."""
    argv = [*TINY, "--checkpoint_interval=2", f"--output_dir={tmp_path}"]
    trained(*argv, "--num_steps=6")
    trained(*argv, "--num_steps=6", "--resume_step=4")
    files = (tmp_path / "tensorboard").rglob("events.out.tfevents.*")
    for folder in {file.parent for file in files}:
        events = EventAccumulator(str(folder)).Reload()
        for name in events.Tags()["scalars"]:
            steps = [event.step for event in events.Scalars(name)]
            assert len(steps) == 6 and sorted(set(steps)) == steps, name


def test_every_name_of_a_report_has_its_group(tmp_path: Path) -> None:
    """Nothing but losses, gradients and the rate is left in the group that takes what no pattern names."""
    argv = (
        "--num_steps=2",
        "--eval_interval=1",
        "--eval_steps=1",
        "--diagnostics=True",
        "--log_num_zeros=True",
    )
    trained(*TINY, *argv, f"--output_dir={tmp_path}")
    events = EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    tags = events.Tags()["scalars"]
    assert {tag.partition("/")[0] for tag in tags} == set(
        "loss eval speed time_ms memory data".split()
    )
    kept = {tag.partition("/")[2] for tag in tags if tag.startswith("loss/")}
    assert kept == {
        *("loss", "loss_mean", "perplexity", "grad_norm", "grad_norm_mean", "grad_norm_max"),
        *("skipped_steps", "grad_zeros", "lr"),
    }


def test_none_means_none() -> None:
    assert open_trackers(TrainConfig(log=LogConfig(trackers=("none",))), started()) == []
    with pytest.raises(
        ValueError, match=r"--trackers=none,wandb must not combine none with others; remove none"
    ):
        TrainConfig(log=LogConfig(trackers=("none", "wandb")))


@pytest.mark.slow
def test_a_run_outlives_a_tracker_that_cannot_log_in(tmp_path: Path) -> None:
    pytest.importorskip("wandb")
    argv = [*TINY, "--trackers=wandb,tensorboard", "--num_steps=3", f"--output_dir={tmp_path}"]
    output = trained(
        *argv,
        WANDB_MODE="online",
        WANDB_API_KEY="",
        WANDB_CONFIG_DIR=str(tmp_path),
        HOME=str(tmp_path),
    )
    assert output.count("tracker wandb is switched off") == 1 and len(metrics(tmp_path)) == 3


@pytest.mark.slow
def test_a_launch_ends_though_a_tracker_hangs_for_ever(tmp_path: Path) -> None:
    """Its exit status is its own, and no exit handler of the client's gets a chance to wait."""
    script = tmp_path / "hanging.py"
    script.write_text(
        "import atexit, os, runpy, sys, time\nsys.path.insert(0, os.getcwd())\nfrom fms_fsdp.metrics import "
        "trackers\nADAPTERS = trackers.TRACKERS\n"
        "def hang(*_):\n    atexit.register(time.sleep, 1000)\n    "
        "time.sleep(1000)\nADAPTERS['wandb'] = hang\ntrackers.CLOSE_TIMEOUT_S = 0.5\nsys.argv[0] = "
        "'main_training.py'\nrunpy.run_path('main_training.py', run_name='__main__')\n"
    )
    argv = [*TINY, "--trackers=wandb", "--num_steps=2", f"--output_dir={tmp_path}"]
    result = subprocess.run(
        [sys.executable, str(script), *argv], cwd=ROOT, capture_output=True, text=True, timeout=100
    )
    assert result.returncode == 0 and "tracker wandb did not finish" in result.stdout, result.stderr
    assert status(tmp_path)["status"] == "finished" and len(metrics(tmp_path)) == 2
    assert json.loads((tmp_path / "metrics.jsonl").read_text().splitlines()[-1])["event"] == "end"
