"""Will it fit: the least that a rank needs, against the bytes it has.

    needed    = (parameters + gradients + two AdamW moments, all fp32) / dp_shard
                + the largest unit that FSDP gathers + rows
    available = the GPU's memory, or min(cgroup limit, free RAM) / processes on this machine

Of the activations only the input of one block counts, and the host copy of a background save is left out:
a run that is refused here could not take its first step.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch

from fms_fsdp.config import BatchPlan, ParallelConfig, parse_selective_checkpointing
from fms_fsdp.errors import RunFailed
from fms_fsdp.mesh import ParallelDims
from fms_fsdp.models.flops import num_params, num_params_by_unit
from fms_fsdp.models.variants import LlamaConfig

_STATE_BYTES = 16  # per parameter: weight, gradient and two moments in fp32
_GIB = 2**30


@dataclass(frozen=True)
class MemoryEstimate:
    """Bytes of one rank: `state` is its share of weights, gradients and moments, `unit` the largest unsharded
    unit (weights and gradients).

    `rows`: the table of positions, the rows of a step and what a block takes in of those of a micro-step.
    """

    state: int
    unit: int
    dp_shard: int
    rows: int = 0

    @property
    def total(self) -> int:
        return self.state + self.unit + self.rows


def estimate_memory(
    config: LlamaConfig, dims: ParallelDims, *, mixed_precision: bool = False, batch: BatchPlan | None = None
) -> MemoryEstimate:
    """The least that a rank needs. Under `none` nothing is gathered; mixed precision casts one weight at a
    time."""
    weight_bytes, units = 2 if mixed_precision else 4, num_params_by_unit(config)
    if dims.strategy == "none":
        unit = weight_bytes * units["embed"] if mixed_precision else 0  # the head's weight has that size too
    else:
        # a tied embedding is in the root
        whole_ends = units["embed"] + units["head"] if config.tie_embeddings else 0
        unit = weight_bytes * max(*units.values(), whole_ends)
    rows = 0
    if batch is not None:
        positions = 8 * config.head_dim * config.max_seq_len if config.pos_emb == "rope" else 0
        # four int64 columns of the stream
        a_row = 32 * batch.grad_accum_steps + weight_bytes * config.hidden_size
        rows = positions + batch.batch_size * config.max_seq_len * a_row
    return MemoryEstimate(-(-_STATE_BYTES * num_params(config) // dims.dp_shard), unit, dims.dp_shard, rows)


def available_memory(device: torch.device, local_world_size: int) -> int:
    """Bytes a rank may use: the GPU's total, or its share of what the machine and the cgroup leave."""
    if device.type == "cuda":
        return int(torch.cuda.get_device_properties(device).total_memory)
    limits = [limit for limit in (_free_ram(), _cgroup_limit()) if limit is not None]
    return min(limits, default=2**62) // local_world_size


