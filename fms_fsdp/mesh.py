"""The ranks of a run, arranged by named axes. Other modules ask for the size of an axis, a place on an axis
or a sum over an axis by the name of the axis.

    world = pp x dp_replicate x dp_shard x cp x tp       neighbours differ in the last axis, which stays
    inside a node

    dp       dp_replicate x dp_shard       ranks that read different rows
    loss     dp_replicate x dp_shard x cp  ranks over which FSDP averages gradients
    shard    dp_shard x cp                 ranks over which FSDP shards
    row      pp x cp                       ranks among which the losses of one row are spread
    losses   all but tp                    ranks whose losses add up; without the last stage they are 0
    replica  pp x dp_shard x cp x tp       ranks that hold one copy of the model among them
    world    all five

    none: 1    fsdp, zero1, zero2: dp_shard = D    with D = world / (pp x cp x tp)
    hsdp: dp_replicate = D/s, dp_shard = s         ddp: dp_replicate = D

No other module asks for the world's size, rank or process group to learn about data, labels, norms or files.
"""

from __future__ import annotations

import math
from datetime import timedelta
from typing import TypeVar

import torch
import torch.distributed as dist
from torch.distributed.constants import default_pg_timeout
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from fms_fsdp.config import ParallelConfig
from fms_fsdp.config.axes import AXES, JOINED, ParallelDims
from fms_fsdp.config.flag import flag_table
from fms_fsdp.errors import UserError
from fms_fsdp.runtime import World

T = TypeVar("T")
_STRATEGIES = flag_table(ParallelConfig)["sharding_strategy"].choices
_PREFER_HSDP = ("7b", "13b", "llama2_7b", "llama2_13b")  # they fit one node, and HSDP communicates less


def resolve_dims(section: ParallelConfig, variant: str, world: World) -> ParallelDims:
    """The axes of a run. Default strategy: none on one device, hsdp for 7b and 13b, else fsdp. Where hsdp
    is the default and does not fit, `with_room` (spec/data.py) asks again for fsdp.

    Raises:
        UserError: an unknown strategy, `none` on several processes, axes whose product does not divide the
            world size, or a shard size that does not divide what they leave.
    """
    world_size = world.world_size
    default = "none" if world_size == 1 else "hsdp" if variant.lower() in _PREFER_HSDP else "fsdp"
    strategy = (section.sharding_strategy or default).lower()
    if strategy not in _STRATEGIES:
        raise UserError(
            f"--sharding_strategy ({section.sharding_strategy}) must be one of: {', '.join(_STRATEGIES)}"
        )
    sizes = {axis: max(1, getattr(section, f"{axis}_size")) for axis in ("pp", "cp", "tp")}
    dp_size = _data_parallel_size(sizes, world_size)
    if strategy == "none":
        if world_size > 1:
            raise UserError(
                f"--sharding_strategy (none) is for one process, not for a world of {world_size}; "
                "use fsdp, hsdp or ddp"
            )
        return ParallelDims(strategy)
    shard_size = 1 if strategy == "ddp" else dp_size
    if strategy == "hsdp":
        shard_size = _hsdp_shard_size(section, world, dp_size, sizes["cp"] * sizes["tp"])
    is_kept = strategy == "ddp" and sizes["pp"] == 1
    split_sequence = section.sequence_parallel is not False and sizes["tp"] > 1
    return ParallelDims(
        strategy,
        dp_replicate=dp_size // shard_size,
        dp_shard=shard_size,
        **sizes,
        reshard_after_forward=is_kept or section.resolved("reshard_after_forward"),
        sync_each_micro_step=is_kept or section.resolved("sync_each_micro_step"),
        sequence_parallel=split_sequence,
        virtual_stages=_virtual_stages(section),
    )


def _virtual_stages(section: ParallelConfig) -> int:
    """Stages of a pipeline on each rank."""
    if section.pp_size <= 1:
        return 1
    return {"zbv": 2, "interleaved": section.pp_virtual_stages or 2}.get(section.pp_schedule, 1)


