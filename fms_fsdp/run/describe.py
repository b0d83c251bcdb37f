"""The plan in words: for the log, for config.json and for checkpoints, and what a resumed run changes."""

from __future__ import annotations

import textwrap
from dataclasses import asdict
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch

from fms_fsdp.checkpoint.checkpoints import SavePlan
from fms_fsdp.config import NUM_BYTES, BatchPlan, Precision, TrainConfig, as_dict
from fms_fsdp.config.ramp import BatchIntervals
from fms_fsdp.config.values import plain
from fms_fsdp.models.attention import chosen_backend
from fms_fsdp.models.flops import num_params
from fms_fsdp.models.variants import LlamaConfig
from fms_fsdp.optim.optimizers import checkpoint_bytes
from fms_fsdp.parallel.precision import DTYPES
from fms_fsdp.predict.communication import bytes_sent
from fms_fsdp.predict.memory import MemoryEstimate, available_memory
from fms_fsdp.run.out_of_memory import warning_of_memory
from fms_fsdp.run.plan import Plan
from fms_fsdp.run.recorded import working_folder
from fms_fsdp.run.resume import differences, schedule_jump
from fms_fsdp.runtime import log, log_for_files, versions


def resolved(plan: Plan) -> dict[str, Any]:
    """What config.json and a checkpoint say beyond the flags."""
    return {
        "world_size": plan.world.world_size,
        "device": str(plan.device.type),
        "layout": asdict(plan.dims),
        "batch": asdict(plan.batch) | {"global_batch_size": plan.batch.global_batch_size},
        "model": asdict(plan.model) | {"num_params": num_params(plan.model)},
        "precision": asdict(plan.precision),
        "num_steps": plan.num_steps,
        "tokenizer": plan.corpus.tokenizer if plan.corpus is not None else "",
        "schedule": asdict(plan.schedule.corners),
        "versions": versions(),
        "working_dir": working_folder(),
    }


def describe(cfg: TrainConfig, plan: Plan) -> str:
    """What a user wants to know before step 1, one line for each fact."""
    batch, dims = plan.batch, plan.dims
    tokens = batch.global_batch_size * plan.seq_length
    ramp = f", from {batch.ramp.start} rows on over {batch.ramp.samples:,} samples" if batch.rampup else ""
    held_out = ", ".join(f"{source.group}/{source.name} {source.num_rows} rows" for source in plan.held_out)
    precision = plan.precision.in_words
    if plan.device.type == "cuda":
        dtype = DTYPES[plan.precision.compute]
        flex = cfg.data.document_mask or any(plan.model.windows) or plan.model.pos_emb == "alibi"
        kernel = "flex" if flex else chosen_backend(plan.model, dtype, plan.device)
        precision += f", {kernel} attention"
    lines = [
        f"model: {num_params(plan.model):,} parameters, feed-forward width {plan.model.ffn_hidden_size}, "
        f"{precision}",
        f"world: {plan.world.world_size} x {plan.device.type}, {dims.strategy}: "
        f"{dims.dp_replicate} replicas x {dims.dp_shard} shards",
        describe_sharding(plan.model, plan.memory(cfg.parallel), plan.precision, batch, plan.optimizer_bytes),
        f"batch: {batch.batch_size} rows x {batch.dp_size} ranks x {batch.grad_accum_steps} micro-steps = "
        f"{batch.global_batch_size} rows = {tokens:,} tokens a step{ramp}",
    ]
    if plan.model.attn_dropout:
        weights = batch.batch_size * plan.model.num_attention_heads * plan.seq_length**2
        lines.append(
            f"attention: dropout keeps all weights, {plain(4 * weights / 2**30, 2)} GiB a layer and copy"
        )
    if plan.corpus is not None:
        have = sum(source.num_tokens for source in plan.corpus.sources)
        read = plan.tokens_at(plan.num_steps)
        names = textwrap.shorten(", ".join(source.name for source in plan.corpus.sources), 40)
        lines.append(
            f"data: {names}: {have:,} tokens; the run reads {read:,}, {plain(read / have, 2)} epochs"
        )
    lines += [f"length: {plan.epochs}"] if plan.epochs else []
    return "\n".join(lines + ([f"held out: {held_out}"] if held_out else []))


