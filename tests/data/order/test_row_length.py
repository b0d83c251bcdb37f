"""Changes of seq_length in a running job: each token at most once, what is left out bounded and reported."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fms_fsdp.data.batch import fingerprint
from fms_fsdp.data.order.source_order import Epochs, Rest, SourceOrder
from fms_fsdp.data.order.tapes import fit_geometry
from fms_fsdp.data.stream import TokenStream
from tests.data.corpora import Files, write_corpus
from tests.data.oracle import Used, check_step, rows_of

SIZES = {"a": [7000, 9000], "b": [3000, 2000], "c": [700]}
Launch = tuple[int, int, dict[str, Any]]  # steps, batch, flags
GOLDEN = [  # length, steps, sum of their fingerprints
    (32, 17, 0x4DAC9F61FD5098D1),
    (96, 12, 0x933CDECB84C18B0D),
    (48, 30, 0xB11C2442155CBC50),
    (16, 90, 0x9BC57AF54EDD11D0),
    (96, 30, 0x19FC14981BE3A5BD),
]


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Files:
    return write_corpus(tmp_path_factory.mktemp("corpus"), SIZES)


def train_on(files: Files, launches: list[Launch], used: Used) -> tuple[TokenStream, list[str], int]:
    """Runs launches one after the other, checks every row, and returns the last stream, all changes and the
    last step."""
    state, step, changes = None, 0, list[str]()
    for steps, batch, flags in launches:
        stream = files.stream(batch, **flags)
        if state is not None:
            changes += stream.load_state_dict(state, step)
        for past in range(step + 1, step + steps + 1):
            check_step(files, stream, past, used)
        step, state = step + steps, stream.state_dict()
    return stream, changes, step


def check_epochs(used: Used, stream: TokenStream, step: int) -> int:
    """Asserts of every epoch gone through that what is in no row is its rest and what changes report; returns
    the latter."""
    left_out = 0
    for (name, epoch), counts in used.items():
        assert counts.max() == 1, f"a token of {name} came twice in epoch {epoch}"
        order = rows_of(stream).order.source(name)
        if float(stream.rows.consumption(step)[name]["epoch"]) < epoch + 1:
            continue
        geometry = order.tapes(epoch).geometry
        rests = [lap for lap in order.laps if isinstance(lap, Rest) and lap.epoch == epoch]
        assert all(rest.left_out < rest.seq_length * (geometry.num_tapes + 1) for rest in rests)
        lost = len(counts) - counts.sum() - len(counts) % geometry.seq_length
        assert lost == (rests[-1].left_out if rests else 0)
        left_out += lost
    return left_out


def random_lengths(rng: np.random.Generator, count: int) -> list[int]:
    """A chain of changes by 2, 3, 8 and 1/2, all of whose lengths divide the longest."""
    lengths = [16]
    while len(lengths) < count:
        new = int(lengths[-1] * rng.choice([1, 2, 3, 8, 0.5]))
        if new >= 4 and new <= 192 and all(max(*lengths, new) % size == 0 for size in [*lengths, new]):
            lengths.append(new)
    return lengths


@pytest.mark.parametrize("seed", range(8))
def test_each_token_comes_at_most_once_through_random_changes(files: Files, seed: int) -> None:
    rng = np.random.default_rng(seed)
    used: Used = {}
    launches = []
    for length in random_lengths(rng, 9):
        names = [str(name) for name in rng.permutation(list(SIZES))[: rng.integers(1, 4)]]
        flags = {"datasets": tuple(names), "weights": tuple(rng.uniform(0.3, 4, size=len(names)).tolist())}
        flags |= {"seq_length": length, "logical_shards": int(rng.choice([1, 8]))}
        launches.append((int(rng.integers(0, 6000 // length)), int(rng.choice([1, 2, 3])), flags))
    stream, changes, step = train_on(files, launches, used)
    check_epochs(used, stream, step)
    assert len(used) >= 4 and any("seq_length: " in line for line in changes)


@pytest.mark.parametrize("seed", range(3))
def test_resuming_at_any_step_and_world_size_gives_the_same_rows(files: Files, seed: int) -> None:
    rng = np.random.default_rng(seed)
    state, step = None, 0
    for length in random_lengths(rng, 5):
        whole = files.stream(4, seq_length=length)
        if state is not None:
            whole.load_state_dict(state, step)
        stop = step + int(rng.integers(1, 25))
        prints = [fingerprint(whole.batch_at(past), 0) for past in range(1, stop + 1)]
        for at in range(step, stop):
            world = int(rng.choice([1, 2, 4]))
            ranks = [files.stream(4, rank, world, seq_length=length) for rank in range(world)]
            for rank in ranks:
                assert rank.load_state_dict(whole.state_dict(), at) == []
            past = int(rng.integers(1, stop + 1))
            for batch_step in (at + 1, past):
                firsts = range(0, 4, 4 // world)
                found = zip(ranks, firsts, strict=True)
                parts = [fingerprint(rank.batch_at(batch_step), first) for rank, first in found]
                assert sum(parts) % 2**64 == prints[batch_step - 1]
        state, step = whole.state_dict(), stop


def test_rows_after_changes_are_those_of_order_version_1(tmp_path: Path) -> None:
    files = write_corpus(tmp_path, SIZES, fixed=True)
    state, step = None, 0
    for length, steps, expected in GOLDEN:
        stream = files.stream(4, seq_length=length, datasets=("a", "b", "c"), weights=(4.0, 2.0, 0.3))
        if state is not None:
            stream.load_state_dict(state, step)
        prints = [fingerprint(stream.batch_at(past), 0) for past in range(step + 1, step + steps + 1)]
        assert sum(prints) % 2**64 == expected, length
        state, step = stream.state_dict(), step + steps


@pytest.mark.parametrize("lengths", [(64, 32, 16), (48, 16), (50, 25, 5)])
def test_shorter_rows_lose_nothing(files: Files, lengths: tuple[int, ...]) -> None:
    used: Used = {}
    flags = {"datasets": ("a", "b"), "weights": (2.0, 1.0)}
    launches: list[Launch] = [(19, 4, {"seq_length": length, **flags}) for length in lengths]
    launches.append((40 * lengths[0] // lengths[-1], 4, launches[-1][2]))
    stream, changes, step = train_on(files, launches, used)
    assert check_epochs(used, stream, step) == 0 and ("a", 0) in used
    reports = [line for line in changes if "are left out" in line]
    assert len(reports) == 2 * (len(lengths) - 1)
    assert all(": 0 tokens of the epoch under way" in line for line in reports)
    epochs = [stream.rows.consumption(t)["a"]["epoch"] for t in range(step + 1)]
    assert all(0 < b - a < 0.2 for a, b in zip(epochs, epochs[1:], strict=False))
    total = sum(int(counts.sum()) for counts in used.values())
    assert sum(int(c["tokens"]) for c in stream.rows.consumption(step).values()) == total


def test_every_change_reports_what_it_leaves_out_also_one_to_a_length_used_before(files: Files) -> None:
    state, step, reported = None, 0, list[int]()
    for length in (32, 64, 32, 64):
        stream = files.stream(4, seq_length=length, datasets=("b",), weights=(1.0,))
        changes = stream.load_state_dict(state, step) if state is not None else []
        reported += [int(found[1]) for line in changes if (found := re.search(r"b: (\d+) tokens", line))]
        state, step = stream.state_dict(), step + 3
    assert len(reported) == 3
    assert rows_of(stream).order.source("b").left_out == reported[-1]


@pytest.mark.parametrize("seed", range(12))
def test_rows_of_all_laps_divide_the_tapes_and_row_at_inverts_them(seed: int) -> None:
    """Without files: every token of every tape is in one row, or counted as left out, or never reached."""
    rng = np.random.default_rng(seed)
    num_tokens, cuts, n = int(rng.integers(600, 20_000)), [], 0
    for size in random_lengths(rng, 5):
        cuts.append((n, fit_geometry(num_tokens // size, size, 1.0, int(rng.choice([1, 4, 32])))))
        n += int(rng.integers(0, num_tokens // size // 2))
    order = SourceOrder("web", num_tokens, 1, cuts)
    held: dict[tuple[int, int], np.ndarray] = {}
    for number in range(n):
        before, after = order.position(number), order.position(number + 1)
        if after.epoch > before.epoch:  # the last row of its epoch: what is not used then is left out
            continue
        (tape,) = np.flatnonzero(after.used != before.used).tolist()
        token, size = int(before.used[tape]), order.lap(number).seq_length
        assert int(after.used[tape]) == token + size
        counts = held.setdefault((before.epoch, tape), np.zeros(num_tokens, dtype=int))
        counts[token : token + size] += 1
        for inside in (token, token + size - 1):
            assert order.row_at(before.epoch, tape, inside) == number
    assert all(counts.max() == 1 for counts in held.values())
    last = order.laps[-1]
    assert isinstance(last, Epochs)
    for number in (0, n // 2, n, last.first, last.first + last.tapes.geometry.num_rows + 1):
        assert order.num_rows_until(order.epochs(number)) == number


def test_a_change_back_at_the_same_step_is_no_change(files: Files) -> None:
    plain = files.stream(4, seq_length=32)
    expected = [fingerprint(plain.batch_at(step), 0) for step in range(1, 41)]
    state = plain.state_dict()
    for length in (64, 16, 32):
        stream = files.stream(4, seq_length=length)
        changes = stream.load_state_dict(state, 20)
        state = stream.state_dict()
        assert changes[0].startswith("seq_length: ")
    assert len(changes) == 1
    assert [fingerprint(stream.batch_at(step), 0) for step in range(1, 41)] == expected


def test_past_steps_keep_their_length(files: Files) -> None:
    state = files.stream(4, seq_length=32).state_dict()
    stream = files.stream(4, seq_length=64)
    stream.load_state_dict(state, 25)
    assert [stream.batch_at(step).tokens_BS.shape for step in (25, 26)] == [(4, 32), (4, 64)]


@pytest.mark.parametrize(
    ("lengths", "text"),
    [
        ((32, 48), r"--seq_length \(48\) must divide 32 or be a multiple of 32"),
        ((32, 64, 16, 48), r"--seq_length \(48\) must .* \(so far: 16, 32, 64\); choose such a length"),
        ((16, 32, 16, 80), r"--seq_length \(80\) must divide 16 or be a multiple of 16, and all lengths"),
    ],
)
def test_lengths_that_do_not_divide_are_refused(files: Files, lengths: tuple[int, ...], text: str) -> None:
    state, step = None, 0
    for length in lengths[:-1]:
        stream = files.stream(4, seq_length=length)
        if state is not None:
            stream.load_state_dict(state, step)
        state, step = stream.state_dict(), step + 3
    assert state is not None
    before = stream.state_dict()
    with pytest.raises(ValueError, match=text):
        files.stream(4, seq_length=lengths[-1]).load_state_dict(state, step)
    assert state == before


def test_bestfit_keeps_its_length(files: Files) -> None:
    state = files.stream(4, seq_length=32, packing="bestfit").state_dict()
    stream = files.stream(4, seq_length=64, packing="bestfit")
    with pytest.raises(ValueError, match=r"--seq_length \(64\) must stay 32 with --packing=bestfit"):
        stream.load_state_dict(state, 3)


def test_max_epochs_counts_through_a_change(files: Files) -> None:
    flags: dict[str, Any] = {"datasets": ("b",), "weights": (1.0,), "max_epochs": 2.0}
    state = files.stream(4, seq_length=40, **flags).state_dict()
    stream = files.stream(4, seq_length=20, **flags)
    stream.load_state_dict(state, 20)
    assert stream.last_step is not None
    last = stream.rows.consumption(stream.last_step)["b"]["epoch"]
    assert 1.98 < last <= 2 < stream.rows.consumption(stream.last_step + 1)["b"]["epoch"]
