"""Will it fit: the least that a rank needs, against the bytes it has.

    needed    = (parameters, gradients and the optimizer's state) / (dp_shard x cp)
                + the weights that FSDP gathers: its largest unit, or all where they are kept
                + whole gradients, where they wait for the last micro-step
                + rows
    available = what is free of the GPU's memory, or min(cgroup limit, free RAM) / processes on this machine

Ranks of tp and pp have a share of the model (shares.py) in place of the whole.
Of the activations only the input of one block counts, and the host copy of a background save is left out:
a run that is refused here could not take its first step. What all blocks keep is told beside it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from fms_fsdp.config import FP32, NUM_BYTES, BatchPlan, ParallelConfig, Precision
from fms_fsdp.config.axes import ParallelDims
from fms_fsdp.config.rule import Rule, judge
from fms_fsdp.models.flops import num_params, num_params_by_unit
from fms_fsdp.models.variants import LlamaConfig
from fms_fsdp.parts import load_part

_ADAMW_BYTES = 8  # per parameter: two moments in fp32
_GIB = 2**30


@dataclass(frozen=True)
class MemoryEstimate:
    """Bytes of one rank: `state` is its share of weights, gradients and optimizer state, `unit` the
    weights gathered at once.

    `gradients`: whole ones, beyond the rank's share of them. `rows`: the table of positions, the rows of a
    step and what a block takes in at once. `activations`: what the blocks keep for the backward
    pass, no part of the total. `beside`: the most bytes of activations that a step holds while it
    holds the whole total. `params`: of the model, or of the share of a rank of tp and pp.
    """

    state: int
    unit: int
    dims: ParallelDims
    rows: int = 0
    gradients: int = 0
    activations: int = 0
    beside: int = 0
    params: int = 0

    @property
    def total(self) -> int:
        return self.state + self.unit + self.rows + self.gradients

    @property
    def expected(self) -> int:
        """The most that a step is expected to hold at once."""
        return self.total + self.beside

    def by_holder(self, device: torch.device, section: ParallelConfig) -> dict[torch.device, MemoryEstimate]:
        """What each device has to hold; with `cpu_offload` the state lies in host memory."""
        if not section.cpu_offload or device.type == "cpu":
            return {device: self}
        host = MemoryEstimate(self.state, 0, self.dims)
        return {torch.device("cpu"): host, device: replace(self, state=0, beside=self.activations)}


def estimate_memory(
    config: LlamaConfig,
    dims: ParallelDims,
    section: ParallelConfig,
    *,
    precision: Precision = FP32,
    batch: BatchPlan | None = None,
    seq_length: int = 0,
    optimizer_bytes: int | None = None,
) -> MemoryEstimate:
    """The least that a rank needs. Under `none` nothing is gathered; what computes in another dtype than
    that of weights casts one weight at a time.

    `optimizer_bytes`: of the optimizer's state of the whole model (default: AdamW's).
    """
    weight_bytes, units, whole = NUM_BYTES[precision.compute], num_params_by_unit(config), num_params(config)
    a_gradient, params, kept_part, shards = NUM_BYTES[precision.gradients], whole, 1.0, dims.size("shard")
    if dims.divides_model:
        part = load_part("shares", folder="predict")
        share = part.share_of(config, dims, section)
        units, params = share.units, share.params
        kept_part = 1.0 if batch is None else part.kept_activations(config, dims, section, batch)
    if dims.strategy == "none":
        casts = precision.compute != precision.weights
        unit = weight_bytes * units["embed"] if casts else 0  # the head's weight has that size too
    elif dims.keeps_weights:
        unit = weight_bytes * params
    else:
        # a tied embedding is in the root
        whole_ends = units["embed"] + units["head"] if config.tie_embeddings else 0
        group = units["block"] * min(section.fsdp_blocks_per_group, config.num_layers)
        unit = weight_bytes * max(*units.values(), group, whole_ends)
    rows = gradients = activations = beside = 0
    if batch is not None:
        if (batch.grad_accum_steps > 1 or dims.pp > 1) and not dims.sync_each_micro_step:
            # takes the place of the whole ones, part by part
            shard = a_gradient * params // shards
            gradients = max(0, NUM_BYTES[precision.reduce] * params - shard)
        positions = 8 * config.rotary_dim * config.max_seq_len
        tokens = batch.batch_size * seq_length
        at_once, cut = (section.pp_micro_batch_size * seq_length if dims.pp > 1 else tokens), dims.cp
        cut *= dims.tp if dims.sequence_parallel else 1
        # four int64 columns of the stream
        rows = positions + 32 * batch.grad_accum_steps * tokens
        rows += weight_bytes * config.hidden_size * at_once // cut
        of_all = activation_bytes(config, tokens, seq_length, precision, section)
        activations = int(kept_part * of_all)
        # gradients come as activations go, unless a micro-step before has left them
        going = a_gradient * params // shards if batch.grad_accum_steps == 1 else 0
        beside = max(0, activations - going)
    if optimizer_bytes is None:
        optimizer_bytes = _ADAMW_BYTES * whole
    kept = (NUM_BYTES[precision.weights] + a_gradient) * params
    state = -(-(kept + optimizer_bytes * params // whole) // shards)
    return MemoryEstimate(state, unit, dims, rows, gradients, activations, beside, params)


def available_memory(device: torch.device, local_world_size: int) -> int:
    """Bytes a rank may use: of a GPU what other programs leave, or its share of what the machine and the
    cgroup leave."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0] + torch.cuda.memory_reserved(device)
    limits = [limit for limit in (_free_ram(), _cgroup_limit()) if limit is not None]
    return min(limits, default=2**62) // local_world_size


