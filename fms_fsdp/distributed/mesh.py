"""The device mesh of a run. Other modules ask for an axis by name (axes.py), never for the world size."""

from __future__ import annotations

import math
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed.constants import default_pg_timeout
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from fms_fsdp.config import ParallelConfig
from fms_fsdp.config.batch_plan import divisors
from fms_fsdp.config.flag import flag_table
from fms_fsdp.distributed import torch_private
from fms_fsdp.distributed.axes import AXES, JOINED, ParallelDims
from fms_fsdp.distributed.runtime import World
from fms_fsdp.errors import UserError

_STRATEGIES = flag_table(ParallelConfig)["sharding_strategy"].choices
_PREFER_HSDP = ("7b", "13b", "llama2_7b", "llama2_13b")  # fit one node, where hsdp sends less


def plan_dims(section: ParallelConfig, variant: str, world: World) -> ParallelDims:
    """Returns the size of each axis.

    Default strategy: none on one device, hsdp for 7b and 13b, otherwise fsdp.

    Raises:
        UserError: the axes do not divide the world, or `none` has several processes.
    """
    if section.sharding_strategy:
        strategy = section.sharding_strategy.lower()
    elif world.size == 1:
        strategy = "none"
    elif variant.lower() in _PREFER_HSDP:
        strategy = "hsdp"
    else:
        strategy = "fsdp"
    if strategy not in _STRATEGIES:
        raise UserError(
            f"--sharding_strategy={section.sharding_strategy} must be one of: "
            f"{', '.join(_STRATEGIES)}"
        )
    if strategy == "none" and world.size > 1:
        raise UserError(
            f"--sharding_strategy=none requires one process, but the world size is {world.size}; "
            "use fsdp, hsdp or ddp"
        )
    sizes = {axis: max(1, getattr(section, f"{axis}_size")) for axis in ("pp", "cp", "tp")}
    dp_size, remainder = divmod(world.size, math.prod(sizes.values()))
    if remainder:
        raise _axes_error(sizes, world.size)
    if strategy == "none":
        return ParallelDims(strategy)
    shard_size = dp_size
    if strategy == "ddp":
        shard_size = 1
    if strategy == "hsdp":
        shard_size = _hsdp_shard_size(section, sizes, dp_size, world)
    virtual_stages = 1
    if sizes["pp"] > 1 and section.pp_schedule == "zbv":
        virtual_stages = 2
    elif sizes["pp"] > 1 and section.pp_schedule == "interleaved":
        virtual_stages = section.pp_virtual_stages or 2
    is_ddp = strategy == "ddp" and sizes["pp"] == 1  # a shard group of one rank gathers nothing
    return ParallelDims(
        strategy,
        dp_replicate=dp_size // shard_size,
        dp_shard=shard_size,
        **sizes,
        reshard_after_forward=is_ddp or section.resolved("reshard_after_forward"),
        sync_each_micro_step=is_ddp or section.resolved("sync_each_micro_step"),
        sequence_parallel=section.sequence_parallel is not False and sizes["tp"] > 1,
        virtual_stages=virtual_stages,
    )


