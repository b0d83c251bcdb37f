"""`python -m fms_fsdp estimate`: the memory and the time that a training needs, before there is a machine.

With a device (`--device=h100_80gb`), memory, communication and time are predicted from its data sheet.
With the throughput of a device (`--tflops`, `--tokens_per_sec_per_device`), the days are a range:

    compute = FLOPs per token x tokens / (devices x achieved FLOP/s)
    FLOPs per token: 6 N + 12 L D S, up to 4/3 of it if blocks are recomputed

The forward pass multiplies and adds each of N parameters once per token (2 N), the backward pass twice
that, and recomputation the forward pass again. Source: Narayanan et al. 2021,
https://arxiv.org/abs/2104.04473, equations 3 and 4.
"""

from __future__ import annotations

import itertools
import json
import shlex
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cache, cached_property
from itertools import pairwise
from typing import Any

import torch

from fms_fsdp.checkpoint.retention import parse_schedule
from fms_fsdp.config import (
    CheckpointConfig,
    DataConfig,
    EvalConfig,
    LogConfig,
    ModelConfig,
    OptimConfig,
    ParallelConfig,
    PrecisionConfig,
    ProfilerConfig,
    TrainConfig,
    TrainingConfig,
    flag,
)
from fms_fsdp.config.batch import BatchPlan, check_ramp, divisors, last_step, plan_batch
from fms_fsdp.config.flag import non_defaults, unused_flags
from fms_fsdp.config.precision import Precision
from fms_fsdp.config.values import counted, typed
from fms_fsdp.distributed.axes import ParallelDims
from fms_fsdp.distributed.mesh import plan_dims
from fms_fsdp.distributed.runtime import World
from fms_fsdp.errors import UserError
from fms_fsdp.models.config import TransformerConfig
from fms_fsdp.models.flops import flops_per_token, num_params
from fms_fsdp.models.variants import resolve_model
from fms_fsdp.parallel.layout import check_layout
from fms_fsdp.predict.devices import Device, find_device
from fms_fsdp.predict.memory import (
    GIB,
    Memory,
    Step,
    estimate_memory,
    first_fit,
    kinds,
    optimizer_bytes,
)
from fms_fsdp.predict.meter import Shape
from fms_fsdp.predict.speed import sent, sent_summary, step_time
from fms_fsdp.run.checks import check_device
from fms_fsdp.run.startup_log import describe_axes, describe_ramp
from fms_fsdp.tools.table import table

GPU = torch.device("cuda", 0)
MARGIN = 0.95  # of a device's memory: the prediction has errors, and fragments grow with time
_USUAL_TOKENS = 10**12  # of a run without a length
_MOST_ROWS = 4096  # sequences of a micro-batch
_DAY_S = 86400.0


@dataclass(frozen=True)
class PlannedEvaluations(EvalConfig):
    """The validations of a planned run, which has some, unlike a training by default."""

    eval_interval: int = flag(1000, "steps between validations; 0 is off", min=0)


