"""Flags of the outputs of a run: validation, checkpoints, logs, traces. A resume may change them."""

from __future__ import annotations

from dataclasses import dataclass

from fms_fsdp.config.flag import flag
from fms_fsdp.config.formats import parse_named_interval, parse_ranges
from fms_fsdp.config.values import joined
from fms_fsdp.errors import UserError


@dataclass(frozen=True)
class EvalConfig:
    """Validation on held-out data, which does not change the training.

    When to change: set `eval_interval` in every run whose result matters. More `eval_steps` make
    the loss less noisy and take longer.
    """

    eval_interval: int = flag(0, min=0)
    """Steps between validations on held-out data; the last step is validated too; 0 is off."""
    eval_epochs: float = flag(0.0, min=0, max=1e6, advanced=True)
    """Epochs between validations, where an epoch is as many tokens as all sources have; 0 is
    off."""
    eval_steps: int = flag(
        10,
        min=1,
        max=10**6,
        needs="eval_interval|eval_epochs|eval_at_start|eval_test|test_data_path",
    )
    """Global batches of each held-out source per validation: always the same ones, at most one
    epoch."""
    eval_at_start: bool = flag(False)
    """Also validate before the first step of each launch."""
    eval_data_path: str = flag("", form="path", needs="eval_interval|eval_epochs|eval_at_start")
    """Folder of held-out token shards (default: validation/ in data_path, which `prepare --split`
    writes, or else data_path)."""
    eval_datasets: tuple[str, ...] = flag(
        (), form="source name", needs="eval_interval|eval_epochs|eval_at_start"
    )
    """Held-out sources, as names of subfolders of eval_data_path (default: all)."""
    eval_test: bool = flag(False)
    """Evaluate test/ in data_path once, after the last step."""
    test_data_path: str = flag("", form="path")
    """Folder of token shards to evaluate once, after the last step, instead of test/ in
    data_path."""
    test_steps: int | None = flag(None, min=1, max=10**6, needs="eval_test|test_data_path")
    """Global batches of each source in the test evaluation (default: eval_steps)."""
    sample_interval: int = flag(0, min=0)
    """Steps between generated texts, also after the last step; 0 is off; requires a tokenizer in
    the folder of the data."""
    sample_prompts: tuple[str, ...] = flag((), form="text or file", needs="sample_interval")
    r"""Prompts of generated texts, or a file with one prompt per line (default: a new document);
    \, is a comma within a prompt."""

    @property
    def is_on(self) -> bool:
        """Whether the run validates during training."""
        return bool(self.eval_interval or self.eval_epochs or self.eval_at_start)


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
    data."""
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
        if self.load_model_only and not self.ckpt_load_path:
            raise UserError(
                "--load_model_only=True requires --ckpt_load_path; set it to the checkpoint"
            )
        interval = 0 if self.checkpoint_schedule else self.checkpoint_interval
        if self.export_interval and (not interval or self.export_interval % interval):
            scheduled = ", without --checkpoint_schedule" * bool(self.checkpoint_schedule)
            raise UserError(
                f"--export_interval={self.export_interval} must be a multiple of "
                f"--checkpoint_interval={self.checkpoint_interval}{scheduled}; use "
                f"--export_interval={interval or self.checkpoint_interval or 1000}"
            )

    @property
    def saves(self) -> bool:
        """Whether the flags ask for any checkpoint; a launch that is stopped saves one too."""
        return self.save_last or bool(self.checkpoint_interval or self.checkpoint_schedule)


@dataclass(frozen=True)
class LogConfig:
    """The run directory and its logs.

    When to change: `run_name` for a name that you can remember. A larger `report_interval` if a
    step is short.
    """

    output_dir: str = flag("", form="path")
    """Run directory (default: runs/<run_name>)."""
    run_name: str = flag("", form="folder name")
    """Name of the run (default: the variant and a hash of the flags marked *name* in
    docs/reference/flags.md)."""
    report_interval: int = flag(10, min=1)
    """Steps between log lines and metrics; the first and the last step are always logged."""
    print_interval: int = flag(0, min=0)
    """Steps between short lines with step and time, which do not synchronize with the device; 0
    is off."""
    diagnostics: bool = flag(False)
    """Log memory, shared memory, temperatures and clocks if the machine reports them."""
    peak_tflops: float | None = flag(None, above=0, max=1e9, advanced=True)
    """Peak dense TFLOP/s of one device, the reference of mfu (default: by the GPU's name)."""
    log_param_norm: bool = flag(False)
    """Log the norm of all parameters."""
    log_num_zeros: bool = flag(False, advanced=True)
    """Log the number of zeros in the gradient."""
    log_all_ranks: bool = flag(False)
    """Let each rank write log.rank<N>.txt, not only rank 0 log.txt."""
    trackers: tuple[str, ...] = flag(("tensorboard",), choices="none tensorboard wandb")
    """Programs that also receive the metrics (docs/guides/monitoring.md); a failing tracker never stops a
    run."""
    tracker_project: str = flag("fms-fsdp")
    """Name of the project or experiment under which trackers file the run."""
    tracker_entity: str = flag("", needs="trackers=wandb")
    """Team or account of wandb (default: the user's)."""
    tracker_metrics: tuple[str, ...] = flag((), advanced=True, parse=parse_named_interval)
    """Metrics that trackers receive, e.g. loss,lr,*_ms (default: all); *_ms@100 sends them at most
    every 100 steps."""
    tensorboard_dir: str = flag("", form="path", needs="trackers=tensorboard")
    """Folder of TensorBoard files (default: tensorboard/ in the run directory)."""
    tensorboard_queue_size: int = flag(
        1, min=1, max=10**6, advanced=True, needs="trackers=tensorboard"
    )
    """Events per write to the TensorBoard file; with 1 a killed run loses none; set more for slow
    disks."""

    def __post_init__(self) -> None:
        if "none" in self.trackers and len(self.trackers) > 1:
            raise UserError(
                f"--trackers={joined(self.trackers)} must not combine none with others; remove none"
            )


@dataclass(frozen=True)
class ProfilerConfig:
    """Traces of a few steps.

    When to change: set `use_profiler`; memory and shapes make traces large.
    """

    use_profiler: bool = flag(False)
    """Write a profiler trace of a few steps of this launch."""
    profiler_dir: str = flag("", form="path")
    """Folder of traces (default: profile_traces/ in the run directory)."""
    profiler_ranks: tuple[int, ...] = flag((0,), min=0)
    """Ranks that write traces; empty is all ranks."""
    profiler_wait: int = flag(3, min=0)
    """Steps of this launch before the profiler warms up."""
    profiler_warmup: int = flag(2, min=0, advanced=True)
    """Steps of profiler warmup, which are not recorded."""
    profiler_active: int = flag(3, min=1)
    """Steps that the profiler records."""
    profiler_shapes: bool = flag(True, advanced=True)
    """Record the shapes of tensors."""
    profiler_stacks: bool = flag(False, advanced=True)
    """Record Python stacks, which makes traces larger."""
    profiler_memory: bool = flag(False, advanced=True)
    """Record allocations."""
    memory_snapshot: bool = flag(False)
    """Record the history of GPU memory during the profiled steps, not only if memory runs out."""
