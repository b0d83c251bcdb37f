"""Strategies and world sizes to axes; places, sums and norms along them."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from fms_fsdp.config import ParallelConfig, TrainConfig, TrainingConfig
from fms_fsdp.distributed.axes import ParallelDims
from fms_fsdp.distributed.dtensor import global_norm
from fms_fsdp.distributed.mesh import AXES, Mesh, plan_dims
from fms_fsdp.distributed.runtime import World, collective_timeout, init_distributed
from tests.distributed.launch import run_ranks


def layout(variant: str = "tiny", world: int = 8, local: int = 4, **flags: object) -> ParallelDims:
    section = ParallelConfig(**flags)  # type: ignore[arg-type]
    return plan_dims(section, variant, World(0, 0, world, local))


def test_defaults_follow_variant_and_world() -> None:
    assert layout("7b") == layout("llama2_13b") == ParallelDims("hsdp", 2, 4)
    assert layout("70b") == layout("34b") == ParallelDims("fsdp", 1, 8)
    assert layout("7b", world=1, local=1) == ParallelDims("none", 1, 1)


def test_zero_stages_are_fsdp_with_two_more_choices() -> None:
    assert layout(sharding_strategy="zero2") == ParallelDims(
        "zero2", 1, 8, reshard_after_forward=False
    )
    one = ParallelDims("zero1", 1, 8, reshard_after_forward=False, sync_each_micro_step=False)
    assert layout(sharding_strategy="zero1") == one
    by_flags = layout(
        sharding_strategy="fsdp", reshard_after_forward=False, sync_each_micro_step=False
    )
    assert replace(by_flags, strategy="zero1") == one and one.keeps_weights
    assert not layout(sharding_strategy="hsdp", sync_each_micro_step=False).sync_each_micro_step
    assert not layout(sharding_strategy="ddp").keeps_weights and not layout().keeps_weights


@pytest.mark.parametrize("strategy", ["zero1", "zero2"])
@pytest.mark.parametrize("name", ["reshard_after_forward", "sync_each_micro_step"])
def test_a_flag_that_contradicts_the_strategy_is_refused(strategy: str, name: str) -> None:
    fits = strategy == "zero2" and name == "sync_each_micro_step"
    section = ParallelConfig(sharding_strategy=strategy, **{name: fits})  # type: ignore[arg-type]
    assert section.resolved(name) is fits
    message = f"--{name}={not fits} is not supported with --sharding_strategy={strategy}, which"
    with pytest.raises(ValueError, match=message):
        TrainConfig(parallel=replace(section, **{name: not fits}))  # type: ignore[arg-type]


def test_strategies_fill_the_world_in_any_case() -> None:
    assert layout(sharding_strategy="FSDP") == ParallelDims("fsdp", 1, 8)
    assert layout(sharding_strategy="HSDP", hsdp_shard_size=2) == ParallelDims("hsdp", 4, 2)
    assert layout(sharding_strategy="hsdp", hsdp_shard_size=8) == ParallelDims(
        "hsdp", 1, 8
    )  # a group over several nodes
    assert layout(sharding_strategy="ddp") == ParallelDims("ddp", 8, 1)
    assert layout(sharding_strategy="hsdp", world=1024, local=8) == ParallelDims("hsdp", 128, 8)
    assert layout(sharding_strategy="hsdp", world=1024, local=8).size("dp") == 1024
    assert Mesh(ParallelDims("none", 1, 1), 0, "cpu").device_mesh is None


@pytest.mark.parametrize(
    "flags, message",
    [
        (
            dict(sharding_strategy="fdsp"),
            r"--sharding_strategy=fdsp must be one of: fsdp, hsdp, ddp, none, zero1, zero2",
        ),
        (
            dict(sharding_strategy="none"),
            "--sharding_strategy=none requires one process, but the world size is 8",
        ),
        (
            dict(sharding_strategy="hsdp", hsdp_shard_size=3),
            r"--hsdp_shard_size=3 must divide the world size \(8 = replicas x hsdp_shard_size\); "
            "use 1, 2, 4 or 8",
        ),
        (
            dict(sharding_strategy="hsdp", local=5),
            r"--hsdp_shard_size=5 \(the devices of a node\) must divide",
        ),
    ],
)
def test_an_impossible_layout_names_its_factors(flags: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        layout(**flags)  # type: ignore[arg-type]


def test_places_count_up_along_every_axis() -> None:
    dims = ParallelDims("hsdp", dp_replicate=2, dp_shard=3, pp=2, cp=2, tp=2)
    ranks = range(dims.size("world"))
    assert dims.size("world") == 48 and dims.size("dp") == 6 and dims.size("replica") == 24
    places = {tuple(dims.place(rank, axis) for axis in AXES) for rank in ranks}
    assert places == set(itertools.product(range(2), range(2), range(3), range(2), range(2)))
    assert [dims.place(rank, "tp") for rank in ranks][:4] == [0, 1, 0, 1]  # neighbours share a node
    assert [dims.place(rank, "dp") for rank in ranks][::4] == [0, 1, 2, 3, 4, 5] * 2
    assert [dims.place(rank, "world") for rank in ranks] == list(ranks)


def sums_and_norm() -> dict[str, float]:
    """Two data-parallel ranks, each of two tensor-parallel ones."""
    rank = dist.get_rank()
    mesh = Mesh(ParallelDims("fsdp", dp_shard=2, tp=2), rank, "cpu")
    found = {
        axis: mesh.sum(torch.tensor([10.0**rank]), axis).item()
        for axis in ("dp", "tp", "replica", "world")
    }
    found["rows"] = mesh.sum(torch.tensor([5.0 * mesh.counts_for("dp")]), "world").item()
    assert mesh.device_mesh is not None
    whole = torch.arange(8.0).view(4, 2)
    tensors = [
        distribute_tensor(whole, mesh.device_mesh, [Shard(0), Shard(1)]),
        distribute_tensor(whole, mesh.device_mesh, [Shard(0), Replicate()]),
        distribute_tensor(whole, mesh.device_mesh["tp"], [Shard(1)]),
        whole,
    ]
    return found | {"norm": global_norm(tensors, mesh).item()}


def test_sums_and_norms_count_everything_once_on_a_mesh_of_two_axes() -> None:
    results = run_ranks(sums_and_norm, 4)
    assert [found["dp"] for found in results] == [101, 1010, 101, 1010]
    assert [found["tp"] for found in results] == [11, 11, 1100, 1100]
    assert (
        {found["replica"] for found in results} == {found["world"] for found in results} == {1111}
    )
    assert {found["rows"] for found in results} == {10}
    expected = (4 * torch.arange(8.0).square().sum()).sqrt().item()
    assert [found["norm"] for found in results] == pytest.approx([expected] * 4)


def timeouts_s() -> tuple[list[float], object]:
    dims, cpu = ParallelDims("ddp", dp_replicate=2), torch.device("cpu")
    mesh = Mesh(
        dims, dist.get_rank(), "cpu", collective_timeout(ParallelConfig(collective_timeout_s=17))
    )
    axes = ("dp_replicate", "dp_shard", "replica", "dp")
    groups = [mesh._groups[axis] or dist.group.WORLD for axis in axes]
    found = [group._get_backend(cpu).options._timeout.total_seconds() for group in groups]
    return found, getattr(dist.group.WORLD, "bound_device_id", None)


def test_collectives_of_every_axis_give_up_when_the_runs_do() -> None:
    """torch gives the groups of a mesh of two axes half an hour of their own."""
    assert run_ranks(timeouts_s, 2) == [([77.0] * 4, None)] * 2


@pytest.mark.parametrize(("device", "backend"), [("cuda", "cpu:gloo,cuda:nccl"), ("cpu", "gloo")])
def test_the_process_group_is_bound_to_no_device(
    monkeypatch: pytest.MonkeyPatch, device: str, backend: str
) -> None:
    """A bound one lets torch split groups off with the options of nccl, those of gloo too."""
    asked: list[tuple[object, ...]] = []
    monkeypatch.delenv("MASTER_ADDR", raising=False)
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)
    monkeypatch.setattr(
        dist,
        "init_process_group",
        lambda name, **given: asked.append((name, given.get("device_id"))),
    )
    world = World(0, 0, 1, 1)
    section = ParallelConfig(sharding_strategy="fsdp")
    init_distributed(section, TrainingConfig(), world, torch.device(device))
    assert asked == [(backend, None)]


def test_axes_leave_the_rest_of_the_world_to_data() -> None:
    dims = layout(tp_size=2, cp_size=2, world=16)
    assert (dims.strategy, dims.dp_shard, dims.cp, dims.tp, dims.size("shard")) == (
        "fsdp",
        4,
        2,
        2,
        8,
    )
    assert (
        dims.sequence_parallel and not layout(tp_size=2, sequence_parallel=False).sequence_parallel
    )
    assert layout(tp_size=0, cp_size=0, pp_size=0) == layout()
    nodes = layout("7b", tp_size=2, world=16, local=8)  # a shard group is what tp leaves of a node
    assert (nodes.dp_replicate, nodes.dp_shard, nodes.tp) == (2, 4, 2)
    assert layout("7b", tp_size=8, world=16, local=4).dp_shard == 1


def test_a_pipeline_gathers_weights_once_a_step() -> None:
    for strategy in ("fsdp", "hsdp", "ddp", "zero1", "zero2"):
        dims = layout(pp_size=2, sharding_strategy=strategy)
        assert dims.keeps_weights and not dims.sync_each_micro_step, strategy
        assert dims.pp * dims.size("dp") == 8
    assert [
        layout(pp_size=2, pp_schedule=name, **more).virtual_stages
        for name, more in (
            ("1f1b", {}),
            ("interleaved", {}),
            ("interleaved", {"pp_virtual_stages": 4}),
            ("zbv", {}),
        )
    ] == [1, 2, 4, 2]


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (
            dict(tp_size=3),
            r"--tp_size=3 must divide the world size \(8\); use --tp_size=1, 2, 4 or 8",
        ),
        (
            dict(tp_size=4, pp_size=4),
            r"--pp_size=4 x --tp_size=4 must divide .*; use --pp_size=1 or 2, or --tp_size=1 or 2",
        ),
        (
            dict(tp_size=2, sharding_strategy="hsdp", hsdp_shard_size=8),
            r"must divide the data-parallel size \(4 = ",
        ),
    ],
)
def test_axes_that_do_not_fill_the_world_are_refused(
    flags: dict[str, object], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        layout(**flags)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (
            dict(pp_size=2, reshard_after_forward=True),
            r"--reshard_after_forward=True is not supported with --pp_size=2, which",
        ),
        (
            dict(pp_size=2, sync_each_micro_step=True),
            r"--sync_each_micro_step=True is not supported with --pp_size",
        ),
    ],
)
def test_flags_that_contradict_an_axis_are_refused(flags: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        TrainConfig(parallel=ParallelConfig(**flags))  # type: ignore[arg-type]


def sums_on_four_axes() -> dict[str, float]:
    """2 x 2 x 2 ranks of a pipeline, of context and of tensor parallelism, alone in their data."""
    rank = dist.get_rank()
    mesh = Mesh(ParallelDims("fsdp", pp=2, cp=2, tp=2), rank, "cpu")
    names = ("row", "losses", "shard", "loss", "replica", "dp")
    return {axis: mesh.sum(torch.tensor([10.0**rank]), axis).item() for axis in names}


def test_sums_along_joined_axes_take_in_their_ranks_alone() -> None:
    results = run_ranks(sums_on_four_axes, 8)
    assert results[0] == {
        "row": 1010101.0,
        "losses": 1010101.0,
        "shard": 101.0,
        "loss": 101.0,
        "replica": 11111111.0,
        "dp": 1.0,
    }
    assert results[5]["shard"] == 10100000.0
