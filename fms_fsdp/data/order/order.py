"""Which row comes when: from a step to the addresses of its rows. Integers alone, no file.

    step -> History: (source, n) of every row -> laps of the source: (epoch, tape, token) -> sorted by tape

Invariant: everything here is a function of (seed, length of each source, fit, history).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

from fms_fsdp.data.order.history import History
from fms_fsdp.data.order.permute import F64, I64, permute
from fms_fsdp.data.order.source_order import Lap, Rest, RowAddress, SourceOrder, Span
from fms_fsdp.data.order.tapes import MAX_ROWS, TAIL, Geometry, locate

PLANNED_ROWS = 512
_APART = 2 * MAX_ROWS  # more than the number of any row; 65,536 sources of so many fit 64 bits
# "epoch": epochs gone through, "tokens": trained on, by source
Consumption = dict[str, dict[str, float | int]]
Fit = dict[str, dict[str, list[int]]]  # tapes, blocks a window, tokens a block, by row length and source


class _Planned(NamedTuple):
    """The sorted rows of the steps from `first` on, arrays of one length: `source` is a place in `names`."""

    first: int
    names: tuple[str, ...]
    source: I64
    n: I64
    epoch: I64
    tape: I64
    token: I64


class Order:
    """The order of a run's data. `num_tokens` has every source that was ever used."""

    def __init__(self, seed: int, num_tokens: Mapping[str, int], fit: Fit, history: History) -> None:
        self._seed, self._num_tokens, self.fit, self.history = seed, num_tokens, fit, history
        self._sources: dict[str, SourceOrder] = {}
        self._planned: _Planned | None = None

    def source(self, name: str) -> SourceOrder:
        """Returns the order of a source, one that is no longer used too."""
        if name not in self._sources:
            cuts = []
            for segment in self.history.lengths():
                size, num_tokens = segment.seq_length, self._num_tokens[name]
                fit = self.fit.get(str(size), {}).get(name)
                if fit:  # else it is not used in that length
                    geometry = Geometry(size, num_tokens // size, *fit)
                    cuts.append((segment.base.get(name, 0), geometry))
            self._sources[name] = SourceOrder(name, self._num_tokens[name], self._seed, cuts)
        return self._sources[name]

    def addresses(self, step: int, start: int = 0, stop: int | None = None) -> list[RowAddress]:
        """Returns the rows [start, stop) of the step's global batch.

        Rows are sorted by the tape's share of the way through its source's tapes (for tail rows: the row's
        through the tail), then source, then number, so that a tape stays with a rank from step to step and
        its window in that rank's memory.
        """
        segment = self.history.segment(step)
        num_steps = max(1, PLANNED_ROWS // segment.batch)
        first = step - (step - 1 - segment.after) % num_steps
        if self._planned is None or self._planned.first != first:
            self._planned = self._plan(first, num_steps)
        begin = segment.rows_before(step) - segment.rows_before(first)
        mine = slice(begin + start, begin + (segment.batch_at(step) if stop is None else stop))
        names, columns = self._planned.names, self._planned[2:]
        rows = zip(*(column[mine].tolist() for column in columns), strict=True)
        return [RowAddress(names[source], *address) for source, *address in rows]

    def address(self, name: str, n: int) -> RowAddress:
        """Returns where the source's own sequence n lies, whichever step it comes in."""
        epoch, tape, token, _ = _locate_rows([self.source(name).lap(n)], np.array([0]), np.array([n]))
        return RowAddress(name, n, int(epoch[0]), int(tape[0]), int(token[0]))

    def spans(self, address: RowAddress) -> list[Span]:
        """Returns the tokens of a row, window after window."""
        return self.source(address.source).spans(address)

    def consumption(self, step: int) -> Consumption:
        """Returns by source, dropped ones too, the epochs gone through and the tokens trained on by the end
        of `step`."""
        tokens, position = self.history.consumed_tokens(step), self.history.position(step)
        return {
            name: {"epoch": self.source(name).epochs(n), "tokens": tokens[name]}
            for name, n in position.items()
        }

    def _plan(self, first: int, num_steps: int) -> _Planned:
        rows, segment = self.history.rows(first, num_steps), self.history.segment(first)
        batches = [segment.batch_at(step) for step in range(first, first + num_steps)]
        laps = [(i, each) for i, name in enumerate(rows.names) for each in self.source(name).laps]
        begins = np.array([i * _APART + each.first for i, each in laps])  # ascending, source after source
        lap = np.searchsorted(begins, rows.source * _APART + rows.n, side="right") - 1
        epoch, tape, token, fraction = _locate_rows([each for _, each in laps], lap, rows.n)
        order = np.lexsort((rows.n, rows.source, fraction, np.repeat(np.arange(num_steps), batches)))
        columns = (column[order] for column in (rows.source, rows.n, epoch, tape, token))
        return _Planned(first, rows.names, *columns)


def _locate_rows(laps: Sequence[Lap], lap: I64, n: I64) -> tuple[I64, I64, I64, F64]:
    """Returns epoch, tape, first token on it, and the share of the way through the tapes (of tail rows:
    through the tail)."""
    cuts = [lap.tapes.geometry for lap in laps]
    firsts, epochs, sizes = np.array([(each.first, each.epoch, each.seq_length) for each in laps])[lap].T
    geometry = np.array([(g.num_rows, g.num_tail_rows, g.num_tapes, g.seq_length) for g in cuts])
    num_rows, num_tails, num_tapes, tail_sizes = geometry[lap].T
    epoch, tape, row = locate(n - firsts, num_rows, num_tails, num_tapes)
    epoch, token = epoch + epochs, row * sizes
    for i, each in enumerate(laps):
        if isinstance(each, Rest) and (lap == i).any():
            mine = np.flatnonzero(lap == i)
            tapes, tokens = each.locate(n[mine])
            epoch[mine] = each.epoch
            tape[mine] = tapes
            token[mine] = tokens
    fraction = tape / num_tapes
    tail = np.flatnonzero(tape == TAIL)
    if len(tail):
        where = zip(lap[tail].tolist(), epoch[tail].tolist(), strict=True)
        keys = np.array([laps[i].tapes.tail_key(number) for i, number in where], dtype=np.uint64)
        place = permute(token[tail] // tail_sizes[tail], num_tails[tail], keys)
        fraction[tail] = place / num_tails[tail]
    return epoch, tape, token, fraction
