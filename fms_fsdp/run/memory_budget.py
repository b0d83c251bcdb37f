"""The memory that a rank needs and may use: checks, warnings and advice."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch

from fms_fsdp.config import ParallelConfig
from fms_fsdp.config.values import format_bytes, rounded_bytes
from fms_fsdp.errors import RunFailed, UserError
from fms_fsdp.models.flops import num_params
from fms_fsdp.predict.memory import (
    GIB,
    Memory,
    Step,
    checkpoint_bytes,
    estimate_memory,
    minimum_memory,
)
from fms_fsdp.run.machine import Machine
from fms_fsdp.state import RunConfig

# Messages of the CPU's allocator, cuBLAS and cuDNN; torch's own allocator raises OutOfMemoryError.
_OUT_OF_MEMORY = ("can't allocate memory", "ALLOC_FAILED")


class PredictionFailed(RunFailed):
    """The memory of a run cannot be predicted, because of an error, the `reason`.

    The prediction runs parts of the model on devices that do not exist, with private functions of
    torch too, which another version may change. A training does not need it unless a flag is
    `auto`.
    """

    def __init__(self, error: Exception) -> None:
        text = " ".join(str(error).split())
        self.reason = f"{type(error).__name__}: {text}"
        super().__init__(
            f"memory cannot be predicted ({self.reason}), which --recompute=auto and "
            "--batch_size=auto require; set --recompute and --batch_size"
        )


@contextmanager
def predicting() -> Iterator[None]:
    """Raises PredictionFailed for an error in the block, which no input of a user explains."""
    try:
        yield
    except UserError:
        raise
    except Exception as error:
        raise PredictionFailed(error) from error


class OtherModel(Protocol):
    """A second model in the memory of each rank, such as the teacher of distillation."""

    def added_to(self, need: Memory, step: Step) -> Memory: ...


@dataclass(frozen=True)
class MemoryBudget:
    """The memory of a machine against the need of a run; a `teacher` needs part of it.

    Every method that predicts raises PredictionFailed if that is not possible.
    """

    machine: Machine
    teacher: OtherModel | None = None

    def step(self, run: RunConfig) -> Step:
        """Returns a step of the run on this machine."""
        return Step.of(run, compiled=self.machine.compiles(run.config.parallel))

    def minimum(self, run: RunConfig) -> Memory:
        """Returns the memory without which a rank cannot take a step."""
        with predicting():
            step = self.step(run)
            return self._with_teacher(minimum_memory(step), step)

    def need(self, run: RunConfig) -> Memory:
        """Returns the expected memory of a rank in a step."""
        saves = 0
        flags = run.config.checkpoint
        if flags.async_checkpoint and flags.saves:
            saves = checkpoint_bytes(run) // run.dims.size("replica")
        with predicting():
            step = self.step(run)
            return self._with_teacher(estimate_memory(step, saves), step)

    def _with_teacher(self, need: Memory, step: Step) -> Memory:
        if self.teacher is None:
            return need
        return self.teacher.added_to(need, step)

    def check(self, run: RunConfig) -> None:
        """Raises UserError, with both sizes and a fix, if a rank cannot take a step."""
        need = self.minimum(run)
        offload = run.config.parallel.cpu_offload
        for device_type, part in need.by_device(run.device_type, offload=offload).items():
            if part.total > self.machine.memory[device_type]:
                raise UserError(_too_large(run, part, self.machine, device_type))

    def warning(self, run: RunConfig) -> str:
        """Returns a warning if a step is expected to need more memory than a rank may use."""
        try:
            need, available = self.fullest(run)
        except PredictionFailed:
            return ""
        if need <= available:
            return ""
        sizes = (
            f"about {rounded_bytes(need)} per rank, and {rounded_bytes(available)} are available"
        )
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
            advice = ["lower --batch_size or --seq_length"]
            with suppress(PredictionFailed):
                advice = list(self.advice(run))
            reason = f"out of memory ({str(error).splitlines()[0]})"
            raise RunFailed(
                f"{reason}; what would help: {'; '.join(advice)}; to continue this run add "
                f"{run.config.keep_name}",
                on_one_rank=True,
            ) from error

    def advice(self, run: RunConfig) -> Iterator[str]:
        """Yields flags that would need less memory, and about how much each saves."""
        section = run.config.parallel
        dims = run.dims
        need = self.need(run)
        blocks = "--recompute=blocks"
        if section.recomputes == "blocks":  # of some blocks
            blocks = "--selective_checkpointing=1"
        changes = {
            "--recompute=cheap with --use_torch_compile=True": _recomputing(
                section, "cheap", "1", use_torch_compile=True
            ),
            blocks: _recomputing(section, "blocks", "1"),
        }
        for text, changed in changes.items():
            other = self.need(replace(run, config=replace(run.config, parallel=changed)))
            saving = need.total - other.total
            if saving > 0:
                yield f"{text} saves about {rounded_bytes(saving)}"
        half = f"saves about {rounded_bytes((need.activations + need.working) / 2)}"
        if run.batch.batch_size > 1:
            smaller = run.batch.batch_size // 2
            yield f"--batch_size={smaller} with twice the --grad_accum_steps {half}"
        yield f"--seq_length={run.seq_length // 2} {half}"
        if dims.size("dp") > dims.dp_shard:
            saved = need.state * (1 - dims.dp_shard / dims.size("dp"))
            yield (
                f"--sharding_strategy=fsdp saves about {rounded_bytes(saved)} of weights and "
                "optimizer state"
            )
        elif not dims.reshard_after_forward:
            size = rounded_bytes(need.gathered)
            yield f"--sharding_strategy=fsdp saves about {size} of gathered weights"
        if need.state < need.total / 100:
            return
        yield f"twice the devices under fsdp save about {rounded_bytes(need.state / 2)}"
        if torch.cuda.is_available() and not section.cpu_offload:
            flags = "--cpu_offload=True"
            if dims.strategy == "none":
                flags += " --sharding_strategy=fsdp"
            yield f"{flags} moves about {rounded_bytes(need.state)} to host memory"

    def fullest(self, run: RunConfig, need: Memory | None = None) -> tuple[int, int]:
        """Returns the bytes needed and available of the device that is filled most.

        need   by default the expected memory
        """
        need = need or self.need(run)
        offload = run.config.parallel.cpu_offload
        parts = need.by_device(run.device_type, offload=offload)
        available = self.machine.memory
        loads = [(part.total, max(1, available[kind])) for kind, part in parts.items()]
        return max(loads, key=lambda load: load[0] / load[1])

    def fits(self, run: RunConfig, margin: float = 0.0) -> bool:
        """Returns whether a step is expected to leave this fraction of the memory free."""
        needed, available = self.fullest(run)
        return needed <= (1 - margin) * available

    def can_start(self, run: RunConfig) -> bool:
        """Returns whether a first step is possible."""
        needed, available = self.fullest(run, self.minimum(run))
        return needed <= available


def _recomputing(section: ParallelConfig, kind: str, fraction: str, **more: Any) -> ParallelConfig:
    own: dict[str, Any] = {"recompute": kind, "selective_checkpointing": fraction}
    return replace(section, fsdp_activation_checkpointing=None, **own, **more)


def _too_large(run: RunConfig, need: Memory, machine: Machine, device_type: str) -> str:
    """Returns the error of a run whose minimum is not available on a device of this type."""
    available = machine.memory[device_type]
    limit = f"must fit the {format_bytes(available)} of memory available per rank"
    used = machine.total_memory - available
    if device_type == "cuda" and used >= 2 * GIB:
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
    fix = smaller
    dims = run.dims
    free = available - (need.total - need.state)
    if free > 0:
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
