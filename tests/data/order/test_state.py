"""Data states with values that no run writes are refused in one line; those of any run pass."""

from __future__ import annotations

import copy
import json
from typing import Any

import numpy as np
import pytest

from fms_fsdp.data.order.mixture import slot_quotas
from fms_fsdp.data.order.state import check_state
from fms_fsdp.data.order.tapes import MAX_ROWS, fit_geometry
from tests.data.corpora import Files, write_corpus

SIZES = {"a": [9000], "b": [3000, 2000], "c": [1500]}


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Files:
    return write_corpus(tmp_path_factory.mktemp("corpus"), SIZES)


@pytest.mark.parametrize("seed", range(8))
def test_states_of_random_runs_pass(files: Files, seed: int) -> None:
    """Changes of weights, sources, batch, row length and skipped ranges, also several at one step."""
    rng = np.random.default_rng(seed)
    step, skips = int(rng.integers(0, 3)) * 50, list[str]()
    with files.stream(4, seq_length=32) as stream:
        stream.begin_after(step)
        state = stream.state_dict()
    for _ in range(25):
        names = [str(name) for name in rng.permutation(list(SIZES))[: rng.integers(1, 4)]]
        start = step + int(rng.integers(1, 30))
        skips = [*skips[-3:], f"{start}:{start + int(rng.integers(1, 20))}"][: int(rng.integers(1, 5))]
        ahead = [skip for skip in skips if int(skip.split(":")[0]) > step]
        flags: dict[str, Any] = {
            "datasets": tuple(names),
            "weights": tuple(float(w) for w in rng.uniform(0.01, 5, size=len(names))),
            "skip_steps": ",".join(ahead) if rng.random() < 0.5 else "",
            "seq_length": int(rng.choice([16, 32, 64])),
            "logical_shards": int(2 ** rng.integers(0, 8)),
        }
        with files.stream(int(rng.choice([1, 2, 6, 12])), **flags) as stream:
            stream.load_state_dict(json.loads(json.dumps(state)), step)
            step += int(rng.integers(0, 9))
            state = stream.state_dict()
        check_state(json.loads(json.dumps(state)), step)


def test_every_cut_that_a_source_gets_is_one_again_with_as_many_logical_shards_as_it_has_tapes() -> None:
    rng = np.random.default_rng(0)
    for _ in range(3000):
        rows, size = int(2 ** rng.uniform(0, 40)), int(2 ** rng.uniform(0, 18))
        cut = fit_geometry(rows, size, rng.random(), 1 << int(rng.integers(0, 21)))
        assert fit_geometry(rows, size, 1.0, cut.num_tapes) == cut


FAULTS: list[tuple[tuple[Any, ...], Any]] = [
    (("skipped",), None),
    (("skipped", 0), [1, 2, 3]),
    (("skipped", 0), [5, 5, 10, 12]),
    (("skipped", 0), [-1, 5, 10, 12]),
    (("skipped", 0), [36, 44, 0, 12]),
    (("skipped", 0), [36, 44, 12, 12]),
    (("skipped", 0), [36, 2**63, 10, 12]),
    (("skipped", 0), [0, 2**62, 1, 12]),
    (("skipped", 0, 0), True),
    (("history",), []),
    (("history", 0), 3),
    (("history", 0, "step"), 6),
    (("history", 0, "step"), 5),
    (("history", 0, "step"), -1),
    (("history", 1, "step"), 2**50),
    (("history", 1, "batch"), 0),
    (("history", 1, "batch"), 2**31 + 1),
    (("history", 1, "batch"), 2.0),
    (("history", 0, "seq_length"), 0),
    (("history", 0, "seq_length"), 48),
    (("history", 0, "seq_length"), 2**40),
    (("history", 0, "weights"), {}),
    (("history", 0, "weights"), None),
    (("history", 0, "weights"), {"a": 65536, "b": 0}),
    (("history", 0, "weights"), {"a": 65535, "b": 2}),
    (("history", 0, "weights"), {"a": 65537, "b": -1}),
    (("history", 0, "weights"), {"a": 65536.0}),
    (("history", 0, "weights"), {"z": 65536}),
    (("fit",), {}),
    (("fit", "32"), {}),
    (("fit", "0x20"), {}),
    (("fit", "x"), {"a": [1, 4, 128]}),
    (("fit", "32", "a"), None),
    (("fit", "32", "a"), [1, 4]),
    (("fit", "32", "a"), [0, 4, 128]),
    (("fit", "32", "a"), [3, 4, 128]),
    (("fit", "32", "a"), [1, 4, 129]),
    (("fit", "32", "a"), [1, 4, 2**62]),
    (("fit", "32", "a"), [2**62, 4, 128]),
    (("fit", "32", "z"), [1, 4, 128]),
    (("manifest",), {}),
    (("manifest", "a"), None),
    (("manifest", "a", 0), "x"),
    (("manifest", "a", 1), 0),
    (("manifest", "a", 2), 0),
    (("manifest", "a", 2), 2**60),
    (("manifest", "a", 2), 31),
    (("manifest", "a", 3), None),
    (("manifest", "a", 3), "zz"),
]


@pytest.mark.parametrize(("place", "value"), FAULTS, ids=str)
def test_a_damaged_value_of_the_data_state_is_refused_in_one_line(
    files: Files, place: tuple[Any, ...], value: Any
) -> None:
    with files.stream(4, seq_length=32, skip_steps="10:12") as stream:
        state = stream.state_dict()
    with files.stream(2, seq_length=32) as stream:
        stream.load_state_dict(state, 5)
        state = copy.deepcopy(stream.state_dict())
        check_state(state, 7)
        damaged = state
        for key in place[:-1]:
            damaged = damaged[key]
        damaged[place[-1]] = value
        if place == ("fit", "0x20"):
            damaged["0x20"] = damaged["32"]
        with pytest.raises(
            ValueError, match=r"^[^\n]* must [^\n]*; [^\n]* resume from another one$"
        ) as caught:
            stream.load_state_dict(state, 7)
        assert len(str(caught.value)) < 400


def test_weights_of_a_run_sum_to_the_slots_and_another_number_of_tokens_is_refused(files: Files) -> None:
    assert sum(slot_quotas({"a": 1.0, "b": 0.3}).values()) == 65536
    with files.stream(4, seq_length=32) as stream:
        state = copy.deepcopy(stream.state_dict())
        stream.load_state_dict(state, 3)
        state["manifest"]["a"][2] += 1  # the same cut, other tokens
        with pytest.raises(ValueError, match=r"source \(a\) has changed since the checkpoint"):
            stream.load_state_dict(state, 3)


def test_more_rows_than_can_be_counted_are_refused(files: Files) -> None:
    with files.stream(4, seq_length=32) as stream:
        state = copy.deepcopy(stream.state_dict())
    state["history"][0]["batch"] = 1 << 30
    check_state(state, MAX_ROWS >> 30)
    with pytest.raises(ValueError, match="^number of rows by step 65537 "):
        check_state(state, (MAX_ROWS >> 30) + 1)