def check_memory(estimate: MemoryEstimate, device: torch.device, local_world_size: int, variant: str) -> None:
    """Raises ValueError, one line with both figures and a remedy, where a rank cannot hold its part."""
    available = available_memory(device, local_world_size)
    if estimate.total <= available:
        return
    if estimate.rows > estimate.state + estimate.unit:
        raise ValueError(
            f"--seq_length and the batch ({estimate.rows / _GIB:.1f} GiB of rows and positions per rank) "
            f"must fit the {available / _GIB:.1f} GiB of memory available to it; lower one of --seq_length, "
            "--batch_size, --grad_accum_steps, --global_batch_size"
        )
    room = available - estimate.unit - estimate.rows
    all_state = estimate.state * estimate.dp_shard
    flags = "--model_variant, --num_layers, --hidden_size, --ffn_hidden_size, --vocab_size"
    remedy = f"choose a smaller model ({flags})"
    if room > 0:
        devices = -(-all_state // room)
        remedy = f"shard over at least {devices} such devices (--sharding_strategy=fsdp), or {remedy}"
    raise ValueError(
        f"--model_variant ({variant}: {estimate.total / _GIB:.1f} GiB per rank, {estimate.state / _GIB:.1f} "
        f"of weights, gradients and optimizer state, {estimate.unit / _GIB:.1f} unsharded) must fit the "
        f"{available / _GIB:.1f} GiB of memory available to it; {remedy}"
    )


def activation_bytes(config: LlamaConfig, rows: int, *, mixed_precision: bool) -> int:
    """About what the forward pass of `rows` keeps for the backward pass, without activation checkpointing.

    A block keeps per token its input, both norms, queries, keys, values and attention's output, and three
    widths of the feed-forward.
    """
    per_token = (
        6 * config.hidden_size + 2 * config.num_kv_heads * config.head_dim + 3 * config.ffn_hidden_size
    )
    return rows * config.max_seq_len * config.num_layers * per_token * (2 if mixed_precision else 4)


@contextmanager
def explaining_out_of_memory(
    section: ParallelConfig,
    config: LlamaConfig,
    dims: ParallelDims,
    batch_size: int,
    mixed_precision: bool,
    keep_name: str,
) -> Iterator[None]:
    """Inside, running out of memory ends the run with the flags that would help and about what each saves.

    Some of them are in the run's name, so that the same run goes on only under `keep_name`.

    Raises:
        RunFailed: memory ran out.
    """
    try:
        yield
    except (torch.OutOfMemoryError, MemoryError, RuntimeError) as error:
        if not isinstance(error, torch.OutOfMemoryError | MemoryError) and "can't allocate memory" not in str(
            error
        ):
            raise
        advice = "; ".join(_advice(section, config, dims, batch_size, mixed_precision))
        reason = f"out of memory ({str(error).splitlines()[0]}); what would help: {advice}"
        raise RunFailed(f"{reason}; to go on with this run add {keep_name}", on_one_rank=True) from error


def _advice(
    section: ParallelConfig, config: LlamaConfig, dims: ParallelDims, batch_size: int, mixed_precision: bool
) -> Iterator[str]:
    kept = activation_bytes(config, batch_size, mixed_precision=mixed_precision)
    state = estimate_memory(config, dims, mixed_precision=mixed_precision).state
    if section.fsdp_activation_checkpointing:
        share = float(parse_selective_checkpointing(section.selective_checkpointing))
        if share < 1:
            yield f"--selective_checkpointing=1 saves about {(1 - share) * kept / _GIB:.1f} GiB"
        kept = int(kept * (1 - share))
    else:
        inputs = kept * config.hidden_size // (6 * config.hidden_size + 3 * config.ffn_hidden_size)
        yield f"--fsdp_activation_checkpointing=True saves about {(kept - inputs) / _GIB:.1f} GiB"
    if batch_size > 1:
        yield (
            f"--batch_size={batch_size // 2} with twice the --grad_accum_steps saves about "
            f"{kept / 2 / _GIB:.1f} GiB"
        )
    yield f"--seq_length={config.max_seq_len // 2} saves about {kept / 2 / _GIB:.1f} GiB"
    if dims.size("dp") > dims.dp_shard:
        saved = state * (1 - dims.dp_shard / dims.size("dp"))
        yield f"--sharding_strategy=fsdp saves about {saved / _GIB:.1f} GiB of weights and optimizer state"
    yield f"twice the devices under fsdp save about {state / 2 / _GIB:.1f} GiB"
    if torch.cuda.is_available() and not section.cpu_offload:
        sharded = " --sharding_strategy=fsdp" if dims.strategy == "none" else ""
        yield f"--cpu_offload=True{sharded} moves about {state / _GIB:.1f} GiB to host memory"


def _free_ram() -> int | None:
    for line in _read("/proc/meminfo").splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    return None


def _cgroup_limit() -> int | None:
    """The smallest memory limit of this process's control group and its parents, version 1 or 2; None where
    there is none."""
    limits = []
    for line in ["0::/", "0:memory:/", *_read("/proc/self/cgroup").splitlines()]:
        _, controllers, path = line.split(":", 2)
        if controllers not in ("", "memory"):
            continue
        root, name = ("", "memory.max") if controllers == "" else ("memory", "memory.limit_in_bytes")
        folder = Path(path.lstrip("/"))
        for parent in (folder, *folder.parents):
            text = _read(Path("/sys/fs/cgroup", root, parent, name)).strip()
            if text.isdigit():
                limits.append(int(text))
    return min(limits, default=None)


def _read(path: str | Path) -> str:
    try:
        return Path(path).read_text()
    except OSError:
        return ""
