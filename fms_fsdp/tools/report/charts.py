"""The curves of runs as one matplotlib sheet: `draw(runs)` → figure, a panel a chart."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
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


def draw(runs: Sequence[RunHistory], smoothing: float) -> Any:
    """A figure of every chart that the runs have numbers for; each run has its own mixture and time.

    The group of each panel in the SVG is named after its chart.
    """
    from matplotlib.figure import Figure

    panels: dict[str, Callable[[Any], None]] = {
        "loss_by_step": partial(_draw_loss, runs, "step", smoothing),
        "loss_by_tokens": partial(_draw_loss, runs, "tokens_seen", smoothing),
    }
    for name, (title, axis, styles) in CURVES.items():
        if any(run.series(key)[0] for run in runs for key in styles):
            panels[name] = partial(_draw_curves, runs, title, axis, styles)
    for run in runs:
        suffix = f"_{run.name}" if len(runs) > 1 else ""
        panels[f"time{suffix}"] = partial(_draw_times, run)
        if run.keys("tokens/"):
            panels[f"mixture{suffix}"] = partial(_draw_mixture, run)
    num_rows = -(-len(panels) // 2)
    figure = Figure(figsize=(14.4, 3.6 * num_rows), layout="constrained")
    places = figure.subplots(num_rows, 2, squeeze=False).flat
    for axes, (name, panel) in zip(places, panels.items(), strict=False):
        axes.set(gid=name, xlabel="step")
        axes.grid(alpha=0.25)
        panel(axes)
        axes.legend(fontsize="small")
    for axes in places[len(panels) :]:
        axes.remove()
    return figure


def smoothed(values: Sequence[float], weight: float) -> Floats:
    """The exponential average of `weight`, without the bias of its start."""
    result, average, total = np.empty(len(values)), 0.0, 0.0
    for i, value in enumerate(values):
        average = weight * average + (1 - weight) * value
        total = weight * total + 1 - weight
        result[i] = average / total
    return result


def _plot(axes: Any, x: Sequence[float], y: Any, **style: Any) -> None:
    stride = -(-len(x) // MOST_POINTS) or 1
    axes.plot(x[::stride], y[::stride], **style)


def _stack(axes: Any, steps: Sequence[float], columns: Sequence[Any], **style: Any) -> None:
    stride = -(-len(steps) // MOST_POINTS) or 1
    axes.stackplot(steps[::stride], *(column[::stride] for column in columns), linewidth=0, **style)


def _draw_loss(runs: Sequence[RunHistory], x: str, smoothing: float, axes: Any) -> None:
    axes.set(title="Loss", xlabel="step" if x == "step" else "tokens", ylabel="nats per token")
    for number, run in enumerate(runs):
        color = f"C{number}"
        places, values = run.series("loss", x)
        _plot(axes, places, values, color=color, alpha=0.25, linewidth=0.8)
        _plot(axes, places, smoothed(values, smoothing), color=color, linewidth=1.5, label=run.name)
        keys = [key for key in run.keys("eval/", validation=True) if key.endswith("/loss")]
        for shade, key in enumerate(keys):
            style = dict[str, Any](marker="osD^v"[shade % 5], markersize=4, linestyle="--", linewidth=0.8)
            label = f"{run.name} {key.removesuffix('/loss')}"
            _plot(axes, *run.series(key, x, validation=True), color=color, label=label, **style)
        _mark_restarts(axes, run, x, color)


def _draw_curves(
    runs: Sequence[RunHistory], title: str, axis: str, styles: dict[str, str], axes: Any
) -> None:
    axes.set(title=title, ylabel=axis)
    for number, run in enumerate(runs):
        for key, style in styles.items():
            places, values = run.series(key)
            if places:
                label = f"{run.name} {key}" if len(runs) > 1 else key
                _plot(axes, places, values, color=f"C{number}", linestyle=style, linewidth=1.2, label=label)
        _mark_restarts(axes, run, "step", f"C{number}")


def _mark_restarts(axes: Any, run: RunHistory, x: str, color: str) -> None:
    """A dotted line where a launch began, at the first report it made."""
    for i, step in enumerate(run.restarts):
        place = step if x == "step" else run.reports[step + 1][x]
        label = f"restart of {run.name}" if i == 0 else None
        axes.axvline(place, color=color, linewidth=0.8, linestyle=":", label=label)


def _draw_times(run: RunHistory, axes: Any) -> None:
    axes.set(title=f"Time of a step: {run.name}", ylabel="ms")
    reports = [record for record in run.reports.values() if "forward_backward_ms" in record]
    parts = {key: _column(reports, key) for key in TIMES}
    parts["other"] = np.maximum(0.0, _column(reports, "step_time_ms") - sum(parts[key] for key in TIMES[:3]))
    _stack(axes, [record["step"] for record in reports], list(parts.values()), labels=TIMES)


def _draw_mixture(run: RunHistory, axes: Any) -> None:
    """The share of each source in the tokens between two reports."""
    axes.set(title=f"Mixture: {run.name}", ylabel="share of tokens", ylim=(0, 1))
    keys, reports = run.keys("tokens/"), list(run.reports.values())
    counts = np.stack([_column(reports, key) for key in keys])
    used = np.maximum(0.0, np.diff(counts, axis=1, prepend=0.0))
    shares = used / np.maximum(1.0, used.sum(axis=0))
    names = [key.removeprefix("tokens/") for key in keys]
    _stack(axes, list(run.reports), list(shares), labels=names, step="pre")


def _column(reports: Sequence[dict[str, Any]], key: str) -> Floats:
    return np.array([float(record.get(key) or 0) for record in reports])
