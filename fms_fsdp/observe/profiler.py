"""The profiler: a trace of a few steps that TensorBoard's profiler page and Perfetto open."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Protocol

import torch
from torch.profiler import ProfilerActivity, profile, schedule, tensorboard_trace_handler

from fms_fsdp.config import LogConfig


class Steps(Protocol):
    """What the loop needs of a profiler: to be told that a step ended."""

    def step(self) -> None: ...


class NoProfiler:
    """Costs nothing."""

    def step(self) -> None:
        pass


def build_profiler(section: LogConfig, folder: Path, device: torch.device, rank: int) -> AbstractContextManager[Steps]:
    """The profiler of this rank if asked for: waits, warms up, then records `--profiler_active` steps, once."""
    if not section.use_profiler:
        return nullcontext(NoProfiler())
    activities = [ProfilerActivity.CPU] + ([ProfilerActivity.CUDA] if device.type == "cuda" else [])
    return profile(
        activities=activities,
        schedule=schedule(
            wait=section.profiler_wait, warmup=section.profiler_warmup, active=section.profiler_active, repeat=1
        ),
        on_trace_ready=tensorboard_trace_handler(str(folder), worker_name=f"rank{rank}"),
        record_shapes=True,
    )
