"""What surrounds training: validation, checkpoints, logs, traces. Their flags may change on a resume: they change nothing in what is trained."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from fms_fsdp.config.flag import check_path, check_source_name, flag, joined


@dataclass(frozen=True)
class EvalConfig:
    """Validation on held-out data; it changes nothing in what is trained."""

    RESUME: ClassVar[str] = "free"

    eval_interval: int = flag(
        0, "steps between evaluations on held-out data, the last step is evaluated too; 0 is off", minimum=0
    )
    eval_steps: int = flag(
        10,
        "global batches of each held-out source in an evaluation, always the same; at most one epoch",
        minimum=1,
        maximum=10**6,
    )
    eval_at_start: bool = flag(False, "evaluate before the first step of every launch too")
    eval_data_path: str = flag(
        "",
        "folder of held-out token shards (default: validation/ in data_path, as `prepare --split` writes it; else data_path)",
    )
    eval_datasets: tuple[str, ...] = flag((), "held-out sources, subfolders there (default: all of them)")
    eval_test: bool = flag(False, "evaluate test/ in data_path once, after the last step")

    def __post_init__(self) -> None:
        check_path("--eval_data_path", self.eval_data_path)
        for name in self.eval_datasets:
            check_source_name("--eval_datasets", name)


@dataclass(frozen=True)
class CheckpointConfig:
    """What is saved, where, what is kept, and what a run starts from."""

    RESUME: ClassVar[str] = "free"

    ckpt_save_path: str = flag(
        "", "folder of checkpoints (default: checkpoints/ in the run folder); a complete one there is resumed"
    )
    ckpt_load_path: str = flag(
        "", "checkpoint root or step folder to start from when ckpt_save_path holds none", in_name=True
    )
    resuming_dataset: bool = flag(
        True,
        "data go on where the run of ckpt_load_path stood; off: step and optimizer go on, this run's data begin",
        in_name=True,
    )
    load_model_only: bool = flag(
        False, "take only the weights of ckpt_load_path: fresh optimizer, step 0, fresh data", in_name=True
    )
    resume: str = flag(
        "auto",
        "go on from the newest sound checkpoint if there is one, insist on one, or insist on a fresh start",
        choices=("auto", "must", "never"),
    )
    resume_step: int | None = flag(
        None,
        "go back to the checkpoint of this step and set later ones aside; those then made with this flag are gone on from",
        minimum=1,
    )
    checkpoint_interval: int = flag(
        1000, "steps between checkpoints; the last step is saved too; 0 saves only that", minimum=0
    )
    save_last: bool = flag(True, "save the last step; off for benchmarks", advanced=True)
    checkpoint_schedule: str = flag(
        "",
        "in its place: 10@100,18@1000,1500 saves every 10 steps up to 100, from there every 18 up to 1000, then every 1500",
    )
    async_checkpoint: bool = flag(
        True, "write checkpoints in the background: training waits only for the copy to host memory"
    )
    keep_last_n: int = flag(
        0, "keep the newest N checkpoints, delete others once a new one is complete; 0 keeps all", minimum=0
    )
    keep_every: int = flag(0, "beside keep_last_n keep the multiples of this for ever", minimum=0)
    keep_best: int = flag(0, "beside keep_last_n keep the N of the lowest validation loss", minimum=0)
    keep_steps: tuple[int, ...] = flag((), "beside keep_last_n keep these steps for ever", minimum=1)

    def __post_init__(self) -> None:
        check_path("--ckpt_save_path", self.ckpt_save_path)
        check_path("--ckpt_load_path", self.ckpt_load_path)
        given = [name for name in ("keep_every", "keep_best", "keep_steps") if getattr(self, name)]
        if given and not self.keep_last_n:
            raise ValueError(
                f"--{given[0]} ({joined(getattr(self, given[0]))}) has no effect where --keep_last_n (0) keeps every "
                f"checkpoint; set that"
            )
        if self.resume_step is not None and self.resume == "never":
            raise ValueError(
                f"--resume_step ({self.resume_step}) needs a checkpoint; leave out --resume=never"
            )


@dataclass(frozen=True)
class LogConfig:
    """Where a run lives and what it tells."""

    RESUME: ClassVar[str] = "free"

    output_dir: str = flag("", "the run folder (default: runs/<run_name>)")
    run_name: str = flag(
        "", "name of the run (default: the variant and a hash of the flags that are in the name)"
    )
    report_interval: int = flag(
        10, "steps between reports; the first and the last step always report", minimum=1
    )
    log_param_norm: bool = flag(False, "report the norm of all parameters")
    log_num_zeros: bool = flag(False, "report how many entries of the gradient are zero", advanced=True)
    log_all_ranks: bool = flag(
        False, "every rank appends its lines to log.rank<N>.txt, not rank 0 alone to log.txt"
    )
    trackers: tuple[str, ...] = flag(
        ("tensorboard",),
        "who is told beside metrics.jsonl; none of them can stop a run (see docs/metrics.md)",
        choices=("none", "tensorboard", "wandb", "mlflow", "aim", "codecarbon"),
    )
    tracker_project: str = flag("fms-fsdp", "project or experiment that trackers file the run under")
    tracker_entity: str = flag("", "team or account of wandb (default: the user's own)")
    tracker_metrics: tuple[str, ...] = flag(
        (), "names of the metrics that trackers get, such as loss,lr,*_ms (default: all)", advanced=True
    )
    tensorboard_dir: str = flag("", "folder of TensorBoard's files (default: tensorboard/ in the run folder)")

    def __post_init__(self) -> None:
        check_path("--output_dir", self.output_dir)
        check_path("--tensorboard_dir", self.tensorboard_dir)
        if "none" in self.trackers and len(self.trackers) > 1:
            raise ValueError(
                f"--trackers ({','.join(self.trackers)}) must not name others beside none; leave one out"
            )


@dataclass(frozen=True)
class ProfilerConfig:
    """Traces of a few steps; also on demand: touch PROFILE in the run folder, or send SIGUSR2."""

    RESUME: ClassVar[str] = "free"

    use_profiler: bool = flag(False, "write a profiler trace of some steps of this launch")
    profiler_dir: str = flag("", "folder of traces (default: profile_traces/ in the run folder)")
    profiler_ranks: tuple[int, ...] = flag((0,), "ranks that write traces; empty: all", minimum=0)
    profiler_wait: int = flag(3, "steps of this launch before the profiler warms up", minimum=0)
    profiler_warmup: int = flag(2, "steps the profiler runs without recording", minimum=0, advanced=True)
    profiler_active: int = flag(3, "steps recorded", minimum=1)
    profiler_shapes: bool = flag(True, "record the shapes of operands", advanced=True)
    profiler_stacks: bool = flag(False, "record Python stacks; slower, larger", advanced=True)
    profiler_memory: bool = flag(False, "record allocations", advanced=True)
    memory_snapshot: bool = flag(
        False,
        "record the GPU allocator's history in the profiler's steps; a snapshot is always left when memory runs out",
    )

    def __post_init__(self) -> None:
        check_path("--profiler_dir", self.profiler_dir)
