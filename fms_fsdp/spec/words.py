"""A launch in words: what it is, what it starts from, and what it changes in a run that goes on."""

from __future__ import annotations

import textwrap
from itertools import pairwise
from pathlib import Path

import torch

from fms_fsdp.checkpoint.checkpoints import SavePlan
from fms_fsdp.checkpoint.retention import KeepPolicy, parse_schedule
from fms_fsdp.config import BatchPlan, ParallelConfig, Precision
from fms_fsdp.config.axes import AXES, JOINED, ParallelDims
from fms_fsdp.config.ramp import BatchIntervals
from fms_fsdp.config.values import plain
from fms_fsdp.models.attention import chosen_backend
from fms_fsdp.models.flops import num_params
from fms_fsdp.models.variants import LlamaConfig
from fms_fsdp.optim.optimizers import checkpoint_bytes
from fms_fsdp.parallel.precision import DTYPES
from fms_fsdp.parts import load_part
from fms_fsdp.predict.communication import bytes_sent
from fms_fsdp.predict.memory import MemoryEstimate
from fms_fsdp.predict.room import available_memory
from fms_fsdp.runtime import log, log_for_files
from fms_fsdp.spec.advice import warning_of_memory
from fms_fsdp.spec.difference import differences, schedule_jump
from fms_fsdp.spec.resolve import Spec

_MOST_COUNTED = 10_000  # saves


def describe(spec: Spec) -> str:
    """What a user wants to know before step 1, one line for each fact."""
    cfg, batch, dims = spec.config, spec.batch, spec.dims
    tokens = batch.global_batch_size * spec.seq_length
    ramp = f", from {batch.ramp.batch(0)} rows on over {batch.ramp.samples:,} samples" if batch.rampup else ""
    held_out = ", ".join(f"{source.group}/{source.name} {source.num_rows} rows" for source in spec.held_out)
    precision = spec.precision.in_words
    if spec.device.type == "cuda":
        dtype = DTYPES[spec.precision.compute]
        flex = cfg.data.document_mask or any(spec.model.windows) or spec.model.pos_emb == "alibi"
        kernel = "flex" if flex else chosen_backend(spec.model, dtype, spec.device)
        kernel = "biased" if spec.model.pos_emb == "relative" else kernel
        precision += f", {kernel} attention"
    lines = [
        f"model: {num_params(spec.model):,} parameters, feed-forward width {spec.model.ffn_hidden_size}, "
        f"{precision}",
        f"world: {spec.world.world_size} x {spec.device.type}, {dims.strategy}: {describe_axes(dims)}",
        describe_sharding(
            spec.model, spec.memory(cfg.parallel), spec.precision, batch, cfg.parallel, spec.seq_length
        ),
        f"batch: {batch.batch_size} rows x {batch.dp_size} ranks x {batch.grad_accum_steps} micro-steps = "
        f"{batch.global_batch_size} rows = {tokens:,} tokens a step{ramp}",
    ]
    lines += [f"{name}: {why}" for name, why in spec.chosen.items()]
    if spec.model.attn_dropout:
        weights = batch.batch_size * spec.model.num_attention_heads * spec.seq_length**2
        lines.append(
            f"attention: dropout keeps all weights, {plain(4 * weights / 2**30, 2)} GiB a layer and copy"
        )
    if spec.inputs.corpus is not None:
        have = sum(source.num_tokens for source in spec.inputs.corpus.sources)
        read = spec.timeline.tokens_at(spec.num_steps)
        names = textwrap.shorten(", ".join(source.name for source in spec.inputs.corpus.sources), 40)
        lines.append(
            f"data: {names}: {have:,} tokens; the run reads {read:,}, {plain(read / have, 2)} epochs"
        )
    lines += [f"length: {spec.epochs}"] if spec.epochs else []
    lines += [f"held out: {held_out}"] if held_out else []
    return "\n".join(filter(None, [*lines, describe_saves(spec)]))


def describe_saves(spec: Spec) -> str:
    """A line for the size of a checkpoint and of all that the launch will keep; "" if it saves none."""
    section, last = spec.config.checkpoint, spec.num_steps
    schedule = parse_schedule(section.checkpoint_schedule, section.checkpoint_interval)
    steps, due = list[int](), schedule.next_after(spec.start)
    while due is not None and due < last and len(steps) < _MOST_COUNTED:
        steps.append(due)
        due = schedule.next_after(due)
    steps += [last] if section.save_last or schedule.is_due(last) else []
    if not steps:
        return ""
    gib = checkpoint_bytes(spec.config.optim, spec.model, spec.precision) / 2**30
    deleted = len(KeepPolicy.of(section).to_delete(steps, {}))  # and `keep_best` of these stay
    kept = len(steps) - max(0, deleted - section.keep_best)
    more = "more than " * (len(steps) > _MOST_COUNTED)
    return (
        f"checkpoints: {plain(gib)} GiB each; {more}{len(steps):,} are to be written, at most {kept:,} stay, "
        f"which take {plain(gib * kept)} GiB"
    )


