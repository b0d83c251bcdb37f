"""The plan of a run: flags, machine, data and checkpoint → RunConfig, or the reason why not.

    flags, machine       `resolve`      model, axes, precision
    + data, checkpoint   `complete`     + batch, length, learning rate, of which `keep` keeps those of the checkpoint
    + memory             `candidates`   the runs among which memory decides
                         `plan`         the one that fits

`plan` is a function of its arguments: no process group, no device and no data is needed, so that
`estimate`, benchmarks and tests plan runs on machines that do not exist. It has the
one list of checks. What it accepts, a launch can train, if its memory and its folders are large
enough (`plan_here`).
"""

from __future__ import annotations

import itertools
from contextlib import closing, suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import cast

from fms_fsdp.checkpoint.retention import KeepPolicy, parse_schedule
from fms_fsdp.config import BatchPlan, OptimConfig, ParallelConfig, Precision, TrainConfig
from fms_fsdp.config.batch_plan import last_step, plan_batch
from fms_fsdp.config.values import rounded_bytes
from fms_fsdp.data.inspection import end_of_epochs
from fms_fsdp.data.stream import TokenStream
from fms_fsdp.distributed.axes import ParallelDims
from fms_fsdp.distributed.dims import plan_dims
from fms_fsdp.errors import UserError
from fms_fsdp.models.config import TransformerConfig
from fms_fsdp.models.variants import resolve_model
from fms_fsdp.optim.optimizers import example_state
from fms_fsdp.optim.schedules import Milestones, RunLength, compute_milestones, find_milestones
from fms_fsdp.parallel.layout import check_float8, check_layout
from fms_fsdp.predict.memory import checkpoint_bytes
from fms_fsdp.run.checks import check_attention, check_folders, check_machine
from fms_fsdp.run.data_stream import open_stream
from fms_fsdp.run.machine import Machine
from fms_fsdp.run.memory_budget import MemoryBudget, PredictionFailed
from fms_fsdp.run.resume import check_resume
from fms_fsdp.run.resume_point import ResumePoint
from fms_fsdp.run.setup import Found
from fms_fsdp.state import RunConfig, TrainMetadata

NOTHING = Found()


@dataclass(frozen=True)
class Resolved:
    """The settings that follow from flags, machine and vocabulary."""

    model: TransformerConfig
    dims: ParallelDims
    precision: Precision

    def with_vocabulary(self, cfg: TrainConfig, vocab_size: int | None) -> Resolved:
        """Returns the settings for data with this vocabulary; None: no data is known.

        Raises:
            UserError: the model's vocabulary is smaller.
        """
        if vocab_size is None:
            return self
        seq_length = cfg.data.seq_length
        model = resolve_model(cfg.model, seq_length=seq_length, data_vocab_size=vocab_size)
        _check_export(cfg, model)
        return replace(self, model=model)


def resolve(cfg: TrainConfig, machine: Machine) -> Resolved:
    """Returns the settings that need neither the data nor a checkpoint.

    A launch calls it before it starts its process group, so that a wrong flag ends it at once.

    Raises:
        UserError: flags contradict each other, or the machine does not support one.
    """
    model = resolve_model(cfg.model, seq_length=cfg.data.seq_length)
    dims = plan_dims(cfg.parallel, cfg.model.name, machine.world)
    check_machine(cfg, machine, dims)
    check_attention(cfg, model, machine.device_type)
    default = "bf16" if machine.has_bf16 else "fp32"
    precision = cfg.precision.resolve(cfg.precision.named or default)
    example_state(cfg.optim, precision)  # rejects options that the optimizer does not have
    parse_schedule(cfg.checkpoint.checkpoint_schedule, cfg.checkpoint.checkpoint_interval)
    KeepPolicy.from_config(cfg.checkpoint)
    check_float8(model, precision, dims.tp, machine.capability, machine.device_name)
    _check_export(cfg, model)
    return Resolved(model, dims, precision)


def _check_export(cfg: TrainConfig, model: TransformerConfig) -> None:
    if cfg.checkpoint.export_interval:
        from fms_fsdp.hf.families import find_family

        find_family(model)


@dataclass(frozen=True)
class Kept:
    """The settings of its checkpoint that a resumed run keeps; None leaves one to the flags.

    batch            its global batch, and the maximum of the micro-batch
    counts_tokens    whether the schedule of the learning rate counts tokens, or steps
    milestones       of that schedule
    moves_decay      whether its last phase follows another length of the run
    """

    batch: BatchPlan | None = None
    counts_tokens: bool | None = None
    milestones: Milestones | None = None
    moves_decay: bool = False


