"""Which steps to save, and which checkpoints to keep. Pure functions, standard library only."""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass

from fms_fsdp.config.outputs import KeepConfig
from fms_fsdp.config.spans import StepRange, parse_ranges
from fms_fsdp.errors import UserError


@dataclass(frozen=True)
class SaveSchedule:
    """Ranges (start, stop, interval): inside (start, stop] every `interval` steps counted from `start`; stop
    None has no end.

    `10@100,18@1000,1500` means every 10 steps up to 100, then every 18 up to 1000, then every 1500.
    Source: the saving schedule of https://github.com/bigscience-workshop/bigscience (tr1-13B), which took
    three scripts there.
    """

    ranges: tuple[tuple[int, int | None, int], ...]

    def is_due(self, step: int) -> bool:
        return self.next_after(step - 1) == step

    def next_after(self, step: int) -> int | None:
        """The first step past `step` that is due."""
        for start, stop, interval in self.ranges:
            due = start + (max(0, step - start) // interval + 1) * interval
            if stop is None or due <= stop:
                return due
        return None

    def count(self, first: int, last: int) -> int:
        """How many steps from `first` to `last` are due."""
        total = 0
        for start, stop, interval in self.ranges:
            end = last if stop is None else min(stop, last)
            total += max(0, end - start) // interval - max(0, min(end, first - 1) - start) // interval
        return total

    def meets_interval(self, interval: int) -> bool:
        """Whether some step that is due is a multiple of `interval`."""
        for start, stop, every in self.ranges:
            common = math.gcd(every, interval)
            if start % common == 0:
                period = interval // common
                count = -(start // common) * pow(every // common, -1, period) % period or period
                if stop is None or start + count * every <= stop:
                    return True
        return False


def parse_schedule(text: str, interval: int) -> SaveSchedule:
    """The schedule of `--checkpoint_schedule`, or of `--checkpoint_interval` where it is empty (0: none).

    Raises:
        UserError: the text does not parse.
    """
    if not text:
        return SaveSchedule(((0, None, interval),) if interval else ())
    ranges: list[tuple[int, int | None, int]] = []
    start = 0
    parts = text.split(",")
    for index, part in enumerate(parts):
        match = re.fullmatch(r"\s*(\d{1,15})(?:@(\d{1,15}))?\s*", part)
        every, stop = (int(match[1]), int(match[2]) if match[2] else None) if match else (0, None)
        if every < 1 or (stop is None and index < len(parts) - 1) or (stop is not None and stop <= start):
            raise UserError(
                f"--checkpoint_schedule ({text}) must be INTERVAL@LAST_STEP,…,INTERVAL with rising steps, "
                f"such as 10@100,18@1000,1500; correct ({part.strip()})"
            )
        ranges.append((start, stop, every))
        start = stop or start
    return SaveSchedule(tuple(ranges))


@dataclass(frozen=True)
class KeepPolicy:
    """What stays: the newest `last` (0: all), multiples of `every` (0: none), the `best` by `metric` (0:
    none), whose `mode` says whether the least (min) or the greatest (max) value is the best, `steps`, and
    what lies in `ranges`."""

    last: int = 0
    every: int = 0
    best: int = 0
    steps: tuple[int, ...] = ()
    ranges: tuple[StepRange, ...] = ()
    metric: str = "eval/loss"
    mode: str = "min"

    @classmethod
    def of(cls, section: KeepConfig) -> KeepPolicy:
        """The policy that flags name."""
        ranges = tuple(parse_ranges("keep_ranges", section.keep_ranges))
        numbers = section.keep_last_n, section.keep_every, section.keep_best, section.keep_steps
        return cls(*numbers, ranges, section.keep_best_metric, section.keep_best_mode)

    def to_delete(self, complete: Collection[int], ranked: Mapping[int, float]) -> list[int]:
        """The steps among `complete` that need not be kept, ascending. `ranked`: the value of the metric of
        the best by step, where there is one."""
        if not self.last:
            return []
        keep = set(sorted(complete)[-self.last :])
        keep |= {step for step in complete if self._is_kept_for_ever(step)}
        sign = -1 if self.mode == "max" else 1
        order = sorted((sign * ranked[step], step) for step in complete if step in ranked)
        keep |= {step for _, step in order[: self.best]}
        return sorted(set(complete) - keep)

    def _is_kept_for_ever(self, step: int) -> bool:
        is_multiple = self.every and step % self.every == 0
        return bool(is_multiple) or step in self.steps or any(each.holds(step) for each in self.ranges)
