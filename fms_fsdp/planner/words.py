"""What `estimate` says of plans: lines and tables for people, and the same figures for programs."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from fms_fsdp.config.axes import AXES
from fms_fsdp.config.ramp import BatchIntervals
from fms_fsdp.config.values import plain
from fms_fsdp.models.flops import num_params
from fms_fsdp.planner.days import WholeRun
from fms_fsdp.planner.plan import Plan, limit, memory_parts, remedies
from fms_fsdp.predict.speed import Message
from fms_fsdp.spec.words import describe_axes, describe_ramp

GIB = 2**30


@dataclass(frozen=True)
class Predicted:
    """A plan with the run that it makes. `label`: what it is called beside others; `flags`: that make it, of
    a search; `is_fitted`: its micro-steps are the largest that fit."""

    label: str
    plan: Plan
    run: WholeRun
    flags: str = ""
    is_fitted: bool = False


@dataclass(frozen=True)
class Figures:
    """A table: its head, and rows of text."""

    head: tuple[str, ...]
    rows: Sequence[Sequence[str]]
    text_columns: tuple[int, ...] = (0,)


def describe_plan(row: Predicted) -> Iterator[str | Figures]:
    """All that is known of one plan."""
    plan, cluster, batch = row.plan, row.plan.cluster, row.plan.batch
    nodes = -(-cluster.num_devices // cluster.devices_per_node)
    where = f"{nodes} nodes of {cluster.devices_per_node}" if nodes > 1 else "one node"
    yield f"{plan.config.model.name}: {num_params(plan.work.model):,} parameters"
    yield f"{cluster.num_devices:,} x {cluster.hardware.name} in {where}, {plan.dims.strategy}: " + (
        f"{describe_axes(plan.dims)}; {plan.work.precision.in_words}"
    )
    fitted = f"; {batch.batch_size} rows are the most that fit" if row.is_fitted else ""
    yield (
        f"batch: {_batch(plan)} micro-steps = {batch.global_batch_size:,} rows = {plan.tokens_per_step:,} "
        f"tokens a step{fitted}"
    )
    if batch.rampup:
        yield describe_ramp(BatchIntervals(batch.ramp))
    yield from ("", _memory(plan), "", *_messages(plan), _time(plan), "")
    a_device = plan.tokens_per_s
    in_all = a_device * cluster.num_devices
    yield f"{a_device:,.0f} tokens/s a device, {in_all:,.0f} in all, MFU {plan.mfu:.1%}"
    yield f"limit: {limit(plan)}"
    yield from _advice(plan)
    yield ""
    yield _days(row)
    yield _in_short(row)


def _batch(plan: Plan) -> str:
    batch = plan.batch
    return f"{batch.batch_size} rows x {batch.dp_size} ranks x {batch.grad_accum_steps}"


def _memory(plan: Plan) -> Figures:
    rows = [(name, f"{size / GIB:.2f}") for name, size in memory_parts(plan).items() if size]
    return Figures(("memory of a rank", "GiB"), [*rows, (f"in all, {_verdict(plan)}", _gib(plan))])


def _gib(plan: Plan) -> str:
    return f"{plan.needed / GIB:.2f}"


def _verdict(plan: Plan) -> str:
    return f"{'fits' if plan.fits else 'does not fit'} in {plan.available / GIB:.1f}"


def _messages(plan: Plan) -> list[str | Figures]:
    if not plan.sent:
        return []
    rows = [(axis, plain(m.num_bytes / GIB), _link(m), f"{m.seconds:.3f}") for axis, m in plan.sent.items()]
    return [Figures(("messages of a step", "GiB", "link", "s"), rows, text_columns=(0, 2)), ""]


def _link(message: Message) -> str:
    return "between nodes" if message.leaves_node else "in the node"


def _time(plan: Plan) -> Figures:
    total = plan.time.total
    parts = [(name, seconds) for name, seconds in plan.time.parts.items() if seconds > 0]
    rows = [
        (name, f"{seconds:.3f}", f"{seconds / total:.1%}") for name, seconds in [*parts, ("in all", total)]
    ]
    return Figures(("time of a step", "s", "share"), rows)


def _advice(plan: Plan) -> Iterator[str]:
    """A line for each change that helps."""
    what = "faster" if plan.fits else "fits"
    found = remedies(plan)
    for remedy in found:
        yield f"{what} with {remedy.flags}: {remedy.gain:+.1%} tokens/s"
    if not found and not plan.fits:
        yield "no single change makes it fit; --search=True looks for several"


def _days(row: Predicted) -> Figures:
    days = row.run.days
    parts = {
        "computing": days.plain_days,
        "saves": days.save_days,
        "validations": days.eval_days,
        "restarts": days.restart_days,
        "in all": days.worst_days,
    }
    return Figures(("the run", "days"), [(name, f"{value:,.2f}") for name, value in parts.items()])


def _in_short(row: Predicted) -> str:
    run = row.run
    work = f"{run.steps:,} steps, {run.tokens:,} tokens"
    return f"{work}: {run.days.worst_days:,.2f} days, {run.kwh:,.0f} kWh of the devices alone"


def compare(rows: Sequence[Predicted], first: str) -> Figures:
    """Several plans, a line each; `first`: what their labels are."""
    head = (first, "layout", "rows x ranks x micro-steps", "GiB a rank", "", "tokens/s a device")
    lines = []
    for row in rows:
        plan, batch = row.plan, row.plan.batch
        cut = f"{batch.batch_size} x {batch.dp_size} x {batch.grad_accum_steps}"
        held = _gib(plan), "fits" if plan.fits else "does not fit"
        speed = f"{plan.tokens_per_s:,.0f}", f"{plan.mfu:.1%}"
        days = f"{row.run.days.worst_days:,.2f}", f"{row.run.kwh:,.0f}"
        lines.append((row.label, _layout(plan), cut, *held, *speed, *days))
    return Figures((*head, "MFU", "days", "kWh"), lines, text_columns=(1, 4))


def _layout(plan: Plan) -> str:
    """The strategy and the axes of several ranks."""
    sizes = [f"{axis} {plan.dims.size(axis)}" for axis in AXES if plan.dims.size(axis) > 1]
    return f"{plan.dims.strategy}: {', '.join(sizes)}" if sizes else plan.dims.strategy


def as_json(row: Predicted) -> dict[str, Any]:
    """Every figure of a plan; sizes in bytes, times in seconds."""
    plan, run = row.plan, row.run
    cluster, batch, precision = plan.cluster, plan.batch, plan.work.precision
    days = run.days
    return {
        "flags": row.flags,
        "model": plan.config.model.name,
        "parameters": num_params(plan.work.model),
        "device": cluster.hardware.name,
        "num_devices": cluster.num_devices,
        "devices_per_node": cluster.devices_per_node,
        "strategy": plan.dims.strategy,
        "axes": {axis: plan.dims.size(axis) for axis in AXES},
        "precision": vars(precision),
        "batch_size": batch.batch_size,
        "dp_size": batch.dp_size,
        "grad_accum_steps": batch.grad_accum_steps,
        "global_batch_size": batch.global_batch_size,
        "tokens_per_step": plan.tokens_per_step,
        "memory": memory_parts(plan),
        "needed": plan.needed,
        "available": plan.available,
        "fits": plan.fits,
        "sent": {axis: vars(message) for axis, message in plan.sent.items()},
        "time": plan.time.parts,
        "step_s": plan.time.total,
        "tokens_per_s_per_device": plan.tokens_per_s,
        "tokens_per_s": plan.tokens_per_s * cluster.num_devices,
        "mfu": plan.mfu,
        "limit": limit(plan),
        "remedies": [vars(remedy) for remedy in remedies(plan)],
        "steps": run.steps,
        "tokens": run.tokens,
        "days": vars(days) | {"worst_days": days.worst_days},
        "kwh": run.kwh,
    }
