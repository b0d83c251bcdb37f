"""Strategies and world sizes to axes; places, sums and norms along them."""

from __future__ import annotations

import itertools

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from fms_fsdp.config import ParallelConfig
from fms_fsdp.mesh import AXES, Mesh, ParallelDims, resolve_dims
from fms_fsdp.parallel.fsdp import global_norm
from tests.distributed.launch import run_ranks


def layout(variant: str = "tiny", world: int = 8, local: int = 4, **flags: object) -> ParallelDims:
    return resolve_dims(
        ParallelConfig(**flags),  # type: ignore[arg-type]
        variant=variant,
        world_size=world,
        local_world_size=local,
    )


def test_defaults_follow_variant_and_world() -> None:
    assert layout("7b") == layout("llama2_13b") == ParallelDims("hsdp", 2, 4)
    assert layout("70b") == layout("34b") == ParallelDims("fsdp", 1, 8)
    assert layout("7b", world=1, local=1) == ParallelDims("none", 1, 1)


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
            r"--sharding_strategy \(fdsp\) must be one of: fsdp, hsdp, ddp, none",
        ),
        (
            dict(sharding_strategy="none"),
            r"--sharding_strategy \(none\) is for one process, not for a world of 8",
        ),
        (
            dict(sharding_strategy="hsdp", hsdp_shard_size=3),
            r"--hsdp_shard_size \(3\) must divide the world size \(8 = replicas x hsdp_shard_size\); "
            "valid sizes: 1, 2, 4, 8",
        ),
        (
            dict(sharding_strategy="hsdp", local=5),
            r"--hsdp_shard_size \(5\), the devices of a node, must divide",
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
        axis: mesh.sum(torch.tensor([10.0**rank]), axis).item() for axis in ("dp", "tp", "replica", "world")
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
    assert {found["replica"] for found in results} == {found["world"] for found in results} == {1111}
    assert {found["rows"] for found in results} == {10}
    expected = (4 * torch.arange(8.0).square().sum()).sqrt().item()
    assert [found["norm"] for found in results] == pytest.approx([expected] * 4)
