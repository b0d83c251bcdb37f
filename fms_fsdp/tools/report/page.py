"""`python -m fms_fsdp report RUN [RUN …]`: one HTML page of a run, or of several against each other, that needs no network and no server."""

from __future__ import annotations

import html
import io
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

from fms_fsdp.config import flag
from fms_fsdp.tools.report.history import RunHistory, differences, read_run

_STYLE = """body{font:15px/1.45 system-ui,sans-serif;margin:2em auto;max-width:1500px;padding:0 1em;color:#222}
table{border-collapse:collapse;margin:1em 0}td,th{padding:.25em .8em;border-bottom:1px solid #ddd;text-align:left;vertical-align:top}
td{font-variant-numeric:tabular-nums}.charts{display:flex;flex-wrap:wrap;gap:1em}figure{margin:0;flex:1 1 600px}svg{max-width:100%;height:auto}"""


@dataclass(frozen=True)
class ReportConfig:
    """A page of curves and tables from run folders."""

    runs: tuple[str, ...] = flag(
        (), "run folders; several are drawn over one another and compared", positional=True
    )
    output: str = flag("", "the page (default: report.html in the first run folder)")
    smoothing: float = flag(
        0.8, "weight of the past in the smoothed loss, report by report", minimum=0, maximum=0.999
    )
    png: bool = flag(False, "write each chart beside the page too, as <page>_<chart>.png")


def main(config: ReportConfig) -> None:
    """Writes the page and prints its path.

    Raises:
        ValueError: no run is named, one is none, two have the same name, or matplotlib is missing.
    """
    if not config.runs:
        raise ValueError("runs () must name at least one run folder: python -m fms_fsdp report RUN [RUN …]")
    runs = [read_run(Path(folder)) for folder in config.runs]
    for run, folder in zip(runs, config.runs, strict=True):
        if sum(other.name == run.name for other in runs) > 1:
            run.name = folder
    path = Path(config.output or Path(config.runs[0]) / "report.html")
    charts = _render(runs, config.smoothing, path if config.png else None)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(_page(runs, charts), encoding="utf-8")
    print(path)


def _render(runs: Sequence[RunHistory], smoothing: float, png_of: Path | None) -> dict[str, str]:
    """Chart → its SVG, letters as text."""
    try:
        import matplotlib
    except ImportError:
        raise ValueError(
            "report needs matplotlib, which is not installed; pip install 'fms_fsdp[track]'"
        ) from None
    from fms_fsdp.tools.report.charts import draw

    with matplotlib.rc_context({"text.parse_math": False}):  # names may hold any sign
        figures = draw(runs, smoothing)
    drawings = {}
    for name, figure in figures.items():
        with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": name}):
            text = io.StringIO()
            figure.savefig(text, format="svg", metadata={"Date": None})
        drawings[name] = text.getvalue().partition("<svg")[1] + text.getvalue().partition("<svg")[2]
        if png_of is not None:
            png_of.parent.mkdir(parents=True, exist_ok=True)
            figure.savefig(png_of.with_name(f"{png_of.stem}_{name.replace('/', '_')}.png"), dpi=120)
    return drawings


def _page(runs: Sequence[RunHistory], charts: dict[str, str]) -> str:
    title = html.escape(", ".join(run.name for run in runs))
    figures = "\n".join(f'<figure id="{html.escape(name)}">{svg}</figure>' for name, svg in charts.items())
    parts = [f"<h1>{title}</h1>", _table(["", *(run.name for run in runs)], _summary(runs))]
    parts.append(f'<div class="charts">{figures}</div>')
    if len(runs) > 1:
        compared = {run.name: run.configs.get("config.json", {}) for run in runs}
    else:
        compared = {name: content for name, content in runs[0].configs.items() if name != "config.json"}
    rows = [[key, *values] for key, values in differences(compared)]
    parts.append("<h2>Differences of configuration</h2>")
    parts.append(
        _table(["", *compared], rows) if rows else f"<p>None between {len(compared)} configurations.</p>"
    )
    told = [
        [run.name, event.get("attempt", ""), event["step"], event["event"], _fields(event)]
        for run in runs
        for event in run.events[-100:]
    ]
    if told:
        parts += ["<h2>Events</h2>", _table(["run", "launch", "step", "event", ""], told)]
    head = f'<meta charset="utf-8"><title>{title}</title><style>{_STYLE}</style>'
    return (
        f'<!DOCTYPE html>\n<html lang="en"><head>{head}</head><body>\n'
        + "\n".join(parts)
        + "\n</body></html>\n"
    )


def _summary(runs: Sequence[RunHistory]) -> list[list[Any]]:
    """Rows of the table on top: a label, then the value of each run; rows that no run fills are left out."""
    columns = [_facts(run) for run in runs]
    labels = dict.fromkeys(label for column in columns for label in column)
    return [[label, *(column.get(label, "–") for column in columns)] for label in labels]


def _facts(run: RunHistory) -> dict[str, str]:
    last = list(run.reports.values())[-1]
    resolved = run.configs.get("config.json", {}).get("resolved", {})
    versions = resolved.get("versions", {})
    model, batch, layout = (resolved.get(key, {}) for key in ("model", "batch", "layout"))
    speeds = [value for key in ("tokens_per_sec_per_device", "mfu") for value in [sorted(run.series(key)[1])]]
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
    for label, values, text in zip(
        ("median tokens/s per device", "median mfu"), speeds, (",.0f", ".1%"), strict=True
    ):
        if values:
            facts[label] = format(values[len(values) // 2], text)
    if run.seconds > 0:
        facts["tokens a day, start-ups and saves included"] = (
            f"{86400 * last['tokens_seen'] / run.seconds:,.0f}"
        )
    if last.get("masked_rows"):
        facts["rows masked in the last launch"] = f"{last['masked_rows']:,}"
    if "energy_kwh" in last:
        facts["energy of the last launch"] = f"{last['energy_kwh']:.3f} kWh"
    if resolved:
        facts |= {
            "parameters": f"{model.get('num_params', 0):,}",
            "batch": f"{batch.get('global_batch_size')} rows of {model.get('max_seq_len')} tokens",
            "hardware": f"{resolved.get('world_size')} x {versions.get('gpu', resolved.get('device'))}, {layout.get('strategy')}",
            "precision": "bf16" if resolved.get("mixed_precision") else "fp32",
            "versions": ", ".join(f"{key} {value}" for key, value in versions.items() if key != "gpu"),
        }
    return facts


def _fields(event: dict[str, Any]) -> str:
    shown = {key: value for key, value in event.items() if key not in ("event", "attempt", "step", "time")}
    return ", ".join(
        f"{key} {value:.3g}" if isinstance(value, float) else f"{key} {value}" for key, value in shown.items()
    )


def _table(header: Iterable[Any], rows: Iterable[Iterable[Any]]) -> str:
    def line(cells: Iterable[Any], tag: str) -> str:
        return "<tr>" + "".join(f"<{tag}>{html.escape(str(cell))}</{tag}>" for cell in cells) + "</tr>"

    return "<table>" + "\n".join([line(header, "th"), *(line(row, "td") for row in rows)]) + "</table>"
