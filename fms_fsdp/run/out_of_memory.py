"""What a run says where memory runs out: the flags that would help, and about what each saves."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from fms_fsdp.config import NUM_BYTES, ParallelConfig, TrainConfig, parse_selective_checkpointing
from fms_fsdp.errors import RunFailed
from fms_fsdp.predict.memory import activation_bytes, estimate_memory
from fms_fsdp.run.plan import Plan

_GIB = 2**30
_OTHER_WORDS = ("can't allocate memory", "ALLOC_FAILED")  # of the CPU's allocator; of cuBLAS and cuDNN


@contextmanager
def explaining_out_of_memory(cfg: TrainConfig, plan: Plan) -> Iterator[None]:
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
        advice = "; ".join(_advice(cfg.parallel, plan))
        reason = f"out of memory ({str(error).splitlines()[0]}); what would help: {advice}"
        raise RunFailed(f"{reason}; to go on with this run add {cfg.keep_name}", on_one_rank=True) from error


def _advice(section: ParallelConfig, plan: Plan) -> Iterator[str]:
    config, dims, precision = plan.model, plan.dims, plan.precision
    batch_size, seq_length = plan.batch.batch_size, plan.seq_length
    state_bytes = plan.optimizer_bytes
    estimate = estimate_memory(config, dims, section, precision=precision, optimizer_bytes=state_bytes)
    state, kept = estimate.state, activation_bytes(config, batch_size, seq_length, precision)
    if section.recomputes == "blocks":
        share = float(parse_selective_checkpointing(section.selective_checkpointing))
        if share < 1:
            yield f"--selective_checkpointing=1 saves about {(1 - share) * kept / _GIB:.1f} GiB"
        kept = int(kept * (1 - share))
    else:
        a_number = NUM_BYTES[precision.compute]
        inputs = batch_size * seq_length * config.num_layers * config.hidden_size * a_number
        if section.recomputes == "none":
            yield f"--recompute=cheap with --use_torch_compile=True saves about {0.4 * kept / _GIB:.1f} GiB"
        yield f"--recompute=blocks saves about {(kept - inputs) / _GIB:.1f} GiB"
    half = f"saves about {kept / 2 / _GIB:.1f} GiB"
    if batch_size > 1:
        yield f"--batch_size={batch_size // 2} with twice the --grad_accum_steps {half}"
    yield f"--seq_length={seq_length // 2} {half}"
    if dims.size("dp") > dims.dp_shard:
        saved = state * (1 - dims.dp_shard / dims.size("dp"))
        yield f"--sharding_strategy=fsdp saves about {saved / _GIB:.1f} GiB of weights and optimizer state"
    elif not dims.reshard_after_forward:
        yield f"--sharding_strategy=fsdp saves about {estimate.unit / _GIB:.1f} GiB of gathered weights"
    yield f"twice the devices under fsdp save about {state / 2 / _GIB:.1f} GiB"
    if torch.cuda.is_available() and not section.cpu_offload:
        sharded = " --sharding_strategy=fsdp" if dims.strategy == "none" else ""
        yield f"--cpu_offload=True{sharded} moves about {state / _GIB:.1f} GiB to host memory"
