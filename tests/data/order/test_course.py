"""Changes of seq_length in a running job: each token at most once, what is passed over bounded and reported."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from fms_fsdp.data.batch import fingerprint
from fms_fsdp.data.order.course import Course
from fms_fsdp.data.order.tapes import TAIL, fit_geometry, locate
from tests.data.corpora import Files, write_corpus
from tests.data.oracle import Used, check_step, rows_of

SIZES = {"a": [7000, 9000], "b": [3000, 2000], "c": [700]}


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Files:
    return write_corpus(tmp_path_factory.mktemp("corpus"), SIZES)


def train_on(
    files: Files, launches: list[tuple[int, int, dict[str, Any]]], used: Used
) -> tuple[Any, list[str], int]:
    """Runs launches of (steps, batch, flags) one after the other, checks every row, and returns the last stream, all changes
    and the last step."""
    state, step, changes = None, 0, list[str]()
    for steps, batch, flags in launches:
        stream = files.stream(batch, **flags)
        if state is not None:
            changes += stream.load_state_dict(state, step)
        for past in range(step + 1, step + steps + 1):
            check_step(files, stream, past, used)
        step, state = step + steps, stream.state_dict()
    return stream, changes, step


def check_epochs(files: Files, stream: Any, used: Used, step: int) -> int:
    """Asserts of every epoch gone through that what is in no row is the rest and what eras report; returns the latter."""
    passed_over = 0
    for (name, epoch), counts in used.items():
        assert counts.max() == 1, f"a token of {name} came twice in epoch {epoch}"
        course = rows_of(stream).course(name)
        if float(stream.rows.consumption(step)[name]["epoch"]) < epoch + 1:
            continue
        tapes = course.tapes(epoch)
        eras = [era for era in course.eras if era.num_begun + era.passed_over and era.epoch == epoch + 1]
        for era in eras:
            assert era.passed_over < era.tapes.geometry.seq_length * (tapes.geometry.num_tapes + 1)
        lost = len(counts) - counts.sum() - len(counts) % tapes.geometry.seq_length
        assert lost == (eras[-1].passed_over if eras else 0)
        passed_over += lost
    return passed_over


@pytest.mark.parametrize("seed", range(8))
def test_each_token_comes_at_most_once_through_random_changes(files: Files, seed: int) -> None:
    rng = np.random.default_rng(seed)
    used: Used = {}
    launches = []
    for _ in range(9):
        names = [str(name) for name in rng.permutation(list(SIZES))[: rng.integers(1, 4)]]
        flags = {"datasets": tuple(names), "weights": tuple(rng.uniform(0.3, 4, size=len(names)).tolist())}
        flags |= {
            "seq_length": int(rng.choice([16, 24, 32, 50, 64])),
            "logical_shards": int(rng.choice([1, 8])),
        }
        launches.append((int(rng.integers(0, 60)), int(rng.choice([2, 4, 7])), flags))
    stream, changes, step = train_on(files, launches, used)
    assert check_epochs(files, stream, used, step) > 0 and len(used) >= 6
    assert any("seq_length: " in line for line in changes) and any(
        "are passed over" in line for line in changes
    )


@pytest.mark.parametrize("lengths", [(64, 32, 16), (48, 16), (50, 25, 5)])
def test_shorter_rows_that_divide_the_longer_ones_lose_nothing(
    files: Files, lengths: tuple[int, ...]
) -> None:
    used: Used = {}
    flags = {"datasets": ("a", "b"), "weights": (2.0, 1.0)}
    launches = [(19, 4, {"seq_length": length, **flags}) for length in lengths]
    launches.append((40 * lengths[0] // lengths[-1], 4, launches[-1][2]))
    stream, changes, step = train_on(files, launches, used)
    assert check_epochs(files, stream, used, step) == 0 and ("a", 0) in used
    reports = [line for line in changes if "are passed over" in line]
    assert len(reports) == 2 * (len(lengths) - 1) and all(
        ": 0 tokens of the epoch under way" in line for line in reports
    )
    epochs = [stream.rows.consumption(t)["a"]["epoch"] for t in range(step + 1)]
    assert all(0 < b - a < 0.2 for a, b in zip(epochs, epochs[1:], strict=False))
    total = sum(int(counts.sum()) for counts in used.values())
    assert sum(int(c["tokens"]) for c in stream.rows.consumption(step).values()) == total


@pytest.mark.parametrize("seed", range(12))
def test_rows_of_all_eras_divide_the_tapes_and_find_inverts_locate(seed: int) -> None:
    """Without files: every token of every tape is in one row, or counted as passed over, or never reached."""
    rng = np.random.default_rng(seed)
    num_tokens, cuts, n = int(rng.integers(500, 60_000)), [], 0
    for _ in range(5):
        size = int(rng.choice([8, 16, 24, 32, 64]))
        cuts.append((n, fit_geometry(num_tokens // size, size, 1.0, int(rng.choice([1, 4, 32])))))
        n += int(rng.integers(0, num_tokens // size))
    course = Course("web", num_tokens, 1, cuts)
    held: dict[int, dict[int, np.ndarray]] = {}
    for number in range(n):
        era = course.era(number)
        size, local = era.tapes.geometry.seq_length, number - era.first - era.num_begun
        if local < 0:
            epoch, tape, window, start, _ = (np.ravel(part)[0] for part in era.locate(np.array([number])))
        else:
            slots = locate(np.array([local]), *era.tapes.geometry.columns)
            epoch, tape, window, row = (int(part[0]) for part in slots)
            epoch, start = epoch + era.epoch, row * size
            if tape == TAIL:
                window, _ = course.tapes(epoch).chunk(epoch, TAIL, window * size)
        tapes = course.tapes(int(epoch))
        at = tapes.at(int(epoch), int(tape), int(window), int(start))
        if int(epoch) not in held:
            whole = tapes.used(tapes.geometry.num_rows).tolist()
            held[int(epoch)] = {i: np.zeros(length, dtype=int) for i, length in enumerate(whole[:-1])} | {
                TAIL: np.zeros(whole[-1], dtype=int)
            }
        held[int(epoch)][int(tape)][at : at + size] += 1
        assert at + size <= len(held[int(epoch)][int(tape)])
        for token in (0, size - 1):
            assert course.find(int(epoch), int(tape), at + token) == (number, token)
    ended = [epoch for epoch in held if epoch + 1 <= course.era(n).epochs(n)]
    for epoch in ended:
        counts = np.concatenate(list(held[epoch].values()))
        eras = [era for era in course.eras if era.epoch == epoch + 1 and era.num_begun + era.passed_over]
        assert counts.max() == 1
        assert (counts == 0).sum() == (eras[-1].passed_over if eras else 0)
        for tape, tokens in held[epoch].items():
            for at in np.flatnonzero(tokens == 0).tolist():
                assert course.find(epoch, tape, at) is None
    assert [course.rows_until(course.era(m).epochs(m)) for m in (cuts[-1][0], n)] == [cuts[-1][0], n]


def test_a_change_back_at_the_same_step_is_no_change(files: Files) -> None:
    plain = files.stream(4, seq_length=32)
    expected = [fingerprint(plain.batch_at(step), 0) for step in range(1, 41)]
    state = plain.state_dict()
    for length in (64, 16, 32):
        stream = files.stream(4, seq_length=length)
        changes = stream.load_state_dict(state, 20)
        state = stream.state_dict()
        assert changes[0].startswith("seq_length: ")
    assert [fingerprint(stream.batch_at(step), 0) for step in range(1, 41)] == expected


def test_past_steps_keep_their_length_and_every_world_size_agrees(files: Files) -> None:
    state = files.stream(4, seq_length=32).state_dict()
    whole = files.stream(4, seq_length=48)
    whole.load_state_dict(state, 25)
    assert [whole.batch_at(step).tokens_BS.shape for step in (25, 26)] == [(4, 32), (4, 48)]
    for step in (25, 26, 40):
        parts = []
        for rank in range(2):
            stream = files.stream(4, rank, 2, seq_length=48)
            assert stream.load_state_dict(whole.state_dict(), 25) == []
            parts.append(fingerprint(stream.batch_at(step), stream.first_row))
        assert sum(parts) % 2**64 == fingerprint(whole.batch_at(step), 0)


def test_bestfit_keeps_its_length(files: Files) -> None:
    state = files.stream(4, seq_length=32, packing="bestfit").state_dict()
    stream = files.stream(4, seq_length=64, packing="bestfit")
    with pytest.raises(ValueError, match=r"--seq_length \(64\) must stay 32 with --packing=bestfit"):
        stream.load_state_dict(state, 3)


def test_max_epochs_counts_through_a_change(files: Files) -> None:
    flags: dict[str, Any] = {"datasets": ("b",), "weights": (1.0,), "max_epochs": 2.0}
    state = files.stream(4, seq_length=32, **flags).state_dict()
    stream = files.stream(4, seq_length=20, **flags)
    stream.load_state_dict(state, 20)
    assert stream.last_step is not None
    last = stream.rows.consumption(stream.last_step)["b"]["epoch"]
    assert 1.98 < last <= 2 < stream.rows.consumption(stream.last_step + 1)["b"]["epoch"]
