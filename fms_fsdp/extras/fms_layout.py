"""Shards as fms-fsdp writes them, read in place: a record batch of plain integers for each document."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import numpy.typing as npt
from numpy.lib.stride_tricks import sliding_window_view

from fms_fsdp.data.order.permute import I64
from fms_fsdp.data.shards.ipc import BUFFER, PADDING, ArrowFile
from fms_fsdp.data.shards.separator import SAMPLED_DOCUMENTS
from fms_fsdp.data.shards.shard import Shard
from fms_fsdp.errors import UserError

_STRETCH, _STRETCHES_AHEAD = 2 << 20, 8  # bytes; those that are asked for at once


def scalar_layout(file: ArrowFile, blocks: npt.NDArray[np.void], width: int) -> tuple[I64, I64]:
    """Returns (length, byte position) of the document in each record batch of plain integers of `width`
    bytes.

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
    batch, root_at = file.message(int(message_at[filled[0]]), int(metadata[filled[0]]))
    length_at = root_at - int(message_at[filled[0]]) + batch.position(0)
    first_buffer = int(batch.vector(2, BUFFER)["offset"][1])
    if first_buffer == 0 and (metadata[filled] == metadata[filled[0]]).all():
        lengths[filled] = gather_int64(file, message_at[filled] + length_at)
        spare = body[filled] // width - lengths[filled]
        most = np.where(body[filled] % PADDING, 8, PADDING) // width
        if (lengths[filled] > 0).all() and (spare >= 0).all() and (spare < most).all():
            return lengths, addresses
    for i in filled.tolist():
        batch, _ = file.message(int(message_at[i]), int(metadata[i]))
        ((length, num_nulls),) = batch.vector(1, BUFFER).tolist()  # a FieldNode
        start, used = batch.vector(2, BUFFER)[1].tolist()
        if num_nulls:
            raise file.error("has null tokens")
        fits = 0 <= length * width <= used and 0 <= start <= int(body[i]) - used
        if not fits or length != batch.scalar(0, "<q"):
            raise file.damaged()
        lengths[i] = length
        addresses[i] += start
    return lengths, addresses


def gather_int64(file: ArrowFile, offsets: I64) -> I64:
    """Returns the little-endian int64 at every offset, ascending, of a file. It is read in stretches; some of
    them are asked for ahead, because a store answers the sooner."""
    edges = np.flatnonzero(np.diff(offsets // _STRETCH)) + 1
    firsts = offsets[np.append(0, edges)]
    sizes = offsets[np.append(edges, len(offsets)) - 1] + 8 - firsts
    words = []
    for i, stretch in enumerate(np.split(offsets, edges)):
        ahead = slice(i, i + _STRETCHES_AHEAD)
        file.files.prefetch(file.path, firsts[ahead], sizes[ahead])
        data = np.frombuffer(file.read(int(sizes[i]), int(firsts[i])), dtype=np.uint8)
        words.append(sliding_window_view(data, 8)[stretch - firsts[i]].view("<i8")[:, 0])
    return np.concatenate(words)


def no_separator(opened: Mapping[str, Shard]) -> UserError:
    """Returns the refusal of shards that do not say which token ends a document, with a guess."""
    path, shard = next(iter(opened.items()))
    ends = set(shard.edge_tokens(SAMPLED_DOCUMENTS, is_last=True))
    hint = (
        f"its first documents all end with {min(ends)}" if len(ends) == 1 else "its documents end with none"
    )
    return UserError(
        f"sep_token is not said by shard {path}; set --sep_token to the id that ends a document ({hint})"
    )
