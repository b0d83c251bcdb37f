"""Which steps are saved, and which checkpoints are kept. Pure functions, standard library only."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from fms_fsdp.config.checkpoint import KeepConfig
from fms_fsdp.config.formats import StepRange, parse_ranges
from fms_fsdp.errors import UserError
from fms_fsdp.state import TrainMetadata


@dataclass(frozen=True)
class SaveSchedule:
    """Ranges (start, stop, interval): within (start, stop], every `interval` steps from `start`.

    `10@100,18@1000,1500` saves every 10 steps up to 100, every 18 up to 1000, then every 1500.
    Source: https://github.com/bigscience-workshop/bigscience (tr1-13B): three scripts there.
    """

    ranges: tuple[tuple[int, int | None, int], ...]

    def is_due(self, step: int) -> bool:
        return self.next_after(step - 1) == step

    def next_after(self, step: int) -> int | None:
        """Returns the first due step after `step`; None: there is none."""
        for start, stop, interval in self.ranges:
            due = start + (max(0, step - start) // interval + 1) * interval
            if stop is None or due <= stop:
                return due
        return None

    def meets_multiple_of(self, interval: int) -> bool:
        """Returns whether any due step is a multiple of `interval`."""
        for start, stop, every in self.ranges:
            last = start + every * interval  # from there on the remainders repeat
            if stop is not None:
                last = min(stop, last)
            if any(step % interval == 0 for step in range(start + every, last + 1, every)):
                return True
        return False

    def count(self, first: int, last: int) -> int:
        """Returns the number of due steps from `first` to `last`."""
        total = 0
        for start, stop, interval in self.ranges:
            end = last if stop is None else min(stop, last)
            before = min(end, first - 1)
            total += max(0, end - start) // interval - max(0, before - start) // interval
        return total


def parse_schedule(text: str, interval: int) -> SaveSchedule:
    """Parses --checkpoint_schedule, or uses --checkpoint_interval if it is empty (0: never).

    Raises:
        UserError: the text has another form.
    """
    if not text:
        return SaveSchedule(((0, None, interval),) if interval else ())
    ranges: list[tuple[int, int | None, int]] = []
    start = 0
    parts = text.split(",")
    for part in parts:
        match = re.fullmatch(r"\s*(\d{1,15})(?:@(\d{1,15}))?\s*", part)
        every, stop = (int(match[1]), int(match[2]) if match[2] else None) if match else (0, None)
        is_last = len(ranges) == len(parts) - 1
        if every < 1 or (stop is None and not is_last) or (stop is not None and stop <= start):
            raise UserError(
                f"--checkpoint_schedule={text} must be INTERVAL@LAST_STEP,…,INTERVAL with rising "
                f"steps; correct {part.strip()!r}, e.g. 10@100,18@1000,1500"
            )
        ranges.append((start, stop, every))
        start = stop or start
    return SaveSchedule(tuple(ranges))


@dataclass(frozen=True)
class KeepPolicy:
    """The checkpoints to keep: the newest `last` (0: all), multiples of `every`, `steps`, `ranges`, and the
    `best` by `metric`, of which `mode` says whether "min" or "max" is best."""

    last: int = 0
    every: int = 0
    best: int = 0
    steps: tuple[int, ...] = ()
    ranges: tuple[StepRange, ...] = ()
    metric: str = "eval/loss"
    mode: str = "min"

    @classmethod
    def from_config(cls, cfg: KeepConfig) -> KeepPolicy:
        return cls(
            cfg.keep_last_n,
            cfg.keep_every,
            cfg.keep_best,
            cfg.keep_steps,
            tuple(parse_ranges("keep_ranges", cfg.keep_ranges)),
            cfg.keep_best_metric,
            cfg.keep_best_mode,
        )

    def to_delete(self, complete: Mapping[int, TrainMetadata]) -> list[int]:
        """Returns the steps that need not be kept, ascending.

        A checkpoint that ends in non-finite steps takes the place of no other one, and is deleted
        itself only after a newer healthy one exists.
        """
        healthy = sorted(step for step in complete if not complete[step].non_finite_steps)
        if not self.last or not healthy:
            return []
        values = {step: complete[step].metric(self.metric) for step in healthy}
        sign = -1 if self.mode == "max" else 1
        best = sorted((sign * value, step) for step, value in values.items() if value is not None)
        keep = {*healthy[-self.last :], *self.steps, *(step for _, step in best[: self.best])}
        return sorted(
            step
            for step in complete
            if step < healthy[-1]
            and step not in keep
            and not (self.every and step % self.every == 0)
            and not any(each.holds(step) for each in self.ranges)
        )
