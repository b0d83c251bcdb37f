"""Strategies and world sizes to axes; places, sums and norms along them."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from fms_fsdp.config import ParallelConfig, TrainConfig, TrainingConfig
from fms_fsdp.distributed.axes import ParallelDims
from fms_fsdp.distributed.dims import plan_dims
from fms_fsdp.distributed.mesh import AXES, Mesh
from fms_fsdp.distributed.runtime import collective_timeout, init_distributed
from fms_fsdp.distributed.world import World
from tests.distributed.launch import run_ranks


def layout(variant: str = "tiny", world: int = 8, local: int = 4, **flags: Any) -> ParallelDims:
    config = TrainConfig(parallel=ParallelConfig(**flags))
    return plan_dims(config.parallel, variant, World(0, 0, world, local))


def test_defaults_follow_variant_and_world() -> None:
    assert layout("7b") == layout("llama2_13b") == ParallelDims("hsdp", 2, 4)
    assert layout("70b") == layout("34b") == ParallelDims("fsdp", 1, 8)
    assert layout("7b", world=1, local=1) == ParallelDims("none", 1, 1)


def test_zero_stages_are_fsdp_with_other_defaults() -> None:
    two = ParallelDims("zero2", 1, 8, reshard_after_forward=False)
    one = replace(two, strategy="zero1", sync_each_micro_step=False)
    assert layout(sharding_strategy="zero2") == two and layout(sharding_strategy="zero1") == one
    flags = dict(reshard_after_forward=False, sync_each_micro_step=False)
    by_flags = layout(sharding_strategy="fsdp", **flags)
    assert replace(by_flags, strategy="zero1") == one and one.keeps_weights
    assert not layout(sharding_strategy="hsdp", sync_each_micro_step=False).sync_each_micro_step
    assert not layout(sharding_strategy="ddp").keeps_weights and not layout().keeps_weights


@pytest.mark.parametrize("strategy", ["zero1", "zero2"])
@pytest.mark.parametrize("name", ["reshard_after_forward", "sync_each_micro_step"])
def test_flag_that_agrees_with_its_strategy_is_accepted(strategy: str, name: str) -> None:
    implied = strategy == "zero2" and name == "sync_each_micro_step"
    section = ParallelConfig(sharding_strategy=strategy, **{name: implied})  # type: ignore[arg-type]
    assert TrainConfig(parallel=section).parallel.resolved(name) is implied


def test_unknown_strategy_of_a_section_is_rejected() -> None:
    """A section that was made in Python, not from flags."""
    with pytest.raises(ValueError, match="--sharding_strategy=fdsp must be one of: fsdp, hsdp, "):
        layout(sharding_strategy="fdsp")


def test_strategies_fill_the_world() -> None:
    assert layout(sharding_strategy="FSDP") == ParallelDims("fsdp", 1, 8)
    assert layout(sharding_strategy="HSDP", hsdp_shard_size=2) == ParallelDims("hsdp", 4, 2)
    over_nodes = layout(sharding_strategy="hsdp", hsdp_shard_size=8)
    assert over_nodes == ParallelDims("hsdp", 1, 8)
    assert layout(sharding_strategy="ddp") == ParallelDims("ddp", 8, 1)
    large = layout(sharding_strategy="hsdp", world=1024, local=8)
    assert large == ParallelDims("hsdp", 128, 8) and large.size("dp") == 1024
    assert Mesh(ParallelDims("none", 1, 1), 0, "cpu").device_mesh is None


def test_ranks_count_up_along_every_axis() -> None:
    dims = ParallelDims("hsdp", dp_replicate=2, dp_shard=3, pp=2, cp=2, tp=2)
    ranks = range(dims.size("world"))
    assert dims.size("world") == 48 and dims.size("dp") == 6 and dims.size("replica") == 24
    places = {tuple(dims.axis_rank(rank, axis) for axis in AXES) for rank in ranks}
    assert places == set(itertools.product(range(2), range(2), range(3), range(2), range(2)))
    assert [dims.axis_rank(rank, "tp") for rank in ranks][:4] == [
        0,
        1,
        0,
        1,
    ]  # neighbours share a node
    assert [dims.axis_rank(rank, "dp") for rank in ranks][::4] == [0, 1, 2, 3, 4, 5] * 2
    assert [dims.axis_rank(rank, "world") for rank in ranks] == list(ranks)


def timeouts_s() -> tuple[list[float], object]:
    dims, cpu = ParallelDims("ddp", dp_replicate=2), torch.device("cpu")
    timeout = collective_timeout(ParallelConfig(collective_timeout_s=17))
    mesh = Mesh(dims, dist.get_rank(), "cpu", timeout)
    axes = ("dp_replicate", "dp_shard", "replica", "dp")
    groups = [mesh._groups[axis] or dist.group.WORLD for axis in axes]
    found = [group._get_backend(cpu).options._timeout.total_seconds() for group in groups]
    return found, getattr(dist.group.WORLD, "bound_device_id", None)


def test_groups_of_every_axis_have_the_timeout() -> None:
    """torch gives the groups of a mesh of two axes half an hour of their own."""
    assert run_ranks(timeouts_s, 2) == [([77.0] * 4, None)] * 2


@pytest.mark.parametrize(("device", "backend"), [("cuda", "cpu:gloo,cuda:nccl"), ("cpu", "gloo")])
def test_process_group_is_bound_to_no_device(
    monkeypatch: pytest.MonkeyPatch, device: str, backend: str
) -> None:
    """A bound one lets torch split groups off with the options of nccl, those of gloo too."""
    asked: list[tuple[object, ...]] = []

    def init(name: str, **given: object) -> None:
        asked.append((name, given.get("device_id")))

    monkeypatch.delenv("MASTER_ADDR", raising=False)
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)
    monkeypatch.setattr(dist, "init_process_group", init)
    section = ParallelConfig(sharding_strategy="fsdp")
    init_distributed(section, TrainingConfig(), World(0, 0, 1, 1), torch.device(device))
    assert asked == [(backend, None)]


def test_axes_leave_the_other_ranks_to_data() -> None:
    dims = layout(tp_size=2, cp_size=2, world=16)
    assert dims == ParallelDims("fsdp", dp_shard=4, cp=2, tp=2, sequence_parallel=True)
    assert dims.size("shard") == 8
    assert not layout(tp_size=2, sequence_parallel=False).sequence_parallel
    assert layout(tp_size=0, cp_size=0, pp_size=0) == layout()
    nodes = layout("7b", tp_size=2, world=16, local=8)  # a shard group is what tp leaves of a node
    assert (nodes.dp_replicate, nodes.dp_shard, nodes.tp) == (2, 4, 2)
    assert layout("7b", tp_size=8, world=16, local=4).dp_shard == 1


def test_pipeline_gathers_weights_once_per_step() -> None:
    for strategy in ("fsdp", "hsdp", "ddp", "zero1", "zero2"):
        dims = layout(pp_size=2, sharding_strategy=strategy)
        assert dims.keeps_weights and not dims.sync_each_micro_step, strategy
        assert dims.pp * dims.size("dp") == 8


@pytest.mark.parametrize(
    ("flags", "stages"),
    [
        ({"pp_schedule": "1f1b"}, 1),
        ({"pp_schedule": "interleaved"}, 2),
        ({"pp_schedule": "interleaved", "pp_virtual_stages": 4}, 4),
        ({"pp_schedule": "zbv"}, 2),
    ],
)
def test_schedule_sets_stages_per_rank(flags: dict[str, Any], stages: int) -> None:
    assert layout(pp_size=2, **flags).virtual_stages == stages


def sums_on_four_axes() -> dict[str, float]:
    """2 x 2 x 2 ranks of a pipeline, of context and of tensor parallelism, alone in their data."""
    rank = dist.get_rank()
    mesh = Mesh(ParallelDims("fsdp", pp=2, cp=2, tp=2), rank, "cpu")
    names = ("cp_pp", "dp_cp_pp", "shard", "dp_cp", "replica", "dp")
    return {axis: mesh.sum(torch.tensor([10.0**rank]), axis).item() for axis in names}


def test_sums_along_joined_axes_include_their_ranks() -> None:
    results = run_ranks(sums_on_four_axes, 8)
    assert results[0] == {
        "cp_pp": 1010101.0,
        "dp_cp_pp": 1010101.0,
        "shard": 101.0,
        "dp_cp": 101.0,
        "replica": 11111111.0,
        "dp": 1.0,
    }
    assert results[5]["shard"] == 10100000.0
