"""Every formula of the order of the data, pinned by a table of its values. As with the golden batches, a
failure means that a resumed run would see other tokens: restore the formula, or raise ORDER_VERSION.
"""

from collections.abc import Sequence

import numpy as np
import pytest

from fms_fsdp.data.order.history import History, Segment
from fms_fsdp.data.order.mixture import NUM_SLOTS, Mixture, slot_quotas
from fms_fsdp.data.order.packing import pack_concat, shuffled
from fms_fsdp.data.order.permute import bit_reverse, derive_key, hash64, mix64, permute, unpermute
from fms_fsdp.data.order.source_order import Rest, SourceOrder
from fms_fsdp.data.order.tapes import TAIL, Geometry, Tapes, fit_geometry, locate
from fms_fsdp.extras.bestfit import pack_bestfit

KEY = 0x0123456789ABCDEF
WIDE = Geometry(1500, 1_000_000, 32, 16, 265_500)
ONE_TWO_ONE = slot_quotas({"a": 1, "b": 2, "c": 1})


def lists(arrays: Sequence[np.ndarray]) -> list[list[int]]:
    return [array.tolist() for array in arrays]


def test_mixing_hashes_and_keys() -> None:
    mixed = [16294208416658607535, 10451216379200822465, 5196802822362493915, 16490336266968443936]
    assert mix64(np.array([0, 1, 2**63, 2**64 - 1], dtype=np.uint64)).tolist() == mixed
    names = ["", "a", "lang=en/dataset=web"]
    assert [hash64(name) for name in names] == [0xB4B2797457A0A6E4, 0x2F42665B399EF840, 0x8405CF9B75FFFD56]
    assert [derive_key(1, 2), derive_key(2, 1)] == [0xBCD9DBB49673066B, 0xE06DD043328BD285]
    assert [derive_key(2, 1, 0), derive_key(-1)] == [0x90B96B4DD23BD6EB, 0xE4D971771B652C20]
    assert bit_reverse(np.arange(8), 3).tolist() == [0, 4, 2, 6, 1, 5, 3, 7]


@pytest.mark.parametrize(
    ("n", "index", "image"),
    [
        (1, [0], [0]),
        (2, [0, 1], [0, 1]),
        (3, [0, 1, 2], [0, 1, 2]),
        (8, list(range(8)), [0, 4, 7, 2, 5, 1, 6, 3]),
        (9, list(range(9)), [3, 1, 0, 6, 7, 8, 5, 2, 4]),
        (4096, [0, 1, 2, 3, 1000, 2048, 4094, 4095], [1564, 422, 152, 1216, 2896, 354, 1046, 1034]),
        ((1 << 45) - 7, [0, 1, 10**12], [30916607990173, 26891522088196, 26877764430672]),
    ],
)
def test_permutation(n: int, index: list[int], image: list[int]) -> None:
    assert permute(np.array(index), n, KEY).tolist() == image


def test_shuffles_and_packings() -> None:
    assert shuffled(9, KEY).tolist() == [0, 7, 5, 2, 3, 6, 1, 8, 4]
    concat = pack_concat(np.array([3, 10, 1, 5, 5]), KEY)
    assert lists(concat) == [[0, 2, 3, 1, 4], [0, 0, 0, 0, 0], [3, 1, 5, 10, 5]]
    bestfit = pack_bestfit(np.array([3, 10, 1, 5, 5, 8]), KEY, 8)
    assert lists(bestfit) == [[5, 0, 3, 2, 1, 4, 1], [0, 0, 0, 0, 8, 0, 0], [8, 3, 5, 1, 2, 5, 8]]


def test_quotas_and_their_ties() -> None:
    assert ONE_TWO_ONE == {"a": 16384, "b": 32768, "c": 16384}
    assert slot_quotas({"c": 1, "b": 1, "a": 1}) == {"a": 21846, "b": 21845, "c": 21845}
    assert list(slot_quotas(dict.fromkeys("gfedcba", 1.0)).values()) == [
        9363,
        9363,
        9362,
        9362,
        9362,
        9362,
        9362,
    ]


@pytest.mark.parametrize(
    ("weights", "sources", "numbers", "counts", "far"),
    [
        (
            {"a": 1, "b": 2, "c": 1},  # a tie: a and c become one node, as does b
            "abcbabcbabcbabcb",
            [0, 0, 0, 1, 1, 2, 1, 3, 2, 4, 2, 5, 3, 6, 3, 7],
            {"a": 250001, "b": 500000, "c": 250000},
            ("bcba", [32768000000002, 16384000000001, 32768000000003, 16384000000002]),
        ),
        (
            {"a": 3, "b": 1, "c": 0.01},
            "abaaabaaabaaabaa",
            [0, 0, 1, 2, 3, 1, 4, 5, 6, 2, 7, 8, 9, 3, 10, 11],
            {"a": 748124, "b": 249375, "c": 2502},
            ("baaa", [16343000000001, 49029000000004, 49029000000005, 49029000000006]),
        ),
    ],
)
def test_mixture(
    weights: dict[str, float],
    sources: str,
    numbers: list[int],
    counts: dict[str, int],
    far: tuple[str, list[int]],
) -> None:
    mixture = Mixture(slot_quotas(weights))
    for start, (expected, own) in ((0, (sources, numbers)), (10**9 * NUM_SLOTS + 5, far)):
        source, number = mixture(np.arange(start, start + len(expected)))
        assert ("".join(mixture.names[i] for i in source), number.tolist()) == (expected, own)
    assert mixture.counts(1_000_001) == counts


