"""TensorBoard and Weights & Biases, which get a copy of metrics.jsonl.

Each tracker runs in its own thread behind a bounded queue, so none can delay or end a run: one
that raises is logged once and switched off, one that hangs loses records.
"""

from __future__ import annotations

import json
import math
import os
import queue
import textwrap
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from fnmatch import fnmatchcase
from functools import partial
from pathlib import Path
from typing import Any, Protocol

from fms_fsdp.config import TrainConfig, as_dict
from fms_fsdp.config.formats import parse_named_interval
from fms_fsdp.files import write_atomically
from fms_fsdp.logs import log
from fms_fsdp.state import TrainState

THREAD_PREFIX = "tracker "
QUEUE_SIZE = 1000  # records
CLOSE_TIMEOUT_S = 30.0
_COUNTERS = ("step", "tokens_seen", "samples_seen", "attempt", "time")
# TensorBoard's groups by patterns of names; the first that matches applies
_GROUPS = {
    "eval": "eval/* test/* eval_s",
    "speed": "tokens_per_sec* tflops* *mfu* hfu eta_s power_w energy_kwh *_c *_mhz",
    "time_ms": "*_ms",
    "memory": "*_gib alloc_retries",
    "data": "epoch/* tokens/* batch_* masked_rows",
    "loss": "*",
}

Record = dict[str, Any]


class Tracker(Protocol):
    """A destination of records."""

    def write(self, record: Record) -> None: ...
    def close(self) -> None: ...


def finite_numbers(record: Record) -> dict[str, float]:
    """Returns the finite numbers of a record, without its counters."""
    return {
        name: value
        for name, value in record.items()
        if name not in _COUNTERS and isinstance(value, int | float) and math.isfinite(value)
    }


def tensorboard_tag(name: str) -> str:
    """Returns `group/name`."""
    group = _group_of(name)
    return name if name.startswith(f"{group}/") else f"{group}/{name}"


def _group_of(name: str) -> str:
    for group, patterns in _GROUPS.items():
        if any(fnmatchcase(name, pattern) for pattern in patterns.split()):
            return group
    raise AssertionError("the last pattern matches every name")


class TensorBoardTracker:
    """TensorBoard: every number over steps, and again over samples and over tokens.

    The latter are written to subfolders, because TensorBoard drops the points that a resumed run
    computes again per folder, by the unit of its x axis.
    """

    def __init__(self, cfg: TrainConfig, start: Mapping[str, int]) -> None:
        from tensorboard.compat.proto.summary_pb2 import Summary
        from torch.utils.tensorboard import SummaryWriter

        self._summary: Any = Summary
        _hide_tracebacks_of_writers()
        root = Path(cfg.log.tensorboard_dir or Path(cfg.output_dir, "tensorboard"))
        is_first = not any(root.glob("events.out.tfevents.*"))
        if cfg.log.tensorboard_dir:
            _warn_of_other_run(root, cfg.output_dir)
        self._writers = {}
        for counter, folder, prefix in (
            ("step", "", ""),
            ("samples_seen", "by_samples", "by_samples/"),
            ("tokens_seen", "by_tokens", "by_tokens/"),
        ):
            writer: Any = SummaryWriter(
                root / folder,
                purge_step=start[counter] + 1,
                max_queue=cfg.log.tensorboard_queue_size,
                flush_secs=10,
            )
            self._writers[counter] = prefix, writer
        self._text: Any = self._writers["step"][1].add_text
        if is_first:
            self._text("config", textwrap.indent(json.dumps(as_dict(cfg), indent=2), "    "), 0)

    def write(self, record: Record) -> None:
        if "samples" in record:  # indented, which Markdown shows as it is
            self._text("samples", textwrap.indent(record["samples"], "    "), record["step"])
            return
        for counter, (prefix, writer) in self._writers.items():
            summary = self._summary()
            for name, value in finite_numbers(record).items():
                tag = prefix + name if prefix else tensorboard_tag(name)
                summary.value.add(tag=tag, simple_value=value)
            # One event per axis: add_scalar would write one per number.
            writer.file_writer.add_summary(summary, record[counter], record["time"])

    def close(self) -> None:
        for _, writer in self._writers.values():
            writer.close()


def _warn_of_other_run(root: Path, output_dir: str) -> None:
    """Logs that a folder has the points of another run, which those of this run replace."""
    owner_file = root / "run_directory.txt"
    own = os.path.abspath(output_dir)
    owner = owner_file.read_text(encoding="utf-8").strip() if owner_file.exists() else ""
    if owner != own and os.path.isdir(owner):  # else the run directory was moved
        log.warning(
            "--tensorboard_dir=%s has the points of another run (%s), which TensorBoard does not "
            "show after the start of this one; choose a folder per run",
            *(root, owner),
        )
    write_atomically(owner_file, own)


