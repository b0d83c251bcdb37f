"""DTensors: the shard of this rank, its offsets in the full tensor, norms and sums over shards.

A DTensor has one placement per mesh axis: its ranks hold shards along one dim, or copies. No other
module reads placements. A plain tensor is its own only shard.

    dim 0   ├────── tp 0 ───────┼────── tp 1 ───────┤   tp shards first, FSDP shards a tp shard:
            ├ fsdp 0 ─┼ fsdp 1 ─┼ fsdp 0 ─┼ fsdp 1 ─┤   (_StridedShard(0, split_factor=2), Shard(0))
"""

from __future__ import annotations

import itertools
import math
import operator
from collections.abc import Iterable, Sequence
from functools import cache
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard
from torch.distributed.tensor import distribute_tensor as _distribute_tensor

from fms_fsdp.distributed import torch_private
from fms_fsdp.distributed.mesh import Mesh

Tensors = list[torch.Tensor]
Slices = tuple[slice, ...]  # of a shard in the full tensor, one per dim
Placements = tuple[Placement, ...]


def local_shard(tensor: torch.Tensor) -> torch.Tensor:
    """Returns this rank's shard, which shares the memory of the tensor."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def local_shards(tensors: Iterable[torch.Tensor | None]) -> Tensors:
    """Returns this rank's shard of each tensor that is not None."""
    return [local_shard(tensor) for tensor in tensors if tensor is not None]


def differentiable_shard(tensor: torch.Tensor, *, is_partial: bool) -> torch.Tensor:
    """Returns this rank's shard for computations with gradients.

    `is_partial`: the ranks have copies, and the gradient is the sum over the ranks; otherwise it is
    identical on every rank.
    """
    dtensor: Any = tensor
    placements = [Partial()] if is_partial else None
    shard: torch.Tensor = dtensor.to_local(grad_placements=placements)
    return shard


def distribute(tensor: torch.Tensor, axis: DeviceMesh, dim: int | None) -> torch.Tensor:
    """Shards a tensor that every rank has along `dim`, or keeps copies (None); sends nothing."""
    placement = Replicate() if dim is None else Shard(dim)
    return _distribute_tensor(tensor, axis, [placement], src_data_rank=None)


def is_partial(tensor: torch.Tensor) -> bool:
    """Returns whether the ranks of some axis still have to add up the tensor."""
    return isinstance(tensor, DTensor) and any(p.is_partial() for p in tensor.placements)


def shard_slices(tensor: torch.Tensor) -> Slices:
    """Returns the slices of the full tensor that this rank's shard holds."""
    index = 0
    for mesh, axis in _sharding_axes(tensor):
        index = index * mesh.size(axis) + mesh.get_local_rank(axis)
    slices = all_shard_slices(tensor)[index]
    shape = local_shard(tensor).shape
    assert tuple(map(_length, slices)) == shape, (slices, shape)
    return slices


def all_shard_slices(tensor: torch.Tensor) -> tuple[Slices, ...]:
    """Returns the slices of each shard, empty ones included, by rank in the group of `shard_groups`."""
    if not isinstance(tensor, DTensor):
        return _all_shard_slices(tensor.shape, (), ())
    return _all_shard_slices(tensor.shape, tensor.device_mesh.shape, tensor.placements)


def shard_sizes(tensor: torch.Tensor) -> list[int]:
    """Returns the number of elements of each shard, in the order of `all_shard_slices`."""
    shards = all_shard_slices(tensor)
    return [math.prod(map(_length, slices)) for slices in shards]


