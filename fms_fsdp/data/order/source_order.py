"""The order of one source: on which tape, and at which token of it, each of its sequences begins.

    n        0 . . . . . . . . . . . n_1 . . . . . . . . . . . . . . . . n_2 . .
    rows of  |         S_0            |               S_1                 | S_2
    laps     |        Epochs          |   Rest of 1   |      Epochs       | Rest ...

Whole epochs are cut by `tapes`. Where the row length changes, every tape of the epoch under way goes on at
the token where it stands, in whole rows of the new length; such a row may run over the edge of a window.
Tapes take turns in proportion to the rows they have left (`Mixture`); the tail counts as one tape. Epochs cut
for the new length follow.

Invariant: in each epoch every token comes at most once. A change of the row length
leaves out less than one row of the new length at the end of each tape (`Rest.left_out`). Where the new length
divides the old one, a change leaves out no token that the old rows would have read.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np

from fms_fsdp.data.order.mixture import Mixture
from fms_fsdp.data.order.permute import I64
from fms_fsdp.data.order.tapes import MAX_ROWS, TAIL, Geometry, Tapes


class Position(NamedTuple):
    """Where a source stands: an epoch, and how many tokens of each of its tapes (and last of the tail) are
    used."""

    epoch: int
    used: I64


class RowAddress(NamedTuple):
    """Where a row of a global batch lies: from `token` of a tape on, over as many windows as it needs (nearly
    always one)."""

    source: str
    n: int
    epoch: int
    tape: int
    token: int


class Span(NamedTuple):
    """The tokens [start, start + length) of a window of a tape, all in one row."""

    source: str
    epoch: int
    tape: int
    window: int
    start: int
    length: int


@dataclass(frozen=True)
class Epochs:
    """The sequences from number `first` on, of whole epochs from `epoch` on."""

    first: int
    epoch: int
    seq_length: int
    tapes: Tapes

    def position(self, n: int) -> Position:
        """Returns where the source stands before sequence n."""
        epochs, rows = divmod(n - self.first, self.tapes.geometry.num_rows)
        return Position(self.epoch + epochs, self.tapes.used(rows))

    def epochs(self, n: int) -> float:
        """Returns the epochs gone through before sequence n."""
        return self.epoch + (n - self.first) / self.tapes.geometry.num_rows


class Rest:
    """The sequences from number `first` on that are left of an epoch which began with rows of another
    length."""

    def __init__(self, first: int, seq_length: int, tapes: Tapes, position: Position) -> None:
        self.first, self.seq_length, self.tapes = first, seq_length, tapes
        self.epoch, self._used = position
        whole = tapes.used(tapes.geometry.num_rows)
        rows, left_out = np.divmod(whole - self._used, seq_length)
        self.num_rows, self.left_out = int(rows.sum()), int(left_out.sum())
        self._share_used = float(self._used.sum() / whole.sum())
        self._lanes: I64 = np.flatnonzero(rows)
        self._rows: I64 = rows[self._lanes]

    @cached_property
    def _turns(self) -> Mixture[int]:
        return Mixture(dict(zip(self._lanes.tolist(), self._rows.tolist(), strict=True)))

    def position(self, n: int) -> Position:
        """Returns where the source stands before sequence n."""
        used = self._used.copy()
        for lane, count in self._turns.counts(n - self.first).items():
            used[lane] += self.seq_length * count
        return Position(self.epoch, used)

    def epochs(self, n: int) -> float:
        """Returns the epochs gone through before sequence n."""
        return self.epoch + self._share_used + (1 - self._share_used) * (n - self.first) / self.num_rows

    def locate(self, n: I64) -> tuple[I64, I64]:
        """Returns the tapes of sequences, and the tokens of the tapes at which the sequences begin."""
        turn, number = self._turns(n - self.first)
        lane = self._lanes[turn]
        return np.where(lane == len(self._used) - 1, TAIL, lane), self._used[lane] + number * self.seq_length


Lap = Epochs | Rest


class SourceOrder:
    """All sequences of a source, by its own numbers n: lap after lap."""

    def __init__(self, name: str, num_tokens: int, seed: int, cuts: Iterable[tuple[int, Geometry]]) -> None:
        """`cuts`: from which n on, ascending from 0, which geometry."""
        self.name, self.num_tokens, self.laps = name, num_tokens, list[Lap]()
        for first, geometry in cuts:
            tapes, epoch = Tapes(name, num_tokens, geometry, seed), 0
            if self.laps:
                self.laps = [lap for lap in self.laps if lap.first <= first]  # others are never reached
                lap, position = self.laps[-1], self.position(first)
                epoch = position.epoch
                if position.used.any():
                    rest = Rest(first, geometry.seq_length, lap.tapes, position)
                    self.laps.append(rest)
                    first, epoch = first + rest.num_rows, epoch + 1
            self.laps.append(Epochs(first, epoch, geometry.seq_length, tapes))

    @property
    def left_out(self) -> int:
        """Tokens that changes of the row length leave out: of each epoch, by the last change in it."""
        return sum({lap.epoch: lap.left_out for lap in self.laps if isinstance(lap, Rest)}.values())

    def lap(self, n: int) -> Lap:
        """Returns the lap of a sequence."""
        return self.laps[bisect_right(self.laps, n, key=lambda lap: lap.first) - 1]

    def position(self, n: int) -> Position:
        """Returns where the source stands before sequence n."""
        return self.lap(n).position(n)

    def epochs(self, n: int) -> float:
        """Returns the epochs gone through before sequence n."""
        return self.lap(n).epochs(n)

    def num_rows_until(self, epochs: float) -> int:
        """Returns how many sequences there are until so many epochs are gone through: the inverse of
        `epochs`."""
        almost = 1e-6 / self.laps[-1].tapes.geometry.num_rows  # for what rounding takes from a whole row
        return bisect_right(range(1, MAX_ROWS), epochs + almost, key=self.epochs)

    def tapes(self, epoch: int) -> Tapes:
        """Returns the tapes of an epoch."""
        return next(lap for lap in reversed(self.laps) if lap.epoch <= epoch).tapes

    def row_at(self, epoch: int, tape: int, token: int) -> int:
        """Returns n of the first sequence that ends after a tape's token: it holds the token, or none
        does."""

        def progress(n: int) -> tuple[int, int]:
            position = self.position(n)  # other epochs may have fewer tapes
            return position.epoch, int(position.used[tape]) if position.epoch == epoch else 0

        return bisect_right(range(1, MAX_ROWS), (epoch, token), key=progress)

    def spans(self, address: RowAddress) -> list[Span]:
        """Returns the tokens of a row, window after window."""
        size, done, found = self.lap(address.n).seq_length, 0, list[Span]()
        chunk = self.tapes(address.epoch).window_tokens(address.tape)
        while done < size:
            window, start = divmod(address.token + done, chunk)
            length = min(size - done, chunk - start)
            found.append(Span(address.source, address.epoch, address.tape, window, start, length))
            done += length
        return found
