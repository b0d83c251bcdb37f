"""`python -m fms_fsdp report RUN [RUN …]`: one HTML page of a run, or of several compared.

The page needs no network and no server.
"""

from __future__ import annotations

import html
import io
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from statistics import median_high
from typing import Any

from fms_fsdp.config import flag
from fms_fsdp.tools.report.history import RunHistory, differences, read_run

_STYLE = """
body{font:15px/1.45 system-ui,sans-serif;margin:2em auto;max-width:1500px;padding:0 1em;color:#222}
table{border-collapse:collapse;margin:1em 0}td{font-variant-numeric:tabular-nums}
svg{max-width:100%;height:auto}
td,th{padding:.25em .8em;border-bottom:1px solid #ddd;text-align:left;vertical-align:top}"""


@dataclass(frozen=True)
class ReportConfig:
    """A page of curves and tables from run folders."""

    runs: tuple[str, ...] = flag((), "run folders; several are drawn over one another", positional=True)
    output: str = flag("", "the page (default: report.html in the first run folder)")
    smoothing: float = flag(0.8, "weight of the past in the smoothed loss", minimum=0, maximum=0.999)
    png: bool = flag(False, "write the charts beside the page too, as <page>.png")


def main(config: ReportConfig) -> None:
    """Writes the page and prints its path. Folders that cannot be drawn are left out with a note.

    Raises:
        ValueError: no run is named, none can be drawn, or matplotlib is missing.
    """
    if not config.runs:
        raise ValueError("runs () must name at least one run folder: python -m fms_fsdp report RUN [RUN …]")
    found, problems = {}, []
    for folder in config.runs:
        try:
            found[folder] = read_run(Path(folder))
        except ValueError as error:
            problems.append(error)
    if not found:
        raise problems[0]
    for problem in problems:
        print(f"note: left out: {problem}", file=sys.stderr)
    runs = list(found.values())
    for folder, run in found.items():
        if sum(other.name == run.name for other in runs) > 1:
            run.name = folder
    path = Path(config.output or Path(next(iter(found))) / "report.html")
    charts = _render_charts(runs, config.smoothing, path.with_suffix(".png") if config.png else None)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(_page(runs, charts), encoding="utf-8")
    print(path)


def _render_charts(runs: Sequence[RunHistory], smoothing: float, png: Path | None) -> str:
    """The sheet of charts as SVG, letters as text; also written to `png`."""
    try:
        import matplotlib
    except ImportError:
        raise ValueError("report needs matplotlib, which is not installed; pip install matplotlib") from None
    from fms_fsdp.tools.report.charts import draw

    # names may hold any sign, so nothing is mathematics
    with matplotlib.rc_context({"text.parse_math": False, "svg.fonttype": "none", "svg.hashsalt": "report"}):
        figure = draw(runs, smoothing)
        text = io.StringIO()
        figure.savefig(text, format="svg", metadata={"Date": None})
        if png is not None:
            png.parent.mkdir(parents=True, exist_ok=True)
            figure.savefig(png, dpi=120)
    return "".join(text.getvalue().partition("<svg")[1:])


def _page(runs: Sequence[RunHistory], charts: str) -> str:
    title = html.escape(", ".join(run.name for run in runs))
    if len(runs) > 1:
        compared = {run.name: run.configs.get("config.json", {}) for run in runs}
    else:
        compared = {name: content for name, content in runs[0].configs.items() if name != "config.json"}
    changed = [[key, *values] for key, values in differences(compared)]
    none_changed = f"<p>None between {len(compared)} configurations.</p>"
    events = [
        [run.name, event.get("attempt", ""), event["step"], event["event"], _fields(event)]
        for run in runs
        for event in run.events[-100:]
    ]
    parts = [
        f'<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8"><title>{title}</title>',
        f"<style>{_STYLE}</style></head><body>\n<h1>{title}</h1>",
        _html_table(["", *(run.name for run in runs)], _summary(runs)),
        charts,
        "<h2>Differences of configuration</h2>",
        _html_table(["", *compared], changed) if changed else none_changed,
    ]
    if events:
        parts += ["<h2>Events</h2>", _html_table(["run", "launch", "step", "event", ""], events)]
    return "\n".join([*parts, "</body></html>"]) + "\n"


