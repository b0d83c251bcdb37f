"""The order of the data: which sequence comes when, in integers alone and without any file.

    step ── Phase ──> sequences of a mixture ── Mixture ──> source, n ── locate ──> epoch, window, index
    window ── SourceOrder.ranges ──> the token ranges of the source that fill it

A source is a ring of T tokens, its shards in the order of their paths; N = T // S sequences are an
epoch. Every epoch rotates the ring by another offset and cuts it into chunks of `chunk` sequences.
The remaining sequences, fewer than there are chunks, are placed one by one between the chunks:

    |<-- chunk 0 -->|<-- chunk 1 -->|<- extra 0 ->|<-- chunk 2 -->| ... |<- remainder, < S tokens ->|

A *shuffle window* is 16 chunks (4 in a small source) drawn from the whole ring by a keyed
permutation; its documents are shuffled and fill its sequences. A *logical shard* is a list of
windows that are read one after the other; L of them are read interleaved, one sequence each in
turn. At the end of an epoch the extra sequences are read in the same way, in windows of 16 of them.
A source of few sequences has no chunks: all its sequences are extra.

Invariant: in each epoch every token comes exactly once, except the remainder.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import cached_property, lru_cache
from math import gcd
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from fms_fsdp.config import BatchPlan
from fms_fsdp.data.mixture import NUM_SLOTS, Mixture
from fms_fsdp.data.permute import I64, derive_key, hash64, permute
from fms_fsdp.errors import UserError

# A window of a large source shuffles 4M tokens from 16 places of the source. Each end of a chunk cuts a document.
CHUNKS = 16
CHUNK_TOKENS = 1 << 18
# In a small source: 4 chunks of 16 sequences, because 16 of 4 cut twice as many documents.
FEW_CHUNKS = 4
SMALL_CHUNK = 16
# Per logical shard and epoch. Their number is rounded down, which makes a chunk larger by an eighth at most.
MIN_WINDOWS = 8
MAX_STEPS = 1 << 40  # the sequences of so many steps stay below 2^63
PLANNED_SEQUENCES = 512  # planned at once where a batch has fewer

# Parts of the derived keys, so that two uses never share a key.
_ROTATION = 1
_CHUNKS = 2
_EXTRA = 3
_DOCUMENTS = 4


def fit_logical_shards(num_sequences: int, share: float, logical_shards: int) -> int:
    """Returns the number of logical shards of a source that supplies `share` of the mixture."""
    smallest_window = FEW_CHUNKS * SMALL_CHUNK  # in sequences
    fitting = num_sequences // (MIN_WINDOWS * smallest_window)
    return max(1, min(round(share * logical_shards), fitting))


class EpochLayout(NamedTuple):
    """How the sequences of an epoch are split."""

    chunks_per_window: int
    chunk_size: int  # in sequences
    rounds: int  # windows per logical shard
    num_chunks: int
    num_extra: int  # sequences that are not part of a chunk


@dataclass(frozen=True)
class SourceOrder:
    """The order of the sequences of a source: a pure function of these values."""

    name: str
    num_tokens: int
    seq_length: int
    logical_shards: int
    seed: int

    @cached_property
    def num_sequences(self) -> int:
        return self.num_tokens // self.seq_length

    @cached_property
    def layout(self) -> EpochLayout:
        """Returns the layout of every epoch: windows as large as 8 rounds of them allow, and chunks
        that divide the sequences of the rounds evenly.

        Example: 10,000 sequences of 1,024 tokens, 4 logical shards. A window has at most
        10,000 / (8 rounds x 4 shards) = 312 sequences, so 16 chunks of 19. The epoch has
        8 x 4 x 16 = 512 chunks and 10,000 - 512 x 19 = 272 extra sequences.
        """
        max_chunk = max(1, CHUNK_TOKENS // self.seq_length)  # sizes are in sequences
        fair_window = self.num_sequences // (MIN_WINDOWS * self.logical_shards)
        window = min(max_chunk * CHUNKS, fair_window)
        small_chunks = window // min(max_chunk, SMALL_CHUNK)
        chunks = min(max(small_chunks, FEW_CHUNKS), CHUNKS)
        chunk_size = window // chunks
        if chunk_size == 0:
            return EpochLayout(chunks, 0, 0, 0, self.num_sequences)
        per_round = self.logical_shards * chunks
        rounds = self.num_sequences // (per_round * chunk_size)
        num_chunks = per_round * rounds
        # The divisions above rounded down: larger chunks may leave fewer sequences over.
        chunk_size = self.num_sequences // num_chunks
        num_extra = self.num_sequences - num_chunks * chunk_size
        return EpochLayout(chunks, chunk_size, rounds, num_chunks, num_extra)

    @cached_property
    def _key(self) -> int:
        return derive_key(self.seed, hash64(self.name))

    def locate(self, n: I64) -> tuple[I64, I64, I64]:
        """Returns the epoch, the window in the epoch and the index in the window of sequences n.

        Consecutive sequences come from the logical shards in turn. Window w belongs to logical
        shard w mod L; the windows of extra sequences have the last numbers.
        """
        layout = self.layout
        num_main = self.num_sequences - layout.num_extra
        epoch, in_epoch = np.divmod(n, self.num_sequences)
        is_extra = in_epoch >= num_main
        in_part = in_epoch - is_extra * num_main  # of the main or of the extra sequences
        turn, logical_shard = np.divmod(in_part, self.logical_shards)
        main_window = layout.chunks_per_window * layout.chunk_size  # in sequences
        round_, index = np.divmod(turn, np.where(is_extra, CHUNKS, main_window))
        window = (round_ + is_extra * layout.rounds) * self.logical_shards + logical_shard
        return epoch, window, index

    def spread(self, window: I64) -> npt.NDArray[np.float64]:
        """Returns a number in [0, 1) for the logical shard of each window: far apart for
        neighbours."""
        shards = self.logical_shards
        stride = int(0.618 * shards) + 1  # golden ratio: consecutive multiples are far apart
        while gcd(stride, shards) != 1:  # with a common divisor two shards would share a number
            stride += 1
        return window * stride % shards / shards

    def ranges(self, epoch: int, window: int) -> tuple[list[int], int]:
        """Returns where on the ring the ranges of a window begin, and the tokens in each.

        The extra sequences are distributed over the ring: i * E // C of E come before chunk i of C.
        Example of C = 4, E = 2:   chunk 0 | chunk 1 | extra 0 | chunk 2 | chunk 3 | extra 1
        """
        layout = self.layout
        round_, logical_shard = divmod(window, self.logical_shards)
        if round_ < layout.rounds:
            turn = round_ * layout.chunks_per_window + np.arange(layout.chunks_per_window)
            number = turn * self.logical_shards + logical_shard
            key = derive_key(self._key, _CHUNKS, epoch)
            chunk = permute(number, layout.num_chunks, key)
            extra_before = chunk * layout.num_extra // layout.num_chunks
            first = chunk * layout.chunk_size + extra_before
            num_sequences = layout.chunk_size
        else:
            turn = (round_ - layout.rounds) * CHUNKS + np.arange(CHUNKS)
            number = turn * self.logical_shards + logical_shard
            number = number[number < layout.num_extra]  # the last windows are not full
            key = derive_key(self._key, _EXTRA, epoch)
            extra = permute(number, layout.num_extra, key)
            # The inverse of `extra_before`: (extra + 1) * C / E, rounded up.
            chunks_before = -(-(extra + 1) * layout.num_chunks // layout.num_extra)
            first = chunks_before * layout.chunk_size + extra
            num_sequences = 1
        rotation = derive_key(self._key, _ROTATION, epoch) % self.num_tokens
        starts: list[int] = ((first * self.seq_length + rotation) % self.num_tokens).tolist()
        return starts, num_sequences * self.seq_length

    def document_key(self, epoch: int, window: int) -> int:
        """Returns the key that shuffles the documents of a window."""
        return derive_key(self._key, _DOCUMENTS, epoch, window)


@dataclass
class Phase:
    """The steps after + 1, after + 2, ... with one mixture and one batch (or one ramp to it).

    base       sequences that each source had supplied when the mixture began
    first      sequence of the mixture at which the phase begins
    seen       sequences of all steps before, for the ramp
    skip       steps a to b - 1, whose sequences are skipped so that `first` is reached
    """

    after: int
    batch: int
    quotas: dict[str, int]
    ramp: Sequence[int] = ()
    base: dict[str, int] = field(default_factory=dict)
    first: int = 0
    seen: int = 0
    skip: Sequence[int] = ()

    @cached_property
    def mixture(self) -> Mixture:
        return Mixture(self.quotas)

    @cached_property
    def _plan(self) -> BatchPlan:
        return BatchPlan(self.batch, 1, 1, tuple(self.ramp))

    def sequences_before(self, step: int) -> int:
        """Returns the sequences of the phase's steps before `step`."""
        return self._plan.sequences_in(step - 1 - self.after, self.seen)

    def batch_at(self, step: int) -> int:
        return self.sequences_before(step + 1) - self.sequences_before(step)

    def supplied(self, step: int) -> Counter[str]:
        """Returns how many sequences each source has supplied before `step`, skipped ones too."""
        of_mixture = self.mixture.counts(self.first + self.sequences_before(step))
        return Counter(self.base) + Counter(of_mixture)

    def settings(self) -> dict[str, Any]:
        """Returns name -> value of the settings that a user can change."""
        settings: dict[str, Any] = {"global batch": self.batch, "batch ramp": list(self.ramp)}
        for name, quota in self.quotas.items():
            settings[f"weight of {name}"] = quota / NUM_SLOTS
        return settings

    def next(self, after: int, batch: int, quotas: dict[str, int], ramp: Sequence[int]) -> Phase:
        """Returns the phase that follows after a step; the same mixture continues."""
        num_sequences = self.sequences_before(after + 1)
        seen = self.seen + num_sequences
        if quotas == self.quotas:
            return Phase(after, batch, quotas, ramp, self.base, self.first + num_sequences, seen)
        # A new mixture begins at its first sequence; each source continues after its last one.
        base = dict(sorted(self.supplied(after + 1).items()))
        return Phase(after, batch, quotas, ramp, base, 0, seen)


