"""Trackers: copies of `metrics.jsonl` in TensorBoard, wandb and others. None can stop or delay a run.

    record ─▶ Background: bounded queue ─▶ its own thread ─▶ adapter (TensorBoard, wandb, mlflow, …)

An adapter is made in its thread, because connecting may hang. One that raises is logged once and switched
off; the queue of one that hangs fills up, and what does not fit is counted and dropped; at the end each has a
short time to finish, then the run ends without it.
"""

from __future__ import annotations

import math
import os
import queue
import socket
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import partial
from pathlib import Path
from typing import Any, Protocol

from fms_fsdp.config import LogConfig
from fms_fsdp.observe.metrics import Record
from fms_fsdp.runtime import log

THREAD_PREFIX = "tracker "
QUEUE_SIZE = 1000  # records
PATIENCE_S = 30.0  # at the end of a launch
_POSITIONS = ("step", "tokens_seen", "samples_seen", "attempt", "time")


class Tracker(Protocol):
    """Where records go."""

    def write(self, record: Record) -> None: ...
    def close(self) -> None: ...


@dataclass(frozen=True)
class RunInfo:
    """What a tracker gets to know of the run at its start."""

    name: str
    folder: Path
    config: dict[str, Any]

    def known_id(self, tracker: str) -> str | None:
        """The tracker's own id of this run, from an earlier launch."""
        path = self.folder / f"{tracker}.id"
        return path.read_text() if path.exists() else None

    def keep_id(self, tracker: str, value: str) -> None:
        """Writes the id for later launches, in `<tracker>.id`."""
        (self.folder / f"{tracker}.id").write_text(value)


def build_trackers(section: LogConfig, run: RunInfo) -> list[Background]:
    """The chosen trackers, each in the background."""
    adapters: dict[str, Callable[[LogConfig, RunInfo], Tracker]] = {
        "tensorboard": TensorBoard,
        "wandb": Wandb,
        "mlflow": MLflow,
        "aim": Aim,
        "codecarbon": CodeCarbon,
    }
    chosen = {name: partial(adapters[name], section, run) for name in section.trackers if name != "none"}
    return [Background(name, make, section.tracker_metrics) for name, make in chosen.items()]


class Background:
    """An adapter in a thread of its own; `patterns` name the scalars it gets, none means all."""

    def __init__(self, name: str, make: Callable[[], Tracker], patterns: tuple[str, ...] = ()) -> None:
        self._name, self._make, self._patterns = name, make, patterns
        self._queue: queue.Queue[Record | None] = queue.Queue(QUEUE_SIZE)
        self._off = False
        self.dropped = 0
        self.cpu_s = 0.0
        self._thread = threading.Thread(target=self._work, name=THREAD_PREFIX + name, daemon=True)
        self._thread.start()

    def write(self, record: Record) -> None:
        """Hands a record over; waits for nothing."""
        if self._patterns:
            wanted = (*_POSITIONS, *self._patterns)
            record = {name: value for name, value in record.items() if _matches(name, wanted)}
        try:
            if not self._off:
                self._queue.put_nowait(record)
        except queue.Full:
            self.dropped += 1

    def close(self) -> None:
        """Waits a short time for the adapter to finish."""
        deadline = time.monotonic() + PATIENCE_S
        while self._thread.is_alive() and time.monotonic() < deadline:
            with suppress(queue.Full):
                self._queue.put_nowait(None)
            self._thread.join(0.1)
        if self._thread.is_alive():
            log.warning(
                "tracker %s did not end within %.0f s; the run ends without it", self._name, PATIENCE_S
            )
        if self.dropped:
            log.warning("tracker %s was too slow: %d records were not written", self._name, self.dropped)

    def _work(self) -> None:
        try:
            adapter = self._make()
            while (record := self._queue.get()) is not None:
                adapter.write(record)
                self.cpu_s = time.thread_time()
            adapter.close()
        except BaseException as error:  # noqa: BLE001 - clients raise what they like, SystemExit included
            self._off = True
            text = " ".join(str(error).split()) or "no message"
            log.error("tracker %s is switched off: %s: %s", self._name, type(error).__name__, text)


def scalars(record: Record) -> dict[str, float]:
    """The finite numbers of a record, without its place in the run; names of reports begin with `train/`."""
    return {
        name if name.startswith(("eval/", "test/")) else f"train/{name}": value
        for name, value in record.items()
        if name not in _POSITIONS and isinstance(value, int | float) and math.isfinite(value)
    }


def _matches(name: str, patterns: tuple[str, ...]) -> bool:
    return any(fnmatchcase(name, pattern) for pattern in patterns)


