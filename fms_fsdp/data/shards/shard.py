"""Arrow IPC files of token ids, read in place: where every document's tokens lie in the file.

    file     = magic, schema message, record batch messages, footer (where each record batch starts)
    message  = FlatBuffers metadata (lengths, where each buffer starts), body (the buffers)

Two layouts of a column `tokens` of unsigned integers are read: one list per document with many documents to a
record batch (`prepare` writes it), and one record batch per document (fms-fsdp writes it). Buffers are used
at their place in the file, so they must not be compressed. Nothing is memory-mapped or copied but the offsets
of the documents asked for.

Invariant: positions of tokens in a shard are counted with the delimiters that the stream adds (`delimiter` =
1 a document).

Source: Arrow columnar format, "IPC file format" and format/{File,Message}.fbs; FlatBuffers internals.
"""

from __future__ import annotations

import os
import re
import struct
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from fms_fsdp.data.order.permute import I64
from fms_fsdp.data.shards.files import Files
from fms_fsdp.safe_names import shown_name

MAGIC = b"ARROW1"
_RECORD_BATCH = 3  # MessageHeader.RecordBatch
_SAMPLED_TOKENS = 1 << 16
_PADDING = 64  # buffers and bodies are padded to a multiple of 8 or of 64 bytes
_NUMBERS = ("n_docs", "n_tokens", "max_token_id", "vocab_size", "sep_token")  # of a shard's metadata
_OFFSETS_MARGIN = 512  # documents read to either side of where the average length suggests
_BLOCK = np.dtype([("offset", "<i8"), ("metadata", "<i4"), ("pad", "<i4"), ("body", "<i8")])
_BUFFER = np.dtype([("offset", "<i8"), ("length", "<i8")])
CONVERT = "write it anew with `python -m fms_fsdp convert --input=NAME=PATH --output=DIR`"


class ShardError(ValueError):
    """A shard that cannot be used, in one line that names it; `document` and the step are added where they
    are known."""


class TokenError(ShardError):
    """A token beyond the vocabulary: the wrong vocabulary or tokenizer, which no masking of rows makes
    good."""


