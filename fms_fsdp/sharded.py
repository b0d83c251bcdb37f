"""Tensors of which each rank holds a part: which part is mine, how many ranks hold it, and norms and sums
over the parts.

Such a tensor, a DTensor, has a placement for each axis of its device mesh: the ranks of the axis hold parts
along one dim, or copies. No other module reads placements. A plain tensor is its own only part.

    rows    ├────── tp 0 ───────┼────── tp 1 ───────┤    tp cuts first, FSDP cuts what a rank of tp holds:
            ├ fsdp 0 ─┼ fsdp 1 ─┼ fsdp 0 ─┼ fsdp 1 ─┤    (_StridedShard(0, split_factor=2), Shard(0))

A strided placement says into how many pieces axes on its right have cut the dim before; in torch 2.13 its
`is_shard()` is False. The places are computed here: of rows that such cuts do not divide, torch's
`compute_local_shape_and_global_offset` tells some that no rank holds (2.11 to 2.13: 7 rows, tp 2, FSDP 3).
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
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard, distribute_tensor
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
from torch.distributed.tensor.placement_types import _StridedShard

from fms_fsdp.mesh import Mesh

Tensors = list[torch.Tensor]
Place = tuple[slice, ...]  # of a part in the whole tensor, a slice for each dim
Placements = tuple[Placement, ...]


def is_distributed(tensor: torch.Tensor) -> bool:
    """Whether the tensor has placements, if only on a mesh of one rank."""
    return isinstance(tensor, DTensor)


def local_part(tensor: torch.Tensor) -> torch.Tensor:
    """This rank's part of the tensor, which shares the memory of the tensor."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def local_parts(tensors: Iterable[torch.Tensor | None]) -> Tensors:
    """This rank's part of each tensor that is not None."""
    return [local_part(tensor) for tensor in tensors if tensor is not None]


def divided(tensor: torch.Tensor, mesh: DeviceMesh, dim: int | None) -> torch.Tensor:
    """The tensor, which every rank has whole, in parts along a dim on the ranks of a mesh of one axis; None:
    each rank keeps a copy. Nothing is sent."""
    placement = Replicate() if dim is None else Shard(dim)
    return distribute_tensor(tensor, mesh, [placement], src_data_rank=None)


def part_for_products(tensor: torch.Tensor, *, adds_up: bool) -> torch.Tensor:
    """This rank's part, for computations with gradients. `adds_up`: the ranks have copies, and each a summand
    of the gradient; otherwise the gradients of copies are alike."""
    distributed: Any = tensor
    part: torch.Tensor = distributed.to_local(grad_placements=[Partial()] if adds_up else None)
    return part


def num_axes(tensor: torch.Tensor) -> int:
    """Over how many axes of ranks the tensor lies; FSDP adds its own to those of tp."""
    return tensor.device_mesh.ndim if isinstance(tensor, DTensor) else 0


def place_of(tensor: torch.Tensor) -> Place:
    """The place of this rank's part in the whole tensor."""
    number = 0
    for mesh, axis in _cuts(tensor):
        number = number * mesh.size(axis) + mesh.get_local_rank(axis)
    place, shape = places_of(tensor)[number], local_part(tensor).shape
    assert tuple(map(_length, place)) == shape, (place, shape)
    return place


def places_of(tensor: torch.Tensor) -> tuple[Place, ...]:
    """The place of each part in the whole tensor, empty ones included, by its rank in the group of
    `groups_of`."""
    cuts = (tensor.device_mesh.shape, tensor.placements) if isinstance(tensor, DTensor) else ((), ())
    return _places(tensor.shape, *cuts)


def num_copies(tensor: torch.Tensor, mesh: Mesh) -> int:
    """The number of ranks, among those of one stage of one replica of the model, that hold each part."""
    return mesh.size("replica") // mesh.size("pp") // len(places_of(tensor))