def _data_parallel_size(sizes: dict[str, int], world_size: int) -> int:
    """The ranks that the other axes leave for different rows."""
    product = math.prod(sizes.values())
    if world_size % product == 0:
        return world_size // product
    given = {axis: size for axis, size in sizes.items() if size > 1}
    remedies = []
    for axis, size in given.items():
        valid = [n for n in range(1, world_size + 1) if world_size % (product // size * n) == 0]
        if valid:
            remedies.append(f"--{axis}_size among {', '.join(map(str, valid))}")
    axes = " x ".join(f"--{axis}_size ({size})" for axis, size in given.items())
    raise UserError(
        f"world size ({world_size}) must be a multiple of {axes}; choose "
        f"{' or '.join(remedies) or 'smaller axes'}"
    )


def _hsdp_shard_size(section: ParallelConfig, world: World, dp_size: int, inner: int) -> int:
    """The ranks of a shard group under hsdp; by default those of a node that the `inner` axes leave.

    Raises:
        UserError: they do not divide the data-parallel ranks.
    """
    size = section.hsdp_shard_size or min(max(1, world.local_world_size // inner), dp_size)
    if dp_size % size:
        valid = ", ".join(str(size) for size in range(1, dp_size + 1) if dp_size % size == 0)
        source = "" if section.hsdp_shard_size else ", the devices of a node,"
        ranks = "the world size" if dp_size == world.world_size else "the data-parallel ranks"
        raise UserError(
            f"--hsdp_shard_size ({size}){source} must divide {ranks} "
            f"({dp_size} = replicas x hsdp_shard_size); valid sizes: {valid}"
        )
    return size


class Mesh:
    """The axes of a run with the places of this process, and sums over the ranks of an axis.

    Making one is collective: every rank. Without a process group (`none`) every sum is of one rank.
    `timeout`: of collectives; that of the default group does not pass to the groups of axes.
    """

    def __init__(
        self, dims: ParallelDims, rank: int, device_type: str, timeout: timedelta = default_pg_timeout
    ) -> None:
        self.dims, self._rank = dims, rank
        self.device_mesh: DeviceMesh | None = None
        self._groups: dict[str, dist.ProcessGroup | None] = {}
        if dims.strategy == "none":
            return
        names = [axis for axis in AXES if dims.size(axis) > 1 or axis == "dp_shard"]
        sizes = tuple(map(dims.size, names))
        self.device_mesh = init_device_mesh(device_type, sizes, mesh_dim_names=tuple(names))
        self._groups |= zip(names, map(self.device_mesh.get_group, names), strict=True)
        self._joined: dict[tuple[str, ...], DeviceMesh] = {}  # by their axes
        for joined, parts in JOINED.items():
            present = tuple(part for part in parts if part in names)
            if joined == "shard" and len(present) == 2:  # FSDP asks for it also where it is the world
                self._joined[present] = self.device_mesh[present]._flatten(joined)
            if dims.size(joined) == dims.size("world"):
                self._groups[joined] = None  # torch's default group
            elif len(present) == 1:
                self._groups[joined] = self._groups[present[0]]
            elif present:
                if present not in self._joined:
                    self._joined[present] = self.device_mesh[present]._flatten(joined)
                self._groups[joined] = self._joined[present].get_group()
        joined_groups = {mesh.get_group() for mesh in self._joined.values()}
        for group in joined_groups | set(self._groups.values()):
            dist.distributed_c10d._set_pg_timeout(timeout, group)

    @property
    def fsdp_mesh(self) -> DeviceMesh | None:
        """The part of the device mesh over which FSDP replicates and shards."""
        if self.device_mesh is None or not set(self.device_mesh.mesh_dim_names or ()) - set(JOINED["dp"]):
            return self.device_mesh
        if self.size("cp") == 1:
            return self.device_mesh[
                ("dp_replicate", "dp_shard") if self.size("dp_replicate") > 1 else "dp_shard"
            ]
        shard = self._joined[JOINED["shard"]]
        if self.size("dp_replicate") == 1:
            return shard
        return DeviceMesh._concatenate([self.device_mesh["dp_replicate"], shard])

    def axis(self, name: str) -> DeviceMesh:
        """The device mesh of one axis that has several ranks."""
        assert self.device_mesh is not None
        return self.device_mesh[name]

    @property
    def is_main(self) -> bool:
        """Whether this process writes the files that one process writes for all."""
        return self._rank == 0

    def size(self, axis: str) -> int:
        """How many ranks the axis has."""
        return self.dims.size(axis)

    def place(self, axis: str) -> int:
        """This process's place from 0 on the axis."""
        return self.dims.place(self._rank, axis)

    def counts_for(self, axis: str) -> bool:
        """Whether this process adds to a sum over the world of values that differ along `axis` alone.

        Of the ranks that hold the same value the first adds it, the others do not.
        """
        others = set(AXES) - set(JOINED.get(axis, (axis,)))
        return all(self.place(other) == 0 for other in others)

    def sum(self, tensor: torch.Tensor, axis: str) -> torch.Tensor:
        """The element-wise sum over the ranks of the axis, in place (collective: every rank)."""
        if self.size(axis) > 1:
            dist.all_reduce(tensor, group=self._groups[axis])
        return tensor

    def gather(self, value: T) -> list[T]:
        """The values of all ranks of the world, by rank (collective: every rank)."""
        everyone = [value] * self.size("world")
        if len(everyone) > 1:
            dist.all_gather_object(everyone, value)
        return everyone
