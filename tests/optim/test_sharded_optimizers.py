"""Every optimizer on shards equals one process, also after it resumes on two ranks from four.

The gradients are equal. The processes of one world size are started once and run all optimizers.
"""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from functools import cache
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor

from fms_fsdp.config import OptimConfig
from fms_fsdp.config.optim import OPTIMIZERS
from fms_fsdp.optim.optimizers import Optimizers, build_optimizers
from tests.distributed.launch import run_ranks

NAMES = [*OPTIMIZERS, "torch.optim:NAdam"]  # NAdam makes its state at its first step
MORE = {
    "sgd": ("momentum=0.9", "nesterov=true"),
    "rmsprop": ("momentum=0.9", "centered=true"),
    "adamw": ("amsgrad=true",),
}
STEPS = 4
SAVED_AT = 2
Whole = dict[str, torch.Tensor]


class Model(nn.Module):
    """Matrices and vectors whose rows divide over no world, some of them fewer than ranks."""

    shapes = {
        "wide": (9, 20),
        "tall": (33, 20),
        "odd": (5, 7),
        "few": (3, 8),
        "norm": (10,),
        "one": (1,),
    }

    def __init__(self, shapes: dict[str, tuple[int, ...]] = shapes) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.blocks = nn.ParameterDict(
            {name: nn.Parameter(torch.randn(size)) for name, size in shapes.items()}
        )
        self.embed = nn.Embedding(13, 8)


def section(name: str) -> OptimConfig:
    rate = 1.0 if name == "adadelta" else 3e-3
    return OptimConfig(
        optimizer=name, optimizer_kwargs=MORE.get(name, ()), learning_rate=rate, weight_decay=0.1
    )


def step(model: nn.Module, optimizers: Optimizers, number: int) -> dict[str, torch.Tensor]:
    """One step with the gradients of its number, the same on any mesh, which are returned."""
    generator, whole = torch.Generator().manual_seed(number), {}
    for name, parameter in model.named_parameters():
        gradient = torch.randn(parameter.shape, generator=generator) * (1 + number % 3)
        gradient[..., 0] = 0.0  # as of a token that is not seen
        gradient = gradient.to(parameter.dtype)
        whole[name] = gradient.clone()
        if isinstance(parameter, DTensor):
            gradient = distribute_tensor(gradient, parameter.device_mesh, parameter.placements)
        parameter.grad = gradient
    optimizers.step(lambda base: base / number**0.5, torch.tensor(1.0))
    optimizers.zero_grad()
    return whole


def everything(model: nn.Module, optimizers: Optimizers) -> dict[str, torch.Tensor]:
    found = {**dict(model.named_parameters()), **optimizers.state_dict()}
    whole = {
        key: value.full_tensor() if isinstance(value, DTensor) else value
        for key, value in found.items()
    }
    return {key: value.detach().clone() for key, value in whole.items()}


def sharded(mesh: DeviceMesh, name: str, folder: Path | None) -> Whole:
    """Returns weights and state after all steps; saves a checkpoint on the way, if there is a folder."""
    model = fully_shard(Model(), mesh=mesh)
    optimizers = build_optimizers(section(name), model)
    for number in range(1, STEPS + 1):
        step(model, optimizers, number)
        if folder is not None and number == SAVED_AT:
            saved = dict(model.named_parameters()) | optimizers.state_dict()
            dcp.save(saved, checkpoint_id=folder)
    return everything(model, optimizers)


def resumed(mesh: DeviceMesh, name: str, folder: Path) -> Whole:
    model = fully_shard(Model(), mesh=mesh)
    optimizers = build_optimizers(section(name), model)
    weights, state = dict(model.named_parameters()), optimizers.state_dict()
    dcp.load(weights | state, checkpoint_id=folder)
    optimizers.load_state_dict(state)
    for number in range(SAVED_AT + 1, STEPS + 1):
        step(model, optimizers, number)
    return everything(model, optimizers)


def on_ranks(folder: Path, names: Sequence[str]) -> dict[tuple[str, str], Whole]:
    found = {}
    if torch.distributed.get_world_size() == 2:
        mesh = init_device_mesh("cpu", (2,))
        return {("resumed", name): resumed(mesh, name, folder / name) for name in names}
    fsdp = init_device_mesh("cpu", (4,))
    hsdp = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp_replicate", "dp_shard"))
    for name in names:
        found["fsdp", name] = sharded(fsdp, name, folder / name)
        found["hsdp", name] = sharded(hsdp, name, None)
    return found


def alone(name: str) -> Whole:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    model = Model()
    optimizers = build_optimizers(section(name), model)
    for number in range(1, STEPS + 1):
        step(model, optimizers, number)
    torch.set_num_threads(threads)
    return everything(model, optimizers)


@cache
def on_four_and_two_ranks() -> dict[tuple[str, str], list[Whole]]:
    """Returns the results of each rank by layout and optimizer, on four ranks and then on two."""
    found = {}
    with tempfile.TemporaryDirectory() as folder:
        for world in (4, 2):
            by_rank = run_ranks(on_ranks, world, Path(folder), NAMES)
            found |= {case: [rank[case] for rank in by_rank] for case in by_rank[0]}
    return found


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_shards_equal_one_process(name: str) -> None:
    ranks = on_four_and_two_ranks()
    expected = alone(name)
    for layout in ("fsdp", "hsdp", "resumed"):
        results = ranks[layout, name]
        for found in results:
            assert found.keys() == expected.keys()
            for key, value in expected.items():
                assert torch.equal(found[key], results[0][key]), f"{key} differs between ranks"
                is_muon = name == "muon" and key.startswith("blocks.") and value.ndim == 2
                tolerance = 0.0 if is_muon else 1e-6
                torch.testing.assert_close(
                    found[key], value, rtol=tolerance, atol=tolerance, msg=key
                )
    assert all((value == STEPS).all() for key, value in expected.items() if key.endswith(".step"))