def sharded_like(part: torch.Tensor, like: torch.Tensor, dim: int | None = None) -> torch.Tensor:
    """The tensor whose part on this rank is `part`, of the shape of another tensor and cut as that one is.

    With `dim` only that dim is so; every other one has size 1.
    """
    if not isinstance(like, DTensor):
        return part
    placements, shape = like.placements, like.shape
    if dim is not None:
        placements = tuple(each if _cut_dim(each) == dim else Replicate() for each in placements)
        shape = _alone(shape, dim)
    meta = TensorMeta(shape, torch.empty(shape, device="meta").stride(), part.dtype)
    spec = DTensorSpec(like.device_mesh, placements, meta)
    return DTensor(part, spec, requires_grad=False)  # type: ignore[no-untyped-call]


def zeros_along(tensor: torch.Tensor, dim: int) -> torch.Tensor:
    """Zeros, one for each index of a dim of the tensor, cut as that dim is; every other dim has size 1."""
    local = local_part(tensor)
    return sharded_like(torch.zeros(_alone(local.shape, dim), device=local.device), tensor, dim)


def _alone(shape: torch.Size, dim: int) -> torch.Size:
    """The shape with one dim alone; every other dim has size 1."""
    return torch.Size(size if i == dim else 1 for i, size in enumerate(shape))


def reduce_over_parts(
    values: Sequence[torch.Tensor],
    tensors: Sequence[torch.Tensor],
    dim: int | None = None,
    op: Any = dist.ReduceOp.SUM,
) -> None:
    """Changes each value, computed from one part of the tensor at the same index, into the value of all parts
    of that tensor, in place (collective: every rank).

    With `dim` only over the parts along that dim. Sends one message over each axis that cuts a tensor.
    """
    by_group: dict[tuple[dist.ProcessGroup, str], Tensors] = {}
    for value, tensor in zip(values, tensors, strict=True):
        for mesh, axis in _cuts(tensor, dim):
            by_group.setdefault((mesh.get_group(axis), mesh.device_type), []).append(value)
    for (group, device), some in by_group.items():
        message = torch.cat(list(map(torch.flatten, some))).to(device)
        dist.all_reduce(message, op, group)
        reduced_values = torch.split(message, list(map(torch.numel, some)))
        for value, reduced in zip(some, reduced_values, strict=True):
            value.copy_(reduced.view_as(value))


def norms_of(parts: Sequence[torch.Tensor], tensors: Sequence[torch.Tensor]) -> Tensors:
    """The 2-norm of each whole tensor, a scalar, from parts that are cut like the tensors.

    Collective: every rank.
    """
    squares = [torch.linalg.vector_norm(part).square() for part in parts]
    reduce_over_parts(squares, tensors)
    return list(map(torch.sqrt, squares))


@torch.no_grad()
def global_norm(tensors: Sequence[torch.Tensor], mesh: Mesh) -> torch.Tensor:
    """The 2-norm of all tensors together, an fp32 scalar alike on all ranks, without a host sync (collective:
    every rank).

    Exact on any mesh: a part that several ranks of one replica hold counts once, and one all-reduce adds
    up the squares of all parts.
    """
    by_copies: dict[int, Tensors] = {}
    for tensor in tensors:
        by_copies.setdefault(num_copies(tensor, mesh), []).append(local_part(tensor))
    # under CPU offload the parts lie elsewhere than the process group works
    device = None if mesh.device_mesh is None else mesh.device_mesh.device_type
    squared = torch.zeros((), device=device)
    for copies, parts in by_copies.items():
        norms = torch.stack(torch._foreach_norm(parts, dtype=torch.float32))
        norm: torch.Tensor = torch.linalg.vector_norm(norms)
        if device is None:
            return norm
        squared += norm.square().to(device) / copies
    return mesh.sum(squared, "replica").sqrt()


def groups_of(tensors: Sequence[torch.Tensor]) -> dict[dist.ProcessGroup | None, list[int]]:
    """The indices of the tensors by the group of the ranks that hold the parts of one copy; None is the group
    of tensors that are whole (collective: every rank)."""
    by_cuts: dict[tuple[tuple[DeviceMesh, int], ...], list[int]] = {}
    for index, tensor in enumerate(tensors):
        by_cuts.setdefault(tuple(_cuts(tensor)), []).append(index)
    found: dict[dist.ProcessGroup | None, list[int]] = {}
    for cuts, indices in by_cuts.items():
        found.setdefault(_group_across(cuts), []).extend(indices)
    return found