def keep(cfg: TrainConfig, resume: ResumePoint) -> Kept:
    """Returns the settings that a resumed run keeps.

    This is the place that decides between checkpoint and flags:

        the global batch           unless --global_batch_size is set
        the learning rate          unless a flag of the schedule changed; another length only moves
                                   a last phase of wsd that has not begun
        settings chosen by memory  those of flags that are still `auto`, while they fit (`choose_settings`)
        the order of the data      always; the stream compares its state (data/stream.py)

    All others follow the flags and the machine, among them length, precision and axes.
    `check_resume` rejects a change of model or optimizer, and `list_changes` logs the others.
    """
    saved = resume.saved
    if saved is None:
        return Kept()
    start = resume.start
    milestones = saved.milestones
    kept = Kept(counts_tokens=milestones.in_tokens)

    if cfg.training.global_batch_size is None:
        kept = replace(kept, batch=saved.batch)

    if _schedule_flags(cfg.optim) == _schedule_flags(saved.config.optim):
        # The step that ends at `decay_start` still has the peak.
        has_begun = _position(start, milestones) > milestones.decay_start
        may_move = cfg.optim.lr_schedule == "wsd" and not has_begun
        kept = replace(kept, milestones=milestones, moves_decay=may_move)
    return kept


def _position(start: TrainMetadata, milestones: Milestones) -> int:
    """Returns where a launch begins, in the unit of the milestones."""
    return start.tokens_seen if milestones.in_tokens else start.step


def _schedule_flags(optim: OptimConfig) -> tuple[object, ...]:
    return (optim.lr_schedule, optim.durations(), optim.constant_steps)


def plan(
    cfg: TrainConfig, machine: Machine, found: Found = NOTHING, settings: Resolved | None = None
) -> RunConfig:
    """Returns the resolved config of a launch.

    settings   those of `resolve` with the vocabulary of the data, if the caller has them

    Raises:
        UserError: the launch would be rejected.
        PredictionFailed: memory has to decide a setting, and cannot be predicted.
    """
    run = complete(cfg, machine, found, settings)
    budget = MemoryBudget(machine, found.teacher)
    groups = choose_strategy(candidates(run, machine), budget)
    run = choose_settings(cfg, groups, budget, found.resume.saved)
    check_resume(run, found.resume)
    return run


def plan_here(
    cfg: TrainConfig, machine: Machine, found: Found, settings: Resolved | None = None
) -> RunConfig:
    """Returns the plan of a launch on this machine, whose memory and folders are large enough.

    Raises:
        UserError, PredictionFailed: as `plan`, or memory or a folder is too small.
    """
    run = plan(cfg, machine, found, settings)
    with suppress(PredictionFailed):  # the log says so (startup_log.describe_memory)
        MemoryBudget(machine, found.teacher).check(run)
    check_folders(cfg, checkpoint_bytes(run) if cfg.checkpoint.saves else 0)
    return run


def complete(
    cfg: TrainConfig, machine: Machine, found: Found = NOTHING, settings: Resolved | None = None
) -> RunConfig:
    """Returns the run before memory decides its `auto` flags; the arguments are those of `plan`.

    Raises:
        UserError: as `resolve`, or batch, length or schedule are impossible.
    """
    if settings is None:
        settings = resolve(cfg, machine).with_vocabulary(cfg, found.vocab_size)
    kept = keep(cfg, found.resume)
    # The batch comes first: the length and the schedule count its sequences.
    dp_size = settings.dims.size("dp")
    batch = plan_batch(cfg.training, dp_size, kept=kept.batch, keep_name=cfg.keep_name)
    num_steps = plan_length(cfg, batch, settings.model.vocab_size, found)
    return RunConfig(
        config=cfg,
        world_size=machine.world.size,
        device_type=machine.device_type,
        dims=settings.dims,
        batch=batch,
        model=settings.model,
        precision=settings.precision,
        num_steps=num_steps,
        tokenizer="" if found.corpus is None else found.corpus.tokenizer,
        milestones=plan_schedule(cfg, batch, num_steps, found.resume.start, kept),
        versions=machine.versions,
        working_dir=machine.working_dir,
        chosen={},
    )


