"""Tensors sharded by tensor parallelism, by FSDP or by both: shard offsets, copies, norms and steps of
optimizers against one process.
"""

from __future__ import annotations

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
from tests.distributed.launch import run_ranks

OPTIMIZERS = ["muon", "adafactor", "sm3", "lamb", "novograd", "adamw"]
STEPS = 3
Found = dict[str, Any]
Ranks = list[Found]


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
        # divides evenly; unevenly; leaves ranks without rows
        self.blocks = nn.ModuleList([Block(16, 8), Block(13, 10), Block(3, 4)])
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
def on_ranks() -> Found:
    mesh = Mesh(ParallelDims("fsdp", dp_shard=2, tp=2), dist.get_rank(), "cpu")
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


@pytest.fixture(scope="module")
def ranks() -> Ranks:
    """Returns the results of each rank of a mesh of two by two."""
    return run_ranks(on_ranks, 4)


def test_shards_and_offsets_form_the_tensor(ranks: Ranks) -> None:
    """FSDP cuts rows that tp has cut: torch calls the placement strided, and its `is_shard()` is False."""
    for found in ranks:
        assert found["places"] and found["rows"] and found["joined"]


def test_copies_and_groups_count_both_axes(ranks: Ranks) -> None:
    for found in ranks:
        for name, copies in found["copies"].items():
            cut_by_tp = ".up." in name or name.endswith("down.weight")
            assert copies == (1 if cut_by_tp else 2), name
        # tensors that tp does not cut are on two meshes, which have one group
        assert found["groups"] == {4: 9, 2: 13}
        assert len(found["timeouts"]) == 1


def test_norms_equal_one_process(ranks: Ranks) -> None:
    norms = torch.stack([tensor.detach().norm() for tensor in Model().parameters()])
    for found in ranks:
        torch.testing.assert_close(found["norm"], norms.norm())
        torch.testing.assert_close(found["norms"], norms)


def test_initial_weights_equal_one_process(ranks: Ranks) -> None:
    matrices = [parameter for parameter in Model().parameters() if parameter.ndim == 2]
    for matrix in matrices:
        _fill_normal(matrix, 1.0, "key")
    for found in ranks:
        assert all(map(torch.equal, found["filled"], matrices))


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_optimizer_steps_equal_one_process(ranks: Ranks, name: str) -> None:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    expected = steps(Model(), name)
    torch.set_num_threads(threads)
    for found in ranks:
        assert found[name].keys() == expected.keys()
        for key, value in expected.items():
            is_muon = name == "muon" and key.startswith("blocks.") and value.ndim == 2
            tolerance = 0.0 if is_muon else 1e-6
            torch.testing.assert_close(
                found[name][key], value, rtol=tolerance, atol=tolerance, msg=key
            )


def test_unsharded_tensor_is_its_only_shard() -> None:
    whole = torch.arange(6.0).view(2, 3)
    slices = shard_slices(whole)
    assert slices == (slice(0, 2), slice(0, 3)) and all_shard_slices(whole) == (slices,)
    assert shard_groups([whole, whole]) == {None: [0, 1]} and shard_sizes(whole) == [6]
    assert local_shard(whole) is whole and sharded_like(whole, whole) is whole


def test_partial_tensors_have_no_shards() -> None:
    mesh = DeviceMesh("cpu", [0, 1], _init_backend=False, _rank=0)
    partial, sharded = (
        DTensor.from_local(torch.zeros(4), mesh, [placement], run_check=False)
        for placement in (Partial(), Shard(0))
    )
    with pytest.raises(AssertionError, match="sum"):
        all_shard_slices(partial)
    assert all_shard_slices(sharded) == ((slice(0, 4),), (slice(4, 8),))
