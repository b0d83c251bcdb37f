"""Flags of checkpoints: saves, what a run keeps, where it starts. A resume may change them."""

from __future__ import annotations

from dataclasses import dataclass

from fms_fsdp.config.flag import flag
from fms_fsdp.config.formats import parse_ranges
from fms_fsdp.errors import UserError


@dataclass(frozen=True)
class KeepConfig:
    """Which checkpoints are kept when a new one is complete."""

    keep_last_n: int = flag(0, min=0)
    """Keep the newest N checkpoints, and delete the others when a new one is complete; 0 keeps
    all."""
    keep_every: int = flag(0, min=0, needs="keep_last_n")
    """Also keep each checkpoint whose step is a multiple of this number."""
    keep_best: int = flag(0, min=0, needs="keep_last_n")
    """Also keep the N checkpoints with the lowest validation loss."""
    keep_best_metric: str = flag("eval/loss", advanced=True, needs="keep_best")
    """Metric of metrics.jsonl by which keep_best ranks checkpoints; a step without it is not
    ranked."""
    keep_best_mode: str = flag("min", choices="min max", advanced=True, needs="keep_best")
    """Best value of keep_best_metric: the lowest (min) or the highest (max)."""
    keep_steps: tuple[int, ...] = flag((), min=1, needs="keep_last_n")
    """Also keep the checkpoints of these steps."""
    keep_ranges: str = flag("", parse=parse_ranges, needs="keep_last_n")
    """Also keep the checkpoints in ranges of steps: 1-1000:100,20000- keeps the multiples of 100
    up to step 1000, and all from step 20000."""

    @property
    def ranks_evaluations(self) -> bool:
        """Whether `keep_best` ranks by a metric of held-out data."""
        return self.keep_best_metric.startswith("eval/")


@dataclass(frozen=True)
class CheckpointConfig(KeepConfig):
    """Checkpoints: when they are saved, where, and which one a run starts from.

    When to change: `checkpoint_interval` is the work that you can afford to lose. Set `keep_last_n`
    on a small disk, `keep_best` with validation, `ckpt_load_path` to start from the weights of
    another run.
    """

    ckpt_save_path: str = flag("", form="path")
    """Folder of checkpoints, which the run saves and resumes from (default: checkpoints/ in the
    run directory)."""
    ckpt_load_path: str = flag("", form="path", in_name=True)
    """Run directory, folder of checkpoints, or one step_<N> folder, to start from if ckpt_save_path
    holds no checkpoint."""
    resuming_dataset: bool = flag(True, in_name=True, needs="ckpt_load_path")
    """Resume the data where the run of ckpt_load_path stopped; False keeps only step and
    optimizer; no effect with load_model_only."""
    load_model_only: bool = flag(False, in_name=True)
    """Load only the weights of ckpt_load_path; the run starts at step 0 with new optimizer and
    data, as it always does with init_from_hf."""
    resume: str = flag("auto", choices="auto must never")
    """Resume from the newest valid checkpoint: auto if there is one, must requires one, never
    starts from scratch."""
    resume_step: int | None = flag(None, min=1)
    """Go back to the checkpoint of this step, and rename later ones; the same command, given
    again, resumes from the checkpoints that it has saved since."""
    export_interval: int = flag(0, min=0)
    """Steps between checkpoints that are also exported, to Hugging Face checkpoints in exports/ of
    the run directory; the last step is exported too; 0 is off."""
    checkpoint_interval: int = flag(1000, min=0)
    """Steps between checkpoints; the last step is saved too; 0 saves only the last step; no effect
    with checkpoint_schedule."""
    save_last: bool = flag(True, advanced=True)
    """Save the last step; benchmarks do not."""
    checkpoint_schedule: str = flag("")
    """Steps of checkpoints, instead of checkpoint_interval: 10@100,18@1000,1500 saves every 10
    steps up to step 100, then every 18 steps up to step 1000, then every 1500 steps."""
    async_checkpoint: bool = flag(True)
    """Write checkpoints in the background; training waits only for the copy to host memory."""

    def __post_init__(self) -> None:
        if self.resume_step is not None and self.resume == "never":
            raise UserError(
                f"--resume_step={self.resume_step} and --resume=never cannot be used together; "
                "remove --resume"
            )
        self._check_exports()

    def _check_exports(self) -> None:
        if not self.export_interval:
            return
        exports = f"--export_interval={self.export_interval}"
        if self.checkpoint_schedule:
            raise UserError(
                f"{exports} requires checkpoints at an interval, not a --checkpoint_schedule; set "
                "--checkpoint_interval instead"
            )
        if not self.checkpoint_interval:
            raise UserError(
                f"{exports} requires checkpoints, but --checkpoint_interval=0; set "
                f"--checkpoint_interval={self.export_interval}"
            )
        if self.export_interval % self.checkpoint_interval:
            raise UserError(
                f"{exports} must be a multiple of --checkpoint_interval={self.checkpoint_interval}; "
                f"use --export_interval={self.checkpoint_interval}"
            )

    @property
    def saves(self) -> bool:
        """Whether the flags ask for any checkpoint; a launch that is stopped saves one too."""
        return self.save_last or bool(self.checkpoint_interval or self.checkpoint_schedule)
