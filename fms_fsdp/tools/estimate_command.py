"""`python -m fms_fsdp estimate`: the memory and the time that a training needs, before there is a machine.

With a device (`--device=h100_80gb`), memory, communication and time are predicted from its data
sheet. With the throughput of a device (`--tflops`, `--tokens_per_sec_per_device`), the days are a
range:

    compute = FLOPs per token x tokens / (devices x achieved FLOP/s)
    FLOPs per token: 6 N + 12 L D S, up to 4/3 of it if blocks are recomputed

The forward pass multiplies and adds each of N parameters once per token (2 N), the backward pass
twice that, and recomputation the forward pass again. Source: Narayanan et al. 2021,
https://arxiv.org/abs/2104.04473, equations 3 and 4.
"""

from __future__ import annotations

import itertools
import json
import shlex
import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from fms_fsdp.checkpoint.retention import parse_schedule
from fms_fsdp.config import ParallelConfig
from fms_fsdp.config.batch_plan import divisors
from fms_fsdp.config.flag import non_defaults, unused_flags
from fms_fsdp.config.values import counted, typed
from fms_fsdp.console import table
from fms_fsdp.errors import UserError
from fms_fsdp.models.flops import flops_per_token, num_params
from fms_fsdp.models.variants import resolve_model
from fms_fsdp.plan import candidates, complete, largest_fit, plan, resolve
from fms_fsdp.predict.devices import Device, find_device
from fms_fsdp.predict.memory import GIB, Memory, Step
from fms_fsdp.predict.speed import sent, sent_summary, step_time
from fms_fsdp.run.machine import ESTIMATE_MARGIN
from fms_fsdp.run.memory_budget import MemoryBudget
from fms_fsdp.run.startup_log import describe_axes, describe_ramp
from fms_fsdp.state import RunConfig
from fms_fsdp.tools.tool_flags import EstimateConfig

_DAY_S = 86400.0


@dataclass(frozen=True)
class Days:
    """The days of a run by cause; `computing` with recomputation, `shortest` without."""

    shortest: float
    computing: float
    saves: float
    validations: float
    restarts: float

    @property
    def total(self) -> float:
        return self.computing + self.saves + self.validations + self.restarts


