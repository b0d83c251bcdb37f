"""From a shuffle window to sequences of tokens, with the true next token at every boundary.

    token ranges ── segments ──> parts of documents ── window ──> in order ── read_sequence ──> tokens

`window` shuffles the documents: `concat` places them end to end in shuffled order, `bestfit` keeps
documents whole where they fit. Both fill every sequence completely.

Invariant: the label of a token is the next token of the same document, also if its segment ends
before it; after a separator, the first token of the next document in the sequence, if that segment
begins the document; else -100. No label crosses a cut. A token with a loss mask (of a prompt) is no
label.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import OrderedDict
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Any, Generic, NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt
from numpy.lib.recfunctions import repack_fields

from fms_fsdp.data.batch import IGNORED_LABEL
from fms_fsdp.data.corpus import Source
from fms_fsdp.data.permute import shuffled
from fms_fsdp.data.shards import NO_LOSS, RESTORE, Files, Shard, ShardError, TokenError

# A segment is a part of a document:
#   shard, document, start, length   which tokens, with the separator
#   address, width, marked           file offset, bytes per token, whether its shard has loss masks
#   after                            tokens of the document that follow (2: two or more)
# and in a window
#   end, begins                      tokens up to its end, whether it begins its document
SEGMENT = np.dtype(
    [("shard", "i4"), ("document", "u4"), ("start", "i8"), ("length", "i8"), ("address", "i8")]
    + [("width", "u1"), ("marked", "?"), ("after", "u1"), ("end", "i4"), ("begins", "?")]
)
_FOR_READING = ["shard", "address", "width", "marked", "after", "end", "begins"]
Segments = npt.NDArray[np.void]
Value = TypeVar("Value", bound=Any)
# unsigned, so that a negative id is too large
_TYPES = {width: np.dtype(f"<u{width}") for width in (1, 2, 4, 8)}
_LARGEST = np.uint64((1 << 63) - 1)


class Lru(Generic[Value]):
    """Caches the most recently used values of `make`, up to `capacity` bytes and at least one."""

    def __init__(self, capacity: int, make: Callable[..., Value]) -> None:
        self._capacity, self._make, self._nbytes = capacity, make, 0
        self._kept: OrderedDict[Hashable, Value] = OrderedDict()

    def __call__(self, *key: Any) -> Value:
        if key not in self._kept:
            self._kept[key] = value = self._make(*key)
            self._nbytes += value.nbytes
            while self._nbytes > self._capacity and len(self._kept) > 1:
                self._nbytes -= self._kept.popitem(last=False)[1].nbytes
        self._kept.move_to_end(key)
        return self._kept[key]


class Columns(NamedTuple):
    """The arrays of one sequence, of S elements each."""

    tokens: npt.NDArray[np.int64]
    labels: npt.NDArray[np.int64]
    positions: npt.NDArray[np.int32]
    document_ids: npt.NDArray[np.int32]


@dataclass(frozen=True, eq=False)
class SourceReader:
    """Reads shuffle windows and sequences of one source.

    `open_shard` returns an open shard by the name of the source and the number of the shard.
    """

    source: Source
    storage: Files
    open_shard: Callable[[str, int], Shard]
    sep_token: int
    vocab_size: int
    document_mask: bool
    mask_prompts: bool

    def shard(self, number: int) -> Shard:
        """Returns an open shard.

        Raises:
            ShardError: it cannot be used.
        """
        return self.open_shard(self.source.name, number)

    def segments(self, start: int, length: int) -> list[Segments]:
        """Returns the segments in the token range [start, start + length) of the source, which
        continues at its first token after the last."""
        found, source = [], self.source
        while length > 0:
            start %= source.num_tokens
            number = int(np.searchsorted(source.starts, start, side="right")) - 1
            first = start - int(source.starts[number])
            last = min(first + length, int(source.starts[number + 1] - source.starts[number]))
            shard = self.shard(number)
            starts, addresses = shard.documents
            low = int(starts.searchsorted(first, side="right")) - 1
            high = int(starts.searchsorted(last, side="left"))
            begin, end = starts[low:high], starts[low + 1 : high + 1]
            skip = np.maximum(first - begin, 0)
            part = np.empty(high - low, SEGMENT)
            part["shard"], part["document"], part["start"] = number, np.arange(low, high), skip
            part["length"] = np.minimum(end, last) - begin - skip
            part["address"] = addresses[low:high] + skip * shard.width
            part["width"], part["marked"] = shard.width, shard.has_masks
            part["after"] = np.minimum(end - np.minimum(end, last), 2)
            found.append(part[part["length"] > 0])
            start, length = start + last - first, length - (last - first)
        return found

    def window(self, starts: list[int], length: int, key: int, bestfit_to: int = 0) -> Segments:
        """Returns the segments of the ranges of `length` tokens at `starts`, in the order of the
        sequences.

        `bestfit_to`: the tokens per sequence into which documents should fit, 0 for concat.
        """
        for number in set((self.source.starts.searchsorted(starts, side="right") - 1).tolist()):
            self.storage.prefetch_ends(self.source.paths[number])
        parts = [part for start in starts for part in self.segments(start, length)]
        segments = np.concatenate(parts)
        segments = segments[shuffled(len(segments), key)]
        if bestfit_to:
            which, skip, taken = bestfit(segments["length"].tolist(), bestfit_to, key)
            segments = segments[which]
            rest = segments["length"] - skip - taken
            segments["after"] = np.minimum(segments["after"] + rest, 2)
            segments["start"] += skip
            segments["address"] += skip * segments["width"]
            segments["length"] = taken
        segments["end"], segments["begins"] = np.cumsum(segments["length"]), segments["start"] == 0
        return segments

    def compact(self, segments: Segments) -> Segments:
        """Returns the fields that `read_sequence` needs, 20 bytes per segment, and prefetches the
        tokens."""
        for number in np.unique(segments["shard"]).tolist() if self.storage.is_remote else ():
            mine = segments[segments["shard"] == number]
            stops = mine["address"] + (mine["length"] + 1) * mine["width"]
            ranges = zip(mine["address"].tolist(), stops.tolist(), strict=True)
            self.storage.prefetch(self.source.paths[number], ranges)
        return repack_fields(segments[_FOR_READING])

    def read_sequence(self, window: Segments, index: int, out: Columns) -> None:
        """Writes sequence `index` of the window into `out`.

        Raises:
            ShardError: a shard cannot be read, or has a token beyond the vocabulary.
        """
        size, delimiter = len(out.tokens), self.source.delimiter
        begin, stop = index * size, (index + 1) * size
        low, high = window["end"].searchsorted([begin + 1, stop]).tolist()
        skip = begin - (int(window["end"][low - 1]) if low else 0)
        place, ended, has_marks, last_labels = 0, False, False, dict[int, int]()
        out.tokens.fill(self.sep_token)
        for i, segment in enumerate(window[low : high + 1].tolist()):
            number, address, width, marked, after, end, begins = segment
            last, after = min(end, stop) - begin, min(after + max(0, end - stop), 2)
            length, label = last - place, self.sep_token
            # One more token is read for the last label of a segment that does not end its document.
            # A separator that the stream adds is not stored.
            count = min(length + 1, length + after - delimiter)
            if count > 0:
                values = self._read(number, width, count, address + skip * width)
                out.tokens[place : place + min(length, count)] = values[:length]
                label = int(values[length]) if count > length else label
            if ended and begins and not self.document_mask:
                del last_labels[place - 1]  # the label is the next token of the sequence
            last_labels[last - 1] = label if after else IGNORED_LABEL
            out.positions[place:last] = np.arange(length)
            out.document_ids[place:last] = i
            place, skip, ended, has_marks = last, 0, not after, has_marks or marked
        out.labels[:-1] = out.tokens[1:]
        out.labels[list(last_labels)] = list(last_labels.values())
        if has_marks:
            is_marked = out.labels >= NO_LOSS
            kept = IGNORED_LABEL if self.mask_prompts else out.labels[is_marked] - NO_LOSS
            out.labels[is_marked] = kept
            out.tokens[out.tokens >= NO_LOSS] -= NO_LOSS
        if max(int(out.tokens.view(np.uint64).max()), int(out.labels.max())) >= self.vocab_size:
            self._raise_token_error(window[low : high + 1], begin, out)

    def _read(self, number: int, width: int, count: int, offset: int) -> npt.NDArray[Any]:
        path = self.source.paths[number]
        try:
            data = self.storage.read(path, count * width, offset)
        except OSError as error:
            raise ShardError(f"shard {path} cannot be read: {error}; {RESTORE}") from error
        if len(data) != count * width:
            raise ShardError(f"shard {path} is truncated at byte {offset + len(data)}; {RESTORE}")
        values: npt.NDArray[Any] = np.frombuffer(data, _TYPES[width])
        return values if width < 8 else np.minimum(values, _LARGEST)

    def _raise_token_error(self, segments: Segments, begin: int, out: Columns) -> None:
        """Raises TokenError with the document of the first token beyond the vocabulary."""
        wrong = np.flatnonzero(
            (out.tokens.view(np.uint64) >= self.vocab_size) | (out.labels >= self.vocab_size)
        )
        segment = segments[segments["end"].searchsorted(begin + wrong[0], side="right")]
        number = int(segment["shard"])
        document = (
            int(self.shard(number).documents[1].searchsorted(segment["address"], side="right")) - 1
        )
        token = max(out.tokens[wrong[0]], out.labels[wrong[0]])
        raise TokenError(
            f"shard {self.source.paths[number]} has token {token} in document {document}, which must "
            f"be below --vocab_size={self.vocab_size}; raise --vocab_size to the size of the "
            f"tokenizer, or {RESTORE}"
        )


def bestfit(lengths: list[int], size: int, key: int) -> npt.NDArray[np.int64]:
    """Returns (document, first token, tokens) of segments that fill sequences of `size` tokens and
    split few documents.

    Documents longer than a sequence are cut first. The others are placed whole, longest first, each
    where it leaves the least free space; the rest is split over the largest free spaces. The
    sequences are shuffled.
    Source: Ding et al., "Fewer truncations improve language modeling" (2024), with all space filled.
    """
    num_sequences = sum(lengths) // size
    cuts = [(i, a, min(size, n - a)) for i, n in enumerate(lengths) for a in range(0, n, size)]
    filled: list[list[tuple[int, int, int]]] = [[] for _ in range(num_sequences)]
    free = [(size, number) for number in range(num_sequences)]  # sorted
    too_long = []
    for cut in sorted(cuts, key=lambda cut: -cut[2]):
        fitting = bisect_left(free, (cut[2], -1))
        if fitting == len(free):
            too_long.append(cut)
            continue
        space, number = free.pop(fitting)
        filled[number].append(cut)
        if space > cut[2]:
            insort(free, (space - cut[2], number))
    for i, start, left in too_long:
        while left:
            space, number = free.pop()
            taken = min(space, left)
            filled[number].append((i, start, taken))
            start, left = start + taken, left - taken
            if space > taken:
                insort(free, (space - taken, number))
    order = shuffled(num_sequences, key).tolist()
    return np.array([cut for number in order for cut in filled[number]], np.int64).T
