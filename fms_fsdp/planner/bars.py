"""Memory and time of plans as stacked bars: characters for the terminal, SVG for a page."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from html import escape

from fms_fsdp.config.values import plain
from fms_fsdp.planner.plan import memory_parts
from fms_fsdp.planner.words import GIB, Figures, Predicted

WIDTH = 60  # characters of the longest bar
_FILLS = "█▓▒░▚▞#=+:-.ox"
_COLORS = 8  # classes of the page
_LEFT, _RIGHT, _HEIGHT = 80, 440, 26  # pixels: where bars begin and end at most, and of a bar with its gap


@dataclass(frozen=True)
class Bars:
    """Bars of parts in one unit, with their labels. `end`: where all bars should end, 0 for nowhere."""

    title: str
    unit: str
    parts: Mapping[str, Mapping[str, float]]
    end: float = 0.0

    @property
    def names(self) -> list[str]:
        """The parts that some bar has, in their order."""
        found = dict[str, None]()
        for bar in self.parts.values():
            found |= dict.fromkeys(name for name, value in bar.items() if value > 0)
        return list(found)

    @property
    def most(self) -> float:
        """What the width stands for."""
        return max(self.end, *(sum(bar.values()) for bar in self.parts.values()))

    @property
    def figures(self) -> Figures:
        """The parts of each bar, in the unit."""
        rows = []
        for name, fill in zip(self.names, _FILLS, strict=False):
            rows.append((f"{fill} {name}", *(plain(bar.get(name, 0.0)) for bar in self.parts.values())))
        return Figures((self.unit, *self.parts), rows)


def bars_of(rows: Sequence[Predicted]) -> list[Bars]:
    """The bars of memory and of time, a plan a bar."""
    memory, time = dict[str, dict[str, float]](), dict[str, dict[str, float]]()
    for row in rows:
        memory[row.label] = {name: size / GIB for name, size in memory_parts(row.plan).items()}
        time[row.label] = row.plan.time.parts
    end = rows[0].plan.available / GIB
    return [Bars("memory of a rank", "GiB", memory, end), Bars("time of a step", "s", time)]


def in_characters(bars: Bars) -> Iterator[str | Figures]:
    """Bars for the terminal, and what their characters stand for."""
    scale = WIDTH / bars.most
    over = f"; | is what the device has, {plain(bars.end)}" if bars.end else ""
    yield f"{bars.title}: a character is {plain(1 / scale, 2)} {bars.unit}{over}"
    indent = max(map(len, bars.parts))
    for label, bar in bars.parts.items():
        text, total = "", 0.0
        for name, fill in zip(bars.names, _FILLS, strict=False):
            total += bar.get(name, 0.0)
            text += fill * (round(total * scale) - len(text))
        if bars.end:
            place = round(bars.end * scale)
            text = f"{text:<{place}}"
            text = f"{text[:place]}|{text[place:]}"
        yield f"{label:>{indent}} {text}"
    yield bars.figures


def in_svg(bars: Bars) -> str:
    """A figure of a page: a legend with the figures of the first bar alone, or with all in a table."""
    scale, height = (_RIGHT - _LEFT) / bars.most, _HEIGHT * len(bars.parts)
    only = next(iter(bars.parts.values())) if len(bars.parts) == 1 else {}
    parts = [f"<figure><figcaption><b>{escape(bars.title)}</b> {escape(bars.unit)}</figcaption><ul>"]
    for number, name in enumerate(bars.names):
        key = f'<svg class="key" viewBox="0 0 26 12"><path {_color(number)} d="M1 6H25"/></svg>'
        figure = f" {plain(only[name])}" if only else ""
        parts.append(f"<li>{key}{escape(name + figure)}</li>")
    parts.append(f'</ul><svg class="chart" viewBox="0 0 520 {height + 4}" role="img" data-x=""')
    parts.append(f' aria-label="{escape(bars.title)}" data-scale="0 1 0 -99 -99 0 0">')
    for row, (label, bar) in enumerate(bars.parts.items()):
        x, y = float(_LEFT), _HEIGHT * row + 4
        parts.append(f'<text class="y" x="{_LEFT - 6}" y="{y + 9}">{escape(label)}</text>')
        for number, name in enumerate(bars.names):
            width = bar.get(name, 0.0) * scale
            told = f"<title>{escape(name)} {plain(bar.get(name, 0.0))} {bars.unit}</title>"
            shape = f'x="{x:.1f}" y="{y}" width="{width:.1f}" height="18"'
            parts.append(f"<rect {_color(number)} {shape}>{told}</rect>")
            x += width
        parts.append(f'<text x="{x + 6:.1f}" y="{y + 13}">{plain(sum(bar.values()))}</text>')
    if bars.end:
        parts.append(f'<path class="restart" d="M{_LEFT + bars.end * scale:.1f} 0V{height + 4}"/>')
    return "\n".join([*parts, "</svg></figure>"])


def _color(number: int) -> str:
    """The class of a part; parts beyond the colours of the page take them again, paler."""
    return f'class="area c{number % _COLORS}"' + ' fill-opacity="0.5"' * (number >= _COLORS)