def days(config: EstimateConfig, steps: int, shortest_s: float, longest_s: float) -> Days:
    """Returns the days of steps that take between these seconds in total.

    A launch that ends early loses half of the time between two saves.
    """
    section = config.checkpoint
    schedule = parse_schedule(section.checkpoint_schedule, section.checkpoint_interval)
    num_saves = schedule.count(1, steps)
    if section.save_last and not schedule.is_due(steps):
        num_saves += 1
    steps_per_save: float = section.checkpoint_interval or steps
    if section.checkpoint_schedule:
        steps_per_save = steps / max(1, num_saves)

    num_evals = 0
    if config.eval.eval_interval:
        num_evals = -(-steps // config.eval.eval_interval)  # the last step is always evaluated

    num_restarts = config.restarts_a_week * longest_s / (7 * _DAY_S)
    lost_s = config.restart_s + min(steps_per_save, steps) / 2 * longest_s / steps
    return Days(
        shortest=shortest_s / _DAY_S,
        computing=longest_s / _DAY_S,
        saves=num_saves * config.save_s / _DAY_S,
        validations=num_evals * config.eval_s / _DAY_S,
        restarts=num_restarts * lost_s / _DAY_S,
    )


def days_by_rate(config: EstimateConfig) -> Days:
    """Returns the days at a measured rate, which includes recomputation, or at achieved TFLOP/s."""
    rate = config.tokens_per_sec_per_device
    slowdown = 1.0  # a measured rate includes recomputation
    if rate is None:
        assert config.tflops is not None
        if config.parameters is not None:
            flops = 6.0 * config.parameters
        else:
            length = config.data.seq_length
            flops = flops_per_token(resolve_model(config.model, seq_length=length), length)
        rate = config.tflops * 1e12 / flops
        slowdown = 4 / 3  # recomputation of all blocks is one more forward pass
    seconds = (config.num_tokens + config.idle_tokens) / (config.num_devices * rate)
    return days(config, config.num_steps, seconds, slowdown * seconds)


@dataclass(frozen=True)
class Estimate:
    """The memory and the time that a planned run needs on a device."""

    config: EstimateConfig
    run: RunConfig
    device: Device

    @property
    def budget(self) -> MemoryBudget:
        return MemoryBudget(self.config.machine)

    @cached_property
    def step(self) -> Step:
        return self.budget.step(self.run)

    @cached_property
    def memory(self) -> Memory:
        """The memory of a rank on the device."""
        offload = self.run.config.parallel.cpu_offload
        return self.budget.need(self.run).by_device("cuda", offload=offload)["cuda"]

    @property
    def fits(self) -> bool:
        return self.memory.total <= self.device.memory_bytes

    @property
    def is_fitted(self) -> bool:
        """Whether the micro-batch is the largest that fits."""
        is_chosen = "batch_size" in self.run.chosen
        return is_chosen and self.memory.total <= (1 - ESTIMATE_MARGIN) * self.device.memory_bytes

    @cached_property
    def seconds(self) -> dict[str, float]:
        return step_time(self.step, self.device, self.config.devices_per_node)

    @property
    def tokens_per_s(self) -> float:
        """The throughput per device."""
        return self.step.tokens / sum(self.seconds.values()) / self.config.num_devices

    @property
    def mfu(self) -> float:
        flops = flops_per_token(self.run.model, self.run.seq_length)
        return self.tokens_per_s * flops / self.device.peak(self.device.half_precision)

    @cached_property
    def days(self) -> Days:
        """The days of the run; a smaller batch of a ramp has fewer gradient-accumulation steps."""
        batch = self.run.batch
        steps = self.run.num_steps
        phases = batch.phases()
        ends = [*(phase.step for phase in phases[1:]), steps]
        seconds = 0.0
        for phase, end in zip(phases, ends, strict=True):
            num_steps = min(end, steps) - phase.step
            if num_steps > 0:
                seconds += num_steps * self._step_seconds(phase.batch)
        return days(self.config, steps, seconds, seconds)

    def _step_seconds(self, global_batch_size: int) -> float:
        batch = self.run.batch
        per_rank = global_batch_size // batch.dp_size
        micro = batch.micro_batch_at(per_rank)
        step = replace(self.step, num_sequences=micro, accum=per_rank // micro)
        return sum(step_time(step, self.device, self.config.devices_per_node).values())

    @property
    def flags(self) -> str:
        """The flags that select the layout and the batch."""
        section = self.run.config.parallel
        batch = self.run.batch
        flags = {name: value for name, value in non_defaults(section).items() if name in _SEARCHED}
        flags["batch_size"] = batch.batch_size
        flags["grad_accum_steps"] = batch.grad_accum_steps
        flags["global_batch_size"] = batch.global_batch_size
        return shlex.join(f"--{name}={typed(value)}" for name, value in flags.items())


def with_batch(config: EstimateConfig) -> EstimateConfig:
    """Returns the config of a launch on the devices: with a length and a batch.

    Without flags the global batch is --batch_tokens, rounded down to a multiple of the ranks, and
    the micro-batch the largest that fits. A pipeline is filled and emptied by each micro-batch, so
    it has one.

    Raises:
        UserError: as `resolve`.
    """
    dims = resolve(config, config.machine).dims
    dp_size = dims.size("dp")
    total = global_batch(config, dp_size)
    training = replace(config.length, global_batch_size=total)
    if not training.micro_batch_size and not training.grad_accum_steps:
        if dims.pp == 1:
            training = replace(training, batch_size="auto")
        elif total % dp_size == 0:
            training = replace(training, batch_size=total // dp_size, grad_accum_steps=1)
    return replace(config, training=training)


def global_batch(config: EstimateConfig, dp_size: int) -> int:
    """Returns the sequences of a step.

    Without flags that say it, it is --batch_tokens, rounded down to a multiple of the ranks and of
    the flag that is set.
    """
    training = config.training
    if training.global_batch_size is not None:
        return training.global_batch_size
    size = training.micro_batch_size
    accum = training.grad_accum_steps
    unit = (size or 1) * (accum or 1) * dp_size
    if size and accum:
        return unit
    wanted = max(1, config.batch_tokens // config.data.seq_length)
    return max(1, wanted // unit) * unit


def estimate(config: EstimateConfig) -> Estimate:
    """Returns the estimate for the flags.

    Raises:
        UserError: a launch would be rejected, or the device does not have the precision.
    """
    device = _find_device(config)
    return Estimate(config, plan(with_batch(config), config.machine), device)


def _find_device(config: EstimateConfig) -> Device:
    """Raises UserError if the device does not have the precision."""
    device = find_device(config.device or "", config.hardware)
    precision = resolve(config, config.machine).precision
    device.peak("float8" if precision.float8 else precision.compute)
    return device


# Flags of a layout, of which a search shows the fastest estimate.
_LAYOUT = ("sharding_strategy", "hsdp_shard_size", "tp_size", "cp_size", "pp_size")
_SEARCHED = (*_LAYOUT, "pp_schedule", "async_tp", "recompute", "selective_checkpointing")


def search(config: EstimateConfig, count: int = 5) -> list[Estimate]:
    """Returns the fastest layouts that fit, one per layout; flags that are set stay.

    Raises:
        UserError: the flags are rejected with any layout.
    """
    sequences = max(1, config.batch_tokens // config.data.seq_length)
    unit = max(divisors(config.num_devices, sequences))  # the same batch for every layout
    training = replace(config.training, global_batch_size=global_batch(config, unit))
    config = replace(config, training=training)
    best = dict[tuple[object, ...], Estimate]()
    for found in _estimates_that_fit(config):
        section = found.run.config.parallel
        layout = tuple(getattr(section, name) for name in _LAYOUT)
        if layout not in best or found.tokens_per_s > best[layout].tokens_per_s:
            best[layout] = found
    if not best:
        estimate(config)  # may raise the error of every layout
    return sorted(best.values(), key=lambda each: -each.tokens_per_s)[:count]


def _estimates_that_fit(config: EstimateConfig) -> Iterator[Estimate]:
    """Yields an estimate for each layout and recomputation: of the largest micro-batch that fits."""
    device = _find_device(config)
    budget = MemoryBudget(config.machine)
    unused = {row.name for row, *_ in unused_flags(config)} | {"selective_checkpointing"}
    for layout in _layouts(config):
        tried = replace(config, parallel=layout)
        try:
            undecided = complete(with_batch(tried), config.machine)
            groups = candidates(undecided, config.machine)
        except UserError:
            continue
        for group in groups:
            section = group[0].config.parallel
            if not _is_searched(section, config.parallel):
                continue
            with_section = replace(config, parallel=section)
            if {row.name for row, *_ in unused_flags(with_section)} - unused:
                continue
            run = largest_fit(group, budget)
            if run is not None:
                yield Estimate(with_section, run, device)


def _is_searched(section: ParallelConfig, given: ParallelConfig) -> bool:
    """Returns whether a search tries this recomputation, and it keeps the flags that are set."""
    for name, value in non_defaults(given).items():
        if name in _SEARCHED and value != "auto" and getattr(section, name) != value:
            return False
    return section.selective_checkpointing in ("1", "1/2")


def _layouts(config: EstimateConfig) -> Iterator[ParallelConfig]:
    """Yields layouts that keep the flags that are set: tp and cp in a node; any recomputation."""
    given = replace(config.parallel, recompute="auto", selective_checkpointing="1")
    world = config.machine.world
    compiled = config.machine.compiles(given)
    in_node = divisors(world.local_size, 8)
    for tp, cp, pp in itertools.product(in_node, in_node, (1, 2, 4, 8, 16)):
        if tp * cp > world.local_size or world.size % (tp * cp * pp):
            continue
        axes: dict[str, Any] = {"tp_size": tp, "cp_size": cp, "pp_size": pp}
        axes["async_tp"] = tp > 1 and compiled
        if pp > 1 and given.pp_schedule == "1f1b":
            axes["pp_schedule"] = "interleaved"
        for strategy, shard_size in _shard_groups(config, tp * cp, pp):
            yield replace(given, sharding_strategy=strategy, hsdp_shard_size=shard_size, **axes)


def _shard_groups(
    config: EstimateConfig, num_inner: int, pp: int
) -> Iterator[tuple[str, int | None]]:
    """Yields strategies, with the size of a group of hsdp: one, two or four nodes.

    num_inner   ranks of tp and cp, which share a node
    """
    world = config.machine.world
    given = config.parallel
    if world.size == 1:
        yield given.sharding_strategy or "none", None
        return
    yield "fsdp", None
    if pp == 1:
        yield from (("zero2", None), ("zero1", None), ("ddp", None))
    ranks = world.size // (num_inner * pp)
    ranks_per_node = world.local_size // num_inner
    sizes = {ranks_per_node, 2 * ranks_per_node, 4 * ranks_per_node}
    if given.hsdp_shard_size:
        sizes.add(given.hsdp_shard_size)
    for size in sorted(sizes):
        if 1 < size < ranks and ranks % size == 0:
            yield "hsdp", size


def as_json(found: Estimate) -> dict[str, Any]:
    """Returns all values of an estimate; sizes in bytes, times in seconds."""
    config = found.config
    run = found.run
    batch = found.run.batch
    return {
        "flags": found.flags,
        "model": config.model.name,
        "parameters": num_params(run.model),
        "device": found.device.name,
        "num_devices": config.num_devices,
        "layout": vars(run.dims),
        "precision": vars(run.precision),
        "batch_size": batch.batch_size,
        "dp_size": batch.dp_size,
        "grad_accum_steps": batch.grad_accum_steps,
        "global_batch_size": batch.global_batch_size,
        "tokens_per_step": found.step.tokens,
        "memory": vars(found.memory),
        "needed": found.memory.total,
        "available": found.device.memory_bytes,
        "fits": found.fits,
        "sent": dict(sent(found.step)),
        "time": found.seconds,
        "step_s": sum(found.seconds.values()),
        "tokens_per_s_per_device": found.tokens_per_s,
        "mfu": found.mfu,
        "steps": run.num_steps,
        "days": vars(found.days) | {"total": found.days.total},
        "kwh": _kwh(found),
    }


def _kwh(found: Estimate) -> float:
    """Returns the energy of the devices alone."""
    return found.device.watts * found.config.num_devices * found.days.total * 24 / 1000


def describe(found: Estimate) -> Iterator[str]:
    """Yields all that is known of an estimate, as lines and tables."""
    config = found.config
    run = found.run
    memory = found.memory
    yield f"{config.model.name}: {num_params(run.model):,} parameters"
    yield (
        f"{config.num_devices:,} x {found.device.name} in nodes of "
        f"{config.machine.world.local_size}, {run.dims.strategy}: {describe_axes(run.dims)}; "
        f"{run.precision.summary}"
    )
    fitted = "; this micro-batch is the largest that fits" if found.is_fitted else ""
    yield (
        f"batch: {run.batch.factors} = {counted(run.batch.global_batch_size, 'sequence')} = "
        f"{found.step.tokens:,} tokens per step{fitted}"
    )
    if run.batch.rampup:
        yield describe_ramp(run.batch)
    rows = [(name, f"{size / GIB:.2f}") for name, size in vars(memory).items() if size]
    verdict = "fits" if found.fits else "does not fit"
    total = f"total, {verdict} in {found.device.memory_gib:g}"
    rows.append((total, f"{memory.total / GIB:.2f}"))
    yield "\n" + table(("memory per rank", "GiB"), rows) + "\n"
    communication = sent_summary(sent(found.step))
    if communication:
        yield communication + "\n"
    step_s = sum(found.seconds.values())
    parts = {**found.seconds, "total": step_s}
    times = [(name, f"{each:.3f}", f"{each / step_s:.1%}") for name, each in parts.items()]
    yield table(("time of a step", "s", "fraction"), times) + "\n"
    in_total = found.tokens_per_s * config.num_devices
    yield (
        f"{found.tokens_per_s:,.0f} tokens/s per device, {in_total:,.0f} in total, "
        f"MFU {found.mfu:.1%}"
    )
    yield _days_table(found.days) + "\n"
    yield (
        f"{run.num_steps:,} steps: {found.days.total:,.2f} days, {_kwh(found):,.0f} kWh of the "
        "devices alone"
    )


def _days_table(found: Days) -> str:
    names = ("computing", "saves", "validations", "restarts", "total")
    return table(("the run", "days"), [(name, f"{getattr(found, name):,.2f}") for name in names])


def describe_search(config: EstimateConfig, found: list[Estimate]) -> str:
    """Returns a table of the layouts, or the reason why there is none."""
    where = f"{config.model.name} on {config.num_devices:,} x {config.device}"
    if not found:
        return (
            f"{where}: no layout fits {1 - ESTIMATE_MARGIN:.0%} of the memory; try "
            f"--num_devices={2 * config.num_devices}"
        )
    head = ("GiB per rank", "tokens/s per device", "MFU", "days", "flags")
    rows = [
        (
            f"{each.memory.total / GIB:.1f}",
            f"{each.tokens_per_s:,.0f}",
            f"{each.mfu:.1%}",
            f"{each.days.total:,.2f}",
            each.flags,
        )
        for each in found
    ]
    sequences = found[0].run.batch.global_batch_size
    first = f"{where}, {sequences:,} sequences per step: the fastest layouts"
    return f"{first}\n{table(head, rows, text_columns=(4,))}"


def main(config: EstimateConfig) -> None:
    """Runs the command `estimate`.

    Raises:
        UserError: the flags contradict one another.
    """
    if config.device is not None and config.parallel.cpu_offload:
        print(
            "note: the time with --cpu_offload is too short: it includes neither the copies to and "
            "from host memory nor the optimizer on the CPU",
            file=sys.stderr,
        )
    if config.device is None:
        print("\n".join(_describe_rate(config)))
    elif config.search:
        layouts = search(config)
        if config.json:
            print(json.dumps([as_json(each) for each in layouts]))
        else:
            print(describe_search(config, layouts))
    else:
        found = estimate(config)
        if config.json:
            print(json.dumps(as_json(found)))
        else:
            print("\n".join(describe(found)))


def _describe_rate(config: EstimateConfig) -> Iterator[str]:
    """Yields the range of days at the rate of a device."""
    found = days_by_rate(config)
    count = config.parameters
    if count is not None:
        model = f"{count:,} parameters"
    else:
        shape = resolve_model(config.model, seq_length=config.data.seq_length)
        model = f"{config.model.name} ({num_params(shape):,} parameters)"
    rate = f"{config.tflops:g} TFLOP/s"
    if config.tokens_per_sec_per_device:
        rate = f"{config.tokens_per_sec_per_device:,g} tokens/s"
    work = f"{config.num_tokens:,} tokens, {config.num_devices} devices at {rate} each"
    yield f"{model}, {work}: {config.num_steps:,} steps"
    if count is None:
        yield from _describe_rank(config)
    if config.training.rampup_batch_size:
        yield describe_ramp(config.batches)
    yield _days_table(found)
    yield (
        f"between {found.shortest:.2f} days, if nothing is recomputed or stops the run, and "
        f"{found.total:.2f} days"
    )


def _describe_rank(config: EstimateConfig) -> Iterator[str]:
    """Yields the memory of a rank, and what it sends, without gradient accumulation by default."""
    training = config.training
    if training.batch_size is None and training.grad_accum_steps is None:
        training = replace(training, grad_accum_steps=1)
    config = with_batch(replace(config, training=replace(training, rampup_batch_size=())))
    budget = MemoryBudget(config.machine)
    run = plan(config, config.machine)
    parts = budget.need(run).by_device(run.device_type, offload=run.config.parallel.cpu_offload)
    yield f"memory estimate: {parts[run.device_type].summary()}"
    communication = sent_summary(sent(budget.step(run)))
    if communication:
        yield communication
