"""Judges predictions by published measurements, and fits the efficiencies of predict/speed.py on them.

    python benchmarks/judge_plan.py FILE.tsv                        # every row: predicted and published
    python benchmarks/judge_plan.py --leave_out FILE.tsv FILE.tsv   # each size by a fit on the others
    python benchmarks/judge_plan.py --calibrate FILE.tsv FILE.tsv   # prints the fitted efficiencies
    python benchmarks/judge_plan.py --plot=PLAN.svg FILE.tsv        # also draws prediction by publication

The efficiencies are fitted by least squares on the logarithms of tokens/s, large errors counting less, with a prior
for each number: what nothing published depends on keeps the value that the makers or the field report. A
table is read by published.py, which also holds what the tables leave out.
"""

from __future__ import annotations

import argparse
import math
import statistics
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from pictures import picture
from published import ASSUMED, DEVICES_PER_NODE, Peak, Published, peak_of, read_published

from fms_fsdp.console import table
from fms_fsdp.errors import UserError
from fms_fsdp.predict.speed import EFFICIENCY, Efficiency, step_time

OWN = ("matmul", "attention")  # values of a generation; the others are shared
# the values before anything is fitted, and by which factor they are trusted
PRIORS = {
    "ampere.matmul": (0.8, 1.1),
    "ampere.attention": (0.5, 1.5),
    "hopper.matmul": (0.68, 1.1),
    "hopper.attention": (0.35, 1.3),
    "memory": (0.8, 1.1),
    "links": (0.75, 1.1),
    "exposed": (0.5, 1.5),
    "fused": (0.3, 1.5),
    "old_attention": (0.7, 1.3),
}
ERROR = 0.05  # the spread of a row around a good prediction


def efficiencies(values: Mapping[str, float]) -> dict[str, Efficiency]:
    """Returns the efficiencies of each generation of devices."""
    shared = {name: value for name, value in values.items() if "." not in name}
    return {
        generation: Efficiency(**{name: values[f"{generation}.{name}"] for name in OWN}, **shared)
        for generation in EFFICIENCY
    }


def tokens_per_s(row: Published, reached: Mapping[str, Efficiency] = EFFICIENCY) -> float:
    """Returns the predicted tokens/s per device."""
    step, reach = row.step, reached[row.device.generation]
    assert step is not None
    device = replace(row.device, gain=1.0)  # the rows are of other programs
    seconds = step_time(step, device, DEVICES_PER_NODE, reach, row.computed)
    return step.tokens / sum(seconds.values()) / step.setup.dims.size("world")


def calibrate(rows: Sequence[Published]) -> dict[str, float]:
    """Returns the efficiencies that fit these rows best."""
    names = list(PRIORS)
    center = np.log([PRIORS[name][0] for name in names])
    trust = np.log([PRIORS[name][1] for name in names])

    def residuals(x: Any) -> Any:
        reached = efficiencies(dict(zip(names, np.exp(x), strict=True)))
        errors = (
            np.array([math.log(tokens_per_s(row, reached) / row.tokens_per_s) for row in rows])
            / ERROR
        )
        return np.concatenate([errors / (1 + errors**2 / 4) ** 0.25, (x - center) / trust])

    start = np.log([_shipped(name) for name in names])
    return dict(zip(names, map(float, np.exp(_least_squares(residuals, start))), strict=True))


def _shipped(name: str) -> float:
    """Returns a shipped efficiency, which is near every minimum."""
    generation, _, own = name.rpartition(".")
    value: float = getattr(EFFICIENCY[generation or "hopper"], own)
    return value


def _least_squares(residuals: Callable[[Any], Any], x: Any, turns: int = 60) -> Any:
    """The minimum near x, by Levenberg and Marquardt's method with numeric derivatives."""
    size, step, damping = len(x), 1e-4, 1e-2
    current = residuals(x)
    for _ in range(turns):
        slopes = np.stack(
            [(residuals(x + step * unit) - current) / step for unit in np.eye(size)], 1
        )
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


@dataclass(frozen=True)
class Judged:
    """A row with what was predicted of it; without a local batch nothing is."""

    row: Published
    tokens_per_s: float | None = None
    peak: Peak | None = None

    @property
    def peak_gib(self) -> float | None:
        """What is reserved, as the reports state it."""
        return None if self.peak is None else self.peak.reserved / 2**30

    @property
    def error(self) -> float | None:
        """Of tokens/s, 0.1 for a tenth too many."""
        return None if self.tokens_per_s is None else self.tokens_per_s / self.row.tokens_per_s - 1

    @property
    def memory_error(self) -> float | None:
        if self.row.peak_gib is None or self.peak_gib is None:
            return None
        return self.peak_gib / self.row.peak_gib - 1

    @property
    def fits(self) -> bool | None:
        if self.peak is None or self.row.step is None:
            return None
        return self.peak.needed <= self.row.device.memory_bytes


def judge(
    rows: Sequence[Published], by_size: Mapping[str, Mapping[str, Efficiency]] | None = None
) -> list[Judged]:
    """Returns the rows with their predictions; `by_size`: efficiencies for each model size, by default
    the shipped ones."""
    judged = []
    for row in rows:
        if row.step is None:
            judged.append(Judged(row))
            continue
        rate = tokens_per_s(row, by_size[row.size] if by_size else EFFICIENCY)
        judged.append(Judged(row, rate, peak_of(row)))
    return judged


