"""Judges the planner by what others published, and fits its curves on the same tables.

    python benchmarks/judge_plan.py FILE.tsv                        # every row: predicted and published
    python benchmarks/judge_plan.py --calibrate FILE.tsv FILE.tsv   # prints the table of predict/curves.py
    python benchmarks/judge_plan.py --leave_out FILE.tsv FILE.tsv   # each size by curves fitted on the others

The curves are fitted by least squares on the logarithms of tokens/s, large errors counting less, with a prior
for each number: what nothing published depends on keeps the value that the makers or the field report. A
table is read by published.py, which also holds what the tables leave out.
"""

from __future__ import annotations

import argparse
import dataclasses
import math
import statistics
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from published import ASSUMED, Published, read_published

from fms_fsdp.errors import UserError
from fms_fsdp.predict.curves import CURVES, Curves
from fms_fsdp.predict.speed import step_time
from fms_fsdp.tools.table import table  # noqa: F401

OWN = ("products", "attention", "old_attention", "eager")  # numbers of a generation; the others are shared
# the values before anything is fitted, and by which factor they are trusted
PRIORS = {
    "ampere.products": (0.8, 1.1), "ampere.attention": (0.45, 1.5), "ampere.old_attention": (0.35, 1.5),
    "ampere.eager": (1.5, 2), "hopper.products": (0.68, 1.1), "hopper.attention": (0.35, 1.3),
    "hopper.old_attention": (0.2, 1.5), "hopper.eager": (1.5, 2), "compiled": (1.2, 1.5), "edges": (0.7, 1.7),
    "small_heads": (0.8, 1.3), "logits": (14, 1.5), "float8": (1.5, 1.2), "kernels": (1e-4, 2),
    "node": (0.75, 1.15), "net": (0.7, 1.3), "hop": (5e-6, 2), "overlapped": (0.4, 1.5),
    "exposed": (0.15, 2), "optimizer": (1.2, 1.3),
}  # fmt: skip
ERROR = 0.05  # the spread of a row around a good prediction


def curves_of(values: Mapping[str, float]) -> dict[str, Curves]:
    """The table of curves with these numbers."""
    shared = {name: value for name, value in values.items() if "." not in name}
    return {
        generation: Curves(**{name: values[f"{generation}.{name}"] for name in OWN}, **shared)
        for generation in CURVES
    }


def tokens_per_s(row: Published, curves: Mapping[str, Curves] = CURVES) -> float:
    """Predicted tokens/s of a device."""
    assert row.work is not None
    work, dims = row.work, row.work.dims
    rows = work.batch.batch_size * work.batch.grad_accum_steps
    sharing = dims.size("world") // dims.size("dp")
    return rows * work.seq_length / sharing / step_time(work, curves[work.hardware.curves]).total


def calibrate(rows: Sequence[Published]) -> dict[str, float]:
    """The numbers of the curves that fit these rows best."""
    names = list(PRIORS)
    start = np.log([PRIORS[name][0] for name in names])
    trust = np.log([PRIORS[name][1] for name in names])

    def residuals(x: Any) -> Any:
        curves = curves_of(dict(zip(names, np.exp(x), strict=True)))
        errors = np.array([math.log(tokens_per_s(row, curves) / row.tokens_per_s) for row in rows]) / ERROR
        return np.concatenate([errors / (1 + errors**2 / 4) ** 0.25, (x - start) / trust])

    return dict(zip(names, map(float, np.exp(_least_squares(residuals, start))), strict=True))


def _least_squares(residuals: Callable[[Any], Any], x: Any, turns: int = 60) -> Any:
    """The minimum near x, by Levenberg and Marquardt's method with numeric derivatives."""
    size, step, damping = len(x), 1e-4, 1e-2
    current = residuals(x)
    for _ in range(turns):
        slopes = np.stack([(residuals(x + step * unit) - current) / step for unit in np.eye(size)], 1)
        while damping < 1e8:
            move = np.linalg.solve(slopes.T @ slopes + damping * np.eye(size), -slopes.T @ current)
            tried = residuals(x + np.clip(move, -0.5, 0.5))
            if tried @ tried < current @ current:
                break
            damping *= 4
        else:
            return x
        x, gained, current = x + np.clip(move, -0.5, 0.5), current @ current - tried @ tried, tried
        damping /= 5
        if gained < 1e-6 * (current @ current):
            return x
    return x
