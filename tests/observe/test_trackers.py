"""Trackers get what they should, and one that raises or hangs harms nobody."""

from __future__ import annotations

import json
import logging
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from fms_fsdp.config import LogConfig
from fms_fsdp.observe import trackers
from fms_fsdp.observe.metrics import Record
from fms_fsdp.observe.trackers import QUEUE_SIZE, Background, RunInfo, build_trackers
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
def logged(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> pytest.LogCaptureFixture:
    monkeypatch.setattr(logging.getLogger("fms_fsdp"), "propagate", True)
    caplog.set_level(logging.INFO, "fms_fsdp")
    return caplog


def test_records_arrive_in_order_in_the_trackers_own_thread() -> None:
    kept = Recorder()
    background = Background("kept", lambda: kept)
    for step in range(50):
        background.write({"step": step})
    background.close()
    assert [record["step"] for record in kept.records] == list(range(50)) and kept.closed_in == "tracker kept"


def test_a_tracker_gets_the_metrics_it_is_named() -> None:
    kept = Recorder()
    background = Background("kept", lambda: kept, ("lr", "*_ms"))
    background.write(RECORD)
    background.close()
    places = {"step", "attempt", "tokens_seen", "samples_seen", "time"}
    assert set(kept.records[0]) == places | {"lr", "step_time_ms"}


def test_a_tracker_that_raises_is_told_once_and_switched_off(logged: pytest.LogCaptureFixture) -> None:
    raising = Raising()
    background = Background("broken", lambda: raising)
    for _ in range(3):
        background.write(RECORD)
        time.sleep(0.05)
    background.close()
    assert logged.messages == ["tracker broken is switched off: SystemExit: the server is gone"]
    assert len(raising.records) == 1 and background.dropped == 0


def test_a_tracker_that_hangs_holds_nobody_up(
    logged: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(trackers, "PATIENCE_S", 0.3)
    free = threading.Event()
    background = Background("stuck", lambda: Hanging(free))
    begin = time.monotonic()
    background.write(RECORD)
    while not background._queue.empty():
        time.sleep(0.01)  # it has taken the first
    for _ in range(QUEUE_SIZE + 7):
        background.write(RECORD)
    background.close()
    assert time.monotonic() - begin < 5 and background.dropped == 7
    assert logged.messages == [
        "tracker stuck did not end within 0 s; the run ends without it",
        "tracker stuck was too slow: 7 records were not written",
    ]
    free.set()


def test_a_tracker_whose_start_hangs_holds_nobody_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trackers, "PATIENCE_S", 0.2)
    free = threading.Event()

    def connect() -> Recorder:
        free.wait(60)
        return Recorder()

    begin = time.monotonic()
    background = Background("far", connect)
    background.write(RECORD)
    background.close()
    assert time.monotonic() - begin < 5
    free.set()


def test_tensorboard_gets_every_number_over_steps_and_over_tokens(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    section = LogConfig(trackers=("tensorboard",), tensorboard_dir=str(tmp_path / "elsewhere"))
    (board,) = build_trackers(section, RunInfo("name", tmp_path, {}))
    board.write(RECORD)
    board.write({"step": 20, "tokens_seen": 40960, "attempt": 1, "eval/web/loss": 3.0})
    board.close()
    events = EventAccumulator(str(tmp_path / "elsewhere")).Reload()
    names = {"train/loss", "train/lr", "train/step_time_ms", "eval/web/loss"}
    assert set(events.Tags()["scalars"]) == names | {f"by_tokens/{name}" for name in names}
    places = {tag: [(event.step, event.value) for event in events.Scalars(tag)] for tag in sorted(names)[:2]}
    assert places == {"eval/web/loss": [(20, 3.0)], "train/loss": [(20, 2.5)]}
    assert [(event.step, event.value) for event in events.Scalars("by_tokens/train/loss")] == [(40960, 2.5)]


def test_none_means_none() -> None:
    assert build_trackers(LogConfig(trackers=("none",)), RunInfo("name", Path("."), {})) == []
    with pytest.raises(
        ValueError, match=r"--trackers \(none,wandb\) must not name others beside none; leave one out"
    ):
        LogConfig(trackers=("none", "wandb"))


def test_a_tracker_that_is_not_installed_ends_the_launch_with_one_line(tmp_path: Path) -> None:
    try:
        import aim  # noqa: F401
    except ImportError:
        result = run(*TINY, "--trackers=aim", f"--output_dir={tmp_path}")
        assert result.returncode == 2
        assert (
            "--trackers (aim) needs the package aim, which is not installed; pip install aim" in result.stderr
        )
    else:
        pytest.skip("aim is installed")


@pytest.mark.slow
def test_wandb_and_mlflow_keep_one_run_over_two_launches(tmp_path: Path) -> None:
    for package in ("wandb", "mlflow"):
        pytest.importorskip(package)
    argv = [
        *TINY,
        "--trackers=wandb,mlflow",
        "--checkpoint_interval=2",
        f"--output_dir={tmp_path}",
        "--num_steps=4",
    ]
    results = [run(*argv, *more, WANDB_MODE="offline") for more in (["--exit_interval=2"], [])]
    outputs = [result.stdout + result.stderr for result in results]
    assert [result.returncode for result in results] == [75, 0], outputs
    assert not any("switched off" in output or "ends without it" in output for output in outputs)
    kept = (tmp_path / "wandb.id").read_text()
    assert [folder.name.rpartition("-")[2] for folder in sorted(tmp_path.glob("wandb/offline-run-*"))] == [
        kept,
        kept,
    ]
    history = next(
        tmp_path.glob(f"mlruns/*/{(tmp_path / 'mlflow.id').read_text()}/metrics/train/loss")
    ).read_text()
    told = {int(line.split()[2]): float(line.split()[1]) for line in history.splitlines()}
    assert told == {step: pytest.approx(record["loss"]) for step, record in metrics(tmp_path).items()}


@pytest.mark.slow
def test_a_run_outlives_a_tracker_that_cannot_log_in(tmp_path: Path) -> None:
    pytest.importorskip("wandb")
    argv = [*TINY, "--trackers=wandb,tensorboard", "--num_steps=3", f"--output_dir={tmp_path}"]
    output = trained(
        *argv, WANDB_MODE="online", WANDB_API_KEY="", WANDB_CONFIG_DIR=str(tmp_path), HOME=str(tmp_path)
    )
    assert output.count("tracker wandb is switched off") == 1 and len(metrics(tmp_path)) == 3


@pytest.mark.slow
def test_aim_keeps_a_run(tmp_path: Path) -> None:
    aim = pytest.importorskip("aim")
    trained(*TINY, "--trackers=aim", "--num_steps=3", f"--output_dir={tmp_path}")
    settings = dict(system_tracking_interval=None, capture_terminal_logs=False)
    found = aim.Run(run_hash=(tmp_path / "aim.id").read_text(), repo=str(tmp_path), **settings)
    assert {metric.name for metric in found.metrics()} >= {"train/loss", "train/lr"}
    found.close()


@pytest.mark.slow
def test_codecarbon_writes_its_account(tmp_path: Path) -> None:
    pytest.importorskip("codecarbon")
    trained(*TINY, "--trackers=codecarbon", "--num_steps=3", f"--output_dir={tmp_path}")
    assert len((tmp_path / "emissions.csv").read_text().splitlines()) == 2


@pytest.mark.slow
def test_a_launch_ends_though_a_tracker_hangs_for_ever(tmp_path: Path) -> None:
    """Its exit status is its own, and no exit handler of the client's gets a chance to wait."""
    script = tmp_path / "hanging.py"
    script.write_text(
        "import atexit, os, runpy, sys, time\nsys.path.insert(0, os.getcwd())\nfrom fms_fsdp.observe import "
        "trackers\ndef hang(*_):\n    atexit.register(time.sleep, 1000)\n    "
        "time.sleep(1000)\ntrackers.Wandb = hang\ntrackers.PATIENCE_S = 0.5\nsys.argv[0] = "
        "'main_training.py'\nrunpy.run_path('main_training.py', run_name='__main__')\n"
    )
    argv = [*TINY, "--trackers=wandb", "--num_steps=2", f"--output_dir={tmp_path}"]
    result = subprocess.run(
        [sys.executable, str(script), *argv], cwd=ROOT, capture_output=True, text=True, timeout=100
    )
    assert result.returncode == 0 and "tracker wandb did not end" in result.stdout, result.stderr
    assert status(tmp_path)["status"] == "finished" and len(metrics(tmp_path)) == 2
    assert json.loads((tmp_path / "metrics.jsonl").read_text().splitlines()[-1])["event"] == "end"