def left_out(rows: Sequence[Published]) -> dict[str, dict[str, Efficiency]]:
    """Returns for each model size the efficiencies that are fitted on all other sizes."""
    known = [row for row in rows if row.step is not None]
    sizes = sorted({row.size for row in known})
    return {
        size: efficiencies(calibrate([row for row in known if row.size != size])) for size in sizes
    }


def rows_of(judged: Sequence[Judged]) -> str:
    """A line for each row."""
    lines = []
    for each in judged:
        row = each.row
        published_peak = "" if row.peak_gib is None else f"{row.peak_gib:.1f}"
        if each.tokens_per_s is None:
            cells = ["no local batch", f"{row.tokens_per_s:,.0f}", "", "", published_peak, ""]
        else:
            cells = [f"{each.tokens_per_s:,.0f}", f"{row.tokens_per_s:,.0f}", f"{each.error:+.1%}"]
            cells += [f"{each.peak_gib:.1f}", published_peak, "yes" if each.fits else "no"]
        lines.append([row.name, *cells])
    head = ["", "tokens/s a device", "published", "error", "GiB", "published", "fits"]
    return table(head, lines)


def summary(judged: Sequence[Judged]) -> str:
    """The figures of the targets, a line each."""
    errors = [abs(each.error) for each in judged if each.error is not None]
    peaks = [abs(each.memory_error) for each in judged if each.memory_error is not None]
    fitting = [each.fits for each in judged if each.fits is not None]
    lines = [
        f"rows: {len(judged)}, judged: {len(errors)}",
        f"fits: {sum(fitting)} of {len(fitting)} rows are predicted to fit their device (all ran)",
    ]
    if errors:
        within = sum(error <= 0.15 for error in errors)
        lines.insert(
            1, f"tokens/s: median error {statistics.median(errors):.1%}, largest {max(errors):.1%}"
        )
        lines.insert(
            2, f"tokens/s: {within} of {len(errors)} rows within 15 % ({within / len(errors):.0%})"
        )
    if peaks:
        close = sum(error <= 0.1 for error in peaks)
        lines.append(
            f"peak memory: {close} of {len(peaks)} within 10 %, largest error {max(peaks):.1%}"
        )
    return "\n".join(lines)


def draw(judged: Sequence[Judged], path: Path) -> None:
    """Draws prediction by publication, each row a point; those more than 15 % off have a label."""
    with picture(path, (8, 6.5)) as axes:
        known = [each for each in judged if each.tokens_per_s is not None]
        rates = [each.row.tokens_per_s for each in known]
        ends = np.array([min(rates), max(rates)])
        axes.fill_between(ends, ends * 0.85, ends * 1.15, color="black", alpha=0.1, label="±15 %")
        axes.plot(ends, ends, color="black", linewidth=0.8)
        names = sorted({each.row.device.name for each in known})
        for name in names:
            own = [each for each in known if each.row.device.name == name]
            published = [each.row.tokens_per_s for each in own]
            predicted = [each.tokens_per_s or 0 for each in own]
            axes.loglog(published, predicted, "o", markersize=5, alpha=0.8, label=_title_of(name))
        far = [each for each in known if each.error is not None and abs(each.error) > 0.15]
        below = 0.0  # the label below, as a fraction of the height
        for each in sorted(far, key=lambda each: each.tokens_per_s or 0):
            at = (each.row.tokens_per_s, each.tokens_per_s or 0)
            height = axes.transAxes.inverted().transform(axes.transData.transform(at))[1]
            below = max(height + 0.13, below + 0.05)
            axes.annotate(
                f"{', '.join(each.row.name.split(', ')[:2])}: {each.error:+.0%}",
                at,
                xytext=(0.03, below),
                textcoords="axes fraction",
                fontsize=9,
                arrowprops={"arrowstyle": "-", "linewidth": 0.6, "relpos": (1, 0.5)},
            )
        axes.set(
            title=f"Training speed of {len(known)} runs on {len(names)} GPU types",
            xlabel="published, tokens/s per GPU",
            ylabel="predicted by estimate, tokens/s per GPU",
        )
        axes.grid(which="major", alpha=0.3)
        axes.legend(loc="lower right")


def _title_of(device: str) -> str:
    """Returns the name of a device as people write it: H100 96GB 500W."""
    return device.replace("_", " ").upper()


def main(argv: Sequence[str]) -> int:
    """Prints what the options ask for; returns the exit status."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("files", nargs="+", type=Path, metavar="FILE.tsv")
    parser.add_argument(
        "--calibrate",
        action="store_true",
        help="fit the efficiencies and print them",
    )
    parser.add_argument("--leave_out", action="store_true", help="each size by a fit on the others")
    parser.add_argument("--plot", type=Path, help="a picture of prediction against publication")
    options = parser.parse_args(argv)
    try:
        rows = [row for path in options.files for row in read_published(path)]
    except (UserError, OSError) as error:
        print(f"judge_plan: error: {error}", file=sys.stderr)
        return 2
    if options.calibrate:
        for name, value in calibrate([row for row in rows if row.step is not None]).items():
            print(f"{name} = {value:.3g}")
        return 0
    judged = judge(rows, left_out(rows) if options.leave_out else None)
    print(rows_of(judged))
    print("\nassumed where a file says nothing:")
    print("\n".join(f"  {what}: {value}" for what, value in ASSUMED.items()))
    print(f"\n{summary(judged)}")
    if options.plot:
        draw(judged, options.plot)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
