"""From stretches of a source to rows of tokens, with the true next token at every edge.

    stretch of the circle -> pieces (parts of documents) -> packing -> Window (ordered cuts) -> read_row

Invariant: the label of a token is the next token of the same document, also where the piece ends before the
document does (one token more is read); after the document's separator it is the first token of the document
that follows in the window, if it follows from its beginning; else -100. No label crosses a cut. A token that
its shard marks as one of a prompt is no label: -100 stands there.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from fms_fsdp.data.batch import IGNORED_LABEL
from fms_fsdp.data.order.packing import Cuts
from fms_fsdp.data.order.permute import I64
from fms_fsdp.data.shards.files import Files
from fms_fsdp.data.shards.ipc import ShardError, TokenError
from fms_fsdp.data.shards.lru import Lru
from fms_fsdp.data.shards.manifest import Source, check_shard
from fms_fsdp.data.shards.shard import NO_LOSS, Shard, TokenType

ShardCache = Lru[tuple[str, int], Shard]
_LARGEST = np.uint64((1 << 63) - 1)


class Pieces(NamedTuple):
    """Parts of documents: arrays of one length, in the order of the source.

    `file` of the source, `document` of the file, `start` token in the document, `length` (delimiter counted),
    `address` of the first token in the file, `after`: tokens of the document that follow the piece, 2
    standing for more.
    """

    file: I64
    document: I64
    start: I64
    length: I64
    address: I64
    after: I64

    @classmethod
    def joined(cls, parts: Sequence[Pieces]) -> Pieces:
        """Returns all pieces of the parts."""
        return parts[0] if len(parts) == 1 else cls(*map(np.concatenate, zip(*parts, strict=True)))

    def take(self, which: I64) -> Pieces:
        """Returns the pieces of these numbers."""
        return Pieces(*(column[which] for column in self))

    def cut(self, cuts: Cuts, widths: I64) -> Pieces:
        """Returns the cuts as pieces of their own; `widths` are the bytes of a token in each piece's file."""
        whole = self.take(cuts.piece)
        return whole._replace(
            start=whole.start + cuts.skip,
            length=cuts.length,
            address=whole.address + cuts.skip * widths[cuts.piece],
            after=np.minimum(whole.after + whole.length - cuts.skip - cuts.length, 2),
        )

    def ranges(self) -> Iterator[tuple[int, int, int, int]]:
        """Yields (file, document, first token, token after the last) of each piece."""
        columns = (self.file, self.document, self.start, self.start + self.length)
        return zip(*(column.tolist() for column in columns), strict=True)


class Window(NamedTuple):
    """The ordered pieces of some rows, 16 bytes each: what is needed to read them, and no more.

    `files`: (path, type of a token, whether tokens are marked) of the shards that `file` indexes; `end`:
    tokens up to the piece's end;
    `begins`: whether the piece begins its document; `after` as in Pieces.
    """

    files: tuple[tuple[str, TokenType, bool], ...]
    file: npt.NDArray[np.uint16 | np.uint32]
    address: I64
    end: npt.NDArray[np.int32]
    begins: npt.NDArray[np.bool_]
    after: npt.NDArray[np.uint8]

    @property
    def cost(self) -> int:
        """Bytes that this object holds, about."""
        return 512 + 128 * len(self.files) + 16 * len(self.end)


class Row(NamedTuple):
    """Where a row is written: arrays of S elements."""

    tokens: npt.NDArray[np.int64]
    labels: npt.NDArray[np.int64]
    positions: npt.NDArray[np.int32]
    document_ids: npt.NDArray[np.int32]

    def part(self, start: int, stop: int) -> Row:
        """Returns where the tokens [start, stop) of the row are written."""
        span = slice(start, stop)
        return Row(self.tokens[span], self.labels[span], self.positions[span], self.document_ids[span])


