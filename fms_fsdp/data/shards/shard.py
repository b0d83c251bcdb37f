"""A shard of token ids, read in place: where every document's tokens lie in the file.

Two layouts of a column `tokens` of unsigned integers are read: one list per document with many documents to a
record batch (`prepare` writes it), and one record batch per document (fms-fsdp writes it). Nothing is copied
but the offsets of the documents asked for.

Invariant: positions of tokens in a shard are counted with the delimiters that the stream adds (`delimiter` =
1 a document).
"""

from __future__ import annotations

import re
from functools import cached_property
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import numpy.typing as npt

from fms_fsdp.data.order.permute import I64
from fms_fsdp.data.shards.files import Files
from fms_fsdp.data.shards.ipc import ArrowFile
from fms_fsdp.parts import load_part
from fms_fsdp.safe_names import shown_name

if TYPE_CHECKING:
    import pyarrow as pa

# the bit of a stored token that no loss counts, such as one of a prompt; only in shards that say `has_masks`
NO_LOSS = 1 << 31
TokenType = np.dtype[np.unsignedinteger[npt.NBitBase]]
OffsetType = np.dtype[np.signedinteger[npt.NBitBase]]
_SAMPLED_TOKENS = 1 << 16
_NUMBERS = ("n_docs", "n_tokens", "max_token_id", "vocab_size", "sep_token")  # of a shard's metadata
_OFFSETS_MARGIN = 512  # documents read to either side of where the average length suggests


class Documents(NamedTuple):
    """Neighbouring documents of a chunk: `first` is the number of the first one in the file.

    `starts` (one more than documents): where each starts in the chunk, delimiters counted. `addresses`: byte
    position in the file of its first token.
    """

    first: int
    starts: I64
    addresses: I64


