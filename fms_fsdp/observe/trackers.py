"""Trackers: copies of `metrics.jsonl` in TensorBoard, wandb and others. None can stop or delay a run.

    record ─▶ Background: bounded queue ─▶ its own thread ─▶ adapter (TensorBoard, wandb, mlflow, …)

An adapter is made in its thread, because connecting may hang. One that raises is logged once and switched
off; the queue of one that hangs fills up, and what does not fit is counted and dropped; at the end each has a
short time to finish, then the run ends without it.
"""

from __future__ import annotations

import json
import math
import os
import queue
import socket
import textwrap
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from fnmatch import fnmatchcase
from functools import partial
from pathlib import Path
from typing import Any, Protocol

from fms_fsdp.config import TrainConfig, flag_table
from fms_fsdp.config.flag import non_defaults
from fms_fsdp.config.formats import parse_named_interval
from fms_fsdp.config.parse import shown_value
from fms_fsdp.distributed.runtime import log
from fms_fsdp.observe.metrics import Record

THREAD_PREFIX = "tracker "
QUEUE_SIZE = 1000  # records
PATIENCE_S = 30.0  # at the end of a launch
_POSITIONS = ("step", "tokens_seen", "samples_seen", "attempt", "time")
_GROUPS = {  # of TensorBoard, by patterns of names; what matches none of them is in the group `loss`
    "eval": ("eval/*", "test/*", "eval_s"),
    "speed": (
        "tokens_per_sec*",
        "tflops*",
        "*mfu*",
        "hfu",
        "eta_s",
        "power_w",
        "energy_kwh",
        "*_c",
        "*_mhz",
    ),
    "time_ms": ("*_ms",),
    "memory": ("*_gib", "alloc_retries"),
    "data": ("epoch/*", "tokens/*", "batch_*", "masked_rows"),
}
_OVER = {"step": "", "samples_seen": "versus_samples/", "tokens_seen": "versus_tokens/"}
_COMPARED = ("eval/loss", "eval/best_loss", "loss/loss_mean")  # tags on TensorBoard's page HPARAMS


class Tracker(Protocol):
    """Where records go."""

    def write(self, record: Record) -> None: ...
    def close(self) -> None: ...


def build_trackers(config: TrainConfig) -> list[Background]:
    """The chosen trackers, each in the background."""
    found = []
    for name in config.log.trackers if config.log.trackers != ("none",) else ():
        adapter: Any = TensorBoard
        if name != "tensorboard":
            from fms_fsdp.extras.trackers import ADAPTERS

            adapter = ADAPTERS[name]
        found.append(Background(name, partial(adapter, config), config.log.tracker_metrics))
    return found


class Background:
    """An adapter in a thread of its own; `wanted` names the metrics that the adapter gets, as
    `--tracker_metrics` does; without names it gets all."""

    def __init__(
        self, name: str, make: Callable[[], Tracker], wanted: tuple[str, ...] = ()
    ) -> None:
        self._name, self._make = name, make
        self._wanted = [parse_named_interval("tracker_metrics", text) for text in wanted]
        self._sent: dict[str, int] = {}  # metric → the step of its last record
        self._queue: queue.Queue[Record | None] = queue.Queue(QUEUE_SIZE)
        self.dropped, self.cpu_s = 0, 0.0
        self._thread = threading.Thread(target=self._work, name=THREAD_PREFIX + name, daemon=True)
        self._thread.start()

    def write(self, record: Record) -> None:
        """Hands a record over; waits for nothing."""
        if self._wanted:
            step: int = record["step"]
            record = {name: value for name, value in record.items() if self._is_due(name, step)}
            self._sent |= dict.fromkeys(record, step)
        try:
            if self._thread.is_alive():
                self._queue.put_nowait(record)
        except queue.Full:
            self.dropped += 1

    def _is_due(self, name: str, step: int) -> bool:
        passed = step - self._sent.get(name, -math.inf)
        every = [every for pattern, every in self._wanted if fnmatchcase(name, pattern)]
        return name in _POSITIONS or any(passed >= steps for steps in every)

    def close(self) -> None:
        """Waits a short time for the adapter to finish."""
        deadline = time.monotonic() + PATIENCE_S
        while self._thread.is_alive() and time.monotonic() < deadline:
            with suppress(queue.Full):
                self._queue.put_nowait(None)
            self._thread.join(0.1)
        if self._thread.is_alive():
            log.warning(
                "tracker %s did not end within %.0f s; the run ends without it",
                self._name,
                PATIENCE_S,
            )
        if self.dropped:
            log.warning(
                "tracker %s was too slow: %d records were not written", self._name, self.dropped
            )

    def _work(self) -> None:
        try:
            adapter = self._make()
            while (record := self._queue.get()) is not None:
                adapter.write(record)
                self.cpu_s = time.thread_time()
            adapter.close()
        except BaseException as error:  # noqa: BLE001 - clients raise what they like, SystemExit included
            text = " ".join(str(error).split()) or "no message"
            log.error("tracker %s is switched off: %s: %s", self._name, type(error).__name__, text)


