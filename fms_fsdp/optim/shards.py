"""Optimizers that see a tensor of several ranks as what it is: shards here, and sums over all shards.

`ShardOptimizer` is what the optimizers of this folder have in common: state that is made when they are built,
so that a checkpoint can be loaded into it, and a step over the shards of this rank. Elementwise arithmetic
needs no more. What is of the whole tensor (a norm, a mean of a row) is reduced over the ranks that hold its
shards, for all tensors in one message; replicas hold equal shards, and so compute the same.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate

from fms_fsdp.errors import UserError

Tensors = list[torch.Tensor]
State = dict[str, torch.Tensor]
Pair = tuple[float, float]


class ShardOptimizer(torch.optim.Optimizer):
    """An optimizer whose `update` works on this rank's shards. `kept`: its state of the parameter's shape."""

    kept: tuple[str, ...] = ()

    def __init__(self, groups: Any, **settings: Any) -> None:
        if not 0 <= settings.get("momentum", 0.0) < 1:
            raise UserError(f"momentum ({settings['momentum']:g}) must be at least 0 and below 1")
        super().__init__(groups, settings)
        for group in self.param_groups:
            for parameter in group["params"]:
                self.state[parameter] = {"step": torch.zeros(())} | self.new_state(parameter, group)

    def new_state(self, parameter: torch.Tensor, group: dict[str, Any]) -> State:
        """The state of a parameter before the first step, beside the count of steps."""
        return {name: torch.zeros_like(parameter) for name in self.kept}

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """One step (collective: every rank); the gradients are of no use afterwards."""
        for group in self.param_groups:
            parameters = [parameter for parameter in group["params"] if parameter.grad is not None]
            states = [self.state[parameter] for parameter in parameters]
            for state in states:
                state["step"] += 1
            if parameters:
                self.update(group, int(states[0]["step"]), parameters, states)

    def update(self, group: dict[str, Any], step: int, parameters: Tensors, states: list[State]) -> None:
        """Changes the parameters and states in place; `step` counts from 1."""
        raise NotImplementedError


def shard_of(tensor: torch.Tensor) -> torch.Tensor:
    """This rank's part of the tensor, which shares its memory."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def shards_of(tensors: Iterable[torch.Tensor | None]) -> Tensors:
    """This rank's part of each tensor."""
    return [shard_of(tensor) for tensor in tensors if tensor is not None]


def as_shard(
    local: torch.Tensor, like: DTensor, placements: Sequence[Placement], shape: torch.Size
) -> torch.Tensor:
    """The tensor of that shape whose part on this rank is `local`, on the mesh and device of another one."""
    mesh, stride = like.device_mesh, (math.prod(shape[1:]), 1)[: len(shape)]
    whole = DTensor.from_local(local, mesh, placements, run_check=False, shape=shape, stride=stride)
    return whole.to(like.device)  # under CPU offload from_local moves it to the GPU


def statistic(parameter: torch.Tensor, dim: int) -> torch.Tensor:
    """A zero for each row (`dim` 0: R x 1) or column (`dim` 1: 1 x C) of a matrix, split as they are."""
    local, shape = shard_of(parameter), [1, 1]
    shape[dim] = local.shape[dim]
    zeros = torch.zeros(shape, device=local.device)
    if not isinstance(parameter, DTensor):
        return zeros
    shape[dim] = parameter.shape[dim]
    placements = [each if each.is_shard(dim) else Replicate() for each in parameter.placements]
    return as_shard(zeros, parameter, placements, torch.Size(shape))


def reduce_over_shards(
    parts: Sequence[torch.Tensor],
    parameters: Sequence[torch.Tensor],
    dim: int | None = None,
    op: Any = dist.ReduceOp.SUM,
) -> None:
    """In place: each part, computed from one shard of the parameter beside it, becomes that of all its shards
    (collective: every rank).

    With `dim` only over the shards along that dim.
    """
    by_axis: dict[tuple[DeviceMesh, int], Tensors] = {}
    for part, parameter in zip(parts, parameters, strict=True):
        if isinstance(parameter, DTensor):
            for axis, placement in enumerate(parameter.placements):
                if placement.is_shard(dim):
                    by_axis.setdefault((parameter.device_mesh, axis), []).append(part)
    for (mesh, axis), some in by_axis.items():
        message = torch.cat([part.flatten() for part in some]).to(mesh.device_type)
        dist.all_reduce(message, op, mesh.get_group(axis))
        sizes = [part.numel() for part in some]
        for part, reduced in zip(some, torch.split(message, sizes), strict=True):
            part.copy_(reduced.view_as(part))


def norms_of(shards: Sequence[torch.Tensor], parameters: Sequence[torch.Tensor]) -> Tensors:
    """The 2-norm of each whole tensor, a scalar, from shards that are split as the parameters are.

    Collective: every rank.
    """
    squares = [torch.linalg.vector_norm(shard).square() for shard in shards]
    reduce_over_shards(squares, parameters)
    return [square.sqrt() for square in squares]
