"""The panels of a report as one picture, drawn by matplotlib."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from fms_fsdp.errors import UserError
from fms_fsdp.tools.report.panels import Panel


def write_png(panels: Sequence[Panel], path: Path, flag: str = "--png") -> None:
    """Writes the picture that `flag` asks for, the panels below one another.

    Raises:
        UserError: matplotlib is missing.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise UserError(f"{flag} needs matplotlib, which is not installed; pip install matplotlib") from None
    figure = Figure(figsize=(10, 4 * len(panels)), layout="constrained")
    for axes, panel in zip(figure.subplots(len(panels), squeeze=False).flat, panels, strict=True):
        axes.set(title=panel.title, xlabel=panel.x, ylabel=panel.unit)
        axes.set(xscale="log" if panel.log_x else "linear", yscale="log" if panel.log_y else "linear")
        if panel.is_stack:
            labels = [curve.label for curve in panel.series]
            axes.stackplot(panel.series[0].x, *(curve.y for curve in panel.series), labels=labels)
        for curve in () if panel.is_stack else panel.series:
            line = axes.plot(curve.x, curve.y, color=f"C{curve.color}", label=curve.label)[0]
            line.set(alpha=0.35 if curve.is_faint else 1, marker="o" if curve.has_dots else "")
            line.set_linestyle((0, curve.dash or None))
        for place in panel.restarts:
            axes.axvline(place, color="gray", linestyle=":")
        for words in (axes.title, *axes.legend(fontsize="small").get_texts()):
            words.set_parse_math(False)  # names may hold any sign
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=100)
