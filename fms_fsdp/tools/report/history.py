"""What a run folder says of a run: metrics.jsonl, its configurations, a sample of text, how it ended."""

from __future__ import annotations

import json
import math
import re
import sys
from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from fms_fsdp.atomic import read_json
from fms_fsdp.errors import UserError
from fms_fsdp.state import located_sections

Record = dict[str, Any]
Floats = npt.NDArray[np.float64]
LONGEST_SAMPLE = 20_000  # characters
_CONFIG = re.compile(r"config(\.[1-9][0-9]{0,8})?\.json")  # the last one, and that of a launch


@dataclass
class RunHistory:
    """A run in order: step → its report, step → its validation, events; launch → its first and last second.

    A launch begins with its process, where it says when that was.
    Of steps that a later launch made again, or went back behind, the records of the later launch count.
    """

    name: str
    folder: Path = Path()
    reports: dict[int, Record] = field(default_factory=dict)
    validations: dict[int, Record] = field(default_factory=dict)
    events: list[Record] = field(default_factory=list)
    spans: dict[int, tuple[float, float]] = field(default_factory=dict)
    configs: dict[str, Record] = field(default_factory=dict)
    status: Record = field(default_factory=dict)
    sample: str = ""

    @property
    def config(self) -> Record:
        """The flags of the last launch by section, and what they came to as `resolved`."""
        return {"resolved": {}} | self.configs.get("config.json", {})

    @property
    def validation_losses(self) -> list[str]:
        """The keys of the held-out losses, that of all sources first."""
        keys = [key for key in self.keys("eval/") if key.endswith("/loss")]
        return sorted(keys, key=lambda key: key != "eval/loss")

    @property
    def seconds(self) -> float:
        """Wall time of all launches."""
        return sum(last - first for first, last in self.spans.values())

    @property
    def restarts(self) -> list[int]:
        """The last step before each launch but the first."""
        pairs = pairwise(self.reports.values())
        return [new["step"] - 1 for old, new in pairs if old.get("attempt") != new.get("attempt")]

    def series(self, key: str, x: str = "step") -> tuple[Floats, Floats]:
        """Places and values of a metric, where it is recorded; what was not finite is NaN."""
        found = [
            (record[x], record[key]) for record in self._of(key) if key in record and x in record
        ]
        points = np.array(found, dtype=np.float64).reshape(-1, 2)
        points[~np.isfinite(points)] = np.nan
        return points[:, 0], points[:, 1]

    def numbers(self, key: str) -> list[float]:
        """The finite values of a metric, in order."""
        return [value for value in self.series(key)[1].tolist() if math.isfinite(value)]

    def keys(self, prefix: str) -> list[str]:
        """Names of metrics that begin so, in their order."""
        names = dict[str, Any]()
        for record in self._of(prefix):
            names.update(record)
        return [name for name in names if name.startswith(prefix)]

    def _of(self, key: str) -> Iterable[Record]:
        """The records that have this metric: a held-out one stands in no report."""
        return (self.validations if key.startswith(("eval/", "test/")) else self.reports).values()

    def add(self, record: Record) -> None:
        """Takes in the next line of metrics.jsonl.

        Raises:
            ValueError, KeyError, TypeError, OverflowError: it is no record of a step.
        """
        step, attempt, now = int(record["step"]), int(record.get("attempt", 1)), record.get("time")
        if isinstance(now, int | float) and 0 <= now < 1e10:
            first, last = self.spans.get(attempt, (now, now))
            starting = _seconds(record) if record.get("event") == "start" else 0.0
            self.spans[attempt] = min(first, now - starting), max(last, now)
        if "event" in record:
            self.events.append(record)
            return
        found = self.reports if "loss" in record else self.validations
        numbers = {sys.intern(key): value for key, value in record.items() if _is_number(value)}
        if found is self.reports:
            numbers = {"loss": None} | numbers | {"tokens_seen": int(record["tokens_seen"])}
        for kind in (self.reports, self.validations):
            while kind and next(reversed(kind)) >= step + (kind is not found):
                kind.popitem()
        found[step] = numbers | {"step": step}


def read_run(folder: Path) -> RunHistory:
    """The history of the run in `folder`; a last line that is still being written is left out.

    Raises:
        UserError: it is no run folder, or none that has reported yet.
    """
    path = folder / "metrics.jsonl"
    if not path.is_file():
        rule = "must be a run folder, and has no metrics.jsonl; name --output_dir"
        raise UserError(f"run ({folder}) {rule}")
    run = RunHistory(folder.resolve().name, folder)
    with path.open(encoding="utf-8") as lines:
        for number, line in enumerate(lines, 1):
            try:
                if line.endswith("\n"):
                    run.add(json.loads(line))
            except (ValueError, KeyError, TypeError, OverflowError, RecursionError):
                rule = "must be a record with a step, and a report with tokens_seen too"
                raise UserError(f"{path}:{number} {rule}; remove the line") from None
    if not run.reports:
        rule = f"must have reported, and {path.name} holds no report yet; wait for its first"
        raise UserError(f"run ({folder}) {rule}")
    for path in sorted(folder.glob("config*.json"), key=lambda path: (len(path.name), path.name)):
        if _CONFIG.fullmatch(path.name) and (content := read_json(path)):
            run.configs[path.name] = {
                key: value for key, value in content.items() if isinstance(value, dict)
            }
    run.status = read_json(folder / "status.json")
    if (samples := folder / "samples.txt").is_file():
        run.sample = samples.read_text(encoding="utf-8", errors="replace")[-LONGEST_SAMPLE:]
    return run


def differences(configs: dict[str, Record]) -> list[tuple[str, ...]]:
    """Each flag that has not the same value in all configurations, and its values there.

    The run's name and folder and what was derived from flags are left out.
    """
    rows = dict[str, list[str]]()
    for place, config in enumerate(configs.values()):
        for section in located_sections(config).values():
            for key, value in section.items():
                rows.setdefault(key, ["–"] * len(configs))[place] = json.dumps(value)
    for key in ("output_dir", "run_name"):
        rows.pop(key, None)
    return [(key, *shown) for key, shown in rows.items() if len(set(shown)) > 1]


def _seconds(event: Record) -> float:
    """The sum of all times of an event."""
    times = (value for key, value in event.items() if key.endswith("_s") and _is_number(value))
    return float(sum(filter(None, times)))


def _is_number(value: Any) -> bool:
    """Whether it is a number of the records: null is one that is not finite."""
    whole = isinstance(value, int) and not isinstance(value, bool) and abs(value) < 2**63
    return value is None or isinstance(value, float) or whole
