"""The time of a step: laws that must hold, and links by hand."""

from __future__ import annotations

import time
from typing import Any

import pytest

from fms_fsdp.config import BF16
from fms_fsdp.models.flops import num_params, num_params_by_unit
from fms_fsdp.models.variants import VARIANTS
from fms_fsdp.predict.devices import find_device
from fms_fsdp.predict.memory import Step, estimate_memory, held_by
from fms_fsdp.predict.meter import _measured, _units, cost
from fms_fsdp.predict.speed import EFFICIENCY, rank_cost, sent, slowest, step_time
from tests.predict.test_memory import step

H100 = find_device("h100_80gb")


def seconds(found: Step, node: int = 8) -> dict[str, float]:
    return step_time(found, H100, node)


def test_parts_are_positive_and_grow_with_sequences() -> None:
    one, two = seconds(step(rows=1)), seconds(step(rows=2))
    assert all(each > 0 for each in one.values())
    for name in ("matmuls", "attention", "memory"):
        assert two[name] == pytest.approx(2 * one[name], rel=0.1)


def test_accumulation_repeats_everything_but_the_optimizer() -> None:
    one, four = seconds(step()), seconds(step(accum=4))
    assert four["matmuls"] == pytest.approx(4 * one["matmuls"])
    assert four["optimizer"] == one["optimizer"]


@pytest.mark.parametrize(
    ("schedule", "bubble"), [("1f1b", 7), ("gpipe", 7), ("interleaved", 3.5), ("zbv", 7 / 4)]
)
def test_pipeline_waits_for_micro_batches(schedule: str, bubble: float) -> None:
    found = seconds(step("7b", rows=16, pp_size=8, pp_schedule=schedule))
    busy = sum(found[name] for name in ("matmuls", "attention", "memory"))
    assert found["bubble"] == pytest.approx(bubble * busy / 16)


def test_middle_stage_of_a_pipeline_can_be_the_slowest() -> None:
    """The head is large, so a middle rank has 9 blocks, the first 8 and the last 6."""
    found = step("llama3_8b", rows=4, devices=4, pp_size=4, recompute="blocks")
    assert [held_by(found.setup, stage).blocks for stage in range(4)] == [8, 9, 9, 6]
    stage, own = slowest(found)
    times = [seconds_of(found, rank) for rank in range(4)]
    assert stage in (1, 2) and seconds(found)["matmuls"] == pytest.approx(max(times))
    assert own == rank_cost(found.setup, stage, found.micro_batch)


def seconds_of(found: Step, stage: int) -> float:
    computed = rank_cost(found.setup, stage, found.micro_batch)
    return step_time(found, H100, 8, computed=computed)["matmuls"]


def test_replicas_in_other_nodes_use_the_network() -> None:
    found = step(devices=16, sharding_strategy="hsdp")
    n = num_params(VARIANTS["7b"])
    times = seconds(found)
    assert sent(found)["dp_replicate"] == 2 * 4 * n // 8 // 2
    slow = sent(found)["dp_replicate"] / 50e9 / EFFICIENCY["hopper"].links
    assert slow * 0.5 <= times["dp_replicate communication"] <= slow
    assert "dp_replicate communication" not in seconds(step())


@pytest.mark.parametrize(
    ("flags", "gathered", "reduced"),
    [
        (dict(sharding_strategy="fsdp"), 4, 4),
        (dict(sharding_strategy="zero2"), 1, 4),
        (dict(sharding_strategy="zero1"), 1, 1),
    ],
)
def test_sharding_sends_its_bytes(flags: dict[str, Any], gathered: int, reduced: int) -> None:
    config = VARIANTS["7b"]
    n, blocks = num_params(config), 32 * num_params_by_unit(config)["block"]
    whole = n + blocks * (flags["sharding_strategy"] == "fsdp")
    expected = 7 * (2 * gathered * whole + 4 * reduced * n) // 8
    assert sent(step(accum=4, **flags)) == {"dp_shard": expected}


def test_an_estimate_takes_little_time() -> None:
    seconds(step("tiny"))  # imports
    for function in (cost, _measured, _units):
        function.cache_clear()
    begin = time.process_time()
    found = step("llama3_8b", rows=2)
    estimate_memory(found)
    seconds(found)
    assert time.process_time() - begin < 0.3
    assert found.setup.precision == BF16
