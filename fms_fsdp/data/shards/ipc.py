"""The bytes of an Arrow IPC file: where it starts its record batches, and where these keep their buffers.

    file     = magic, schema message, record batch messages, footer (where each record batch starts)
    message  = FlatBuffers metadata (lengths, where each buffer starts), body (the buffers)

Buffers are used at their place in the file, so they must not be compressed. Nothing is memory-mapped: ranges
of bytes can be read from every storage, and a file that is cut while it is read ends in an error, not in a
signal.

Source: Arrow columnar format, "IPC file format" and format/{File,Message}.fbs; FlatBuffers internals.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from fms_fsdp.data.shards.files import Files
from fms_fsdp.errors import MissingInput, UserError

if TYPE_CHECKING:
    import pyarrow as pa

MAGIC = b"ARROW1"
_RECORD_BATCH = 3  # MessageHeader.RecordBatch
PADDING = 64  # buffers and bodies are padded to a multiple of 8 or of 64 bytes
_BLOCK = np.dtype([("offset", "<i8"), ("metadata", "<i4"), ("pad", "<i4"), ("body", "<i8")])
BUFFER = np.dtype([("offset", "<i8"), ("length", "<i8")])
_MISREAD = (struct.error, LookupError, OverflowError, ValueError, NotImplementedError, TypeError)
CONVERT = "write the shard anew with `python -m fms_fsdp convert --input=NAME=PATH --output=DIR`"


class ShardError(UserError):
    """A shard that cannot be used, in one line that names it; `document` and the step are added where they
    are known."""


class TokenError(ShardError):
    """A token beyond the vocabulary: the wrong vocabulary or tokenizer, which no masking of rows makes
    good."""


class MissingShardError(ShardError, MissingInput):
    """A shard that is not there."""


class ArrowFile:
    """An Arrow IPC file of the corpus. What is wrong with it is raised as a ShardError that names it."""

    def __init__(self, files: Files, path: str) -> None:
        self.path, self.files = path, files
        with self.errors_named():
            self.size = files.size(path)

    @contextmanager
    def errors_named(self) -> Iterator[None]:
        """Turns what goes wrong in reading metadata into errors that name the shard."""
        try:
            yield
        except ShardError:
            raise
        except FileNotFoundError:
            remedy = "restore the shard or set --on_missing=mask"
            text = f"shard ({self.path}) is missing in {self.files.root}; {remedy}"
            raise MissingShardError(text) from None
        except OSError as error:
            reason = os.strerror(error.errno) if error.errno else str(error)
            remedy = "check the storage or set --on_missing=mask"
            raise self.error(f"cannot be read: {reason}", remedy) from error
        except _MISREAD as error:
            raise self.damaged() from error

    def error(self, rule: str, remedy: str = CONVERT) -> ShardError:
        """Returns an error that names the file."""
        return ShardError(f"shard ({self.path}) {rule}; {remedy}")

    def damaged(self) -> ShardError:
        """Returns the error for metadata that contradict themselves."""
        return self.error("has damaged metadata", f"restore the shard or {CONVERT}")

    def read(self, size: int, offset: int) -> bytes:
        """Returns `size` bytes at `offset`. Raises: ShardError."""
        if min(size, offset) < 0 or offset + size > self.size:  # what says so is wrong; nothing is allocated
            raise self.damaged()
        data = self.files.pread(self.path, size, offset)
        if len(data) != size:
            remedy = "the file is truncated: restore the shard or set --on_missing=mask"
            raise self.error(f"ends {size - len(data)} bytes early", remedy)
        return data

    def footer(self) -> tuple[npt.NDArray[np.void], pa.Schema]:
        """Returns where each record batch lies, and the schema."""
        import pyarrow as pa

        size = self.size
        if size == 0:
            raise self.error("is empty (0 bytes)", "restore or remove the shard")
        end = self.files.pread(self.path, 10, max(0, size - 10))
        if size < 32 or end[4:] != MAGIC or self.read(6, 0) != MAGIC:
            remedy = f"the file is truncated or of another format: restore the shard or {CONVERT}"
            raise self.error("is not a whole Arrow IPC file", remedy)
        length = int.from_bytes(end[:4], "little")
        footer = _Table.root(self.read(length, size - 10 - length))
        head = self.read(8, 8)
        prefix = 8 if head[:4] == b"\xff\xff\xff\xff" else 4
        message_size = prefix + int.from_bytes(head[prefix - 4 : prefix], "little")
        schema = pa.ipc.read_schema(pa.py_buffer(self.read(message_size, 8)))
        blocks = footer.vector(3, _BLOCK)
        parts = np.stack([blocks[name].astype(np.int64) for name in ("offset", "metadata", "body")])
        begins, ends = np.append(parts[0], size - 10 - length), np.append(8 + message_size, parts.sum(axis=0))
        gaps = begins - ends  # between schema, batches and footer: an end mark of 8 bytes, and padding
        if (parts < 0).any() or (parts > size).any() or (gaps < 0).any() or (gaps >= PADDING).any():
            raise self.damaged()
        return blocks, schema

    def message(self, offset: int, size: int) -> tuple[_Table, int]:
        """Returns the RecordBatch table of the message at `offset`, and where its FlatBuffers root starts in
        the file."""
        data = self.read(size, offset)
        prefix = 8 if data[:4] == b"\xff\xff\xff\xff" else 4
        message = _Table.root(data[prefix:])
        length = int.from_bytes(data[prefix - 4 : prefix], "little")
        if prefix + length != size or message.scalar(1, "<B") != _RECORD_BATCH:
            raise self.damaged()
        batch = message.table(2)
        if batch.position(3):
            raise self.error("has compressed buffers, which cannot be read in place")
        return batch, offset + prefix

    def list_layout(self, block: np.void, offset_width: int, width: int) -> tuple[int, int, int, int]:
        """Returns (documents, tokens, position of the offsets, position of the values) of a record batch of
        lists.

        `offset_width` and `width` are the bytes of an offset and of a value.
        """
        offset, size, length = (int(block[name]) for name in ("offset", "metadata", "body"))
        batch, _ = self.message(offset, size)
        nodes, buffers = batch.vector(1, BUFFER), batch.vector(2, BUFFER)  # a node is (length, null_count)
        num_docs, num_tokens = int(nodes["offset"][0]), int(nodes["offset"][1])
        if nodes["length"].any():
            raise self.error("has null documents or tokens")
        at = 0
        for start, used in buffers.tolist():
            if not at <= start < at + PADDING or start % 8 or used < 0:
                raise self.damaged()
            at = start + used
        enough = int(buffers["length"][3]) >= num_tokens * width >= 0
        enough &= int(buffers["length"][1]) >= (num_docs + 1) * offset_width or num_docs == 0
        ends = at <= length < at + PADDING
        if not enough or not ends or batch.scalar(0, "<q") != num_docs or num_docs < 0:
            raise self.damaged()
        body = offset + size
        return num_docs, num_tokens, body + int(buffers["offset"][1]), body + int(buffers["offset"][3])


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
        if entry >= self._vtable_size:
            return 0
        offset: int = struct.unpack_from("<H", self._data, self._vtable + entry)[0]
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
