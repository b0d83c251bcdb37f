"""The order of the data: which sequence comes when, in integers alone and without any file.

    step ── Phase ──> sequences of a mixture ── Mixture ──> source, n ── locate ──> epoch, window, index
    window ── SourceOrder.ranges ──> the token ranges of the source that fill it

A source is a ring of T tokens, its shards in the order of their paths; N = T // S sequences are an
epoch. Every epoch rotates the ring by another offset and cuts it into chunks of `chunk` sequences.
The remaining sequences, fewer than there are chunks, are placed one by one between the chunks:

    |<-- chunk 0 -->|<-- chunk 1 -->|<- extra 0 ->|<-- chunk 2 -->| ... |<- remainder, < S tokens ->|

A *shuffle window* is 16 chunks (4 in a small source) drawn from the whole ring by a keyed
permutation; its documents are shuffled and fill its sequences. A *logical shard* is a list of
windows that are read one after the other; L of them are read interleaved, one sequence each in turn.
At the end of an epoch the extra sequences are read in the same way, in windows of 16 of them. A
source of few sequences has no chunks: all its sequences are extra.

Invariant: in each epoch every token comes exactly once, except the remainder.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import cached_property, lru_cache
from itertools import count
from math import gcd
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from fms_fsdp.config import BatchPlan
from fms_fsdp.data.mixture import NUM_SLOTS, Mixture
from fms_fsdp.data.permute import I64, derive_key, hash64, permute
from fms_fsdp.errors import UserError

CHUNK_TOKENS, CHUNKS = 1 << 18, 16  # in a large source: tokens per chunk, chunks per window
FEW_CHUNKS, SMALL_CHUNK = 4, 16  # in a small source: chunks per window, sequences per chunk
MIN_WINDOWS = 8  # per logical shard and epoch
MAX_STEPS = 1 << 40
PLANNED_SEQUENCES = 512
_ROTATION, _CHUNKS, _EXTRA, _DOCUMENTS = range(1, 5)  # parts of the keys derived here


def fit_logical_shards(num_sequences: int, share: float, logical_shards: int) -> int:
    """Returns the number of logical shards of a source that supplies `share` of the mixture."""
    fitting = num_sequences // (MIN_WINDOWS * FEW_CHUNKS * SMALL_CHUNK)
    return max(1, min(round(share * logical_shards), fitting))


class Cut(NamedTuple):
    """How an epoch is cut.

    chunks       chunks per window
    chunk        sequences per chunk
    rounds       windows per logical shard
    num_chunks   chunks in the epoch
    extra        sequences that are not part of a chunk
    """

    chunks: int
    chunk: int
    rounds: int
    num_chunks: int
    extra: int


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
    def cut(self) -> Cut:
        """Returns how the ring is cut: windows as large as 8 rounds of them allow, and chunks that
        divide the sequences of the rounds evenly."""
        most = max(1, CHUNK_TOKENS // self.seq_length)
        window = min(most * CHUNKS, self.num_sequences // (MIN_WINDOWS * self.logical_shards))
        chunks = min(CHUNKS, max(FEW_CHUNKS, window // min(most, SMALL_CHUNK)))
        per_round, chunk = self.logical_shards * chunks, window // chunks
        rounds = self.num_sequences // (per_round * chunk) if chunk else 0
        chunk = self.num_sequences // (per_round * rounds) if rounds else 0
        num_chunks = per_round * rounds
        return Cut(chunks, chunk, rounds, num_chunks, self.num_sequences - num_chunks * chunk)

    @cached_property
    def _key(self) -> int:
        return derive_key(self.seed, hash64(self.name))

    def locate(self, n: I64) -> tuple[I64, I64, I64]:
        """Returns the epoch, the window in the epoch and the index in the window of sequences n."""
        cut, num_main = self.cut, self.num_sequences - self.cut.extra
        epoch, x = np.divmod(n, self.num_sequences)
        is_extra = x >= num_main
        turn, logical_shard = np.divmod(x - is_extra * num_main, self.logical_shards)
        round_, index = np.divmod(turn, np.where(is_extra, CHUNKS, cut.chunks * cut.chunk))
        window = (round_ + is_extra * cut.rounds) * self.logical_shards + logical_shard
        return epoch, window, index

    def spread(self, window: I64) -> npt.NDArray[np.float64]:
        """Returns a number in [0, 1) for the logical shard of each window: far apart for
        neighbours."""
        shards = self.logical_shards
        stride = next(i for i in count(int(0.618 * shards) + 1) if gcd(i, shards) == 1)
        return window * stride % shards / shards

    def ranges(self, epoch: int, window: int) -> tuple[list[int], int]:
        """Returns where on the ring the ranges of a window begin, and the tokens in each."""
        cut, (round_, logical_shard) = self.cut, divmod(window, self.logical_shards)
        if round_ < cut.rounds:
            chunks = round_ * cut.chunks + np.arange(cut.chunks)
            number = chunks * self.logical_shards + logical_shard
            i = permute(number, cut.num_chunks, derive_key(self._key, _CHUNKS, epoch))
            first, length = i * cut.chunk + i * cut.extra // cut.num_chunks, cut.chunk
        else:
            chunks = (round_ - cut.rounds) * CHUNKS + np.arange(CHUNKS)
            number = chunks * self.logical_shards + logical_shard
            key = derive_key(self._key, _EXTRA, epoch)
            j = permute(number[number < cut.extra], cut.extra, key)
            first, length = -(-(j + 1) * cut.num_chunks // cut.extra) * cut.chunk + j, 1
        rotation = derive_key(self._key, _ROTATION, epoch) % self.num_tokens
        starts: list[int] = ((first * self.seq_length + rotation) % self.num_tokens).tolist()
        return starts, self.seq_length * length

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
        return self._plan.samples_in(step - 1 - self.after, self.seen)

    def batch_at(self, step: int) -> int:
        return self.sequences_before(step + 1) - self.sequences_before(step)

    def supplied(self, step: int) -> Counter[str]:
        """Returns how many sequences each source has supplied before `step`, skipped ones too."""
        return Counter(self.base) + Counter(
            self.mixture.counts(self.first + self.sequences_before(step))
        )

    def settings(self) -> dict[str, Any]:
        """Returns name -> value of the settings that a user can change."""
        shares = {f"weight of {name}": n / NUM_SLOTS for name, n in self.quotas.items()}
        return shares | {"global batch": self.batch, "batch ramp": list(self.ramp)}

    def next(self, after: int, batch: int, quotas: dict[str, int], ramp: Sequence[int]) -> Phase:
        """Returns the phase that follows after a step; the same mixture continues."""
        num_sequences, base = self.sequences_before(after + 1), self.base
        first, seen = self.first + num_sequences, self.seen + num_sequences
        if quotas != self.quotas:
            first, base = 0, dict(sorted(self.supplied(after + 1).items()))
        return Phase(after, batch, quotas, ramp, base, first, seen)


class History:
    """The phases of a run, including later skips. Everything else follows from them."""

    def __init__(self, phases: list[Phase]) -> None:
        self.phases = phases

    def phase(self, step: int) -> Phase:
        """Returns the phase of a step.

        Raises:
            UserError: the data of the run begin after the step.
        """
        index = bisect_right(self.phases, step - 1, key=lambda phase: phase.after)
        if index == 0:
            begin = self.phases[0].after + 1
            raise UserError(
                f"--step={step} must be at least {begin}, where the data of the run begin; set "
                f"--step={begin}"
            )
        return self.phases[index - 1]

    def position(self, step: int) -> Counter[str]:
        """Returns the number of the first sequence of each source after `step`."""
        return self.phase(step + 1).supplied(step + 1)

    def consumed(self, step: int) -> Counter[str]:
        """Returns how many sequences of each source the steps up to `step` returned, without
        skipped ones."""
        total = Counter[str]()
        stops = [phase.after for phase in self.phases[1:]] + [MAX_STEPS]
        for phase, stop in zip(self.phases, stops, strict=True):
            if phase.after < min(stop, step):
                total += phase.supplied(min(stop, step) + 1) - phase.supplied(phase.after + 1)
        return total

    def first_step_beyond(self, names: Sequence[str], num_sequences: int, step: int) -> int:
        """Returns the first step after `step` by whose end the named sources together have supplied
        more than `num_sequences`."""
        steps = range(step + 1, MAX_STEPS)

        def supplied(after: int) -> int:
            position = self.position(after)
            return sum(position[name] for name in names)

        return step + 1 + bisect_right(steps, num_sequences, key=supplied)

    def extend(
        self, step: int, wanted: Phase, skips: Iterable[Sequence[int]]
    ) -> tuple[History, list[str]]:
        """Returns the history with the batch, ramp and mixture of `wanted` from step + 1 on, and
        without the sequences planned for the steps a to b - 1 of each skip; and log lines on the
        changes.

        Raises:
            UserError: a skip begins at a step that was trained already.
        """
        kept = [phase for phase in self.phases if phase.after <= step]
        coming = {tuple(phase.skip) for phase in self.phases[len(kept) :]}
        done = {tuple(phase.skip) for phase in kept}
        last, before, now = kept[-1], kept[-1].settings(), wanted.settings()
        names = [name for name in sorted({**before, **now}) if before.get(name) != now.get(name)]
        changes = [f"{name}: {before.get(name)} -> {now.get(name)}" for name in names]
        if changes:
            kept.append(last.next(step, wanted.batch, wanted.quotas, wanted.ramp))
        for a, b in sorted({*coming, *map(tuple, skips)} - done):
            if a <= step:
                raise UserError(
                    f"--skip_steps={a}:{b} must begin after step {step}, the last trained step; "
                    "resume from an earlier checkpoint, or remove the range"
                )
            last = kept[-1]
            kept.append(last.next(a - 1, last.batch, last.quotas, last.ramp))
            kept[-1].first, kept[-1].skip = last.first + last.sequences_before(b), (a, b)
            if (a, b) not in coming:
                changes.append(f"skip: the sequences planned for steps {a} to {b - 1} are skipped")
        return History(kept), changes

    def state(self) -> list[dict[str, Any]]:
        """Returns the phases as JSON values, without empty entries."""
        kept = [asdict(phase).items() for phase in self.phases]
        return [
            {name: value for name, value in items if value or name == "after"} for items in kept
        ]


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
        self.sources, self.history = dict(sources), history
        self._planned = lru_cache(maxsize=1)(self._plan)  # a rank asks for consecutive steps

    def addresses(self, step: int, start: int = 0, stop: int | None = None) -> list[Address]:
        """Returns the sequences [start, stop) of the step's global batch.

        They are sorted by logical shard (`SourceOrder.spread`), source and number, so that from
        step to step a rank reads the same windows.
        """
        phase = self.history.phase(step)
        num_steps = max(1, PLANNED_SEQUENCES // phase.batch)
        first = step - (step - 1 - phase.after) % num_steps
        names, columns = self._planned(first, num_steps)
        begin = phase.sequences_before(step) - phase.sequences_before(first)
        mine = slice(begin + start, begin + (phase.batch_at(step) if stop is None else stop))
        rows = zip(*(column[mine].tolist() for column in columns), strict=True)
        return [Address(names[source], *location) for source, *location in rows]

    def address(self, name: str, n: int) -> Address:
        """Returns where sequence n of the source is, whichever step it comes in."""
        return Address(name, n, *(int(x[0]) for x in self.sources[name].locate(np.array([n]))))

    def _plan(self, first: int, num_steps: int) -> tuple[tuple[str, ...], list[I64]]:
        """Returns the names of the sources, and columns of the sorted sequences of the steps from
        `first` on."""
        phase = self.history.phase(first)
        steps = range(first, first + num_steps)
        start = phase.sequences_before(first)
        source, n = phase.mixture(
            phase.first + np.arange(start, phase.sequences_before(first + num_steps))
        )
        epoch, window, index, spread = (np.empty(len(n), kind) for kind in ("i8", "i8", "i8", "f8"))
        for number, name in enumerate(phase.mixture.names):
            mine, order = np.flatnonzero(source == number), self.sources[name]
            n[mine] += phase.base.get(name, 0)
            epoch[mine], window[mine], index[mine] = order.locate(n[mine])
            spread[mine] = order.spread(window[mine])
        in_step = np.repeat(np.arange(num_steps), [phase.batch_at(step) for step in steps])
        sorted_ = np.lexsort((n, source, spread, in_step))
        return phase.mixture.names, [x[sorted_] for x in (source, n, epoch, window, index)]