def _hsdp_shard_size(
    section: ParallelConfig, sizes: dict[str, int], dp_size: int, world: World
) -> int:
    """Returns the ranks of a shard group: of the flag, or those of a node that read other sequences."""
    ranks_per_node = max(1, world.local_size // (sizes["cp"] * sizes["tp"]))
    shard_size = section.hsdp_shard_size or min(ranks_per_node, dp_size)
    if dp_size % shard_size:
        source = "" if section.hsdp_shard_size else " (the devices of a node)"
        ranks = "world size" if dp_size == world.size else "data-parallel size"
        raise UserError(
            f"--hsdp_shard_size={shard_size}{source} must divide the {ranks} ({dp_size} = "
            f"replicas x hsdp_shard_size); use {_divisors_of(dp_size)}"
        )
    return shard_size


def _axes_error(sizes: dict[str, int], world_size: int) -> UserError:
    """Returns the error of axes that do not divide the world, with the sizes that each may have."""
    num_ranks = math.prod(sizes.values())
    fixes = list[str]()
    given = {axis: size for axis, size in sizes.items() if size > 1}
    for axis, size in given.items():
        others = num_ranks // size
        if world_size % others == 0:
            fixes.append(f"--{axis}_size={_divisors_of(world_size // others)}")
    axes = " x ".join(f"--{axis}_size={size}" for axis, size in given.items())
    fix = "use smaller axes"
    if fixes:
        fix = f"use {', or '.join(fixes)}"
    return UserError(f"{axes} must divide the world size ({world_size}); {fix}")


def _divisors_of(number: int) -> str:
    *others, largest = map(str, divisors(number, number))
    if not others:
        return largest
    return f"{', '.join(others)} or {largest}"


class Mesh:
    """The device mesh of a run, this rank's position, and sums along axes.

    Making one is collective. Without a process group (`none`) every sum is of one rank. `timeout`
    applies to collectives; groups of axes do not inherit it from the default group.
    """

    def __init__(
        self,
        dims: ParallelDims,
        rank: int,
        device_type: str,
        timeout: timedelta = default_pg_timeout,
    ) -> None:
        self.dims = dims
        self._rank = rank
        self.device_mesh: DeviceMesh | None = None
        self._joined: dict[tuple[str, ...], DeviceMesh] = {}
        self._groups: dict[str, dist.ProcessGroup | None] = {}
        if dims.strategy == "none":
            return
        names = tuple(axis for axis in AXES if dims.size(axis) > 1 or axis == "dp_shard")
        mesh = init_device_mesh(device_type, tuple(map(dims.size, names)), mesh_dim_names=names)
        self.device_mesh = mesh
        for axis in (*names, *JOINED):
            parts = tuple(part for part in JOINED.get(axis, (axis,)) if part in names)
            is_world = axis in JOINED and dims.size(axis) == dims.size("world")
            # FSDP takes the mesh of "shard", even if it has all ranks.
            if len(parts) > 1 and (axis == "shard" or not is_world):
                if parts not in self._joined:  # axes with the same parts share a group
                    self._joined[parts] = torch_private.flatten(mesh[parts], axis)
                self._groups[axis] = self._joined[parts].get_group()
            elif len(parts) == 1:
                self._groups[axis] = mesh.get_group(parts[0])
            if is_world:
                self._groups[axis] = None  # the default group
        groups = set(self._groups.values())
        groups |= {flat.get_group() for flat in self._joined.values()}
        for group in groups:
            if group is None:
                group = dist.group.WORLD
            assert group is not None
            group.set_timeout(timeout)

    @property
    def fsdp_mesh(self) -> DeviceMesh | None:
        """The mesh over which FSDP replicates and shards."""
        if self.device_mesh is None:
            return None
        has_replicas = self.size("dp_replicate") > 1
        shard = self._joined.get(JOINED["shard"])
        if shard is not None:  # cp shards too
            if not has_replicas:
                return shard
            return torch_private.concatenate([self.device_mesh["dp_replicate"], shard])
        if self.size("dp") == self.size("world"):
            return self.device_mesh
        return self.device_mesh[("dp_replicate", "dp_shard") if has_replicas else ("dp_shard",)]

    def axis(self, name: str) -> DeviceMesh:
        """Returns the device mesh of one axis that has several ranks."""
        assert self.device_mesh is not None
        return self.device_mesh[name]

    @property
    def is_main(self) -> bool:
        """Whether this process writes the files that one process writes for all."""
        return self._rank == 0

    def size(self, axis: str) -> int:
        """Returns the number of ranks along the axis."""
        return self.dims.size(axis)

    def axis_rank(self, axis: str) -> int:
        """Returns this process's rank along the axis."""
        return self.dims.axis_rank(self._rank, axis)

    def counts_for(self, axis: str) -> bool:
        """Returns whether this process adds its value to a sum over the world.

        If values differ along `axis` alone, the first of the ranks with the same value does.
        """
        others = set(AXES) - set(JOINED.get(axis, (axis,)))
        return all(self.axis_rank(other) == 0 for other in others)

    def sum(self, tensor: torch.Tensor, axis: str) -> torch.Tensor:
        """Sums the tensor over the ranks along the axis, in place (collective)."""
        if self.size(axis) > 1:
            dist.all_reduce(tensor, group=self._groups[axis])
        return tensor
