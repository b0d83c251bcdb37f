"""What a run says where memory runs out: the flags that would help, and about what each saves."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch

from fms_fsdp.errors import RunFailed
from fms_fsdp.predict.room import available_memory
from fms_fsdp.spec.resolve import Spec

_GIB = 2**30
_OTHER_WORDS = ("can't allocate memory", "ALLOC_FAILED")  # of the CPU's allocator; of cuBLAS and cuDNN


@contextmanager
def explaining_out_of_memory(spec: Spec) -> Iterator[None]:
    """Inside, running out of memory ends the run with the flags that would help and about what each saves.

    Some of them are in the run's name, so that the same run goes on only under `keep_name`.

    Raises:
        RunFailed: memory ran out.
    """
    try:
        yield
    except (torch.OutOfMemoryError, MemoryError, RuntimeError) as error:
        is_told = isinstance(error, torch.OutOfMemoryError | MemoryError)
        if not is_told and not any(words in str(error) for words in _OTHER_WORDS):
            raise
        advice = "; ".join(_advice(spec))
        reason = f"out of memory ({str(error).splitlines()[0]}); what would help: {advice}"
        raise RunFailed(
            f"{reason}; to go on with this run add {spec.config.keep_name}", on_one_rank=True
        ) from error


def warning_of_memory(spec: Spec) -> str:
    """What would help a rank that has less memory than its step is expected to take; otherwise nothing."""
    section = spec.config.parallel
    need = spec.memory(section).by_holder(spec.device, section)[spec.device]
    available = available_memory(spec.device, spec.world.local_world_size) / _GIB
    if (expected := need.expected / _GIB) <= available:
        return ""
    sizes = f"about {expected:.1f} GiB a rank, and {available:.1f} are available"
    return f"a step is expected to take {sizes}; what would help: {'; '.join(_advice(spec))}"


def _advice(spec: Spec) -> Iterator[str]:
    section = spec.config.parallel
    dims, batch_size, estimate = spec.dims, spec.batch.batch_size, spec.memory(section)
    state, kept = estimate.state, estimate.activations + estimate.loss
    whole = "--recompute=blocks" if section.recomputes != "blocks" else "--selective_checkpointing=1"
    flags = {"cheap": "--recompute=cheap with --use_torch_compile=True", "blocks": whole}
    for name, text in flags.items():
        others: dict[str, Any] = {"fsdp_activation_checkpointing": None, "selective_checkpointing": "1"}
        if name == "cheap":
            others["use_torch_compile"] = True
        changed = replace(section, recompute=name, **others)
        if (saving := estimate.expected - spec.memory(changed).expected) > 0:
            yield f"{text} saves about {saving / _GIB:.1f} GiB"
    half = f"saves about {kept / 2 / _GIB:.1f} GiB"
    if batch_size > 1:
        yield f"--batch_size={batch_size // 2} with twice the --grad_accum_steps {half}"
    yield f"--seq_length={spec.seq_length // 2} {half}"
    if dims.size("dp") > dims.dp_shard:
        saved = state * (1 - dims.dp_shard / dims.size("dp"))
        yield f"--sharding_strategy=fsdp saves about {saved / _GIB:.1f} GiB of weights and optimizer state"
    elif not dims.reshard_after_forward:
        yield f"--sharding_strategy=fsdp saves about {estimate.unit / _GIB:.1f} GiB of gathered weights"
    yield f"twice the devices under fsdp save about {state / 2 / _GIB:.1f} GiB"
    if torch.cuda.is_available() and not section.cpu_offload:
        sharded = " --sharding_strategy=fsdp" if dims.strategy == "none" else ""
        yield f"--cpu_offload=True{sharded} moves about {state / _GIB:.1f} GiB to host memory"