@pytest.mark.parametrize(
    ("num_rows", "seq_length", "share", "shards", "cut"),
    [
        (127, 1500, 1.0, 1024, (1, 1, 192_000, 127)),
        (128, 1500, 1.0, 1024, (1, 4, 6000, 0)),
        (10_000, 1500, 1.0, 1024, (8, 4, 33_000, 144)),
        (1_000_000, 1500, 0.3, 1024, (256, 4, 132_000, 8768)),
        (240_000, 4096, 1.0, 1024, (256, 4, 65_536, 10_624)),
        (18_000_000, 4096, 0.05, 1024, (32, 16, 262_144, 10_368)),
        (60_001, 128, 1.0, 64, (64, 4, 2048, 2657)),
    ],
)
def test_fit(
    num_rows: int, seq_length: int, share: float, shards: int, cut: tuple[int, int, int, int]
) -> None:
    g = fit_geometry(num_rows, seq_length, share, shards)
    assert (g.num_tapes, g.blocks_per_window, g.block_tokens, g.num_tail_rows) == cut


def test_rows_windows_and_tails_of_a_source() -> None:
    n = np.array([0, 1, 2, 3, 700, 999_999, 1_000_000, 5_123_456])
    slots = locate(n, WIDE.num_rows, WIDE.num_tail_rows, WIDE.num_tapes)
    assert lists(slots) == [
        [0, 0, 0, 0, 0, 0, 1, 5],
        [0, 16, 8, 24, 11, TAIL, 0, 23],
        [0, 0, 0, 0, 21, 3135, 0, WIDE.rows_per_window + 1013],
    ]
    tapes = Tapes("web", 1_500_000_777, WIDE, 7)
    assert tapes.window_blocks(0, 0, 0)[:3] == [1167853898, 332325398, 298341398]
    assert tapes.window_blocks(3, 31, 2)[:3] == [455949650, 720122150, 410814650]
    places = {(0, 0): 181330121, (0, 3135): 186032621, (1, 0): 1401548512, (1, 3135): 1406251012}
    for (epoch, row), start in places.items():
        (turn,) = unpermute(np.array([row]), WIDE.num_tail_rows, tapes.tail_key(epoch)).tolist()
        assert tapes.window_blocks(epoch, TAIL, turn) == [start]
    assert (tapes.piece_key(1, 5, 2), tapes.tail_key(2)) == (0x18DD61937B8E9797, 0x7AC554F27C271BDB)
    assert tapes.used(777)[[0, 1, 2, 31, 32]].tolist() == [37500, 36000, 36000, 36000, 3000]


@pytest.mark.parametrize(
    ("sizes", "rows", "tokens"),
    [((30, 60), (1641, 30), [1500, 1560, 58140, 99300]), ((60, 30), (3232, 0), [2940, 2970, 30870, 97890])],
)
def test_a_change_of_the_row_length_in_an_epoch(
    sizes: tuple[int, int], rows: tuple[int, int], tokens: list[int]
) -> None:
    first, then = (fit_geometry(100_000 // size, size, 1.0, 1) for size in sizes)
    order = SourceOrder("web", 100_000, 7, [(0, first), (50, then)])
    _, rest, epochs = order.laps
    assert isinstance(rest, Rest) and (rest.num_rows, rest.left_out, epochs.epoch) == (*rows, 1)
    tape, token = rest.locate(np.array([50, 51, 1000, 50 + rows[0] - 1]))
    assert (tape.tolist(), token.tolist()) == ([0, 0, 0, 0], tokens)


@pytest.mark.parametrize(
    ("skip_first", "skipped", "rows"),
    [
        (True, [16, 24, 5, 7], {5: [8, 12, 9, 13, 10, 14], 6: [11, 15, 12, 16, 13, 17]}),
        (False, [16, 28, 5, 7], {5: [10, 14, 11, 15, 12, 16], 6: [13, 17, 14, 18, 15, 19]}),
    ],
)
def test_a_history_with_a_skip_and_a_change_at_one_step(
    skip_first: bool, skipped: list[int], rows: dict[int, list[int]]
) -> None:
    """From step 5 on another batch and mixture, and the rows planned for steps 5 and 6 by whichever held are
    passed over."""
    history = History([Segment(0, 4, ONE_TWO_ONE, 32)], [])
    if skip_first:
        history.skip("5:7", 4)
    history.change(4, 6, slot_quotas({"a": 1, "b": 1}), 32)
    if not skip_first:
        history.skip("5:7", 4)
    assert history.state()["skipped"] == [skipped]
    expected = {
        1: ("abcb", [0, 0, 0, 1]),
        4: ("abcb", [3, 6, 3, 7]),
        **{t: ("ababab", n) for t, n in rows.items()},
    }
    for step, (sources, numbers) in expected.items():
        found = history.rows(step)
        assert ("".join(found.names[i] for i in found.source), found.n.tolist()) == (sources, numbers), step
    assert history.consumed_tokens(6) == {"a": 320, "b": 448, "c": 128}
    assert History.from_state(history.state()).rows(6).n.tolist() == rows[6]