def candidates(run: RunConfig, machine: Machine) -> list[list[RunConfig]]:
    """Returns the runs among which memory decides.

    A group for each sharding strategy and recomputation, the preferred ones first; in each the runs
    from the largest to the smallest micro-batch. A flag that is set has one value, so a launch
    without `auto` has one candidate, or two where hsdp is the default strategy. No setting that
    memory decides changes the global batch, the length or the schedule.

    Raises:
        UserError: the launch would be rejected with each of them.
    """
    groups = _by_recomputation(run, machine)
    section = run.config.parallel
    is_default = not section.sharding_strategy and not section.hsdp_shard_size
    if run.dims.strategy == "hsdp" and is_default:
        fsdp = replace(section, sharding_strategy="fsdp")
        dims = plan_dims(fsdp, run.config.model.name, machine.world)
        groups += _by_recomputation(replace(run, dims=dims), machine)
    return groups


def _by_recomputation(run: RunConfig, machine: Machine) -> list[list[RunConfig]]:
    """Returns the candidates of a strategy; omits those that the axes do not support.

    Raises:
        UserError: the axes support none of them.
    """
    section = run.config.parallel
    sections = [section]
    if section.recompute == "auto":
        sections = recomputations(section, compiled=machine.compiles(section))
    batches = [run.batch]
    if run.config.training.batch_size == "auto":
        batches = [_split(run.batch, size) for size in reversed(run.batch.micro_batch_sizes())]

    groups = list[list[RunConfig]]()
    first_error: UserError | None = None
    for each in sections:
        config = replace(run.config, parallel=each)
        is_compiled = machine.compiles(each)
        group = list[RunConfig]()
        for batch in batches:
            try:
                check_layout(config, run.model, run.dims, batch, is_compiled=is_compiled)
            except UserError as error:
                first_error = first_error or error
                continue
            group.append(replace(run, config=config, batch=batch))
        if group:
            groups.append(group)
    if not groups:
        assert first_error is not None
        raise first_error
    return groups


def recomputations(section: ParallelConfig, *, compiled: bool) -> list[ParallelConfig]:
    """Returns the choices of --recompute=auto, the cheapest first; `cheap` is the compiler's."""
    kinds = ["none", "cheap", "ops"]
    if not compiled:
        kinds.remove("cheap")
    sections = [replace(section, recompute=kind, selective_checkpointing="1") for kind in kinds]
    for fraction in ("1/4", "1/2", "3/4", "1"):
        sections.append(replace(section, recompute="blocks", selective_checkpointing=fraction))
    return sections


def plan_length(cfg: TrainConfig, batch: BatchPlan, vocab_size: int, found: Found) -> int:
    """Returns the last step of the run.

    Raises:
        UserError: --num_epochs names no source.
    """
    start = found.resume.start
    epochs = cfg.training.epochs()
    if epochs is not None:
        # The stream knows the order of the sequences; it reads no file for this question.
        stream, _ = open_stream(cfg, batch, vocab_size, found.corpus, found.resume)
        with closing(cast(TokenStream, stream)) as tokens:
            return end_of_epochs(tokens, *epochs, start.step)
    return last_step(
        cfg.training,
        batch,
        cfg.data.seq_length,
        step=start.step,
        sequences_seen=start.rows_seen,
        tokens_seen=start.tokens_seen,
    )


def plan_schedule(
    cfg: TrainConfig,
    batch: BatchPlan,
    num_steps: int,
    start: TrainMetadata = NOTHING.resume.start,
    kept: Kept = Kept(),
) -> Milestones:
    """Returns the milestones of the learning rate. A new run with a ramp of the batch counts tokens.

    Raises:
        UserError: the decay of a new schedule ends before it begins.
    """
    if kept.milestones is not None and not kept.moves_decay:
        # Not computed again: the tokens of past steps are only known on average, so that the
        # warmup could seem too long.
        return kept.milestones
    seq_length = cfg.data.seq_length
    tokens_at = partial(start.tokens_at, batch=batch, seq_length=seq_length)
    length = RunLength(num_steps, seq_length, tokens_at)
    in_tokens = kept.counts_tokens
    if in_tokens is None:
        in_tokens = bool(batch.rampup)
    if kept.milestones is None:
        return find_milestones(cfg.optim, length, in_tokens=in_tokens)
    # The warmup may be over, and its end is known. In a shortened run the last phase would have
    # begun in the past or within the warmup, and the learning rate would fall at once.
    milestones = compute_milestones(cfg.optim, length, in_tokens=in_tokens)
    warmup = kept.milestones.warmup
    decay_start = max(milestones.decay_start, _position(start, milestones), warmup)
    return replace(milestones, warmup=warmup, decay_start=decay_start)


