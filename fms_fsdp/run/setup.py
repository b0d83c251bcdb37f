"""The inputs of a launch, and what becomes of them: corpus, stream, progress."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import torch

from fms_fsdp.config import BatchPlan, TrainConfig
from fms_fsdp.config.parse import Parsed
from fms_fsdp.data.corpus import Corpus, open_corpus
from fms_fsdp.data.storage import Storage
from fms_fsdp.data.stream import Stream, build_stream
from fms_fsdp.distributed.axes import ParallelDims
from fms_fsdp.distributed.runtime import on_every_rank, run_long_on_rank0, run_on_rank0
from fms_fsdp.distributed.world import World
from fms_fsdp.errors import UserError, checking_input
from fms_fsdp.metrics.timer import LaunchPhases
from fms_fsdp.models.config import TransformerConfig
from fms_fsdp.models.llama import LanguageModel
from fms_fsdp.optim.optimizers import Optimizers
from fms_fsdp.run.memory_budget import MemoryBudget
from fms_fsdp.run.resume import ResumePoint
from fms_fsdp.run.run_dir import RunDir
from fms_fsdp.state import RunConfig, TrainState

if TYPE_CHECKING:
    from fms_fsdp.data.validation import HeldOut, HeldOutListing
    from fms_fsdp.distill import Teacher
    from fms_fsdp.samples import Prompts


@dataclass(frozen=True)
class Found:
    """The inputs that a launch has found before it is planned; by default none, as with synthetic data.

    held_out   listings of the held-out data
    teacher    of distillation
    resume     where the launch starts
    """

    corpus: Corpus | None = None
    held_out: tuple[HeldOutListing, ...] = ()
    prompts: Prompts | None = None
    teacher: Teacher | None = None
    resume: ResumePoint = ResumePoint()

    @property
    def vocab_size(self) -> int | None:
        return None if self.corpus is None else self.corpus.vocab_size


@dataclass(frozen=True)
class Launch:
    """A planned launch: its settings, its inputs, and its place on disk.

    data_changes   changes of the data since the checkpoint, for the log
    notes          flags without effect, and settings of the environment that are ignored
    """

    parsed: Parsed[TrainConfig]
    phases: LaunchPhases
    device: torch.device
    found: Found
    run: RunConfig
    budget: MemoryBudget
    run_dir: RunDir
    stream: Stream
    data_changes: list[str]
    held_out: tuple[HeldOut, ...]
    notes: tuple[str, ...] = ()

    @property
    def world(self) -> World:
        return self.budget.machine.world

    @property
    def is_compiled(self) -> bool:
        return self.budget.machine.compiles(self.run.config.parallel)

    @property
    def memory_bytes(self) -> int:
        """The memory of the device that this rank may use."""
        return self.budget.machine.memory[self.device.type]

    @property
    def start_step(self) -> int:
        """The last step before this launch."""
        return self.found.resume.start.step

    @property
    def is_finished(self) -> bool:
        """Whether the launches before have left nothing to do."""
        start = self.found.resume.start
        return start.step == self.run.num_steps and not start.evaluation_pending


def find_corpus(cfg: TrainConfig) -> Corpus | None:
    """Lists the corpus on rank 0 for all (collective); None for synthetic data or a user's stream.

    Raises:
        UserError: any rank cannot open the folder, or import the user's builder.
    """
    if cfg.data.dataset_builder:
        from fms_fsdp.data.custom import load_builder

        on_every_rank(partial(load_builder, cfg.data))
        return None
    if cfg.data.use_dummy_dataset:
        return None
    corpus = run_long_on_rank0(partial(open_corpus, cfg.data))
    on_every_rank(partial(_open_folder, corpus))
    return corpus


def _open_folder(corpus: Corpus) -> None:
    """Opens the folder of a corpus that rank 0 has listed, which this node may lack."""
    if isinstance(corpus.storage, Storage):
        corpus.storage.open()


def find_inputs(
    cfg: TrainConfig, corpus: Corpus | None, model: TransformerConfig, dims: ParallelDims
) -> Found:
    """Reads on rank 0 the inputs that the flags name, except a checkpoint (collective).

    Raises:
        UserError: an input is missing, or does not fit the model.
    """
    held_out: tuple[HeldOutListing, ...] = ()
    prompts = teacher = None
    if cfg.eval.reads_held_out:
        from fms_fsdp.data.validation import scan_held_out

        scan = partial(scan_held_out, cfg.eval, cfg.data, corpus, vocab_size=model.vocab_size)
        held_out = run_long_on_rank0(scan)
        for each in held_out:
            if each.corpus is not None:
                on_every_rank(partial(_open_folder, each.corpus))
    if cfg.eval.sample_interval:
        from fms_fsdp.samples import read_prompts

        prompts = run_on_rank0(partial(read_prompts, cfg.eval, cfg.data, model))
    if cfg.training.teacher_path and not dims.divides_model:  # `check_layout` rejects both
        from fms_fsdp.distill import find_teacher

        teacher = run_on_rank0(partial(find_teacher, cfg, model, corpus))
    return Found(corpus, held_out, prompts, teacher)


def open_stream(
    cfg: TrainConfig,
    batch: BatchPlan,
    vocab_size: int,
    corpus: Corpus | None,
    resume: ResumePoint,
    *,
    dp_rank: int = 0,
    pin_memory: bool = False,
) -> tuple[Stream, list[str]]:
    """Returns the stream of a data-parallel rank after the checkpoint's step, and the changes from
    there on. Reads no tokens.

    Raises:
        UserError, OSError: the checkpoint was trained on other data, or the batch does not fit.
    """
    build: Callable[..., Stream] = partial(build_stream, corpus=corpus, rampup=batch.rampup)
    if cfg.data.dataset_builder:
        from fms_fsdp.data.custom import load_builder

        build = load_builder(cfg.data)
    stream = build(
        cfg.data,
        seed=cfg.training.seed,
        vocab_size=vocab_size,
        global_batch_size=batch.global_batch_size,
        dp_rank=dp_rank,
        dp_size=batch.dp_size,
        pin_memory=pin_memory,
    )
    start = resume.start
    changes = list[str]()
    if resume.fresh_data:
        stream.begin_after(start.step, start.rows_seen)
    elif resume.is_resume:
        try:
            changes = stream.load_state_dict(start.data, start.step)
        except UserError as error:
            stream.close()
            assert resume.checkpoint is not None
            folder = str(resume.checkpoint.folder)
            raise UserError(str(error).replace("=CHECKPOINT", f"={folder}")) from error
    return stream, changes


def open_evaluations(run: RunConfig, found: Found, at_end: ExitStack) -> tuple[HeldOut, ...]:
    """Returns the held-out data of the evaluations; `at_end` closes it."""
    if not found.held_out:
        return ()
    from fms_fsdp.data.validation import close_held_out, open_held_out

    held_out = open_held_out(run.config.eval, found.held_out, run.batch.global_batch_size)
    at_end.callback(close_held_out, held_out)
    return held_out


def check_length(run: RunConfig, stream: Stream) -> None:
    """Raises UserError if the run is longer than --max_epochs allows."""
    if stream.last_step is not None and run.num_steps > stream.last_step:
        raise UserError(
            f"--num_steps={run.num_steps} exceeds {stream.last_step}, the last step that "
            f"--max_epochs={run.config.data.max_epochs:g} leaves the shortest source; lower "
            "--num_steps or raise --max_epochs"
        )


def check_failed_step(stream: Stream, step: int | None, start: int) -> None:
    """Reads the data of a step that ended the last attempt, if this attempt needs it too.

    Raises:
        UserError: the data is still wrong.
    """
    if step is not None and step > start:
        with checking_input(on_one_rank=True, data_step=step):
            stream.batch_at(step)


def initial_state(
    run: RunConfig,
    resume: ResumePoint,
    model: LanguageModel,
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
