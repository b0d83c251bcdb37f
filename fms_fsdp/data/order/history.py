"""Which sequences step t holds, through every change of weights, sources, batch and sequence length; and what a checkpoint keeps.

Steps are 1-based. The run is a row of *segments*; segment k holds from step `after_k + 1` on, with its own weights and global
batch B_k. Global sequence numbers g run on through all segments:

    g(t)     = g_k + (t - 1 - after_k) * B_k, moved past the skipped ranges of g
    source   = mixture_k(g - g_k)                    the u-th sequence of the segment
    n        = base_k[source] + its number in the segment
    base_k+1 = base_k + what each source supplied in [g_k, g_k+1)

Invariant: each source's numbers n run on without gap or repeat through all segments, also for a source that was dropped and
returns. Only (after, batch, quotas, seq_length) of each segment and the skipped ranges are kept; g_k and base_k follow from
them. Where a sequence of a new length lies in its source is the business of `course`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np

from fms_fsdp.data.order.mixture import NUM_SLOTS, Mixture
from fms_fsdp.data.order.permute import I64


@dataclass
class Segment:
    """Steps after + 1, after + 2, ... of one mixture, batch and length; `first` is g_k, `base` is base_k."""

    after: int
    batch: int
    quotas: dict[str, int]
    seq_length: int
    first: int = 0
    base: dict[str, int] = field(default_factory=dict)

    @cached_property
    def mixture(self) -> Mixture:
        return Mixture(self.quotas)

    def supplied(self, g: int) -> dict[str, int]:
        """Returns how many sequences each source has supplied to all steps before the global sequence g."""
        counts = self.mixture.counts(g - self.first)
        return {
            name: self.base.get(name, 0) + counts.get(name, 0) for name in sorted({**self.base, **counts})
        }


class Rows(NamedTuple):
    """The sequences of a step in the order of g: index into `names`, and the source's own number of the sequence."""

    names: tuple[str, ...]
    source: I64
    n: I64


class Found(NamedTuple):
    """When a sequence is yielded; if it is `skipped` it never is, and `step` is the first one planned after it."""

    step: int
    skipped: bool


class Skip(NamedTuple):
    """The global sequences [start, stop) are passed over: those once planned for the steps a to b - 1."""

    start: int
    stop: int
    a: int
    b: int


