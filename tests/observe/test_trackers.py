"""Trackers get what they should, and one that raises or hangs harms nobody."""

from __future__ import annotations

import json
import logging
import math
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from tensorboard.backend.event_processing.data_provider import MultiplexerDataProvider
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.backend.event_processing.plugin_event_multiplexer import EventMultiplexer
from tensorboard.context import RequestContext
from tensorboard.plugins.base_plugin import TBContext
from tensorboard.plugins.hparams.api_pb2 import ColParams, ListSessionGroupsRequest
from tensorboard.plugins.hparams.backend_context import Context
from tensorboard.plugins.hparams.list_session_groups import Handler

from fms_fsdp.config import LogConfig, OptimConfig, TrainConfig, flag_table
from fms_fsdp.observe import trackers
from fms_fsdp.observe.metrics import Record
from fms_fsdp.observe.trackers import QUEUE_SIZE, Background, build_trackers
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
    background = Background("kept", lambda: kept)
    for step in range(50):
        background.write({"step": step})
    background.close()
    assert [record["step"] for record in kept.records] == list(
        range(50)
    ) and kept.closed_in == "tracker kept"


def test_a_tracker_gets_the_metrics_it_is_named() -> None:
    kept = Recorder()
    background = Background("kept", lambda: kept, ("lr", "*_ms"))
    background.write(RECORD)
    background.close()
    places = {"step", "attempt", "tokens_seen", "samples_seen", "time"}
    assert set(kept.records[0]) == places | {"lr", "step_time_ms"}


def test_a_tracker_gets_each_metric_at_most_as_often_as_said() -> None:
    kept = Recorder()
    background = Background("kept", lambda: kept, ("loss", "*_ms@10"))
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
    assert result.returncode == 2 and f"--tracker_metrics={text} must be NAMES or" in result.stderr


def test_a_tracker_that_raises_is_told_once_and_switched_off(
    logged: pytest.LogCaptureFixture,
) -> None:
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


def board(folder: Path, *records: Record, **flags: Any) -> EventAccumulator:
    """What TensorBoard reads of a launch that wrote the records into a run folder."""
    section = LogConfig(trackers=("tensorboard",), output_dir=str(folder), **flags)
    config = TrainConfig(optim=OptimConfig(learning_rate=2e-3), log=section)
    place = Path(section.tensorboard_dir or folder / "tensorboard")
    for number, path in enumerate(sorted(place.glob("*"))):  # a process writes one file in a second
        path.rename(path.with_name(f"events.out.tfevents.{number}"))
    (background,) = build_trackers(config)
    for record in records:
        background.write(record)
    background.close()
    return EventAccumulator(str(place)).Reload()


def points(events: EventAccumulator, tag: str) -> list[tuple[int, float]]:
    return [(event.step, event.value) for event in events.Scalars(tag)]


def validation(step: int, loss: float) -> Record:
    place = {"step": step, "tokens_seen": 2048 * step, "samples_seen": 32 * step, "attempt": 1}
    return {**place, "eval/web/loss": loss, "eval/loss": loss, "eval_s": 0.5}


def test_tensorboard_gets_every_number_in_its_group_and_over_tokens_and_samples(
    tmp_path: Path,
) -> None:
    memory = {
        "mem_gib": 1.0,
        "shm_gib": 0.5,
        "epoch/web": 0.25,
        "mfu": 0.5,
        "gpu_clock_mhz": 1980.0,
    }
    tested = {"step": 20, "tokens_seen": 40960, "samples_seen": 640, "test/web/loss": 3.5}
    events = board(
        tmp_path, RECORD | memory, validation(20, 3.0), tested, tensorboard_dir=str(tmp_path / "b")
    )
    names = {"loss/loss", "loss/lr", "time_ms/step_time_ms", "memory/mem_gib", "memory/shm_gib"}
    names |= {"data/epoch/web", "speed/mfu", "speed/gpu_clock_mhz", "eval/eval_s", "eval/best_loss"}
    names |= {"eval/web/loss", "eval/loss", "eval/test/web/loss"}
    written = (
        "loss lr step_time_ms mem_gib shm_gib epoch/web mfu gpu_clock_mhz eval_s eval/best_loss"
    )
    all_names = {*written.split(), "eval/web/loss", "eval/loss", "test/web/loss"}
    copies = {f"versus_{place}/{name}" for place in ("tokens", "samples") for name in all_names}
    assert set(events.Tags()["scalars"]) == names | copies
    assert max(names) < min(copies), "the copies stand last"
    assert points(events, "versus_samples/mfu") == [(640, 0.5)]
    assert points(events, "eval/web/loss") == [(20, 3.0)] and points(events, "loss/loss") == [
        (20, 2.5)
    ]
    assert points(events, "versus_tokens/loss") == [(40960, 2.5)]


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
        "loss eval speed time_ms memory data versus_tokens versus_samples".split()
    )
    kept = {tag.partition("/")[2] for tag in tags if tag.startswith("loss/")}
    assert kept == {
        *("loss", "loss_mean", "perplexity", "grad_norm", "grad_norm_mean", "grad_norm_max"),
        *("skipped_steps", "grad_zeros", "lr"),
    }


def test_events_wait_for_the_queue_to_fill(tmp_path: Path) -> None:
    section = LogConfig(
        trackers=("tensorboard",), tensorboard_queue_size=8, output_dir=str(tmp_path)
    )
    tracker = trackers.TensorBoard(TrainConfig(log=section))
    tracker.write(RECORD)  # the version, text, two of hparams, two of this record: six
    (file,) = (tmp_path / "tensorboard").iterdir()
    before = file.stat().st_size
    tracker.write(RECORD)
    after = file.stat().st_size
    tracker.close()
    assert (
        before < after
        and points(EventAccumulator(str(file.parent)).Reload(), "loss/loss") == [(20, 2.5)] * 2
    )


