"""Which row comes when: from a step to the addresses of its rows. Integers alone, no file.

    step -> History: (source, n) of every row -> laps of the source: (epoch, tape, token) -> sorted by tape

Invariant: everything here is a function of (seed, length of each source, fit, history).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache

import numpy as np

from fms_fsdp.data.order.history import History
from fms_fsdp.data.order.permute import F64, I64, permute
from fms_fsdp.data.order.source_order import Lap, Rest, RowAddress, SourceOrder, Span
from fms_fsdp.data.order.tapes import TAIL, Geometry, locate

PLANNED_ROWS = 512
# "epoch": epochs gone through, "tokens": trained on, by source
Consumption = dict[str, dict[str, float | int]]
Fit = dict[str, dict[str, list[int]]]  # tapes, blocks a window, tokens a block, by row length and source


class Order:
    """The order of a run's data. `num_tokens` has every source that was ever used."""

    def __init__(self, seed: int, num_tokens: Mapping[str, int], fit: Fit, history: History) -> None:
        self._seed, self._num_tokens, self.fit, self.history = seed, num_tokens, fit, history
        self._sources: dict[str, SourceOrder] = {}
        self._planned = lru_cache(maxsize=1)(self._plan)  # a rank asks for one step after the other

    def source(self, name: str) -> SourceOrder:
        """Returns the order of a source, one that is no longer used too."""
        if name not in self._sources:
            cuts, num_tokens = [], self._num_tokens[name]
            for segment in self.history.lengths():
                size = segment.seq_length
                fit = self.fit.get(str(size), {}).get(name)
                if fit:  # else it is not used in that length
                    cuts.append((segment.base.get(name, 0), Geometry(size, num_tokens // size, *fit)))
            self._sources[name] = SourceOrder(name, num_tokens, self._seed, cuts)
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
        names, columns = self._planned(first, num_steps)
        begin = segment.rows_before(step) - segment.rows_before(first)
        mine = slice(begin + start, begin + (segment.batch_at(step) if stop is None else stop))
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
        tokens, found = self.history.consumed_tokens(step), Consumption()
        for name, n in self.history.position(step).items():
            found[name] = {"epoch": self.source(name).epochs(n), "tokens": tokens[name]}
        return found

    def _plan(self, first: int, num_steps: int) -> tuple[tuple[str, ...], list[I64]]:
        """Returns the sorted rows of the steps from `first` on: the names of their sources, and the columns
        place of the source in the names, n, epoch, tape, token."""
        rows, segment = self.history.rows(first, num_steps), self.history.segment(first)
        batches = list(map(segment.batch_at, range(first, first + num_steps)))
        laps, which = list[Lap](), np.empty_like(rows.n)
        for place, name in enumerate(rows.names):
            of_source, mine = self.source(name).laps, np.flatnonzero(rows.source == place)
            begins = np.array([lap.first for lap in of_source])
            which[mine] = len(laps) + begins.searchsorted(rows.n[mine], side="right") - 1
            laps += of_source
        epoch, tape, token, fraction = _locate_rows(laps, which, rows.n)
        order = np.lexsort((rows.n, rows.source, fraction, np.repeat(np.arange(num_steps), batches)))
        return rows.names, [column[order] for column in (rows.source, rows.n, epoch, tape, token)]


def _locate_rows(laps: Sequence[Lap], lap: I64, n: I64) -> tuple[I64, I64, I64, F64]:
    """Returns epoch, tape, first token on it, and the share of the way through the tapes (of tail rows:
    through the tail)."""
    facts = []
    for each in laps:
        g = each.tapes.geometry
        cut = (g.num_rows, g.num_tail_rows, g.num_tapes, g.seq_length)
        facts.append((each.first, each.epoch, each.seq_length, *cut))
    firsts, epochs, sizes, num_rows, num_tails, num_tapes, tail_sizes = np.array(facts)[lap].T
    epoch, tape, row = locate(n - firsts, num_rows, num_tails, num_tapes)
    epoch, token = epoch + epochs, row * sizes
    for i, each in enumerate(laps):
        if isinstance(each, Rest) and (lap == i).any():
            mine = np.flatnonzero(lap == i)
            epoch[mine] = each.epoch
            tape[mine], token[mine] = each.locate(n[mine])
    fraction = tape / num_tapes
    tail = np.flatnonzero(tape == TAIL)
    if len(tail):
        where = zip(lap[tail].tolist(), epoch[tail].tolist(), strict=True)
        keys = np.array([laps[i].tapes.tail_key(number) for i, number in where], dtype=np.uint64)
        place = permute(token[tail] // tail_sizes[tail], num_tails[tail], keys)
        fraction[tail] = place / num_tails[tail]
    return epoch, tape, token, fraction
