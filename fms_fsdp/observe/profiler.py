"""The profiler: traces of a few steps that TensorBoard's profiler page and Perfetto open, from the start of a
run or on demand.

    --use_profiler               after --profiler_wait steps of the launch
    touch runs/NAME/PROFILE      in a running job, on every rank of --profiler_ranks; touch again to repeat
    kill -USR2 PID               in a running job, on that process alone

Each window warms up, records `--profiler_active` steps and writes `profile_traces/`: the trace, its summary
as text, on request the allocator's history. Between windows a step costs one comparison, and once a second
one look at a file.
"""

from __future__ import annotations

import signal
import time
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile, schedule

from fms_fsdp.config import ProfilerConfig
from fms_fsdp.runtime import log, process_age_s
from fms_fsdp.state import Hook, Progress, StepResult

PROFILE_FILE = "PROFILE"
_WRITTEN = (
    "trace %s; its times: python -m fms_fsdp trace --path=%s\n"
    "  https://ui.perfetto.dev and chrome://tracing open it; TensorBoard's profiler page needs the internet"
)


class StepProfiler(Hook):
    """The profiler of one rank."""

    def __init__(self, section: ProfilerConfig, run_folder: Path, device: torch.device, rank: int) -> None:
        self._section, self._device, self._rank = section, device, rank
        self._file = run_folder / PROFILE_FILE
        self._folder = Path(section.profiler_dir) if section.profiler_dir else run_folder / "profile_traces"
        self._chosen = rank in section.profiler_ranks or not section.profiler_ranks
        self._open: profile | None = None
        self._left = -1
        self._begin_at = section.profiler_wait if section.use_profiler and self._chosen else -1
        self._signalled = False
        self._looked, self._seen = 0.0, time.time() - process_age_s()
        signal.signal(signal.SIGUSR2, self._note)

    def _note(self, *_: Any) -> None:
        self._signalled = True

    def before_step(self, progress: Progress) -> None:
        """Opens a window that begins with the first step of the launch."""
        if self._begin_at == progress.steps_of_launch == 0:
            self._open_window()

    def after_step(self, progress: Progress, result: StepResult) -> None:
        """Opens, moves on or closes a window."""
        if self._open is not None:
            self._open.step()
            self._left -= 1
            if self._left == 0:
                self.close()
        elif progress.steps_of_launch == self._begin_at or self._asked():
            self._open_window()

    def close(self) -> None:
        """Ends an open window, which then holds the steps so far."""
        if self._open is not None:
            window, self._open = self._open, None
            window.stop()
            if self._section.memory_snapshot:
                dump_memory(self._folder, self._rank)
                torch.cuda.memory._record_memory_history(enabled=None)

    def dump_at_failure(self, kind: type[BaseException] | None, *_: Any) -> None:
        """When memory ran out: leaves a snapshot of the allocator, as the end of a block of `with`."""
        if kind is not None and issubclass(kind, torch.OutOfMemoryError):
            dump_memory(self._folder, self._rank)

    def _asked(self) -> bool:
        if self._signalled:
            self._signalled = False
            return True
        now = time.monotonic()
        if not self._chosen or now - self._looked < 1.0:
            return False
        self._looked = now
        try:
            touched = self._file.stat().st_mtime
        except OSError:
            return False
        asked, self._seen = touched > self._seen, max(touched, self._seen)
        return asked

    def _open_window(self) -> None:
        section = self._section
        warmup, active = section.profiler_warmup, section.profiler_active
        self._left = warmup + active
        if section.memory_snapshot:
            torch.cuda.memory._record_memory_history(max_entries=200_000)
        of_gpu = [ProfilerActivity.CUDA] if self._device.type == "cuda" else []
        self._open = profile(
            activities=[ProfilerActivity.CPU, *of_gpu],
            schedule=schedule(wait=0, warmup=warmup, active=active, repeat=1),
            on_trace_ready=self._write,
            record_shapes=section.profiler_shapes,
            with_stack=section.profiler_stacks,
            profile_memory=section.profiler_memory,
        )
        self._open.start()

    def _write(self, window: profile) -> None:
        self._folder.mkdir(parents=True, exist_ok=True)
        path = self._folder / f"rank{self._rank}.{time.time_ns()}.pt.trace.json"
        window.export_chrome_trace(str(path))
        by = "self_device_time_total" if self._device.type == "cuda" else "self_cpu_time_total"
        table = window.key_averages().table(sort_by=by, row_limit=20, max_name_column_width=70)
        path.with_name(path.name.replace("pt.trace.json", "summary.txt")).write_text(table)
        log.info(_WRITTEN, path, path)


def dump_memory(folder: Path, rank: int) -> None:
    """Writes the allocator's state, and its history if it was recorded, for
    https://docs.pytorch.org/memory_viz. Does nothing on a CPU."""
    if torch.cuda.is_available():
        folder.mkdir(parents=True, exist_ok=True)
        path = str(folder / f"memory_rank{rank}.pickle")
        torch.cuda.memory._dump_snapshot(path)  # type: ignore[no-untyped-call]
