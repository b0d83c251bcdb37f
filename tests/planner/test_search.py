"""What a search proposes is accepted by a launch as it is typed, fits, and is sorted; what is given stays."""

from __future__ import annotations

import random
import time
from typing import Any

import pytest

from fms_fsdp.config import TrainConfig
from fms_fsdp.errors import UserError
from fms_fsdp.flags import parse_flags
from fms_fsdp.planner.choice import choose_plan, cluster_of, rows_to_search
from fms_fsdp.planner.plan import Cluster, changed, idle_flags, limit, make_plan, memory_parts, remedies
from fms_fsdp.planner.search import MARGIN, enough_devices, search
from fms_fsdp.predict.hardware import find_hardware

MODELS = (
    "194m",
    "1.4b",
    "7b",
    "llama3_8b",
    "13b",
    "34b",
    "llama3_70b",
    "llama3.2_1b",
    "llama3.1_405b",
    "gpt3_13b",
)
DEVICES = ("a100_40gb", "a100_80gb", "h100_80gb", "h200", "b200", "l40s", "mi300x")
H100 = find_hardware("h100_80gb")


def training(*flags: str) -> TrainConfig:
    return parse_flags(TrainConfig, flags)


def a_request(draw: random.Random) -> tuple[list[str], Cluster, int]:
    """Flags, a cluster and the rows of a step."""
    flags = [
        f"--model_variant={draw.choice(MODELS)}",
        f"--seq_length={draw.choice((512, 2048, 4096, 8192, 6000))}",
    ]
    flags += draw.choice(([], [], ["--precision=bf16_pure"], ["--precision=fp32"], ["--optimizer=muon"]))
    flags += draw.choice(
        ([], [], ["--use_torch_compile=False"], ["--cpu_offload=True"], ["--reduce_dtype=bf16"])
    )
    flags += draw.choice(([], [], ["--tp_size=2"], ["--sharding_strategy=hsdp"], ["--recompute=ops"]))
    per_node = draw.choice((4, 8, 8))
    devices = (
        draw.choice((1, 2, 3, 4)) if draw.random() < 0.2 else per_node * draw.choice((1, 2, 3, 6, 8, 32, 128))
    )
    cluster = cluster_of(find_hardware(draw.choice(DEVICES)), devices, per_node)
    return flags, cluster, draw.choice((8, 96, 256, 1000, 1024, 2048))


def judge_search(seed: int) -> int:
    """Judges the proposals of one request; returns how many there are."""
    flags, cluster, rows = a_request(random.Random(seed))
    try:
        config = training(*flags)
        wanted = rows_to_search(config, cluster, rows)
        found = search(config, cluster, wanted)
    except UserError:
        return 0
    rates = [each.plan.tokens_per_s for each in found]
    assert rates == sorted(rates, reverse=True)
    assert len({each.flags for each in found}) == len(found)
    for each in found:
        typed = [*flags, *each.flags.split()]
        plan = make_plan(training(*typed), cluster)
        assert plan.needed <= MARGIN * plan.available and plan.fits, typed
        assert (plan.needed, plan.tokens_per_s) == (each.plan.needed, each.plan.tokens_per_s), typed
        assert plan.batch.global_batch_size == wanted
        assert sum(memory_parts(plan).values()) == plan.needed
    return len(found)


def test_proposals_of_some_requests_are_accepted() -> None:
    assert sum(map(judge_search, range(25))) > 40


@pytest.mark.slow
def test_proposals_of_many_requests_are_accepted() -> None:
    assert sum(map(judge_search, range(1000, 1500))) > 1000


def test_what_is_given_of_the_layout_stays() -> None:
    cluster = Cluster(H100, 64)
    for flags in (["--tp_size=4"], ["--recompute=blocks"], ["--batch_size=1"], ["--hsdp_shard_size=16"]):
        name, _, value = flags[0].removeprefix("--").partition("=")
        found = search(training(*flags), cluster, 1024)
        assert found
        for each in found:
            part = each.plan.config.training if name == "batch_size" else each.plan.config.parallel
            assert str(getattr(part, name)) == value
    assert {each.plan.dims.dp_shard for each in search(training("--hsdp_shard_size=16"), cluster, 1024)} == {
        16
    }
    assert not search(training("--tp_size=3"), cluster, 1024)


