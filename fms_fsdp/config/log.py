"""Flags of logs, trackers and traces. A resume may change them."""

from __future__ import annotations

from dataclasses import dataclass

from fms_fsdp.config.flag import flag
from fms_fsdp.config.formats import parse_named_interval
from fms_fsdp.config.values import joined
from fms_fsdp.errors import UserError


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
