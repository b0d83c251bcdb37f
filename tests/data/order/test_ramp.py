"""A batch that grows: its steps as arithmetic, and that it changes nothing in the order of the rows."""

from __future__ import annotations

import json
import random
from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np
import pytest

from fms_fsdp.config import TrainConfig, TrainingConfig, keep_global_batch, resolve_batch
from fms_fsdp.config.ramp import BatchIntervals, BatchRamp
from fms_fsdp.data.batch import fingerprint
from fms_fsdp.data.order.history import History, Segment
from fms_fsdp.data.order.mixture import slot_quotas
from fms_fsdp.flags import parse_flags
from tests.data.corpora import Files, write_corpus

IRREGULAR = {"a": 0.37, "b": 0.41, "c": 0.22}


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Files:
    return write_corpus(tmp_path_factory.mktemp("corpus"), {"a": [6000], "b": [3000, 2000], "c": [1500]})


def test_the_ramp_of_tr1_13b() -> None:
    """Its chronicle: 16 rows and 16 more every 79,365 samples, up to 1024 after 5M samples.

    It counts 4960, 2480, 1653, 1240 steps: the quotients, where whole steps are one more.
    """
    ramp = BatchRamp.to(1024, (16, 16, 5_000_000))
    batches = BatchIntervals(ramp)
    steps = [after.step - before.step for before, after in pairwise(batches.intervals)]
    assert len(steps) == 63 and steps[:6] == [4961, 2480, 1654, 1240, 992, 827]
    assert [5_000_000 // 63 // (16 * k) for k in (1, 2, 3, 4)] == [4960, 2480, 1653, 1240]
    assert batches.intervals[-1] == (23_456, 5_000_528, 1024)
    assert batches.steps_for(216_320) == 8641, "the warm-up, which the chronicle takes for 2000 steps"
    assert batches.rows_of(2000) == 32_000
    assert sum(min(16 * (1 + step // 160), 1024) for step in range(2000)) == 216_320, "+16 every 160 steps"


@pytest.mark.parametrize("seed", range(30))
def test_intervals_are_those_of_counting_step_by_step(seed: int) -> None:
    draw = random.Random(seed)
    start, increment, count = draw.randint(1, 9), draw.randint(1, 9), draw.randint(1, 12)
    end = start + count * increment
    multiple = draw.choice([number for number in range(1, end + 1) if end % number == 0])
    ramp = BatchRamp.to(end, (start, increment, draw.randint(1, 900), multiple))
    seen = first = draw.choice([0, draw.randint(0, 1000)])
    batches, ends = BatchIntervals(ramp, first), [0]
    for steps in range(300):
        assert batches.rows_of(steps) == seen - first
        interval = min(count, seen * count // ramp.samples)
        seen += max(multiple, (start + interval * increment) // multiple * multiple)
        ends.append(seen - first)
    assert all(before.batch < after.batch for before, after in pairwise(batches.intervals))
    for rows in range(0, ends[-1], 7):
        assert batches.steps_for(rows) == next(step for step, end in enumerate(ends) if end >= rows)


def pairs(history: History, first: int, last: int) -> list[tuple[str, int]]:
    rows = [history.rows(step) for step in range(first, last + 1)]
    return [
        (row.names[s], n) for row in rows for s, n in zip(row.source.tolist(), row.n.tolist(), strict=True)
    ]


def test_the_rows_by_g_are_those_of_a_run_without_a_ramp() -> None:
    quotas = slot_quotas(IRREGULAR)
    plain = History([Segment(0, 30, quotas, 32)], [])
    ramped = History([Segment(0, 30, quotas, 32, (2, 4, 5000))], [])
    without, within = pairs(plain, 1, 300), pairs(ramped, 1, 900)
    assert within[: len(without)] == without
    sizes = [len(ramped.rows(step).n) for step in range(1, 900)]
    assert sizes == sorted(sizes) and set(sizes) == set(range(2, 31, 4))
    grown = len(json.dumps(ramped.state())) - len(json.dumps(plain.state()))
    assert 0 < grown < 64 and len(ramped.state()["history"]) == 1


def test_a_ramp_goes_on_through_other_weights_and_skipped_rows() -> None:
    history = History([Segment(0, 30, slot_quotas(IRREGULAR), 32, (2, 4, 5000))], [])
    history.skip("40:60", 10)
    sizes = [history.segment(step).batch_at(step) for step in range(1, 900)]
    history.change(100, 30, slot_quotas({"b": 1.0, "c": 2.0}), 32, (2, 4, 5000))
    assert [history.segment(step).batch_at(step) for step in range(1, 900)] == sizes
    again = History.from_state(json.loads(json.dumps(history.state())))
    assert pairs(again, 1, 300) == pairs(history, 1, 300)
    seen = pairs(history, 1, 300)
    assert len(set(seen)) == len(seen)
    for step in (39, 40, 99, 100, 101, 250):
        rows = history.rows(step)
        for source, n in zip(rows.source.tolist(), rows.n.tolist(), strict=True):
            assert history.find(rows.names[source], n) == (step, False)
    assert sum(history.consumed_tokens(300).values()) == 32 * len(seen)
    assert history.change(300, 30, slot_quotas({"b": 1.0, "c": 2.0}), 32) == ["batch ramp: 2,4,5000 -> none"]
    assert len(history.rows(301).n) == 30


@pytest.mark.parametrize(
    ("world", "rampup"), [(1, (4, 4, 90)), (2, (4, 4, 90)), (2, (5, 1, 90, 4))], ids=["1", "2", "rounded"]
)
def test_a_stream_with_a_ramp_goes_on_anywhere_at_any_world_size(
    files: Files, world: int, rampup: tuple[int, ...]
) -> None:
    flags: dict[str, Any] = {"datasets": tuple(IRREGULAR), "weights": tuple(IRREGULAR.values())}
    flags |= {"seq_length": 32, "rampup": rampup}
    with files.stream(12, **flags) as stream:
        whole = [stream.next_batch() for _ in range(20)]
    sizes = [len(batch.tokens_BS) for batch in whole]
    assert sizes == sorted(sizes) and {*sizes} == {4, 8, 12}
    state = None
    for step in range(1, 21):
        sums = np.zeros(1, dtype=np.uint64)
        for rank in range(world):
            with files.stream(12, rank, world, **flags) as stream:
                if state is not None:
                    assert stream.load_state_dict(state, step - 1) == []
                batch = stream.next_batch()
                sums += np.array([fingerprint(batch, rank * len(batch.tokens_BS))], dtype=np.uint64)
                kept = stream.state_dict()
        state = kept
        assert int(sums[0]) == fingerprint(whole[step - 1], 0), step


def section(**flags: Any) -> TrainingConfig:
    return TrainingConfig(**flags)


def test_micro_steps_divide_every_batch_of_a_ramp() -> None:
    plan = resolve_batch(section(global_batch_size=24, rampup_batch_size=(3, 3, 100)), 1)
    assert (plan.batch_size, plan.grad_accum_steps, plan.rampup) == (1, 24, (3, 3, 100))
    plan = resolve_batch(section(global_batch_size=24, rampup_batch_size=(4, 4, 100)), 2)
    assert (plan.batch_size, plan.grad_accum_steps) == (2, 6)
    resumed = section(rampup_batch_size=(4, 4, 100))
    for ranks, rows in ((1, 4), (2, 2), (4, 1)):
        plan = keep_global_batch(resumed, ranks, total=24, usual_rows=12)
        assert (plan.batch_size, plan.global_batch_size) == (rows, 24)


def test_rounded_batches_are_those_that_ranks_and_micro_steps_can_share() -> None:
    """The rows do not depend on the number of ranks, so that a run goes on alike on fewer."""
    rounded = section(global_batch_size=24, rampup_batch_size=(3, 3, 100), rampup_round=8, batch_size=4)
    for ranks in (1, 2):
        plan = resolve_batch(rounded, ranks)
        assert plan.rampup == (3, 3, 100, 8)
        assert [interval.batch for interval in BatchIntervals(plan.ramp).intervals] == [8, 16, 24]
    with pytest.raises(ValueError, match=r"^--rampup_batch_size \(3,3,100\) .* x batch_size \(4\)"):
        resolve_batch(rounded, 3)
    with pytest.raises(ValueError, match=r"^--rampup_round \(9\) must divide .* \(24\); choose .*=3$"):
        resolve_batch(section(global_batch_size=24, rampup_batch_size=(3, 3, 100), rampup_round=9), 1)


@pytest.mark.parametrize(
    ("flags", "ranks", "text"),
    [
        ({"rampup_batch_size": (4, 4)}, 1, "must be start,increment,samples; write 16,16,5_000_000"),
        ({"rampup_batch_size": (4, 6, 100)}, 1, "choose a start below it and an increment that divides 20"),
        ({"rampup_batch_size": (24, 1, 100)}, 1, "must lead from 24 rows to the global batch (24)"),
        ({"rampup_batch_size": (32, 8, 100)}, 1, "must lead from 32 rows to the global batch (24)"),
        ({"rampup_batch_size": (3, 3, 100)}, 2, "unlike 3,9,15,21; add --rampup_round=2 or write --ramp"),
        (
            {"rampup_batch_size": (6, 6, 9), "batch_size": 4},
            1,
            "unlike 6,18; write --batch_size=6 or add --rampup_micro_batch=True or add --rampup_round=4 or",
        ),
    ],
)
def test_a_ramp_that_does_not_divide_is_refused(flags: dict[str, Any], ranks: int, text: str) -> None:
    for resolve in (
        resolve_batch,
        lambda given, size: keep_global_batch(given, size, total=24, usual_rows=4),
    ):
        with pytest.raises(ValueError, match=r"^--rampup_batch_size \(.*\) must ") as refused:
            resolve(section(**{"global_batch_size": 24} | flags), ranks)
        assert text in str(refused.value)
    assert "\n" not in str(refused.value)


def test_a_ramp_of_too_many_increments_is_refused() -> None:
    with pytest.raises(ValueError, match="at most 10,000 of them"):
        resolve_batch(section(global_batch_size=20_002, rampup_batch_size=(1, 1, 100)), 1)


def test_epochs_are_counted_by_the_stream(files: Files) -> None:
    """`num_epochs`: the first step by whose end the source, or so many rows as all have, are gone through."""
    flags: dict[str, Any] = {"datasets": ("a", "c"), "weights": (1.0, 3.0), "seq_length": 32}
    rows = {name: files.num_tokens(name) // 32 for name in ("a", "c")}
    for rampup in ((), (2, 2, 60)):
        with files.stream(8, rampup=rampup, **flags) as stream:
            producer: Any = stream.rows
            taken: dict[str, int] = {"a": 0, "c": 0}
            ends: dict[tuple[str, float], int] = {}
            for step in range(1, 200):
                for place in producer.order.addresses(step):
                    taken[place.source] += 1
                if taken["c"] >= 2 * rows["c"]:
                    ends.setdefault(("c", 2.0), step)
                if sum(taken.values()) >= sum(rows.values()):
                    ends.setdefault(("", 1.0), step)
            for (source, epochs), step in ends.items():
                found, text = producer.end_of_epochs(source, epochs, 0)
                assert found == step and f"by step {step:,}" in text and "c " in text
            assert len(ends) == 2
            with pytest.raises(
                ValueError, match=r"--num_epochs \(b:1\) must name a source of the mixture, which has a, c"
            ):
                producer.end_of_epochs("b", 1.0, 0)


@pytest.mark.parametrize("text", ["0", "-2", "x", "a:", "a:0", "1e9", "1:2:x", "nan", "inf"])
def test_epochs_that_are_no_number_are_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"^--num_epochs \(.*\) must be a number above 0"):
        parse_flags(TrainConfig, [f"--num_epochs={text}"])


def test_epochs_stand_alone_and_minus_one_is_none() -> None:
    assert section(num_epochs="-1", num_steps=3).epochs() is None
    assert section(num_epochs="web/en:1.5").epochs() == ("web/en", 1.5)
    with pytest.raises(ValueError, match=r"--num_epochs \(2\) must not be given beside --num_tokens"):
        TrainConfig(training=section(num_epochs="2", num_tokens=100))


def test_micro_steps_of_a_ramp_take_the_most_rows_that_divide_a_step() -> None:
    flags = section(
        rampup_batch_size=(2, 2, 100), rampup_micro_batch=True, batch_size=8, global_batch_size=24
    )
    for plan in (resolve_batch(flags, 1), keep_global_batch(flags, 1, total=24, usual_rows=2)):
        assert (plan.batch_size, plan.grad_accum_steps) == (8, 3)
        found = {rows: plan.rows_at_once(rows) for rows in range(2, 26, 2)}
        assert found == {2: 2, 4: 4, 6: 6, 8: 8, 10: 5, 12: 6, 14: 7, 16: 8, 18: 6, 20: 5, 22: 2, 24: 8}
    flags = replace(flags, batch_size=6)
    two = resolve_batch(flags, 2)
    assert [two.rows_at_once(rows // 2) for rows in (2, 8, 10, 14, 24)] == [1, 4, 5, 1, 6]
    usual = resolve_batch(section(rampup_batch_size=(8, 8, 100), batch_size=4, global_batch_size=24), 1)
    assert [usual.rows_at_once(rows) for rows in (8, 16, 24)] == [4, 4, 4]
    without_rows = section(rampup_batch_size=(2, 2, 100), rampup_micro_batch=True)
    assert keep_global_batch(without_rows, 2, total=24, usual_rows=6).batch_size == 6
    with pytest.raises(
        ValueError, match=r"divisible by data-parallel size \(4\), unlike 2,6,10,14,18,…; add --ramp"
    ):
        resolve_batch(flags, 4)
    plain = section(rampup_batch_size=(2, 2, 100), batch_size=8, global_batch_size=24)
    with pytest.raises(ValueError, match=r"add --rampup_micro_batch=True or add --rampup_round=8 or"):
        resolve_batch(plain, 1)
