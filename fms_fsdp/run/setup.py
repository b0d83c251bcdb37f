"""The inputs of a launch, and what becomes of them: corpus, stream, progress."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import torch

from fms_fsdp.config import TrainConfig
from fms_fsdp.config.parse import Parsed
from fms_fsdp.data.corpus import Corpus, open_corpus
from fms_fsdp.data.storage import Storage
from fms_fsdp.data.stream import Stream
from fms_fsdp.distributed.axes import ParallelDims
from fms_fsdp.distributed.runtime import on_every_rank, run_long_on_rank0, run_on_rank0
from fms_fsdp.distributed.world import World
from fms_fsdp.metrics.timer import LaunchPhases
from fms_fsdp.models.config import TransformerConfig
from fms_fsdp.models.llama import LanguageModel
from fms_fsdp.optim.optimizers import Optimizers
from fms_fsdp.run.memory_budget import MemoryBudget
from fms_fsdp.run.resume_point import ResumePoint
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


def open_evaluations(run: RunConfig, found: Found, at_end: ExitStack) -> tuple[HeldOut, ...]:
    """Returns the held-out data of the evaluations; `at_end` closes it."""
    if not found.held_out:
        return ()
    from fms_fsdp.data.validation import close_held_out, open_held_out

    held_out = open_held_out(run.config.eval, found.held_out, run.batch.global_batch_size)
    at_end.callback(close_held_out, held_out)
    return held_out


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
    left = run.batch.sequences_in(run.num_steps - start.step, start.rows_seen)
    state = TrainState(
        model,
        optimizers,
        stream,
        run.num_steps,
        start.step,
        start.rows_seen,
        start.tokens_seen,
        sequences_at_end=start.rows_seen + left,
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
