"""Chooses where a launch starts, by the names and the metadata of checkpoints. Loads no torch."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from fms_fsdp.checkpoint.folders import (
    Checkpoint,
    checkpoint_root,
    checkpoint_steps,
    complete_steps,
    find_checkpoint,
    leftovers,
)
from fms_fsdp.config import TrainConfig
from fms_fsdp.config.values import counted
from fms_fsdp.errors import UserError
from fms_fsdp.state import RunConfig, TrainMetadata


@dataclass(frozen=True)
class ResumePoint:
    """The start of a launch: a new run, a checkpoint to resume, or weights to load.

    weights_only   step, optimizer and data start from scratch
    fresh_data     the data starts after the checkpoint's step
    hf_weights     the Hugging Face checkpoint that a new run starts from
    reason         a log line
    corrupt        newer checkpoints of this run that are corrupt
    superseded     later checkpoints of this run that are left behind: by --resume_step, or because
                   they end in non-finite steps
    """

    checkpoint: Checkpoint | None = None
    weights_only: bool = False
    fresh_data: bool = False
    hf_weights: str = ""
    reason: str = ""
    corrupt: tuple[Path, ...] = ()
    superseded: tuple[Path, ...] = ()

    @property
    def is_resume(self) -> bool:
        return self.checkpoint is not None and not self.weights_only

    @property
    def start(self) -> TrainMetadata:
        """The progress so far; step 0 of a new run."""
        if self.checkpoint is None or self.weights_only:
            return TrainMetadata(0)
        return self.checkpoint.metadata

    @property
    def saved(self) -> RunConfig | None:
        """The launch that wrote the checkpoint of a resumed run."""
        if not self.is_resume:
            return None
        return self.start.run


def choose_checkpoint(cfg: TrainConfig, corrupt: dict[Path, str] | None = None) -> ResumePoint:
    """Returns the start that the flags name; `corrupt`: checkpoints already known to be corrupt.

    Raises:
        UserError: there is no checkpoint although there must be one, or the other way round.
    """
    flags = cfg.checkpoint
    root = Path(cfg.ckpt_save_path)
    if flags.resume == "never" and checkpoint_steps(root):
        raise UserError(f"--resume=never, but {root} has checkpoints; choose another --run_name")
    if flags.resume_step is not None and checkpoint_steps(root):
        return _resume_at_step(root, flags.resume_step, corrupt)
    own = find_checkpoint(root, corrupt=corrupt)
    if own is not None:
        return _resume(own, own=True)
    if flags.ckpt_load_path:
        path = checkpoint_root(Path(flags.ckpt_load_path))
        given = find_checkpoint(path, corrupt=corrupt, step=flags.resume_step)
        if given is None:
            raise UserError(
                f"--ckpt_load_path={flags.ckpt_load_path} must be a run directory, a folder of "
                "checkpoints or a complete step_<N> folder, but has no checkpoint; check the path"
            )
        only_weights = flags.load_model_only or given.metadata.weights_only
        return _resume(given, only_weights, fresh_data=not flags.resuming_dataset)
    if flags.resume == "must" or flags.resume_step is not None:
        flag = "--resume=must"
        if flags.resume_step:
            flag = f"--resume_step={flags.resume_step}"
        raise UserError(
            f"{flag} requires a checkpoint, but {root} has none; check --run_name or "
            "--ckpt_load_path"
        )
    damaged = [folder.name for folder, word in leftovers(root) if word == "damaged"]
    if damaged:
        raise UserError(
            f"{root} has no usable checkpoint ({', '.join(damaged)}); choose another "
            "--run_name to start from scratch"
        )
    weights = cfg.model.init_from_hf
    start = "starting from scratch"
    if weights:
        start = f"loading weights only, from {weights}"
    return ResumePoint(hf_weights=weights, reason=f"{start}: no checkpoint in {root}")


def _resume(
    found: Checkpoint,
    only_weights: bool = False,
    *,
    own: bool = False,
    fresh_data: bool = False,
    superseded: tuple[Path, ...] | None = None,
    note: str = "",
) -> ResumePoint:
    """Returns the start at a checkpoint; `own`: of this run."""
    only_weights = only_weights or found.metadata.weights_only
    fresh_data = fresh_data and not only_weights
    verb = "loading weights only, from" if only_weights else "resuming from"
    reason = f"{verb} step {found.step} of {found.folder.parent}"
    if fresh_data:
        reason += ", with fresh data"
    reason += note
    for path, why in found.skipped.items():
        reason += f"; skipped {path.name}: {why}"
    corrupt = tuple(path for path in found.skipped if path not in found.unhealthy)
    if superseded is None:
        superseded = found.unhealthy if own else ()
    return ResumePoint(found, only_weights, fresh_data, "", reason, corrupt, superseded)


def _resume_at_step(root: Path, step: int, corrupt: dict[Path, str] | None) -> ResumePoint:
    """Applies `--resume_step`. A run that already went back to it resumes its newest checkpoint."""
    try:
        newest = find_checkpoint(root, corrupt=corrupt)
    except UserError:  # none is usable unless it is named
        newest = None
    # Its step may be lower: --load_model_only counts from 0 after the weights of step `step`.
    if newest is not None and newest.metadata.run.config.checkpoint.resume_step == step:
        return _resume(newest, own=True, note=f", saved since --resume_step={step}")
    chosen = find_checkpoint(root, corrupt=corrupt, step=step)
    if chosen is None:
        steps = ", ".join(map(str, complete_steps(root)))
        raise UserError(
            f"--resume_step={step} must be the step of a checkpoint in {root}; use one of {steps}"
        )
    later = tuple(root / f"step_{found}" for found in checkpoint_steps(root) if found > step)
    note = ""
    if later:
        note = f"; renaming {counted(len(later), 'later checkpoint')}"
    return _resume(chosen, superseded=later, note=note)
