"""The log before step 1: model, devices, memory, batch, data, checkpoints, resume."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import suppress
from itertools import pairwise
from typing import TYPE_CHECKING

import torch

from fms_fsdp.checkpoint.retention import KeepPolicy, parse_schedule
from fms_fsdp.config import BatchPlan, PrecisionConfig
from fms_fsdp.config.values import counted, plain, rounded_bytes, short
from fms_fsdp.console import cut, fit, table
from fms_fsdp.data.corpus import Corpus
from fms_fsdp.data.inspection import sources_without_labels
from fms_fsdp.data.shards import ShardError
from fms_fsdp.data.stream import Stream, TokenStream
from fms_fsdp.distributed.axes import AXES, JOINED, ParallelDims
from fms_fsdp.errors import ReadFailed
from fms_fsdp.logs import log, log_for_files, log_note
from fms_fsdp.models.flops import num_params
from fms_fsdp.optim.schedules import DECAY_TO_END
from fms_fsdp.predict.memory import checkpoint_bytes
from fms_fsdp.run.machine import Machine, available_memory
from fms_fsdp.run.memory_budget import MemoryBudget, PredictionFailed, predicting
from fms_fsdp.run.resume import learning_rate_jump, list_changes
from fms_fsdp.run.resume_point import ResumePoint
from fms_fsdp.state import RunConfig, TrainMetadata

if TYPE_CHECKING:
    from fms_fsdp.data.validation import HeldOut

_MOST_COUNTED = 10_000  # saves
_NAME_WIDTH = 40  # characters of the name of a source or a model
_MANY_EPOCHS = 10
_FROM_SCRATCH = TrainMetadata(0)


def describe(
    run: RunConfig,
    budget: MemoryBudget,
    stream: Stream,
    held_out: Sequence[HeldOut] = (),
    start: TrainMetadata = _FROM_SCRATCH,
) -> str:
    """Returns the facts of a run before its next step, one per line, then its sources."""
    batch = run.batch
    tokens = batch.global_batch_size * run.seq_length
    ramp = ""
    if batch.rampup:
        ramp = f", from {batch.batch_at(0)} over the first {batch.rampup[2]:,} sequences"
    lines = [
        describe_model(run, budget.machine),
        describe_devices(run, budget.machine.device_name),
        *describe_memory(run, budget),
        f"batch: {batch.factors} = {counted(batch.global_batch_size, 'sequence')} = {tokens:,} tokens "
        f"per step{ramp}",
        *(f"{name}: {reason}" for name, reason in run.chosen.items()),
    ]
    if run.model.attn_dropout:
        weights = batch.batch_size * run.model.num_attention_heads * run.seq_length**2
        size = rounded_bytes(4 * weights)
        lines.append(f"attention: dropout keeps all weights, {size} per layer and copy")
    lines.append(describe_learning_rate(run, start))
    epochs = run.config.training.epochs()
    if epochs is not None:
        source, number = epochs
        counted_in = f"source {source}" if source else "all sources together"
        lines.append(f"length: {number:g} epochs of {counted_in} end with step {run.num_steps:,}")
    if held_out:
        sources = []
        for each in held_out:
            name = cut(f"{each.group}/{each.name}", _NAME_WIDTH)
            sources.append(f"{name} {each.num_sequences:,} sequences")
        lines.append(f"validation: {', '.join(sources)}")
    lines.append(describe_saves(run, start.step))
    facts = [fit(line) for line in lines if line]
    if isinstance(stream, TokenStream) and not run.config.data.use_dummy_dataset:
        facts.append(describe_sources(stream, run.num_steps))
    return "\n".join(facts)


def describe_model(run: RunConfig, machine: Machine) -> str:
    """Returns the name and the sizes of the model, and its precision."""
    model = run.model
    name = cut(run.config.model.name, _NAME_WIDTH)
    parameters = short(num_params(model), 3)
    return (
        f"model: {name}, {parameters} parameters, {counted(model.num_layers, 'layer')} x "
        f"{model.hidden_size:,}, feed-forward {model.ffn_hidden_size:,}, {_precision(run, machine)}"
    )


def describe_devices(run: RunConfig, device_name: str = "") -> str:
    """Returns the devices, and how the model is distributed over them."""
    kind = "GPU" if run.device_type == "cuda" else "CPU rank"
    devices = counted(run.world_size, kind)
    if device_name:
        devices += f" ({device_name})"
    if run.dims.strategy == "none":
        return f"devices: {devices}, not sharded"
    return f"devices: {devices}, {run.dims.strategy}: {describe_axes(run.dims)}"


def describe_memory(run: RunConfig, budget: MemoryBudget) -> Iterator[str]:
    """Yields the memory of a rank of what is available, and the bytes that it sends in a step."""
    try:
        parts = budget.need(run).by_device(run.device_type, offload=run.config.parallel.cpu_offload)
        for device_type, part in parts.items():
            if part.total:
                label = "memory" if device_type == run.device_type else "host memory"
                yield f"{label} estimate: {part.summary(budget.machine.memory[device_type])}"
        if run.world_size == 1:
            return
        from fms_fsdp.predict.speed import sent, sent_summary

        with predicting():
            yield sent_summary(sent(budget.step(run)))
    except PredictionFailed as error:
        yield f"memory: unknown ({error.reason})"


def describe_sources(stream: TokenStream, num_steps: int) -> str:
    """Returns a table of the sources: tokens, weight, and how often they are read to the end."""
    used = stream.consumption(num_steps)
    sources = stream.corpus.sources
    total = sum(source.weight for source in sources)
    rows = []
    for source in sources:
        row = (
            cut(source.name, _NAME_WIDTH),
            short(source.num_tokens, 3),
            plain(source.weight / total),
            short(used[source.name]["tokens"], 3),
            plain(used[source.name]["epoch"], 2),
        )
        rows.append(row)
    head = ("source", "tokens", "weight", f"read to step {num_steps:,}", "epochs")
    return table(head, rows)


def _precision(run: RunConfig, machine: Machine) -> str:
    if run.device_type != "cuda":
        if run.config.precision.named is not None:
            return run.precision.summary
        reason = "with" if machine.has_bf16 else "without"
        return f"{run.precision.summary} (CPU {reason} native bf16)"
    model = run.model
    kernel = model.attn_impl
    if model.pos_emb in ("alibi", "relative"):
        kernel = "biased"
    elif run.config.data.document_mask or any(model.windows):
        kernel = "flex"
    return f"{run.precision.summary}, {kernel} attention"


def advise(run: RunConfig, stream: Stream, start: TrainMetadata) -> Iterator[str]:
    """Yields advice about settings that are valid but that were probably not meant."""
    points = run.milestones
    run_end = run.num_steps
    unit = "steps"
    if points.in_tokens:
        run_end = start.tokens_at(run.num_steps, run.batch, run.seq_length)
        unit = "tokens"
    if 2 * points.warmup > run_end:
        yield (
            f"the warmup takes {points.warmup:,} of {run_end:,} {unit}, more than half of the run; "
            "shorten it with --warmup"
        )
    if not isinstance(stream, TokenStream) or run.config.data.use_dummy_dataset:
        return
    for name, used in stream.consumption(run.num_steps).items():
        if used["epoch"] > _MANY_EPOCHS:
            yield (
                f"source {cut(name, _NAME_WIDTH)} is read {used['epoch']:,.0f} times; more than "
                f"{_MANY_EPOCHS} epochs rarely help (--max_epochs rejects such a run)"
            )


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
    if flags.save_last or schedule.is_due(last):
        steps.append(last)
    if not steps:
        return ""
    size = checkpoint_bytes(run)
    policy = KeepPolicy.from_config(flags)
    deleted = len(policy.to_delete({step: TrainMetadata(step) for step in steps}))
    kept = len(steps) - max(0, deleted - flags.keep_best)  # `keep_best` of these remain
    planned = f"{len(steps):,}"
    if len(steps) > _MOST_COUNTED:
        planned = f"more than {planned}"
    return (
        f"checkpoints: {rounded_bytes(size)} each; {planned} planned, at most {kept:,} kept "
        f"({rounded_bytes(size * kept)})"
    )


def describe_versions(run: RunConfig) -> str:
    """Returns the versions of Python, torch and the code."""
    versions = (f"{name} {version}" for name, version in run.versions.items())
    return fit(f"versions: {', '.join(versions)}")


def describe_axes(dims: ParallelDims) -> str:
    """Returns the axes from the outermost to the innermost; axes of the model only if they are on."""
    names = {
        "pp": "pipeline",
        "dp_replicate": "replica",
        "dp_shard": "shard",
        "cp": "context",
        "tp": "tensor",
    }
    shown = []
    for axis in AXES:
        size = dims.size(axis)
        if axis in JOINED["dp"]:
            shown.append(counted(size, names[axis]))
        elif size > 1:
            shown.append(f"{size} {names[axis]}")
    return " x ".join(shown)


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


def describe_ramp(batch: BatchPlan, start: int = 0, sequences_seen: int = 0) -> str:
    """Returns the batches of the steps after `start`, a line each: for how many steps, to where."""
    lines = [f"batch ramp from step {start + 1}, {sequences_seen:,} sequences seen:"]
    phases = batch.phases(sequences_seen)
    for phase, following in pairwise(phases):
        lines.append(
            f"  {phase.batch:,} sequences for {counted(following.step - phase.step, 'step')}, to step "
            f"{start + following.step:,} and {sequences_seen + following.sequence:,} sequences"
        )
    return "\n".join([*lines, f"  {phases[-1].batch:,} sequences from there"])


def describe_prediction(run: RunConfig, budget: MemoryBudget) -> Iterator[str]:
    """Yields the expected speed of a GPU that is known."""
    try:
        yield from _predict(run, budget)
    except PredictionFailed as error:  # `describe_memory` says that memory is unknown
        if run.device_type == "cuda":
            yield f"speed: unknown ({error.reason})"


def _predict(run: RunConfig, budget: MemoryBudget) -> Iterator[str]:
    if run.device_type != "cuda":
        return
    machine = budget.machine
    from fms_fsdp.predict.devices import known_device
    from fms_fsdp.predict.speed import step_time

    known = known_device(machine.device_name, machine.total_memory)
    if known is None:
        yield f"speed: unknown for {machine.device_name}"
        return
    # Their time is not predicted: copies to the host and the optimizer there, and a second model.
    if run.config.parallel.cpu_offload:
        yield "speed: unknown with --cpu_offload"
        return
    if run.config.training.teacher_path:
        yield "speed: unknown with --teacher_path"
        return
    if run.precision.compute not in known.tflops:
        yield f"speed: unknown in {run.precision.compute} for {known.name}"
        return
    step = budget.step(run)
    with predicting():
        seconds = sum(step_time(step, known, machine.world.local_size).values())
    rate = step.tokens / seconds / run.world_size
    yield f"speed: about {seconds:.3g} s per step, {rate:,.0f} tokens/s per {known.name}"


def warn_of_slow_precision(section: PrecisionConfig, machine: Machine) -> None:
    """Warns of a precision that this CPU only emulates."""
    if machine.device_type != "cpu":
        return
    wanted = section.named
    if wanted in ("fp16", "float8"):
        log.warning("--precision=%s is slow on a CPU, and here for tests", wanted)
    elif wanted not in (None, "fp32") and not machine.has_bf16:
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
        from fms_fsdp.data.kept_tokenizer import unk_warnings

        warnings += unk_warnings(corpus.storage, [source.name for source in corpus.sources])
    for warning in filter(None, warnings):
        log.warning(warning)
    log.info(resume.reason)
    log_for_files(describe_schedule(run, start))
    if run.batch.rampup:
        log_for_files(describe_ramp(run.batch, start.step, start.rows_seen))
    for line in list_changes(run, resume):
        log.info(line)
    for change in data_changes:
        log.info("from step %d: %s", start.step + 1, change)
    jump = learning_rate_jump(run, resume)
    if jump:
        log.warning(jump)
    if resume.saved is not None:
        for note in (
            end_of_decay(run, resume.saved, start),
            changed_validation(run, resume.saved, held_out),
        ):
            if note:
                log_note(note)


def end_of_decay(run: RunConfig, saved: RunConfig, start: TrainMetadata) -> str:
    """Returns a note if a longer or shorter run keeps the milestones of its schedule; else ""."""
    schedule = run.config.optim.lr_schedule
    points = run.milestones
    unit = "token" if points.in_tokens else "step"
    last_tokens = start.tokens_at(run.num_steps, run.batch, run.seq_length)
    last = run.num_steps
    if points.in_tokens:
        last = last_tokens
    length = run.num_steps
    if schedule == "wsd":  # the length of its last phase
        begin = points.decay_start
        if points.in_tokens:
            begin = start.step_at(begin, run.batch, run.seq_length)
        length -= begin

    if run.num_steps > saved.num_steps and points.decay_end < last and schedule != "constant":
        return (
            f"the learning rate is constant from {unit} {points.decay_end}; "
            f"--lr_decay={length} decays to the end"
        )

    if run.num_steps < saved.num_steps and points.decay_end > last and schedule in DECAY_TO_END:
        rate = run.schedule(run.num_steps, last_tokens, run.config.optim.learning_rate)
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
    sequences_before = saved.config.eval.eval_steps * saved.batch.global_batch_size
    changes = []
    for source in held_out:
        if source.group != "eval":  # a test is made once
            continue
        before = min(sequences_before, source.num_available)
        if before != source.num_sequences:
            changes.append(
                f"{source.name} {source.num_sequences:,} sequences instead of {before:,}"
            )
    if not changes:
        return ""
    text = f"validation reads {', '.join(changes)}, so its losses do not continue the earlier ones"
    steps, remainder = divmod(sequences_before, run.batch.global_batch_size)
    if remainder:  # no number of batches reads as many
        return text
    return f"{text}; --eval_steps={steps} reads as many as before"


def describe_learning_rate(run: RunConfig, start: TrainMetadata) -> str:
    """Returns the schedule with its milestones in steps; `describe_schedule` has all units."""
    points = run.milestones
    warmup, begin, end = points.warmup, points.decay_start, points.decay_end
    if points.in_tokens:
        warmup, begin, end = (
            start.step_at(tokens, run.batch, run.seq_length) for tokens in (warmup, begin, end)
        )
    optim = run.config.optim
    return (
        f"schedule: {optim.lr_schedule} from {optim.learning_rate:g}, warmup to step {warmup:,}, "
        f"decay from step {begin:,} to {end:,}"
    )


def describe_schedule(run: RunConfig, start: TrainMetadata) -> str:
    """Returns the milestones of the learning rate in steps, sequences and tokens."""
    milestones = run.milestones

    def shown(position: int) -> str:
        step = tokens = position
        if milestones.in_tokens:
            step = start.step_at(tokens, run.batch, run.seq_length)
        else:
            tokens = start.tokens_at(step, run.batch, run.seq_length)
        return f"step {step:,} ({tokens // run.seq_length:,} sequences, {tokens:,} tokens)"

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
    # The stream names the shard or the storage when it reaches it, and then every rank ends.
    with suppress(ShardError, ReadFailed):
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
    save_s = size * ranks / run.world_size / 2e8
    if loaded is not None and loaded.metadata.save_s is not None:
        save_s = loaded.metadata.save_s
    return save_s, available_memory(torch.device("cpu"), ranks)