def test_more_devices_are_proposed_where_none_fits() -> None:
    config = training("--model_variant=llama3_70b")
    assert not search(config, Cluster(H100, 8), 1024)
    enough = enough_devices(config, Cluster(H100, 8), 1024)
    assert enough is not None and enough in (16, 32)
    assert search(config, Cluster(H100, enough), 1024) and not search(
        config, Cluster(H100, enough // 2), 1024
    )


def test_a_search_and_a_prediction_take_little_time() -> None:
    config, cluster = training("--model_variant=llama3_70b"), Cluster(H100, 512)
    make_plan(config, cluster)
    times = dict[str, float]()
    begin = time.process_time()
    plan = choose_plan(config, cluster, 1024).plan
    assert plan.time.total > 0 and remedies(plan)
    times["prediction"] = time.process_time() - begin
    begin = time.process_time()
    assert search(config, cluster, 1024)
    times["search"] = time.process_time() - begin
    assert times["prediction"] < 0.3 and times["search"] < 5, times


def plan_with(*flags: str, devices: int = 8, **more: Any) -> Any:
    return choose_plan(training(*flags), Cluster(H100, devices, **more), 1024)


@pytest.mark.parametrize(
    ("flags", "batch"),  # rows, ranks, micro-steps
    [
        (["--global_batch_size=64", "--batch_size=2"], (2, 8, 4)),
        (["--batch_size=2", "--grad_accum_steps=3"], (2, 8, 3)),
        (["--batch_size=3"], (3, 8, 42)),  # 1,024 rows, rounded down to a multiple of 24
        (["--grad_accum_steps=5"], (25, 8, 5)),
        (["--tp_size=8", "--batch_size=4"], (4, 1, 256)),
        (["--sharding_strategy=fsdp", "--pp_size=2"], (256, 4, 1)),  # a pipeline takes all rows at once
    ],
)
def test_the_batch_is_what_the_flags_say(flags: list[str], batch: tuple[int, int, int]) -> None:
    choice = plan_with("--model_variant=194m", *flags)
    found = choice.plan.batch
    assert (found.batch_size, found.dp_size, found.grad_accum_steps) == batch and not choice.is_fitted


def test_the_largest_rows_that_fit_are_taken() -> None:
    choice = plan_with("--model_variant=llama3_8b")
    rows = choice.plan.batch.batch_size
    assert choice.is_fitted and choice.plan.batch.global_batch_size == 1024
    more = changed(choice.plan.config, {"batch_size": 2 * rows, "grad_accum_steps": 64 // rows})
    larger = make_plan(more, choice.plan.cluster)
    assert choice.plan.needed <= MARGIN * choice.plan.available < larger.needed
    ramped = plan_with("--model_variant=194m", "--rampup_batch_size=16,16,1000").plan.batch
    assert ramped.batch_size == 2  # 16 rows on 8 ranks


def test_memory_by_part_by_hand() -> None:
    params = 6_738_415_616
    plan = make_plan(training("--model_variant=7b", "--sharding_strategy=fsdp"), Cluster(H100, 8))
    parts = memory_parts(plan)
    assert parts["weights"] == parts["gradients"] == 4 * params // 8
    assert parts["optimizer"] == pytest.approx(8 * params / 8, abs=2)
    assert sum(parts.values()) == plan.needed
    offloaded = changed(plan.config, {"cpu_offload": True})
    held = memory_parts(make_plan(offloaded, plan.cluster))
    assert held["weights"] == held["gradients"] == held["optimizer"] == 0 and held["gathered"]


def test_remedies_make_a_plan_fit_and_can_be_typed() -> None:
    flags = ["--model_variant=13b", "--sharding_strategy=fsdp", "--batch_size=4"]
    plan = make_plan(training(*flags), Cluster(H100, 8))
    assert not plan.fits and limit(plan).startswith("memory: a rank needs about")
    found = remedies(plan)
    assert found
    for remedy in found:
        changed = {word.split("=")[0] for word in remedy.flags.split()}
        kept = [flag for flag in flags if flag.split("=")[0] not in changed]
        config = training(*kept, *remedy.flags.split())
        assert make_plan(config, plan.cluster).fits and not idle_flags(config)
