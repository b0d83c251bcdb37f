"""Rows that cut few documents: `--packing=bestfit`.

Documents longer than a row are cut first. The rest are placed whole, longest first, each in the row with the
least room that still holds it. What fits nowhere is split over the holes. The rows are shuffled.

Source: Ding et al., "Fewer truncations improve language modeling" (2024), with the holes filled.
"""

from __future__ import annotations

from bisect import bisect_left, insort

import numpy as np

from fms_fsdp.data.order.packing import Cuts, pack_concat, shuffled
from fms_fsdp.data.order.permute import I64


def pack_bestfit(lengths: I64, key: int, seq_length: int) -> Cuts:
    """Returns cuts that fill sum(lengths) / seq_length rows to the last token while splitting few
    documents."""
    chunks = _cut_long(pack_concat(lengths, key), seq_length)
    num_rows = int(lengths.sum()) // seq_length
    by_length = np.argsort(-chunks.length, kind="stable")
    row_of = np.full(len(by_length), -1, dtype=np.int64)
    room_left = _place_whole(
        chunks.length[by_length].tolist(), by_length.tolist(), row_of, num_rows, seq_length
    )
    placed = np.flatnonzero(row_of >= 0)
    rows = [row_of[placed]]
    parts = [Cuts(*(column[placed] for column in chunks))]
    if len(placed) < len(row_of):
        split, split_rows = _fill_holes(chunks, np.flatnonzero(row_of < 0), room_left)
        parts.append(split)
        rows.append(split_rows)
    piece, skip, length = (np.concatenate(columns) for columns in zip(*parts, strict=True))
    rank = np.empty(num_rows, dtype=np.int64)
    rank[shuffled(num_rows, key)] = np.arange(num_rows)
    # inside a row: in shuffled order, split ones last
    order = np.argsort(rank[np.concatenate(rows)], kind="stable")
    return Cuts(piece[order], skip[order], length[order])


def _cut_long(cuts: Cuts, seq_length: int) -> Cuts:
    """Returns the cuts with those longer than a row divided into whole rows and a remainder."""
    num_parts = np.maximum(1, -(-cuts.length // seq_length))
    index = np.repeat(np.arange(len(num_parts)), num_parts)
    skip = (np.arange(len(index)) - np.repeat(np.cumsum(num_parts) - num_parts, num_parts)) * seq_length
    return Cuts(cuts.piece[index], skip, np.minimum(cuts.length[index] - skip, seq_length))


def _place_whole(
    lengths: list[int], chunks: list[int], row_of: I64, num_rows: int, seq_length: int
) -> list[int]:
    """Writes each chunk's row into `row_of` where one has room, and returns the room left in each row.

    `lengths` descend. Open rows are kept sorted by (room, row) as one integer; untouched rows are used last.
    """
    open_rows: list[int] = []
    num_used = 0
    for length, chunk in zip(lengths, chunks, strict=True):
        place = bisect_left(open_rows, length * num_rows)
        if place < len(open_rows):
            room, row = divmod(open_rows.pop(place), num_rows)
        elif num_used < num_rows:
            room, row = seq_length, num_used
            num_used += 1
        else:
            continue
        row_of[chunk] = row
        if room > length:
            insort(open_rows, (room - length) * num_rows + row)
    room_left = [0] * num_used + [seq_length] * (num_rows - num_used)
    for entry in open_rows:
        room, row = divmod(entry, num_rows)
        room_left[row] = room
    return room_left


def _fill_holes(chunks: Cuts, left_over: I64, room_left: list[int]) -> tuple[Cuts, I64]:
    """Returns the left-over chunks, laid end to end and cut at the edges of the holes, and the row of each
    part."""
    holes: I64 = np.array(room_left, dtype=np.int64)
    hole_end = np.cumsum(holes)
    chunk_end = np.cumsum(chunks.length[left_over])
    assert hole_end[-1] == chunk_end[-1], (hole_end[-1], chunk_end[-1])
    ends = np.unique(np.concatenate([hole_end[holes > 0], chunk_end]))
    begins = np.concatenate([[0], ends[:-1]])
    part_of = np.searchsorted(chunk_end, begins, side="right")
    source = left_over[part_of]
    skip = chunks.skip[source] + begins - (chunk_end - chunks.length[left_over])[part_of]
    return Cuts(chunks.piece[source], skip, ends - begins), np.searchsorted(hole_end, begins, side="right")