def numbers(record: Record) -> dict[str, float]:
    """The finite numbers of a record, without the place of the record in the run."""
    return {
        name: value
        for name, value in record.items()
        if name not in _POSITIONS and isinstance(value, int | float) and math.isfinite(value)
    }


def _matches(name: str, patterns: tuple[str, ...]) -> bool:
    return any(fnmatchcase(name, pattern) for pattern in patterns)


def tag(name: str) -> str:
    """The name of a number in TensorBoard: `group/name`."""
    group = next((group for group, patterns in _GROUPS.items() if _matches(name, patterns)), "loss")
    return name if name.startswith(f"{group}/") else f"{group}/{name}"


class TensorBoard:
    """Numbers as `group/name` over steps, as `versus_tokens/name` and `versus_samples/name` over those, and
    once the flags as text and hparams."""

    def __init__(self, config: TrainConfig) -> None:
        from tensorboard.compat.proto.event_pb2 import Event
        from tensorboard.compat.proto.summary_pb2 import Summary
        from tensorboard.summary.writer.record_writer import RecordWriter

        self._event, self._summary = Event, Summary
        run_folder = Path(config.output_dir)
        folder = Path(config.log.tensorboard_dir or run_folder / "tensorboard")
        folder.mkdir(parents=True, exist_ok=True)
        is_first = not any(folder.glob("events.out.tfevents.*"))
        place = f"{time.time():.0f}.{socket.gethostname()}.{os.getpid()}"
        # not SummaryWriter: its own thread prints a traceback where the disk is full
        self._file = open(folder / f"events.out.tfevents.{place}", "wb")  # noqa: SIM115
        self._writer = RecordWriter(self._file)
        self._held, self._queue_size = 0, config.log.tensorboard_queue_size
        self._add(file_version="brain.Event:2")
        self._validations = _validations(run_folder / "metrics.jsonl")
        for summary in _describe(config) if is_first else ():
            self._add(summary=summary)

    def write(self, record: Record) -> None:
        if "samples" in record:
            from torch.utils.tensorboard.summary import text

            lines = textwrap.indent(record["samples"], "    ")  # as it is: the page reads Markdown
            summary = text("samples", lines)  # type: ignore[no-untyped-call]
            return self._add(step=record["step"], summary=summary)
        values = numbers(record)
        if "eval/loss" in values:
            self._validations[record["step"]] = values["eval/loss"]
            so_far = (loss for step, loss in self._validations.items() if step <= record["step"])
            values["eval/best_loss"] = min(so_far)
        for place, group in _OVER.items():
            summary = self._summary()
            for name, value in values.items():
                summary.value.add(tag=f"{group}{name}" if group else tag(name), simple_value=value)
            self._add(step=record[place], summary=summary)

    def _add(self, **content: Any) -> None:
        """Appends an event, and writes the held events to disk if there are enough."""
        self._writer.write(self._event(wall_time=time.time(), **content).SerializeToString())
        self._held += 1
        if self._held >= self._queue_size:
            self._file.flush()
            self._held = 0

    def close(self) -> None:
        self._file.close()


def _validations(path: Path) -> dict[int, float]:
    """Step → validation loss, of earlier launches."""
    losses: dict[int, float] = {}
    for line in path.read_text().splitlines(keepends=True) if path.exists() else ():
        if '"eval/loss": ' in line and line.endswith("\n"):
            record = json.loads(line)
            if record["eval/loss"] is not None:
                losses[record["step"]] = record["eval/loss"]
    return losses


def _describe(config: TrainConfig) -> tuple[Any, ...]:
    """For TensorBoard: all flags as one table, and as hparams the flags that decide the training, the changed
    flags first."""
    from tensorboard.plugins.hparams.plugin_data_pb2 import HParamsPluginData
    from torch.utils.tensorboard.summary import hparams, text

    changed, compared = non_defaults(config), {}
    lines = ["| flag | value | default |", "|---|---|---|"]
    for name, row in flag_table(TrainConfig).items():
        value = changed.get(name, row.default)
        lines.append(f"| {name} | `{shown_value(value)}` | `{shown_value(row.default)}` |")
        if row.in_name or row.resume != "free":
            compared[name] = value if row.type in (int, float) else shown_value(value)
    experiment, session, _ = hparams(compared, dict.fromkeys(_COMPARED))  # type: ignore[no-untyped-call]
    described = experiment.value[0].metadata.plugin_data
    content = HParamsPluginData.FromString(described.content)
    for info in content.experiment.hparam_infos:
        info.differs = info.name in changed  # the page shows such flags first
    described.content = content.SerializeToString()
    return text("config", "\n".join(lines)), experiment, session  # type: ignore[no-untyped-call]
