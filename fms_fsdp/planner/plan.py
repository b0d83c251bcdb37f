"""A launch on devices that need not be there: its memory, its messages and the time of its step.

flags + Cluster → make_plan (the checks of a launch) → Plan → limits, and what would help
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
import torch._dynamo  # the first optimizer would import it, in the middle of a plan

from fms_fsdp.config import BatchPlan, Precision, TrainConfig, resolve_batch
from fms_fsdp.config.axes import ParallelDims
from fms_fsdp.config.flag import flag_table, flag_values, non_defaults
from fms_fsdp.config.rule import judge
from fms_fsdp.config.rules import IDLE
from fms_fsdp.errors import UserError
from fms_fsdp.mesh import resolve_dims
from fms_fsdp.models.flops import flops_per_token
from fms_fsdp.models.variants import LlamaConfig, resolve_model
from fms_fsdp.optim.optimizers import state_bytes
from fms_fsdp.parallel.rules import Layout, check_axes
from fms_fsdp.predict.hardware import DeviceKind
from fms_fsdp.predict.memory import MemoryEstimate, estimate_memory
from fms_fsdp.predict.shares import share_of
from fms_fsdp.predict.speed import Message, Program, StepTime, Work, messages, step_time
from fms_fsdp.runtime import World
from fms_fsdp.spec.rules import MACHINE
from fms_fsdp.spec.rules import Hardware as Known

GPU = torch.device("cuda", 0)
# rules of the machine that hold of any GPU; the others ask the machine itself
_OF_ANY_GPU = ("recompute", "attn_impl", "attn_dropout", "dist_backend", "async_tp", "cpu_offload")


@dataclass(frozen=True)
class Cluster:
    """Devices of one kind in nodes of equal size."""

    hardware: DeviceKind
    num_devices: int
    devices_per_node: int = 8

    @property
    def world(self) -> World:
        return World(0, 0, self.num_devices, min(self.num_devices, self.devices_per_node))


@dataclass(frozen=True)
class Plan:
    """What a launch needs and how fast it goes. `config`: with every flag that was chosen."""

    config: TrainConfig
    cluster: Cluster
    work: Work
    memory: MemoryEstimate

    @property
    def dims(self) -> ParallelDims:
        return self.work.dims

    @property
    def batch(self) -> BatchPlan:
        return self.work.batch

    @cached_property
    def time(self) -> StepTime:
        return step_time(self.work)

    @cached_property
    def sent(self) -> Mapping[str, Message]:
        """What the rank that holds most sends in a step, by axis."""
        work = self.work
        return messages(work, work.curves, share_of(work.model, work.dims, work.section))

    @property
    def available(self) -> int:
        """Bytes that a rank may use on its device."""
        return self.cluster.hardware.memory_bytes

    @cached_property
    def needed(self) -> int:
        """Bytes that a rank is expected to need on its device."""
        return self.memory.by_holder(GPU, self.work.section)[GPU].expected

    @property
    def fits(self) -> bool:
        return self.needed <= self.available

    @property
    def tokens_per_step(self) -> int:
        return self.batch.global_batch_size * self.work.seq_length

    @property
    def tokens_per_s(self) -> float:
        """Of one device."""
        return self.tokens_per_step / self.time.total / self.cluster.num_devices

    @property
    def mfu(self) -> float:
        flops = flops_per_token(self.work.model, self.work.seq_length)
        return self.tokens_per_s * flops / self.cluster.hardware.peak("bf16")


def memory_parts(plan: Plan) -> dict[str, int]:
    """The bytes of `plan.needed` by what holds them; those of host memory are left out. What a step holds at
    its fullest moment beside the rest is activations, logits, buffers of messages and temporaries."""
    held = plan.memory.by_holder(GPU, plan.work.section)[GPU]
    kept = min(held.beside, held.activations)
    return {
        "weights": held.weights,
        "gradients": held.state - held.weights - held.optimizer,
        "whole gradients": held.gradients,
        "optimizer": held.optimizer,
        "gathered": held.unit,
        "rows": held.rows,
        "activations": kept,
        "logits, buffers, work": held.beside - kept,
        "allocator": held.slack,
    }


def make_plan(config: TrainConfig, cluster: Cluster) -> Plan:
    """The plan of a launch with these flags; without a batch that of a training's defaults.

    Raises:
        UserError: such a launch would be refused for its flags, its shape, its axes or its batch.
    """
    model = resolve_model(config.model, seq_length=config.data.seq_length)
    compiled = config.parallel.use_torch_compile is not False
    config = replace(config, parallel=replace(config.parallel, use_torch_compile=compiled))
    dims = resolve_dims(config.parallel, config.model.name, cluster.world)
    known = Known(config, GPU, dims)
    judge([rule for rule in MACHINE if rule.flag in _OF_ANY_GPU], known, flag_values(config))
    batch = resolve_batch(config.training, dims.size("dp"))
    precision = resolved_precision(config)
    cluster.hardware.peak("float8" if precision.float8 else precision.compute)
    if dims.divides_model:
        check_axes(Layout(config, model, dims, batch, precision, GPU))
    optimizer_bytes = state_bytes(config.optim, model, precision)
    return plan_of(config, cluster, model, dims, batch, precision, optimizer_bytes)


def plan_of(
    config: TrainConfig,
    cluster: Cluster,
    model: LlamaConfig,
    dims: ParallelDims,
    batch: BatchPlan,
    precision: Precision,
    optimizer_bytes: int,
) -> Plan:
    """The plan of what is resolved already; nothing is checked."""
    section, length = config.parallel, config.data.seq_length
    memory = estimate_memory(
        model,
        dims,
        section,
        precision=precision,
        batch=batch,
        seq_length=length,
        optimizer_bytes=optimizer_bytes,
        compiled=section.use_torch_compile is not False,
    )
    program = Program(compiled=section.use_torch_compile is not False)
    args = model, dims, section, precision, batch, length, cluster.hardware, cluster.devices_per_node
    return Plan(config, cluster, Work(*args, program), memory)


def resolved_precision(config: TrainConfig) -> Precision:
    """What the flags name; bf16 where they name none."""
    return config.precision.resolve(config.precision.named or "bf16")


def changed(config: TrainConfig, flags: Mapping[str, Any]) -> TrainConfig:
    """The configuration with other values of some flags.

    Raises:
        UserError: they contradict the others.
    """
    table, sections = flag_table(TrainConfig), dict[str, dict[str, Any]]()
    for name, value in flags.items():
        sections.setdefault(table[name].section, {})[name] = value
    parts: dict[str, Any] = {
        name: replace(getattr(config, name), **values) for name, values in sections.items()
    }
    return replace(config, **parts)


def written(flags: Mapping[str, Any]) -> str:
    """The flags as they are typed; those that take the default again are left out."""
    return " ".join(f"--{name}={value}" for name, value in flags.items() if value is not None)


def idle_flags(config: TrainConfig) -> set[str]:
    """The flags that others leave without effect; a training refuses them where all are typed."""
    given = non_defaults(config)
    return {rule.flag for rule in IDLE if rule.flag in given and not rule.holds(config)}


@dataclass(frozen=True)
class Remedy:
    """Flags that a plan would be better with: it fits, and its gain in tokens/s, 0.1 for a tenth."""

    flags: str
    gain: float


def remedies(plan: Plan, count: int = 3) -> list[Remedy]:
    """The changes of one kind that help most: of a plan that does not fit those that fit, fastest first; of
    another one those that are faster by a hundredth at least."""
    found = []
    for flags in _changes(plan):
        try:
            other = make_plan(changed(plan.config, flags), plan.cluster)
        except UserError:
            continue
        if idle_flags(other.config) - idle_flags(plan.config):
            continue
        gain = other.tokens_per_s / plan.tokens_per_s - 1
        if other.fits and (not plan.fits or gain > 0.01):
            found.append(Remedy(written(flags), gain))
    return sorted(found, key=lambda remedy: -remedy.gain)[:count]


def _changes(plan: Plan) -> Iterator[dict[str, Any]]:
    """Changes of one kind each; the global batch stays."""
    section, batch, strategy = plan.work.section, plan.batch, plan.dims.strategy
    no_kind = {"fsdp_activation_checkpointing": None}
    for kind in ("none", "cheap", "ops", "blocks"):
        if kind != section.recomputes:
            yield {"recompute": kind} | (no_kind if section.fsdp_activation_checkpointing is not None else {})
    if section.recomputes == "blocks":
        yield {"selective_checkpointing": "1/2"}
    whole = batch.batch_size * batch.grad_accum_steps
    for rows in (batch.batch_size * 2, batch.batch_size // 2, 1):
        if rows and whole % rows == 0 and rows != batch.batch_size:
            yield {
                "batch_size": rows,
                "grad_accum_steps": whole // rows,
                "global_batch_size": batch.global_batch_size,
            }
    for other in ("fsdp", "hsdp", "zero2", "zero1"):
        if other != strategy and plan.cluster.num_devices > 1:
            yield {"sharding_strategy": other}
    for axis in ("tp", "pp"):
        size = plan.dims.size(axis)
        for other_size in (size * 2, size // 2):
            if other_size:
                rows = whole * other_size // size or 1
                yield {
                    f"{axis}_size": other_size,
                    "batch_size": rows if other_size > size and axis == "pp" else batch.batch_size,
                    "grad_accum_steps": None,
                    "global_batch_size": batch.global_batch_size,
                }
    if plan.dims.tp > 1 and not section.async_tp:
        yield {"async_tp": True}
    if "float8" in plan.cluster.hardware.tflops and not plan.work.precision.float8:
        yield {"precision": "float8"}


def limit(plan: Plan) -> str:
    """What limits a plan first, in words."""
    if not plan.fits:
        return (
            f"memory: a rank needs about {plan.needed / 2**30:.1f} GiB, and the device has "
            f"{plan.available / 2**30:.1f}"
        )
    time = plan.time
    losses = time.parts | {"recomputation": time.repeated}
    useful = losses.pop("products")
    name, seconds = max(losses.items(), key=lambda part: part[1])
    share = f"{seconds / time.total:.0%} of the step"
    if seconds < useful / 10:
        return (
            f"products of matrices, {useful / time.total:.0%} of the step; no other part takes a tenth of it"
        )
    return f"{name}, {share}"