def from_shards(flat: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """Returns the full tensor from the elements of all shards, in the order of `all_shard_slices`."""
    full = flat.new_empty(like.shape)
    shards = torch.split(flat, shard_sizes(like))
    for slices, shard in zip(all_shard_slices(like), shards, strict=True):
        full[slices] = shard.view_as(full[slices])
    return full


def to_shards(full: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """Returns the elements of all shards of a full tensor: the inverse of `from_shards`."""
    return torch.cat([full[slices].flatten() for slices in all_shard_slices(like)])


def num_copies(tensor: torch.Tensor, mesh: Mesh) -> int:
    """Returns the number of ranks, within one stage of one replica, that hold each shard."""
    return mesh.size("replica") // mesh.size("pp") // len(all_shard_slices(tensor))


def sharded_like(shard: torch.Tensor, like: torch.Tensor, dim: int | None = None) -> torch.Tensor:
    """Returns the DTensor with this local shard, sharded as another tensor of the same shape.

    With `dim` only that dim has its size; every other one has size 1.
    """
    if not isinstance(like, DTensor):
        return shard
    placements = like.placements
    shape = like.shape
    if dim is not None:
        placements = tuple(each if _dim(each) == dim else Replicate() for each in placements)
        shape = _only(shape, dim)
    return torch_private.make_dtensor(shard, like.device_mesh, placements, shape)


def zeros_along(tensor: torch.Tensor, dim: int) -> torch.Tensor:
    """Returns zeros along one dim of the tensor, sharded as it is; other dims have size 1."""
    local = local_shard(tensor)
    zeros = torch.zeros(_only(local.shape, dim), device=local.device)
    return sharded_like(zeros, tensor, dim)


def _only(shape: torch.Size, dim: int) -> torch.Size:
    return torch.Size(size if i == dim else 1 for i, size in enumerate(shape))


def reduce_over_shards(
    values: Sequence[torch.Tensor],
    tensors: Sequence[torch.Tensor],
    dim: int | None = None,
    op: Any = dist.ReduceOp.SUM,
) -> None:
    """Reduces values, each computed from one shard, over all shards of its tensor, in place.

    `tensors` has the tensor of each value at the same index. With `dim` a value is reduced over the
    shards along that dim. One all-reduce per mesh axis (collective).
    """
    by_group: dict[tuple[dist.ProcessGroup, str], Tensors] = {}
    for value, tensor in zip(values, tensors, strict=True):
        for mesh, axis in _sharding_axes(tensor, dim):
            key = (mesh.get_group(axis), mesh.device_type)
            by_group.setdefault(key, []).append(value)
    for (group, device), members in by_group.items():
        flat = torch.cat([value.flatten() for value in members]).to(device)
        dist.all_reduce(flat, op, group)
        reduced = torch.split(flat, [value.numel() for value in members])
        for value, result in zip(members, reduced, strict=True):
            value.copy_(result.view_as(value))


def tensor_norms(shards: Sequence[torch.Tensor], tensors: Sequence[torch.Tensor]) -> Tensors:
    """Returns the 2-norm of each full tensor from shards laid out as `tensors` (collective)."""
    squares = [torch.linalg.vector_norm(shard).square() for shard in shards]
    reduce_over_shards(squares, tensors)
    return list(map(torch.sqrt, squares))


@torch.no_grad()
def global_norm(tensors: Sequence[torch.Tensor], mesh: Mesh) -> torch.Tensor:
    """Returns the 2-norm of all tensors together, fp32, identical on every rank (collective).

    A shard that several ranks of a replica hold counts once. One all-reduce and no host sync.
    """
    by_copies: dict[int, Tensors] = {}
    for tensor in tensors:
        by_copies.setdefault(num_copies(tensor, mesh), []).append(local_shard(tensor))
    # Under CPU offload the shards are on another device than the process group.
    device = None if mesh.device_mesh is None else mesh.device_mesh.device_type
    squared = torch.zeros((), device=device)
    for copies, shards in by_copies.items():
        norms = torch.stack(torch_private.norms(shards))
        norm: torch.Tensor = torch.linalg.vector_norm(norms)
        if device is None:
            return norm
        squared += norm.square().to(device) / copies
    return mesh.sum(squared, "replica").sqrt()


def shard_groups(tensors: Sequence[torch.Tensor]) -> dict[dist.ProcessGroup | None, list[int]]:
    """Returns the indices of the tensors by the group of ranks that hold the shards of one copy.

    The group is None for full tensors. Collective.
    """
    by_axes: dict[tuple[tuple[DeviceMesh, int], ...], list[int]] = {}
    for index, tensor in enumerate(tensors):
        by_axes.setdefault(tuple(_sharding_axes(tensor)), []).append(index)
    by_group: dict[dist.ProcessGroup | None, list[int]] = {}
    for axes, indices in by_axes.items():
        by_group.setdefault(_group_over(axes), []).extend(indices)
    return by_group


def to_group_device(shard: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """Moves a shard to the device of the process group: under CPU offload it is elsewhere."""
    if not isinstance(like, DTensor):
        return shard
    return shard.to(like.device_mesh.device_type)


def _dim(placement: Placement) -> int | None:
    """Returns the dim that a placement shards; None for copies.

    The class of a strided placement is private, and not a subclass of Shard.
    """
    if placement.is_replicate():
        return None
    assert not placement.is_partial(), placement
    sharded: Any = placement
    dim: int = sharded.dim
    return dim


def _sharding_axes(tensor: torch.Tensor, dim: int | None = None) -> list[tuple[DeviceMesh, int]]:
    """Returns the mesh axes that shard the tensor, or one dim of it, each with its mesh."""
    if not isinstance(tensor, DTensor):
        return []
    mesh = tensor.device_mesh
    return [(mesh, axis) for axis in _axes(mesh.shape, tensor.placements, dim)]


@cache
def _axes(sizes: tuple[int, ...], placements: Placements, dim: int | None) -> tuple[int, ...]:
    """Returns the axes with several ranks that shard the tensor; with `dim` those that shard that dim."""
    axes = []
    for axis, (size, placement) in enumerate(zip(sizes, placements, strict=True)):
        sharded = _dim(placement)
        if size > 1 and sharded is not None and dim in (None, sharded):
            axes.append(axis)
    return tuple(axes)


@cache
def _all_shard_slices(
    shape: torch.Size, sizes: tuple[int, ...], placements: Placements
) -> tuple[Slices, ...]:
    """Returns the slices of every shard; the last sharding axis varies fastest.

    Computed here, because torch's compute_local_shape_and_global_offset is wrong when two axes
    shard a dim unevenly (2.11 to 2.14: 7 rows, tp 2, FSDP 3;
    https://github.com/pytorch/pytorch/issues/161368). Shards have the sizes of torch.chunk.
    """
    axes = _axes(sizes, placements, None)
    shards = list[Slices]()
    for ranks in itertools.product(*(range(sizes[axis]) for axis in axes)):
        rank_along = dict(zip(axes, ranks, strict=True))
        slices = list[slice]()
        for dim, size in enumerate(shape):
            rows = range(size)
            for axis in _sharding_order(sizes, placements, dim):
                length = -(-len(rows) // sizes[axis])
                rows = rows[rank_along[axis] * length :][:length]
            slices.append(slice(rows.start, rows.stop))
        shards.append(tuple(slices))
    return tuple(shards)


@cache
def _sharding_order(sizes: tuple[int, ...], placements: Placements, dim: int) -> list[int]:
    """Returns the axes that shard the dim, in the order in which they shard it.

    The split factor of a strided placement is the number of shards that axes on its right have made
    before it; in torch 2.13 `is_shard()` of such a placement is False.
    """
    order: list[int] = []
    for axis in reversed(_axes(sizes, placements, dim)):
        ordered_sizes = [sizes[each] for each in order]
        counts = list(itertools.accumulate(ordered_sizes, operator.mul, initial=1))
        split_factor = getattr(placements[axis], "split_factor", 1)
        assert split_factor in counts, f"shards must be contiguous: {placements}, {sizes}"
        order.insert(counts.index(split_factor), axis)
    return order


def _length(part: slice) -> int:
    return len(range(part.start, part.stop))


def _group_over(axes: Sequence[tuple[DeviceMesh, int]]) -> dist.ProcessGroup | None:
    """Returns the process group over some axes of one mesh, the last axis fastest."""
    if len(axes) < 2:
        return next((mesh.get_group(axis) for mesh, axis in axes), None)
    (mesh, first), names = axes[0], axes[0][0].mesh_dim_names or ()
    flat = torch_private.flatten(mesh[tuple(names[axis] for _, axis in axes)])
    group: dist.ProcessGroup = flat.get_group()
    # A new group gets torch's default timeout, not that of its axes.
    device = torch.device(mesh.device_type)
    group.set_timeout(torch_private.timeout_of(mesh.get_group(first), device))
    return group
