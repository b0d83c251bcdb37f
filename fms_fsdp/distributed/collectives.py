"""Collectives along one mesh axis that autograd differentiates and torch.compile traces.

forward          backward
all_gather       reduce_scatter
reduce_scatter   all_gather
copy             all_reduce         copy sends nothing: the ranks have the same tensor
all_reduce       copy
all_to_all       all_to_all
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.distributed._functional_collectives  # registers the operations

_BACKWARD = {
    "all_gather": "reduce_scatter",
    "reduce_scatter": "all_gather",
    "copy": "all_reduce",
    "all_reduce": "copy",
    "all_to_all": "all_to_all",
}


class Group(NamedTuple):
    """The ranks along a mesh axis: the name that functional collectives take, and their number."""

    name: str
    size: int


def all_gather(x: torch.Tensor, group: Group, dim: int = 0) -> torch.Tensor:
    """Returns the shards of all ranks, one after the other along `dim`."""
    operation = torch.ops._c10d_functional.all_gather_into_tensor
    gathered = _wait(operation(x.contiguous(), group.size, group.name))
    return torch.cat(gathered.chunk(group.size), dim) if dim else gathered


def reduce_scatter(x: torch.Tensor, group: Group, dim: int = 0) -> torch.Tensor:
    """Returns this rank's shard along `dim` of the sum over the ranks."""
    if dim:
        x = torch.cat(x.chunk(group.size, dim))
    operation = torch.ops._c10d_functional.reduce_scatter_tensor
    return _wait(operation(x.contiguous(), "sum", group.size, group.name))


def all_reduce(x: torch.Tensor, group: Group) -> torch.Tensor:
    """Returns the sum over the ranks."""
    return _wait(torch.ops._c10d_functional.all_reduce(x.contiguous(), "sum", group.name))


def all_to_all(x: torch.Tensor, group: Group) -> torch.Tensor:
    """Sends part r of x along dim 0 to rank r; returns the parts received, by rank."""
    sizes = [len(x) // group.size] * group.size
    operation = torch.ops._c10d_functional.all_to_all_single
    return _wait(operation(x.contiguous(), sizes, sizes, group.name))


def _wait(x: torch.Tensor) -> torch.Tensor:
    """Waits for a collective that was started; later kernels of the stream wait, not the host."""
    finished: torch.Tensor = torch.ops._c10d_functional.wait_tensor(x)
    return finished


_FUNCTIONS: dict[str, Callable[[torch.Tensor, Group, int], torch.Tensor]] = {
    "all_gather": all_gather,
    "reduce_scatter": reduce_scatter,
    "all_reduce": lambda x, group, dim: all_reduce(x, group),
    "copy": lambda x, group, dim: x.view_as(x),
    "all_to_all": lambda x, group, dim: all_to_all(x, group),
}


class _Collective(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, kind: str, name: str, size: int, dim: int) -> Any:
        ctx.args = _BACKWARD[kind], name, size, dim
        return _FUNCTIONS[kind](x, Group(name, size), dim)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        kind, name, size, dim = ctx.args
        return _FUNCTIONS[kind](grads[0], Group(name, size), dim), None, None, None, None


def collective(kind: str, x: torch.Tensor, group: Group, dim: int = 0) -> torch.Tensor:
    """Runs a collective of this kind, and the opposite one in the backward pass (collective)."""
    apply: Callable[..., torch.Tensor] = _Collective.apply
    return apply(x, kind, *group, dim)
