"""The device mesh of a run. Other modules ask for an axis by name (axes.py), never for the world size."""

from __future__ import annotations

from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed.constants import default_pg_timeout
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from fms_fsdp.distributed import torch_private
from fms_fsdp.distributed.axes import AXES, JOINED, ParallelDims


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
