"""The data stream of a launch: opened after the step of a checkpoint, and checked. Loads no torch."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from fms_fsdp.config import BatchPlan, TrainConfig
from fms_fsdp.data.corpus import Corpus
from fms_fsdp.data.stream import Stream, build_stream
from fms_fsdp.errors import UserError, checking_input
from fms_fsdp.run.resume_point import ResumePoint
from fms_fsdp.state import RunConfig


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


def check_length(run: RunConfig, stream: Stream) -> None:
    """Raises UserError if the run is longer than --max_epochs allows."""
    if stream.last_step is None or run.num_steps <= stream.last_step:
        return
    section = run.config.training
    length = "num_steps"
    given = f"--num_steps={run.num_steps}"
    for name in ("num_tokens", "num_samples", "num_epochs"):
        value = getattr(section, name)
        if value and value != "-1":  # with which --num_epochs is not set
            length = name
            given = f"--{name}={value} ({run.num_steps} steps)"
    raise UserError(
        f"{given} exceeds {stream.last_step}, the last step that "
        f"--max_epochs={run.config.data.max_epochs:g} leaves the shortest source; lower "
        f"--{length} or raise --max_epochs"
    )


def check_failed_step(stream: Stream, step: int | None, start: int) -> None:
    """Reads the data of a step that ended the last attempt, if this attempt needs it too.

    Raises:
        UserError: the data is still wrong.
    """
    if step is not None and step > start:
        with checking_input(on_one_rank=True, data_step=step):
            stream.batch_at(step)
