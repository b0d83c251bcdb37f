"""Where the n-th sequence of a source lies: epochs, tapes, windows, blocks. Pure arithmetic, no table, no file.

A source is a circle of T tokens (its files in order of their paths). Each epoch turns it by another offset and cuts it:

    |<- block ->|<- block ->| ...                       |<- block ->|<- tail row ->| ... |<- rest, < S tokens ->|
     M tokens                   num_blocks of them                    S tokens             used by no row

A *window* is K blocks drawn from the whole circle by a keyed permutation; its documents are shuffled and cut into rows of
S tokens (`packing`). A *tape* (logical shard) is a lane of windows read one after the other; L tapes advance together, one
row each in turn. Tail rows are contiguous, permuted, and spread evenly over the epoch.

Invariant: in each epoch every row slot occurs exactly once, hence every token once, except the rest.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np

from fms_fsdp.data.order.permute import I64, bit_reverse, derive_key, hash64, permute, unpermute

BLOCK_TOKENS = 1 << 18
BLOCKS_PER_WINDOW = 16
MIN_BLOCKS_PER_WINDOW = 4
MIN_ROWS_PER_BLOCK = 4
MIN_WINDOWS_PER_TAPE = 8
TAIL, REST = (
    -1,
    -2,
)  # in the place of a tape: the tail rows, one after the other; the tokens that no row holds

MAX_TOKENS, MAX_ROWS = 1 << 49, 1 << 46  # of a source: as far as `locate` counts exactly
_ROTATION, _BLOCKS, _TAIL, _PIECES = range(1, 5)  # words of the keys drawn here


@dataclass(frozen=True)
class Geometry:
    """The cut of one source: `num_rows` sequences an epoch on `num_tapes` tapes. Fixed at the source's first use."""

    seq_length: int
    num_rows: int
    num_tapes: int
    blocks_per_window: int
    block_tokens: int

    @cached_property
    def rows_per_window(self) -> int:
        return self.blocks_per_window * self.block_tokens // self.seq_length

    @cached_property
    def windows_per_tape(self) -> int:
        return self.num_rows // (self.num_tapes * self.rows_per_window)

    @cached_property
    def num_blocks(self) -> int:
        return self.windows_per_tape * self.num_tapes * self.blocks_per_window

    @property
    def columns(self) -> tuple[int, int, int, int]:
        """What `locate` takes."""
        return self.num_rows, self.num_tail_rows, self.num_tapes, self.rows_per_window

    @cached_property
    def num_main_rows(self) -> int:
        return self.windows_per_tape * self.num_tapes * self.rows_per_window

    @cached_property
    def num_tail_rows(self) -> int:
        return self.num_rows - self.num_main_rows