@dataclass(frozen=True)
class EstimateConfig:
    """The model to train, the devices, and the interruptions of the run.

    A device or one of two rates must be set, unless only the schedule is drawn. All flags of a
    training are flags too.
    """

    parameters: int | None = flag(
        None, "number of parameters instead of a variant; without attention", min=1
    )
    num_devices: int = flag(8, "number of devices", min=1, max=2**20)
    devices_per_node: int = flag(8, "number of devices of a node", min=1, max=2**20)
    tflops: float | None = flag(
        None, "achieved TFLOP/s of a device, recomputation included", min=1e-9
    )
    device: str | None = flag(None, "device of predict/devices.toml, whose speed is predicted")
    hardware: str = flag(
        "",
        "FILE.toml with devices of your own, such as fms_fsdp/predict/devices.toml",
        form="path",
        needs="device",
    )
    tokens_per_sec_per_device: float | None = flag(None, "measured tokens/s of a device", min=1e-9)
    batch_tokens: int = flag(4_194_304, "tokens of a step, unless flags set its batch", min=1)
    save_s: float = flag(10.0, "seconds that the loop waits in a save", min=0)
    eval_s: float = flag(60.0, "seconds of a validation", min=0)
    restarts_a_week: float = flag(
        2.0, "launches that end early per week; each loses half a save interval", min=0
    )
    restart_s: float = flag(600.0, "seconds from the end of a launch to the next step", min=0)
    search: bool = flag(
        False, "find the fastest layouts that fit; layout flags that are set stay", needs="device"
    )
    json: bool = flag(False, "print the prediction as JSON, a search as a list", needs="device")
    model: ModelConfig = ModelConfig()
    data: DataConfig = DataConfig()
    parallel: ParallelConfig = ParallelConfig()
    precision: PrecisionConfig = PrecisionConfig()
    optim: OptimConfig = OptimConfig()
    training: TrainingConfig = TrainingConfig()
    eval: PlannedEvaluations = PlannedEvaluations()
    checkpoint: CheckpointConfig = CheckpointConfig()
    log: LogConfig = LogConfig()
    profiler: ProfilerConfig = ProfilerConfig()

    def __post_init__(self) -> None:
        rates = ("tflops", "tokens_per_sec_per_device", "device")
        given = [f"--{name}" for name in rates if getattr(self, name) is not None]
        if len(given) > 1:
            raise UserError(f"{' and '.join(given)} cannot be used together; remove {given[0]}")
        if not given:
            raise UserError(
                "estimate requires a device or its rate; set --device, e.g. h100_80gb, --tflops or "
                "--tokens_per_sec_per_device"
            )
        if self.training.epochs() is not None:
            raise UserError(
                f"--num_epochs={typed(self.training.num_epochs)} requires data; set --num_tokens"
            )
        if self.device is None and "auto" in (self.parallel.recompute, self.training.batch_size):
            raise UserError(
                "auto requires the memory of a device; set --device, or --recompute and --batch_size"
            )
        if self.device is not None and self.parameters is not None:
            raise UserError("--parameters is not supported with --device; set --model_variant")
        assert self.as_training  # its contradictions
        if self.device is None and self.training.rampup_batch_size:
            check_ramp(self.batches)

    @cached_property
    def as_training(self) -> TrainConfig:
        """The flags of a training, with a length.

        Raises:
            UserError: they contradict one another.
        """
        training = self.training
        if training.batch_size == "auto":  # as without the flag: the largest that fits
            training = replace(training, batch_size=None)
        if (
            training.num_steps is None
            and training.num_samples is None
            and training.num_tokens is None
        ):
            training = replace(training, num_tokens=_USUAL_TOKENS)
        parts = self.model, self.data, self.parallel, self.precision, self.optim, training
        return TrainConfig(*parts, self.eval, self.checkpoint, self.log, self.profiler)

    @cached_property
    def resolved_model(self) -> TransformerConfig:
        return resolve_model(self.model, seq_length=self.data.seq_length)

    @cached_property
    def resolved_precision(self) -> Precision:
        """The precision of the flags; bf16 without one."""
        return self.precision.resolve(self.precision.named or "bf16")

    @cached_property
    def world(self) -> World:
        """The devices in nodes.

        Raises:
            UserError: the last node would not be full.
        """
        number, node = self.num_devices, min(self.num_devices, self.devices_per_node)
        if rest := number % node:
            raise UserError(
                f"--num_devices={number} must be divisible by --devices_per_node={node}; "
                f"use {number - rest} or {number - rest + node}"
            )
        return World(0, 0, number, node)

    def dims(self, section: ParallelConfig) -> ParallelDims:
        return plan_dims(section, self.model.name, self.world)

    @property
    def row_tokens(self) -> int:
        """The unit of a batch: sequences with a ramp, otherwise tokens."""
        return self.data.seq_length if self.training.rampup_batch_size else 1

    @cached_property
    def batches(self) -> BatchPlan:
        """The batch of each step, as if on one rank."""
        training = self.as_training.training
        rows = training.global_batch_size
        if rows is None and training.batch_size and training.grad_accum_steps:
            ranks = self.dims(self.parallel).size("dp")
            rows = int(training.batch_size) * training.grad_accum_steps * ranks
        tokens = self.batch_tokens if rows is None else rows * self.data.seq_length
        return BatchPlan(tokens // self.row_tokens, 1, 1, self.training.rampup, True)

    @property
    def num_tokens(self) -> int:
        """The tokens of the run."""
        length = self.as_training.training
        if length.num_steps is not None:
            return self.row_tokens * self.batches.samples_in(length.num_steps)
        return length.num_tokens or (length.num_samples or 0) * self.data.seq_length

    @property
    def num_steps(self) -> int:
        given = self.training.num_steps
        return given or self.batches.steps_for(-(-self.num_tokens // self.row_tokens))

    @property
    def idle_tokens(self) -> int:
        """The tokens that devices without a sequence could compute in the small batches of a ramp."""
        last, idle = self.num_steps, 0
        for phase, following in pairwise(self.batches.phases()):
            steps = min(following.step, last) - min(phase.step, last)
            idle += steps * max(0, self.num_devices - phase.batch)
        return self.row_tokens * idle


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
    """Returns the days of steps that take between these seconds in total. A launch that ends early
    loses half of the time between two saves."""
    section, every = config.checkpoint, config.eval.eval_interval
    saves = parse_schedule(section.checkpoint_schedule, section.checkpoint_interval).count(1, steps)
    between: float = section.checkpoint_interval or steps
    if section.checkpoint_schedule:
        between = steps / max(1, saves)
    lost_s = config.restart_s + min(between, steps) / 2 * longest_s / steps
    return Days(
        shortest_s / _DAY_S,
        longest_s / _DAY_S,
        saves * config.save_s / _DAY_S,
        (steps // every if every else 0) * config.eval_s / _DAY_S,
        config.restarts_a_week * longest_s / (7 * _DAY_S) * lost_s / _DAY_S,
    )


def days_by_rate(config: EstimateConfig) -> Days:
    """Returns the days at a measured rate, which includes recomputation, or at achieved TFLOP/s."""
    rate, most = config.tokens_per_sec_per_device, 1.0
    if rate is None:
        assert config.tflops is not None
        length, count = config.data.seq_length, config.parameters
        flops = 6 * count if count else flops_per_token(config.resolved_model, length)
        rate, most = config.tflops * 1e12 / flops, 4 / 3
    seconds = (config.num_tokens + config.idle_tokens) / (config.num_devices * rate)
    return days(config, config.num_steps, seconds, most * seconds)


@dataclass(frozen=True)
class Plan:
    """A layout with its batch, and the memory and time it needs. `is_fitted`: the micro-batch is the
    largest that fits."""

    config: EstimateConfig
    section: ParallelConfig
    batch: BatchPlan
    step: Step
    device: Device
    memory: Memory
    is_fitted: bool = False

    @property
    def fits(self) -> bool:
        return self.memory.total <= self.device.memory_bytes

    @cached_property
    def seconds(self) -> dict[str, float]:
        return step_time(self.step, self.device, self.config.devices_per_node)

    @property
    def tokens_per_s(self) -> float:
        """The throughput per device."""
        return self.step.tokens / sum(self.seconds.values()) / self.config.num_devices

    @property
    def mfu(self) -> float:
        flops = flops_per_token(self.config.resolved_model, self.config.data.seq_length)
        return self.tokens_per_s * flops / self.device.peak("bf16")

    @property
    def num_steps(self) -> int:
        return last_step(self.config.as_training.training, self.batch, self.config.data.seq_length)

    @cached_property
    def days(self) -> Days:
        """Returns the days of the run; a smaller batch of a ramp has fewer accumulation steps."""

        @cache
        def seconds_of(rows: int) -> float:
            micro = self.batch.micro_batch_at(rows // self.batch.dp_size)
            step = replace(self.step, rows=micro, accum=rows // self.batch.dp_size // micro)
            return sum(step_time(step, self.device, self.config.devices_per_node).values())

        steps, phases = self.num_steps, self.batch.phases()
        ends = [*(phase.step for phase in phases[1:]), steps]
        seconds = sum(
            max(0, min(end, steps) - phase.step) * seconds_of(phase.batch)
            for phase, end in zip(phases, ends, strict=True)
        )
        return days(self.config, steps, seconds, seconds)

    @property
    def flags(self) -> str:
        """The flags that select the layout and the batch."""
        section, batch = self.section, self.batch
        found = {name: value for name, value in non_defaults(section).items() if name in _SEARCHED}
        found |= {
            "batch_size": batch.batch_size,
            "grad_accum_steps": batch.grad_accum_steps,
            "global_batch_size": batch.global_batch_size,
        }
        return shlex.join(f"--{name}={typed(value)}" for name, value in found.items())


def step_of(config: EstimateConfig, section: ParallelConfig, batch: BatchPlan) -> Step:
    """Returns the step of a layout; blocks are compiled unless a flag says otherwise."""
    compiled = section.use_torch_compile is not False
    model, precision, length = (
        config.resolved_model,
        config.resolved_precision,
        config.data.seq_length,
    )
    shape = Shape(model, section, precision, config.dims(section), length, compiled)
    return Step(shape, batch.batch_size, batch.grad_accum_steps)


def with_global_batch(config: EstimateConfig, dp_size: int) -> TrainingConfig:
    """Returns the training section with a global batch: of its flags, otherwise --batch_tokens rounded
    down to a multiple of the ranks and of the flag that is set."""
    training = config.as_training.training
    rows, accum = int(training.batch_size or 0), training.grad_accum_steps
    if training.global_batch_size is not None:
        return training
    unit = (rows or 1) * (accum or 1) * dp_size
    most = max(1, config.batch_tokens // config.data.seq_length)
    return replace(
        training, global_batch_size=unit if rows and accum else max(1, most // unit) * unit
    )


def make_plan(config: EstimateConfig, section: ParallelConfig, training: TrainingConfig) -> Plan:
    """Returns the plan of this layout and batch.

    Raises:
        UserError: a launch would be rejected for its flags, its axes or its batch.
    """
    assert config.device is not None
    section = replace(section, use_torch_compile=section.use_torch_compile is not False)
    device, dims = find_device(config.device, config.hardware), config.dims(section)
    model, precision = config.resolved_model, config.resolved_precision
    device.peak("float8" if precision.float8 else precision.compute)
    cfg = replace(config.as_training, parallel=section, training=training)
    check_device(cfg, GPU, dims)
    batch = plan_batch(training, dims.size("dp"))
    if dims.divides_model:
        check_layout(cfg, model, dims, batch, GPU)
    step = step_of(config, section, batch)
    size = optimizer_bytes(config.optim, model, precision)
    memory = estimate_memory(step, size).by_device("cuda", offload=section.cpu_offload)["cuda"]
    return Plan(config, section, batch, step, device, memory)


def choose_rows(config: EstimateConfig, section: ParallelConfig) -> Plan:
    """Returns the plan with the batch of the flags, else with the largest micro-batch that fits.

    Raises:
        UserError: no batch is possible.
    """
    dims = config.dims(section)
    training = with_global_batch(config, dims.size("dp"))
    per_rank, rest = divmod(training.global_batch_size or 0, dims.size("dp"))
    if rest or training.batch_size or training.grad_accum_steps or dims.pp > 1:
        if not rest and dims.pp > 1 and not (training.batch_size or training.grad_accum_steps):
            # Each micro-step fills and empties the pipeline, so there is one.
            training = replace(training, batch_size=per_rank, grad_accum_steps=1)
        return make_plan(config, section, training)
    error, plan = UserError(""), None
    for rows in reversed(divisors(per_rank, _MOST_ROWS)):
        own = replace(training, batch_size=rows, grad_accum_steps=per_rank // rows)
        try:
            plan = make_plan(config, section, own)
        except UserError as found:
            error = found
            continue
        if plan.memory.total <= MARGIN * plan.device.memory_bytes:
            return replace(plan, is_fitted=True)
    if plan is None:
        raise error
    return plan


def choose_plan(config: EstimateConfig) -> Plan:
    """Returns the plan of the flags; with --recompute=auto the first that fits, else the last.

    Raises:
        UserError: as `make_plan`.
    """
    section = config.parallel
    if section.recompute != "auto":
        return choose_rows(config, section)
    compiled = section.use_torch_compile is not False
    plans = (choose_rows(config, each) for each in kinds(section, compiled=compiled))
    return first_fit(plans, lambda plan: plan.fits)


_SEARCHED = (
    *("sharding_strategy", "hsdp_shard_size", "tp_size", "cp_size", "pp_size", "pp_schedule"),
    *("async_tp", "recompute", "selective_checkpointing"),
)


def search(config: EstimateConfig, count: int = 5) -> list[Plan]:
    """Returns the fastest layouts that fit, one per layout; flags that are set stay.

    Raises:
        UserError: the flags are rejected with any layout.
    """
    device = find_device(config.device or "", config.hardware)
    precision = config.resolved_precision
    device.peak("float8" if precision.float8 else precision.compute)
    unit = max(divisors(config.num_devices, max(1, config.batch_tokens // config.data.seq_length)))
    wanted = with_global_batch(config, unit)
    config = replace(
        config, training=replace(config.training, global_batch_size=wanted.global_batch_size)
    )
    unused = {row.name for row, _ in unused_flags(config.as_training)}
    best = dict[tuple[object, ...], Plan]()
    for section in _layouts(config):
        try:
            plan = choose_rows(config, section)
        except UserError:
            continue
        cfg = replace(config.as_training, parallel=plan.section)
        if plan.memory.total > MARGIN * device.memory_bytes:
            continue
        if {row.name for row, _ in unused_flags(cfg)} - unused - {"selective_checkpointing"}:
            continue
        key = tuple(getattr(plan.section, name) for name in _SEARCHED[:5])
        if key not in best or plan.tokens_per_s > best[key].tokens_per_s:
            best[key] = plan
    if not best:
        choose_plan(config)  # may raise the error of every layout
    return sorted(best.values(), key=lambda plan: -plan.tokens_per_s)[:count]


def _layouts(config: EstimateConfig) -> Iterator[ParallelConfig]:
    """Yields layouts that keep the flags that are set: tp and cp in a node, shard groups of one, two
    or four nodes, and every recomputation."""
    given, world = config.parallel, config.world
    set_flags = {
        name: value
        for name, value in non_defaults(given).items()
        if name in _SEARCHED and value != "auto"
    }
    compiled = given.use_torch_compile is not False
    recomputing = [
        {"recompute": each.recompute, "selective_checkpointing": each.selective_checkpointing}
        for each in kinds(ParallelConfig(), compiled=compiled)
        if each.selective_checkpointing in ("1", "1/2")
    ]
    in_node = divisors(world.local_size, 8)
    for tp, cp, pp in itertools.product(in_node, in_node, (1, 2, 4, 8, 16)):
        ranks, rest = divmod(world.size, tp * cp * pp)
        if rest or tp * cp > world.local_size:
            continue
        axes: dict[str, Any] = {"tp_size": tp, "cp_size": cp, "pp_size": pp}
        axes["async_tp"] = tp > 1 and compiled
        axes["pp_schedule"] = (
            "interleaved" if pp > 1 and given.pp_schedule == "1f1b" else given.pp_schedule
        )
        groups: list[dict[str, Any]] = [{"sharding_strategy": "fsdp", "hsdp_shard_size": None}]
        if pp == 1:
            groups += [
                groups[0] | {"sharding_strategy": each} for each in ("zero2", "zero1", "ddp")
            ]
        node = world.local_size // (tp * cp)
        sizes = {given.hsdp_shard_size or 0, *(node * number for number in (1, 2, 4))}
        groups += [
            {"sharding_strategy": "hsdp", "hsdp_shard_size": size}
            for size in sorted(sizes)
            if 1 < size < ranks and ranks % size == 0
        ]
        if world.size == 1:
            groups = [
                {"sharding_strategy": given.sharding_strategy or "none", "hsdp_shard_size": None}
            ]
        for group, recompute in itertools.product(groups, recomputing):
            tried = axes | group | recompute
            if all(tried[name] == value for name, value in set_flags.items()):
                yield replace(given, **tried)


def as_json(plan: Plan) -> dict[str, Any]:
    """Returns all values of a plan; sizes in bytes, times in seconds."""
    config, batch, shape = plan.config, plan.batch, plan.step.shape
    return {
        "flags": plan.flags,
        "model": config.model.name,
        "parameters": num_params(shape.config),
        "device": plan.device.name,
        "num_devices": config.num_devices,
        "layout": vars(shape.dims),
        "precision": vars(shape.precision),
        "batch_size": batch.batch_size,
        "dp_size": batch.dp_size,
        "grad_accum_steps": batch.grad_accum_steps,
        "global_batch_size": batch.global_batch_size,
        "tokens_per_step": plan.step.tokens,
        "memory": vars(plan.memory),
        "needed": plan.memory.total,
        "available": plan.device.memory_bytes,
        "fits": plan.fits,
        "sent": dict(sent(plan.step)),
        "time": plan.seconds,
        "step_s": sum(plan.seconds.values()),
        "tokens_per_s_per_device": plan.tokens_per_s,
        "mfu": plan.mfu,
        "steps": plan.num_steps,
        "days": vars(plan.days) | {"total": plan.days.total},
        "kwh": _kwh(plan),
    }


def _kwh(plan: Plan) -> float:
    """Returns the energy of the devices alone."""
    return plan.device.watts * plan.config.num_devices * plan.days.total * 24 / 1000


def describe(plan: Plan) -> Iterator[str]:
    """Yields all that is known of a plan, as lines and tables."""
    config, batch, shape, memory = plan.config, plan.batch, plan.step.shape, plan.memory
    yield f"{config.model.name}: {num_params(shape.config):,} parameters"
    yield (
        f"{config.num_devices:,} x {plan.device.name} in nodes of {config.world.local_size}, "
        f"{shape.dims.strategy}: {describe_axes(shape.dims)}; {shape.precision.in_words}"
    )
    fitted = "; this micro-batch is the largest that fits" if plan.is_fitted else ""
    yield (
        f"batch: {batch.factors} = {counted(batch.global_batch_size, 'sequence')} = "
        f"{plan.step.tokens:,} tokens per step{fitted}"
    )
    if batch.rampup:
        yield describe_ramp(batch)
    rows = [(name, f"{size / GIB:.2f}") for name, size in vars(memory).items() if size]
    verdict = f"{'fits' if plan.fits else 'does not fit'} in {plan.device.memory_gib:g}"
    total = f"{memory.total / GIB:.2f}"
    yield "\n" + table(("memory per rank", "GiB"), [*rows, (f"total, {verdict}", total)]) + "\n"
    if text := sent_summary(sent(plan.step)):
        yield text + "\n"
    step_s = sum(plan.seconds.values())
    parts = {**plan.seconds, "total": step_s}
    times = [(name, f"{each:.3f}", f"{each / step_s:.1%}") for name, each in parts.items()]
    yield table(("time of a step", "s", "fraction"), times) + "\n"
    everywhere = plan.tokens_per_s * config.num_devices
    yield (
        f"{plan.tokens_per_s:,.0f} tokens/s per device, {everywhere:,.0f} in total, MFU {plan.mfu:.1%}"
    )
    yield _days_table(plan.days) + "\n"
    yield (
        f"{plan.num_steps:,} steps: {plan.days.total:,.2f} days, {_kwh(plan):,.0f} kWh of the devices "
        "alone"
    )


def _days_table(found: Days) -> str:
    names = ("computing", "saves", "validations", "restarts", "total")
    return table(("the run", "days"), [(name, f"{getattr(found, name):,.2f}") for name in names])


def describe_search(config: EstimateConfig, plans: list[Plan]) -> str:
    """Returns a table of the plans, or the reason why there is none."""
    where = f"{config.model.name} on {config.num_devices:,} x {config.device}"
    if not plans:
        return (
            f"{where}: no layout fits {MARGIN:.0%} of the memory; try "
            f"--num_devices={2 * config.num_devices}"
        )
    head = ("GiB per rank", "tokens/s per device", "MFU", "days", "flags")
    rows = [
        (
            f"{plan.memory.total / GIB:.1f}",
            f"{plan.tokens_per_s:,.0f}",
            f"{plan.mfu:.1%}",
            f"{plan.days.total:,.2f}",
            plan.flags,
        )
        for plan in plans
    ]
    first = f"{where}, {plans[0].batch.global_batch_size:,} sequences per step: the fastest layouts"
    return f"{first}\n{table(head, rows, text_columns=(4,))}"


def main(config: EstimateConfig) -> None:
    """Runs the command `estimate`.

    Raises:
        UserError: the flags contradict one another.
    """
    if config.device is not None:
        plans = search(config) if config.search else [choose_plan(config)]
        if config.json:
            print(json.dumps(list(map(as_json, plans)) if config.search else as_json(plans[0])))
        else:
            print(
                describe_search(config, plans) if config.search else "\n".join(describe(plans[0]))
            )
    elif config.tflops is not None or config.tokens_per_sec_per_device is not None:
        print("\n".join(_describe_rate(config)))


def _describe_rate(config: EstimateConfig) -> Iterator[str]:
    """Yields the range of days at the rate of a device."""
    found, count = days_by_rate(config), config.parameters
    model = (
        f"{count:,} parameters"
        if count
        else (f"{config.model.name} ({num_params(config.resolved_model):,} parameters)")
    )
    rate = (
        f"{config.tokens_per_sec_per_device:,g} tokens/s"
        if config.tokens_per_sec_per_device
        else f"{config.tflops:g} TFLOP/s"
    )
    work = f"{config.num_tokens:,} tokens, {config.num_devices} devices at {rate} each"
    yield f"{model}, {work}: {config.num_steps:,} steps"
    if not count:
        training = config.as_training.training
        if training.batch_size is None and training.grad_accum_steps is None:
            config = replace(config, training=replace(config.training, grad_accum_steps=1))
        dp_size = config.dims(config.parallel).size("dp")
        training = replace(with_global_batch(config, dp_size), rampup_batch_size=())
        step = step_of(config, config.parallel, plan_batch(training, dp_size))
        size = optimizer_bytes(config.optim, config.resolved_model, config.resolved_precision)
        yield from filter(None, [estimate_memory(step, size).summary, sent_summary(sent(step))])
    if config.training.rampup_batch_size:
        yield describe_ramp(config.batches)
    yield _days_table(found)
    yield (
        f"between {found.shortest:.2f} days, if nothing is recomputed or stops the run, and "
        f"{found.total:.2f} days"
    )
