"""The curves of runs as matplotlib figures: `draw(runs)` → chart name → figure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from fms_fsdp.tools.report.history import RunHistory

Floats = npt.NDArray[np.float64]
MOST_POINTS = 1500  # of one curve

# chart → title, axis, and the metrics it shows with their line styles
CURVES: dict[str, tuple[str, str, dict[str, str]]] = {
    "lr": ("Learning rate", "", {"lr": "-"}),
    "grad_norm": ("Gradient norm before clipping", "", {"grad_norm": "-", "grad_norm_max": ":"}),
    "throughput": ("Throughput", "tokens/s per device", {"tokens_per_sec_per_device": "-"}),
    "utilization": ("Share of the peak FLOP/s", "", {"mfu": "-", "mfu_matmul": "--", "hfu": ":"}),
    "memory": ("Memory of rank 0", "GiB", {"peak_mem_gib": "-", "mem_gib": "--", "reserved_mem_gib": ":"}),
}
# colors by kind of time, from the bottom; "other" is what of a step none of them names
TIMES = ("data_wait_ms", "forward_backward_ms", "optimizer_ms", "other", "checkpoint_ms", "logging_ms")


def draw(runs: Sequence[RunHistory], smoothing: float) -> dict[str, Any]:
    """Every chart that the runs have numbers for; mixture and time are drawn for each run by itself."""
    charts = {
        "loss_by_step": _loss(runs, "step", smoothing),
        "loss_by_tokens": _loss(runs, "tokens_seen", smoothing),
    }
    for name, (title, axis, styles) in CURVES.items():
        if any(run.series(key)[0] for run in runs for key in styles):
            charts[name] = _curves(runs, title, axis, styles)
    for run in runs:
        suffix = f"_{run.name}" if len(runs) > 1 else ""
        charts[f"time{suffix}"] = _times(run)
        if run.keys("tokens/"):
            charts[f"mixture{suffix}"] = _mixture(run)
    return charts


def smoothed(values: Sequence[float], weight: float) -> Floats:
    """The exponential average of `weight`, without the bias of its start."""
    result, average, total = np.empty(len(values)), 0.0, 0.0
    for i, value in enumerate(values):
        average = weight * average + (1 - weight) * value
        total = weight * total + 1 - weight
        result[i] = average / total
    return result


def _axes(title: str, x: str, y: str) -> tuple[Any, Any]:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7.2, 3.6), layout="constrained")
    axes = figure.subplots()
    axes.set(title=title, xlabel={"tokens_seen": "tokens"}.get(x, x), ylabel=y)
    axes.grid(alpha=0.25)
    return figure, axes


def _plot(axes: Any, x: Sequence[float], y: Any, **style: Any) -> None:
    stride = -(-len(x) // MOST_POINTS) or 1
    axes.plot(x[::stride], y[::stride], **style)


def _loss(runs: Sequence[RunHistory], x: str, smoothing: float) -> Any:
    figure, axes = _axes("Loss", x, "nats per token")
    for number, run in enumerate(runs):
        places, values = run.series("loss", x)
        _plot(axes, places, values, color=f"C{number}", alpha=0.25, linewidth=0.8)
        _plot(axes, places, smoothed(values, smoothing), color=f"C{number}", linewidth=1.5, label=run.name)
        for shade, key in enumerate(
            key for key in run.keys("eval/", validation=True) if key.endswith("/loss")
        ):
            places, values = run.series(key, x, validation=True)
            style = dict(
                color=f"C{number}", marker="osD^v"[shade % 5], markersize=4, linestyle="--", linewidth=0.8
            )
            _plot(axes, places, values, label=f"{run.name} {key.removesuffix('/loss')}", **style)
        _mark_restarts(axes, run, x, f"C{number}")
    axes.legend(fontsize="small")
    return figure


def _curves(runs: Sequence[RunHistory], title: str, axis: str, styles: dict[str, str]) -> Any:
    figure, axes = _axes(title, "step", axis)
    for number, run in enumerate(runs):
        for key, style in styles.items():
            places, values = run.series(key)
            if places:
                label = f"{run.name} {key}" if len(runs) > 1 else key
                _plot(axes, places, values, color=f"C{number}", linestyle=style, linewidth=1.2, label=label)
        _mark_restarts(axes, run, "step", f"C{number}")
    axes.legend(fontsize="small")
    return figure


def _mark_restarts(axes: Any, run: RunHistory, x: str, color: str) -> None:
    """A dotted line where a launch began, at the first report it made."""
    for i, step in enumerate(run.restarts):
        place = step if x == "step" else run.reports[step + 1][x]
        label = f"restart of {run.name}" if i == 0 else None
        axes.axvline(place, color=color, linewidth=0.8, linestyle=":", label=label)


def _times(run: RunHistory) -> Any:
    figure, axes = _axes(f"Time of a step: {run.name}", "step", "ms")
    reports = [record for record in run.reports.values() if "forward_backward_ms" in record]
    parts = {key: np.array([float(record.get(key) or 0) for record in reports]) for key in TIMES}
    named = sum(parts[key] for key in TIMES[:3])
    parts["other"] = np.maximum(
        0.0, np.array([float(record.get("step_time_ms") or 0) for record in reports]) - named
    )
    stride = -(-len(reports) // MOST_POINTS) or 1
    columns = [parts[key][::stride] for key in TIMES]
    axes.stackplot([record["step"] for record in reports][::stride], *columns, labels=TIMES, linewidth=0)
    axes.legend(fontsize="small", loc="upper right")
    return figure


def _mixture(run: RunHistory) -> Any:
    """The share of each source in the tokens between two reports."""
    figure, axes = _axes(f"Mixture: {run.name}", "step", "share of tokens")
    keys, reports = run.keys("tokens/"), list(run.reports.values())
    counts = np.array(
        [[0.0] * len(keys), *([float(record.get(key) or 0) for key in keys] for record in reports)]
    )
    used = np.maximum(0.0, np.diff(counts, axis=0))
    shares = used / np.maximum(1.0, used.sum(axis=1, keepdims=True))
    stride = -(-len(reports) // MOST_POINTS) or 1
    axes.stackplot(
        [record["step"] for record in reports][::stride],
        *shares[::stride].T,
        labels=[key.removeprefix("tokens/") for key in keys],
        linewidth=0,
        step="pre",
    )
    axes.set_ylim(0, 1)
    axes.legend(fontsize="small", loc="upper right")
    return figure
