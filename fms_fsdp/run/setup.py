"""Values that follow from flags, machine, data and checkpoint: batch, length, schedule, stream."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import cast

import torch

from fms_fsdp.config import Precision, TrainConfig
from fms_fsdp.config.batch import last_step, plan_batch
from fms_fsdp.data.corpus import Corpus, open_corpus
from fms_fsdp.data.stream import Stream, TokenStream, build_stream
from fms_fsdp.distributed.axes import ParallelDims
from fms_fsdp.distributed.mesh import Mesh
from fms_fsdp.distributed.runtime import World, run_on_rank0, versions
from fms_fsdp.errors import UserError, checking_input
from fms_fsdp.models.config import TransformerConfig
from fms_fsdp.models.llama import Llama
from fms_fsdp.optim.optimizers import Optimizers, example_state
from fms_fsdp.optim.schedules import Milestones, RunLength, find_milestones
from fms_fsdp.run.checks import check_folders
from fms_fsdp.run.memory import MemoryBudget, saved_bytes
from fms_fsdp.run.resume import ResumePoint
from fms_fsdp.state import RunConfig, TrainMetadata, TrainState, working_folder


def find_corpus(cfg: TrainConfig) -> Corpus | None:
    """Returns the corpus that rank 0 lists (collective); None for synthetic data or a user's stream."""
    if cfg.data.dataset_builder:
        from fms_fsdp.data.custom import load_builder

        load_builder(cfg.data)
        return None
    return None if cfg.data.use_dummy_dataset else run_on_rank0(partial(open_corpus, cfg.data))


def draft_run(
    cfg: TrainConfig,
    world: World,
    device: torch.device,
    dims: ParallelDims,
    precision: Precision,
    model: TransformerConfig,
    tokenizer: str = "",
    saved: RunConfig | None = None,
) -> RunConfig:
    """Returns the resolved config without its length; `saved`: the launch that is resumed.

    Raises:
        UserError: the batch does not fit the flags, the ranks or the checkpoint.
    """
    return RunConfig(
        config=cfg,
        world_size=world.size,
        device_type=device.type,
        dims=dims,
        batch=plan_batch(
            cfg.training, dims.size("dp"), None if saved is None else saved.batch, cfg.keep_name
        ),
        model=model,
        precision=precision,
        num_steps=0,
        tokenizer=tokenizer,
        milestones=Milestones(False, 0, 0, 0),
        versions=versions(),
        working_dir=working_folder(),
        chosen={},
    )


def plan_run(
    cfg: TrainConfig,
    device: torch.device,
    dims: ParallelDims,
    precision: Precision,
    model: TransformerConfig,
    corpus: Corpus | None,
    resume: ResumePoint,
    budget: MemoryBudget,
) -> tuple[RunConfig, str]:
    """Returns the resolved config, and a summary of its epochs if they are its length.

    Raises:
        UserError: the batch, the axes, the memory or the folders do not fit.
    """
    world, tokenizer = budget.world, corpus.tokenizer if corpus is not None else ""
    run = draft_run(cfg, world, device, dims, precision, model, tokenizer, resume.saved)
    run = budget.choose(run, resume.saved)
    if run.dims.divides_model:
        from fms_fsdp.parallel.layout import check_layout

        check_layout(run.config, model, run.dims, run.batch, device)
    budget.check(run)
    check_folders(cfg, saved_bytes(run))
    epochs = ""
    if cfg.training.epochs() is not None:
        run, epochs = plan_epochs(run, corpus, resume, world.rank)
    else:
        start = resume.start
        seen = start.step, start.rows_seen, start.tokens_seen
        num_steps = last_step(cfg.training, run.batch, run.seq_length, *seen)
        run = replace(run, num_steps=num_steps)
    return replace(run, milestones=plan_schedule(run, resume)), epochs


def plan_epochs(
    run: RunConfig, corpus: Corpus | None, resume: ResumePoint, rank: int
) -> tuple[RunConfig, str]:
    """Returns the run that ends with --num_epochs, and a summary of the epochs of each source.

    Raises:
        UserError: --num_epochs names no source.
    """
    epochs = run.config.training.epochs()
    assert epochs is not None
    stream, _ = open_stream(run, corpus, resume, rank)
    try:
        source, number = epochs
        num_steps = cast(TokenStream, stream).end_of_epochs(source, number, resume.start.step)
    finally:
        stream.close()
    counted = f"source {source}" if source else "all sources together"
    return replace(
        run, num_steps=num_steps
    ), f"{number:g} epochs of {counted} end with step {num_steps:,}"


def tokens_by_step(run: RunConfig, start: TrainMetadata) -> Callable[[int], int]:
    """Returns the function from a step to the tokens of the run by its end.

    Up to the checkpoint they are spread evenly; later steps follow the batch of this launch.
    """

    def tokens_at(step: int) -> int:
        if step < start.step:
            return start.tokens_seen * step // start.step
        return (
            start.tokens_seen
            + run.batch.samples_in(step - start.step, start.rows_seen) * run.seq_length
        )

    return tokens_at


