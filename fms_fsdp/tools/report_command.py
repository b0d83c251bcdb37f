"""`python -m fms_fsdp report RUN [RUN …]`: one HTML page with the curves and settings of runs.

The page holds its data as JSON and draws itself; it needs no network and no server.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import suppress
from datetime import datetime
from pathlib import Path
from typing import Any

from fms_fsdp.checkpoint.folders import checkpoint_steps, read_metadata
from fms_fsdp.config import TrainConfig, flag_table
from fms_fsdp.errors import UserError
from fms_fsdp.files import read_json, write_atomically
from fms_fsdp.state import located_sections
from fms_fsdp.tools.tool_flags import ReportConfig

MAX_POINTS = 1000  # per curve
MAX_EVENTS = 200  # per run
MAX_SAMPLE = 20_000  # characters
MAX_SOURCES = 64
OTHER_SOURCES = "tokens/(other sources)"

Record = dict[str, Any]


def main(config: ReportConfig) -> None:
    """Writes the page and prints its path. The command `report`."""
    runs = [load_run(Path(folder)) for folder in dict.fromkeys(config.runs)]
    path = Path(config.output or Path(config.runs[0], "report.html"))
    page = render(runs).encode(errors="replace")  # a name may not be UTF-8
    target = path.resolve()  # a link stays, such as one in a folder of a web server
    if target.exists() and not target.is_file():
        raise UserError(f"--output={path} must be a file; choose another path")
    write_atomically(target, page)
    print(path)


def render(runs: Sequence[Record]) -> str:
    """Returns the page of the runs that `load_run` has read."""
    template = Path(__file__).with_name("report.html").read_text(encoding="utf-8")
    # a "<" in a text could end the script element
    return template.replace("$DATA", json.dumps(runs, allow_nan=False).replace("<", "\\u003c"))


def load_run(folder: Path) -> Record:
    """Returns the values of a run that the page shows, in JSON types.

    Raises:
        UserError: the folder holds no run, or a run without a report.
    """
    reports, validations, events = read_metrics(folder / "metrics.jsonl")
    if not reports:
        raise UserError(f"{folder} has no report in metrics.jsonl yet; wait for its first one")
    _sum_small_sources(reports)
    config = read_json(folder / "config.json") or {}
    status = read_json(folder / "status.json") or {}
    resolved = config.get("resolved", {})
    sections = located_sections(config)
    settings = {name: value for section in sections.values() for name, value in section.items()}
    defaults = {name: row.default for name, row in flag_table(TrainConfig).items()}
    samples = ""
    if (folder / "samples.txt").is_file():
        # A full disk or a kill may end the file within a character.
        text = (folder / "samples.txt").read_text(encoding="utf-8", errors="replace")
        samples = text[-MAX_SAMPLE:]
    restarts = []
    ends = {event["attempt"]: event for event in events if event["event"] == "end"}
    hours = [0.0]
    for before, report in zip(reports, reports[1:], strict=False):
        is_restart = report.get("attempt") != before.get("attempt")
        if is_restart:
            restarts.append(report["step"] - 1)
        end = report
        if is_restart:
            # The steps after the last report of a launch, unless the next one made them again.
            end = ends.get(before.get("attempt"), before)
            if end["step"] != report["step"] - 1:
                end = before
        seconds = max(0.0, end["time"] - before["time"])  # the clock may be set back
        hours.append(hours[-1] + seconds / 3600)
    for report in reports:
        if report.get("skipped_steps"):
            skipped = {"event": "skipped steps", "count": report["skipped_steps"]}
            events.append(report | skipped)
    events.sort(key=lambda event: (event["attempt"], event["step"]))
    steps = [report["step"] for report in reports]
    # A report and a validation of one step share some fields, such as the tokens seen.
    by_step = dict[int, Record]()
    for record in [*validations, *reports]:
        by_step[record["step"]] = by_step.get(record["step"], {}) | record
    curves = series([by_step[step] for step in sorted(by_step)])
    return {
        "name": folder.resolve().name,
        "status": status.get("reason") or status.get("status", ""),
        "series": curves | {"hours": thin(steps, hours)},
        "restarts": restarts,
        "events": [_event(event) for event in events[-MAX_EVENTS:]],
        "settings": {name: _text(value) for name, value in settings.items()},
        "changed": [k for k, v in settings.items() if _text(v) != _text(defaults.get(k))],
        "details": {name: _text(value) for name, value in resolved.items()},
        "checkpoints": list(_checkpoints(folder / "checkpoints")),
        "samples": samples,
    }


def _sum_small_sources(reports: Sequence[Record]) -> None:
    """Replaces the tokens of all but the largest sources by their sum, in place.

    The page does not draw epochs; those of summed sources are removed.
    """
    totals = dict[str, int]()
    for report in reports:
        totals |= {name: value for name, value in report.items() if name.startswith("tokens/")}
    if len(totals) <= MAX_SOURCES:
        return
    smallest_first = sorted(totals, key=totals.__getitem__)
    summed = smallest_first[: len(totals) - (MAX_SOURCES - 1)]
    for report in reports:
        values = [report.pop(name) for name in summed if name in report]
        if values:  # most reports of a run with many sources have no fields of sources
            report[OTHER_SOURCES] = sum(values)
        for name in summed:
            report.pop(name.replace("tokens/", "epoch/", 1), None)


def _checkpoints(root: Path) -> Iterator[list[str]]:
    """Yields step, tokens, validation loss and size of each complete checkpoint."""
    for step in checkpoint_steps(root):
        folder = root / f"step_{step}"
        with suppress(UserError, OSError):  # one that is being written or deleted
            saved = read_metadata(folder)
            loss = "" if saved.validation_loss is None else f"{saved.validation_loss:.4f}"
            size = sum(file.stat().st_size for file in folder.iterdir())
            yield [f"{step:,}", f"{saved.tokens_seen:,}", loss, f"{size / 2**30:.3g} GiB"]


def read_metrics(path: Path) -> tuple[list[Record], list[Record], list[Record]]:
    """Returns the reports, the validations and the events of metrics.jsonl.

    Each step appears once: records that a later launch made again, or from before whose step it
    resumed, are dropped. A last line that is still being written is skipped.

    Raises:
        UserError: there is no such file, or a line is not a record.
    """
    if not path.is_file():
        raise UserError(
            f"{path.parent} is not a run directory (it has no {path.name}); name a folder below runs/"
        )
    reports = list[Record]()
    validations = list[Record]()
    events = list[Record]()
    with path.open(encoding="utf-8") as lines:
        for number, line in enumerate(lines, 1):
            if not line.endswith("\n"):
                break
            try:
                record = json.loads(line)
                step: int = record["step"]
            except (ValueError, LookupError, TypeError, RecursionError):
                raise UserError(f"{path}:{number} is not a record; remove the line") from None
            if "event" in record:
                events.append(record)
                continue
            kind, other = (reports, validations) if "loss" in record else (validations, reports)
            while kind and kind[-1]["step"] >= step:
                kind.pop()
            while other and other[-1]["step"] > step:
                other.pop()
            kind.append(record)
    return reports, validations, events


def series(records: Sequence[Record]) -> dict[str, tuple[list[int], list[Any]]]:
    """Returns the steps and values of each number of the records, thinned."""
    found: dict[str, tuple[list[int], list[Any]]] = {}
    for record in records:
        for name, value in record.items():
            if value is None or isinstance(value, int | float):
                steps, values = found.setdefault(name, ([], []))
                steps.append(record["step"])
                values.append(value)
    return {name: thin(*curve) for name, curve in found.items() if name not in ("step", "attempt")}


def thin(steps: list[int], values: list[Any]) -> tuple[list[int], list[Any]]:
    """Returns at most about MAX_POINTS points, with the extremes and gaps of each stretch."""
    size = -(-len(steps) // (MAX_POINTS // 2))
    kept = {0, len(steps) - 1}
    for start in range(0, len(steps), size):
        stretch = range(start, min(start + size, len(steps)))
        finite = [i for i in stretch if values[i] is not None]
        if finite:
            kept.add(min(finite, key=values.__getitem__))
            kept.add(max(finite, key=values.__getitem__))
        else:
            kept.add(start)
    indices = sorted(kept)
    return [steps[i] for i in indices], [_rounded(values[i]) for i in indices]


def _rounded(value: Any) -> Any:
    """Returns a float with the digits that a curve shows."""
    return float(f"{value:.6g}") if isinstance(value, float) else value


def _event(event: Record) -> list[str]:
    """Returns launch, step, date, name and details."""
    hidden = ("event", "attempt", "step", "time")
    # Tokens and epochs of many sources would fill the table.
    keys = [key for key in event if key not in hidden and "/" not in key]
    if "count" in event:
        keys = ["count"]
    details = ", ".join(f"{key} {_text(event[key])}" for key in keys)
    date = datetime.fromtimestamp(event["time"]).strftime("%Y-%m-%d %H:%M:%S")
    return [str(event["attempt"]), str(event["step"]), date, event["event"], details]


def _text(value: Any) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{key} {_text(part)}" for key, part in value.items())
    if isinstance(value, list | tuple):
        return ",".join(map(_text, value))
    if isinstance(value, float):
        return f"{value:.5g}"
    return str(value)
