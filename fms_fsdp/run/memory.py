"""The memory that a rank needs and may use: settings that follow from it, checks and advice.

    sharding_strategy  not set, and hsdp does not fit: fsdp if that fits
    recompute=auto     the cheapest recomputation that fits, else the one with the least memory
    batch_size=auto    the largest micro-batch that divides the global batch and fits with a margin,
                       else the smallest

With both `auto`, the recomputation is chosen for the smallest micro-batch. A resumed run keeps the
choice of the earlier launch while it fits, without the margin.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch

from fms_fsdp.config import BatchPlan, ParallelConfig
from fms_fsdp.config.batch import divisors
from fms_fsdp.config.values import format_bytes
from fms_fsdp.distributed.mesh import plan_dims
from fms_fsdp.distributed.runtime import World, min_over_ranks
from fms_fsdp.errors import RunFailed, UserError
from fms_fsdp.models.flops import num_params
from fms_fsdp.optim.optimizers import checkpoint_bytes
from fms_fsdp.parallel.compile import compiles
from fms_fsdp.predict.devices import available_memory
from fms_fsdp.predict.memory import (
    GIB,
    Memory,
    Step,
    estimate_memory,
    first_fit,
    kinds,
    minimum_memory,
    optimizer_bytes,
)
from fms_fsdp.state import RunConfig

# The fraction of the memory that --batch_size=auto leaves free: the estimate does not include the CUDA
# context, NCCL and fragments, and one sequence too many ends the run.
MARGIN = 0.1
_MOST_ROWS = 4096  # sequences of a micro-batch: divisors are tried one by one
# Messages of the CPU's allocator, cuBLAS and cuDNN; torch's own allocator raises OutOfMemoryError.
_OUT_OF_MEMORY = ("can't allocate memory", "ALLOC_FAILED")


class OtherModel(Protocol):
    """A second model in the memory of each rank, such as the teacher of distillation."""

    def added_to(self, need: Memory, run: RunConfig) -> Memory: ...


@dataclass(frozen=True)
class MemoryBudget:
    """Bytes that every rank may use, by type of device; a `teacher` needs part of them.

    It is the minimum over ranks, so that all ranks choose the same settings.
    """

    world: World
    available: Mapping[str, int]
    teacher: OtherModel | None = None

    @staticmethod
    def measure(world: World, device: torch.device) -> MemoryBudget:
        """Measures the memory of this machine's ranks (collective: every rank)."""
        devices = {each.type: each for each in (device, torch.device("cpu"))}
        own = [available_memory(each, world.local_size) for each in devices.values()]
        return MemoryBudget(world, dict(zip(devices, min_over_ranks(own), strict=True)))

    def minimum(self, run: RunConfig) -> Memory:
        """Returns the memory without which a rank cannot take a step."""
        need = minimum_memory(Step.of(run), _optimizer_bytes(run))
        return need if self.teacher is None else self.teacher.added_to(need, run)

    def need(self, run: RunConfig) -> Memory:
        """Returns the expected memory of a rank in a step."""
        saves = saved_bytes(run) if run.config.checkpoint.async_checkpoint else 0
        saves //= run.dims.size("replica")
        need = estimate_memory(Step.of(run), _optimizer_bytes(run), saves)
        return need if self.teacher is None else self.teacher.added_to(need, run)

    def check(self, run: RunConfig) -> None:
        """Raises UserError, with both sizes and a fix, if a rank cannot take a step."""
        need, offload = self.minimum(run), run.config.parallel.cpu_offload
        for device_type, part in need.by_device(run.device_type, offload=offload).items():
            if part.total > self.available[device_type]:
                raise UserError(_too_large(run, part, self.available[device_type], device_type))

    def warning(self, run: RunConfig) -> str:
        """Returns a warning if a step is expected to need more memory than a rank may use."""
        need, available = self.fullest(run)
        if need <= available:
            return ""
        sizes = f"about {need / GIB:.1f} GiB per rank, and {available / GIB:.1f} GiB are available"
        return f"a step is expected to need {sizes}; what would help: {'; '.join(self.advice(run))}"

    @contextmanager
    def explaining_out_of_memory(self, run: RunConfig) -> Iterator[None]:
        """Raises RunFailed with advice if memory runs out in the block.

        Some of the advised flags are part of the default run name, hence `keep_name`.
        """
        try:
            yield
        except (torch.OutOfMemoryError, MemoryError, RuntimeError) as error:
            is_known = isinstance(error, torch.OutOfMemoryError | MemoryError)
            if not is_known and not any(text in str(error) for text in _OUT_OF_MEMORY):
                raise
            reason = f"out of memory ({str(error).splitlines()[0]})"
            raise RunFailed(
                f"{reason}; what would help: {'; '.join(self.advice(run))}; to continue this run "
                f"add {run.config.keep_name}",
                on_one_rank=True,
            ) from error

    def advice(self, run: RunConfig) -> Iterator[str]:
        """Yields flags that would need less memory, and about how much each saves."""
        section, dims, need = run.config.parallel, run.dims, self.need(run)
        is_all = section.recomputes == "blocks"
        blocks = "--selective_checkpointing=1" if is_all else "--recompute=blocks"
        for kind, text in (
            ("cheap", "--recompute=cheap with --use_torch_compile=True"),
            ("blocks", blocks),
        ):
            more: dict[str, Any] = {"use_torch_compile": True} if kind == "cheap" else {}
            other = self.need(_with(run, _recomputing(section, kind, "1", **more), run.batch))
            if (saving := need.total - other.total) > 0:
                yield f"{text} saves about {saving / GIB:.1f} GiB"
        half = f"saves about {(need.activations + need.working) / 2 / GIB:.1f} GiB"
        if (batch_size := run.batch.batch_size) > 1:
            yield f"--batch_size={batch_size // 2} with twice the --grad_accum_steps {half}"
        yield f"--seq_length={run.seq_length // 2} {half}"
        if dims.size("dp") > dims.dp_shard:
            saved = need.state * (1 - dims.dp_shard / dims.size("dp"))
            yield (
                f"--sharding_strategy=fsdp saves about {saved / GIB:.1f} GiB of weights and "
                "optimizer state"
            )
        elif not dims.reshard_after_forward:
            size = f"{need.gathered / GIB:.1f} GiB"
            yield f"--sharding_strategy=fsdp saves about {size} of gathered weights"
        yield f"twice the devices under fsdp save about {need.state / 2 / GIB:.1f} GiB"
        if torch.cuda.is_available() and not section.cpu_offload:
            sharded = " --sharding_strategy=fsdp" if dims.strategy == "none" else ""
            size = f"{need.state / GIB:.1f} GiB"
            yield f"--cpu_offload=True{sharded} moves about {size} to host memory"

    def fullest(self, run: RunConfig, need: Memory | None = None) -> tuple[int, int]:
        """Returns the bytes needed and available of the device that is filled most, by default of
        the expected memory."""
        need, offload = need or self.need(run), run.config.parallel.cpu_offload
        parts = need.by_device(run.device_type, offload=offload)
        loads = [(part.total, max(1, self.available[kind])) for kind, part in parts.items()]
        return max(loads, key=lambda load: load[0] / load[1])

    def fits(self, run: RunConfig, margin: float = 0.0) -> bool:
        needed, available = self.fullest(run)
        return needed <= (1 - margin) * available

    def choose(self, run: RunConfig, saved: RunConfig | None) -> RunConfig:
        """Returns the run with the settings that memory decides, and a reason for each.

        `saved`: the launch that wrote the checkpoint of a resumed run.
        """
        section, training = run.config.parallel, run.config.training
        if run.dims.strategy == "hsdp" and not (
            section.sharding_strategy or section.hsdp_shard_size
        ):
            run = self._choose_strategy(run)
        by_kind, by_rows = section.recompute == "auto", training.batch_size == "auto"
        if not (by_kind or by_rows):
            return run
        batches = _batches(run) if by_rows else [run.batch]
        compiled = compiles(section, torch.device(run.device_type))
        sections = kinds(section, compiled=compiled) if by_kind else [section]
        smallest = [_with(run, each, batches[0]) for each in sections]
        smallest = [each for each in smallest if _is_allowed(each)] or smallest[:1]
        found = _earlier(run, saved, smallest, batches)
        verb = "keeps"
        if found is None or not self.fits(found):
            verb, found = "chose", first_fit(smallest, self.fits)
            larger = [_with(run, found.config.parallel, batch) for batch in reversed(batches)]
            if by_rows:
                found = first_fit(larger, lambda each: self.fits(each, MARGIN))
            if not self.fits(found):
                verb = "found nothing that fits, and takes"
        need, available = self.fullest(found)
        sizes = f"about {need / GIB:.1f} GiB of {available / GIB:.1f} GiB per rank"
        chosen, batch = dict(run.chosen), found.batch
        if by_kind:
            chosen["recompute"] = f"auto {verb} {_kind(found)}: {sizes}"
        if by_rows:
            chosen["batch_size"] = f"auto {verb} {batch.factors}: {sizes}"
        return replace(found, chosen=chosen)

    def _choose_strategy(self, run: RunConfig) -> RunConfig:
        """Returns the run under fsdp if it fits, and hsdp does not."""
        first = run
        if run.config.training.batch_size == "auto":
            first = replace(run, batch=_batches(run)[0])
        needed, available = self.fullest(first, self.minimum(first))
        if needed <= available:
            return run
        section = replace(run.config.parallel, sharding_strategy="fsdp")
        dims = plan_dims(section, run.config.model.name, self.world)
        reason = (
            f"fsdp, because hsdp over {run.dims.size('shard')} devices would need "
            f"{needed / GIB:.1f} GiB of {available / GIB:.1f} GiB per rank"
        )
        found = replace(run, dims=dims, chosen={**run.chosen, "sharding_strategy": reason})
        first = replace(first, dims=dims)
        needed, available = self.fullest(first, self.minimum(first))
        return found if needed <= available else run