class History:
    """All segments of a run. `change` and `skip` extend it; everything else is a pure function of it."""

    def __init__(self, segments: list[Segment], skipped: list[Skip]) -> None:
        self.skipped = skipped
        self.segments: list[Segment] = []
        for segment in segments:
            self._append(segment)

    def batch(self, step: int) -> tuple[int, int]:
        """Returns the number of sequences of a step (>= 1), and the step after which batches have this size and mixture."""
        segment = self._segment(step)
        return segment.batch, segment.after

    def seq_length(self, step: int) -> int:
        """Returns the tokens of a sequence of a step (>= 1)."""
        return self._segment(step).seq_length

    def lengths(self) -> list[Segment]:
        """Returns the segments that begin with a length of their own: the first, and those that changed it."""
        before = [None, *self.segments]
        return [
            s
            for s, last in zip(self.segments, before, strict=False)
            if not last or last.seq_length != s.seq_length
        ]

    def rows(self, step: int, num_steps: int = 1) -> Rows:
        """Returns the sequences of `num_steps` steps from `step` (>= 1) on, as if the mixture of `step` held in all of them."""
        segment = self._segment(step)
        first = segment.first + (step - 1 - segment.after) * segment.batch
        g = self._pass_skipped(segment, first + np.arange(num_steps * segment.batch))
        source, number = segment.mixture(g - segment.first)
        base: I64 = np.array([segment.base.get(name, 0) for name in segment.mixture.names], dtype=np.int64)
        return Rows(segment.mixture.names, source, base[source] + number)

    def position(self, step: int) -> dict[str, int]:
        """Returns for each source the number n of its first sequence after `step` (>= 0); skipped ones are counted."""
        segment = self._segment(step + 1)
        return segment.supplied(self._first(step + 1))

    def find(self, name: str, n: int) -> Found | None:
        """Returns when the source's own sequence n comes, None if the source is dropped before: the inverse of `rows`."""
        for i, segment in enumerate(self.segments):
            last = i + 1 == len(self.segments)
            end = None if last else self.segments[i + 1].base.get(name, 0)
            if name not in segment.quotas or (end is not None and n >= end):
                continue
            g = segment.first + segment.mixture.index(name, n - segment.base.get(name, 0))
            skipped, passed = False, 0
            for a, b in self._skipped_from(segment.first):
                skipped = skipped or a <= g < b
                passed += max(0, min(b, g) - a)
            return Found(segment.after + 1 + (g - passed - segment.first) // segment.batch, skipped)
        return None

    def consumed(self, step: int) -> dict[str, int]:
        """Returns how many sequences of each source the steps 1 to `step` yielded; skipped ones are not counted."""
        consumed = self.position(step)
        end = self._first(step + 1)
        for i, segment in enumerate(self.segments):
            stop = self.segments[i + 1].first if i + 1 < len(self.segments) else end
            for a, b in self._skipped_from(segment.first):
                b = min(b, stop, end)
                if a < b:
                    before, after = (segment.supplied(g) for g in (a, b))
                    for name in after:
                        consumed[name] -= after[name] - before[name]
        return consumed

    def change(self, after: int, batch: int, quotas: Mapping[str, int], seq_length: int) -> list[str]:
        """Lets another batch, mixture or length hold from step after + 1 on; returns what changed, in words, [] if nothing."""
        last = self.segments[-1]
        assert after >= last.after, (after, last.after)
        segment = Segment(after, batch, dict(quotas), seq_length)
        changes = _describe(last, segment)
        if changes and after == last.after:
            self.segments.pop()
        if changes and (
            not self.segments or _describe(self.segments[-1], segment)
        ):  # else: changed back at once
            self._append(segment)
        return changes

    def skip(self, text: str, step: int) -> list[str]:
        """Passes over the rows now planned for the steps a to b - 1 of each "a:b" in `text`, unless done before.

        `step` is the last one consumed. Raises: ValueError for a malformed range or one that is not ahead.
        """
        changes = []
        for item in filter(None, text.replace(" ", "").split(",")):
            match = re.fullmatch(r"(\d+):(\d+)", item)
            a, b = (int(match[1]), int(match[2])) if match else (0, 0)
            if not 1 <= a < b:
                raise ValueError(
                    f"--skip_steps ({item}) must be a:b with 1 <= a < b, the steps a to b - 1; write 100:120"
                )
            if any((a, b) == (skip.a, skip.b) for skip in self.skipped):
                continue  # the flag of an earlier start of this run
            if a <= step:
                raise ValueError(
                    f"--skip_steps ({item}) must lie after step {step}, the last one trained on; "
                    "resume from an earlier checkpoint or leave it out"
                )
            self.skipped.append(Skip(self._first(a), self._last(b - 1) + 1, a, b))
            changes.append(f"skip: the rows planned for steps {a} to {b - 1} are passed over")
        return changes

    def first_step_beyond(self, name: str, num_sequences: int, step: int) -> int:
        """Returns the first step after `step` that needs more than `num_sequences` of a source of the last segment."""
        low, high = step, step + 1
        while self.position(high)[name] <= num_sequences:
            low, high = high, 2 * high
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if self.position(middle)[name] <= num_sequences else (low, middle)
        return high

    def state(self) -> dict[str, Any]:
        """Returns the history as JSON values."""
        segments = [
            {"step": s.after, "batch": s.batch, "seq_length": s.seq_length, "weights": s.quotas}
            for s in self.segments
        ]
        return {"history": segments, "skipped": [list(entry) for entry in self.skipped]}

    @classmethod
    def from_state(cls, state: Mapping[str, Any]) -> History:
        """Returns the history that `state` describes."""
        segments = [
            Segment(e["step"], e["batch"], dict(e["weights"]), e["seq_length"]) for e in state["history"]
        ]
        return cls(segments, [Skip(*entry) for entry in state["skipped"]])

    def _append(self, segment: Segment) -> None:
        if self.segments:
            segment.first = (
                self._last(segment.after) + 1
            )  # a skipped range that starts here belongs to the new segment
            segment.base = self.segments[-1].supplied(segment.first)
        self.segments.append(segment)

    def _segment(self, step: int) -> Segment:
        if step <= self.segments[0].after:
            raise ValueError(
                f"step ({step}) must lie after step {self.segments[0].after}, where the data of the run begin"
            )
        return next(segment for segment in reversed(self.segments) if segment.after < step)

    def _first(self, step: int) -> int:
        segment = self._segment(step)
        planned = segment.first + (step - 1 - segment.after) * segment.batch
        return int(self._pass_skipped(segment, np.array([planned]))[0])

    def _last(self, step: int) -> int:
        segment = self._segment(step)
        planned = segment.first + (step - segment.after) * segment.batch - 1
        return int(self._pass_skipped(segment, np.array([planned]))[0])

    def _pass_skipped(self, segment: Segment, g: I64) -> I64:
        for a, b in self._skipped_from(segment.first):
            g = np.where(g >= a, g + (b - a), g)
        return g

    def _skipped_from(self, g: int) -> list[tuple[int, int]]:
        """Returns the skipped ranges at or after g, disjoint and ascending."""
        ranges = []
        for start, stop, *_ in sorted(self.skipped):
            if stop > g:
                ranges.append((max(start, g), stop))
                g = stop
        return ranges


def _describe(last: Segment, new: Segment) -> list[str]:
    changes = []
    if new.batch != last.batch:
        changes.append(f"global batch: {last.batch} -> {new.batch} sequences")
    if new.seq_length != last.seq_length:
        changes.append(f"seq_length: {last.seq_length} -> {new.seq_length} tokens")
    for name in sorted({*last.quotas, *new.quotas}):
        before, now = last.quotas.get(name, 0), new.quotas.get(name, 0)
        if before != now:
            verb = "added" if not before else "dropped" if not now else "weight"
            changes.append(f"mixture: {name} {verb}, {before / NUM_SLOTS:.4f} -> {now / NUM_SLOTS:.4f}")
    return changes
