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

# A segment: consecutive tokens of one document, its separator included.
SEGMENT = np.dtype(
    [
        ("shard", "i4"),
        ("document", "u4"),
        ("start", "i8"),  # tokens of the document before the segment
        ("length", "i8"),  # tokens
        ("address", "i8"),  # offset of the first token in the file, in bytes
        ("width", "u1"),  # bytes per token
        ("has_masks", "?"),  # whether the shard has loss masks
        ("after", "u1"),  # tokens of the document after the segment; 2 means two or more
        # Set when the segment is placed in a window:
        ("end", "i4"),  # tokens of the window up to the end of the segment
        ("begins", "?"),  # whether it begins its document
    ]
)
_FOR_READING = ["shard", "address", "width", "has_masks", "after", "end", "begins"]
Segments = npt.NDArray[np.void]
Value = TypeVar("Value", bound=Any)
# Read as unsigned: a negative id becomes a large one, and is found by the check of the vocabulary.
_TYPES = {width: np.dtype(f"<u{width}") for width in (1, 2, 4, 8)}
_LARGEST = np.uint64((1 << 63) - 1)


class Lru(Generic[Value]):
    """Caches the most recently used values of `make`, up to `capacity` bytes and at least one."""

    def __init__(self, capacity: int, make: Callable[..., Value]) -> None:
        self._capacity = capacity
        self._make = make
        self._nbytes = 0
        self._kept: OrderedDict[Hashable, Value] = OrderedDict()

    def __call__(self, *key: Any) -> Value:
        if key not in self._kept:
            value = self._make(*key)
            self._kept[key] = value
            self._nbytes += value.nbytes
            while self._nbytes > self._capacity and len(self._kept) > 1:
                _, oldest = self._kept.popitem(last=False)
                self._nbytes -= oldest.nbytes
        self._kept.move_to_end(key)
        return self._kept[key]