class History:
    """The phases of a run, including later skips. Everything else follows from them."""

    def __init__(self, phases: list[Phase]) -> None:
        self.phases = phases

    def phase(self, step: int) -> Phase:
        """Returns the phase of a step.

        Raises:
            UserError: the data of the run begin after the step.
        """
        # Two phases may begin after the same step, a change and a skip: the last one is valid.
        num_begun = bisect_right(self.phases, step - 1, key=lambda phase: phase.after)
        if num_begun == 0:
            first_step = self.phases[0].after + 1
            raise UserError(
                f"--step={step} must be at least {first_step}, where the data of the run begin; set "
                f"--step={first_step}"
            )
        return self.phases[num_begun - 1]

    def position(self, step: int) -> Counter[str]:
        """Returns the number of the first sequence of each source after `step`."""
        return self.phase(step + 1).supplied(step + 1)

    def consumed(self, step: int) -> Counter[str]:
        """Returns how many sequences of each source the steps up to `step` returned, without
        skipped ones."""
        total = Counter[str]()
        stops = [phase.after for phase in self.phases[1:]] + [MAX_STEPS]
        for phase, stop in zip(self.phases, stops, strict=True):
            last = min(stop, step)
            if phase.after < last:
                total += phase.supplied(last + 1) - phase.supplied(phase.after + 1)
        return total

    def first_step_beyond(self, names: Sequence[str], num_sequences: int, step: int) -> int:
        """Finds the first step after `step` with which the sources exceed `num_sequences` together."""
        steps = range(step + 1, MAX_STEPS)

        def supplied(last: int) -> int:
            if last <= self.phases[0].after:  # the data of the run begin later
                return 0
            # `position` would count the sequences that are skipped just after the step.
            position = self.phase(last).supplied(last + 1)
            return sum(position[name] for name in names)

        return step + 1 + bisect_right(steps, num_sequences, key=supplied)

    def extend(
        self, step: int, wanted: Phase, skips: Iterable[Sequence[int]]
    ) -> tuple[History, list[str]]:
        """Returns the history with the batch, ramp and mixture of `wanted` from step + 1 on, and
        without the sequences planned for the steps a to b - 1 of each skip; and log lines on the
        changes.

        Raises:
            UserError: a skip begins at a step that was trained already, or overlaps another.
        """
        # Phases of untrained steps are planned again: the batch, mixture and skips may change.
        kept = self.phases[:1]
        for phase in self.phases[1:]:
            if phase.after < step:
                kept.append(phase)
        done = {tuple(phase.skip) for phase in kept}
        planned = {tuple(phase.skip) for phase in self.phases[len(kept) :]} - {()}
        wanted_skips = sorted(set(map(tuple, skips)) - done)

        changes = []
        last = kept[-1]
        before = last.settings()
        now = wanted.settings()
        for name in sorted({**before, **now}):
            if before.get(name) != now.get(name):
                changes.append(f"{name}: {before.get(name)} -> {now.get(name)}")
        if changes:
            kept.append(last.next(step, wanted.batch, wanted.quotas, wanted.ramp))

        for a, b in sorted(planned - set(wanted_skips)):
            changes.append(f"skip: steps {a} to {b - 1} are no longer skipped")
        previous = (0, 0)
        for a, b in wanted_skips:
            if a < previous[1]:
                raise UserError(
                    f"--skip_steps={a}:{b} must not overlap {previous[0]}:{previous[1]}; set one "
                    f"range, {previous[0]}:{max(b, previous[1])}"
                )
            previous = (a, b)
            if a <= step:
                raise UserError(
                    f"--skip_steps={a}:{b} must begin after step {step}, the last trained step; "
                    "resume from an earlier checkpoint, or remove the range"
                )
            last = kept[-1]
            after_skip = last.next(a - 1, last.batch, last.quotas, last.ramp)
            after_skip.first = last.first + last.sequences_before(b)  # as if a to b - 1 were read
            after_skip.skip = (a, b)
            kept.append(after_skip)
            if (a, b) not in planned:
                changes.append(f"skip: the sequences planned for steps {a} to {b - 1} are skipped")
        return History(kept), changes

    def state(self) -> list[dict[str, Any]]:
        """Returns the phases as JSON values, without empty entries."""
        phases = []
        for phase in self.phases:
            values = asdict(phase)
            phases.append({name: v for name, v in values.items() if v or name == "after"})
        return phases