def _summary(runs: Sequence[RunHistory]) -> list[list[Any]]:
    """Rows of the table on top: a label, then the value of each run; rows that no run fills are left out."""
    columns = [_facts(run) for run in runs]
    labels = dict.fromkeys(label for column in columns for label in column)
    rows = []
    for label in labels:
        rows.append([label, *(column.get(label, "–") for column in columns)])
    return rows


def _facts(run: RunHistory) -> dict[str, str]:
    last = list(run.reports.values())[-1]
    resolved = run.configs.get("config.json", {}).get("resolved", {})
    versions = resolved.get("versions", {})
    model, batch, layout = (resolved.get(key, {}) for key in ("model", "batch", "layout"))
    facts = {
        "status": f"{run.status.get('status', '–')}: {run.status.get('reason', '')}".rstrip(": "),
        "steps": f"{last['step']} of {resolved.get('num_steps', '?')}",
        "tokens": f"{last['tokens_seen']:,}",
        "final loss": f"{last['loss']:.4f}" if last["loss"] is not None else "not finite",
    }
    if last.get("loss_mean") is not None:
        facts["mean loss of the last interval"] = f"{last['loss_mean']:.4f}"
    for key in run.keys("eval/", validation=True):
        if key.endswith("/loss") and (values := run.series(key, validation=True)[1]):
            facts[f"validation {key[5:-5]}, last and best"] = f"{values[-1]:.4f}, {min(values):.4f}"
    facts["launches, time in all"] = f"{len(run.spans) or 1}, {timedelta(seconds=round(run.seconds))}"
    if speeds := run.series("tokens_per_sec_per_device")[1]:
        facts["median tokens/s per device"] = f"{median_high(speeds):,.0f}"
    if shares := run.series("mfu")[1]:
        facts["median mfu"] = f"{median_high(shares):.1%}"
    if run.seconds > 0:
        a_day = 86400 * last["tokens_seen"] / run.seconds
        facts["tokens a day, start-ups and saves included"] = f"{a_day:,.0f}"
    if last.get("masked_rows"):
        facts["rows masked in the last launch"] = f"{last['masked_rows']:,}"
    if "energy_kwh" in last:
        facts["energy of the last launch"] = f"{last['energy_kwh']:.3f} kWh"
    device = versions.get("gpu", resolved.get("device"))
    if resolved:
        facts |= {
            "parameters": f"{model.get('num_params', 0):,}",
            "batch": f"{batch.get('global_batch_size')} rows of {model.get('max_seq_len')} tokens",
            "hardware": f"{resolved.get('world_size')} x {device}, {layout.get('strategy')}",
            "precision": "bf16" if resolved.get("mixed_precision") else "fp32",
            "versions": ", ".join(f"{key} {value}" for key, value in versions.items() if key != "gpu"),
        }
    return facts


def _fields(event: dict[str, Any]) -> str:
    named = [item for item in event.items() if item[0] not in ("event", "attempt", "step", "time")]
    return ", ".join(f"{k} {v:.3g}" if isinstance(v, float) else f"{k} {v}" for k, v in named)


def _html_table(head: Iterable[Any], rows: Iterable[Iterable[Any]]) -> str:
    def line(cells: Iterable[Any], tag: str) -> str:
        return "<tr>" + "".join(f"<{tag}>{html.escape(str(cell))}</{tag}>" for cell in cells) + "</tr>"

    return "<table>" + "\n".join([line(head, "th"), *(line(row, "td") for row in rows)]) + "</table>"