class Columns(NamedTuple):
    """The arrays of one sequence, of S elements each, or of several (B S)."""

    tokens: npt.NDArray[np.int64]
    labels: npt.NDArray[np.int64]
    positions: npt.NDArray[np.int32]
    document_ids: npt.NDArray[np.int32]

    @staticmethod
    def empty(*shape: int) -> Columns:
        """Returns uninitialised arrays."""
        tokens, labels = (np.empty(shape, np.int64) for _ in range(2))
        positions, document_ids = (np.empty(shape, np.int32) for _ in range(2))
        return Columns(tokens, labels, positions, document_ids)


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
        source = self.source
        found = []
        while length > 0:
            start %= source.num_tokens
            number = int(np.searchsorted(source.starts, start, side="right")) - 1
            shard_start = int(source.starts[number])
            shard_size = int(source.starts[number + 1]) - shard_start
            first = start - shard_start
            last = min(first + length, shard_size)
            found.append(self._segments_of_shard(number, first, last))
            start += last - first
            length -= last - first
        return found

    def _segments_of_shard(self, number: int, first: int, last: int) -> Segments:
        """Returns the segments in the tokens [first, last) of a shard."""
        shard = self.shard(number)
        starts, addresses = shard.documents
        low = int(starts.searchsorted(first, side="right")) - 1
        high = int(starts.searchsorted(last, side="left"))
        begin = starts[low:high]  # first token of each document that overlaps the range
        end = starts[low + 1 : high + 1]
        skip = np.maximum(first - begin, 0)
        stop = np.minimum(end, last)
        segments = np.empty(high - low, SEGMENT)
        segments["shard"] = number
        segments["document"] = np.arange(low, high)
        segments["start"] = skip
        segments["length"] = stop - begin - skip
        segments["address"] = addresses[low:high] + skip * shard.width
        segments["width"] = shard.width
        segments["has_masks"] = shard.has_masks
        segments["after"] = np.minimum(end - stop, 2)
        return segments[segments["length"] > 0]  # without empty documents

    def window(self, starts: list[int], length: int, key: int, bestfit_to: int = 0) -> Segments:
        """Returns the segments of the ranges of `length` tokens at `starts`, in the order of the
        sequences.

        `bestfit_to`: the tokens per sequence into which documents should fit, 0 for concat.
        """
        shards = self.source.starts.searchsorted(starts, side="right") - 1
        for number in set(shards.tolist()):
            self.storage.prefetch_ends(self.source.paths[number])
        segments = np.concatenate(
            [part for start in starts for part in self.segments(start, length)]
        )
        segments = segments[shuffled(len(segments), key)]
        if bestfit_to:
            index, skip, taken = bestfit(segments["length"].tolist(), bestfit_to, key)
            segments = segments[index]
            not_taken = segments["length"] - skip - taken  # tokens of the segment that follow
            segments["after"] = np.minimum(segments["after"] + not_taken, 2)
            segments["start"] += skip
            segments["address"] += skip * segments["width"]
            segments["length"] = taken
        segments["end"] = np.cumsum(segments["length"])
        segments["begins"] = segments["start"] == 0
        return segments

    def compact(self, segments: Segments) -> Segments:
        """Returns the fields that `read_sequence` needs, 20 bytes per segment, and prefetches the
        tokens."""
        if self.storage.is_remote:
            for number in np.unique(segments["shard"]).tolist():
                in_shard = segments[segments["shard"] == number]
                # With the token after each segment, which may be a label.
                stops = in_shard["address"] + (in_shard["length"] + 1) * in_shard["width"]
                ranges = zip(in_shard["address"].tolist(), stops.tolist(), strict=True)
                self.storage.prefetch(self.source.paths[number], ranges)
        return repack_fields(segments[_FOR_READING])

    def read_sequence(self, window: Segments, index: int, out: Columns) -> None:
        """Writes sequence `index` of the window into `out`.

        Example: the end of document x, and the beginning of y, which the next sequence continues.
            tokens         x5   x6  sep   y0   y1   y2
            labels         x6  sep   y0   y1   y2   y3     with --document_mask -100 in place of y0
            positions       0    1    2    0    1    2
            document ids    0    0    0    1    1    1

        Raises:
            ShardError: a shard cannot be read, or has a token beyond the vocabulary.
        """
        delimiter = self.source.delimiter
        size = len(out.tokens)
        begin = index * size
        stop = begin + size
        low, high = window["end"].searchsorted([begin + 1, stop]).tolist()
        segments = window[low : high + 1]
        end_before = int(window["end"][low - 1]) if low else 0
        skip = begin - end_before  # tokens of the first segment that the sequence before has
        position = 0
        is_after_document = False
        has_masks = False
        last_labels = dict[int, int]()  # by position: the label of the last token of each segment
        out.tokens.fill(self.sep_token)  # for the separators that are not stored
        # A loop, because a sequence has few segments: numpy's calls would take longer.
        for i, segment in enumerate(segments.tolist()):
            number, address, width, is_masked, after, end, begins = segment
            next_position = min(end, stop) - begin
            length = next_position - position
            if end > stop:
                after = min(after + end - stop, 2)
            # One more token is read for the last label, if the document continues. Tokens to read:
            #   after   separator stored   separator added by the stream
            #     0     length             length - 1     it is the segment's last token
            #     1     length + 1         length         it is the label
            #     2     length + 1         length + 1
            count = min(length + 1, length + after - delimiter)
            label = self.sep_token
            if count > 0:
                values = self._read(number, width, count, address + skip * width)
                out.tokens[position : position + min(length, count)] = values[:length]
                if count > length:
                    label = int(values[length])
            if is_after_document and begins and not self.document_mask:
                # The label of the separator is the next token of the sequence.
                del last_labels[position - 1]
            last_labels[next_position - 1] = label if after else IGNORED_LABEL
            out.positions[position:next_position] = np.arange(length)
            out.document_ids[position:next_position] = i
            position = next_position
            skip = 0
            is_after_document = after == 0
            has_masks = has_masks or is_masked
        out.labels[:-1] = out.tokens[1:]
        out.labels[list(last_labels)] = list(last_labels.values())
        if has_masks:
            self._apply_loss_masks(out)
        # Labels too: the last one is not among the tokens. uint64: a negative token is too large.
        largest = max(int(out.tokens.view(np.uint64).max()), int(out.labels.max()))
        if largest >= self.vocab_size:
            self._raise_token_error(segments, begin, out)

    def _apply_loss_masks(self, out: Columns) -> None:
        """Removes the bit NO_LOSS from the ids; the labels that had it are ignored if the flags
        exclude prompts from the loss."""
        is_masked = out.labels >= NO_LOSS
        if self.mask_prompts:
            out.labels[is_masked] = IGNORED_LABEL
        else:
            out.labels[is_masked] -= NO_LOSS
        out.tokens[out.tokens >= NO_LOSS] -= NO_LOSS

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
        is_wrong = out.tokens.view(np.uint64) >= self.vocab_size
        is_wrong |= out.labels >= self.vocab_size
        position = np.flatnonzero(is_wrong)[0]
        segment = segments[segments["end"].searchsorted(begin + position, side="right")]
        number = int(segment["shard"])
        _, addresses = self.shard(number).documents
        document = int(addresses.searchsorted(segment["address"], side="right")) - 1
        token = max(out.tokens[position], out.labels[position])
        raise TokenError(
            f"shard {self.source.paths[number]} has token {token} in document {document}, which must "
            f"be below --vocab_size={self.vocab_size}; raise --vocab_size to the size of the "
            "tokenizer, or restore the shard"
        )


def bestfit(lengths: list[int], size: int, key: int) -> npt.NDArray[np.int64]:
    """Returns (document, first token, tokens) of segments that fill sequences of `size` tokens and
    split few documents.

    Documents longer than a sequence are cut first. The others are placed whole, longest first, each
    where it leaves the least free space; the rest is split over the largest free spaces. The
    sequences are shuffled.
    Source: Ding et al., "Fewer truncations improve language modeling" (2024), with all space
    filled.
    """
    num_sequences = sum(lengths) // size
    parts = []
    for segment, length in enumerate(lengths):
        for start in range(0, length, size):
            parts.append((segment, start, min(size, length - start)))
    parts.sort(key=lambda part: -part[2])  # longest first; stable, so the order is defined
    filled: list[list[tuple[int, int, int]]] = [[] for _ in range(num_sequences)]
    free = [(size, number) for number in range(num_sequences)]  # (tokens, sequence), ascending
    too_long = []
    for part in parts:
        length = part[2]
        tightest = bisect_left(free, (length, -1))
        if tightest == len(free):
            too_long.append(part)
            continue
        space, number = free.pop(tightest)
        filled[number].append(part)
        if space > length:
            insort(free, (space - length, number))
    for segment, start, left in too_long:
        while left > 0:
            space, number = free.pop()  # the largest
            taken = min(space, left)
            filled[number].append((segment, start, taken))
            start += taken
            left -= taken
            if space > taken:
                insort(free, (space - taken, number))
    order = shuffled(num_sequences, key).tolist()
    return np.array([part for number in order for part in filled[number]], np.int64).T
