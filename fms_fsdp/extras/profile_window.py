"""One window of the profiler: it warms up, records some steps and writes the trace and its summary."""

from __future__ import annotations

import shlex
import time
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile, schedule

from fms_fsdp.config import ProfilerConfig
from fms_fsdp.distributed.runtime import log

_WRITTEN = (
    "trace %s; its times: python -m fms_fsdp trace --path=%s\n"
    "  https://ui.perfetto.dev and chrome://tracing open it; TensorBoard's profiler page needs the internet"
)


class ProfileWindow:
    """The steps that are profiled, from the next one on."""

    def __init__(
        self, section: ProfilerConfig, folder: Path, device: torch.device, rank: int
    ) -> None:
        self._section, self._folder, self._device, self._rank = section, folder, device, rank
        warmup, active = section.profiler_warmup, section.profiler_active
        self._left = warmup + active
        if section.memory_snapshot:
            torch.cuda.memory._record_memory_history(max_entries=200_000)
        of_gpu = [ProfilerActivity.CUDA] if device.type == "cuda" else []
        self._profile = profile(
            activities=[ProfilerActivity.CPU, *of_gpu],
            schedule=schedule(wait=0, warmup=warmup, active=active, repeat=1),
            on_trace_ready=self._write,
            record_shapes=section.profiler_shapes,
            with_stack=section.profiler_stacks,
            profile_memory=section.profiler_memory,
        )
        self._profile.start()

    def is_over_after_step(self) -> bool:
        """Takes in a step; returns whether the step was the last one of the window."""
        self._profile.step()
        self._left -= 1
        return self._left == 0

    def close(self) -> None:
        """Ends the window, which then holds the steps so far."""
        self._profile.stop()
        if self._section.memory_snapshot:
            dump_memory(self._folder, self._rank)
            torch.cuda.memory._record_memory_history(enabled=None)

    def _write(self, window: profile) -> None:
        self._folder.mkdir(parents=True, exist_ok=True)
        path = self._folder / f"rank{self._rank}.{time.time_ns()}.pt.trace.json"
        window.export_chrome_trace(str(path))
        by = "self_device_time_total" if self._device.type == "cuda" else "self_cpu_time_total"
        table = window.key_averages().table(sort_by=by, row_limit=20, max_name_column_width=70)
        path.with_name(path.name.replace("pt.trace.json", "summary.txt")).write_text(table)
        log.info(_WRITTEN, path, shlex.quote(str(path)))


def dump_memory(folder: Path, rank: int) -> None:
    """Writes the allocator's state, and its history if it was recorded, for
    https://docs.pytorch.org/memory_viz. Does nothing on a CPU."""
    if torch.cuda.is_available():
        folder.mkdir(parents=True, exist_ok=True)
        path = str(folder / f"memory_rank{rank}.pickle")
        torch.cuda.memory._dump_snapshot(path)  # type: ignore[no-untyped-call]
