"""Published measurements of other programs, read into what the planner predicts (judge_plan.py).

Two headers are known: llm-foundry's table of MPT models, and runs of Llamas by torchtitan, fms-fsdp and
others. A file leaves things out; what is then taken is in `ASSUMED`, one line each.
"""

from __future__ import annotations

import csv
import re
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from fms_fsdp.config import NUM_BYTES, ParallelConfig, Precision
from fms_fsdp.distributed.dims import plan_dims
from fms_fsdp.distributed.world import World
from fms_fsdp.errors import UserError
from fms_fsdp.models.config import TransformerConfig
from fms_fsdp.models.variants import VARIANTS, canonical_variant
from fms_fsdp.predict.devices import Device, find_device
from fms_fsdp.predict.memory import Step, estimate_memory, held_by
from fms_fsdp.predict.meter import Cost, ModelSetup, cost
from fms_fsdp.predict.speed import slowest

ASSUMED = {
    "devices of a node": "8",
    "network of H100 nodes": "400 Gb/s for each device; of A100 nodes 200 Gb/s, as one table says",
    "MPT: program": "eager, whole logits, the first flash kernels, FSDP1 with sums of gradients in bf16",
    "MPT: amp_fp8": "products of blocks in float8, everything else in bf16",
    "MPT: act_ckpt": "whole blocks, the last product too",
    "Llama: dp_shard that is a word": "fsdp over all devices, or hsdp over the 8 of a node",
    "Llama: selective (op)": "attention and every second product are kept",
    "Llama: tensor parallel": "with sequence parallelism and overlapped messages, if the source says async",
    "Llama: pipeline": "interleaved, a row at a time, if the source does not say",
    "Llama: whole logits": "in fp32, as torchtitan computes its loss; of fms-fsdp too",
    "Llama: peak memory": "what the allocator reserved: 1.23 times what is held, as in the four known rows",
}
DEVICES_PER_NODE = 8
RESERVED = (
    1.23  # times what is held at once: torch's allocator keeps what was freed, while there is room
)


@dataclass(frozen=True)
class Program:
    """How the program of the source computes, as far as it differs from this one on a GPU.

    repeats_all   a recomputed block repeats its last matmul too, whose result nothing needs
    fuses_float8  all matmuls of blocks are in float8, and casts are part of other kernels
    """

    old_attention: bool = False
    repeats_all: bool = False
    fuses_float8: bool = False


@dataclass(frozen=True)
class Published:
    """A row: what ran, and what was measured. `step` is None if the row has no local batch."""

    name: str
    size: str
    step: Step | None
    device: Device
    program: Program
    tokens_per_s: float
    peak_gib: float | None

    @cached_property
    def computed(self) -> Cost:
        """The cost of a micro-batch on the rank that computes longest, by the source's program."""
        assert self.step is not None
        shape, rows = self.step.setup, self.step.micro_batch
        place, total = slowest(self.step)
        held = held_by(shape, place)
        flops, config = total.flops.copy(), shape.config
        if self.program.old_attention:
            flops["old attention"] = flops.pop("attention")
        if self.program.repeats_all:
            width = config.hidden_size * config.ffn_hidden_size
            flops["bfloat16"] += 2 * held.recomputed * rows * shape.seq_length * width
        if self.program.fuses_float8:
            head = cost(shape, "head", rows).flops["bfloat16"]
            flops["float8_e4m3fn"] = flops["bfloat16"] - head
            flops["bfloat16"] = head
        return replace(total, flops=flops)


def read_published(path: Path) -> list[Published]:
    """The rows of a table; columns may come in any order.

    Raises:
        UserError: the header is none of the two, or a row cannot be read.
    """
    with path.open(newline="", encoding="utf-8") as file:
        rows = list(csv.DictReader(file, delimiter="\t"))
    if not rows:
        raise UserError(f"FILE ({path}) must have a header and rows; it has none")
    read = (
        _read_mpt if "micro_batch" in rows[0] else _read_llama if "local_batch" in rows[0] else None
    )
    if read is None or "tokens_per_s_per_gpu" not in rows[0]:
        raise UserError(
            f"FILE ({path}) must have the columns of a published table; it has {', '.join(rows[0])}"
        )
    found = []
    for number, row in enumerate(rows, 2):
        try:
            found.append(read(row))
        except (KeyError, ValueError, TypeError) as error:
            raise UserError(f"FILE ({path}), line {number}, cannot be read: {error!r}") from error
    return found


def _count(row: dict[str, str], name: str) -> int:
    """A column that counts something.

    Raises:
        ValueError: it is no whole number above 0.
    """
    if (number := int(row[name])) < 1:
        raise ValueError(f"{name} must be at least 1")
    return number