def describe_axes(dims: ParallelDims) -> str:
    """The axes from the outermost to the innermost; those of the model only where they have several ranks."""
    words = {
        "pp": "pipeline",
        "dp_replicate": "replicas",
        "dp_shard": "shards",
        "cp": "context",
        "tp": "tensor",
    }
    shown = [axis for axis in AXES if axis in JOINED["dp"] or dims.size(axis) > 1]
    return " x ".join(f"{dims.size(axis)} {words[axis]}" for axis in shown)


def axes_across_nodes(dims: ParallelDims, local_world_size: int) -> str:
    """A sentence on the axes whose groups are not within a node, though they send much; else nothing."""
    spans = {"tp": dims.tp, "cp": dims.cp * dims.tp}
    if dims.strategy == "hsdp":
        spans["dp_shard"] = dims.dp_shard * dims.cp * dims.tp
    across = [axis for axis, span in spans.items() if dims.size(axis) > 1 and local_world_size % span]
    if not across:
        return ""
    text = f"groups of {', '.join(across)} leave the node, which has {local_world_size} devices"
    return f"{text}: their messages take the slower way; smaller axes, or --pp_size, stay inside"


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
    model: LlamaConfig,
    need: MemoryEstimate,
    precision: Precision,
    batch: BatchPlan,
    section: ParallelConfig,
    seq_length: int,
) -> str:
    """A line for the memory of a rank, and one for what it sends in a step, where it sends anything."""
    dims, share = need.dims, None
    gradients = need.state - need.weights - need.optimizer + need.gradients
    held = need.weights, need.unit, gradients, need.optimizer, need.activations
    sizes = [plain(size / 2**30) for size in held[:-1]] + [plain(held[-1] / 2**30, 2)]
    text = "weights {}, gathered {}, gradients {}, optimizer {}, activations {}"
    sent = dict[str, int]()
    if dims.divides_model:
        part = load_part("shares", folder="predict")
        share = part.share_of(model, dims, section)
        sent = part.axis_bytes(model, dims, section, precision, batch, seq_length)
    sent |= bytes_sent(model, dims, precision, batch.grad_accum_steps, share)
    over = ", ".join(f"{axis} {plain(size / 2**30)}" for axis, size in sent.items())
    lines = [f"GiB a rank: {text.format(*sizes)}", f"GiB sent by a rank in a step: {over}"]
    return "\n".join(lines[: 1 + bool(sent)])


def announce(spec: Spec) -> None:
    """Logs what the run starts from, and what this launch changes in it."""
    origin, timeline, last = spec.origin, spec.timeline, spec.num_steps
    for warning in (warning_of_memory(spec), axes_across_nodes(spec.dims, spec.world.local_world_size)):
        if warning:
            log.warning(warning)
    log.info(origin.why)
    log_for_files("versions: " + ", ".join(f"{name} {text}" for name, text in spec.versions.items()))
    log_for_files(describe_schedule(spec))
    if spec.batch.rampup:
        log_for_files(describe_ramp(timeline.batches, spec.start, timeline.rows_at_start))
    if not origin.continues:
        return
    now, before = spec.batch, origin.saved.record.batch
    if now != before and now.global_batch_size == before.global_batch_size:
        text = "batch: %s, before %s: the global batch stays %d rows"
        log.info(text, _shape(now), _shape(before), now.global_batch_size)
    for line in differences(spec, origin):
        log.info(line)
    if jump := schedule_jump(spec, origin):
        log.warning(jump)
    unit, end = ("token", timeline.tokens_at(last)) if spec.corners.in_tokens else ("step", last)
    falls = spec.config.optim.lr_schedule != "constant"
    if last > origin.saved.record.num_steps and falls and spec.corners.decay_end < end:
        text = "note: the learning rate falls no more from %s %d on; --lr_decay=%d decays to the end"
        log.info(text, unit, spec.corners.decay_end, last)


def _shape(batch: BatchPlan) -> str:
    return f"{batch.batch_size} rows x {batch.dp_size} ranks x {batch.grad_accum_steps} micro-steps"


def describe_schedule(spec: Spec) -> str:
    """The corners of the learning rate in steps, samples and tokens, by the batch of this launch."""
    corners = spec.corners

    def shown(place: int) -> str:
        step, tokens = (
            (spec.timeline.step_at(place), place)
            if corners.in_tokens
            else (place, spec.timeline.tokens_at(place))
        )
        return f"step {step:,} ({tokens // spec.seq_length:,} samples, {tokens:,} tokens)"

    parts = {"warm-up to": corners.warmup, "decay from": corners.decay_start, "to": corners.decay_end}
    text = ", ".join(f"{word} {shown(place)}" for word, place in parts.items())
    return f"learning rate: {spec.config.optim.lr_schedule}, {text}"


def plan_saves(spec: Spec, attempt: int) -> SavePlan:
    """What the checkpoints of this launch need to know."""
    cfg, loaded = spec.config, spec.origin.checkpoint
    size, ranks = checkpoint_bytes(cfg.optim, spec.model, spec.precision), spec.world.local_world_size
    return SavePlan(
        Path(cfg.ckpt_save_path),
        attempt,
        spec.origin.superseded,
        save_s=loaded.saved.save_s if loaded is not None else None,
        node_bytes=size * ranks // spec.world_size,
        record=spec,
        patience_s=min(5.0, cfg.parallel.collective_timeout_s / 4),
        host_bytes=available_memory(torch.device("cpu"), ranks),
    )