def _optimizer_bytes(run: RunConfig) -> float:
    return optimizer_bytes(run.config.optim, run.model, run.precision)


def _recomputing(section: ParallelConfig, kind: str, fraction: str, **more: Any) -> ParallelConfig:
    own: dict[str, Any] = {"recompute": kind, "selective_checkpointing": fraction}
    return replace(section, fsdp_activation_checkpointing=None, **own, **more)


def _with(run: RunConfig, section: ParallelConfig, batch: BatchPlan) -> RunConfig:
    return replace(run, config=replace(run.config, parallel=section), batch=batch)


def _kind(run: RunConfig) -> str:
    name, fraction = run.config.parallel.recomputes, run.config.parallel.selective_checkpointing
    return f"{fraction} of the blocks" if name == "blocks" and fraction != "1" else name


def _is_allowed(run: RunConfig) -> bool:
    """Returns whether the axes of the run support its settings."""
    if run.dims.divides_model:
        from fms_fsdp.parallel.layout import check_layout

        device = torch.device(run.device_type)
        try:
            check_layout(run.config, run.model, run.dims, run.batch, device)
        except UserError:
            return False
    return True


def _batches(run: RunConfig) -> list[BatchPlan]:
    """Returns the ways to split the global batch that the axes support, by micro-batch size; the
    batch itself, which is then rejected, if there is none."""
    batch = run.batch
    per_rank = batch.batch_size * batch.grad_accum_steps
    unit = per_rank
    if batch.rampup and not batch.cuts_micro_steps:  # it must divide every batch of the ramp
        unit = math.gcd(*batch.rampup[:2], batch.global_batch_size)
        multiple = batch.rampup[3] if len(batch.rampup) > 3 else 1
        unit = (unit if unit % multiple == 0 else multiple) // batch.dp_size
    found = [
        replace(batch, batch_size=rows, grad_accum_steps=per_rank // rows)
        for rows in divisors(unit, _MOST_ROWS)
    ]
    return [each for each in found if _is_allowed(replace(run, batch=each))] or [batch]


def _earlier(
    run: RunConfig, saved: RunConfig | None, smallest: list[RunConfig], batches: list[BatchPlan]
) -> RunConfig | None:
    """Returns the run with the settings that an earlier launch chose; None if it chose none, or they
    are not possible any more."""
    if saved is None:
        return None
    kept = smallest
    if run.config.parallel.recompute == "auto":
        is_chosen = "recompute" in saved.chosen
        kept = [each for each in kept if is_chosen and _kind(each) == _kind(saved)]
    if run.config.training.batch_size == "auto":
        rows = saved.batch.batch_size if "batch_size" in saved.chosen else 0
        batches = [each for each in batches if each.batch_size == rows]
    return replace(kept[0], batch=batches[0]) if kept and batches else None


def _too_large(run: RunConfig, need: Memory, available: int, device_type: str) -> str:
    """Returns the error of a run whose minimum is not available on a device of this type."""
    limit = f"must fit the {format_bytes(available)} of memory available per rank"
    if device_type == "cuda":
        used = torch.cuda.mem_get_info()[1] - available
        if used >= 2 * GIB:
            limit += f" (other programs use {format_bytes(used)})"
    if 2 * need.sequences > need.total:
        return (
            f"--seq_length and the batch {limit}, but sequences and positions require "
            f"{format_bytes(need.sequences)}; lower one of --seq_length, --max_seq_len, --batch_size, "
            "--grad_accum_steps, --global_batch_size"
        )
    smaller = (
        "choose a smaller model (--model_variant, --num_layers, --hidden_size, --ffn_hidden_size, "
        "--vocab_size)"
    )
    fix, dims = smaller, run.dims
    if (free := available - (need.total - need.state)) > 0:
        num_devices = -(-need.state * dims.size("shard") // free)
        fix = (
            f"shard over at least {num_devices} such devices (--sharding_strategy=fsdp), "
            f"or {smaller}"
        )
    elif dims.strategy != "none" and dims.keeps_weights:
        fix = (
            "gather one block at a time (--sharding_strategy=fsdp, on several devices), "
            f"or {smaller}"
        )
    return (
        f"--model_variant={run.config.model.name_and_sizes} {limit}, but its "
        f"{num_params(run.model):,} parameters require {format_bytes(need.total)} "
        f"({format_bytes(need.state)} of weights, gradients and optimizer state, "
        f"{format_bytes(need.gathered)} of gathered weights); {fix}"
    )


def saved_bytes(run: RunConfig) -> int:
    """Returns the approximate size of a checkpoint; 0 if the run writes none."""
    flags = run.config.checkpoint
    if not (flags.save_last or flags.checkpoint_interval or flags.checkpoint_schedule):
        return 0
    return checkpoint_bytes(run.config.optim, run.model, run.precision)
