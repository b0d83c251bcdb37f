"""Changes of weights, sources, batch size and world size in a running job; ranges passed over."""

from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fms_fsdp.data.batch import fingerprint
from fms_fsdp.data.order.history import History, Segment
from fms_fsdp.data.order.mixture import slot_quotas
from tests.data.corpora import Files, write_corpus, write_lists
from tests.data.oracle import Used, check_epoch, check_step, rows_of

SIZES = {"a": [6000], "b": [3000, 2000], "c": [1500]}


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Files:
    return write_corpus(tmp_path_factory.mktemp("corpus"), SIZES)


def random_flags(rng: np.random.Generator) -> dict[str, Any]:
    names = [str(name) for name in rng.permutation(list(SIZES))[: rng.integers(1, 4)]]
    return {
        "datasets": tuple(names),
        "weights": tuple(float(w) for w in rng.uniform(0.1, 5, size=len(names))),
    }


@pytest.mark.parametrize("seed", range(6))
def test_nothing_is_repeated_or_skipped_through_random_changes(files: Files, seed: int) -> None:
    """Resumes with other sources, weights, batch and world size; all rows ever yielded use each token once an
    epoch."""
    rng = np.random.default_rng(seed)
    used: Used = {}
    numbers: dict[str, list[int]] = {name: [] for name in SIZES}
    state, step = files.stream(4, seq_length=32).state_dict(), 0
    while min(map(len, numbers.values())) < 190 and step < 400:
        batch, flags, steps = int(rng.choice([2, 4, 6, 12])), random_flags(rng), int(rng.integers(0, 6))
        with files.stream(batch, int(rng.integers(2)), 2, seq_length=32, **flags) as stream:
            stream.load_state_dict(state, step)
            for _ in range(steps):
                stream.next_batch()
            state = stream.state_dict()
        with files.stream(batch, seq_length=32, **flags) as whole:
            whole.load_state_dict(state, step + steps)
            for past in range(step + 1, step + steps + 1):
                check_step(files, whole, past, used)
                for place in rows_of(whole).order.addresses(past):
                    numbers[place.source].append(place.n)
        step += steps
    for name, taken in numbers.items():
        assert sorted(taken) == list(range(len(taken))), name
        for epoch in range(len(taken) // (files.num_tokens(name) // 32)):
            check_epoch(files, used, name, epoch, 32)


def test_past_steps_stay_addressable_after_changes(files: Files) -> None:
    with files.stream(4, seq_length=32, datasets=("a", "b"), weights=(1.0, 1.0)) as stream:
        before = [fingerprint(stream.next_batch(), 0) for _ in range(10)]
        state = stream.state_dict()
    with files.stream(6, seq_length=32, datasets=("c", "a", "b"), weights=(1.0, 2.0, 3.0)) as stream:
        changes = stream.load_state_dict(state, 10)
        assert changes[0] == "global batch: 4 -> 6 sequences"
        assert changes[1] == "mixture: a weight, 0.5000 -> 0.3333"
        assert changes[2] == "mixture: c added, 0.0000 -> 0.1667"
        assert [fingerprint(stream.batch_at(step), 0) for step in range(1, 11)] == before
        assert stream.next_batch().tokens_BS.shape == (6, 32)


def test_a_run_that_changes_world_size_yields_the_same_global_batches(files: Files) -> None:
    with files.stream(12, seq_length=32) as stream:
        whole = [fingerprint(stream.next_batch(), 0) for _ in range(12)]
    state, step = None, 0
    for world in (1, 4, 2, 12):
        ranks = [files.stream(12, rank, world, seq_length=32) for rank in range(world)]
        sums = np.zeros(3, dtype=np.uint64)
        states = []
        for place, rank in enumerate(ranks):
            if state is not None:
                assert rank.load_state_dict(state, step) == []
            first = place * (12 // world)
            sums += np.array([fingerprint(rank.next_batch(), first) for _ in range(3)], dtype=np.uint64)
            states.append(rank.state_dict())
            rank.close()
        assert sums.tolist() == whole[step : step + 3]
        state, step = states[-1], step + 3


def test_repeated_resumes_at_one_step_keep_one_entry(files: Files) -> None:
    with files.stream(4, seq_length=32, datasets=("a",), weights=(1.0,)) as stream:
        stream.next_batch()
        state = stream.state_dict()
    for weight in (2.0, 3.0, 4.0):
        with files.stream(4, seq_length=32, datasets=("a", "b"), weights=(1.0, weight)) as stream:
            stream.load_state_dict(state, 1)
            state = stream.state_dict()
    assert [entry["step"] for entry in state["history"]] == [0, 1]
    assert state["history"][1]["weights"] == {"a": 13107, "b": 52429}


@pytest.mark.parametrize("seed", range(4))
def test_find_is_the_inverse_of_rows_through_random_changes_and_skips(seed: int) -> None:
    rng = np.random.default_rng(seed)
    history, step = History([Segment(0, 5, slot_quotas({"a": 2.0, "b": 1.0}), 32)], []), 0
    for _ in range(5):
        names = [str(name) for name in rng.permutation(["a", "b", "c"])[: rng.integers(1, 4)]]
        history.change(
            step,
            int(rng.integers(1, 9)),
            slot_quotas({name: float(rng.uniform(0.1, 3)) for name in names}),
            32,
        )
        a = step + int(rng.integers(1, 6))
        history.skip(f"{a}:{a + int(rng.integers(1, 7))}", step)
        step += int(rng.integers(1, 12))
    seen: dict[str, dict[int, int]] = {}
    for t in range(1, step + 30):
        rows = history.rows(t)
        for source, n in zip(rows.source.tolist(), rows.n.tolist(), strict=True):
            seen.setdefault(rows.names[source], {})[n] = t
    for name, steps in seen.items():
        end = history.position(step + 29)[name]
        for n in range(end):
            found = history.find(name, n)
            assert found is not None
            held_by, is_skipped = found
            assert is_skipped == (n not in steps)
            assert is_skipped or held_by == steps[n]
        if name not in history.segments[-1].quotas:
            assert history.find(name, end) is None


def test_a_change_adds_little_to_the_state(files: Files) -> None:
    import json

    history = History([Segment(0, 8, slot_quotas({f"source-{i:02d}": 1.0 for i in range(20)}), 32)], [])
    before = len(json.dumps(history.state()))
    history.change(10, 8, slot_quotas({f"source-{i:02d}": 1.0 + i for i in range(20)}), 32)
    assert len(json.dumps(history.state())) - before <= 64 * 20


class TestSkip:
    def rows(self, history: History, first: int, last: int) -> list[tuple[int, int]]:
        return [
            pair
            for step in range(first, last + 1)
            for pair in zip(history.rows(step).source.tolist(), history.rows(step).n.tolist(), strict=True)
        ]

    def history(self) -> History:
        return History([Segment(0, 5, slot_quotas({"a": 2.0, "b": 1.0}), 32)], [])

    def test_rows_planned_for_the_steps_are_passed_over_and_nothing_else(self) -> None:
        plain, skipping = self.history(), self.history()
        assert skipping.skip("4:7", 3) == ["skip: the rows planned for steps 4 to 6 are passed over"]
        assert self.rows(skipping, 1, 3) == self.rows(plain, 1, 3)
        assert self.rows(skipping, 4, 10) == self.rows(plain, 7, 13)

    def test_giving_the_flag_again_after_a_restart_changes_nothing(self) -> None:
        history = self.history()
        history.skip("4:7", 3)
        expected = self.rows(history, 1, 20)
        assert history.skip("4:7", 12) == []
        restored = History.from_state(history.state())
        assert restored.skip("4:7,9:10", 6) == ["skip: the rows planned for steps 9 to 9 are passed over"]
        assert self.rows(restored, 1, 8) == expected[:40]
        assert self.rows(restored, 9, 19) == expected[45:]
        alone = History.from_state(self.skipped_once().state())
        assert (
            alone.skip("9:10", 6) and alone.skipped == restored.skipped
        )  # the earlier range need not be named again

    def skipped_once(self) -> History:
        history = self.history()
        history.skip("4:7", 3)
        return history

    def test_skips_and_changes_together_lose_no_row(self) -> None:
        history = self.history()
        history.skip("3:5", 2)
        history.change(2, 7, slot_quotas({"a": 1.0, "b": 3.0}), 32)  # exactly where the skipped range begins
        history.skip("3:5", 2)
        history.change(6, 3, slot_quotas({"a": 1.0, "c": 3.0}), 32)
        history.skip("3:5,8:9", 6)
        again = History.from_state(history.state())
        assert self.rows(again, 1, 30) == self.rows(history, 1, 30)
        skipped = len({g for skip in history.skipped for g in range(skip.start, skip.stop)})
        taken = Counter(
            (history.rows(s).names[i], n)
            for s in range(1, 31)
            for i, n in zip(history.rows(s).source, history.rows(s).n, strict=True)
        )
        assert max(taken.values()) == 1
        assert sum(history.position(30).values()) - skipped == sum(taken.values())
        assert sum(history.consumed_tokens(30).values()) == 32 * sum(taken.values())
        for name, count in history.consumed_tokens(30).items():
            assert count == 32 * sum(1 for source, _ in taken if source == name)

    @pytest.mark.parametrize("text", ["7", "7:7", "8:7", "0:3", "a:b", "1:2:3"])
    def test_malformed_ranges_are_refused(self, text: str) -> None:
        with pytest.raises(ValueError, match=r"skip_steps \(.*\) must be a:b"):
            self.history().skip(text, 0)

    def test_a_range_behind_the_resumed_step_is_refused(self) -> None:
        history = self.history()
        with pytest.raises(ValueError, match=r"skip_steps \(4:7\) must lie after step 5"):
            history.skip("4:7", 5)
        assert history.skipped == []

    def test_skipped_tokens_are_not_counted_as_consumed(self, files: Files) -> None:
        with files.stream(4, seq_length=32, skip_steps="2:4") as stream:
            for _ in range(5):
                stream.next_batch()
            assert sum(int(entry["tokens"]) for entry in stream.consumption().values()) == 5 * 4 * 32


def test_first_step_beyond_agrees_with_counting() -> None:
    history = History([Segment(0, 7, slot_quotas({"a": 2.0, "b": 1.0}), 32)], [])
    for limit in (0, 1, 50, 333):
        step = history.first_step_beyond(["b"], limit, 0)
        assert history.position(step)["b"] > limit >= history.position(step - 1)["b"]


def refused(files: Files, change: dict[str, Any], match: str, batch: int = 4, seed: int = 1) -> None:
    with files.stream(4, seq_length=32) as stream:
        stream.next_batch()
        state = stream.state_dict()
    with (
        files.stream(batch, seed=seed, **{"seq_length": 32, **change}) as stream,
        pytest.raises((ValueError, OSError), match=match),
    ):
        stream.load_state_dict(state, 1)


def test_states_of_other_data_are_refused(files: Files, tmp_path: Path) -> None:
    refused(files, {"packing": "bestfit"}, r"packing \(bestfit\) is concat in the checkpoint")
    refused(files, {}, r"seed \(2\) is 1 in the checkpoint", seed=2)
    refused(files, {"sep_token": 4}, r"sep_token \(4\) is 3 in the checkpoint")


def test_a_changed_source_is_refused_by_name_and_a_missing_one_too(tmp_path: Path) -> None:
    files = write_corpus(tmp_path / "a", SIZES, counts=False)
    with files.stream(4, seq_length=32) as stream:
        state = stream.state_dict()
    (tmp_path / "a" / "b" / "shard-00001.arrow").unlink()
    with (
        files.stream(4, seq_length=32) as stream,
        pytest.raises(ValueError, match=r"source \(b\) has changed since .* 1 shards .* 2 of"),
    ):
        stream.load_state_dict(state, 0)
    (tmp_path / "a" / "b" / "shard-00000.arrow").unlink()
    with (
        files.stream(4, seq_length=32) as stream,
        pytest.raises(FileNotFoundError, match=r"source \(b\) of the checkpoint is missing"),
    ):
        stream.load_state_dict(state, 0)
    other = write_corpus(tmp_path / "b", SIZES, seed=9)
    with (
        other.stream(4, seq_length=32) as stream,
        pytest.raises(ValueError, match=r"source \(a\) has changed"),
    ):
        stream.load_state_dict(state, 0)


@pytest.mark.parametrize("number", [0, 7, 15])
def test_a_shard_written_anew_with_equal_counts_is_refused_by_name(tmp_path: Path, number: int) -> None:
    files = write_corpus(tmp_path, {"a": [400] * 16, "b": [900]})
    with files.stream(4, seq_length=32) as stream:
        state = stream.state_dict()
    path = tmp_path / "a" / f"shard-{number:05d}.arrow"
    text = [document[:-1] for document in files.documents["a"][number]]
    dtype = ("uint16", "uint32")[number % 2]
    write_lists(path, text, dtype=dtype)
    with files.stream(4, seq_length=32) as stream:
        assert stream.load_state_dict(state, 0) == []  # the same tokens again
    write_lists(path, [np.where(document > 100, document - 1, document) for document in text], dtype=dtype)
    match = (
        rf"shard \(a/{path.name}\) has changed since the checkpoint, though its name and counts have not; "
        r"restore the shard"
    )
    with files.stream(4, seq_length=32) as stream, pytest.raises(ValueError, match=match):
        stream.load_state_dict(state, 0)
    path.unlink()
    with files.stream(4, seq_length=32, on_missing="mask") as stream:
        assert stream.load_state_dict(state, 0) == []


def test_a_state_of_another_form_is_refused(files: Files) -> None:
    with files.stream(4, seq_length=32) as stream:
        state = {name: value for name, value in stream.state_dict().items() if name != "state_version"}
        with pytest.raises(ValueError, match=r"state_version \(2\) is None in the checkpoint's data state"):
            stream.load_state_dict(state, 0)


def test_a_moved_corpus_is_the_same_corpus(tmp_path: Path) -> None:
    files = write_corpus(tmp_path / "a", SIZES)
    with files.stream(4, seq_length=32) as stream:
        state, expected = stream.state_dict(), stream.batch_at(3).tokens_BS
    (tmp_path / "a").rename(tmp_path / "elsewhere")
    with Files(tmp_path / "elsewhere").stream(4, seq_length=32) as stream:
        assert stream.load_state_dict(state, 0) == []
        assert (stream.batch_at(3).tokens_BS == expected).all()
