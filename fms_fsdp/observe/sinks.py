"""Where the records of a run go: `metrics.jsonl` and the trackers. Rank 0 writes; the records of other ranks
go nowhere.

docs/metrics.md defines each number of a record.
"""

from __future__ import annotations

import json
import math
import os
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from fms_fsdp.config import TrainConfig
from fms_fsdp.distributed.mesh import Mesh
from fms_fsdp.observe.metrics import Record
from fms_fsdp.observe.trackers import Background, build_trackers, numbers
from fms_fsdp.state import TrainState


class MetricsFile:
    """`metrics.jsonl`: one flat JSON object a line, append only; a line torn by a crash is cut off at the
    start.

    `problem` says why it cannot be written, for example a full disk: the run then saves and ends.
    """

    def __init__(self, path: Path) -> None:
        if path.is_file():
            os.truncate(path, path.read_bytes().rfind(b"\n") + 1)
        self._file = open(path, "ab", buffering=0)  # noqa: SIM115 - lives as long as the run
        self.problem = ""

    def write(self, record: Record) -> None:
        """Appends a record, unless there is a `problem`; a number that is not finite becomes null."""
        line = json.dumps({key: _finite(value) for key, value in record.items()}).encode() + b"\n"
        try:
            while line and not self.problem:
                line = line[self._file.write(line) :]
        except OSError as error:
            self.problem = f"{self._file.name} cannot be written: {error.strerror}"

    def close(self) -> None:
        with suppress(OSError):
            self._file.close()


def _finite(value: Any) -> Any:
    return None if isinstance(value, float) and not math.isfinite(value) else value


class Sinks:
    """All places that records go to. `spent`: seconds by part of this launch, which `close` writes down."""

    def __init__(
        self,
        file: MetricsFile,
        trackers: list[Background],
        attempt: int,
        spent: Mapping[str, float],
    ) -> None:
        self.attempt = attempt
        self._file, self._trackers, self._spent = file, trackers, spent
        self._step = 0

    @property
    def problem(self) -> str:
        """Why the file of records cannot be written; empty if it can."""
        return self._file.problem

    def write(self, state: TrainState, values: Mapping[str, Any]) -> Record:
        """Writes and returns the record of the step just done: the values and the place in the run."""
        self._step = state.step
        record = self._placed(state, values)
        state.metrics |= numbers(record)
        self._file.write(record)
        for tracker in self._trackers:
            tracker.write(record)
        return record

    def text(self, state: TrainState, name: str, text: str) -> None:
        """Hands a text of the step just done to the trackers; metrics.jsonl gets no record of the text."""
        for tracker in self._trackers:
            tracker.write(self._placed(state, {name: text}))

    def _placed(self, state: TrainState, values: Mapping[str, Any]) -> Record:
        return {
            "attempt": self.attempt,
            "step": state.step,
            "tokens_seen": state.tokens_seen,
            "samples_seen": state.samples_seen,
            "time": round(time.time(), 3),
            **values,
        }

    def event(self, name: str, step: int, **fields: Any) -> None:
        """Writes an event, which is no measurement, into metrics.jsonl."""
        now = round(time.time(), 3)
        self._file.write(
            {"event": name, "attempt": self.attempt, "step": step, "time": now, **fields}
        )

    def close(self) -> None:
        """Lets the trackers finish, and writes the seconds that this launch spent on each part."""
        for tracker in self._trackers:
            tracker.close()
        seconds = {f"{part}_s": round(spent, 3) for part, spent in self._spent.items()}
        cpu_s = round(sum(tracker.cpu_s for tracker in self._trackers), 3)
        self.event("end", self._step, **seconds, trackers_cpu_s=cpu_s)
        self._file.close()


def open_sinks(cfg: TrainConfig, mesh: Mesh, attempt: int, spent: Mapping[str, float]) -> Sinks:
    """The sinks of this rank; records of ranks other than the first go nowhere."""
    file = MetricsFile(Path(cfg.output_dir, "metrics.jsonl") if mesh.is_main else Path(os.devnull))
    return Sinks(file, build_trackers(cfg) if mesh.is_main else [], attempt, spent)
