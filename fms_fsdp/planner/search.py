"""The fastest layouts that fit: strategies, shard sizes, recomputation, rows, and the sizes of tp, cp and pp.

Every layout is judged by the memory and the time of plan.py; those that come out are checked as a launch is.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from fms_fsdp.config import BatchPlan, ParallelConfig, TrainConfig
from fms_fsdp.config.batch import divisors
from fms_fsdp.errors import UserError
from fms_fsdp.mesh import resolve_dims
from fms_fsdp.models.variants import resolve_model
from fms_fsdp.optim.optimizers import state_bytes
from fms_fsdp.parallel.rules import Layout, check_axes
from fms_fsdp.planner.plan import GPU, Cluster, Plan, changed, make_plan, plan_of, resolved_precision, written

MARGIN = 0.95  # of a device's memory may be planned: the prediction errs, and fragments grow with time
_RECOMPUTE: tuple[dict[str, Any], ...] = (
    {"recompute": "none"},
    {"recompute": "cheap"},
    {"recompute": "ops"},
    {"recompute": "blocks", "selective_checkpointing": "1/2"},
    {"recompute": "blocks"},
)
_LARGEST_TP, _LARGEST_PP = 8, 16
_MOST_SIZES = 4  # numbers of rows that are tried with one layout, from the largest that fits on


@dataclass(frozen=True)
class Found:
    """A layout that fits, and the flags that make it."""

    plan: Plan
    flags: str


def search(config: TrainConfig, cluster: Cluster, global_batch: int, count: int = 5) -> list[Found]:
    """The fastest `count` layouts of so many rows a step; what the flags of `config` say beside the layout
    stays.

    Raises:
        UserError: the model, the precision or another flag would be refused whatever the layout is.
    """
    candidates = []
    model = resolve_model(config.model, seq_length=config.data.seq_length)
    precision = resolved_precision(config)
    optimizer_bytes = state_bytes(config.optim, model, precision)
    cluster.hardware.peak("float8" if precision.float8 else precision.compute)
    for layout in _layouts(cluster):
        section = replace(config.parallel, **layout, use_torch_compile=True)
        try:
            dims = resolve_dims(section, config.model.name, cluster.world)
        except UserError:
            continue
        if global_batch % dims.size("dp"):
            continue
        for recompute in _RECOMPUTE:
            kind = replace(section, **recompute, fsdp_activation_checkpointing=None)
            tried = replace(config, parallel=kind)
            fitting = 0
            for batch in _batches(global_batch // dims.size("dp"), dims.size("dp"), kind):
                if dims.divides_model and not _divides(tried, model, dims, batch, precision):
                    continue
                plan = plan_of(tried, cluster, model, dims, batch, precision, optimizer_bytes)
                if plan.needed <= MARGIN * plan.available:
                    candidates.append((plan.tokens_per_s, layout | recompute | _rows(batch)))
                    fitting += 1
                    if fitting == _MOST_SIZES:
                        break
    candidates.sort(key=lambda each: -each[0])
    return list(_checked(config, cluster, candidates, count))


def _checked(
    config: TrainConfig, cluster: Cluster, candidates: list[tuple[float, dict[str, Any]]], count: int
) -> Iterator[Found]:
    """The first of the candidates that a launch would accept, each with another layout."""
    seen = set[str]()
    for _, flags in candidates:
        layout = written({name: value for name, value in flags.items() if name in _SIZES})
        if layout in seen:
            continue
        try:
            plan = make_plan(changed(config, flags), cluster)
        except UserError:
            continue
        seen.add(layout)
        shown = {name: value for name, value in flags.items() if not _is_default(name, value)}
        yield Found(plan, written(shown))
        if len(seen) == count:
            return


_SIZES = ("sharding_strategy", "hsdp_shard_size", "tp_size", "cp_size", "pp_size", "recompute")


def _is_default(name: str, value: Any) -> bool:
    return value is None or name in ("tp_size", "cp_size", "pp_size") and value == 1


def _layouts(cluster: Cluster) -> Iterator[dict[str, Any]]:
    """Strategies, shard sizes and axes of the devices. tp stays within a node."""
    devices = cluster.num_devices
    if devices == 1:
        yield {"sharding_strategy": "none"}
        return
    in_node = min(devices, cluster.devices_per_node, _LARGEST_TP)
    for tp in divisors(in_node, in_node):
        for cp in divisors(in_node // tp, in_node):
            for pp in (1, 2, 4, 8, _LARGEST_PP):
                if devices % (tp * cp * pp):
                    continue
                axes: dict[str, Any] = {"tp_size": tp, "cp_size": cp, "pp_size": pp}
                axes |= {"async_tp": True} if tp > 1 else {}
                axes |= {"pp_schedule": "interleaved"} if pp > 1 else {}
                for strategy in ("fsdp", "zero2", "zero1", "ddp") if pp == 1 else ("fsdp",):
                    yield axes | {"sharding_strategy": strategy}
                rest = devices // (tp * cp * pp)
                for shards in _shard_sizes(rest, cluster.devices_per_node // (tp * cp)):
                    yield axes | {"sharding_strategy": "hsdp", "hsdp_shard_size": shards}


def _shard_sizes(ranks: int, in_node: int) -> set[int]:
    """Sizes of shard groups: within a node, and some nodes together."""
    sizes = {max(1, in_node // 2), max(1, in_node), 2 * in_node, 4 * in_node, 8 * in_node}
    return {size for size in sizes if 1 < size < ranks and ranks % size == 0}


def _batches(rows_of_rank: int, dp_size: int, section: ParallelConfig) -> Iterator[BatchPlan]:
    """Ways to cut the rows of a rank into micro-steps, the largest micro-steps first. A pipeline takes all
    rows at once: each micro-step fills and empties it."""
    for rows in reversed(divisors(rows_of_rank, 4096)):
        if section.pp_size > 1 and rows != rows_of_rank:
            return
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
