"""The learning rate and the batch over a run: in the terminal, or on a page with the charts of a report."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from fms_fsdp.config.values import short
from fms_fsdp.optim.schedules import RunLength, Schedule
from fms_fsdp.tools.report.page import write_charts
from fms_fsdp.tools.report.panels import Panel, Series

WIDTH, HEIGHT, POINTS = 72, 8, 1000  # characters of a plot, steps of a chart
_FILLED = " ▁▂▃▄▅▆▇█"  # eighths of a character


def show_schedule(schedule: Schedule, run: RunLength, page: str) -> None:
    """Prints the rate and the batch over the run, or writes them to `page` and prints that path.

    Raises:
        OSError: the page cannot be written.
    """
    steps = np.unique(np.linspace(1, run.num_steps, POINTS if page else WIDTH).astype(int))
    batches = [run.tokens_at(step) - run.tokens_at(step - 1) for step in steps.tolist()]
    read = np.array([run.tokens_at(step) for step in steps.tolist()])
    base = schedule.config.learning_rate
    rates = [
        schedule(step, tokens, base)
        for step, tokens in zip(steps.tolist(), read.tolist(), strict=True)
    ]
    if not page:
        print(
            plot("learning rate", rates, base),
            plot("batch, tokens", batches, max(batches)),
            sep="\n",
        )
        print(f"from step 1 to step {run.num_steps:,}, {read[-1]:,} tokens")
        return
    by_tokens = Panel("lr_by_tokens", "Learning rate by tokens", "", x="tokens_seen")
    panels = [Panel("lr", "Learning rate", ""), by_tokens, Panel("batch", "Batch", "tokens")]
    for panel, x, y in zip(panels, (steps, read, steps), (rates, rates, batches), strict=True):
        panel.series.append(Series(panel.title, np.asarray(x, float), np.asarray(y, float), 0))
    write_charts(Path(page), f"{schedule.config.lr_schedule}, {run.num_steps:,} steps", panels)


def plot(name: str, values: Sequence[float], top: float) -> str:
    """The values as columns from 0 to `top`; one that never changes is a line of text."""
    if max(values) == min(values):
        return f"{name}: {short(values[0], 3)} in every step"
    lines = [f"{name}, 0 to {short(top, 3)}"]
    for below in range(HEIGHT - 1, -1, -1):
        eighths = [round(8 * (value / top * HEIGHT - below)) for value in values]
        lines.append("".join(_FILLED[min(8, max(0, filled))] for filled in eighths).rstrip())
    return "\n".join(lines)
