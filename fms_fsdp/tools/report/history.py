"""What a run folder says of a run: the lines of metrics.jsonl, its configurations, how it ended."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fms_fsdp.run.recorded import recorded_sections
from fms_fsdp.run.status import read_status

Record = dict[str, Any]
_OF_A_LAUNCH = re.compile(r"config\.([1-9][0-9]{0,8})\.json")


@dataclass
class RunHistory:
    """A run in order: step → its report, step → its validation, events; launch → its first and last second.

    Of steps that a later launch made again, or went back behind, the records of the later launch count.
    """

    name: str
    reports: dict[int, Record] = field(default_factory=dict)
    validations: dict[int, Record] = field(default_factory=dict)
    events: list[Record] = field(default_factory=list)
    spans: dict[int, tuple[float, float]] = field(default_factory=dict)
    configs: dict[str, Record] = field(default_factory=dict)
    status: Record = field(default_factory=dict)

    @property
    def seconds(self) -> float:
        """Wall time of all launches, from the start of the process where the launch says so."""
        starting = (value for event in self.events if event["event"] == "start" for value in _seconds(event))
        return sum(last - first for first, last in self.spans.values()) + sum(starting)

    @property
    def restarts(self) -> list[int]:
        """The last step before each launch but the first."""
        attempts = [(step, report.get("attempt")) for step, report in self.reports.items()]
        pairs = zip(attempts, attempts[1:], strict=False)
        return [step - 1 for (_, before), (step, attempt) in pairs if attempt != before]

    def series(
        self, key: str, x: str = "step", *, validation: bool = False
    ) -> tuple[list[float], list[float]]:
        """Places and values of a metric, where it has a number."""
        records = (self.validations if validation else self.reports).values()
        points = [
            (record[x], record[key]) for record in records if _is_number(record.get(key)) and x in record
        ]
        return [place for place, _ in points], [value for _, value in points]

    def keys(self, prefix: str, *, validation: bool = False) -> list[str]:
        """Names of metrics that begin so, in their order."""
        records = (self.validations if validation else self.reports).values()
        return list(dict.fromkeys(key for record in records for key in record if key.startswith(prefix)))

    def add(self, record: Record) -> None:
        """Takes in the next line of metrics.jsonl.

        Raises:
            ValueError, KeyError, TypeError, OverflowError: it is no record of a step.
        """
        step, attempt, now = int(record["step"]), int(record.get("attempt", 1)), record.get("time")
        if isinstance(now, int | float):
            first, last = self.spans.get(attempt, (now, now))
            self.spans[attempt] = min(first, now), max(last, now)
        if "event" in record:
            self.events.append(record)
            return
        found = self.reports if "loss" in record else self.validations
        numbers = {key: value for key, value in record.items() if value is None or _is_number(value)}
        if found is self.reports:
            numbers = {"loss": None} | numbers | {"tokens_seen": int(record["tokens_seen"])}
        for kind in (self.reports, self.validations):
            while kind and next(reversed(kind)) >= step + (kind is not found):
                kind.popitem()
        found[step] = numbers | {"step": step}


def read_run(folder: Path) -> RunHistory:
    """The history of the run in `folder`; a last line that is still being written is left out.

    Raises:
        ValueError: it is no run folder, or none that has reported yet.
    """
    path = folder / "metrics.jsonl"
    if not path.is_file():
        rule = "must be a run folder, and there is no metrics.jsonl in it; name --output_dir"
        raise ValueError(f"run ({folder}) {rule}")
    run = RunHistory(folder.resolve().name)
    lines = path.read_text().split("\n")
    for number, line in enumerate(lines[:-1], 1):
        try:
            run.add(json.loads(line))
        except (ValueError, KeyError, TypeError, OverflowError, RecursionError):
            rule = "must be a record with a step, and a report with tokens_seen too"
            raise ValueError(f"{path}:{number} {rule}; remove the line") from None
    if not run.reports:
        rule = f"must have reported, and {path.name} holds no report yet; wait for its first"
        raise ValueError(f"run ({folder}) {rule}")
    matches = (_OF_A_LAUNCH.fullmatch(file.name) for file in folder.iterdir())
    launches = sorted(int(match[1]) for match in matches if match)
    for name in ("config.json", *(f"config.{number}.json" for number in launches)):
        if content := read_status(folder / name):
            run.configs[name] = {key: value for key, value in content.items() if isinstance(value, dict)}
    run.status = read_status(folder / "status.json")
    return run


def differences(configs: dict[str, Record]) -> list[tuple[str, list[str]]]:
    """(flag, its value in each configuration) of every flag that is not the same in all.

    The run's name and folder and what was derived from flags are left out.
    """
    flat: list[dict[str, str]] = []
    for config in configs.values():
        sections = recorded_sections(config, config.get("resolved", {})).values()
        flat.append({key: json.dumps(value) for section in sections for key, value in section.items()})
    keys = dict.fromkeys(key for values in flat for key in values if key not in ("output_dir", "run_name"))
    rows = []
    for key in keys:
        shown = [values.get(key, "–") for values in flat]
        if len(set(shown)) > 1:
            rows.append((key, shown))
    return rows


def _seconds(event: Record) -> list[float]:
    return [value for key, value in event.items() if key.endswith("_s") and _is_number(value)]


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
