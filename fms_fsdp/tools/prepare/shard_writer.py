"""Token shards on disk: Arrow IPC files that appear under their name only when complete.

    documents ── add ── [record batches in memory] ── finish ── .NAME.tmp ── fsync ── rename ── NAME

Format: one column `tokens: large_list<uint16|uint32>`, not null, uncompressed, at most 65,536 documents a
record batch. The schema's metadata (UTF-8 strings) says `n_docs n_tokens max_token_id tokenizer_digest
vocab_size sep_token dtype has_bos has_eos`, which is why a shard is held in memory until it is complete. The
same documents give the same bytes.
"""

from __future__ import annotations

import csv
import io
import os
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from fms_fsdp.atomic import write_atomically
from fms_fsdp.data.shards.shard import NO_LOSS
from fms_fsdp.errors import UserError

MAX_BATCH_DOCUMENTS = 65_536
MAX_BATCH_TOKENS = 1 << 22
COUNTS_HEADER = ("dataset/filename", "documents", "tokens")


@dataclass(frozen=True)
class ShardInfo:
    """What a shard holds. `sep_token` ends every document: stored (`has_eos`) or added by the reader.
    `has_masks`: tokens of prompts are marked, by the bit NO_LOSS. `bos_id`: the token that may begin
    documents; None for none, -1 if it is not known."""

    vocab_size: int
    sep_token: int
    tokenizer_digest: str
    has_eos: bool = False
    has_masks: bool = False
    bos_id: int | None = None

    @property
    def dtype(self) -> np.dtype[Any]:
        return np.dtype(np.uint16 if self.vocab_size <= 1 << 16 and not self.has_masks else np.uint32)


class ShardWriter:
    """Collects documents and writes them as one shard file."""

    def __init__(self, path: Path, info: ShardInfo) -> None:
        self.path = path
        self.info = info
        self.num_documents = 0
        self.num_tokens = 0
        self._max_token_id, self._all_begin = 0, info.bos_id is not None
        self._open: list[npt.NDArray[Any]] = []
        self._open_tokens = 0
        self._batches: list[pa.Array] = []

    def add(self, tokens: npt.NDArray[Any]) -> None:
        """Appends one document of at least zero token ids.

        Raises:
            UserError: an id is negative or not below the vocabulary size.
        """
        if len(tokens):
            ids = tokens & (NO_LOSS - 1) if self.info.has_masks else tokens
            low, high = int(ids.min()), int(ids.max())
            if low < 0 or high >= self.info.vocab_size:
                bad = low if low < 0 else high
                raise UserError(f"token id ({bad}) must lie in [0, {self.info.vocab_size}), the vocabulary")
            self._max_token_id = max(self._max_token_id, high)
        first = int(tokens[0]) & (NO_LOSS - 1) if len(tokens) else None
        self._all_begin &= first == self.info.bos_id
        self._open.append(tokens.astype(self.info.dtype, copy=False))
        self._open_tokens += len(tokens)
        self.num_documents += 1
        self.num_tokens += len(tokens)
        if len(self._open) == MAX_BATCH_DOCUMENTS or self._open_tokens >= MAX_BATCH_TOKENS:
            self._close_batch()

    def _close_batch(self) -> None:
        offsets = np.zeros(len(self._open) + 1, dtype=np.int64)
        np.cumsum([len(document) for document in self._open], out=offsets[1:])
        values = pa.array(np.concatenate(self._open))
        self._batches.append(pa.LargeListArray.from_arrays(pa.array(offsets), values))
        self._open, self._open_tokens = [], 0

    def finish(self) -> int:
        """Writes the shard under its final name, atomically; returns its size in bytes."""
        if self._open:
            self._close_batch()
        info = self.info
        metadata = {
            "n_docs": str(self.num_documents),
            "n_tokens": str(self.num_tokens),
            "max_token_id": str(self._max_token_id),
            "tokenizer_digest": info.tokenizer_digest,
            "vocab_size": str(info.vocab_size),
            "sep_token": str(info.sep_token),
            "dtype": info.dtype.name,
            "has_bos": str(self._all_begin).lower(),
            "has_eos": str(info.has_eos).lower(),
        }
        metadata |= {"has_masks": "true"} if info.has_masks else {}
        if info.bos_id == -1:
            del metadata["has_bos"]
        tokens = pa.field("tokens", pa.large_list(pa.from_numpy_dtype(info.dtype)), nullable=False)
        schema = pa.schema([tokens], metadata=metadata)
        temporary = self.path.with_name(f".{self.path.name}.tmp")
        with open(temporary, "wb") as file:
            with pa.ipc.new_file(file, schema) as writer:
                for batch in self._batches:
                    writer.write_batch(pa.record_batch([batch], schema=schema))
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, self.path)
        self._batches = []
        return self.path.stat().st_size


def write_counts(path: Path, rows: Iterable[tuple[str, int, int]]) -> None:
    """Writes the counts file: a row `source/shard, documents, tokens` per shard, in byte order of names."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(COUNTS_HEADER)
    writer.writerows(sorted(rows))
    write_atomically(path, text.getvalue(), sync=True)
