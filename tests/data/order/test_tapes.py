import numpy as np
import pytest

from fms_fsdp.data.order.permute import bit_reverse, permute
from fms_fsdp.data.order.tapes import MAX_ROWS, MAX_TOKENS, TAIL, Geometry, Tapes, fit_geometry, locate


def tapes_of(
    num_tokens: int, seq_length: int, share: float = 1.0, shards: int = 1024, seed: int = 1
) -> Tapes:
    return Tapes("web", num_tokens, fit_geometry(num_tokens // seq_length, seq_length, share, shards), seed)


def columns(g: Geometry) -> tuple[int, int, int]:
    return g.num_rows, g.num_tail_rows, g.num_tapes


@pytest.mark.parametrize("num_rows", [1, 2, 17, 127, 128, 129, 1000, 4097, 60001, 300_000])
@pytest.mark.parametrize("seq_length", [16, 4096, 1 << 17, 1 << 20])
def test_every_row_slot_occurs_exactly_once_an_epoch(num_rows: int, seq_length: int) -> None:
    tapes = tapes_of(num_rows * seq_length + seq_length - 1, seq_length, shards=64)
    g = tapes.geometry
    slots = locate(np.arange(2 * num_rows, 3 * num_rows), *columns(g))
    assert (slots.epoch == 2).all()
    tail = slots.tape == TAIL
    assert (np.sort(slots.row[tail]) == np.arange(g.num_tail_rows)).all()
    place = slots.row * g.num_tapes + slots.tape
    assert (np.sort(place[~tail]) == np.arange(g.num_main_rows)).all()
    assert (
        np.sort(permute(slots.row[tail], g.num_tail_rows, tapes.tail_key(2))) == np.arange(g.num_tail_rows)
    ).all()


@pytest.mark.parametrize("num_rows", [128, 1000, 4097, 60001, 3_000_000])
def test_fit_gives_every_tape_eight_windows_and_a_short_tail(num_rows: int) -> None:
    g = fit_geometry(num_rows, 4096, 0.7, 1024)
    assert g.windows_per_tape >= 8
    assert g.num_tapes & (g.num_tapes - 1) == 0
    assert g.num_tail_rows < g.num_blocks <= num_rows / 4
    assert 4 <= g.blocks_per_window <= 16


def test_reference_scale_has_the_intended_cut() -> None:
    g = fit_geometry(18_000_000, 4096, 0.05, 1024)
    assert (g.num_tapes, g.blocks_per_window) == (32, 16)
    assert 1 << 18 <= g.block_tokens < 1.02 * (1 << 18)


def test_the_rows_of_a_batch_come_from_all_over_a_small_source() -> None:
    """7 M tokens in rows of 128: neighbours on one tape would be rows of the same long document."""
    g = fit_geometry(52_000, 128, 0.4, 1024)
    tapes = locate(np.arange(64), *columns(g)).tape
    assert len(set(tapes.tolist())) >= 60


def test_a_source_below_128_rows_is_all_tail() -> None:
    assert fit_geometry(127, 4096, 1.0, 1024).num_tail_rows == 127
    assert fit_geometry(128, 4096, 1.0, 1024).num_tail_rows == 0


def test_tail_rows_are_spread_evenly_over_the_epoch() -> None:
    tapes = tapes_of(1099 * 64, 64)
    tail = locate(np.arange(1099), *columns(tapes.geometry)).tape == TAIL
    gaps = np.diff(np.flatnonzero(tail))
    assert tail.sum() > 2 and gaps.max() - gaps.min() <= 1


def test_blocks_of_an_epoch_are_disjoint_and_turned_by_another_offset_each_epoch() -> None:
    tapes = tapes_of(1_000_003, 64, shards=4)
    g = tapes.geometry
    offsets = []
    for epoch in range(3):
        starts = [
            start
            for window in range(g.windows_per_tape)
            for tape in range(g.num_tapes)
            for start in tapes.window_blocks(epoch, tape, window)
        ]
        tails = [tapes.window_blocks(epoch, TAIL, row)[0] for row in range(g.num_tail_rows)]
        covered = np.zeros(tapes.num_tokens, dtype=int)
        for start, length in [(s, g.block_tokens) for s in starts] + [(s, 64) for s in tails]:
            np.add.at(covered, np.arange(start, start + length) % tapes.num_tokens, 1)
        assert covered.max() == 1
        assert (covered == 0).sum() < 64
        offsets.append(min(starts))
    assert len(set(offsets)) == 3


def test_consecutive_rows_visit_all_tapes_before_any_twice() -> None:
    tapes = tapes_of(1 << 26, 64, shards=64)
    slots = locate(np.arange(tapes.geometry.num_tapes), *columns(tapes.geometry))
    assert len(set(slots.tape[slots.tape != TAIL].tolist())) >= (slots.tape != TAIL).sum()


@pytest.mark.parametrize("num_tokens", [70, 127 * 64 + 5, 1_000_003])
def test_windows_of_is_the_inverse_of_window_blocks(num_tokens: int) -> None:
    tapes = tapes_of(num_tokens, 64, shards=4)
    g = tapes.geometry
    for epoch in range(2):
        held = np.zeros(num_tokens, dtype=int)
        for begin in range(0, num_tokens, 9973):
            length = min(9973, num_tokens - begin)
            touched = np.zeros(num_tokens, dtype=bool)
            for tape, window in tapes.windows_of(epoch, begin, length):
                starts = tapes.window_blocks(epoch, tape, window)
                size = tapes.window_tokens(tape) // len(starts)
                blocks = [np.arange(start, start + size) % num_tokens for start in starts]
                assert any(((block - begin) % num_tokens < length).any() for block in blocks)
                for block in blocks:
                    touched[block] = True
            held[begin : begin + length] = touched[begin : begin + length]
        assert held.sum() == g.num_rows * 64


@pytest.mark.parametrize("num_tokens", [39 * 10**12, 45 * 10**12, MAX_TOKENS - 1])
@pytest.mark.parametrize("seq_length", [16, 128, 1500, 1 << 16, 1 << 20])
def test_rows_of_the_largest_sources_are_located_exactly(num_tokens: int, seq_length: int) -> None:
    """Against Python's integers, which have no limit; x * num_tail_rows passes 2^63 from 40 T tokens on at
    128 a row."""
    g = fit_geometry(num_tokens // seq_length, seq_length, 1.0, 1024)
    rng = np.random.default_rng(0)
    x = np.concatenate(
        [np.arange(50), rng.integers(0, g.num_rows, 300), np.arange(g.num_rows - 50, g.num_rows)]
    )
    slots = locate(x + 3 * g.num_rows, *columns(g))
    tails = [n * g.num_tail_rows // g.num_rows for n in x.tolist()]
    is_tail = [(n + 1) * g.num_tail_rows // g.num_rows > k for n, k in zip(x.tolist(), tails, strict=True)]
    assert (slots.tape == TAIL).tolist() == is_tail
    places = [n - k for n, k in zip(x.tolist(), tails, strict=True)]  # among the main rows
    rows = [k if tail else m // g.num_tapes for m, k, tail in zip(places, tails, is_tail, strict=True)]
    assert slots.row.tolist() == rows
    lanes = bit_reverse(np.array([m % g.num_tapes for m in places]), g.num_tapes.bit_length() - 1)
    assert (slots.tape == np.where(is_tail, TAIL, lanes)).all()


def test_the_largest_number_of_rows_is_located_exactly() -> None:
    num_rows, num_tails = MAX_ROWS - 1, (1 << 31) - 1
    x = np.array([0, 1, num_rows // 2, num_rows - 2, num_rows - 1])
    found = locate(x, num_rows, num_tails, 1024)
    tails = [n * num_tails // num_rows for n in x.tolist()]
    expected = [(n - k) // 1024 for n, k in zip(x.tolist(), tails, strict=True)]
    assert found.row[found.tape != TAIL].tolist() == [
        row for row, tape in zip(expected, found.tape.tolist(), strict=True) if tape != TAIL
    ]
    assert found.tape[-1] == TAIL and found.row[-1] == num_tails - 1
