"""Where the n-th sequence of a source lies: epochs, tapes, windows, blocks. Pure arithmetic, no table, no
file.

A source is a circle of T tokens (its files in order of their paths). Each epoch turns it by another offset
and cuts it:

    |<- block ->|<- block ->| ...               |<- block ->|<- tail row ->| ... |<- rest, < S tokens ->|
     M tokens                   num_blocks of them            S tokens             used by no row

A *window* is K blocks drawn from the whole circle by a keyed permutation; its documents are shuffled and cut
into rows of S tokens (`packing`). A *tape* (logical shard) is a lane of windows read one after the other; L
tapes advance together, one row each in turn. Tail rows are contiguous, permuted, and spread evenly over the
epoch.

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
FEW_ROWS_PER_BLOCK = 16  # before there are fewer tapes
MIN_ROWS_PER_BLOCK = 4
MIN_WINDOWS_PER_TAPE = 8
TAIL = -1  # in the place of a tape: the tail rows, one after the other

MAX_TOKENS, MAX_ROWS = 1 << 49, 1 << 46  # of a source: as far as `locate` counts exactly
_ROTATION, _BLOCKS, _TAIL, _PIECES = range(1, 5)  # words of the keys drawn here


@dataclass(frozen=True)
class Geometry:
    """The cut of one source: `num_rows` sequences an epoch on `num_tapes` tapes. Fixed at the source's first
    use."""

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

    @cached_property
    def num_main_rows(self) -> int:
        return self.windows_per_tape * self.num_tapes * self.rows_per_window

    @cached_property
    def num_tail_rows(self) -> int:
        return self.num_rows - self.num_main_rows


def fit_geometry(num_rows: int, seq_length: int, share: float, logical_shards: int) -> Geometry:
    """Returns the cut for a source of `num_rows` sequences that supplies `share` (0 to 1) of the mixture.

    Starts from blocks of about 2^18 tokens, 16 to a window, and L = the largest power of two <= share *
    logical_shards. Until every tape has 8 windows, it halves the window down to 4 blocks, then the block down
    to 16 rows, then L, then the block down to 4 rows: many tapes come first, because neighbours on a tape
    are often rows of one document, and a batch of neighbours teaches little. A source of fewer than 128 rows
    gets no window at all: it is all tail. Last, blocks grow to share out the rows evenly, which leaves fewer
    tail rows than there are blocks.

    A run keeps the cut of a source's first use (`Order.fit`); in runs before this rule L was halved first.
    """
    tapes = 1 << (max(1, int(share * logical_shards)).bit_length() - 1)
    blocks, rows = BLOCKS_PER_WINDOW, max(MIN_ROWS_PER_BLOCK, round(BLOCK_TOKENS / seq_length))

    def too_small() -> bool:
        return num_rows < MIN_WINDOWS_PER_TAPE * tapes * blocks * rows

    while too_small() and blocks > MIN_BLOCKS_PER_WINDOW:
        blocks //= 2
    while too_small() and rows // 2 >= FEW_ROWS_PER_BLOCK:
        rows //= 2
    while too_small() and tapes > 1:
        tapes //= 2
    while too_small() and rows > MIN_ROWS_PER_BLOCK:
        rows = max(MIN_ROWS_PER_BLOCK, rows // 2)
    if too_small():  # a window longer than the source: none fits
        return Geometry(seq_length, num_rows, 1, 1, (num_rows + 1) * seq_length)
    windows = num_rows // (tapes * blocks * rows)
    rows = num_rows // (tapes * blocks * windows)
    return Geometry(seq_length, num_rows, tapes, blocks, rows * seq_length)


class Slots(NamedTuple):
    """Where rows lie: arrays of one length. `row` is the row's number on its tape, or among the tail rows
    (`tape` TAIL)."""

    epoch: I64
    tape: I64
    row: I64


def locate(n: I64, num_rows: int | I64, num_tail_rows: int | I64, num_tapes: int | I64) -> Slots:
    """Returns where the sequences with their source's own numbers n >= 0 lie; the geometry may differ from
    one to the next.

    x = n mod N; tails before x: k = floor(x * n_tail / N); x is a tail row if floor((x + 1) * n_tail / N) >
    k. Main row m = x - k lies on the tape bit_reverse(m mod L), at its row m // L.
    """
    epoch, x = np.divmod(n, num_rows)
    # x * n_tail would not fit 64 bits; this is exact for N < 2^46, n_tail < 2^31
    high, low = np.divmod(num_tail_rows, 1 << 16)
    tails, rest = np.divmod(x * high, num_rows)
    more, rest = np.divmod((rest << 16) + x * low, num_rows)
    tails = (tails << 16) + more
    is_tail = rest + num_tail_rows >= num_rows
    turn, lane = np.divmod(x - tails, num_tapes)
    tape = bit_reverse(lane, np.frexp(num_tapes)[1] - 1)
    return Slots(epoch, np.where(is_tail, TAIL, tape), np.where(is_tail, tails, turn))


class Tapes:
    """The addressing of one source: a pure function of (seed, source name, length in tokens, geometry).

    The windows of the tape TAIL are the tail rows, in the order in which they are read.
    """

    def __init__(self, name: str, num_tokens: int, geometry: Geometry, seed: int) -> None:
        self.num_tokens, self.geometry = num_tokens, geometry
        self._key = derive_key(seed, hash64(name))

    def tail_key(self, epoch: int) -> int:
        """Returns the key that permutes the epoch's tail rows."""
        return derive_key(self._key, _TAIL, epoch)

    def piece_key(self, epoch: int, tape: int, window: int) -> int:
        """Returns the key that shuffles the documents of a window."""
        return derive_key(self._key, _PIECES, epoch, tape, window)

    def used(self, num_rows: int) -> I64:
        """Returns how many tokens of each tape, and last of the tail, the first `num_rows` sequences of an
        epoch use: L + 1."""
        g = self.geometry
        tails = num_rows * g.num_tail_rows // g.num_rows
        turns, lanes = divmod(num_rows - tails, g.num_tapes)
        used = np.full(g.num_tapes + 1, turns * g.seq_length)
        used[bit_reverse(np.arange(lanes), g.num_tapes.bit_length() - 1)] += g.seq_length
        used[TAIL] = tails * g.seq_length
        return used

    def window_tokens(self, tape: int) -> int:
        """Returns the tokens of a window of a tape."""
        g = self.geometry
        return g.seq_length if tape == TAIL else g.blocks_per_window * g.block_tokens

    def window_blocks(self, epoch: int, tape: int, window: int) -> list[int]:
        """Returns where the equal blocks that fill a window start on the source's circle."""
        g = self.geometry
        if tape == TAIL:
            row = permute(np.array([window]), g.num_tail_rows, self.tail_key(epoch))
            starts = (g.num_main_rows + row) * g.seq_length
        else:
            place = (window * g.num_tapes + tape) * g.blocks_per_window + np.arange(g.blocks_per_window)
            starts = permute(place, g.num_blocks, derive_key(self._key, _BLOCKS, epoch)) * g.block_tokens
        turned: list[int] = ((starts + self._rotation(epoch)) % self.num_tokens).tolist()
        return turned

    def windows_of(self, epoch: int, start: int, length: int) -> set[tuple[int, int]]:
        """Returns (tape, window) of all windows that hold tokens of [start, start + length) of the source's
        circle: the inverse of `window_blocks`. The rest of the epoch is in none."""
        g = self.geometry
        num_main, num_used = g.num_main_rows * g.seq_length, g.num_rows * g.seq_length
        found = set()
        while length > 0:
            at = (start - self._rotation(epoch)) % self.num_tokens
            if at < num_main:
                block = at // g.block_tokens
                stop = (block + 1) * g.block_tokens
                place = unpermute(np.array([block]), g.num_blocks, derive_key(self._key, _BLOCKS, epoch))[0]
                window, tape = divmod(int(place) // g.blocks_per_window, g.num_tapes)
                found.add((tape, window))
            elif at < num_used:
                row = (at - num_main) // g.seq_length
                stop = num_main + (row + 1) * g.seq_length
                window = unpermute(np.array([row]), g.num_tail_rows, self.tail_key(epoch))[0]
                found.add((TAIL, int(window)))
            else:
                stop = self.num_tokens
            start, length = start + stop - at, length - (stop - at)
        return found

    def _rotation(self, epoch: int) -> int:
        return derive_key(self._key, _ROTATION, epoch) % self.num_tokens
