"""Tensors of which each rank holds a part, cut by tensor parallelism, by FSDP or by both: places, copies,
norms and steps of optimizers against one process.
"""

from __future__ import annotations

import ast
import functools
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from fms_fsdp.config import OptimConfig
from fms_fsdp.distributed.dtensor import (
    all_shard_slices,
    from_shards,
    global_norm,
    local_shard,
    num_copies,
    reduce_over_shards,
    shard_groups,
    shard_sizes,
    shard_slices,
    sharded_like,
    tensor_norms,
    to_shards,
)
from fms_fsdp.distributed.mesh import Mesh, ParallelDims
from fms_fsdp.models.init import _fill_normal
from fms_fsdp.optim.optimizers import build_optimizers
from tests import layers
from tests.distributed.launch import run_ranks

SIZES = [(2, 2), (4, 2), (2, 4)]  # of dp_shard and tp
OPTIMIZERS = ["muon", "adafactor", "sm3", "lamb", "novograd", "adamw"]
STEPS = 3
# a module that reads one of them knows how a tensor is cut
READS = {"placements", "is_shard", "is_replicate", "Replicate", "_StridedShard"}
Found = dict[str, Any]
Ranks = tuple[int, int, list[Found]]


class Block(nn.Module):
    """Two matrices that tp cuts along rows and along columns, and what tp does not cut."""

    def __init__(self, wide: int, narrow: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(narrow, wide), nn.Linear(wide, narrow)
        self.norm, self.whole = nn.LayerNorm(narrow), nn.Linear(narrow, 5, bias=False)


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        # divides evenly over all meshes; over none; leaves ranks without rows
        self.blocks = nn.ModuleList([Block(16, 8), Block(13, 10), Block(7, 4)])
        self.embed = nn.Embedding(11, 6)


def sharded_model(mesh: DeviceMesh) -> nn.Module:
    model = Model()
    for block in model.blocks:
        parallelize_module(block, mesh["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
    return fully_shard(model, mesh=mesh["dp_shard"])


def part_of(whole: torch.Tensor, parameter: torch.Tensor) -> torch.Tensor:
    """The whole tensor cut as the parameter is."""
    return sharded_like(whole[shard_slices(parameter)].clone(), parameter)


def assembled(tensor: torch.Tensor) -> torch.Tensor:
    """The whole tensor, as the ranks of its group send their parts to each other."""
    if not isinstance(tensor, DTensor):
        return tensor.clone()
    ((group, _),) = shard_groups([tensor]).items()
    sizes = shard_sizes(tensor)
    everyone: list[Any] = [local_shard(tensor).flatten()]
    if group is not None:
        everyone = [None] * group.size()
        dist.all_gather_object(everyone, local_shard(tensor).flatten(), group=group)
    assert [len(part) for part in everyone] == sizes
    return from_shards(torch.cat(everyone), tensor)


def steps(model: nn.Module, name: str) -> dict[str, torch.Tensor]:
    """Weights and state after some steps with gradients that are alike on any mesh."""
    optimizers = build_optimizers(
        OptimConfig(optimizer=name, learning_rate=3e-3, weight_decay=0.1), model
    )
    for number in range(STEPS):
        generator = torch.Generator().manual_seed(number)
        for parameter in model.parameters():
            gradient = torch.randn(parameter.shape, generator=generator)
            parameter.grad = part_of(gradient, parameter)
        optimizers.step(lambda base: base, torch.tensor(1.0))
        optimizers.zero_grad()
    found = {**dict(model.named_parameters()), **optimizers.state_dict()}
    return {key: assembled(value.detach()) for key, value in found.items()}


@torch.no_grad()
def on_ranks(dp_shard: int, tp: int) -> Found:
    mesh = Mesh(ParallelDims("fsdp", dp_shard=dp_shard, tp=tp), dist.get_rank(), "cpu")
    assert mesh.device_mesh is not None
    model, whole = sharded_model(mesh.device_mesh), dict(Model().named_parameters())
    named = dict(model.named_parameters())
    tensors = list(named.values())
    parts = [local_shard(tensor) for tensor in tensors]
    rows = [part.square().sum(1, keepdim=True) for part in parts if part.ndim == 2]
    matrices = [tensor for tensor in tensors if tensor.ndim == 2]
    reduce_over_shards(rows, matrices, dim=1)
    places = [whole[name][shard_slices(tensor)] for name, tensor in named.items()]
    expected_rows = [
        whole[name][shard_slices(tensor)[:1]].square().sum(1, keepdim=True)
        for name, tensor in named.items()
        if tensor.ndim == 2
    ]
    apart = [to_shards(whole[name].detach(), tensor) for name, tensor in named.items()]
    groups = shard_groups(tensors)
    found: Found = {
        "places": all(map(torch.equal, places, parts)),
        "rows": all(map(torch.allclose, expected_rows, rows)),
        "joined": all(map(torch.equal, map(from_shards, apart, tensors), whole.values())),
        "copies": {name: num_copies(tensor, mesh) for name, tensor in named.items()},
        "norm": global_norm(tensors, mesh),
        "norms": torch.stack(tensor_norms(parts, tensors)),
        "groups": {group.size() if group else 1: len(indices) for group, indices in groups.items()},
        "timeouts": {
            group._get_backend(torch.device("cpu")).options._timeout for group in groups if group
        },
    }
    for tensor in matrices:
        _fill_normal(tensor, 1.0, "key")
    found["filled"] = [assembled(tensor) for tensor in matrices]
    for name in OPTIMIZERS:
        found[name] = steps(sharded_model(mesh.device_mesh), name)
    return found


@functools.cache
def alone() -> Found:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    found: Found = {name: steps(Model(), name) for name in OPTIMIZERS}
    torch.set_num_threads(threads)
    return found


@pytest.fixture(scope="module", name="ranks", params=SIZES, ids=str)
def ranks_of_a_mesh(request: pytest.FixtureRequest) -> Ranks:
    dp_shard, tp = request.param
    return dp_shard, tp, run_ranks(on_ranks, dp_shard * tp, dp_shard, tp)


def test_each_rank_knows_its_place_and_parts_make_the_whole(ranks: Ranks) -> None:
    """FSDP cuts rows that tp has cut: torch calls the placement strided, and its `is_shard()` is False."""
    for found in ranks[2]:
        assert found["places"] and found["rows"] and found["joined"]


def test_copies_and_groups_count_both_axes(ranks: Ranks) -> None:
    dp_shard, tp, results = ranks
    for found in results:
        for name, copies in found["copies"].items():
            cut_by_tp = ".up." in name or name.endswith("down.weight")
            assert copies == (1 if cut_by_tp else tp), name
        # tensors that tp does not cut lie on two meshes, which have one group
        assert found["groups"] == {dp_shard * tp: 9, dp_shard: 13}
        assert len(found["timeouts"]) == 1


def test_norms_are_those_of_one_process(ranks: Ranks) -> None:
    whole = list(Model().parameters())
    norms = torch.stack([tensor.detach().norm() for tensor in whole])
    for found in ranks[2]:
        torch.testing.assert_close(found["norm"], norms.norm())
        torch.testing.assert_close(found["norms"], norms)


def test_initial_weights_are_those_of_one_process(ranks: Ranks) -> None:
    matrices = [parameter for parameter in Model().parameters() if parameter.ndim == 2]
    for matrix in matrices:
        _fill_normal(matrix, 1.0, "key")
    for found in ranks[2]:
        assert all(map(torch.equal, found["filled"], matrices))


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_steps_of_optimizers_are_those_of_one_process(ranks: Ranks, name: str) -> None:
    expected = alone()[name]
    for found in ranks[2]:
        assert found[name].keys() == expected.keys()
        for key, value in expected.items():
            if (
                name == "muon" and key.startswith("blocks.") and value.ndim == 2
            ):  # not what AdamW moves
                assert torch.equal(found[name][key], value), key
            else:
                torch.testing.assert_close(found[name][key], value, rtol=1e-6, atol=1e-6, msg=key)


def test_a_plain_tensor_is_its_own_only_part() -> None:
    whole = torch.arange(6.0).view(2, 3)
    assert shard_slices(whole) == (slice(0, 2), slice(0, 3)) and all_shard_slices(whole) == (
        shard_slices(whole),
    )
    assert shard_groups([whole, whole]) == {None: [0, 1]} and shard_sizes(whole) == [6]
    assert local_shard(whole) is whole and sharded_like(whole, whole) is whole


def test_summands_are_no_parts() -> None:
    mesh = DeviceMesh("cpu", [0, 1], _init_backend=False, _rank=0)
    tensor = DTensor.from_local(torch.zeros(4), mesh, [Partial()], run_check=False)
    with pytest.raises(AssertionError, match="sum"):
        all_shard_slices(tensor)
    assert [
        place[0] for place in all_shard_slices(DTensor.from_local(torch.zeros(4), mesh, [Shard(0)]))
    ] == [
        slice(0, 4),
        slice(4, 8),
    ]


def read_in(path: Path) -> set[str]:
    """Which names that tell how a tensor is cut a module reads. `Shard` counts if torch's is imported."""
    found = set[str]()
    for node in ast.walk(ast.parse(path.read_text())):
        match node:
            case ast.Attribute(attr=name) | ast.Name(id=name) if name in READS:
                found.add(name)
            case ast.ImportFrom(module=str(module), names=names) if module.startswith("torch"):
                found |= {alias.name for alias in names} & {*READS, "Shard", "DTensor"}
    return found


@pytest.mark.parametrize("path", layers.python_files("fms_fsdp"), ids=lambda path: path.stem)
def test_one_module_reads_placements(path: Path) -> None:
    if path.name == "dtensor.py":
        assert {"placements", "Shard", "_StridedShard", "DTensor"} <= read_in(path)
    else:
        assert not read_in(path)
