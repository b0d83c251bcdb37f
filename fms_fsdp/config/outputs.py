"""The flags of what a run gives out: held-out losses, checkpoints, logs, traces. A resume may change them."""

from __future__ import annotations

from dataclasses import dataclass

from fms_fsdp.config.flag import free_flag
from fms_fsdp.config.spans import parse_named_interval, parse_ranges


# fmt: off
@dataclass(frozen=True)
class EvalConfig:
    """Validation on held-out data, which changes nothing in the training.

    When to change: set `eval_interval` in every run whose result matters. More `eval_steps` make the loss
    less noisy and take longer.
    """

    eval_interval: int = free_flag(0, minimum=0,
        help="number of steps between evaluations on held-out data; the last step is evaluated too; 0 is off")
    eval_epochs: float = free_flag(0.0, minimum=0, maximum=1e6, advanced=True,
        help="also evaluate each time that so many passes over the data (as many tokens as all sources have) "
        "are read; 0 is off")
    eval_steps: int = free_flag(10, minimum=1, maximum=10**6,
        help="global batches of each held-out source in an evaluation: always the same, at most one epoch")
    eval_at_start: bool = free_flag(False, help="also evaluate before the first step of every launch")
    eval_data_path: str = free_flag("", form="path",
        help="folder of held-out token shards (default: validation/ in data_path, as `prepare --split` makes "
        "that folder, else data_path)")
    eval_datasets: tuple[str, ...] = free_flag((), form="source name",
        help="held-out sources, by the names of their subfolders in eval_data_path (default: all)")
    eval_test: bool = free_flag(False, help="evaluate test/ in data_path once, after the last step")
    test_data_path: str = free_flag("", form="path",
        help="folder of token shards to evaluate once, after the last step, in place of test/ in data_path")
    test_steps: int | None = free_flag(None, minimum=1, maximum=10**6,
        help="number of global batches of each source in the evaluation of test data (default: eval_steps)")
    sample_interval: int = free_flag(0, minimum=0, part="samples",
        help="number of steps between texts that the model writes, also after the last step; 0 is off; the "
        "folder of the data must hold a tokenizer")
    sample_prompts: tuple[str, ...] = free_flag((), form="text", part="samples",
        help="beginnings of sampled texts, or a file with one in each line (default: a new document)")

    @property
    def is_on(self) -> bool:
        """Whether the run evaluates during training."""
        return bool(self.eval_interval or self.eval_epochs or self.eval_at_start)


@dataclass(frozen=True)
class KeepConfig:
    """Which checkpoints stay when a new one is complete; `ckpt prune` has the same flags."""

    keep_last_n: int = free_flag(0, minimum=0,
        help="keep the newest N checkpoints and delete the others when a new one is complete; 0 keeps all")
    keep_every: int = free_flag(0, minimum=0,
        help="with keep_last_n: also keep every checkpoint whose step is a multiple of this number")
    keep_best: int = free_flag(0, "beside keep_last_n: N checkpoints of least validation loss", minimum=0)
    keep_best_metric: str = free_flag("eval/loss", advanced=True,
        help="the metric of metrics.jsonl by which keep_best ranks checkpoints; a step without the metric is "
        "not ranked")
    keep_best_mode: str = free_flag("min", choices=("min", "max"), advanced=True,
        help="whether the least or the greatest value of keep_best_metric is the best")
    keep_steps: tuple[int, ...] = free_flag((), "beside keep_last_n: checkpoints of these steps", minimum=1)
    keep_ranges: str = free_flag("", parse=parse_ranges,
        help="beside keep_last_n: checkpoints in ranges of steps: 1-1000:100,20000- keeps the multiples of "
        "100 up to step 1000, and all from step 20000 on")

    @property
    def ranks_evaluations(self) -> bool:
        """Whether `keep_best` ranks by a metric of held-out data."""
        return self.keep_best_metric.startswith("eval/")