class MissingShardError(ShardError, FileNotFoundError):
    """A shard that is not there."""

    def __str__(self) -> str:
        return str(self.args[0])


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
        self.path, self._files, self._delimiter = path, files, delimiter
        with self._errors_named():
            self._size = files.size(path)
            blocks, schema = self._read_footer()
            self.metadata = {key.decode(): value.decode() for key, value in (schema.metadata or {}).items()}
            self.dtype, self.is_list, self._offset_type = self._token_type(schema)
            if self.is_list:
                layouts = [
                    self._list_layout(*block) for block in blocks[["offset", "metadata", "body"]].tolist()
                ]
                table: I64 = np.array(layouts, dtype=np.int64).reshape(-1, 4)
                self._chunk_docs, self._chunk_tokens, self._offsets_at, self._values_at = table.T
                self.num_docs = int(self._chunk_docs.sum())
            else:
                self._blocks = blocks
                self.num_docs = len(blocks)
            self._check_metadata()

    @cached_property
    def _scalars(self) -> tuple[I64, I64]:
        """Where each document starts in the shard (one more than documents), and its byte position: where
        each has a record batch of its own. Reads the length of every one."""
        with self._errors_named():
            lengths, addresses = self._scalar_layout(self._blocks)
        added = np.arange(len(lengths) + 1, dtype=np.int64) * self._delimiter
        return np.concatenate([[0], np.cumsum(lengths)]) + added, addresses

    @cached_property
    def num_tokens(self) -> int:
        """Tokens on disk."""
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
        """Bytes that this object holds, about."""
        return 2304 + (64 * len(self._chunk_docs) if self.is_list else 48 * self.num_docs)

    def documents(self, chunk: int, start: int, stop: int) -> Documents:
        """Returns the documents of a chunk that overlap its tokens [start, stop), delimiters counted; start <
        stop.

        Where offsets are on disk only the part around the place that the average length suggests is read,
        more if need be.
        """
        if not self.is_list:
            starts, addresses = self._scalars
            first, last = (
                np.searchsorted(starts, start, side="right") - 1,
                np.searchsorted(starts, stop, side="left"),
            )
            return Documents(int(first), starts[first : last + 1], addresses[first:last])
        num_docs, length = (
            int(self._chunk_docs[chunk]),
            int(self.chunk_starts[chunk + 1] - self.chunk_starts[chunk]),
        )
        width, margin, tokens = self._offset_type.itemsize, _OFFSETS_MARGIN, int(self._chunk_tokens[chunk])
        while True:
            low = max(0, start * num_docs // length - margin)
            high = min(num_docs, stop * num_docs // length + margin)
            raw = self._read((high - low + 1) * width, int(self._offsets_at[chunk]) + low * width)
            offsets = np.frombuffer(raw, self._offset_type).astype(np.int64)
            starts = offsets + np.arange(low, high + 1) * self._delimiter
            inside = offsets[0] >= 0 if low else offsets[0] == 0
            inside &= offsets[-1] <= tokens if high < num_docs else offsets[-1] == tokens
            if inside and starts[0] <= start and starts[-1] >= stop and (offsets[1:] >= offsets[:-1]).all():
                break
            if (low, high) == (0, num_docs):
                raise self._error("has offsets that disagree with its length", CONVERT)
            margin *= 8
        first, last = (
            np.searchsorted(starts, start, side="right") - 1,
            np.searchsorted(starts, stop, side="left"),
        )
        addresses = self._values_at[chunk] + offsets[first:last] * self.dtype.itemsize
        number = int(self._chunk_docs[:chunk].sum()) + low + int(first)
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
        raw = self._read(2 * width, int(self._offsets_at[chunk]) + local * width)
        start, stop = np.frombuffer(raw, self._offset_type).tolist()
        base = int(self.chunk_starts[chunk]) + local * self._delimiter
        return base + start, base + stop + self._delimiter

    def chunk(self, number: int) -> Documents:
        """Returns all documents of a chunk (those of length 0 at its edges may be left out), lengths checked
        against its own."""
        length = int(self.chunk_starts[number + 1] - self.chunk_starts[number])
        if length == 0:
            return Documents(0, np.zeros(1, dtype=np.int64), np.empty(0, dtype=np.int64))
        found = self.documents(number, 0, length)
        if (
            found.starts[0] != 0
            or found.starts[-1] != length
            or (np.diff(found.starts) < self._delimiter).any()
        ):
            raise self._error("has offsets that disagree with its length", CONVERT)
        return found

    def document_at(self, address: int) -> int:
        """Returns the number in the file of the document whose tokens lie at a byte position."""
        if not self.is_list:
            return int(np.searchsorted(self._scalars[1], address, side="right")) - 1
        chunk = int(np.searchsorted(self._values_at, address, side="right")) - 1
        found = self.documents(chunk, 0, int(self.chunk_starts[chunk + 1] - self.chunk_starts[chunk]))
        return found.first + int(np.searchsorted(found.addresses, address, side="right")) - 1

    def last_tokens(self, limit: int) -> list[int]:
        """Returns the last tokens on disk of the first documents that have any, of up to `limit`
        documents."""
        if self.is_list:
            chunk = next((i for i, tokens in enumerate(self._chunk_tokens.tolist()) if tokens), None)
            if chunk is None:
                return []
            stop = int(self.chunk_starts[chunk + 1] - self.chunk_starts[chunk])
            found = self.documents(chunk, 0, min(stop, _SAMPLED_TOKENS))
            lengths, addresses = np.diff(found.starts) - self._delimiter, found.addresses
        else:
            with self._errors_named():
                lengths, addresses = self._scalar_layout(self._blocks[:limit])
        width = self.dtype.itemsize
        ends = addresses[:limit] + (lengths[:limit] - 1) * width
        data = [self._read(width, end) for end in ends[lengths[:limit] > 0].tolist()]
        return [int.from_bytes(token, "little") for token in data]

    @contextmanager
    def _errors_named(self) -> Iterator[None]:
        """Turns what goes wrong in reading metadata into errors that name the shard."""
        try:
            yield
        except ShardError:
            raise
        except FileNotFoundError:
            remedy = "restore it or --on_missing=mask"
            raise MissingShardError(
                f"shard ({self.path}) is missing in {self._files.root}; {remedy}"
            ) from None
        except OSError as error:
            reason = os.strerror(error.errno) if error.errno else str(error)
            raise self._error(
                f"cannot be read: {reason}", "check the storage or --on_missing=mask"
            ) from error
        except (
            struct.error,
            LookupError,
            OverflowError,
            ValueError,
            NotImplementedError,
            TypeError,
        ) as error:
            raise self._damaged() from error

    def _error(self, rule: str, remedy: str) -> ShardError:
        return ShardError(f"shard ({self.path}) {rule}; {remedy}")

    def _damaged(self) -> ShardError:
        return self._error("has damaged metadata", f"restore it or {CONVERT}")

    def _read(self, size: int, offset: int) -> bytes:
        if (
            min(size, offset) < 0 or offset + size > self._size
        ):  # what says so is wrong; nothing is allocated for it
            raise self._damaged()
        data = self._files.pread(self.path, size, offset)
        if len(data) != size:
            raise self._error(
                f"ends {size - len(data)} bytes early", "it is truncated: restore it or --on_missing=mask"
            )
        return data

    def _read_footer(self) -> tuple[npt.NDArray[np.void], Any]:
        import pyarrow as pa

        size = self._size
        if size == 0:
            raise self._error("is empty (0 bytes)", "restore it or remove it")
        end = self._files.pread(self.path, 10, max(0, size - 10))
        if size < 32 or end[4:] != MAGIC or self._read(6, 0) != MAGIC:
            raise self._error(
                "is not a whole Arrow IPC file",
                f"it is truncated or of another format: restore it or {CONVERT}",
            )
        length = int.from_bytes(end[:4], "little")
        footer = _Table.root(self._read(length, size - 10 - length))
        head = self._read(8, 8)
        prefix = 8 if head[:4] == b"\xff\xff\xff\xff" else 4
        message_size = prefix + int.from_bytes(head[prefix - 4 : prefix], "little")
        schema = pa.ipc.read_schema(pa.py_buffer(self._read(message_size, 8)))
        blocks = footer.vector(3, _BLOCK)
        parts = np.stack([blocks[name].astype(np.int64) for name in ("offset", "metadata", "body")])
        begins, ends = np.append(parts[0], size - 10 - length), np.append(8 + message_size, parts.sum(axis=0))
        gaps = begins - ends  # between schema, batches and footer: an end mark of 8 bytes, and padding
        if (parts < 0).any() or (parts > size).any() or (gaps < 0).any() or (gaps >= _PADDING).any():
            raise self._damaged()
        return blocks, schema

    def _check_metadata(self) -> None:
        """Refuses metadata that could be misunderstood, or that counts otherwise."""
        for name, value in self.metadata.items():
            if name in _NUMBERS and value and not re.fullmatch("[0-9]{1,18}", value, re.ASCII):
                raise self._error(f"says {name} ({shown_name(value)}), which must be a whole number", CONVERT)
            if name == "has_eos" and value not in ("true", "false"):
                raise self._error(f"says {name} ({shown_name(value)}), which must be true or false", CONVERT)
        counts = {"n_docs": self.num_docs, **({"n_tokens": self.num_tokens} if self.is_list else {})}
        for name, count in counts.items():
            if self.metadata.get(name, "") not in ("", str(count)):
                raise self._error(
                    f"holds {count} where its metadata says {name} {self.metadata[name]}", CONVERT
                )

    def _token_type(self, schema: Any) -> tuple[np.dtype[Any], bool, np.dtype[Any]]:
        import pyarrow as pa

        if schema.names != ["tokens"]:
            raise self._error(
                f"must have one column `tokens`, not {shown_name(', '.join(schema.names))}", CONVERT
            )
        kind = schema.field(0).type
        is_list = pa.types.is_list(kind) or pa.types.is_large_list(kind)
        value = kind.value_type if is_list else kind
        if not pa.types.is_integer(value):
            raise self._error(f"must hold integers in column `tokens`, not {kind}", CONVERT)
        offsets = np.dtype("<i8" if pa.types.is_large_list(kind) else "<i4")
        signless = {1: "uint8", 2: "uint16", 4: "uint32", 8: "uint64"}[
            value.bit_width // 8
        ]  # negative ids turn out too large
        return np.dtype(signless), is_list, offsets

    def _message(self, offset: int, size: int) -> tuple[_Table, int]:
        """Returns the RecordBatch table of the message at `offset`, and where its FlatBuffers root starts in
        the file."""
        data = self._read(size, offset)
        prefix = 8 if data[:4] == b"\xff\xff\xff\xff" else 4
        message = _Table.root(data[prefix:])
        if (
            int.from_bytes(data[prefix - 4 : prefix], "little") + prefix != size
            or message.scalar(1, "<B") != _RECORD_BATCH
        ):
            raise self._damaged()
        batch = message.table(2)
        if batch.position(3):
            raise self._error("has compressed buffers, which cannot be read in place", CONVERT)
        return batch, offset + prefix

    def _list_layout(self, offset: int, size: int, length: int) -> tuple[int, int, int, int]:
        """Returns (documents, tokens, position of the offsets, position of the values) of a record batch of
        lists, whose body has `length` bytes."""
        batch, _ = self._message(offset, size)
        nodes, buffers = (
            batch.vector(1, _BUFFER),
            batch.vector(2, _BUFFER),
        )  # a FieldNode is (length, null_count)
        num_docs, num_tokens = int(nodes["offset"][0]), int(nodes["offset"][1])
        if nodes["length"].any():
            raise self._error("has null documents or tokens", CONVERT)
        at = 0
        for start, used in buffers.tolist():
            if not at <= start < at + _PADDING or start % 8 or used < 0:
                raise self._damaged()
            at = start + used
        enough = int(buffers["length"][3]) >= num_tokens * self.dtype.itemsize >= 0
        enough &= int(buffers["length"][1]) >= (num_docs + 1) * self._offset_type.itemsize or num_docs == 0
        if (
            not enough
            or not at <= length < at + _PADDING
            or batch.scalar(0, "<q") != num_docs
            or num_docs < 0
        ):
            raise self._damaged()
        body = offset + size
        return num_docs, num_tokens, body + int(buffers["offset"][1]), body + int(buffers["offset"][3])

    def _scalar_layout(self, blocks: npt.NDArray[np.void]) -> tuple[I64, I64]:
        """Returns (length, byte position) of the document in each record batch of plain integers.

        The writer gives all messages of a kind the same shape, so the length lies at the same place in each:
        they are gathered at once and checked against the size of the body. Any doubt, and the messages are
        read one by one.
        """
        body = blocks["body"].astype(np.int64)
        message_at, metadata = blocks["offset"].astype(np.int64), blocks["metadata"].astype(np.int64)
        lengths, addresses = np.zeros_like(body), message_at + metadata
        filled = np.flatnonzero(body > 0)
        if len(filled) == 0:
            return lengths, addresses
        batch, root_at = self._message(int(message_at[filled[0]]), int(metadata[filled[0]]))
        length_at = root_at - int(message_at[filled[0]]) + batch.position(0)
        first_buffer = int(batch.vector(2, _BUFFER)["offset"][1])
        if first_buffer == 0 and (metadata[filled] == metadata[filled[0]]).all():
            lengths[filled] = self._files.gather_int64(self.path, message_at[filled] + length_at)
            spare = body[filled] // self.dtype.itemsize - lengths[filled]
            most = np.where(body[filled] % _PADDING, 8, _PADDING) // self.dtype.itemsize
            if (lengths[filled] > 0).all() and (spare >= 0).all() and (spare < most).all():
                return lengths, addresses
        for i in filled.tolist():
            batch, _ = self._message(int(message_at[i]), int(metadata[i]))
            ((length, num_nulls),) = batch.vector(1, _BUFFER).tolist()  # a FieldNode
            start, used = batch.vector(2, _BUFFER)[1].tolist()
            if num_nulls:
                raise self._error("has null tokens", CONVERT)
            if not 0 <= length * self.dtype.itemsize <= used or not 0 <= start <= int(body[i]) - used:
                raise self._damaged()
            if length != batch.scalar(0, "<q"):
                raise self._damaged()
            lengths[i] = length
            addresses[i] += start
        return lengths, addresses


class _Table:
    """Read-only view of one FlatBuffers table: fields by number, defaults zero or empty."""

    def __init__(self, data: bytes, at: int) -> None:
        self._data, self._at = data, at
        self._vtable = at - struct.unpack_from("<i", data, at)[0]
        self._vtable_size = struct.unpack_from("<H", data, self._vtable)[0]

    @classmethod
    def root(cls, data: bytes) -> _Table:
        """Returns the table that a FlatBuffers message consists of."""
        return cls(data, struct.unpack_from("<I", data, 0)[0])

    def position(self, field: int) -> int:
        """Returns where the field's value lies in the data, or 0 if it has its default."""
        entry = 4 + 2 * field
        offset = (
            struct.unpack_from("<H", self._data, self._vtable + entry)[0] if entry < self._vtable_size else 0
        )
        return self._at + offset if offset else 0

    def scalar(self, field: int, form: str) -> int:
        """Returns an integer field, read with a `struct` format."""
        at = self.position(field)
        return int(struct.unpack_from(form, self._data, at)[0]) if at else 0

    def table(self, field: int) -> _Table:
        """Returns a field that is a table."""
        at = self.position(field)
        return _Table(self._data, at + struct.unpack_from("<I", self._data, at)[0])

    def vector(self, field: int, dtype: npt.DTypeLike) -> npt.NDArray[np.void]:
        """Returns a field that is a vector of structs."""
        at = self.position(field)
        if not at:
            return np.empty(0, dtype)
        at += struct.unpack_from("<I", self._data, at)[0]
        return np.frombuffer(self._data, dtype, struct.unpack_from("<I", self._data, at)[0], at + 4)
