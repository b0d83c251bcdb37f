"""The fastest layouts that fit: strategies, shard sizes, recomputation, rows, and the sizes of tp, cp and pp.

Every layout is judged by the memory and the time of plan.py; those that come out are checked as a launch is.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from fms_fsdp.config import BatchPlan, ParallelConfig, TrainConfig
from fms_fsdp.config.batch import divisors
from fms_fsdp.config.flag import non_defaults
from fms_fsdp.errors import UserError
from fms_fsdp.mesh import resolve_dims
from fms_fsdp.models.variants import resolve_model
from fms_fsdp.optim.optimizers import state_bytes
from fms_fsdp.parallel.rules import Layout, check_axes
from fms_fsdp.planner.plan import (
    GPU,
    Cluster,
    Plan,
    changed,
    idle_flags,
    make_plan,
    plan_of,
    resolved_precision,
    written,
)

MARGIN = 0.95  # of a device's memory may be planned: the prediction errs, and fragments grow with time
KINDS: tuple[dict[str, Any], ...] = (
    {"recompute": "none"},
    {"recompute": "cheap"},
    {"recompute": "ops"},
    {"recompute": "blocks", "selective_checkpointing": "1/2"},
    {"recompute": "blocks"},
)
_LARGEST_TP, _LARGEST_PP = 8, 16
MOST_ROWS = 4096  # of a micro-step
_MOST_DEVICES = 65_536
_MOST_SIZES = 4  # numbers of rows that are tried with one layout, from the largest that fits on


@dataclass(frozen=True)
class Found:
    """A layout that fits, and the flags that make it."""

    plan: Plan
    flags: str


def search(config: TrainConfig, cluster: Cluster, global_batch: int, count: int = 5) -> list[Found]:
    """The fastest `count` layouts of so many rows a step. All flags of `config` that are given stay, those of
    the layout too; the search decides the others.

    Raises:
        UserError: the model, the precision or another flag would be refused whatever the layout is.
    """
    fitting = sorted(_fitting(config, cluster, global_batch), key=lambda each: -each[0])
    found, seen = list[Found](), set[str]()
    for _, flags in fitting:
        layout = written({name: value for name, value in flags.items() if name in _SIZES})
        if layout not in seen and (plan := _accepted(config, cluster, flags)) is not None:
            seen.add(layout)
            shown = {name: value for name, value in flags.items() if not _is_default(name, value)}
            found.append(Found(plan, written(shown)))
            if len(found) == count:
                break
    return found


def enough_devices(config: TrainConfig, cluster: Cluster, global_batch: int) -> int | None:
    """The first number of devices with a layout that fits, when they are doubled again and again."""
    devices = cluster.num_devices
    while (devices := 2 * devices) <= _MOST_DEVICES:
        larger = replace(cluster, num_devices=devices)
        candidates = _fitting(config, larger, global_batch, kinds=KINDS[-1:], most_rows=1)
        if any(_accepted(config, larger, flags) for _, flags in candidates):
            return devices
    return None


def _fitting(
    config: TrainConfig,
    cluster: Cluster,
    global_batch: int,
    kinds: tuple[dict[str, Any], ...] = KINDS,
    most_rows: int = MOST_ROWS,
) -> Iterator[tuple[float, dict[str, Any]]]:
    """Tokens/s of a device and the flags of each layout that fits: with ways to recompute, and with
    micro-steps of so many rows at most."""
    model = resolve_model(config.model, seq_length=config.data.seq_length)
    precision = resolved_precision(config)
    optimizer_bytes = state_bytes(config.optim, model, precision)
    cluster.hardware.peak("float8" if precision.float8 else precision.compute)
    given = {
        name: value
        for name, value in non_defaults(config).items()
        if value and name in _DECIDED and value != "auto"
    }
    for layout in _layouts(cluster, config.parallel):
        for recompute in kinds:
            flags = layout | recompute
            if any(flags.get(name, value) != value for name, value in given.items()):
                continue
            try:
                tried = changed(config, flags)
                dims = resolve_dims(tried.parallel, config.model.name, cluster.world)
            except UserError:
                continue
            ranks, fitting = dims.size("dp"), 0
            for batch in _batches(global_batch, ranks, tried.parallel, most_rows):
                flags_of_rows = _rows(batch)
                if any(flags_of_rows.get(name, value) != value for name, value in given.items()):
                    continue
                if dims.divides_model and not _divides(tried, model, dims, batch, precision):
                    continue
                plan = plan_of(tried, cluster, model, dims, batch, precision, optimizer_bytes)
                if plan.needed <= MARGIN * plan.available:
                    yield plan.tokens_per_s, flags | flags_of_rows
                    fitting += 1
                    if fitting == _MOST_SIZES:
                        break


def _accepted(config: TrainConfig, cluster: Cluster, flags: dict[str, Any]) -> Plan | None:
    """The plan of these flags, where a launch would take them."""
    try:
        plan = make_plan(changed(config, flags), cluster)
    except UserError:
        return None
    return None if idle_flags(plan.config) - idle_flags(config) else plan


_SIZES = ("sharding_strategy", "hsdp_shard_size", "tp_size", "cp_size", "pp_size", "recompute")
# what a search decides where it is not given
_DECIDED = (*_SIZES, "selective_checkpointing", "pp_schedule", "async_tp", "batch_size", "grad_accum_steps")


def _is_default(name: str, value: Any) -> bool:
    return (name, value) in (("tp_size", 1), ("cp_size", 1), ("pp_size", 1), ("sharding_strategy", "none"))


def _layouts(cluster: Cluster, given: ParallelConfig) -> Iterator[dict[str, Any]]:
    """Strategies, shard sizes and axes of the devices. tp stays within a node."""
    devices, in_node = cluster.num_devices, min(cluster.num_devices, cluster.devices_per_node, _LARGEST_TP)
    if devices == 1:
        yield {"sharding_strategy": given.sharding_strategy or "none"}
        return
    for tp in [given.tp_size] if given.tp_size > 1 else divisors(in_node, in_node):
        for cp in [given.cp_size] if given.cp_size > 1 else divisors(max(1, in_node // tp), in_node):
            for pp in [given.pp_size] if given.pp_size > 1 else (1, 2, 4, 8, _LARGEST_PP):
                if devices % (tp * cp * pp):
                    continue
                axes: dict[str, Any] = {"tp_size": tp, "cp_size": cp, "pp_size": pp}
                if tp > 1 and given.use_torch_compile is not False:
                    axes["async_tp"] = True
                if pp > 1 and given.pp_schedule == "1f1b":
                    axes["pp_schedule"] = "interleaved"
                for strategy in ("fsdp", "zero2", "zero1", "ddp") if pp == 1 else ("fsdp",):
                    yield axes | {"sharding_strategy": strategy}
                rest = devices // (tp * cp * pp)
                for shards in _shard_sizes(rest, cluster.devices_per_node // (tp * cp), given):
                    yield axes | {"sharding_strategy": "hsdp", "hsdp_shard_size": shards}


def _shard_sizes(ranks: int, in_node: int, given: ParallelConfig) -> set[int]:
    """Sizes of shard groups: within a node, and some nodes together, or the one that is given."""
    sizes = {max(1, in_node // 2), max(1, in_node), 2 * in_node, 4 * in_node, 8 * in_node}
    sizes = {given.hsdp_shard_size} if given.hsdp_shard_size else sizes
    return {size for size in sizes if 1 < size < ranks and ranks % size == 0}


def _batches(
    global_batch: int, dp_size: int, section: ParallelConfig, most_rows: int = MOST_ROWS
) -> Iterator[BatchPlan]:
    """Ways to cut the rows of a rank into micro-steps, the largest micro-steps first. A pipeline takes all
    rows at once: each micro-step fills and empties it."""
    rows_of_rank, rest = divmod(global_batch, dp_size)
    if rest:
        return
    sizes = [rows_of_rank] if section.pp_size > 1 else reversed(divisors(rows_of_rank, most_rows))
    for rows in sizes:
        yield BatchPlan(rows, rows_of_rank // rows, dp_size)


def _rows(batch: BatchPlan) -> dict[str, Any]:
    return {
        "batch_size": batch.batch_size,
        "grad_accum_steps": batch.grad_accum_steps,
        "global_batch_size": batch.global_batch_size,
    }


def _divides(config: TrainConfig, model: Any, dims: Any, batch: BatchPlan, precision: Any) -> bool:
    try:
        check_axes(Layout(config, model, dims, batch, precision, GPU))
    except UserError:
        return False
    return True