class TensorBoard:
    """Every scalar over steps under its name, and over tokens under `by_tokens/`."""

    def __init__(self, section: LogConfig, run: RunInfo) -> None:
        from tensorboard.compat.proto.event_pb2 import Event
        from tensorboard.summary.writer.record_writer import RecordWriter

        self._event = Event
        folder = Path(section.tensorboard_dir or run.folder / "tensorboard")
        folder.mkdir(parents=True, exist_ok=True)
        place = f"{time.time():.0f}.{socket.gethostname()}.{os.getpid()}"
        # not SummaryWriter: its own thread prints a traceback where the disk is full
        self._file = open(folder / f"events.out.tfevents.{place}", "wb", buffering=0)  # noqa: SIM115
        self._writer = RecordWriter(self._file)
        self._writer.write(Event(wall_time=time.time(), file_version="brain.Event:2").SerializeToString())

    def write(self, record: Record) -> None:
        for prefix, step in (("", record["step"]), ("by_tokens/", record["tokens_seen"])):
            event = self._event(wall_time=time.time(), step=step)
            for name, value in scalars(record).items():
                event.summary.value.add(tag=prefix + name, simple_value=value)
            self._writer.write(event.SerializeToString())

    def close(self) -> None:
        self._file.close()


class Wandb:
    """Weights & Biases: one run over all launches. The client itself decides on log-in and offline mode."""

    def __init__(self, section: LogConfig, run: RunInfo) -> None:
        import wandb

        self._run: Any = wandb.init(
            project=section.tracker_project,
            entity=section.tracker_entity or None,
            name=run.name,
            id=run.known_id("wandb"),
            resume="allow",
            dir=str(run.folder),
            config=run.config,
            settings=wandb.Settings(console="off", quiet=True),
        )
        run.keep_id("wandb", self._run.id)
        # its own counter refuses the steps that a resumed run makes again
        self._run.define_metric("*", step_metric="step")

    def write(self, record: Record) -> None:
        self._run.log(scalars(record) | {name: record[name] for name in ("step", "tokens_seen")})

    def close(self) -> None:
        self._run.finish()


class MLflow:
    """MLflow: one run over all launches, at MLFLOW_TRACKING_URI, else in `mlruns/` of the run folder."""

    def __init__(self, section: LogConfig, run: RunInfo) -> None:
        import mlflow

        os.environ.setdefault("MLFLOW_ALLOW_FILE_STORE", "true")  # mlflow 3 asks whether files are meant
        if not os.environ.get("MLFLOW_TRACKING_URI"):
            mlflow.set_tracking_uri((run.folder / "mlruns").absolute().as_uri())
        mlflow.set_experiment(section.tracker_project)
        known = run.known_id("mlflow")
        started = mlflow.start_run(run_id=known, run_name=run.name, log_system_metrics=False)
        run.keep_id("mlflow", started.info.run_id)
        if known is None:
            for name, values in run.config.items():
                mlflow.log_params({f"{name}.{key}": value for key, value in values.items()})
        self._mlflow: Any = mlflow

    def write(self, record: Record) -> None:
        values = scalars(record) | {"tokens_seen": record["tokens_seen"]}
        self._mlflow.log_metrics(values, step=record["step"])

    def close(self) -> None:
        self._mlflow.end_run()


class Aim:
    """Aim, in `.aim/` of the run folder; one run over all launches."""

    def __init__(self, section: LogConfig, run: RunInfo) -> None:
        import aim

        folder = str(run.folder)
        if not (run.folder / ".aim").exists():
            aim.Repo.from_path(folder, init=True)
        self._run: Any = aim.Run(
            run_hash=run.known_id("aim"),
            repo=folder,
            experiment=section.tracker_project,
            system_tracking_interval=None,
            capture_terminal_logs=False,
        )
        run.keep_id("aim", self._run.hash)
        self._run.name = run.name
        self._run["config"] = run.config

    def write(self, record: Record) -> None:
        for name, value in scalars(record).items():
            self._run.track(value, name=name, step=record["step"])

    def close(self) -> None:
        self._run.close()


class CodeCarbon:
    """CodeCarbon: energy and CO2 of this node, in `emissions.csv` of the run folder. It takes no records."""

    def __init__(self, section: LogConfig, run: RunInfo) -> None:
        from codecarbon import OfflineEmissionsTracker

        country = os.environ.get("CODECARBON_COUNTRY_ISO_CODE", "USA")
        self._tracker: Any = OfflineEmissionsTracker(
            project_name=section.tracker_project,
            output_dir=str(run.folder),
            country_iso_code=country,
            log_level="error",
            allow_multiple_runs=True,
        )
        self._tracker.start()

    def write(self, record: Record) -> None:
        pass

    def close(self) -> None:
        self._tracker.stop()
