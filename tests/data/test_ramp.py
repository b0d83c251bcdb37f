"""A batch that grows: its steps as arithmetic, and that it changes nothing in the order of the rows."""

from __future__ import annotations

import random
from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np
import pytest

from fms_fsdp.config import BatchPlan, TrainConfig, TrainingConfig, plan_batch
from fms_fsdp.config.parse import parse_flags
from fms_fsdp.data.batch import fingerprint
from tests.data.corpora import Files, write_corpus

IRREGULAR = {"a": 0.37, "b": 0.41, "c": 0.22}


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Files:
    return write_corpus(
        tmp_path_factory.mktemp("corpus"), {"a": [6000], "b": [3000, 2000], "c": [1500]}
    )


def test_the_ramp_of_tr1_13b() -> None:
    """Its chronicle: 16 rows and 16 more every 79,365 samples, up to 1024 after 5M samples.

    It counts 4960, 2480, 1653, 1240 steps: the quotients, where whole steps are one more.
    """
    batch = BatchPlan(1024, 1, 1, (16, 16, 5_000_000))
    phases = batch.phases()
    steps = [after.step - before.step for before, after in pairwise(phases)]
    assert len(steps) == 63 and steps[:6] == [4961, 2480, 1654, 1240, 992, 827]
    assert [5_000_000 // 63 // (16 * k) for k in (1, 2, 3, 4)] == [4960, 2480, 1653, 1240]
    assert phases[-1] == (23_456, 5_000_528, 1024)
    assert batch.steps_for(216_320) == 8641, "the warm-up, which the chronicle takes for 2000 steps"
    assert batch.samples_in(2000) == 32_000
    assert sum(min(16 * (1 + step // 160), 1024) for step in range(2000)) == 216_320, (
        "+16 every 160 steps"
    )


@pytest.mark.parametrize("seed", range(30))
def test_intervals_are_those_of_counting_step_by_step(seed: int) -> None:
    draw = random.Random(seed)
    start, increment, count = draw.randint(1, 9), draw.randint(1, 9), draw.randint(1, 12)
    end = start + count * increment
    multiple = draw.choice([number for number in range(1, end + 1) if end % number == 0])
    samples = draw.randint(1, 900)
    batch = BatchPlan(end, 1, 1, (start, increment, samples, multiple))
    seen = first = draw.choice([0, draw.randint(0, 1000)])
    phases, ends = batch.phases(first), [0]
    for steps in range(300):
        assert batch.samples_in(steps, first) == seen - first
        interval = min(count, seen * count // samples)
        seen += max(multiple, (start + interval * increment) // multiple * multiple)
        ends.append(seen - first)
    assert all(before.batch < after.batch for before, after in pairwise(phases))
    for rows in range(0, ends[-1], 7):
        assert batch.steps_for(rows, first) == next(
            step for step, end in enumerate(ends) if end >= rows
        )


@pytest.mark.parametrize(
    ("world", "rampup"),
    [(1, (4, 4, 90)), (2, (4, 4, 90)), (2, (5, 1, 90, 4))],
    ids=["1", "2", "rounded"],
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
    plan = plan_batch(section(global_batch_size=24, rampup_batch_size=(3, 3, 100)), 1)
    assert (plan.batch_size, plan.grad_accum_steps, plan.rampup) == (1, 24, (3, 3, 100))
    plan = plan_batch(section(global_batch_size=24, rampup_batch_size=(4, 4, 100)), 2)
    assert (plan.batch_size, plan.grad_accum_steps) == (2, 6)
    resumed = section(rampup_batch_size=(4, 4, 100))
    for ranks, rows in ((1, 4), (2, 2), (4, 1)):
        plan = plan_batch(resumed, ranks, BatchPlan(12, 2, 1))
        assert (plan.batch_size, plan.global_batch_size) == (rows, 24)


def test_rounded_batches_are_those_that_ranks_and_micro_steps_can_share() -> None:
    """The rows do not depend on the number of ranks, so that a run goes on alike on fewer."""
    rounded = section(
        global_batch_size=24, rampup_batch_size=(3, 3, 100), rampup_round=8, batch_size=4
    )
    for ranks in (1, 2):
        plan = plan_batch(rounded, ranks)
        assert plan.rampup == (3, 3, 100, 8)
        assert [phase.batch for phase in plan.phases()] == [8, 16, 24]
    with pytest.raises(ValueError, match="^--rampup_batch_size=3,3,100 .*divisible by 12"):
        plan_batch(rounded, 3)
    with pytest.raises(ValueError, match="^--rampup_round=9 must divide 24; for example 3$"):
        plan_batch(section(global_batch_size=24, rampup_batch_size=(3, 3, 100), rampup_round=9), 1)


@pytest.mark.parametrize(
    ("flags", "ranks", "text"),
    [
        ({"rampup_batch_size": (4, 6, 100)}, 1, "choose an increment that divides 20"),
        ({"rampup_batch_size": (24, 1, 100)}, 1, "must start below --global_batch_size=24"),
        ({"rampup_batch_size": (32, 8, 100)}, 1, "must start below --global_batch_size=24"),
        (
            {"rampup_batch_size": (3, 3, 100)},
            2,
            "divisible by 2 (= data-parallel size x batch_size), unlike 3, 9, 15, 21; set "
            "--rampup_round=2",
        ),
        (
            {"rampup_batch_size": (6, 6, 9), "batch_size": 4},
            1,
            "unlike 6, 18; set --rampup_round=4 or --batch_size=6 or --rampup_micro_batch=True",
        ),
    ],
)
def test_ramp_that_does_not_divide_is_rejected(
    flags: dict[str, Any], ranks: int, text: str
) -> None:
    for saved in (None, BatchPlan(4, 6, 1)):
        with pytest.raises(ValueError, match="^--rampup_batch_size=.* must ") as rejected:
            plan_batch(section(**{"global_batch_size": 24} | flags), ranks, saved)
        assert text in str(rejected.value) and "\n" not in str(rejected.value)


def test_a_ramp_of_too_many_increments_is_refused() -> None:
    with pytest.raises(ValueError, match="in 1 to 10,000 whole increments"):
        plan_batch(section(global_batch_size=20_002, rampup_batch_size=(1, 1, 100)), 1)


def test_num_epochs_become_a_step(files: Files) -> None:
    flags: dict[str, Any] = {"datasets": ("a", "c"), "weights": (1.0, 3.0), "seq_length": 32}
    total = {name: files.num_tokens(name) // 32 for name in ("a", "c")}
    for rampup in ((), (2, 2, 60)):
        with files.stream(8, rampup=rampup, **flags) as stream:
            taken, ends = {"a": 0, "c": 0}, dict[tuple[str, float], int]()
            for step in range(1, 200):
                for address in stream.order.addresses(step):
                    taken[address.source] += 1
                if taken["c"] >= 2 * total["c"]:
                    ends.setdefault(("c", 2.0), step)
                if sum(taken.values()) >= sum(total.values()):
                    ends.setdefault(("", 1.0), step)
            assert len(ends) == 2
            for (source, epochs), step in ends.items():
                assert stream.end_of_epochs(source, epochs, 0) == step
            with pytest.raises(ValueError, match="--num_epochs=b:1 must name a source; use a, c"):
                stream.end_of_epochs("b", 1.0, 0)


@pytest.mark.parametrize("text", ["0", "-2", "x", "a:", "a:0", "1e9", "1:2:x", "nan", "inf"])
def test_epochs_that_are_no_number_are_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"^--num_epochs=.* must be above 0"):
        parse_flags(TrainConfig, [f"--num_epochs={text}"])


def test_epochs_stand_alone_and_minus_one_is_none() -> None:
    assert section(num_epochs="-1", num_steps=3).epochs() is None
    assert section(num_epochs="web/en:1.5").epochs() == ("web/en", 1.5)
    with pytest.raises(ValueError, match=r"--num_tokens and --num_epochs cannot be used together"):
        TrainConfig(training=section(num_epochs="2", num_tokens=100))


def test_micro_steps_of_a_ramp_take_the_most_rows_that_divide_a_step() -> None:
    flags = section(
        rampup_batch_size=(2, 2, 100), rampup_micro_batch=True, batch_size=8, global_batch_size=24
    )
    for plan in (plan_batch(flags, 1), plan_batch(flags, 1, BatchPlan(2, 12, 1))):
        assert (plan.batch_size, plan.grad_accum_steps) == (8, 3)
        found = {rows: plan.micro_batch_at(rows) for rows in range(2, 26, 2)}
        assert found == {
            2: 2,
            4: 4,
            6: 6,
            8: 8,
            10: 5,
            12: 6,
            14: 7,
            16: 8,
            18: 6,
            20: 5,
            22: 2,
            24: 8,
        }
    flags = replace(flags, batch_size=6)
    two = plan_batch(flags, 2)
    assert [two.micro_batch_at(rows // 2) for rows in (2, 8, 10, 14, 24)] == [1, 4, 5, 1, 6]
    usual = plan_batch(
        section(rampup_batch_size=(8, 8, 100), batch_size=4, global_batch_size=24), 1
    )
    assert [usual.micro_batch_at(rows) for rows in (8, 16, 24)] == [4, 4, 4]
    without_rows = section(rampup_batch_size=(2, 2, 100), rampup_micro_batch=True)
    assert plan_batch(without_rows, 2, BatchPlan(6, 4, 1)).batch_size == 6
    with pytest.raises(
        ValueError,
        match=r"divisible by 4 .*, unlike 2, 6, 10, 14, 18; set ",
    ):
        plan_batch(flags, 4)
    plain = section(rampup_batch_size=(2, 2, 100), batch_size=8, global_batch_size=24)
    with pytest.raises(
        ValueError, match="set --rampup_round=8 or --batch_size=2 or --rampup_micro_batch=True"
    ):
        plan_batch(plain, 1)