def _read_mpt(row: dict[str, str]) -> Published:
    hidden, heads, length = (
        _count(row, name) for name in ("hidden_size", "num_heads", "seq_length")
    )
    model = TransformerConfig(
        _count(row, "num_layers"),
        hidden,
        4 * hidden,
        heads,
        heads,
        50368,
        norm="layernorm",
        pos_emb="learned",
        activation="gelu",
        bias=True,
        tie_embeddings=True,
        max_seq_len=length,
    )
    pure = row["precision"] == "bf16"
    precision = Precision("bf16", reduce="bf16")
    if pure:
        precision = replace(precision, weights="bf16", gradients="bf16", state="bf16")
    strategy = {"FULL_SHARD": "fsdp", "SHARD_GRAD_OP": "zero2"}[row["sharding"]]
    recompute = "blocks" if row["act_ckpt"] == "True" else "none"
    section = ParallelConfig(sharding_strategy=strategy, recompute=recompute)
    devices = _count(row, "num_gpus")
    dims = plan_dims(section, "", World(0, 0, devices, min(devices, DEVICES_PER_NODE)))
    rows, accum = _count(row, "micro_batch"), _count(row, "grad_accum")
    program = Program(True, True, fuses_float8=row["precision"] == "amp_fp8")
    shape = ModelSetup(model, section, precision, dims, length, compiled=False)
    step, device = Step(shape, rows, accum), find_device(row["gpu"])
    name = f"{row['model']} x {devices} {row['gpu']}, {rows} x {length}, {row['precision']}"
    name += ", recomputed" if recompute == "blocks" else ""
    return Published(
        name, row["model"], step, device, program, float(row["tokens_per_s_per_gpu"]), None
    )


def _read_llama(row: dict[str, str]) -> Published:
    devices, length = _count(row, "num_gpus"), _count(row, "seq_length")
    name = f"{row['model']} x {devices} {row['gpu']}, {row['local_batch'] or '?'} x {length}, {row['precision']}"
    axes: dict[str, Any] = {f"{axis}_size": int(row[axis] or 1) for axis in ("tp", "cp", "pp")}
    name += "".join(f", {axis[:2]} {size}" for axis, size in axes.items() if size > 1)
    peak = float(row["peak_mem_gib"]) if row.get("peak_mem_gib") else None
    tokens_per_s, size = float(row["tokens_per_s_per_gpu"]), row["model"]
    device = find_device(row["gpu"])
    if not row["local_batch"]:
        return Published(name, size, None, device, Program(), tokens_per_s, peak)
    text, source = row["act_ckpt"].lower(), row.get("source", "").lower()
    kind = (
        "ops"
        if text.startswith("selective (op")
        else "blocks"
        if text.startswith(("full", "sel"))
        else "none"
    )
    if every := re.search(r"every (\d+)", text):
        axes["selective_checkpointing"] = f"1/{every[1]}" if kind == "blocks" else "1"
    sharded = row["dp_shard"]
    is_hsdp = sharded == "hsdp"
    if not sharded.isdigit():
        shards = DEVICES_PER_NODE if is_hsdp else devices
    else:
        shards = int(sharded)
        rest = devices // (axes["tp_size"] * axes["cp_size"] * axes["pp_size"])
        is_hsdp = shards < rest
    strategy = "none" if devices == 1 else "hsdp" if is_hsdp else "fsdp"
    section = ParallelConfig(
        sharding_strategy=strategy,
        hsdp_shard_size=shards if is_hsdp else None,
        recompute=kind,
        recompute_ops=("attention", "every_second_matmul"),  # of rows of 8,192 tokens too
        async_tp="async" in source,
        pp_schedule="interleaved" if axes["pp_size"] > 1 else "1f1b",
        **axes,
    )
    dims = plan_dims(section, "", World(0, 0, devices, min(devices, DEVICES_PER_NODE)))
    precision = Precision("bf16", float8="tensor" if row["precision"].startswith("float8") else "")
    if "moments" in row["precision"]:
        precision = replace(precision, weights="bf16", gradients="bf16", state="bf16")
    model = replace(VARIANTS[canonical_variant(size)], max_seq_len=length)
    shape = ModelSetup(model, section, precision, dims, length, compiled=row["compile"] == "yes")
    rows = _count(row, "local_batch")
    step = Step(shape, rows, 1)
    return Published(f"{name}, {kind}", size, step, device, Program(), tokens_per_s, peak)


@dataclass(frozen=True)
class Peak:
    """Bytes of a rank of the source's program: the maximum that it holds, with fragments that cannot
    be used, and the bytes that torch's allocator reserves for it, as the reports state."""

    needed: int
    reserved: int


def peak_of(row: Published) -> Peak:
    """Returns the predicted peak; the source's logits are whole.

    torchtitan holds the fp32 softmax, the gradient at the labels and that of the logits at once; the fused
    loss of llm-foundry writes the gradient of bf16 logits in place.
    """
    step = row.step
    assert step is not None
    shape, rows = step.setup, step.micro_batch
    moments = 2 * NUM_BYTES[shape.precision.state]
    need = estimate_memory(replace(step, optimizer_bytes=moments))
    a_logit = 4 if row.program.old_attention else 12
    tokens = rows * shape.seq_length // shape.dims.cp
    at_loss = need.activations + a_logit * tokens * shape.config.padded_vocab_size // shape.dims.tp
    if step.accum == 1:
        at_loss -= need.gradients  # there are none yet
    held = need.total - need.allocator + max(0, at_loss - need.activations - need.working)
    reserved = min(int(RESERVED * held), row.device.memory_bytes)
    return Peak(held + need.allocator, reserved)