@dataclass(frozen=True)
class Room:
    """What a rank needs of a device, the bytes that it may use there, and the name of the model."""

    need: MemoryEstimate
    device: torch.device
    available: int
    variant: str

    @property
    def suffices(self) -> bool:
        return self.need.total <= self.available

    @property
    def is_full_of_rows(self) -> bool:
        return 2 * self.need.rows > self.need.total

    @property
    def in_words(self) -> str:
        """What a rank may use, and what other programs use of a GPU, where that is much."""
        text = f"{self.available / _GIB:.1f} GiB of memory available to it"
        if self.device.type != "cuda":
            return text
        used = torch.cuda.mem_get_info(self.device)[1] - self.available
        return text if used < 2 * _GIB else f"{text}, beside {used / _GIB:.1f} GiB in use by other programs"

    @property
    def remedy(self) -> str:
        need, room = self.need, self.available - (self.need.total - self.need.state)
        flags = "--model_variant, --num_layers, --hidden_size, --ffn_hidden_size, --vocab_size"
        smaller = f"choose a smaller model ({flags})"
        if room > 0:
            devices = -(-need.state * need.dims.size("shard") // room)
            return f"shard over at least {devices} such devices (--sharding_strategy=fsdp), or {smaller}"
        if need.dims.strategy != "none" and need.dims.keeps_weights:
            by_block = "gather one block at a time (--sharding_strategy=fsdp, on several devices)"
            return f"{by_block}, or {smaller}"
        return smaller


def _facts(room: Room) -> Mapping[str, Any]:
    """The figures of messages on memory."""
    need = room.need
    return {
        "--seq_length and the batch": f"{need.rows / _GIB:.1f} GiB of rows and positions per rank",
        "model_variant": f"{room.variant}: {need.total / _GIB:.1f} GiB per rank, {need.state / _GIB:.1f} of "
        f"weights, gradients and optimizer state, {(need.unit + need.gradients) / _GIB:.1f} unsharded",
        "available": room.in_words,
        "remedy": room.remedy,
    }


FITS: tuple[Rule[Room], ...] = (
    Rule("--seq_length and the batch", lambda room: room.suffices or not room.is_full_of_rows,
        "must fit the {available}",
        "lower one of --seq_length, --batch_size, --grad_accum_steps, --global_batch_size",
        "seq_length batch_size grad_accum_steps global_batch_size", _facts),
    Rule("model_variant", lambda room: room.suffices,
        "must fit the {available}", "{remedy}", "sharding_strategy", _facts),
)  # fmt: skip


def check_memory(need: MemoryEstimate, device: torch.device, local_world_size: int, variant: str) -> None:
    """Raises UserError, one line with both figures and a remedy, where a rank cannot hold its part."""
    judge(FITS, Room(need, device, available_memory(device, local_world_size), variant), {})


def activation_bytes(
    config: LlamaConfig, num_tokens: int, seq_length: int, precision: Precision, section: ParallelConfig
) -> int:
    """About what the forward pass of a micro-step of so many tokens keeps for the backward pass, where blocks
    are compiled; without the compiler norms and casts keep up to half as much again.

    A block keeps per token its input, queries, keys, values, attention's output, what the feed-forward adds
    to and what its first products give; where nothing is recomputed also both norms and what the last product
    takes in; under dropout of attention the weights too, in fp32 before it and after. The result of the last
    product is never needed.
    """
    hidden, queries = config.hidden_size, config.num_attention_heads * config.head_dim
    keys = config.num_kv_heads * config.head_dim
    attention = 2 * queries + 2 * keys
    branches = (2 if config.activation == "swiglu" else 1) * config.ffn_hidden_size
    weights = 8 * config.num_attention_heads * seq_length if config.attn_dropout else 0
    number = NUM_BYTES[precision.compute]
    kept = number * (4 * hidden + attention + branches + config.ffn_hidden_size) + weights
    if section.recomputes == "cheap":
        sums = 1 if config.parallel_residual else 2
        kept = number * (sums * hidden + attention + branches) + weights
    elif section.recomputes == "ops":
        ops = section.recompute_ops
        products = 0
        if "products" in ops:
            products = queries + 2 * keys + hidden + branches
        elif "every_second_product" in ops:  # of q, k, v, o, gate, up, down, as activation.py counts
            products = keys + hidden + (config.ffn_hidden_size if config.activation == "swiglu" else 0)
        kept = number * (hidden + products + ("attention" in ops) * queries) + weights
    elif section.recomputes == "blocks":
        share = float(section.recomputed_share)
        kept = int(share * number * hidden + (1 - share) * kept)
    return num_tokens * config.num_layers * kept


def _free_ram() -> int | None:
    words = _read("/proc/meminfo").partition("MemAvailable:")[2].split()
    return int(words[0]) * 1024 if words else None


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