@dataclass(frozen=True)
class CheckpointConfig(KeepConfig):
    """Checkpoints: which ones a run saves and keeps, where, and from which one the run starts.

    When to change: `checkpoint_interval` is the work that you can bear to lose. `keep_last_n` where the disk
    is small, `keep_best` with validation. `ckpt_load_path` to start from another run's weights.
    """

    ckpt_save_path: str = free_flag("", form="path",
        help="folder of checkpoints, from which a run goes on too (default: checkpoints/ in the run folder)")
    ckpt_load_path: str = free_flag("", form="path", in_name=True,
        help="checkpoint folder, or one step_<N> folder, to start from if ckpt_save_path holds no checkpoint")
    resuming_dataset: bool = free_flag(True, in_name=True,
        help="go on in the data where the run of ckpt_load_path stopped; False keeps only step and optimizer")
    load_model_only: bool = free_flag(False, in_name=True,
        help="load only the weights of ckpt_load_path; the run starts at step 0 with new optimizer and data")
    resume: str = free_flag("auto", choices=("auto", "must", "never"),
        help="auto goes on from the newest sound checkpoint, if any; must demands one; never starts afresh")
    resume_step: int | None = free_flag(None, minimum=1,
        help="go back to the checkpoint of this step and set later ones aside; the same command, given "
        "again, goes on from the checkpoints that the command has made since")
    export_interval: int = free_flag(0, minimum=0, part="exports",
        help="number of steps between checkpoints that are exported too, to folders of Hugging Face in "
        "exports/ of the run folder; the last step is exported too; 0 is off")
    checkpoint_interval: int = free_flag(1000, minimum=0,
        help="number of steps between checkpoints; the last step is saved too; 0 saves only the last step")
    save_last: bool = free_flag(True, advanced=True, help="save the last step, unlike a benchmark")
    checkpoint_schedule: str = free_flag("",
        help="steps of checkpoints, not checkpoint_interval: 10@100,18@1000,1500 saves every 10 steps up to "
        "step 100, then every 18 steps up to step 1000, then every 1500 steps")
    async_checkpoint: bool = free_flag(True,
        help="write checkpoints in the background; training waits only for the copy to host memory")
    # fmt: on


# fmt: off
@dataclass(frozen=True)
class LogConfig:
    """The folder of a run, and the reports of a run.

    When to change: `run_name` for a name that you can remember. `report_interval` larger where a step
    is short.
    """

    output_dir: str = free_flag("", form="path", help="the run folder (default: runs/<run_name>)")
    run_name: str = free_flag("", form="folder name",
        help="name of the run (default: the variant and a hash of the flags that are in the name)")
    report_interval: int = free_flag(10, minimum=1,
        help="number of steps between reports; the first and the last step always report")
    print_interval: int = free_flag(0, minimum=0,
        help="number of steps between bare lines of step and time, which wait for no device; 0 is off")
    diagnostics: bool = free_flag(False, part="sensors",
        help="report memory, shared memory, temperatures and clocks that the machine shows")
    peak_tflops: float | None = free_flag(None, above=0, maximum=1e9, advanced=True,
        help="dense TFLOP/s of one device at best, against which mfu counts (default: by the GPU's name)")
    log_param_norm: bool = free_flag(False, help="report the norm of all parameters")
    log_num_zeros: bool = free_flag(False, "report the number of zeros in the gradient", advanced=True)
    log_all_ranks: bool = free_flag(False, "every rank writes log.rank<N>.txt, not only rank 0 log.txt")
    trackers: tuple[str, ...] = free_flag(("tensorboard",),
        choices=("none", "tensorboard", "wandb", "mlflow", "aim", "codecarbon"),
        help="programs that also receive the metrics (docs/metrics.md); no tracker can stop a run")
    tracker_project: str = free_flag("fms-fsdp", part="trackers",
        help="name of the project or experiment under which trackers file the run")
    tracker_entity: str = free_flag("", "team or account of wandb (default: the user's)", part="trackers")
    tracker_metrics: tuple[str, ...] = free_flag((), advanced=True, parse=parse_named_interval,
        help="names of the metrics that trackers receive, such as loss,lr,*_ms (default: all); *_ms@100 are "
        "those of every hundredth step at most")
    tensorboard_dir: str = free_flag("", form="path",
        help="folder of TensorBoard's files (default: tensorboard/ in the run folder)")
    tensorboard_queue_size: int = free_flag(1, minimum=1, maximum=10**6, advanced=True,
        help="events in one write to TensorBoard's file; with 1 a killed run loses none; more for slow disks")
    # fmt: on


# fmt: off
@dataclass(frozen=True)
class ProfilerConfig:
    """Traces of a few steps.

    A running launch also writes one on demand: create the file PROFILE in the run folder, or send SIGUSR2.

    When to change: a look at a few steps needs only `use_profiler`; memory and shapes make traces large.
    """

    use_profiler: bool = free_flag(False, help="write a profiler trace of some steps of this launch")
    profiler_dir: str = free_flag("", "folder of traces (default: profile_traces/ of the run)", form="path")
    profiler_ranks: tuple[int, ...] = free_flag((0,), "ranks that write traces; empty: all ranks", minimum=0)
    profiler_wait: int = free_flag(3, "steps of this launch before the profiler warms up", minimum=0)
    profiler_warmup: int = free_flag(2, "steps that the profiler does not record", minimum=0, advanced=True)
    profiler_active: int = free_flag(3, minimum=1, help="number of steps that the profiler records")
    profiler_shapes: bool = free_flag(True, advanced=True, help="record the shapes of operands")
    profiler_stacks: bool = free_flag(False, "record Python stacks, which makes traces larger", advanced=True)
    profiler_memory: bool = free_flag(False, advanced=True, help="record allocations")
    memory_snapshot: bool = free_flag(False,
        help="record the history of the GPU's memory in the profiler's steps, not only if memory runs out")
