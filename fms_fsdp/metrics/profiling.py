"""Traces of a few steps by torch.profiler, and snapshots of the GPU's memory.

With --use_profiler, `profile_traces/` of the run directory gets a trace, which TensorBoard and
https://ui.perfetto.dev open, and a summary as text.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch.autograd import DeviceType
from torch.autograd.profiler_util import FunctionEvent
from torch.profiler import ProfilerActivity, profile, schedule

from fms_fsdp.config import ProfilerConfig
from fms_fsdp.distributed import torch_private
from fms_fsdp.logs import log, rank_log

_COMMUNICATION = ("nccl", "gloo:", "c10d::", "record_param_comms", "_c10d_functional")
_CPU_COMPUTE = ("aten::", "Torch-Compiled Region", "CompiledFunction")
_RANGES = ("data", "forward", "backward", "optimizer")


class StepProfiler:
    """Traces --profiler_active steps of this rank, after --profiler_wait and --profiler_warmup."""

    def __init__(
        self, cfg: ProfilerConfig, run_folder: Path, device: torch.device, rank: int
    ) -> None:
        self._cfg = cfg
        self._rank = rank
        self._folder = run_folder / "profile_traces"
        if cfg.profiler_dir:
            self._folder = Path(cfg.profiler_dir)
        self._profile: profile | None = None
        activities = [ProfilerActivity.CPU]
        self._sort_by = "self_cpu_time_total"
        if device.type == "cuda":
            activities.append(ProfilerActivity.CUDA)
            self._sort_by = "self_device_time_total"
        if not cfg.use_profiler:
            return
        if cfg.profiler_ranks and rank not in cfg.profiler_ranks:
            return
        if cfg.memory_snapshot:
            torch_private.record_memory(max_entries=200_000)
        wait = cfg.profiler_wait
        warmup = cfg.profiler_warmup
        active = cfg.profiler_active
        self._steps_left = wait + warmup + active
        self._profile = profile(
            activities=activities,
            schedule=schedule(wait=wait, warmup=warmup, active=active, repeat=1),
            on_trace_ready=self._write,
            record_shapes=cfg.profiler_shapes,
            with_stack=cfg.profiler_stacks,
            profile_memory=cfg.profiler_memory,
        )
        self._profile.start()

    def step(self) -> None:
        """Counts a step; writes the trace after the last one."""
        if self._profile is not None:
            self._profile.step()
            self._steps_left -= 1
            if self._steps_left == 0:
                self.close()

    def close(self) -> None:
        """Ends profiling; a launch that ends early has a trace of the steps so far."""
        if self._profile is not None:
            running = self._profile
            self._profile = None
            running.stop()
            if self._cfg.memory_snapshot:
                dump_memory(self._folder, self._rank)
                torch_private.record_memory(None)

    def dump_at_failure(self, kind: type[BaseException] | None, *_: Any) -> None:
        """Writes a memory snapshot after running out of memory, as an exit callback of `with`."""
        if kind is not None and issubclass(kind, torch.OutOfMemoryError):
            dump_memory(self._folder, self._rank)

    def _write(self, finished: profile) -> None:
        path = self._folder / f"rank{self._rank}.{time.time_ns()}.pt.trace.json"
        summary = path.with_name(path.name.replace("pt.trace.json", "summary.txt"))
        table = finished.key_averages().table(self._sort_by, row_limit=20, max_name_column_width=70)
        events = finished.events()  # type: ignore[no-untyped-call]
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            finished.export_chrome_trace(str(path))
            summary.write_text(f"{summarize(events)}\n\n{table}", encoding="utf-8")
        except OSError as error:  # a training does not end for its profile
            rank_log.warning("the profiler cannot write %s: %s", path, error.strerror)
            return
        log.info("profiler trace %s, summary %s", path, summary.name)


def dump_memory(folder: Path, rank: int) -> None:
    """Writes the allocator's state for https://docs.pytorch.org/memory_viz; nothing on a CPU."""
    if torch.cuda.is_available():
        path = str(folder / f"memory_rank{rank}.pickle")
        try:
            folder.mkdir(parents=True, exist_ok=True)
            torch_private.write_memory_snapshot(path)
        except OSError as error:
            rank_log.warning("cannot write %s: %s", path, error.strerror)


def summarize(events: Iterable[FunctionEvent]) -> str:
    """Returns the time per step of compute, exposed communication and idle, as a table.

    Compute is the union of GPU kernels, or of CPU operators without a GPU. Communication is
    exposed where no compute runs.
    """
    spans: dict[str, list[tuple[float, float]]] = {"compute": [], "communication": []}
    events = list(events)
    on_gpu = any(event.device_type == DeviceType.CUDA for event in events)
    for event in events:
        span = (event.time_range.start, event.time_range.end)
        name = event.name
        is_gpu = event.device_type == DeviceType.CUDA
        is_step = name.startswith("ProfilerStep")  # "ProfilerStep*" for each step
        if is_step or name in _RANGES:
            if not is_gpu:
                spans.setdefault("step" if is_step else name, []).append(span)
        elif is_gpu == on_gpu and not event.is_user_annotation:
            if any(word in name.lower() for word in _COMMUNICATION):
                spans["communication"].append(span)
            elif is_gpu or name.startswith(_CPU_COMPUTE):
                spans["compute"].append(span)
    steps = spans.pop("step", [])
    if not steps:
        return "no complete step was profiled"
    begin = min(start for start, _ in steps)
    end = max(stop for _, stop in steps)
    compute = union_length(spans["compute"], begin, end)
    busy = union_length(spans["compute"] + spans["communication"], begin, end)
    times = {"compute": compute, "exposed communication": busy - compute}
    times["idle" if on_gpu else "idle or waiting"] = end - begin - busy
    for name in _RANGES:
        times[f"range {name}"] = union_length(spans.get(name, []), begin, end)
    lines = [f"{len(steps)} steps of {(end - begin) / 1000 / len(steps):.2f} ms"]
    for name, us in times.items():
        lines.append(f"{name:24}{us / 1000 / len(steps):10.2f} ms{us / (end - begin):8.1%}")
    return "\n".join(lines)


def union_length(spans: Sequence[tuple[float, float]], begin: float, end: float) -> float:
    """Returns the length of the union of [start, stop) spans within [begin, end)."""
    total = 0.0
    for start, stop in sorted(spans):
        total += max(0.0, min(stop, end) - max(start, begin))
        begin = max(begin, stop)
    return total
