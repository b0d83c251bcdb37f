"""Which charts a report has: runs → panels of curves, as data. `svg.py` draws them for a page.

A run alone has a colour for each metric. Several runs share their panels, and each has one colour.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from fms_fsdp.tools.report.history import Floats, Record, RunHistory

MOST_MEANS, MOST_LAYERS = 400, 150  # points of a curve of means, and of a layer
DASHES = ((), (6, 3), (1.5, 3), (9, 3, 1.5, 3))  # lengths of stroke and gap
# kinds of time of a step, from the bottom; the passes of a pipeline take turns and have one time
TIMES = (
    "data_wait_ms",
    "forward_ms",
    "backward_ms",
    "forward_backward_ms",
    "clip_ms",
    "optimizer_ms",
)
BESIDE = ("checkpoint_ms", "logging_ms")


@dataclass(frozen=True)
class Series:
    """A curve, or a layer of a stack; a NaN is a gap. Colours count from 0; an empty dash is a solid line."""

    label: str
    x: Floats
    y: Floats
    color: int
    dash: tuple[float, ...] = ()
    has_dots: bool = False
    is_faint: bool = False


@dataclass(frozen=True)
class Panel:
    """A chart of `metrics` over `x`. `marks`: places that a dotted line shows, which the legend calls
    `mark`."""

    name: str
    title: str
    unit: str
    metrics: tuple[str, ...] = ()
    x: str = "step"
    from_zero: bool = True
    log_x: bool = False
    log_y: bool = False
    is_stack: bool = False
    series: list[Series] = field(default_factory=list)
    marks: list[float] = field(default_factory=list)
    mark: str = "restart"


LOSSES = ("loss", "loss_mean")
CURVES = (
    Panel("loss_by_step", "Loss", "nats per token", LOSSES, from_zero=False),
    Panel(
        "loss_by_tokens",
        "Loss by tokens",
        "nats, log scales",
        LOSSES,
        "tokens_seen",
        False,
        True,
        True,
    ),
    Panel("lr", "Learning rate", "", ("lr",)),
    Panel(
        "grad_norm", "Gradient norm", "before clipping", ("grad_norm", "grad_norm_max"), log_y=True
    ),
    Panel("throughput", "Throughput", "tokens/s per device", ("tokens_per_sec_per_device",)),
    Panel("utilization", "Utilization", "share of the peak FLOP/s", ("mfu", "mfu_matmul", "hfu")),
    Panel("memory", "Memory", "GiB of rank 0", ("peak_mem_gib", "mem_gib", "reserved_mem_gib")),
)


def build_panels(runs: Sequence[RunHistory]) -> list[Panel]:
    """Every chart that the runs have numbers for. Each run has its own time of a step and its own mixture."""
    panels = [_curves(runs, panel) for panel in CURVES]
    for run in runs:
        ending, title = ("", "") if len(runs) == 1 else (f"_{run.name}", f": {run.name}")
        times, shares = _times(run), _shares(run)
        panels.append(
            Panel(f"time{ending}", f"Time of a step{title}", "ms", series=times, is_stack=True)
        )
        panels.append(
            Panel(f"mixture{ending}", f"Mixture{title}", "share", series=shares, is_stack=True)
        )
    return [panel for panel in panels if panel.series]


def _curves(runs: Sequence[RunHistory], panel: Panel) -> Panel:
    """The panel with its curves, and held-out losses beside the losses.

    Of several runs it has the first metric alone, of losses the means and the first held-out one.
    """
    is_alone, series, marks = len(runs) == 1, list[Series](), list[float]()
    for number, run in enumerate(runs):
        held_out = run.validation_losses if panel.metrics == LOSSES else []
        found = dict[str, tuple[Floats, Floats]]()
        for key in (*panel.metrics, *held_out):
            x, y = run.series(key, panel.x)
            if len(x):
                found[key] = x, y
        if has_means := "loss_mean" in found:
            found["loss_mean"] = _merged(*found["loss_mean"], MOST_MEANS, log_x=panel.log_x)
        shown = list(found) if is_alone else [panel.metrics[has_means], *held_out[:1]]
        for place, key in enumerate(filter(found.get, shown)):
            label = (
                key.removesuffix("/loss") if is_alone else f"{run.name} {key.removesuffix('/loss')}"
            )
            color = max(0, place - has_means) if is_alone else number
            is_held_out, is_faint = key in held_out, has_means and key == "loss"
            dash = () if key in LOSSES else DASHES[1 + place % 3 if is_held_out else place]
            series.append(Series(label, *found[key], color, dash, is_held_out, is_faint))
        for step in run.restarts:
            marks.append(step if panel.x == "step" else run.reports[step + 1][panel.x])
    return replace(panel, series=_distinct(series), marks=marks)


def _distinct(series: Sequence[Series]) -> list[Series]:
    """The curves; one that would hide an earlier one is named beside it."""
    found = dict[bytes, Series]()
    for curve in series:
        key = curve.x.tobytes() + curve.y.tobytes()
        label = f"{found[key].label} = {curve.label}" if key in found else curve.label
        found[key] = replace(found.get(key, curve), label=label, is_faint=curve.is_faint)
    return list(found.values())


def _times(run: RunHistory) -> list[Series]:
    reports = [record for record in run.reports.values() if "forward_backward_ms" in record]
    parts = {key: _column(reports, key) for key in TIMES}
    parts["forward_backward_ms"][parts["forward_ms"] > 0] = 0.0
    parts["other"] = np.maximum(0.0, _column(reports, "step_time_ms") - sum(parts.values()))
    parts |= {key: _column(reports, key) for key in BESIDE}
    return _layers(reports, {key: values for key, values in parts.items() if values.any()})


def _shares(run: RunHistory) -> list[Series]:
    """The share of each source in the tokens between two reports."""
    reports = list(run.reports.values())
    used = dict[str, Floats]()
    for key in run.keys("tokens/"):
        counts = np.diff(_column(reports, key), prepend=0.0)
        used[key.removeprefix("tokens/")] = np.maximum(0.0, counts)
    layers = _layers(reports, used)
    total = np.maximum(1e-9, sum(layer.y for layer in layers))
    return [replace(layer, y=layer.y / total) for layer in layers]


def _layers(reports: Sequence[Record], parts: Mapping[str, Floats]) -> list[Series]:
    """A layer of each part, of means over the steps between their places."""
    steps, layers = _column(reports, "step"), list[Series]()
    for label, values in parts.items() if reports else ():
        layers.append(Series(label, *_merged(steps, values, MOST_LAYERS), len(layers)))
    return layers


def _merged(x: Floats, y: Floats, most: int, *, log_x: bool = False) -> tuple[Floats, Floats]:
    """At most `most` points: means of y over equal lengths of the axis, each at the last of its places."""
    if len(x) <= most:
        return x, y
    edges = np.geomspace(x[0], x[-1], most) if log_x else np.linspace(x[0], x[-1], most)
    starts = np.unique(np.searchsorted(x, edges[:-1]))
    number = np.add.reduceat(np.isfinite(y).astype(np.float64), starts)
    total = np.add.reduceat(np.nan_to_num(y), starts)
    means = np.divide(total, number, out=np.full(len(starts), np.nan), where=number > 0)
    return x[np.append(starts[1:], len(x)) - 1], means


def _column(reports: Sequence[Record], key: str) -> Floats:
    """A metric of all reports; 0 where it has no number."""
    return np.nan_to_num(np.array([record.get(key) or 0.0 for record in reports], dtype=np.float64))
