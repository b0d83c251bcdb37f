"""The log before step 1: model, devices, memory, batch, data, checkpoints, resume."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import suppress
from itertools import pairwise
from typing import TYPE_CHECKING

import torch

from fms_fsdp.checkpoint.retention import KeepPolicy, parse_schedule
from fms_fsdp.config import BatchPlan, PrecisionConfig
from fms_fsdp.config.values import counted, plain
from fms_fsdp.data.corpus import Corpus
from fms_fsdp.data.inspection import sources_without_labels
from fms_fsdp.data.shards import ShardError
from fms_fsdp.data.stream import Stream, TokenStream
from fms_fsdp.distributed.axes import AXES, JOINED, ParallelDims
from fms_fsdp.distributed.runtime import log, log_for_files
from fms_fsdp.models.flops import num_params
from fms_fsdp.optim.schedules import DECAY_TO_END
from fms_fsdp.predict.memory import GIB, checkpoint_bytes
from fms_fsdp.run.machine import Machine, available_memory
from fms_fsdp.run.memory import MemoryBudget, PredictionFailed, predicting
from fms_fsdp.run.resume import ResumePoint, learning_rate_jump, list_changes
from fms_fsdp.state import RunConfig, TrainMetadata

if TYPE_CHECKING:
    from fms_fsdp.data.validation import HeldOut

_MOST_COUNTED = 10_000  # saves


def describe(
    run: RunConfig,
    budget: MemoryBudget,
    stream: Stream,
    held_out: Sequence[HeldOut] = (),
    start: int = 0,
) -> str:
    """Returns the facts of a run before step `start` + 1, one per line."""
    batch = run.batch
    dims = run.dims
    tokens = batch.global_batch_size * run.seq_length
    ramp = ""
    if batch.rampup:
        ramp = f", from {batch.batch_at(0)} sequences over {batch.rampup[2]:,} samples"
    lines = [
        f"model: {num_params(run.model):,} parameters, feed-forward width "
        f"{run.model.ffn_hidden_size}, {_precision(run)}",
        f"devices: {run.world_size} x {run.device_type}, {dims.strategy}: {describe_axes(dims)}",
        *describe_memory(run, budget),
        f"batch: {batch.factors} = {counted(batch.global_batch_size, 'sequence')} = {tokens:,} tokens "
        f"per step{ramp}",
        *(f"{name}: {reason}" for name, reason in run.chosen.items()),
    ]
    if run.model.attn_dropout:
        weights = batch.batch_size * run.model.num_attention_heads * run.seq_length**2
        size = plain(4 * weights / GIB, 2)
        lines.append(f"attention: dropout keeps all weights, {size} GiB per layer and copy")
    if isinstance(stream, TokenStream) and not run.config.data.use_dummy_dataset:
        lines += describe_sources(stream, run.num_steps)
    if (epochs := run.config.training.epochs()) is not None:
        source, number = epochs
        counted_in = f"source {source}" if source else "all sources together"
        lines.append(f"length: {number:g} epochs of {counted_in} end with step {run.num_steps:,}")
    if held_out:
        sources = (f"{each.group}/{each.name} {each.num_rows} sequences" for each in held_out)
        lines.append(f"validation: {', '.join(sources)}")
    return "\n".join(filter(None, [*lines, describe_saves(run, start)]))


def describe_memory(run: RunConfig, budget: MemoryBudget) -> Iterator[str]:
    """Yields the memory of a rank, and the bytes that it sends in a step."""
    try:
        yield budget.need(run).summary
        if run.world_size == 1:
            return
        from fms_fsdp.predict.speed import sent, sent_summary

        with predicting():
            yield sent_summary(sent(budget.step(run)))
    except PredictionFailed as error:
        yield f"memory: unknown ({error.reason})"


def describe_sources(stream: TokenStream, num_steps: int) -> Iterator[str]:
    """Yields a line for each source: its tokens, its weight, and how often it is read to the end."""
    used = stream.consumption(num_steps)
    sources = stream.corpus.sources
    total = sum(source.weight for source in sources)
    for source in sources:
        tokens = used[source.name]["tokens"]
        epochs = used[source.name]["epoch"]
        yield (
            f"source {source.name}: {source.num_tokens:,} tokens, weight "
            f"{plain(source.weight / total, 4)}; {tokens:,} tokens ({plain(epochs, 2)} epochs) are "
            f"read to step {num_steps:,}"
        )


def _precision(run: RunConfig) -> str:
    if run.device_type != "cuda":
        return run.precision.summary
    model = run.model
    kernel = model.attn_impl
    if model.pos_emb in ("alibi", "relative"):
        kernel = "biased"
    elif run.config.data.document_mask or any(model.windows):
        kernel = "flex"
    return f"{run.precision.summary}, {kernel} attention"


def describe_saves(run: RunConfig, start: int) -> str:
    """Returns the size of a checkpoint and of all that the launch keeps; "" if it saves none."""
    flags = run.config.checkpoint
    last = run.num_steps
    schedule = parse_schedule(flags.checkpoint_schedule, flags.checkpoint_interval)
    steps = list[int]()
    due = schedule.next_after(start)
    while due is not None and due < last and len(steps) < _MOST_COUNTED:
        steps.append(due)
        due = schedule.next_after(due)
    steps += [last] if flags.save_last or schedule.is_due(last) else []
    if not steps:
        return ""
    gib = checkpoint_bytes(run) / GIB
    policy = KeepPolicy.from_config(flags)
    deleted = len(policy.to_delete({step: TrainMetadata(step) for step in steps}))
    kept = len(steps) - max(0, deleted - flags.keep_best)  # `keep_best` of these remain
    more = "more than " * (len(steps) > _MOST_COUNTED)
    return (
        f"checkpoints: {plain(gib)} GiB each; {more}{len(steps):,} planned, at most {kept:,} "
        f"kept ({plain(gib * kept)} GiB)"
    )


def describe_axes(dims: ParallelDims) -> str:
    """Returns the axes from the outermost to the innermost; axes of the model only if they are on."""
    names = {
        "pp": "pipeline",
        "dp_replicate": "replica",
        "dp_shard": "shard",
        "cp": "context",
        "tp": "tensor",
    }
    shown = {axis: dims.size(axis) for axis in AXES if axis in JOINED["dp"] or dims.size(axis) > 1}
    return " x ".join(
        counted(size, names[axis]) if axis in JOINED["dp"] else f"{size} {names[axis]}"
        for axis, size in shown.items()
    )


def axes_across_nodes(dims: ParallelDims, local_world_size: int) -> str:
    """Returns a warning if an axis with much communication leaves the node; else ""."""
    spans = {"tp": dims.tp, "cp": dims.cp * dims.tp}
    if dims.strategy == "hsdp":
        spans["dp_shard"] = dims.dp_shard * dims.cp * dims.tp
    across = [
        axis for axis, span in spans.items() if dims.size(axis) > 1 and local_world_size % span
    ]
    if not across:
        return ""
    return (
        f"groups of {', '.join(across)} leave the node, which has {local_world_size} devices: their "
        "collectives use the slower network; smaller axes, or --pp_size, stay inside"
    )


def describe_ramp(batch: BatchPlan, start: int = 0, samples_seen: int = 0) -> str:
    """Returns the batches of the steps after `start`, a line each: for how many steps, to where."""
    lines = [f"batch ramp from step {start + 1}, {samples_seen:,} samples seen:"]
    phases = batch.phases(samples_seen)
    for phase, following in pairwise(phases):
        lines.append(
            f"  {phase.batch:,} sequences for {counted(following.step - phase.step, 'step')}, to step "
            f"{start + following.step:,} and {samples_seen + following.sample:,} samples"
        )
    return "\n".join([*lines, f"  {phases[-1].batch:,} sequences from there"])


def describe_prediction(run: RunConfig, budget: MemoryBudget) -> Iterator[str]:
    """Yields the expected memory of a rank, and the expected speed of a GPU that is known."""
    try:
        yield from _predict(run, budget)
    except PredictionFailed as error:  # `describe_memory` says that memory is unknown
        if run.device_type == "cuda":
            yield f"speed: unknown ({error.reason})"


def _predict(run: RunConfig, budget: MemoryBudget) -> Iterator[str]:
    machine = budget.machine
    device_type = run.device_type
    need = budget.need(run)
    parts = need.by_device(device_type, offload=run.config.parallel.cpu_offload)
    total = parts[device_type].total / GIB
    available = machine.memory[device_type] / GIB
    yield f"memory: about {total:.3g} GiB per rank, {available:.3g} available"
    if device_type != "cuda":
        return
    from fms_fsdp.predict.devices import known_device
    from fms_fsdp.predict.speed import step_time

    known = known_device(machine.device_name, machine.total_memory)
    if known is None:
        yield f"speed: unknown for {machine.device_name}"
        return
    step = budget.step(run)
    with predicting():
        seconds = sum(step_time(step, known, machine.world.local_size).values())
    rate = step.tokens / seconds / run.world_size
    yield f"speed: about {seconds:.3g} s per step, {rate:,.0f} tokens/s per {known.name}"


def log_precision(section: PrecisionConfig, machine: Machine) -> None:
    """Logs how a CPU computes in the precision of the flags, or the choice if they name none."""
    if machine.device_type != "cpu":
        return
    wanted = section.named
    native = machine.has_bf16
    if wanted is None:
        text = "precision: %s (this CPU %s native bf16)"
        log.info(text, "bf16" if native else "fp32", "has" if native else "has no")
    elif wanted in ("fp16", "float8"):
        log.warning("--precision=%s is slow on a CPU, and here for tests", wanted)
    elif wanted != "fp32" and not native:
        log.warning(
            "--precision=%s: this CPU has no native bf16, so bf16 is emulated and slow", wanted
        )


def log_startup(
    run: RunConfig,
    resume: ResumePoint,
    data_changes: Sequence[str],
    budget: MemoryBudget,
    corpus: Corpus | None,
    held_out: Sequence[HeldOut] = (),
) -> None:
    """Logs warnings, the start of the run, and the changes of this launch."""
    world = budget.machine.world
    start = resume.start
    warnings = [budget.warning(run), axes_across_nodes(run.dims, world.local_size)]
    if corpus is not None and world.rank == 0:
        from fms_fsdp.data.tokenizer import unk_warnings

        warnings += unk_warnings(corpus.storage, [source.name for source in corpus.sources])
    for warning in filter(None, warnings):
        log.warning(warning)
    log.info(resume.reason)
    versions = (f"{name} {version}" for name, version in run.versions.items())
    log_for_files(f"versions: {', '.join(versions)}")
    log_for_files(describe_schedule(run, start))
    if run.batch.rampup:
        log_for_files(describe_ramp(run.batch, start.step, start.rows_seen))
    for line in list_changes(run, resume):
        log.info(line)
    for change in data_changes:
        log.info("from step %d: %s", start.step + 1, change)
    if jump := learning_rate_jump(run, resume):
        log.warning(jump)
    if resume.saved is not None:
        for note in (
            end_of_decay(run, resume.saved, start),
            changed_validation(run, resume.saved, held_out),
        ):
            if note:
                log.info("note: %s", note)


def end_of_decay(run: RunConfig, saved: RunConfig, start: TrainMetadata) -> str:
    """Returns a note if a longer or shorter run keeps the milestones of its schedule; else ""."""
    schedule = run.config.optim.lr_schedule
    points = run.milestones
    unit = "token" if points.in_tokens else "step"
    last_tokens = start.tokens_at(run.num_steps, run.batch, run.seq_length)
    last = last_tokens if points.in_tokens else run.num_steps

    if run.num_steps > saved.num_steps and points.decay_end < last and schedule != "constant":
        return (
            f"the learning rate is constant from {unit} {points.decay_end}; "
            f"--lr_decay={run.num_steps} decays to the end"
        )

    if run.num_steps < saved.num_steps and points.decay_end > last and schedule in DECAY_TO_END:
        rate = run.schedule(run.num_steps, last_tokens, run.config.optim.learning_rate)
        length = run.num_steps
        if schedule == "wsd":  # the length of its last phase
            begin = points.decay_start
            if points.in_tokens:
                begin = start.step_at(begin, run.batch, run.seq_length)
            length -= begin
        return (
            f"the run ends with a learning rate of {rate:.2e}, because its decay ends later, at "
            f"{unit} {points.decay_end}; --lr_decay={length} decays to the end"
        )
    return ""


def changed_validation(run: RunConfig, saved: RunConfig, held_out: Sequence[HeldOut]) -> str:
    """Returns a note if the launch validates on another number of sequences than the last one; else "".

    The number is --eval_steps times the global batch, at most all sequences of the source.
    """
    if not saved.config.eval.is_on:
        return ""
    rows_before = saved.config.eval.eval_steps * saved.batch.global_batch_size
    changes = []
    for source in held_out:
        if source.group != "eval":  # a test is made once
            continue
        before = min(rows_before, source.num_available)
        if before != source.num_rows:
            changes.append(f"{source.name} {source.num_rows:,} sequences instead of {before:,}")
    if not changes:
        return ""
    text = f"validation reads {', '.join(changes)}, so its losses do not continue the earlier ones"
    steps, remainder = divmod(rows_before, run.batch.global_batch_size)
    if remainder:  # no number of batches reads as many
        return text
    return f"{text}; --eval_steps={steps} reads as many as before"


def describe_schedule(run: RunConfig, start: TrainMetadata) -> str:
    """Returns the milestones of the learning rate in steps, samples and tokens."""
    milestones = run.milestones

    def shown(position: int) -> str:
        step = tokens = position
        if milestones.in_tokens:
            step = start.step_at(tokens, run.batch, run.seq_length)
        else:
            tokens = start.tokens_at(step, run.batch, run.seq_length)
        return f"step {step:,} ({tokens // run.seq_length:,} samples, {tokens:,} tokens)"

    parts = {
        "warmup to": milestones.warmup,
        "decay from": milestones.decay_start,
        "to": milestones.decay_end,
    }
    text = ", ".join(f"{name} {shown(position)}" for name, position in parts.items())
    return f"learning rate: {run.config.optim.lr_schedule}, {text}"


def describe_steps(run: RunConfig, start: int) -> str:
    """Returns the run directory and the steps that this launch would train."""
    steps = f"steps: {start + 1:,} to {run.num_steps:,}"
    if start == run.num_steps:
        steps = f"steps: none, the run is already finished at step {start}"
    return f"run directory: {run.config.output_dir}\n{steps}"


def warn_of_missing_labels(stream: Stream) -> None:
    """Names the sources that have nearly no labels, by a few of their sequences."""
    if not isinstance(stream, TokenStream):
        return
    with suppress(ShardError):  # the stream names the shard when it reaches it
        for name, fraction in sources_without_labels(stream):
            log.warning(
                "source %s: %.1f %% of its tokens are labels, and a step without labels changes "
                "nothing; check its loss masks (--loss_on) and hidden shards (--on_missing)",
                name,
                100 * fraction,
            )


def save_estimates(run: RunConfig, resume: ResumePoint, budget: MemoryBudget) -> tuple[float, int]:
    """Returns the seconds of a save, by an earlier one or at 200 MB/s per node, and the bytes of
    host memory that the copies of a rank may take."""
    size = checkpoint_bytes(run)
    ranks = budget.machine.world.local_size
    loaded = resume.checkpoint
    known = loaded.metadata.save_s if loaded is not None else None
    guess = size * ranks / run.world_size / 2e8
    return guess if known is None else known, available_memory(torch.device("cpu"), ranks)