def step_by_tokens(run: RunConfig, start: TrainMetadata) -> Callable[[int], int]:
    """Returns the inverse of `tokens_by_step`: the first step by whose end that many tokens are read."""

    def step_at(tokens: int) -> int:
        if tokens < start.tokens_seen:
            return -(-tokens * start.step // start.tokens_seen)
        samples = -(-(tokens - start.tokens_seen) // run.seq_length)
        return start.step + run.batch.steps_for(samples, start.rows_seen)

    return step_at


def plan_schedule(run: RunConfig, resume: ResumePoint) -> Milestones:
    """Returns the milestones of the learning rate.

    A resumed run keeps its checkpoint's milestones unless a flag of the schedule changed: another
    length only moves a last phase of wsd that has not begun. A new run with a ramp of the batch
    counts tokens, and a resumed run keeps the unit that it counted in.

    Raises:
        UserError: the decay ends before it begins.
    """
    optim, start, saved = run.config.optim, resume.start, resume.saved
    length = RunLength(run.num_steps, run.seq_length, tokens_by_step(run, start))
    if saved is None:
        return find_milestones(optim, length, in_tokens=bool(run.batch.rampup))
    old, was = saved.milestones, saved.config.optim
    found = find_milestones(optim, length, in_tokens=old.in_tokens)
    flags = (optim.lr_schedule, optim.durations(), optim.constant_steps)
    if flags != (was.lr_schedule, was.durations(), was.constant_steps):
        return found
    position = start.tokens_seen if old.in_tokens else start.step
    if optim.lr_schedule == "wsd" and position < old.decay_start:
        return replace(found, warmup=old.warmup)
    return old


def open_stream(
    run: RunConfig, corpus: Corpus | None, resume: ResumePoint, rank: int
) -> tuple[Stream, list[str]]:
    """Returns this rank's stream after the checkpoint's step, and log lines on its changes.

    Raises:
        UserError, OSError: the checkpoint was trained on other data, or the batch does not fit.
    """
    cfg = run.config
    build: Callable[..., Stream] = partial(build_stream, corpus=corpus, rampup=run.batch.rampup)
    if cfg.data.dataset_builder:
        from fms_fsdp.data.custom import load_builder

        build = load_builder(cfg.data)
    stream = build(
        cfg.data,
        seed=cfg.training.seed,
        vocab_size=run.model.vocab_size,
        global_batch_size=run.batch.global_batch_size,
        dp_rank=run.dims.place(rank, "dp"),
        dp_size=run.dims.size("dp"),
        pin_memory=run.device_type == "cuda",
    )
    changes: list[str] = []
    if resume.fresh_data:
        stream.begin_after(resume.start.step)
    elif resume.is_resume:
        try:
            changes = stream.load_state_dict(resume.start.data, resume.start.step)
        except UserError as error:
            stream.close()
            assert resume.checkpoint is not None
            folder = str(resume.checkpoint.folder)
            raise UserError(str(error).replace("=CHECKPOINT", f"={folder}")) from error
    if run.num_steps and stream.last_step is not None and run.num_steps > stream.last_step:
        stream.close()
        raise UserError(
            f"--num_steps={run.num_steps} exceeds {stream.last_step}, the last step that "
            f"--max_epochs={cfg.data.max_epochs:g} leaves the shortest source; lower --num_steps or "
            "raise --max_epochs"
        )
    return stream, [f"from step {resume.start.step + 1}: {change}" for change in changes]


def check_optimizer(cfg: TrainConfig, precision: Precision) -> None:
    """Raises UserError for options that the optimizer rejects, before any work starts."""
    example_state(cfg.optim, precision)


def check_components(
    cfg: TrainConfig,
    model: TransformerConfig,
    precision: Precision,
    device: torch.device,
    dims: ParallelDims,
) -> None:
    """Raises UserError if float8 or the exports that the flags ask for do not support the model."""
    if precision.float8:
        from fms_fsdp.parallel.layout import check_float8

        check_float8(model, precision, device, dims.tp)
    if cfg.checkpoint.export_interval:
        from fms_fsdp.hf.config import find_family

        find_family(model)


def check_failed_step(stream: Stream, step: int | None, start: int) -> None:
    """Reads the data of a step that ended the last attempt, if this attempt needs it too.

    Raises:
        UserError: the data is still wrong.
    """
    if step is not None and step > start:
        with checking_input(on_one_rank=True, data_step=step):
            stream.batch_at(step)


def tokens_between_evaluations(cfg: TrainConfig, corpus: Corpus | None) -> int:
    """Returns the tokens of `--eval_epochs` passes over the data; 0 without the flag."""
    sources = () if corpus is None else corpus.sources
    return round(cfg.eval.eval_epochs * sum(source.num_tokens for source in sources))


def load_hf_weights(folder: str, model: Llama, mesh: Mesh) -> None:
    """Loads the weights of a Hugging Face checkpoint (collective)."""
    from fms_fsdp.hf.weights import load_weights

    load_weights(Path(folder), model, mesh)


def initial_state(
    run: RunConfig,
    resume: ResumePoint,
    model: Llama,
    optimizers: Optimizers,
    stream: Stream,
    device: torch.device,
) -> TrainState:
    """Returns the state before the first step; fp16 resumes with the checkpoint's loss scale."""
    start = resume.start
    left = run.batch.samples_in(run.num_steps - start.step, start.rows_seen)
    state = TrainState(
        model,
        optimizers,
        stream,
        run.num_steps,
        start.step,
        start.rows_seen,
        start.tokens_seen,
        samples_at_end=start.rows_seen + left,
        non_finite_steps=start.non_finite_steps,
        evaluation_pending=start.evaluation_pending,
    )
    if run.precision.compute == "fp16":
        from fms_fsdp.optim.loss_scale import LossScale

        state.loss_scale = LossScale(run.config.precision, device)
        if start.loss_scale:
            state.loss_scale.load_state_dict(start.loss_scale)
    if run.precision.rounded_copy:
        from fms_fsdp.optim.stochastic_rounding import RoundedWeights

        state.rounding = RoundedWeights(model, run.config.training.seed).rounded
    return state