def test_the_best_validation_loss_is_that_of_the_run_and_not_of_steps_made_again(
    tmp_path: Path,
) -> None:
    """Step 30 of the first launch lies ahead of the second one, which begins at step 10."""
    first = [
        validation(10, 3.0),
        validation(20, 2.0),
        validation(30, 1.0),
        validation(40, math.nan),
    ]
    board(tmp_path, *first)
    lines = [json.dumps(record).replace("NaN", "null") + "\n" for record in [RECORD, *first]]
    (tmp_path / "metrics.jsonl").write_text("".join(lines) + '{"eval/loss": 0.1, "st')
    events = board(tmp_path, validation(20, 2.5), validation(40, 4.0))
    best = [(10, 3.0), (20, 2.0), (30, 1.0), (20, 2.5), (40, 1.0)]
    assert points(events, "eval/best_loss") == best


@pytest.mark.xfail(strict=True, reason='mended by "Light, 5"')
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


def test_the_flags_are_a_text_and_hparams_written_once(tmp_path: Path) -> None:
    """TensorBoard's own page compares two runs by their flags and last losses."""
    for name, loss in (("a", 3.0), ("b", 2.0)):
        board(tmp_path / name, RECORD | {"loss_mean": 2.75}, validation(20, loss))
        (tmp_path / name / "metrics.jsonl").write_text(json.dumps(validation(20, loss)) + "\n")
        events = board(tmp_path / name, validation(40, loss + 1))  # a second launch
        assert len(list((tmp_path / name / "tensorboard").iterdir())) == 2
        (shown,) = events.Tensors("config/text_summary")
        text = shown.tensor_proto.string_val[0].decode()
        assert (
            "| learning_rate | `0.002` | `0.0003` |" in text
            and "| datasets | `empty` | `empty` |" in text
        )
        assert text.count("\n") == 1 + len(flag_table(TrainConfig))
    multiplexer = EventMultiplexer().AddRunsFromDirectory(str(tmp_path)).Reload()
    found = TBContext(
        logdir=str(tmp_path), data_provider=MultiplexerDataProvider(multiplexer, str(tmp_path))
    )
    backend, ask = Context(found), ListSessionGroupsRequest(allowed_statuses=range(5), slice_size=9)
    experiment = backend.experiment_from_metadata(
        *(RequestContext(), "", True), backend.hparams_metadata(RequestContext(), ""), []
    )
    assert experiment.hparam_infos[0].name == "learning_rate"
    assert {"num_steps", "seq_length", "model_variant"} <= {
        info.name for info in experiment.hparam_infos
    }
    ask.col_params.extend(ColParams(metric=info.name) for info in experiment.metric_infos)
    answer = Handler(RequestContext(), backend, "", ask).run()
    assert [group.hparams["learning_rate"].number_value for group in answer.session_groups] == [
        0.002
    ] * 2
    values = [
        {metric.name.tag: metric.value for metric in group.metric_values}
        for group in answer.session_groups
    ]
    shown = [
        {"eval/loss": last, "eval/best_loss": last - 1, "loss/loss_mean": 2.75}
        for last in (4.0, 3.0)
    ]
    assert sorted(values, key=lambda value: -value["eval/loss"]) == shown


def test_none_means_none() -> None:
    assert build_trackers(TrainConfig(log=LogConfig(trackers=("none",)))) == []
    with pytest.raises(
        ValueError,
        match=r"--trackers=none,wandb must not combine none with others; remove none",
    ):
        TrainConfig(log=LogConfig(trackers=("none", "wandb")))


def test_a_tracker_that_is_not_installed_ends_the_launch_with_one_line(tmp_path: Path) -> None:
    try:
        import aim  # noqa: F401
    except ImportError:
        result = run(*TINY, "--trackers=aim", f"--output_dir={tmp_path}")
        assert result.returncode == 2
        assert (
            "--trackers=aim requires the package aim, which is not installed; run: pip install aim"
            in result.stderr
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
    assert [
        folder.name.rpartition("-")[2] for folder in sorted(tmp_path.glob("wandb/offline-run-*"))
    ] == [
        kept,
        kept,
    ]
    history = next(
        tmp_path.glob(f"mlruns/*/{(tmp_path / 'mlflow.id').read_text()}/metrics/train/loss")
    ).read_text()
    told = {int(line.split()[2]): float(line.split()[1]) for line in history.splitlines()}
    assert told == {
        step: pytest.approx(record["loss"]) for step, record in metrics(tmp_path).items()
    }


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
        "trackers\nfrom fms_fsdp.extras.trackers import ADAPTERS\n"
        "def hang(*_):\n    atexit.register(time.sleep, 1000)\n    "
        "time.sleep(1000)\nADAPTERS['wandb'] = hang\ntrackers.PATIENCE_S = 0.5\nsys.argv[0] = "
        "'main_training.py'\nrunpy.run_path('main_training.py', run_name='__main__')\n"
    )
    argv = [*TINY, "--trackers=wandb", "--num_steps=2", f"--output_dir={tmp_path}"]
    result = subprocess.run(
        [sys.executable, str(script), *argv], cwd=ROOT, capture_output=True, text=True, timeout=100
    )
    assert result.returncode == 0 and "tracker wandb did not end" in result.stdout, result.stderr
    assert status(tmp_path)["status"] == "finished" and len(metrics(tmp_path)) == 2
    assert json.loads((tmp_path / "metrics.jsonl").read_text().splitlines()[-1])["event"] == "end"
