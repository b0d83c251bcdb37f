"""From a strategy and a world size to data-parallel degrees and a device mesh.

    world_size = dp_replicate × dp_shard       none: 1 × 1    fsdp: 1 × W    hsdp: W/s × s    ddp: W × 1

Ranks of one shard group are neighbours, so a group of `local_world_size` stays inside a node. All of this is pure but `build_mesh`.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from fms_fsdp.config import ParallelConfig

_STRATEGIES = ("fsdp", "hsdp", "ddp", "none")
_PREFER_HSDP = (
    "7b",
    "13b",
    "llama2_7b",
    "llama2_13b",
)  # they fit the GPUs of one node, and HSDP communicates less


@dataclass(frozen=True)
class Layout:
    """How the data-parallel ranks divide: `dp_replicate` copies of the model, each sharded over `dp_shard` ranks."""

    strategy: str
    dp_replicate: int
    dp_shard: int

    @property
    def dp_size(self) -> int:
        return self.dp_replicate * self.dp_shard


def resolve_layout(
    section: ParallelConfig, *, variant: str, world_size: int, local_world_size: int
) -> Layout:
    """The layout of a run. Default strategy: none on one device, hsdp for 7b and 13b, else fsdp.

    Raises:
        ValueError: an unknown strategy, `none` on several processes, or a shard size that does not divide the world size.
    """
    default = "none" if world_size == 1 else "hsdp" if variant.lower() in _PREFER_HSDP else "fsdp"
    strategy = (section.sharding_strategy or default).lower()
    if strategy not in _STRATEGIES:
        raise ValueError(
            f"--sharding_strategy ({section.sharding_strategy}) must be one of: {', '.join(_STRATEGIES)}"
        )
    if strategy == "none":
        if world_size > 1:
            raise ValueError(
                f"--sharding_strategy (none) is for one process, not for a world of {world_size}; use fsdp, hsdp or ddp"
            )
        return Layout(strategy, 1, 1)
    if strategy == "ddp":
        return Layout(strategy, world_size, 1)
    if strategy == "fsdp":
        return Layout(strategy, 1, world_size)
    shard_size = section.hsdp_shard_size or local_world_size
    if world_size % shard_size:
        valid = ", ".join(str(size) for size in range(1, world_size + 1) if world_size % size == 0)
        source = "" if section.hsdp_shard_size else ", the devices of a node,"
        raise ValueError(
            f"--hsdp_shard_size ({shard_size}){source} must divide the world size "
            f"({world_size} = replicas x hsdp_shard_size); valid sizes: {valid}"
        )
    return Layout(strategy, world_size // shard_size, shard_size)


def build_mesh(layout: Layout, device_type: str) -> DeviceMesh | None:
    """The mesh of a layout, None for `none`: ("dp_shard",) where there is one copy, else ("dp_replicate", "dp_shard").

    Collective: every rank.
    """
    if layout.strategy == "none":
        return None
    if layout.dp_replicate == 1:
        return init_device_mesh(device_type, (layout.dp_shard,), mesh_dim_names=("dp_shard",))
    return init_device_mesh(
        device_type, (layout.dp_replicate, layout.dp_shard), mesh_dim_names=("dp_replicate", "dp_shard")
    )
