"""Which sequences step t holds, through every change of weights, sources, batch and sequence length; and what
a checkpoint keeps.

Steps are 1-based. The run is a row of *segments*; segment k holds from step `after_k + 1` on, with its own
weights and global batch; a batch that grows (a ramp) is one segment. Global sequence numbers g run on through
all segments:

    g(t)     = g_k + rows of the steps after_k + 1 to t - 1, moved past the skipped ranges of g
    source   = mixture_k(g - g_k)                    the u-th sequence of the segment
    n        = base_k[source] + its number in the segment
    base_k+1 = base_k + what each source supplied in [g_k, g_k+1)

Invariant: each source's numbers n run on without gap or repeat through all segments, also for a source that
was dropped and returns. Only (after, batch, ramp, quotas, seq_length) of each segment and the skipped ranges
are kept; g_k and base_k follow from them. Where a sequence of a new length lies in its source is the business
of `source_order`.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from itertools import pairwise, starmap
from typing import Any, NamedTuple

import numpy as np

from fms_fsdp.config.ramp import BatchIntervals, BatchRamp
from fms_fsdp.config.spans import parse_skips
from fms_fsdp.data.order.mixture import NUM_SLOTS, Mixture
from fms_fsdp.data.order.permute import I64
from fms_fsdp.data.order.tapes import MAX_ROWS
from fms_fsdp.errors import UserError

MAX_STEPS = 1 << 40


@dataclass
class Segment:
    """Steps after + 1, after + 2, ... of one mixture, batch and length; `first` is g_k, `base` is base_k.

    `rampup`: start, increment and samples of the ramp to `batch`, if there is one; `planned`: the rows of all
    steps before, skipped ones not counted.
    """

    after: int
    batch: int
    quotas: dict[str, int]
    seq_length: int
    rampup: tuple[int, ...] = ()
    first: int = 0
    planned: int = 0
    base: dict[str, int] = field(default_factory=dict)

    @cached_property
    def mixture(self) -> Mixture[str]:
        return Mixture(self.quotas)

    @cached_property
    def _intervals(self) -> BatchIntervals:
        return BatchIntervals(BatchRamp.to(self.batch, self.rampup), self.planned)

    def rows_before(self, step: int) -> int:
        """Returns the rows of the segment's steps before `step`."""
        return self._intervals.rows_of(step - 1 - self.after)

    def batch_at(self, step: int) -> int:
        """Returns the rows of a step of this segment."""
        return self.rows_before(step + 1) - self.rows_before(step)

    def supplied(self, g: int) -> dict[str, int]:
        """Returns how many sequences each source has supplied to all steps before the global sequence g."""
        counts = Counter(self.base)
        counts.update(self.mixture.counts(g - self.first))
        return dict(sorted(counts.items()))