def describe_ramp(batches: BatchIntervals, start: int = 0, rows_seen: int = 0) -> str:
    """The batches of the steps after `start`, a line each: how many steps each lasts, and up to where."""
    lines = [f"batch ramp from step {start + 1} on, {rows_seen:,} rows seen:"]
    for interval, following in pairwise(batches.intervals):
        lines.append(
            f"  {interval.batch:,} rows for {following.step - interval.step:,} steps, to step "
            f"{start + following.step:,} and {rows_seen + following.row:,} rows"
        )
    return "\n".join([*lines, f"  {batches.intervals[-1].batch:,} rows from there on"])


def describe_sharding(
    model: LlamaConfig, need: MemoryEstimate, precision: Precision, batch: BatchPlan, optimizer_bytes: int
) -> str:
    """A line for the memory of a rank, and one for what it sends in a step, where it sends anything."""
    share = num_params(model) / need.dims.dp_shard
    weights, gradients = (NUM_BYTES[dtype] * share for dtype in (precision.weights, precision.gradients))
    state = optimizer_bytes / need.dims.dp_shard
    held = weights, need.unit, gradients + need.gradients, state, need.activations
    sizes = [plain(size / 2**30) for size in held[:-1]] + [plain(held[-1] / 2**30, 2)]
    text = "weights {}, gathered {}, gradients {}, optimizer {}, activations {}"
    sent = bytes_sent(model, need.dims, precision, batch.grad_accum_steps)
    over = ", ".join(f"{axis} {plain(size / 2**30)}" for axis, size in sent.items())
    lines = [f"GiB a rank: {text.format(*sizes)}", f"GiB sent by a rank in a step: {over}"]
    return "\n".join(lines[: 1 + bool(sent)])


def announce(cfg: TrainConfig, plan: Plan) -> None:
    """Logs what the run starts from, and what this launch changes in it."""
    if warning := warning_of_memory(cfg.parallel, plan):
        log.warning(warning)
    log.info(plan.begin.why)
    log_for_files(describe_schedule(plan))
    if plan.batch.rampup:
        log_for_files(describe_ramp(plan.batches, plan.start, plan.rows_at_start))
    if not plan.continues:
        return
    now, before = resolved(plan), plan.begin.state["resolved"]
    batch, saved = now["batch"], before["batch"]
    changed = any(batch[name] != saved.get(name) for name in ("batch_size", "grad_accum_steps", "dp_size"))
    if changed and batch["global_batch_size"] == saved["global_batch_size"]:
        shape = "{batch_size} rows x {dp_size} ranks x {grad_accum_steps} micro-steps"
        text = "batch: %s, before %s: the global batch stays %d rows"
        log.info(text, shape.format(**batch), shape.format(**saved), batch["global_batch_size"])
    for line in differences(cfg, now, plan.begin):
        log.info(line)
    if jump := schedule_jump(plan.schedule, plan.begin):
        log.warning(jump)
    corners, last = plan.schedule.corners, plan.num_steps
    unit, end = ("token", plan.tokens_at(last)) if corners.in_tokens else ("step", last)
    falls = plan.schedule.section.lr_schedule != "constant"
    if last > before["num_steps"] and falls and corners.decay_end < end:
        text = "note: the learning rate falls no more from %s %d on; --lr_decay=%d decays to the end"
        log.info(text, unit, corners.decay_end, last)


def describe_schedule(plan: Plan) -> str:
    """The corners of the learning rate in steps, samples and tokens, by the batch of this launch."""
    corners = plan.schedule.corners

    def shown(place: int) -> str:
        step, tokens = (plan.step_at(place), place) if corners.in_tokens else (place, plan.tokens_at(place))
        return f"step {step:,} ({tokens // plan.seq_length:,} samples, {tokens:,} tokens)"

    parts = {"warm-up to": corners.warmup, "decay from": corners.decay_start, "to": corners.decay_end}
    text = ", ".join(f"{word} {shown(place)}" for word, place in parts.items())
    return f"learning rate: {plan.schedule.section.lr_schedule}, {text}"


def plan_saves(cfg: TrainConfig, plan: Plan, attempt: int) -> SavePlan:
    """What the checkpoints of this launch need of its plan."""
    world, loaded = plan.world, plan.checkpoint
    bytes_saved = checkpoint_bytes(cfg.optim, plan.model, plan.precision)
    return SavePlan(
        Path(cfg.ckpt_save_path),
        attempt,
        plan.begin.superseded,
        save_s=loaded.state.get("save_s") if loaded is not None else None,
        node_bytes=bytes_saved * world.local_world_size // world.world_size,
        record={"config": as_dict(cfg), "resolved": resolved(plan)},
        patience_s=min(5.0, cfg.parallel.collective_timeout_s / 4),
        host_bytes=available_memory(torch.device("cpu"), world.local_world_size),
    )
