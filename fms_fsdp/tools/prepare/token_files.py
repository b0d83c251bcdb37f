"""Documents of token ids out of the files of other projects.

.idx + .bin   Megatron-LM: int64 lengths and pointers of sequences, documents as ranges of them
.ds + .index  datatrove: ids of 2 or 4 bytes, and where each document ends
.parquet      a column of lists of ids
.arrow        Arrow IPC files or streams with such a column, compressed or not; also fms-fsdp's layout
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import pairwise
from typing import Any

import numpy as np
import pyarrow as pa

from fms_fsdp.data.tokenizer import Tokens
from fms_fsdp.errors import UserError

PATTERNS = ("*.idx", "*.ds", "*.parquet", "*.arrow")
_COLUMNS = ("tokens", "input_ids")
_END_OF_STREAM = b"\xff\xff\xff\xff\0\0\0\0"
_MEGATRON_MAGIC = b"MMIDIDX\x00\x00"
_MEGATRON_TYPES = {1: "u1", 2: "i1", 3: "<i2", 4: "<i4", 5: "<i8", 8: "<u2"}


def ids_file(path: str) -> str:
    """The file that holds the ids: of an index the .bin beside it."""
    return path.removesuffix(".idx") + ".bin" if path.endswith(".idx") else path


def read_token_file(path: str, column: str) -> Iterator[Tokens]:
    """The documents of a file; `column` names the ids in Parquet and Arrow files ("": tokens or input_ids).

    Raises:
        UserError, OSError: the file is none of these formats, or damaged.
    """
    readers = {
        ".idx": _read_megatron,
        ".ds": _read_datatrove,
        ".parquet": _read_parquet_ids,
        ".arrow": _read_arrow_ids,
    }
    if (suffix := os.path.splitext(path)[1]) not in readers:
        raise UserError("is no .idx (of a Megatron pair), .ds, .parquet or .arrow file")
    return readers[suffix](path, column)


def _read_megatron(path: str, _: str) -> Iterator[Tokens]:
    """Documents of an index and its .bin. Source: Megatron-LM, megatron/core/datasets/indexed_dataset.py."""
    with open(path, "rb") as file:
        if file.read(9) != _MEGATRON_MAGIC:
            raise UserError("is not a Megatron index (its first bytes are others)")
        version, code = int.from_bytes(file.read(8), "little"), file.read(1)[0]
        if version != 1 or code not in _MEGATRON_TYPES:
            found = f"is a Megatron index of version {version}, type {code}"
            raise UserError(f"{found}; known: version 1, integers")
        num_sequences, num_edges = (int.from_bytes(file.read(8), "little") for _ in range(2))
        lengths = np.fromfile(file, "<i4", num_sequences)
        pointers = np.fromfile(file, "<i8", num_sequences)
        edges = np.fromfile(file, "<i8", num_edges)
    if len(edges) != num_edges or (len(edges) and edges[-1] > num_sequences):
        raise UserError("is truncated or damaged")
    ids = _mapped(ids_file(path), np.dtype(_MEGATRON_TYPES[code]))
    starts = pointers // ids.dtype.itemsize
    if len(starts) and int((starts + lengths).max()) > len(ids):
        raise UserError(f"points beyond the end of {ids_file(path)}")
    for first, last in pairwise(edges):
        pieces = [ids[starts[i] : starts[i] + lengths[i]] for i in range(first, last)]
        yield np.concatenate([ids[:0], *pieces])


def _read_datatrove(path: str, _: str) -> Iterator[Tokens]:
    """Documents of a .ds file; sizes tell the width of an id.

    Source: datatrove, pipeline/tokens/tokenizer.py.
    """
    ends = np.fromfile(path + ".index", "<u8").astype(np.int64)
    total, size = int(ends[-1]) if len(ends) else 0, os.path.getsize(path)
    if total and size not in (2 * total, 4 * total):
        raise UserError(f"has {size} bytes for {total} tokens of its index; expected 2 or 4 each")
    ids = _mapped(path, np.dtype(f"<u{size // total}" if total else "<u2"))
    for start, end in pairwise([0, *ends]):
        yield ids[start:end]


def _mapped(path: str, dtype: np.dtype[Any]) -> Tokens:
    return np.memmap(path, dtype, "r") if os.path.getsize(path) else np.empty(0, dtype)


def _read_parquet_ids(path: str, column: str) -> Iterator[Tokens]:
    import pyarrow.parquet as pq

    with pq.ParquetFile(path) as file:
        name = _ids_column(file.schema_arrow, column)
        for batch in file.iter_batches(batch_size=1024, columns=[name]):
            yield from _split_lists(batch.column(0))


def _read_arrow_ids(path: str, column: str) -> Iterator[Tokens]:
    with open_arrow(path) as (schema, batches):
        name = _ids_column(schema, column, plain=True)
        for batch in batches:
            yield from _split_lists(batch.column(name))


@contextmanager
def open_arrow(path: str) -> Iterator[tuple[pa.Schema, Iterator[pa.RecordBatch]]]:
    """Schema and batches of an Arrow file or a whole Arrow stream. Raises: OSError, pa.ArrowInvalid."""
    with pa.memory_map(path) as source:
        is_file = source.read(6) == b"ARROW1"  # else a stream, as the package datasets writes
        source.seek(max(0, source.size() - 8))
        if not is_file and source.read() != _END_OF_STREAM:
            raise pa.ArrowInvalid("the file is neither an Arrow file nor a whole Arrow stream")
        source.seek(0)
        reader = pa.ipc.open_file(source) if is_file else pa.ipc.open_stream(source)
        yield reader.schema, map(reader.get_batch, range(reader.num_record_batches)) if is_file else reader


def has_marks(path: str) -> bool:
    """Whether a file is a shard whose prompts are marked; what is wrong with a file is told where it is
    read."""
    if not path.endswith(".arrow"):
        return False
    try:
        with open_arrow(path) as (schema, _):
            return (schema.metadata or {}).get(b"has_masks") == b"true"
    except (OSError, pa.ArrowInvalid):
        return False


def _ids_column(schema: pa.Schema, wanted: str, *, plain: bool = False) -> str:
    """The name of the column of ids: lists of integers, or with `plain` also integers: a batch is a document.

    Raises:
        UserError: no such column, or not lists of integers.
    """
    name = wanted or next((name for name in _COLUMNS if name in schema.names), "")
    if name not in schema.names:
        missing, present = wanted or " or ".join(_COLUMNS), ", ".join(schema.names)
        raise UserError(f"has no column {missing}, only {present}; see --column")
    kind = schema.field(name).type
    holds_lists = pa.types.is_list(kind) or pa.types.is_large_list(kind)
    if not pa.types.is_integer(kind.value_type if holds_lists else kind) or not (holds_lists or plain):
        remedy = "for text use `python -m fms_fsdp prepare`"
        raise UserError(f"column {name} holds {kind}, not lists of integers; {remedy}")
    return name


def _split_lists(array: pa.Array) -> Sequence[Tokens]:
    """The lists of a column, or the whole column where it holds plain integers."""
    is_document = pa.types.is_integer(array.type)
    if array.null_count or (not is_document and array.flatten().null_count):
        raise UserError("holds nulls among its ids")
    if is_document:
        return [array.to_numpy()]
    offsets, values = array.offsets.to_numpy(), array.values.to_numpy()
    return [values[start:stop] for start, stop in pairwise(offsets)]
