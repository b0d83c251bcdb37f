"""The rows of each step: a constant batch, or one that grows with the rows that the run has seen.

    batch = start + increment * floor(rows seen * n / samples), at most end      n = (end - start) / increment

`rows seen` are those before the step's first row. With `--rampup_round` each batch is rounded down to a
multiple of so many rows. A constant batch is a ramp that has ended. Integers alone.
Source: the ramp of Megatron-LM (`--rampup-batch-size`), without its rounding of intervals.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from math import gcd
from typing import NamedTuple

MAX_INCREMENTS = 10_000


@dataclass(frozen=True)
class BatchRamp:
    """From `start` rows a step to `end`, by `increment` rows at a time, while the run sees `samples` rows.

    Each batch is a multiple of `multiple` rows, which divides `end`: the next lower one, or the first one.
    """

    start: int
    increment: int
    samples: int
    end: int
    multiple: int = 1

    @classmethod
    def to(cls, end: int, rampup: Sequence[int] = ()) -> BatchRamp:
        """The ramp `rampup` (start, increment, samples, and the multiple if there is one) to a batch of `end`
        rows; without `rampup` a constant batch."""
        start, increment, samples, *multiple = rampup or (end, 0, 0)
        return cls(start, increment, samples, end, *multiple)

    @property
    def unit(self) -> int:
        """A number that divides every batch: the largest one, where rounding changes none."""
        unrounded = gcd(self.start, self.increment, self.end)
        return unrounded if unrounded % self.multiple == 0 else self.multiple

    def batch(self, rows_seen: int) -> int:
        """The rows of the step that comes after `rows_seen` rows of the run."""
        if rows_seen >= self.samples:
            return self.end
        rows = self.start + self.increment * self._increments_done(rows_seen)
        return max(rows // self.multiple, 1) * self.multiple

    def next_change(self, rows_seen: int) -> int:
        """The number of rows seen from which on the batch is a larger one, before the end of the ramp."""
        later = range(self._increments_done(rows_seen) + 1, self._num_increments + 1)
        changes = (-(-done * self.samples // self._num_increments) for done in later)
        return next(seen for seen in changes if self.batch(seen) != self.batch(rows_seen))

    def _increments_done(self, rows_seen: int) -> int:
        return rows_seen * self._num_increments // self.samples

    @property
    def _num_increments(self) -> int:
        return (self.end - self.start) // self.increment


class BatchInterval(NamedTuple):
    """Steps with batches of `batch` rows: `step` steps and `row` rows come before the first of these
    steps."""

    step: int
    row: int
    batch: int


class BatchIntervals:
    """The steps that follow after a run has seen some rows, counted from there."""

    def __init__(self, ramp: BatchRamp, rows_seen: int = 0) -> None:
        found = [BatchInterval(0, 0, ramp.batch(rows_seen))]
        while (last := found[-1]).batch != ramp.end:
            seen = rows_seen + last.row
            steps = -(-(ramp.next_change(seen) - seen) // last.batch)
            row = last.row + steps * last.batch
            found.append(BatchInterval(last.step + steps, row, ramp.batch(rows_seen + row)))
        self.intervals = found

    def rows_of(self, steps: int) -> int:
        """The rows of the first `steps` steps."""
        last = self.intervals[bisect_right(self.intervals, steps, key=lambda interval: interval.step) - 1]
        return last.row + (steps - last.step) * last.batch

    def steps_for(self, rows: int) -> int:
        """The least number of steps that have at least so many rows."""
        place = bisect_left(self.intervals, rows, key=lambda interval: interval.row)
        last = self.intervals[max(0, place - 1)]
        return last.step + max(0, -(-(rows - last.row) // last.batch))