def _hide_tracebacks_of_writers() -> None:
    """Keeps SummaryWriter's thread from printing an error that its caller gets as well."""
    default = threading.excepthook

    def hook(args: threading.ExceptHookArgs) -> None:
        if not type(args.thread).__module__.startswith("tensorboard."):
            default(args)

    threading.excepthook = hook


class WandbTracker:
    """Weights & Biases: one run over all launches; the client decides on log-in and offline mode."""

    def __init__(self, cfg: TrainConfig, start: Mapping[str, int]) -> None:
        import wandb

        id_file = Path(cfg.output_dir, "wandb.id")
        run_id = id_file.read_text(encoding="utf-8").strip() if id_file.exists() else ""
        self._run: Any = wandb.init(
            project=cfg.log.tracker_project,
            entity=cfg.log.tracker_entity or None,
            name=cfg.run_name,
            id=run_id or None,
            resume="allow",
            dir=cfg.output_dir,
            config=as_dict(cfg),
            settings=wandb.Settings(console="off", quiet=True),
        )
        write_atomically(id_file, self._run.id)
        # wandb's own counter rejects steps that a resumed run makes again
        self._run.define_metric("*", step_metric="step")

    def write(self, record: Record) -> None:
        values = {name: record[name] for name in ("step", "tokens_seen")}
        for name, value in finite_numbers(record).items():
            values[name if name.startswith(("eval/", "test/")) else f"train/{name}"] = value
        self._run.log(values)

    def close(self) -> None:
        self._run.finish()


TRACKERS: dict[str, Callable[[TrainConfig, Mapping[str, int]], Tracker]] = {
    "tensorboard": TensorBoardTracker,
    "wandb": WandbTracker,
}


def open_trackers(cfg: TrainConfig, start: TrainState) -> list[BackgroundTracker]:
    """Starts the trackers of --trackers. `start` is the state at the start of this launch."""
    # Read here: the thread creates a tracker while the state advances.
    # "samples_seen" is the name in the records: dashboards of users read it.
    counters = {
        "step": start.step,
        "samples_seen": start.sequences_seen,
        "tokens_seen": start.tokens_seen,
    }
    return [
        BackgroundTracker(name, partial(TRACKERS[name], cfg, counters), cfg.log.tracker_metrics)
        for name in cfg.log.trackers
        if name != "none"
    ]


class BackgroundTracker:
    """A tracker in its own thread, which also creates it, because connecting may hang.

    `metrics` are the patterns of --tracker_metrics; without patterns the tracker gets all.
    """

    def __init__(
        self, name: str, make: Callable[[], Tracker], metrics: tuple[str, ...] = ()
    ) -> None:
        self._name = name
        self._make = make
        self._patterns = [parse_named_interval("tracker_metrics", text) for text in metrics]
        self._last_sent: dict[str, int] = {}  # metric -> step
        self._queue: queue.Queue[Record | None] = queue.Queue(QUEUE_SIZE)
        self.dropped = 0
        self._thread = threading.Thread(target=self._run, name=THREAD_PREFIX + name, daemon=True)
        self._thread.start()

    def write(self, record: Record) -> None:
        """Queues a record. Returns at once; a record that does not fit is dropped."""
        if self._patterns:
            step: int = record["step"]
            record = {name: value for name, value in record.items() if self._is_due(name, step)}
            self._last_sent |= dict.fromkeys(record, step)
        try:
            if self._thread.is_alive():
                self._queue.put_nowait(record)
        except queue.Full:
            self.dropped += 1

    def _is_due(self, name: str, step: int) -> bool:
        since = step - self._last_sent.get(name, -math.inf)
        return name in _COUNTERS or any(
            fnmatchcase(name, pattern) and since >= every for pattern, every in self._patterns
        )

    def close(self) -> None:
        """Waits up to CLOSE_TIMEOUT_S for the tracker to finish."""
        deadline = time.monotonic() + CLOSE_TIMEOUT_S
        while self._thread.is_alive() and time.monotonic() < deadline:
            with suppress(queue.Full):
                self._queue.put_nowait(None)
            self._thread.join(0.1)
        if self._thread.is_alive():
            text = "tracker %s did not finish within %.0f s; the run ends without it"
            log.warning(text, self._name, CLOSE_TIMEOUT_S)
        if self.dropped:
            log.warning("tracker %s was too slow: dropped %d records", self._name, self.dropped)

    def _run(self) -> None:
        try:
            tracker = self._make()
            while (record := self._queue.get()) is not None:
                tracker.write(record)
            tracker.close()
        except BaseException as error:  # noqa: BLE001 - clients raise anything, even SystemExit
            text = " ".join(str(error).split()) or "no message"
            log.error("tracker %s is switched off: %s: %s", self._name, type(error).__name__, text)
