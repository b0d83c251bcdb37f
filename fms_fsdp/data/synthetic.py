"""Synthetic tokens: no files, next to no cost, the same at every world size, with a pattern that a model can
learn.

A row is a function of (seed, step, row position in the global batch) alone. In an alphabet of A = the largest
power of two <= min(vocab_size, 256) the next token is (5 x + 3) mod A, a cycle through all A tokens, except
that one token in each cell of 32 is drawn at random: the loss of a model that has learned the rule is about
(ln A) / 32.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from fms_fsdp.data.batch import Batch, empty_batch, rows_of_rank
from fms_fsdp.data.order.permute import I64, ORDER_VERSION, U64, derive_key, mix64

_FACTOR, _SUMMAND, _CELL, _MAX_ALPHABET = 5, 3, 32, 256
_ROWS = 0x726F7773  # the word of the keys drawn here


class SyntheticRows:
    """Produces the rows of a step (see `stream.RowProducer`)."""

    def __init__(
        self, *, seed: int, vocab_size: int, seq_length: int, global_batch_size: int, pin_memory: bool = False
    ) -> None:
        if vocab_size < 2:
            raise ValueError(f"vocab_size ({vocab_size}) must be at least 2 for synthetic tokens")
        self._alphabet = 1 << (min(vocab_size, _MAX_ALPHABET).bit_length() - 1)
        self._seed, self._seq_length, self._pin_memory = seed, seq_length, pin_memory
        self.global_batch_size = global_batch_size
        self._changes = [(0, global_batch_size, seq_length)]  # (after step, batch, tokens in a row)
        power, total = [1], [0]
        for _ in range(2 * _CELL - 1):
            power.append(power[-1] * _FACTOR % self._alphabet)
            total.append((total[-1] * _FACTOR + _SUMMAND) % self._alphabet)
        self._power: I64 = np.array(power, dtype=np.int64)
        self._total: I64 = np.array(total, dtype=np.int64)

    last_step: int | None = None
    first_exhausted = ""

    def batch(self, step: int, dp_rank: int, dp_size: int) -> Batch:
        """Returns a rank's rows of the step's global batch, which may have been of another size."""
        size, length = next(entry[1:] for entry in reversed(self._changes) if entry[0] < step)
        start, stop = rows_of_rank(size, dp_rank, dp_size)
        out = empty_batch(stop - start, length, pin_memory=self._pin_memory)
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
        row_keys: U64 = mix64(
            np.arange(start, stop, dtype=np.uint64) ^ np.uint64(derive_key(self._seed, _ROWS, step))
        )
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
            "seed": self._seed,
            "history": [list(change) for change in self._changes],
        }

    def load(self, state: dict[str, Any], step: int) -> list[str]:
        """Continues from `step`; returns what changed. Raises: ValueError for a state of other data."""
        mine = self.state()
        for name in ("synthetic", "seed"):
            if state.get(name) != mine[name]:
                flag = "--seed" if name == "seed" else name
                raise ValueError(
                    f"{flag} ({mine[name]}) is {state.get(name)} in the checkpoint's data state; resume with the same "
                    "data flags, or take its weights alone with --load_model_only"
                )
        self._changes = [(after, batch, length) for after, batch, length in state["history"]]
        (_, *before), now = self._changes[-1], (self.global_batch_size, self._seq_length)
        if tuple(before) != now:
            self._changes = [change for change in self._changes if change[0] < step] + [(step, *now)]
        names = (("global batch", "sequences"), ("seq_length", "tokens"))
        changes = zip(names, before, now, strict=True)
        return [f"{name}: {old} -> {new} {unit}" for (name, unit), old, new in changes if old != new]

    def consumption(self, step: int) -> dict[str, dict[str, float | int]]:
        ends = [after for after, *_ in self._changes[1:]] + [step]
        tokens = sum(
            (end - after) * batch * s for (after, batch, s), end in zip(self._changes, ends, strict=True)
        )
        return {"synthetic": {"epoch": 0.0, "tokens": tokens}}

    def num_masked_rows(self, step: int) -> int:
        return 0

    def documents(self, step: int, limit: int) -> list[str]:
        return []

    def begin_after(self, step: int) -> None:
        pass  # every step's tokens are new ones

    def close(self) -> None:
        pass