class Address(NamedTuple):
    """A sequence of a global batch: the source's own sequence n, and its position in a window."""

    source: str
    n: int
    epoch: int
    window: int
    position: int


class Order:
    """The order of the data of a run. `sources` contains every source that was ever used."""

    def __init__(self, sources: Mapping[str, SourceOrder], history: History) -> None:
        self.sources = dict(sources)
        self.history = history
        self._planned = lru_cache(maxsize=1)(self._plan)  # a rank asks for consecutive steps

    def addresses(self, step: int, start: int = 0, stop: int | None = None) -> list[Address]:
        """Returns the sequences [start, stop) of the step's global batch.

        They are sorted by logical shard (`SourceOrder.spread`), source and number, so that from
        step to step a rank reads the same windows.
        """
        phase = self.history.phase(step)
        # Small batches are planned several steps at a time: calls of numpy dominate.
        num_steps = max(1, PLANNED_SEQUENCES // phase.batch)
        first_step = step - (step - 1 - phase.after) % num_steps
        names, columns = self._planned(first_step, num_steps)
        begin = phase.sequences_before(step) - phase.sequences_before(first_step)
        if stop is None:
            stop = phase.batch_at(step)
        mine = slice(begin + start, begin + stop)
        sequences = zip(*(column[mine].tolist() for column in columns), strict=True)
        return [Address(names[source], *numbers) for source, *numbers in sequences]

    def address(self, name: str, n: int) -> Address:
        """Returns where sequence n of the source is, whichever step it comes in."""
        epoch, window, position = self.sources[name].locate(np.array([n]))
        return Address(name, n, int(epoch[0]), int(window[0]), int(position[0]))

    def _plan(self, first: int, num_steps: int) -> tuple[tuple[str, ...], list[I64]]:
        """Returns the names of the sources, and columns of the sorted sequences of the steps from
        `first` on: index of the source, and the fields of `Address` after it."""
        phase = self.history.phase(first)
        start = phase.sequences_before(first)
        stop = phase.sequences_before(first + num_steps)
        source, n = phase.mixture(phase.first + np.arange(start, stop))
        epoch = np.empty_like(n)
        window = np.empty_like(n)
        position = np.empty_like(n)
        spread = np.empty(len(n))
        for number, name in enumerate(phase.mixture.names):
            order = self.sources[name]
            mine = np.flatnonzero(source == number)
            n[mine] += phase.base.get(name, 0)
            epoch[mine], window[mine], position[mine] = order.locate(n[mine])
            spread[mine] = order.spread(window[mine])
        batches = [phase.batch_at(first + i) for i in range(num_steps)]
        step = np.repeat(np.arange(num_steps), batches)
        by_step = np.lexsort((n, source, spread, step))  # the last key decides first
        columns = (source, n, epoch, window, position)
        return phase.mixture.names, [column[by_step] for column in columns]
