"""A shard of token ids: an Arrow IPC file, of which only the tokens of a sequence are read.

Two layouts of a column `tokens` are read in place, uncompressed: one list of integers per document,
many in a record batch (`prepare` writes it), and one record batch per document (upstream fms-fsdp
writes it). An open shard hides the difference: it has the first token and the file offset of each
document.

The offsets of record batches and buffers are parsed here, because pyarrow returns them only by
reading or mapping the whole file. A mapped file would end the process with SIGBUS where a shard is
truncated or a network disk fails.
Source: Arrow columnar format, "IPC file format", File.fbs, Message.fbs.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import cached_property
from itertools import pairwise
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from fms_fsdp.data.permute import I64
from fms_fsdp.errors import MissingInput, UserError
from fms_fsdp.files import shown_name

NO_LOSS = 1 << 31  # the bit of a token that is not in the loss, in shards with `has_masks`
CONVERT = "rewrite the shard with `python -m fms_fsdp convert --input=NAME=PATH --output=DIR`"
RESTORE = "restore the shard or set --on_missing=mask"
_HEAD = 1 << 16  # bytes, more than a schema has
_READ_SIZE = 1 << 18  # bytes read at a time for the lengths of documents
_MAGIC = b"ARROW1"
_RECORD_BATCH = 3
_BLOCK = np.dtype([("offset", "<i8"), ("metadata", "<i4"), ("pad", "<i4"), ("body", "<i8")])
_PAIR = np.dtype([("first", "<i8"), ("second", "<i8")])  # (length, nulls) or (offset, length)
_MISREAD = (struct.error, ValueError, LookupError, OverflowError, TypeError, NotImplementedError)


class Files(Protocol):
    """The methods of a storage that the stream calls; see `storage.Storage`."""

    root: str
    is_remote: bool

    @property
    def sizes(self) -> Mapping[str, int | None]: ...
    def size(self, path: str) -> int: ...
    def read(self, path: str, size: int, offset: int) -> bytes: ...
    def prefetch(self, path: str, ranges: Iterable[tuple[int, int]]) -> None: ...
    def prefetch_ends(self, path: str) -> None: ...
    def real_paths(self, paths: Iterable[str]) -> dict[str, str]: ...
    def open_shard(self, path: str, delimiter: int = 0) -> Shard: ...
    def close(self) -> None: ...


class ShardError(UserError):
    """Raised for a shard that cannot be used; the text names it."""


class TokenError(ShardError):
    """Raised for a token beyond the vocabulary, which --on_missing=mask does not hide."""


class MissingShardError(ShardError, MissingInput):
    """Raised for a shard that does not exist."""


class Shard:
    """An open shard, whose documents are read on demand.

    width       bytes per token
    delimiter   tokens that the stream adds to each document, 0 or 1
    """

    def __init__(self, storage: Files, path: str, delimiter: int = 0) -> None:
        """Reads the footer and the schema.

        Raises:
            ShardError: the shard does not exist or is not valid.
        """
        self.path = path
        self.delimiter = delimiter
        self._storage = storage
        if path not in storage.sizes:
            raise MissingShardError(f"shard {path} does not exist in {storage.root}; {RESTORE}")
        try:
            self.size = storage.size(path)
        except OSError as error:
            raise self._unreadable(error) from error
        with self._errors_named():
            self.metadata, value, self._offset_type = self._read_schema()
            self.width, self._blocks = value.bit_width // 8, self._read_blocks()
            self.is_list = self._offset_type is not None
            self.num_docs = len(self._blocks)
            if self.is_list:
                self._batches = [self._batch(block) for block in self._blocks]
                self.num_docs = sum(int(nodes["first"][0]) for nodes, _, _ in self._batches)
            self.has_masks = self.metadata.get("has_masks") == "true"
            self._check_metadata("n_docs", self.num_docs)

    @cached_property
    def documents(self) -> tuple[I64, I64]:
        """Returns the first token of each document in the shard, and at the end the number of
        tokens; and the file offset of each document."""
        with self._errors_named():
            lengths, addresses = self._lists() if self.is_list else self._scalars(self._blocks)
            if len(lengths) and (lengths.min() < 0 or addresses.max() > self.size):
                raise self.error("has offsets that do not match its length")
            starts: I64 = np.zeros(len(lengths) + 1, np.int64)
            np.cumsum(lengths + self.delimiter, out=starts[1:])
            self._check_metadata("n_tokens", int(lengths.sum()))
            return starts, addresses

    @property
    def num_tokens(self) -> int:
        """Returns the number of tokens in the file, without added ones."""
        if self.is_list:
            return sum(int(nodes["first"][1]) for nodes, _, _ in self._batches)
        return int(self.documents[0][-1]) - self.delimiter * self.num_docs

    @property
    def nbytes(self) -> int:
        return 2048 + 16 * self.num_docs + self._blocks.nbytes

    @contextmanager
    def _errors_named(self) -> Iterator[None]:
        try:
            yield
        except ShardError:
            raise
        except (
            OSError,
            *_MISREAD,
        ) as error:  # pyarrow's OSError; `read` names those of the storage
            raise self.error("has corrupt metadata", f"{RESTORE}, or {CONVERT}") from error

    def _check_metadata(self, name: str, count: int) -> None:
        if self.metadata.get(name, str(count)) != str(count):
            raise self.error(f"has {count}, but its metadata has {name}={self.metadata[name]}")

    def _unreadable(self, error: OSError) -> ShardError:
        return ShardError(f"shard {self.path} cannot be read: {error}; {RESTORE}")

    def error(self, rule: str, remedy: str = CONVERT) -> ShardError:
        return ShardError(f"shard {self.path} {rule}; {remedy}")

    def read(self, size: int, offset: int) -> bytes:
        """Returns `size` bytes at `offset`.

        Raises:
            ShardError: the file has fewer, or cannot be opened, or the offset came from corrupt metadata.
            ReadFailed: the storage does not answer.
        """
        if min(size, offset) < 0 or offset + size > self.size:
            raise self.error("has corrupt metadata", f"{RESTORE}, or {CONVERT}")
        try:
            data = self._storage.read(self.path, size, offset)
        except OSError as error:
            raise self._unreadable(error) from error
        if len(data) != size:
            raise self.error(f"is truncated by {size - len(data)} bytes", RESTORE)
        return data

    def last_tokens(self, limit: int) -> list[int]:
        """Returns the last stored token of each of the first `limit` documents that have any."""
        if self.is_list:
            starts, addresses = self.documents
            lengths = np.diff(starts[: limit + 1]) - self.delimiter
        else:
            with self._errors_named():
                lengths, addresses = self._scalars(self._blocks[:limit])
        offsets = addresses[:limit] + (lengths - 1) * self.width
        return self._tokens_at(offsets[lengths > 0])

    def first_tokens(self, limit: int) -> list[int]:
        """Returns the first stored token of each of the first `limit` documents that have any."""
        starts, addresses = self.documents
        lengths = np.diff(starts[: limit + 1]) - self.delimiter
        return self._tokens_at(addresses[:limit][lengths > 0])

    def ids(self, data: bytes) -> npt.NDArray[Any]:
        """Returns the token ids of bytes of the file, without loss masks."""
        ids = np.frombuffer(data, f"<u{self.width}")
        if self.has_masks and self.width >= 4:  # 16 bits have no such bit
            return ids & ~np.array(NO_LOSS, ids.dtype)
        return ids

    def _tokens_at(self, addresses: I64) -> list[int]:
        data = b"".join(self.read(self.width, address) for address in addresses.tolist())
        tokens: list[int] = self.ids(data).tolist()
        return tokens

    def _read_schema(self) -> tuple[Mapping[str, str], Any, str | None]:
        """Returns the metadata, the type of the tokens, and the type of the offsets of lists.

        The last one is None without lists.
        """
        if self.size < 32 or self.read(6, self.size - 6) != _MAGIC:
            raise self.error("is not a complete Arrow IPC file", f"{RESTORE}, or {CONVERT}")
        import pyarrow as pa  # runs on synthetic tokens need none of it

        schema = pa.ipc.read_schema(pa.py_buffer(self.read(min(_HEAD, self.size - 8), 8)))
        if schema.names != ["tokens"]:
            columns = shown_name(", ".join(schema.names))
            raise self.error(f"must have one column `tokens`, not {columns}")
        kind = schema.field(0).type
        offsets = None
        if pa.types.is_list(kind) or pa.types.is_large_list(kind):
            offsets = "<i8" if pa.types.is_large_list(kind) else "<i4"
            kind = kind.value_type
        if not pa.types.is_integer(kind):
            raise self.error(f"must have integers in column `tokens`, not {kind}")
        metadata = {k.decode(): v.decode() for k, v in (schema.metadata or {}).items()}
        for name in ("n_docs", "n_tokens", "max_token_id", "vocab_size", "sep_token"):
            if not re.fullmatch("[0-9]{0,18}", metadata.get(name, ""), re.ASCII):
                shown = shown_name(metadata[name])
                raise self.error(f"has {name}={shown}, which must be an integer")
        if metadata.get("has_eos") not in (None, "true", "false"):
            shown = shown_name(metadata["has_eos"])
            raise self.error(f"has has_eos={shown}, which must be true or false")
        return metadata, kind, offsets

    def _read_blocks(self) -> npt.NDArray[Any]:
        """Returns offset and sizes of each record batch, from the footer of the file.

        They must fill the file from the schema to the footer, without more than padding and an end
        mark between them, so that no corrupt offset hides documents.
        """
        length = int.from_bytes(self.read(4, self.size - 10), "little")
        footer_at = self.size - 10 - length
        footer = self.read(length, footer_at)
        blocks = _structs(footer, _follow(footer, 0), 3, _BLOCK)
        schema_end = 16 + int.from_bytes(self.read(4, 12), "little")
        ends = blocks["offset"] + blocks["metadata"] + blocks["body"]
        gaps = np.append(blocks["offset"], footer_at) - np.append(schema_end, ends)
        sizes = np.minimum(blocks["metadata"], blocks["body"])
        if (gaps < 0).any() or (gaps >= 64).any() or (sizes < 0).any():
            raise self.error("has corrupt metadata", f"{RESTORE}, or {CONVERT}")
        return blocks

    def _batch(self, block: np.void) -> tuple[npt.NDArray[Any], npt.NDArray[Any], int]:
        """Returns the nodes (length, nulls) and buffers (offset, length) of a record batch, and the
        offset in the message of the length of its first node."""
        data = self.read(int(block["metadata"]), int(block["offset"]))
        message = _follow(data, 8)
        batch = _follow(data, _field(data, message, 2))
        if data[_field(data, message, 1)] != _RECORD_BATCH or _field(data, batch, 3):
            raise self.error("has compressed buffers, which cannot be read in place")
        nodes = _structs(data, batch, 1, _PAIR)
        buffers = _structs(data, batch, 2, _PAIR)
        if nodes["second"].any():
            raise self.error("has null documents or tokens")
        return nodes, buffers, _follow(data, _field(data, batch, 1)) + 4

    def _lists(self) -> tuple[I64, I64]:
        """Returns length and address of each document of record batches of lists."""
        lengths = []
        addresses = []
        offset_type = np.dtype(self._offset_type)
        for block, (nodes, buffers, _) in zip(self._blocks, self._batches, strict=True):
            body = int(block["offset"] + block["metadata"])
            documents, tokens = nodes["first"].tolist()
            if buffers["second"][3] < tokens * self.width:
                raise self.error("has offsets that do not match its length")
            data = self.read(
                (documents + 1) * offset_type.itemsize, body + int(buffers["first"][1])
            )
            offsets = np.frombuffer(data, offset_type).astype(np.int64)
            if documents and (offsets[0], offsets[-1]) != (0, tokens):
                raise self.error("has offsets that do not match its length")
            lengths.append(np.diff(offsets))
            addresses.append(body + int(buffers["first"][3]) + offsets[:-1] * self.width)
        none: I64 = np.zeros(0, np.int64)
        return np.concatenate([none, *lengths]), np.concatenate([none, *addresses])

    def _scalars(self, blocks: npt.NDArray[Any]) -> tuple[I64, I64]:
        """Returns length and address of the document in each record batch of plain integers.

        All messages of a writer have the same form, so the length is at the same offset in each;
        it is compared with the size of the body.
        """
        body = blocks["body"]
        lengths = np.zeros(len(blocks), np.int64)
        filled = np.flatnonzero(body)  # an empty document has no body, and a shorter message
        if len(filled):
            _, buffers, length_offset = self._batch(blocks[filled[0]])
            lengths[filled] = self._gather(blocks["offset"][filled] + length_offset)
            spare = body[filled] - lengths[filled] * self.width
            odd = (blocks["metadata"][filled] != blocks["metadata"][filled[0]]).any()
            padding = np.where(body[filled] % 64, 8, 64)  # writers pad to either
            if odd or buffers["first"][1] or (spare < 0).any() or (spare >= padding).any():
                raise self.error("has record batches of different forms")
        return lengths, blocks["offset"] + blocks["metadata"]

    def _gather(self, offsets: I64) -> I64:
        """Returns the int64 at each (ascending) offset of the file, with few reads."""
        edges = [0, *(np.flatnonzero(np.diff(offsets // _READ_SIZE)) + 1).tolist(), len(offsets)]
        self._storage.prefetch(self.path, [(int(offsets[0]), int(offsets[-1]))])
        words = []
        for first, last in pairwise(edges):
            begin = int(offsets[first])
            stop = int(offsets[last - 1]) + 8
            data = np.frombuffer(self.read(stop - begin, begin), np.uint8)
            starts = offsets[first:last] - begin
            eight_bytes = data[starts[:, None] + np.arange(8)]  # (words, 8)
            words.append(eight_bytes.view("<i8")[:, 0])
        return np.concatenate(words)


def _field(data: bytes, table: int, number: int) -> int:
    """Returns the offset of a field of a FlatBuffers table, 0 if it has its default."""
    vtable = table - struct.unpack_from("<i", data, table)[0]
    if 4 + 2 * number >= struct.unpack_from("<H", data, vtable)[0]:
        return 0
    offset: int = struct.unpack_from("<H", data, vtable + 4 + 2 * number)[0]
    return table + offset if offset else 0


def _follow(data: bytes, at: int) -> int:
    """Returns the offset that the reference at an offset points to."""
    return at + int(struct.unpack_from("<I", data, at)[0])


def _structs(data: bytes, table: int, number: int, dtype: np.dtype[Any]) -> npt.NDArray[Any]:
    """Returns a field that is a vector of structs."""
    at = _follow(data, _field(data, table, number))
    return np.frombuffer(data, dtype, struct.unpack_from("<I", data, at)[0], at + 4)