def _split(batch: BatchPlan, size: int) -> BatchPlan:
    """Returns the batch in micro-batches of this size."""
    per_rank = batch.batch_size * batch.grad_accum_steps
    return replace(batch, batch_size=size, grad_accum_steps=per_rank // size)


def choose_strategy(groups: list[list[RunConfig]], budget: MemoryBudget) -> list[list[RunConfig]]:
    """Returns the candidates of hsdp, the default, or of fsdp if hsdp does not fit and fsdp does."""
    hsdp = [group for group in groups if group[0].dims == groups[0][0].dims]
    fsdp = groups[len(hsdp) :]
    if not fsdp:
        return groups

    # The strategy is compared by the memory without which no step is possible: activations are the
    # matter of the other settings.
    smallest = hsdp[0][-1]
    try:
        needed, available = budget.fullest(smallest, budget.minimum(smallest))
        if needed <= available or not budget.can_start(fsdp[0][-1]):
            return hsdp
    except PredictionFailed:  # as in `plan_here`
        return hsdp
    reason = (
        f"fsdp, because hsdp over {smallest.dims.size('shard')} devices would need "
        f"{rounded_bytes(needed)} of {rounded_bytes(available)} per rank"
    )
    return [[replace(run, chosen={"sharding_strategy": reason}) for run in group] for group in fsdp]


def choose_settings(
    cfg: TrainConfig,
    groups: list[list[RunConfig]],
    budget: MemoryBudget,
    earlier: RunConfig | None = None,
) -> RunConfig:
    """Returns the candidate that memory allows, with a reason for each flag that is `auto`.

    The recomputation is the cheapest with which the smallest micro-batch fits, else the one with
    the least memory. The micro-batch is the largest that then fits with a margin, else the
    smallest.

    earlier   the launch that wrote the checkpoint; its choice is kept while it fits, without the margin

    Raises:
        PredictionFailed: a flag is `auto`, and memory cannot be predicted.
    """
    autos = {
        "recompute": cfg.parallel.recompute == "auto",
        "batch_size": cfg.training.batch_size == "auto",
    }
    if not any(autos.values()):
        return groups[0][0]
    run = None
    if earlier is not None:
        run = _find_earlier_choice(groups, autos, earlier)
    verb = "keeps"
    if run is None or not budget.fits(run):
        group = groups[-1]
        for each in groups:
            if budget.fits(each[-1]):
                group = each
                break
        run = largest_fit(group, budget) or group[-1]
        verb = "chose" if budget.fits(run) else "found nothing that fits, and takes"
    needed, available = budget.fullest(run)
    sizes = f"about {rounded_bytes(needed)} of {rounded_bytes(available)} per rank"
    values = {"recompute": _recomputation(run), "batch_size": run.batch.factors}
    reasons = dict(run.chosen)
    for name, is_auto in autos.items():
        if is_auto:
            reasons[name] = f"auto {verb} {values[name]}: {sizes}"
    return replace(run, chosen=reasons)


def largest_fit(group: list[RunConfig], budget: MemoryBudget) -> RunConfig | None:
    """Returns the candidate with the largest micro-batch that leaves the margin of the machine free."""
    for run in group:
        if budget.fits(run, budget.machine.margin):
            return run
    return None


def _find_earlier_choice(
    groups: list[list[RunConfig]], autos: dict[str, bool], earlier: RunConfig
) -> RunConfig | None:
    """Returns the candidate with the settings that an earlier launch chose.

    None if it chose none, or they are not possible any more.
    """
    for name, is_auto in autos.items():
        if is_auto and name not in earlier.chosen:
            return None
    for run in itertools.chain.from_iterable(groups):
        if autos["recompute"] and _recomputation(run) != _recomputation(earlier):
            continue
        if autos["batch_size"] and run.batch.batch_size != earlier.batch.batch_size:
            continue
        return run
    return None


def _recomputation(run: RunConfig) -> str:
    section = run.config.parallel
    fraction = section.selective_checkpointing
    if section.recomputes == "blocks" and fraction != "1":
        return f"{fraction} of the blocks"
    return section.recomputes