def on_group_device(part: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """The part where the process groups of another tensor work: under CPU offload parts lie elsewhere."""
    return part.to(like.device_mesh.device_type) if isinstance(like, DTensor) else part


def part_sizes(tensor: torch.Tensor) -> list[int]:
    """The number of entries of each part, in the order of `places_of`."""
    return [math.prod(map(_length, place)) for place in places_of(tensor)]


def joined(entries: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """The whole tensor, of the shape of another one, from the entries of all parts, one part behind the other
    in the order of `places_of`."""
    whole = entries.new_empty(like.shape)
    for place, part in zip(places_of(like), torch.split(entries, part_sizes(like)), strict=True):
        whole[place] = part.view_as(whole[place])
    return whole


def taken_apart(whole: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """The entries of all parts of a whole tensor that is cut like another tensor: `joined` undoes this."""
    return torch.cat([whole[place].flatten() for place in places_of(like)])


def _cut_dim(placement: Placement) -> int | None:
    """The dim along which a placement cuts; None for copies. Summands are refused."""
    assert isinstance(placement, Shard | _StridedShard | Replicate), placement
    return None if isinstance(placement, Replicate) else placement.dim


def _cuts(tensor: torch.Tensor, dim: int | None = None) -> list[tuple[DeviceMesh, int]]:
    """The axes of more than one rank that cut the tensor, or one dim of the tensor, each with its mesh."""
    if not isinstance(tensor, DTensor):
        return []
    mesh = tensor.device_mesh
    return [(mesh, axis) for axis in _cutting_axes(mesh.shape, tensor.placements, dim)]


@cache
def _cutting_axes(sizes: tuple[int, ...], placements: Placements, dim: int | None) -> tuple[int, ...]:
    axes: list[int] = []
    for axis, (size, placement) in enumerate(zip(sizes, placements, strict=True)):
        cut_dim = _cut_dim(placement)
        if size > 1 and cut_dim is not None and dim in (None, cut_dim):
            axes.append(axis)
    return tuple(axes)


@cache
def _places(shape: torch.Size, sizes: tuple[int, ...], placements: Placements) -> tuple[Place, ...]:
    """The place of each part in a tensor of that shape, by its ranks on the axes that cut the tensor, the
    last axis first. Pieces have the sizes of torch.chunk: the last pieces may be smaller, or empty."""
    axes = _cutting_axes(sizes, placements, None)
    places: list[Place] = []
    for ranks in itertools.product(*(range(sizes[axis]) for axis in axes)):
        piece_of = dict(zip(axes, ranks, strict=True))
        place: list[slice] = []
        for dim, size in enumerate(shape):
            left = range(size)
            for axis in _order_of_cuts(sizes, placements, dim):
                length = -(-len(left) // sizes[axis])
                left = left[piece_of[axis] * length :][:length]
            place.append(slice(left.start, left.stop))
        places.append(tuple(place))
    return tuple(places)


@cache
def _order_of_cuts(sizes: tuple[int, ...], placements: Placements, dim: int) -> list[int]:
    """The axes that cut the dim, in the order of the cuts. Parts that are not contiguous are refused."""
    order: list[int] = []
    for axis in reversed(_cutting_axes(sizes, placements, dim)):
        pieces = list(itertools.accumulate(map(sizes.__getitem__, order), operator.mul, initial=1))
        pieces_before = getattr(placements[axis], "split_factor", 1)
        assert pieces_before in pieces, (placements, sizes)
        order.insert(pieces.index(pieces_before), axis)
    return order


def _length(part: slice) -> int:
    return len(range(part.start, part.stop))


def _group_across(cuts: Sequence[tuple[DeviceMesh, int]]) -> dist.ProcessGroup | None:
    """The process group over some axes of one mesh, whose last axis runs first."""
    if len(cuts) < 2:
        return next((mesh.get_group(axis) for mesh, axis in cuts), None)
    (mesh, first), names = cuts[0], cuts[0][0].mesh_dim_names or ()
    group: dist.ProcessGroup = mesh[tuple(names[axis] for _, axis in cuts)]._flatten().get_group()
    # torch gives a new group half an hour of its own
    options = mesh.get_group(first)._get_backend(torch.device(mesh.device_type)).options
    dist.distributed_c10d._set_pg_timeout(options._timeout, group)
    return group
