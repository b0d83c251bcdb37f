"""Where the n-th sequence of a source lies, through every change of the sequence length.

    n        0 . . . . . . . . . . . n_1 . . . . . . . . . . . . . . . . n_2 . .
    length   |         S_0            |               S_1                 | S_2
    epochs   |     0     |     1 ...  | ... rest of 1 |    2   |   3 ...  | ...

An *era* is the sequences of one length. It begins with what is left of the epoch under way: every tape of that epoch goes on at
the token where it stands, in rows of the new length, which may run over the edge of a window; tapes take turns in proportion
to the rows they have left (`Mixture`). Tail rows count as one tape. Epochs cut for the new length follow.

Invariant: in each epoch every token comes at most once. Beyond the rest of an epoch, a change leaves out less than one row of the
new length a tape, `Era.passed_over` tokens in all; none where the new length divides what every tape has left.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import numpy as np

from fms_fsdp.data.order.mixture import Mixture
from fms_fsdp.data.order.permute import F64, I64, permute
from fms_fsdp.data.order.tapes import TAIL, Geometry, Tapes, sequence_number

_ROUNDING = 1e-6  # of a row


class Begun(NamedTuple):
    """An epoch under way: its tapes, and how many tokens of each (and last of the tail) are used."""

    tapes: Tapes
    epoch: int
    used: I64


class Era:
    """The sequences from number `first` on, of one length: `num_begun` of the epoch under way, then epochs from `epoch` on."""

    def __init__(self, first: int, tapes: Tapes, epoch: int, begun: Begun | None) -> None:
        self.first, self.tapes, self.epoch, self._begun = first, tapes, epoch, begun
        self.num_begun = self.passed_over = 0
        self.begins = float(epoch)  # epochs gone through at `first`
        if begun is not None:
            whole = begun.tapes.used(begun.tapes.geometry.num_rows)
            rows, left = np.divmod(whole - begun.used, tapes.geometry.seq_length)
            self.num_begun, self.passed_over = int(rows.sum()), int(left.sum())
            self._tapes: I64 = np.flatnonzero(rows)
            self.begins = begun.epoch + float(begun.used.sum() / whole.sum())
            if self.num_begun:
                self._turns = Mixture({f"{tape:09d}": int(rows[tape]) for tape in self._tapes.tolist()})

    def begun(self, n: int) -> Begun | None:
        """Returns the epoch under way before sequence n of this era, None at the beginning of one."""
        size, i = self.tapes.geometry.seq_length, n - self.first
        if self._begun is not None and i < self.num_begun:
            used = self._begun.used.copy()
            counts = self._turns.counts(i)
            used[self._tapes] += [size * counts[name] for name in self._turns.names]
            return self._begun._replace(used=used)
        epochs, rows = divmod(i - self.num_begun, self.tapes.geometry.num_rows)
        return Begun(self.tapes, self.epoch + epochs, self.tapes.used(rows)) if rows else None

    def locate(self, n: I64) -> tuple[int, I64, I64, I64, F64]:
        """Returns of sequences among the first `num_begun`: epoch, tapes, windows, first tokens in them, shares of the way
        through the tapes (of tail rows: through the tail)."""
        assert self._begun is not None
        tapes, epoch, used = self._begun
        lane, number = self._turns(n - self.first)
        tape = self._tapes[lane]
        at = used[tape] + number * self.tapes.geometry.seq_length
        in_tail = tape == len(used) - 1
        chunk = np.where(in_tail, tapes.chunk_tokens(TAIL), tapes.chunk_tokens(0))
        window, start = np.divmod(at, chunk)
        num_tails = tapes.geometry.num_tail_rows
        window[in_tail] = permute(window[in_tail], num_tails, tapes.tail_key(epoch))
        fraction = np.where(in_tail, window / max(1, num_tails), tape / tapes.geometry.num_tapes)
        return epoch, np.where(in_tail, TAIL, tape), window, start, fraction

    def is_begun(self, epoch: int) -> bool:
        """Says whether the epoch was under way when this era began."""
        return self._begun is not None and epoch == self._begun.epoch

    def number(self, epoch: int, tape: int, at: int) -> tuple[int, int] | None:
        """Returns (n, token in the row) of a tape's token `at`, if this era, should it last, has a row that holds it."""
        g = self.tapes.geometry
        if self._begun is not None and self.is_begun(epoch):
            row, token = divmod(at - int(self._begun.used[tape]), g.seq_length)
            name = f"{tape % len(self._begun.used):09d}"
            if row < 0 or not self.num_begun or row >= self._turns.quotas.get(name, 0):
                return None
            return self.first + self._turns.index(name, row), token
        window, token = divmod(at, self.tapes.chunk_tokens(tape))
        row, token = divmod(token, g.seq_length)
        n = sequence_number(g, epoch - self.epoch, tape, window, row)
        return self.first + self.num_begun + n, token

    def epochs(self, n: int) -> float:
        """Returns the epochs gone through before sequence n."""
        i = n - self.first
        if i < self.num_begun:
            return self.begins + (self.epoch - self.begins) * i / self.num_begun
        return self.epoch + (i - self.num_begun) / self.tapes.geometry.num_rows

    def rows_until(self, epochs: float) -> int:
        """Returns n, how many sequences there are until so many epochs are gone through: the inverse of `epochs`."""
        if epochs <= self.epoch:
            share = max(0.0, epochs - self.begins) / (self.epoch - self.begins) if self.num_begun else 0.0
            return self.first + int(self.num_begun * share + _ROUNDING)
        return (
            self.first
            + self.num_begun
            + int((epochs - self.epoch) * self.tapes.geometry.num_rows + _ROUNDING)
        )


class Course:
    """All sequences of a source, by its own numbers n: era after era."""

    def __init__(self, name: str, num_tokens: int, seed: int, cuts: Iterable[tuple[int, Geometry]]) -> None:
        """`cuts`: from which n on, ascending from 0, which geometry."""
        self.num_tokens, self.eras = num_tokens, list[Era]()
        for first, geometry in cuts:
            begun = self.eras[-1].begun(first) if self.eras else None
            epoch = begun.epoch + 1 if begun else round(self.eras[-1].epochs(first)) if self.eras else 0
            self.eras.append(Era(first, Tapes(name, num_tokens, geometry, seed), epoch, begun))

    @property
    def passed_over(self) -> int:
        """Tokens that changes of the length leave out: of each epoch, by the last one in it."""
        return sum(
            {era.epoch: era.passed_over for era in self.eras if era.num_begun + era.passed_over}.values()
        )

    def era(self, n: int) -> Era:
        """Returns the era of a sequence."""
        return next(era for era in reversed(self.eras) if era.first <= n)

    def tapes(self, epoch: int) -> Tapes:
        """Returns the tapes that an epoch began with."""
        return next(era for era in reversed(self.eras) if era.epoch <= epoch).tapes

    def find(self, epoch: int, tape: int, at: int) -> tuple[int, int] | None:
        """Returns (n, token in the row) of a tape's token `at` in an epoch, None if a change of the length left it out."""
        ends = [era.first for era in self.eras[1:]]
        for era, end in zip(self.eras, [*ends, None], strict=True):
            if era.tapes is self.tapes(epoch) or era.is_begun(epoch):
                found = era.number(epoch, tape, at)
                if found is not None and (end is None or found[0] < end):
                    return found
        return None

    def rows_until(self, epochs: float) -> int:
        """Returns how many sequences there are until so many epochs are gone through."""
        return next(
            era for era in reversed(self.eras) if era is self.eras[0] or era.begins <= epochs
        ).rows_until(epochs)
