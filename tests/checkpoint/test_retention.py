"""Steps that are saved, and checkpoints that stay."""

from __future__ import annotations

import pytest

from fms_fsdp.checkpoint.retention import KeepPolicy, parse_schedule
from fms_fsdp.config import CheckpointConfig, EvalConfig, TrainConfig
from fms_fsdp.config.formats import StepRange, parse_ranges
from fms_fsdp.distributed.axes import ParallelDims
from fms_fsdp.errors import UserError
from fms_fsdp.run.checks import check_machine
from fms_fsdp.state import TrainMetadata
from tests.specs import machine


def test_schedule_changes_its_interval() -> None:
    """10@100,18@1000,1500: 10 checkpoints up to step 100, 50 more up to 1000, then every 1500 from there."""
    schedule = parse_schedule("10@100,18@1000,1500", interval=7)
    due = [step for step in range(1, 10_001) if schedule.is_due(step)]
    assert due[:10] == list(range(10, 101, 10))
    assert due[10:60] == list(range(118, 1001, 18)) and due[59] == 1000
    assert due[60:] == [2500, 4000, 5500, 7000, 8500, 10_000]
    assert all(
        schedule.next_after(step) == min(d for d in due if d > step) for step in range(10_000)
    )


def test_schedule_may_end_or_be_empty() -> None:
    assert [step for step in range(1, 50) if parse_schedule("5@10", 3).is_due(step)] == [5, 10]
    assert [step for step in range(1, 10) if parse_schedule("", 3).is_due(step)] == [3, 6, 9]
    assert not any(parse_schedule("", 0).is_due(step) for step in range(1, 100))
    assert (
        parse_schedule("5@10", 3).next_after(10) is None
        and parse_schedule("", 0).next_after(0) is None
    )


def test_ranges_of_steps_are_read() -> None:
    assert parse_ranges("keep_ranges", "1-1000:100, 20000-") == [(1, 1000, 100), (20000, None, 1)]
    assert (
        parse_ranges("keep_ranges", "5-5") == [(5, 5, 1)] and parse_ranges("keep_ranges", "") == []
    )


@pytest.mark.parametrize("text", ["10@100,18@1000,1500", "5@10", "7"])
def test_saves_are_counted(text: str) -> None:
    schedule = parse_schedule(text, 0)
    for first, last in ((1, 5000), (11, 99), (101, 118), (1000, 1000), (50, 40), (1, 4)):
        assert schedule.count(first, last) == sum(map(schedule.is_due, range(first, last + 1)))


def check_keep_best(keep_best: int, schedule: str, interval: int, eval_interval: int) -> None:
    section = CheckpointConfig(
        keep_best=keep_best,
        keep_last_n=1,
        checkpoint_schedule=schedule,
        checkpoint_interval=interval,
    )
    config = TrainConfig(checkpoint=section, eval=EvalConfig(eval_interval=eval_interval))
    check_machine(config, machine("cpu"), ParallelDims("none"))


@pytest.mark.parametrize("text", ["5@10", "10@100,18@1000,1500", "4@6,6@30", "1@1,9@20"])
def test_keep_best_without_evaluated_saves_is_rejected(text: str) -> None:
    schedule = parse_schedule(text, 0)
    for interval in range(1, 40):
        meets = any(schedule.is_due(step) for step in range(interval, 20_000, interval))
        check_keep_best(0, text, 0, interval)
        assert schedule.meets_multiple_of(interval) == meets
        if not meets:
            with pytest.raises(UserError, match=rf"--keep_best=2 .*--eval_interval={interval}\)"):
                check_keep_best(2, text, 0, interval)
    with pytest.raises(UserError, match="--keep_best=1 "):  # saves its last step only
        check_keep_best(1, "", 0, 10)
    check_keep_best(1, "", 15, 10)
    check_keep_best(1, "", 20_000, 10)  # the first 1,000 evaluations alone were looked at
    check_keep_best(1, "30000", 0, 20_000)


STEPS = [100, 200, 300, 400, 500, 600]
LOSSES = {100: 3.0, 200: 1.0, 300: 2.0}


@pytest.mark.parametrize(
    ("policy", "deleted"),
    [
        (KeepPolicy(), []),
        (KeepPolicy(last=2), [100, 200, 300, 400]),
        (KeepPolicy(last=9), []),
        (KeepPolicy(last=2, every=200), [100, 300]),
        (KeepPolicy(last=1, best=1), [100, 300, 400, 500]),
        (KeepPolicy(last=1, best=2, steps=(400, 999)), [100, 500]),
        (KeepPolicy(last=1, best=1, mode="max"), [200, 300, 400, 500]),
        (KeepPolicy(last=1, ranges=(StepRange(1, 400, 200), StepRange(500, None, 1))), [100, 300]),
    ],
)
def test_policy_deletes_the_others(policy: KeepPolicy, deleted: list[int]) -> None:
    found = {step: TrainMetadata(step, validation_loss=LOSSES.get(step)) for step in STEPS}
    assert policy.to_delete(found) == deleted
    assert policy.to_delete(dict(reversed(found.items()))) == deleted


def test_non_finite_checkpoints_do_not_count() -> None:
    found = {step: TrainMetadata(step) for step in (100, 200)} | {
        300: TrainMetadata(300, non_finite_steps=3)
    }
    assert KeepPolicy(last=1).to_delete(found) == [100], (
        "the dead newest one protects nothing and stays"
    )
    assert KeepPolicy(last=1).to_delete({300: found[300]}) == []
    assert KeepPolicy(last=1).to_delete(found | {400: TrainMetadata(400)}) == [100, 200, 300]
