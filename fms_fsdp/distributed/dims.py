"""The axes of a launch, from its flags and the number of its ranks. Loads no torch."""

from __future__ import annotations

import math

from fms_fsdp.config import ParallelConfig
from fms_fsdp.config.batch_plan import divisors
from fms_fsdp.config.flag import flag_table
from fms_fsdp.distributed.axes import ParallelDims
from fms_fsdp.distributed.world import World
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
