"""The plan in words: for the log, for config.json and for checkpoints, and what a resumed run changes."""

from __future__ import annotations

import textwrap
from dataclasses import asdict
from pathlib import Path
from typing import Any

from fms_fsdp.checkpoint.checkpoints import SavePlan
from fms_fsdp.config import TrainConfig, as_dict
from fms_fsdp.models.flops import num_params
from fms_fsdp.optim.optimizers import STATE_BYTES
from fms_fsdp.run.plan import Plan
from fms_fsdp.run.recorded import working_folder
from fms_fsdp.run.resume import differences, schedule_jump
from fms_fsdp.runtime import log, versions


def resolved(plan: Plan) -> dict[str, Any]:
    """What config.json and a checkpoint say beyond the flags."""
    return {
        "world_size": plan.world.world_size,
        "device": str(plan.device.type),
        "layout": asdict(plan.dims),
        "batch": asdict(plan.batch) | {"global_batch_size": plan.batch.global_batch_size},
        "model": asdict(plan.model) | {"num_params": num_params(plan.model)},
        "mixed_precision": plan.mixed_precision,
        "num_steps": plan.num_steps,
        "versions": versions(),
        "working_dir": working_folder(),
    }


def describe(plan: Plan) -> str:
    """What a user wants to know before step 1, one line for each fact."""
    batch, dims = plan.batch, plan.dims
    tokens = batch.global_batch_size * plan.model.max_seq_len
    held_out = ", ".join(f"{source.group}/{source.name} {source.num_rows} rows" for source in plan.held_out)
    precision = "bf16 compute, fp32 master weights" if plan.mixed_precision else "fp32"
    lines = [
        f"model: {num_params(plan.model):,} parameters, {precision}",
        f"world: {plan.world.world_size} x {plan.device.type}, {dims.strategy}: "
        f"{dims.dp_replicate} replicas x {dims.dp_shard} shards",
        f"batch: {batch.batch_size} rows x {batch.dp_size} ranks x {batch.grad_accum_steps} micro-steps = "
        f"{batch.global_batch_size} rows = {tokens:,} tokens a step",
    ]
    if plan.corpus is not None:
        have, read = sum(source.num_tokens for source in plan.corpus.sources), tokens * plan.num_steps
        names = textwrap.shorten(", ".join(source.name for source in plan.corpus.sources), 40)
        lines.append(f"data: {names}: {have:,} tokens; the run reads {read:,}, {read / have:.2g} epochs")
    return "\n".join(lines + ([f"held out: {held_out}"] if held_out else []))


def announce(cfg: TrainConfig, plan: Plan) -> None:
    """Logs what the run starts from, and what this launch changes in it."""
    log.info(plan.begin.why)
    if not plan.continues:
        return
    assert plan.checkpoint is not None
    saved = plan.checkpoint.state["resolved"]["batch"]
    batch = asdict(plan.batch) | {"global_batch_size": plan.batch.global_batch_size}
    if batch != saved and batch["global_batch_size"] == saved["global_batch_size"]:
        shape = "{batch_size} rows x {dp_size} ranks x {grad_accum_steps} micro-steps"
        text = "batch: %s, before %s: the global batch stays %d rows"
        log.info(text, shape.format(**batch), shape.format(**saved), batch["global_batch_size"])
    for line in differences(cfg, resolved(plan), plan.begin):
        log.info(line)
    if jump := schedule_jump(cfg, plan.num_steps, plan.begin):
        log.warning(jump)


def plan_saves(cfg: TrainConfig, plan: Plan, attempt: int) -> SavePlan:
    """What the checkpoints of this launch need of its plan."""
    world, loaded = plan.world, plan.checkpoint
    bytes_saved = (4 + STATE_BYTES) * num_params(plan.model)
    return SavePlan(
        Path(cfg.ckpt_save_path),
        attempt,
        plan.begin.superseded,
        save_s=loaded.state.get("save_s") if loaded is not None else None,
        node_bytes=bytes_saved * world.local_world_size // world.world_size,
        record={"config": as_dict(cfg), "resolved": resolved(plan)},
        patience_s=min(5.0, cfg.parallel.collective_timeout_s / 4),
    )
