"""The ranks of a run, arranged by named axes. Other modules ask for the size of an axis, a place on an axis
or a sum over an axis by the name of the axis.

    world = pp x dp_replicate x dp_shard x cp x tp       neighbours differ in the last axis, which stays
    inside a node

    dp       dp_replicate x dp_shard       ranks that read different rows
    loss     dp_replicate x dp_shard x cp  ranks whose losses are of different tokens
    replica  pp x dp_shard x cp x tp       ranks that hold one copy of the model among them
    world    all five

    none: 1    fsdp, zero1, zero2: dp_shard = W
    hsdp: dp_replicate = W/s, dp_shard = s    ddp: dp_replicate = W

No other module asks for the world's size, rank or process group to learn about data, labels, norms or files.
"""

from __future__ import annotations

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
    """The axes of a run. Default strategy: none on one device, hsdp for 7b and 13b, else fsdp.

    Raises:
        UserError: an unknown strategy, `none` on several processes, or a shard size that does not divide
            the world size.
    """
    world_size = world.world_size
    default = "none" if world_size == 1 else "hsdp" if variant.lower() in _PREFER_HSDP else "fsdp"
    strategy = (section.sharding_strategy or default).lower()
    if strategy not in _STRATEGIES:
        raise UserError(
            f"--sharding_strategy ({section.sharding_strategy}) must be one of: {', '.join(_STRATEGIES)}"
        )
    if strategy == "none":
        if world_size > 1:
            raise UserError(
                f"--sharding_strategy (none) is for one process, not for a world of {world_size}; "
                "use fsdp, hsdp or ddp"
            )
        return ParallelDims(strategy)
    if strategy == "ddp":
        return ParallelDims(strategy, dp_replicate=world_size)
    shard_size = (section.hsdp_shard_size or world.local_world_size) if strategy == "hsdp" else world_size
    if world_size % shard_size:
        valid = ", ".join(str(size) for size in range(1, world_size + 1) if world_size % size == 0)
        source = "" if section.hsdp_shard_size else ", the devices of a node,"
        raise UserError(
            f"--hsdp_shard_size ({shard_size}){source} must divide the world size "
            f"({world_size} = replicas x hsdp_shard_size); valid sizes: {valid}"
        )
    return ParallelDims(
        strategy,
        dp_replicate=world_size // shard_size,
        dp_shard=shard_size,
        reshard_after_forward=section.resolved("reshard_after_forward"),
        sync_each_micro_step=section.resolved("sync_each_micro_step"),
    )


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
        for joined, parts in JOINED.items():
            present = tuple(part for part in parts if part in names)
            if dims.size(joined) == dims.size("world"):
                self._groups[joined] = None  # torch's default group
            elif len(present) == 1:
                self._groups[joined] = self._groups[present[0]]
            elif present:
                self._groups[joined] = self.device_mesh[present]._flatten(joined).get_group()
        for group in set(self._groups.values()):
            dist.distributed_c10d._set_pg_timeout(timeout, group)

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
