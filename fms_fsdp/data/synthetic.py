"""Synthetic tokens: a corpus whose files are computed, with a pattern that a model can learn.

With A = the largest power of two <= min(vocab_size, 256), the next token is (5 x + 3) mod A, a
cycle through all A tokens, except that every 32nd token is random: the loss of a model that has
learned the rule is about (ln A) / 32.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from typing import cast

import numpy as np

from fms_fsdp.data.corpus import Corpus, Source
from fms_fsdp.data.permute import I64, derive_key, mix64
from fms_fsdp.data.shards import Files
from fms_fsdp.errors import UserError

NUM_SHARDS = 1 << 12
SHARD_TOKENS = 1 << 28
CELL = 32


@dataclass(frozen=True)
class SyntheticShard:
    """One document of `SHARD_TOKENS` tokens, with the attributes of `shards.Shard`."""

    path: str
    metadata: dict[str, str] = field(default_factory=lambda: {"has_eos": "true"})
    num_docs = 1
    num_tokens = SHARD_TOKENS
    width = 4
    has_masks = False
    is_list = True
    nbytes = 64
    documents = (np.array([0, SHARD_TOKENS]), np.zeros(1, np.int64))


class SyntheticStorage:
    """The computed files, with the methods of `storage.Storage`."""

    root = "synthetic tokens"
    is_remote = False

    def __init__(self, vocab_size: int, seed: int) -> None:
        if vocab_size < 2:
            raise UserError(
                f"--vocab_size={vocab_size} must be at least 2 for synthetic tokens; set --vocab_size=2"
            )
        self.sizes: dict[str, int] = {}
        self.alphabet = 1 << min(8, vocab_size.bit_length() - 1)
        self.seed = seed

    @cached_property
    def _rule(self) -> tuple[I64, I64]:
        """Solves the recurrence within a cell: token i is factor[i] * first token + summand[i]."""
        factor, summand = np.ones(CELL, np.int64), np.zeros(CELL, np.int64)
        for i in range(1, CELL):
            factor[i] = factor[i - 1] * 5 % self.alphabet
            summand[i] = (summand[i - 1] * 5 + 3) % self.alphabet
        return factor, summand

    def open_shard(self, path: str, delimiter: int = 0) -> SyntheticShard:
        return SyntheticShard(path)

    def read(self, path: str, size: int, offset: int) -> bytes:
        first = offset // 4
        stop = (offset + size) // 4
        cells = np.arange(first // CELL, -(-stop // CELL), dtype=np.uint64)
        key = np.uint64(derive_key(self.seed, int(path)))
        first_tokens = (mix64(cells ^ key) % np.uint64(self.alphabet)).astype(np.int64)
        factor, summand = self._rule
        tokens = (first_tokens[:, None] * factor + summand) % self.alphabet  # (cells, CELL)
        flat = tokens.astype("<u4").reshape(-1)
        skipped = first % CELL
        return flat[skipped : skipped + stop - first].tobytes()

    def prefetch_ends(self, path: str) -> None:
        pass

    def close(self) -> None:
        pass


def synthetic_corpus(vocab_size: int, seed: int) -> Corpus:
    """Returns 2^40 tokens of one source, a function of the seed."""
    docs = np.ones(NUM_SHARDS, np.int64)
    tokens = np.full(NUM_SHARDS, SHARD_TOKENS)
    source = Source("synthetic", list(map(str, range(NUM_SHARDS))), docs, tokens, 0, 1.0)
    storage = cast(Files, SyntheticStorage(vocab_size, seed))
    return Corpus(storage, (source,), vocab_size, "", 0)