class Rows(NamedTuple):
    """The sequences of a step in the order of g: index into `names`, and the source's own number of the
    sequence."""

    names: tuple[str, ...]
    source: I64
    n: I64


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

    def segment(self, step: int) -> Segment:
        """Returns the segment of a step. Raises: UserError for a step before the data of the run begin."""
        if step <= self.segments[0].after:
            raise UserError(
                f"step ({step}) must lie after step {self.segments[0].after}, where the data of the run begin"
            )
        return next(segment for segment in reversed(self.segments) if segment.after < step)

    def lengths(self) -> list[Segment]:
        """Returns the segments that begin with a row length of their own: the first, and each that changed
        the length."""
        changed = [new for old, new in pairwise(self.segments) if new.seq_length != old.seq_length]
        return [self.segments[0], *changed]

    def has_unfit_lengths(self) -> bool:
        """Says whether one of two neighbouring row lengths does not divide the other, or one does not divide
        the longest of all."""
        sizes = [segment.seq_length for segment in self.lengths()]
        pairs = [*pairwise(sizes), *((size, max(sizes)) for size in sizes)]
        return any(a % b and b % a for a, b in pairs)

    def rows(self, step: int, num_steps: int = 1) -> Rows:
        """Returns the sequences of `num_steps` steps from `step` (>= 1) on, as if the mixture of `step` held
        in all of them."""
        segment = self.segment(step)
        planned = np.arange(segment.rows_before(step), segment.rows_before(step + num_steps))
        g = self._pass_skipped(segment, segment.first + planned)
        source, number = segment.mixture(g - segment.first)
        base: I64 = np.array([segment.base.get(name, 0) for name in segment.mixture.names], dtype=np.int64)
        return Rows(segment.mixture.names, source, base[source] + number)

    def position(self, step: int) -> dict[str, int]:
        """Returns for each source the number n of its first sequence after `step` (>= 0); skipped sequences
        are counted."""
        segment = self.segment(step + 1)
        return segment.supplied(self._first_row(step + 1))

    def find(self, name: str, n: int) -> tuple[int, bool] | None:
        """Returns the step that holds the source's own sequence n, or the first later step and True if the
        sequence is skipped; None if the source is dropped before: the inverse of `rows`."""
        g = bisect_right(range(MAX_ROWS), n, key=lambda g: self._supplied(g + 1).get(name, 0))
        if g == MAX_ROWS:
            return None
        step = bisect_left(range(self.segments[0].after + 1, MAX_STEPS), g, key=self._last_row)
        step += self.segments[0].after + 1
        skipped = self._skipped_from(self.segment(step).first)
        return step, any(start <= g < stop for start, stop in skipped)

    def consumed_tokens(self, step: int) -> Counter[str]:
        """Returns how many tokens of each source the steps up to `step` yielded; skipped rows are not
        counted."""
        tokens, end = Counter[str](), self._first_row(step + 1)
        stops = [*(segment.first for segment in self.segments[1:]), end]
        for segment, stop in zip(self.segments, stops, strict=True):
            at = segment.first
            for start, after in [*self._skipped_from(segment.first), (end, end)]:
                start = min(start, stop, end)
                if at < start:
                    before, by_then = segment.supplied(at), segment.supplied(start)
                    for name, count in by_then.items():
                        tokens[name] += (count - before.get(name, 0)) * segment.seq_length
                at = after
        return tokens

    def change(
        self, after: int, batch: int, quotas: Mapping[str, int], seq_length: int, rampup: tuple[int, ...] = ()
    ) -> list[str]:
        """Lets another batch, ramp, mixture or length hold from step after + 1 on; returns what changed, in
        words, [] if nothing."""
        last = self.segments[-1]
        assert after >= last.after, (after, last.after)
        segment = Segment(after, batch, dict(quotas), seq_length, rampup)
        changes = _describe(last, segment)
        if changes and after == last.after:
            self.segments.pop()
        if changes and not (self.segments and not _describe(self.segments[-1], segment)):
            self._append(segment)  # else: changed back at once
        return changes

    def skip(self, text: str, step: int) -> list[str]:
        """Passes over the rows now planned for the steps a to b - 1 of each "a:b" in `text`, unless done
        before.

        `step` is the last one consumed. Raises: UserError for a malformed range or one that is not ahead.
        """
        changes = []
        for a, b in parse_skips("skip_steps", text):
            if any((a, b) == (skip.a, skip.b) for skip in self.skipped):
                continue  # the flag of an earlier start of this run
            if a <= step:
                raise UserError(
                    f"--skip_steps ({a}:{b}) must lie after step {step}, the last trained step; "
                    "resume from an earlier checkpoint or leave out the range"
                )
            self.skipped.append(Skip(self._first_row(a), self._last_row(b - 1) + 1, a, b))
            changes.append(f"skip: the rows planned for steps {a} to {b - 1} are passed over")
        return changes

    def first_step_beyond(self, names: Collection[str], num_sequences: int, step: int) -> int:
        """Returns the first step after `step` by whose end some sources of the last segment have supplied
        more than `num_sequences` together."""

        def supplied(after: int) -> int:
            position = self.position(after)
            return sum(position[name] for name in names)

        return step + 1 + bisect_right(range(step + 1, MAX_STEPS), num_sequences, key=supplied)

    def state(self) -> dict[str, Any]:
        """Returns the history as JSON values."""
        history = []
        for s in self.segments:
            entry = {"step": s.after, "batch": s.batch, "seq_length": s.seq_length, "weights": s.quotas}
            history.append(entry)
        return {"history": history, "skipped": list(map(list, self.skipped)), **self.ramps()}

    def ramps(self) -> dict[str, Any]:
        """Returns the ramps of the segments as JSON values, by the step after which each begins; {} if there
        is none."""
        ramps = {str(segment.after): list(segment.rampup) for segment in self.segments if segment.rampup}
        return {"ramps": ramps} if ramps else {}

    @classmethod
    def from_state(cls, state: Mapping[str, Any]) -> History:
        """Returns the history that `state` describes."""
        segments = []
        for entry in state["history"]:
            after, batch, size, quotas = (entry[name] for name in ("step", "batch", "seq_length", "weights"))
            segments.append(Segment(after, batch, dict(quotas), size, rampup_of(state, after)))
        return cls(segments, list(starmap(Skip, state["skipped"])))

    def _append(self, segment: Segment) -> None:
        if self.segments:  # a skipped range that starts here belongs to the new segment
            last = self.segments[-1]
            segment.first = self._last_row(segment.after) + 1
            segment.planned = last.planned + last.rows_before(segment.after + 1)
            segment.base = last.supplied(segment.first)
        self.segments.append(segment)

    def _supplied(self, g: int) -> dict[str, int]:
        """Returns how many sequences each source has supplied before the global sequence g."""
        return next(segment for segment in reversed(self.segments) if segment.first <= g).supplied(g)

    def _first_row(self, step: int) -> int:
        segment = self.segment(step)
        return int(self._pass_skipped(segment, np.array(segment.first + segment.rows_before(step))))

    def _last_row(self, step: int) -> int:
        segment = self.segment(step)
        return int(self._pass_skipped(segment, np.array(segment.first + segment.rows_before(step + 1) - 1)))

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


def check_same(state: Mapping[str, Any], mine: Mapping[str, Any], names: Iterable[str], remedy: str) -> None:
    """Raises UserError where the data state of a checkpoint has another value than this run under one of the
    `names`; names of flags begin with "--"."""
    for name in names:
        now, before = mine[name.removeprefix("--")], state.get(name.removeprefix("--"))
        if now != before:
            raise UserError(
                f"{name} ({now}) is {before} in the checkpoint's data state; resume with {remedy}, or take "
                "the checkpoint's weights alone with --load_model_only"
            )


def rampup_of(state: Mapping[str, Any], after: int) -> tuple[int, ...]:
    """Returns the ramp that a state holds of the segment after a step; () if there is none."""
    return tuple(state.get("ramps", {}).get(str(after), ()))


def _describe(last: Segment, new: Segment) -> list[str]:
    changes = []
    if new.rampup != last.rampup:
        ramps = (",".join(map(str, segment.rampup)) or "none" for segment in (last, new))
        changes.append(f"batch ramp: {' -> '.join(ramps)}")
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