class Shard:
    """One open shard: its counts, its data type and where its chunks lie (a chunk is a record batch of many
    documents, or the whole file where each document is a record batch)."""

    def __init__(self, files: Files, path: str, delimiter: int) -> None:
        """Reads the footer, the schema and the metadata of record batches of lists.

        Raises: MissingShardError, ShardError.
        """
        self.path, self._file, self._delimiter = path, ArrowFile(files, path), delimiter
        with self._file.errors_named():
            blocks, schema = self._file.footer()
            self.metadata = {key.decode(): value.decode() for key, value in (schema.metadata or {}).items()}
            self.dtype, self.is_list, self._offset_type = self._token_type(schema)
            if self.is_list:
                widths = self._offset_type.itemsize, self.dtype.itemsize
                layouts = [self._file.list_layout(block, *widths) for block in blocks]
                table: I64 = np.array(layouts, dtype=np.int64).reshape(-1, 4)
                self._chunk_docs, self._chunk_tokens, self._offsets_at, self._values_at = table.T
                self.num_docs = int(self._chunk_docs.sum())
            else:
                self._blocks = blocks
                self.num_docs = len(blocks)
            self._check_metadata()
        self.has_masks = self.metadata.get("has_masks") == "true"

    @cached_property
    def _scalars(self) -> tuple[I64, I64]:
        """Where each document starts in the shard (one more than documents), and its byte position: of shards
        with a record batch a document. Reads the length of every document."""
        with self._file.errors_named():
            lengths, addresses = _scalar_layout(self._file, self._blocks, self.dtype.itemsize)
        added = np.arange(len(lengths) + 1, dtype=np.int64) * self._delimiter
        return np.concatenate([[0], np.cumsum(lengths)]) + added, addresses

    @cached_property
    def num_tokens(self) -> int:
        """Number of tokens on disk."""
        if self.is_list:
            return int(self._chunk_tokens.sum())
        return int(self._scalars[0][-1]) - self._delimiter * self.num_docs

    @cached_property
    def chunk_starts(self) -> I64:
        """Where each chunk starts in the shard, delimiters counted; the last element is the shard's
        length."""
        if not self.is_list:
            return self._scalars[0][[0, -1]]
        return np.concatenate([[0], np.cumsum(self._chunk_tokens + self._delimiter * self._chunk_docs)])

    @property
    def cost(self) -> int:
        """Number of bytes that this object holds, about."""
        return 2304 + (64 * len(self._chunk_docs) if self.is_list else 48 * self.num_docs)

    def documents(self, chunk: int, start: int, stop: int) -> Documents:
        """Returns the documents of a chunk that overlap its tokens [start, stop), delimiters counted; start <
        stop.

        Where offsets are on disk only the part around the place that the average length suggests is read,
        more if need be.
        """
        if not self.is_list:
            starts, addresses = self._scalars
            first, last = _overlapping(starts, start, stop)
            return Documents(first, starts[first : last + 1], addresses[first:last])
        num_docs, length = int(self._chunk_docs[chunk]), self._chunk_length(chunk)
        width, margin, tokens = self._offset_type.itemsize, _OFFSETS_MARGIN, int(self._chunk_tokens[chunk])
        while True:
            low = max(0, start * num_docs // length - margin)
            high = min(num_docs, stop * num_docs // length + margin)
            raw = self._file.read((high - low + 1) * width, int(self._offsets_at[chunk]) + low * width)
            offsets = np.frombuffer(raw, self._offset_type).astype(np.int64)
            starts = offsets + np.arange(low, high + 1) * self._delimiter
            inside = offsets[0] >= 0 if low else offsets[0] == 0
            inside &= offsets[-1] <= tokens if high < num_docs else offsets[-1] == tokens
            if inside and starts[0] <= start and starts[-1] >= stop and (offsets[1:] >= offsets[:-1]).all():
                break
            if (low, high) == (0, num_docs):
                raise self._file.error("has offsets that disagree with its length")
            margin *= 8
        first, last = _overlapping(starts, start, stop)
        addresses = self._values_at[chunk] + offsets[first:last] * self.dtype.itemsize
        number = int(self._chunk_docs[:chunk].sum()) + low + first
        return Documents(number, starts[first : last + 1], addresses)

    def span(self, document: int) -> tuple[int, int]:
        """Returns where a document (by its number in the file) starts and ends in the shard, delimiters
        counted."""
        if not self.is_list:
            starts, _ = self._scalars
            return int(starts[document]), int(starts[document + 1])
        first = np.concatenate([[0], np.cumsum(self._chunk_docs)])
        chunk = int(np.searchsorted(first, document, side="right")) - 1
        local, width = document - int(first[chunk]), self._offset_type.itemsize
        raw = self._file.read(2 * width, int(self._offsets_at[chunk]) + local * width)
        start, stop = np.frombuffer(raw, self._offset_type).tolist()
        base = int(self.chunk_starts[chunk]) + local * self._delimiter
        return base + start, base + stop + self._delimiter

    def chunk(self, number: int) -> Documents:
        """Returns all documents of a chunk (those of length 0 at its edges may be left out), lengths checked
        against its own."""
        length = self._chunk_length(number)
        if length == 0:
            return Documents(0, np.zeros(1, dtype=np.int64), np.empty(0, dtype=np.int64))
        found = self.documents(number, 0, length)
        if (np.diff(found.starts) < self._delimiter).any():
            raise self._file.error("has offsets that disagree with its length")
        return found

    def document_at(self, address: int) -> int:
        """Returns the number in the file of the document whose tokens lie at a byte position."""
        if not self.is_list:
            return int(np.searchsorted(self._scalars[1], address, side="right")) - 1
        chunk = int(np.searchsorted(self._values_at, address, side="right")) - 1
        found = self.documents(chunk, 0, self._chunk_length(chunk))
        return found.first + int(np.searchsorted(found.addresses, address, side="right")) - 1

    def ids(self, values: npt.NDArray[Any]) -> npt.NDArray[Any]:
        """Returns stored tokens as ids, without the marks of those that no loss counts."""
        return values & ~np.array(NO_LOSS, values.dtype) if self.has_masks else values

    def edge_tokens(self, limit: int, *, is_last: bool) -> list[int]:
        """Returns the first, or the last, token on disk of each of the first `limit` documents that has
        any."""
        if self.is_list:
            chunk = next((i for i, tokens in enumerate(self._chunk_tokens.tolist()) if tokens), None)
            if chunk is None:
                return []
            found = self.documents(chunk, 0, min(self._chunk_length(chunk), _SAMPLED_TOKENS))
            lengths, addresses = np.diff(found.starts) - self._delimiter, found.addresses
        else:
            with self._file.errors_named():
                lengths, addresses = _scalar_layout(self._file, self._blocks[:limit], self.dtype.itemsize)
        width = self.dtype.itemsize
        places = addresses[:limit] + (lengths[:limit] - 1) * width * is_last
        data = [self._file.read(width, place) for place in places[lengths[:limit] > 0].tolist()]
        tokens: list[int] = self.ids(np.frombuffer(b"".join(data), self.dtype)).tolist()
        return tokens

    def _chunk_length(self, chunk: int) -> int:
        return int(self.chunk_starts[chunk + 1] - self.chunk_starts[chunk])

    def _check_metadata(self) -> None:
        """Refuses metadata that could be misunderstood, or that counts otherwise."""
        for name, value in self.metadata.items():
            if name in _NUMBERS and value and not re.fullmatch("[0-9]{1,18}", value, re.ASCII):
                raise self._file.error(f"says {name} ({shown_name(value)}), which must be a whole number")
            if name in ("has_eos", "has_masks") and value not in ("true", "false"):
                raise self._file.error(f"says {name} ({shown_name(value)}), which must be true or false")
        counts = {"n_docs": self.num_docs, **({"n_tokens": self.num_tokens} if self.is_list else {})}
        for name, count in counts.items():
            if self.metadata.get(name, "") not in ("", str(count)):
                raise self._file.error(f"holds {count} where its metadata says {name} {self.metadata[name]}")

    def _token_type(self, schema: pa.Schema) -> tuple[TokenType, bool, OffsetType]:
        """Returns the type of the tokens, whether they stand in lists, and the type of the lists' offsets."""
        import pyarrow as pa

        if schema.names != ["tokens"]:
            columns = shown_name(", ".join(schema.names))
            raise self._file.error(f"must have one column `tokens`, not {columns}")
        kind = schema.field(0).type
        is_list = pa.types.is_list(kind) or pa.types.is_large_list(kind)
        value = kind.value_type if is_list else kind
        if not pa.types.is_integer(value):
            raise self._file.error(f"must hold integers in column `tokens`, not {kind}")
        offsets = np.dtype("<i8" if pa.types.is_large_list(kind) else "<i4")
        unsigned = np.dtype(f"<u{value.bit_width // 8}")  # negative ids turn out too large
        return unsigned, is_list, offsets


def _scalar_layout(file: ArrowFile, blocks: npt.NDArray[np.void], width: int) -> tuple[I64, I64]:
    """Returns (length, byte position) of the document in each record batch of plain integers."""
    layout: tuple[I64, I64] = load_part("fms_layout:scalar_layout")(file, blocks, width)
    return layout


def _overlapping(starts: I64, start: int, stop: int) -> tuple[int, int]:
    """Returns which documents [first, last) overlap the tokens [start, stop)."""
    first, last = np.searchsorted(starts, start, side="right") - 1, np.searchsorted(starts, stop, side="left")
    return int(first), int(last)