@dataclass(frozen=True, eq=False)
class SourceReader:
    """Reads one source of a corpus. `shards`: those opened, of all sources, within fixed bytes.
    `masks_prompts`: tokens that are marked so are no labels."""

    source: Source
    sep_token: int
    files: Files
    shards: ShardCache
    vocab_size: int
    document_mask: bool
    masks_prompts: bool = True

    def shard(self, file: int) -> Shard:
        """Returns the open shard, checked against the manifest when it is opened. Raises: ShardError."""
        shard = self.shards.get((self.source.name, file))
        if shard is None:
            shard = Shard(self.files, self.source.paths[file], self.source.delimiter)
            check_shard(self.source, file, shard, sep_token=self.sep_token, vocab_size=self.vocab_size)
            self.shards.put((self.source.name, file), shard, shard.cost)
        return shard

    def pieces(self, start: int, length: int) -> Pieces:
        """Returns the parts of documents in [start, start + length) on the source's circle."""
        starts = self.source.starts
        parts: list[Pieces] = []
        while length > 0:
            position = start % self.source.num_tokens
            file = int(np.searchsorted(starts, position, side="right")) - 1
            local = position - int(starts[file])
            shard = self.shard(file)
            chunk = int(np.searchsorted(shard.chunk_starts, local, side="right")) - 1
            stop = min(local + length, int(shard.chunk_starts[chunk + 1]))
            parts.append(self._chunk_pieces(file, shard, chunk, local, stop))
            start, length = start + stop - local, length - (stop - local)
        return Pieces.joined(parts)

    def _chunk_pieces(self, file: int, shard: Shard, chunk: int, start: int, stop: int) -> Pieces:
        """Returns the pieces in [start, stop) of the shard, which lie in one chunk."""
        base = int(shard.chunk_starts[chunk])
        found = shard.documents(chunk, start - base, stop - base)
        begins, ends = found.starts[:-1], found.starts[1:]
        begin, end = np.maximum(begins, start - base), np.minimum(ends, stop - base)
        skip = begin - begins
        pieces = Pieces(
            file=np.full(len(begins), file),
            document=found.first + np.arange(len(begins)),
            start=skip,
            length=end - begin,
            address=found.addresses + skip * shard.dtype.itemsize,
            after=np.minimum(ends - end, 2),
        )
        return pieces.take(np.flatnonzero(end > begin))

    def pack(self, starts: list[int], length: int, pack: Callable[[I64], Cuts] | None) -> Pieces:
        """Returns the pieces of the stretches of `length` tokens at `starts`, in the order that `pack` gives
        to them."""
        pieces = Pieces.joined([self.pieces(start, length) for start in starts])
        if pack is None:
            return pieces
        widths = np.zeros(int(pieces.file.max()) + 1, dtype=np.int64)
        for file in np.unique(pieces.file).tolist():
            widths[file] = self.shard(file).dtype.itemsize
        return pieces.cut(pack(pieces.length), widths[pieces.file])

    def window(self, pieces: Pieces) -> Window:
        """Returns the pieces in the compact form that `read_row` reads."""
        numbers, file = np.unique(pieces.file, return_inverse=True)
        shards = [self.shard(number) for number in numbers.tolist()]
        files = tuple((shard.path, shard.dtype, shard.has_masks) for shard in shards)
        for i, (path, dtype, _) in enumerate(files):
            mine = file == i
            self.files.prefetch(path, pieces.address[mine], pieces.length[mine] * dtype.itemsize)
        small: type[np.uint16 | np.uint32] = np.uint16 if len(files) < 1 << 16 else np.uint32
        end = np.cumsum(pieces.length).astype(np.int32)  # a window holds some million tokens
        begins, after = pieces.start == 0, pieces.after.astype(np.uint8)
        return Window(files, file.astype(small), pieces.address, end, begins, after)

    def read_row(self, window: Window, start: int, out: Row) -> None:
        """Writes the tokens of a window from token `start` on into `out`. Raises: ShardError."""
        size = len(out.tokens)
        stop = start + size
        first = int(window.end.searchsorted(start, side="right"))
        last = int(window.end.searchsorted(stop, side="left")) + 1
        end = window.end[first:last].astype(np.int64)
        begin = np.empty_like(end)
        begin[0] = window.end[first - 1] if first else 0
        begin[1:] = end[:-1]
        skip = np.maximum(start - begin, 0)
        after = np.minimum(window.after[first:last] + np.maximum(end - stop, 0), 2)
        places = np.maximum(begin, start) - start
        lengths = np.minimum(end, stop) - start - places
        # One token more than the piece is read for its last label, as far as the document goes; the delimiter
        # is not stored.
        stored = np.minimum(lengths + 1, lengths + after - self.source.delimiter)
        out.tokens.fill(self.sep_token)
        next_token = np.where(after == 0, IGNORED_LABEL, self.sep_token)
        columns = (window.file[first:last], window.address[first:last], skip, places, lengths, stored)
        parts = zip(*(column.tolist() for column in columns), strict=True)
        for i, (file, address, skipped, place, length, count) in enumerate(parts):
            if count <= 0:
                continue
            path, dtype, _ = window.files[file]
            values = self._read(path, dtype, address + skipped * dtype.itemsize, count)
            if count > length:
                next_token[i] = values[length]
                values = values[:length]
            out.tokens[place : place + len(values)] = values
        if not self.document_mask:
            follows = np.flatnonzero((after[:-1] == 0) & window.begins[first + 1 : last])
            next_token[follows] = out.tokens[places[follows + 1]]
            if after[-1] == 0:
                next_token[-1] = self._first_token(window, last)
        out.labels[:-1] = out.tokens[1:]
        out.labels[places + lengths - 1] = next_token
        if any(has_masks for _, _, has_masks in window.files):
            self._take_marks(out)
        out.positions[:] = np.arange(size) - places.repeat(lengths)
        out.document_ids[:] = np.arange(len(places)).repeat(lengths)
        largest = max(int(out.tokens.view(np.uint64).max()), int(out.labels.max()))
        if largest >= self.vocab_size:
            self._refuse_tokens(window, first, places, lengths, out)

    def _take_marks(self, out: Row) -> None:
        """Takes the marks off the tokens; a label that is marked becomes -100."""
        for values, is_label in ((out.tokens, False), (out.labels, True)):
            marked = (values >= NO_LOSS) & (values < 2 * NO_LOSS)
            values[marked] = IGNORED_LABEL if is_label and self.masks_prompts else values[marked] - NO_LOSS

    def _first_token(self, window: Window, piece: int) -> int:
        """Returns the first token of a piece that begins its document, else -100."""
        if piece >= len(window.end) or not window.begins[piece]:
            return IGNORED_LABEL
        length = int(window.end[piece] - window.end[piece - 1])
        if length + int(window.after[piece]) <= self.source.delimiter:
            return self.sep_token  # an empty document
        path, dtype, _ = window.files[window.file[piece]]
        return int(self._read(path, dtype, int(window.address[piece]), 1)[0])

    def _read(self, path: str, dtype: TokenType, address: int, count: int) -> I64:
        size = count * dtype.itemsize
        try:
            data = self.files.pread(path, size, address)
        except OSError as error:
            raise ShardError(
                f"shard ({path}) cannot be read: {error}; check the storage or set --on_missing=mask"
            ) from error
        if len(data) != size:
            raise ShardError(
                f"shard ({path}) ends {size - len(data)} bytes early, in document "
                f"{self._document_at(path, address)}; the file is truncated: restore the shard or set "
                "--on_missing=mask"
            )
        values: I64 = np.frombuffer(data, dtype)
        # no token of 8 bytes, which may be one below 0, passes for -100, or wraps around
        return values if dtype.itemsize < 8 else np.minimum(values, _LARGEST)

    def _refuse_tokens(self, window: Window, first: int, places: I64, lengths: I64, out: Row) -> None:
        """Raises TokenError naming the first piece that holds a token beyond the vocabulary."""
        for i, (place, length) in enumerate(zip(places.tolist(), lengths.tolist(), strict=True)):
            stretch = np.append(out.tokens[place : place + length], out.labels[place + length - 1])
            stretch = stretch[stretch >= self.vocab_size]
            if len(stretch):
                path, _, _ = window.files[window.file[first + i]]
                document = self._document_at(path, int(window.address[first + i]))
                raise TokenError(
                    f"shard ({path}) holds token {stretch[0]} in document {document}, beyond vocab_size "
                    f"({self.vocab_size}); raise --vocab_size to the tokenizer's size or restore the shard"
                )

    def _document_at(self, path: str, address: int) -> int:
        return self.shard(self.source.paths.index(path)).document_at(address)
