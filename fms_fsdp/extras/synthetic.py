"""Synthetic tokens: no files, next to no cost, the same at every world size, with a pattern that a model can
learn.

A row is a function of (seed, step, row position in the global batch) alone. In an alphabet of A = the largest
power of two <= min(vocab_size, 256) the next token is (5 x + 3) mod A, a cycle through all A tokens, except
that one token in each cell of 32 is drawn at random: the loss of a model that has learned the rule is about
(ln A) / 32.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from fms_fsdp.config import DataConfig
from fms_fsdp.data.batch import Batch, empty_batch, rows_of_rank
from fms_fsdp.data.order.history import History, Segment, check_same, rampup_of
from fms_fsdp.data.order.mixture import NUM_SLOTS
from fms_fsdp.data.order.order import Consumption
from fms_fsdp.data.order.permute import I64, ORDER_VERSION, U64, derive_key, mix64
from fms_fsdp.errors import UserError

_FACTOR, _SUMMAND, _CELL, _MAX_ALPHABET = 5, 3, 32, 256
_ROWS = 0x726F7773  # the word of the keys drawn here
_QUOTAS = {"synthetic": NUM_SLOTS}


@dataclass(eq=False)
class SyntheticRows:
    """Produces the rows of any step, as `rows.CorpusRows` does from a corpus."""

    section: DataConfig
    seed: int
    vocab_size: int
    global_batch_size: int
    rampup: tuple[int, ...]
    pin_memory: bool
    last_step: int | None = None
    first_exhausted: str = ""

    def __post_init__(self) -> None:
        if self.vocab_size < 2:
            raise UserError(f"vocab_size ({self.vocab_size}) must be at least 2 for synthetic tokens")
        self._alphabet = 1 << (min(self.vocab_size, _MAX_ALPHABET).bit_length() - 1)
        size = self.section.seq_length
        self._history = History([Segment(0, self.global_batch_size, _QUOTAS, size, self.rampup)], [])
        power, total = [1], [0]
        for _ in range(2 * _CELL - 1):
            power.append(power[-1] * _FACTOR % self._alphabet)
            total.append((total[-1] * _FACTOR + _SUMMAND) % self._alphabet)
        self._power: I64 = np.array(power, dtype=np.int64)
        self._total: I64 = np.array(total, dtype=np.int64)

    def batch(self, step: int, dp_rank: int, dp_size: int) -> Batch:
        """Returns a rank's rows of the step's global batch, which may have been of another size."""
        segment = self._history.segment(step)
        length = segment.seq_length
        start, stop = rows_of_rank(segment.batch_at(step), dp_rank, dp_size)
        out = empty_batch(stop - start, length, pin_memory=self.pin_memory)
        tokens = self._tokens(step, start, stop, length)
        out.tokens_BS.numpy()[:] = tokens[:, :-1]
        out.labels_BS.numpy()[:] = tokens[:, 1:]
        out.positions_BS.numpy()[:] = np.arange(length)
        out.document_ids_BS.zero_()
        return out

    def _tokens(self, step: int, start: int, stop: int, length: int) -> I64:
        """Returns S + 1 tokens a row. Each cell of 32 draws a place and a token; the rule runs from the last
        one drawn."""
        num_cells = length // _CELL + 2  # one before the row
        key = np.uint64(derive_key(self.seed, _ROWS, step))
        row_keys: U64 = mix64(np.arange(start, stop, dtype=np.uint64) ^ key)
        cells: U64 = np.arange(num_cells, dtype=np.uint64)
        draws = mix64(row_keys[:, None] + cells)
        place = (draws % np.uint64(_CELL)).astype(np.int64)
        token = ((draws >> np.uint64(8)) % np.uint64(self._alphabet)).astype(np.int64)
        offset = np.arange(_CELL)
        after = offset >= place[:, 1:, None]
        since = np.where(after, offset - place[:, 1:, None], offset + _CELL - place[:, :-1, None])
        origin = np.where(after, token[:, 1:, None], token[:, :-1, None])
        tokens: I64 = (self._power[since] * origin + self._total[since]) & (self._alphabet - 1)
        return tokens.reshape(stop - start, -1)[:, : length + 1]

    def state(self) -> dict[str, Any]:
        return {
            "order_version": ORDER_VERSION,
            "synthetic": self._alphabet,
            "seed": self.seed,
            "history": [[s.after, s.batch, s.seq_length] for s in self._history.segments],
            **self._history.ramps(),
        }

    def load(self, state: dict[str, Any], step: int) -> list[str]:
        """Continues from `step`; returns what changed. Raises: UserError for a state of other data."""
        check_same(state, self.state(), ("synthetic", "--seed"), "the same data flags")
        segments = []
        for after, batch, length in state["history"]:
            segments.append(Segment(after, batch, _QUOTAS, length, rampup_of(state, after)))
        self._history = History(segments, [])
        size = self.section.seq_length
        return self._history.change(step, self.global_batch_size, _QUOTAS, size, self.rampup)

    def consumption(self, step: int) -> Consumption:
        return {"synthetic": {"epoch": 0.0, "tokens": self._history.consumed_tokens(step)["synthetic"]}}

    def num_masked_rows(self, step: int) -> int:
        return 0

    def documents(self, step: int, limit: int) -> list[str]:
        return []

    def begin_after(self, step: int) -> None:
        pass  # every step's tokens are new ones

    def close(self) -> None:
        pass
