"""Draws panels as HTML: a caption, a legend beside the data, and an inline SVG.

Colours are classes, c0 to c7, and fonts have a size for each width: page.html has both. The scale and the
values stand in data attributes, from which page.html shows the values under the pointer.
"""

from __future__ import annotations

import html
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from fms_fsdp.config.values import short
from fms_fsdp.tools.report.history import Floats
from fms_fsdp.tools.report.panels import Panel, Series

WIDTH, HEIGHT = 520, 250
LEFT, RIGHT, TOP, BOTTOM = 58, 508, 10, 222  # of the data
COLORS = 8
ALL_POINTS, MOST_POINTS, FEWEST_POINTS = 24_000, 1000, 40  # of a page, of a curve
MOST_DOTS = 60  # of a curve


@dataclass(frozen=True)
class Axis:
    """Values from `low` to `high` on pixels from `start` to `end`."""

    low: float
    high: float
    start: float
    end: float
    is_log: bool

    def pixels(self, values: Floats) -> Floats:
        """The places of values; what has none on this axis is NaN."""
        low, high = self.low, self.high
        if self.is_log:
            values = np.log(np.where(values > 0, values, np.nan))
            low, high = math.log(low), math.log(high)
        return self.start + (values - low) / (high - low) * (self.end - self.start)

    def ticks(self) -> list[tuple[float, str]]:
        """Pixel and text of about five round values."""
        if self.is_log and self.high / self.low > 20:
            decades = range(math.floor(math.log10(self.low)), math.ceil(math.log10(self.high)) + 1)
            factors = (1, 3) if len(decades) < 6 else (1,)
            powers = 10.0 ** np.array(decades[:: 1 + len(decades) // 8])
            found = np.outer(powers, factors).ravel()
            values = found[(self.low <= found) & (found <= self.high)]
        else:
            rough = (self.high - self.low) / 5
            power = 10.0 ** math.floor(math.log10(rough))
            step = power * next(
                factor for factor in (1, 2, 5, 10) if factor * power >= rough * 0.99
            )
            first, last = math.ceil(self.low / step - 1e-9), math.floor(self.high / step + 1e-9)
            values = step * np.arange(first, last + 1)
        return list(zip(self.pixels(values).tolist(), map(short, values.tolist()), strict=True))


def draw(panels: Sequence[Panel]) -> str:
    """All panels as HTML; the more curves there are, the fewer points each has."""
    share = ALL_POINTS // max(1, sum(len(panel.series) for panel in panels))
    most = min(MOST_POINTS, max(FEWEST_POINTS, share))
    return "\n".join(_figure(panel, most) for panel in panels)


def text(words: str) -> str:
    """A text as HTML; bytes of file names that are not UTF-8 become `\\udcXX`."""
    return html.escape(words.encode(errors="backslashreplace").decode(), quote=True)


def _figure(panel: Panel, most: int) -> str:
    x_axis, y_axis = _axes(panel)
    draw_series = _layers if panel.is_stack else _lines
    marks = "".join(f"M{x:.1f} {TOP}V{BOTTOM}" for x in x_axis.pixels(np.array(panel.marks)))
    keys = list[str]()
    for curve in panel.series:
        dot = _dots(curve, "M13 6h0") if curve.has_dots else ""
        keys.append(_key(_shape(curve, panel.is_stack), curve.label, dot))
    if marks:
        keys.append(_key('class="restart"', panel.mark))
    scale = f"{x_axis.low:.9g} {x_axis.high:.9g} {int(panel.log_x)} {LEFT} {RIGHT} {TOP} {BOTTOM}"
    parts = [
        f"<figure><figcaption><b>{text(panel.title)}</b> {text(panel.unit)}</figcaption><ul>",
        *keys,
        f'</ul><svg class="chart" id="{text(panel.name)}" viewBox="0 0 {WIDTH} {HEIGHT}" role="img"',
        f' aria-label="{text(panel.title)}" data-x="{panel.x}" data-scale="{scale}">',
        *(f'<path class="grid" d="M{LEFT} {y:.1f}H{RIGHT}"/>' for y, _ in y_axis.ticks()),
        *(
            f'<text class="y" x="{LEFT - 6}" y="{y:.1f}">{tick}</text>'
            for y, tick in y_axis.ticks()
        ),
        *(
            f'<text class="x" x="{x:.1f}" y="{BOTTOM + 17}">{tick}</text>'
            for x, tick in x_axis.ticks()
        ),
        *draw_series(panel.series, x_axis, y_axis, most),
        f'<path class="restart" d="{marks}"/></svg></figure>',
    ]
    return "\n".join(parts)


def _axes(panel: Panel) -> tuple[Axis, Axis]:
    x = np.concatenate([panel.marks, *(curve.x for curve in panel.series)])
    y = [curve.y for curve in panel.series]
    heights = np.sum(y, axis=0) if panel.is_stack else np.concatenate(y)
    x_limits = _limits(x, panel.log_x, 0.0, from_zero=False)
    y_limits = _limits(heights, panel.log_y, 0.04, from_zero=panel.from_zero)
    return Axis(*x_limits, LEFT, RIGHT, panel.log_x), Axis(*y_limits, BOTTOM, TOP, panel.log_y)


def _limits(values: Floats, is_log: bool, margin: float, *, from_zero: bool) -> tuple[float, float]:
    """The ends of an axis, `margin` beyond the values; a linear one begins at 0 where that costs little."""
    values = values[np.isfinite(values) & ((values > 0) | (not is_log))]
    low, high = (float(values.min()), float(values.max())) if len(values) else (1.0, 2.0)
    if is_log:
        factor = (high / low) ** margin if high > low else 1.5
        return low / factor, high * factor
    starts_at_zero = low >= 0 and (from_zero or low < 0.2 * high or low == high)
    low = 0.0 if starts_at_zero else low
    space = margin * (high - low) if high > low else 1.0
    return low - (0.0 if starts_at_zero else space), high + space


def _lines(series: Sequence[Series], x_axis: Axis, y_axis: Axis, most: int) -> Iterator[str]:
    for curve in series:
        x, y = x_axis.pixels(curve.x), y_axis.pixels(curve.y)
        kept = _kept(x, y, most)
        x, y = x[kept], y[kept]
        yield f'<path {_shape(curve)} {_values(curve, kept)} d="{_path(x, y)}"/>'
        if len(kept) <= (MOST_DOTS if curve.has_dots else 1):
            yield _dots(curve, _path(x, y, joined=False))


def _layers(series: Sequence[Series], x_axis: Axis, y_axis: Axis, most: int) -> Iterator[str]:
    """Areas on one another, from the left end on."""
    x = np.append(LEFT, x_axis.pixels(series[0].x))
    low = np.zeros(len(x))
    for curve in series:
        high = low + np.append(curve.y[:1], curve.y)
        over, under = y_axis.pixels(high), y_axis.pixels(low)
        path = f"{_path(x, over)}L{_path(x[::-1], under[::-1])[1:]}z"
        yield f'<path {_shape(curve, is_layer=True)} {_values(curve, np.arange(len(curve.x)))} d="{path}"/>'
        low = high


def _path(x: Floats, y: Floats, *, joined: bool = True) -> str:
    """A path through the points, or a dot at each; a NaN interrupts it, and a point alone is a dot too."""
    is_there = np.isfinite(x + y)
    begins = is_there & ~np.append(False, is_there[:-1] & joined)
    points = zip(x.tolist(), y.tolist(), begins.tolist(), is_there.tolist(), strict=True)
    return "".join(
        f"M{a:.1f} {b:.1f}h0" if begin else f"L{a:.1f} {b:.1f}"
        for a, b, begin, there in points
        if there
    )


def _kept(x: Floats, y: Floats, most: int) -> npt.NDArray[np.int64]:
    """Which points are drawn: of each stretch of the axis the least, the greatest and a gap."""
    if len(y) <= most:
        return np.arange(len(y))
    stretches = np.linspace(np.nanmin(x), np.nanmax(x), most // 2)
    stretch, kept = np.searchsorted(stretches, x), [np.array([0, len(y) - 1])]
    for key in (np.nan_to_num(y, nan=np.inf), np.nan_to_num(-y, nan=np.inf), np.isfinite(y)):
        order = np.lexsort((key, stretch))
        kept.append(order[np.flatnonzero(np.diff(stretch[order], prepend=-1))])
    return np.unique(np.concatenate(kept))


def _shape(curve: Series, is_layer: bool = False) -> str:
    """The attributes that show which curve it is."""
    kind = "area" if is_layer else "line faint" if curve.is_faint else "line"
    dash = f' stroke-dasharray="{" ".join(map(str, curve.dash))}"' if curve.dash else ""
    return f'class="{kind} c{curve.color % COLORS}"{dash}'


def _dots(curve: Series, path: str) -> str:
    return f'<path class="dots c{curve.color % COLORS}" d="{path}"/>'


def _values(curve: Series, kept: npt.NDArray[np.int64]) -> str:
    """The attributes that page.html reads."""
    points = zip(curve.x[kept].tolist(), curve.y[kept].tolist(), strict=True)
    values = " ".join(f"{x:.9g} {y:.5g}" for x, y in points if math.isfinite(y))
    return f'data-label="{text(curve.label)}" data-values="{values}"'


def _key(shape: str, label: str, dot: str = "") -> str:
    """A line of the legend."""
    sign = f'<svg class="key" viewBox="0 0 26 12"><path {shape} d="M1 6H25"/>{dot}</svg>'
    return f"<li>{sign}{text(label)}</li>"
