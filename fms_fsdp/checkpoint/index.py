"""A table of all shards of a checkpoint, which a rank reads at resume in place of `.metadata`.

`.metadata` is a pickle with several objects per shard: at 1,024 ranks millions of them, of which a
rank needs those that overlap its own shards. The table has a row of integers per shard, so that a
rank reads it at the speed of the disk and makes objects only for what it loads:

    np.save: the tensors as JSON, [[name, size, dtype, number of its last row + 1], …], and the files
    np.save: int64 rows [file, position, length, offset of each dim …, size of each dim …]

Tensors with fewer dims than the table have offsets 0 and sizes 1 after them. `.metadata` stays, for
other readers, and checkpoints without a table are loaded from it.
"""

from __future__ import annotations

import json
from array import array
from io import BytesIO
from typing import Any, BinaryIO

import numpy as np
import torch
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

from fms_fsdp.distributed.dtensor import shard_slices
from fms_fsdp.distributed.torch_private import storage_info

_NUM_PLACES = 3  # columns before the offsets: file, position, length


def build_index(metadata: Metadata) -> bytes:
    """Returns the content of the table."""
    entries: dict[str, Any] = metadata.state_dict_metadata
    num_dims = max((len(entry.size) for entry in entries.values()), default=0)
    rows = array("q")
    num_rows = 0
    files = dict[str, int]()
    tensors = []
    for name, entry in entries.items():
        absent = num_dims - len(entry.size)
        for chunk in entry.chunks:
            stored = metadata.storage_data[MetadataIndex(name, chunk.offsets)]
            file = files.setdefault(stored.relative_path, len(files))
            rows.extend((file, stored.offset, stored.length))
            rows.extend((*chunk.offsets, *[0] * absent))
            rows.extend((*chunk.sizes, *[1] * absent))
        num_rows += len(entry.chunks)
        dtype = str(entry.properties.dtype).removeprefix("torch.")
        tensors.append([name, list(entry.size), dtype, num_rows])
    header = json.dumps({"tensors": tensors, "files": list(files)}).encode()
    table = np.frombuffer(rows, dtype=np.int64).reshape(num_rows, _NUM_PLACES + 2 * num_dims)
    content = BytesIO()
    np.save(content, np.frombuffer(header, dtype=np.uint8))
    np.save(content, table)
    return content.getvalue()


def read_index(file: BinaryIO, tensors: dict[str, torch.Tensor]) -> Metadata:
    """Returns the metadata of a checkpoint, with only those shards that overlap this rank's shards
    of `tensors`. It has the names of all tensors.

    Raises:
        ValueError, KeyError, TypeError, IndexError, EOFError: the table is corrupt.
    """
    header = json.loads(np.load(file, allow_pickle=False).tobytes())
    table = np.load(file, allow_pickle=False)
    files = header["files"]
    if any("/" in name for name in files):  # it could lead anywhere
        raise ValueError("a file is in another folder")
    num_dims = (table.shape[1] - _NUM_PLACES) // 2
    entries = dict[str, Any]()
    storage = dict[MetadataIndex, Any]()
    start = 0
    for name, size, dtype, stop in header["tensors"]:
        rows = table[start:stop]
        start = stop
        offsets = rows[:, _NUM_PLACES : _NUM_PLACES + len(size)]
        sizes = rows[:, _NUM_PLACES + num_dims :][:, : len(size)]
        tensor = tensors.get(name)
        if tensor is not None and list(tensor.shape) == size:
            is_needed = _overlaps(offsets, sizes, tensor)
        else:  # of another rank, or of another shape, which DCP reports
            is_needed = np.zeros(len(rows), dtype=bool)
        chunks = []
        for row in np.flatnonzero(is_needed):
            chunk = ChunkStorageMetadata(
                torch.Size(offsets[row].tolist()), torch.Size(sizes[row].tolist())
            )
            chunks.append(chunk)
            number, position, length = rows[row, :_NUM_PLACES].tolist()
            storage[MetadataIndex(name, chunk.offsets)] = storage_info(
                files[number], position, length
            )
        properties = TensorProperties(dtype=getattr(torch, dtype))
        entries[name] = TensorStorageMetadata(properties, torch.Size(size), chunks)
    return Metadata(entries, storage_data=storage)


def _overlaps(offsets: Any, sizes: Any, tensor: torch.Tensor) -> Any:
    """Returns for each stored shard whether it has elements of this rank's shard of the tensor.

    Raises:
        ValueError: an element is in none, so it would keep an arbitrary value.
    """
    needed = shard_slices(tensor)
    starts = np.array([each.start for each in needed], dtype=np.int64)
    stops = np.array([each.stop for each in needed], dtype=np.int64)
    common = np.minimum(offsets + sizes, stops) - np.maximum(offsets, starts)
    num_common = common.clip(0).prod(axis=1, dtype=np.int64)
    num_needed = (stops - starts).prod(dtype=np.int64)
    if num_common.sum() != num_needed:
        raise ValueError(f"{num_common.sum()} of {num_needed} elements of a tensor are stored")
    return num_common > 0