def fit_geometry(num_rows: int, seq_length: int, share: float, logical_shards: int) -> Geometry:
    """Returns the cut for a source of `num_rows` sequences that supplies `share` (0 to 1) of the mixture.

    Starts from blocks of about 2^18 tokens, 16 to a window, and L = the largest power of two <= share * logical_shards;
    halves L until every tape has 8 windows, then the window down to 4 blocks, then the block down to 4 rows. A source of
    fewer than 128 rows gets no window at all: it is all tail. Last, blocks grow to share out the rows evenly, which leaves
    fewer tail rows than there are blocks.
    """
    tapes = 1 << (max(1, int(share * logical_shards)).bit_length() - 1)
    blocks, rows = BLOCKS_PER_WINDOW, max(MIN_ROWS_PER_BLOCK, round(BLOCK_TOKENS / seq_length))

    def too_small() -> bool:
        return num_rows < MIN_WINDOWS_PER_TAPE * tapes * blocks * rows

    while too_small() and tapes > 1:
        tapes //= 2
    while too_small() and blocks > MIN_BLOCKS_PER_WINDOW:
        blocks //= 2
    while too_small() and rows > MIN_ROWS_PER_BLOCK:
        rows = max(MIN_ROWS_PER_BLOCK, rows // 2)
    if too_small():  # a window longer than the source: none fits
        return Geometry(seq_length, num_rows, 1, 1, (num_rows + 1) * seq_length)
    windows = num_rows // (tapes * blocks * rows)
    rows = num_rows // (tapes * blocks * windows)
    return Geometry(seq_length, num_rows, tapes, blocks, rows * seq_length)


class Slots(NamedTuple):
    """Where rows lie: arrays of one length. Tail rows: `tape` TAIL, `window` the number of tail rows before, `row` 0."""

    epoch: I64
    tape: I64
    window: I64
    row: I64


def locate(
    n: I64, num_rows: int | I64, num_tail_rows: int | I64, num_tapes: int | I64, rows_per_window: int | I64
) -> Slots:
    """Returns where the sequences with their source's own numbers n >= 0 lie; the geometry may differ from one to the next.

    x = n mod N; tails before x: k = floor(x * n_tail / N); x is a tail row if floor((x + 1) * n_tail / N) > k. Main row
    m = x - k lies on the tape bit_reverse(m mod L), at its row m // L.
    """
    epoch, x = np.divmod(n, num_rows)
    high, low = np.divmod(
        num_tail_rows, 1 << 16
    )  # x * n_tail would not fit 64 bits; exact for N < 2^46, n_tail < 2^31
    tails, rest = np.divmod(x * high, num_rows)
    more, rest = np.divmod((rest << 16) + x * low, num_rows)
    tails = (tails << 16) + more
    is_tail = rest + num_tail_rows >= num_rows
    turn, lane = np.divmod(x - tails, num_tapes)
    tape = bit_reverse(lane, np.frexp(num_tapes)[1] - 1)
    window, row = np.divmod(turn, rows_per_window)
    return Slots(
        epoch, np.where(is_tail, TAIL, tape), np.where(is_tail, tails, window), np.where(is_tail, 0, row)
    )


def sequence_number(geometry: Geometry, epoch: int, tape: int, window: int, row: int) -> int:
    """Returns n, the source's own number of the sequence that lies there: the inverse of `locate`.

    x is the last number with m main rows, or k tail rows, before it: floor(m * N / n_main), or ceil((k + 1) * N / n_tail) - 1.
    """
    g = geometry
    if tape == TAIL:
        x = -(-(window + 1) * g.num_rows // g.num_tail_rows) - 1
    else:
        lane = int(bit_reverse(np.array([tape]), g.num_tapes.bit_length() - 1)[0])
        x = ((window * g.rows_per_window + row) * g.num_tapes + lane) * g.num_rows // g.num_main_rows
    return epoch * g.num_rows + x


class Stretch(NamedTuple):
    """Where neighbouring tokens of an epoch went: into a window, a tail row (`tape` TAIL, `window` its place after the
    permutation), or the REST. `skip` tokens of the stretch asked for come before them, `length` are there."""

    tape: int
    window: int
    skip: int
    length: int


class Tapes:
    """The addressing of one source: a pure function of (seed, source name, length in tokens, geometry)."""

    def __init__(self, name: str, num_tokens: int, geometry: Geometry, seed: int) -> None:
        self.num_tokens, self.geometry = num_tokens, geometry
        self._key = derive_key(seed, hash64(name))

    def tail_key(self, epoch: int) -> int:
        """Returns the key that permutes the epoch's tail rows."""
        return derive_key(self._key, _TAIL, epoch)

    def used(self, num_rows: int) -> I64:
        """Returns how many tokens of each tape, and last of the tail, the first `num_rows` sequences of an epoch use: L + 1."""
        g = self.geometry
        tails = num_rows * g.num_tail_rows // g.num_rows
        turns, lanes = divmod(num_rows - tails, g.num_tapes)
        used = np.full(g.num_tapes + 1, turns * g.seq_length)
        used[bit_reverse(np.arange(lanes), g.num_tapes.bit_length() - 1)] += g.seq_length
        used[TAIL] = tails * g.seq_length
        return used

    def chunk_tokens(self, tape: int) -> int:
        """Returns the tokens of a window of a tape, or of a tail row."""
        g = self.geometry
        return g.seq_length if tape == TAIL else g.blocks_per_window * g.block_tokens

    def chunk(self, epoch: int, tape: int, at: int) -> tuple[int, int]:
        """Returns the window (of the tail: the row, after the permutation) that holds a tape's token `at`, and where in it."""
        window, start = divmod(at, self.chunk_tokens(tape))
        if tape == TAIL:
            window = int(permute(np.array([window]), self.geometry.num_tail_rows, self.tail_key(epoch))[0])
        return window, start

    def at(self, epoch: int, tape: int, window: int, start: int) -> int:
        """Returns the place on its tape of a window's token `start`: the inverse of `chunk`."""
        if tape == TAIL:
            window = int(unpermute(np.array([window]), self.geometry.num_tail_rows, self.tail_key(epoch))[0])
        return window * self.chunk_tokens(tape) + start

    def window_blocks(self, epoch: int, tape: int, window: int) -> list[int]:
        """Returns where the window's blocks of `block_tokens` tokens start on the source's circle."""
        g = self.geometry
        place = (window * g.num_tapes + tape) * g.blocks_per_window + np.arange(g.blocks_per_window)
        blocks = permute(place, g.num_blocks, derive_key(self._key, _BLOCKS, epoch))
        return [self._turned(epoch, block * g.block_tokens) for block in blocks.tolist()]

    def tail_start(self, epoch: int, row: int) -> int:
        """Returns where a tail row's `seq_length` tokens start on the source's circle; `row` counts after the permutation."""
        g = self.geometry
        return self._turned(epoch, (g.num_main_rows + row) * g.seq_length)

    def find(self, epoch: int, start: int, length: int) -> list[Stretch]:
        """Returns where the tokens [start, start + length) of the source's circle went: the inverse of `window_blocks` and
        `tail_start`, block by block."""
        g = self.geometry
        num_main, num_used = g.num_main_rows * g.seq_length, g.num_rows * g.seq_length
        found: list[Stretch] = []
        skip = 0
        while skip < length:
            at = (start + skip - derive_key(self._key, _ROTATION, epoch)) % self.num_tokens
            if at < num_main:
                block, stop = at // g.block_tokens, (at // g.block_tokens + 1) * g.block_tokens
                place = int(
                    unpermute(np.array([block]), g.num_blocks, derive_key(self._key, _BLOCKS, epoch))[0]
                )
                window, tape = divmod(place // g.blocks_per_window, g.num_tapes)
            elif at < num_used:
                window = (at - num_main) // g.seq_length
                tape, stop = TAIL, num_main + (window + 1) * g.seq_length
            else:
                tape, window, stop = REST, 0, self.num_tokens
            taken = min(stop - at, length - skip)
            found.append(Stretch(tape, window, skip, taken))
            skip += taken
        return found

    def piece_key(self, epoch: int, tape: int, window: int) -> int:
        """Returns the key that shuffles the documents of a window."""
        return derive_key(self._key, _PIECES, epoch, tape, window)

    def _turned(self, epoch: int, position: int) -> int:
        return (position + derive_key(self._key, _ROTATION, epoch)) % self.num_tokens
