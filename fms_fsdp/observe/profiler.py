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
from typing import TYPE_CHECKING, Any

import torch

from fms_fsdp.config import ProfilerConfig
from fms_fsdp.run.stop import process_age_s
from fms_fsdp.state import TrainState

if TYPE_CHECKING:
    from fms_fsdp.extras.profile_window import ProfileWindow

PROFILE_FILE = "PROFILE"


class StepProfiler:
    """The profiler of one rank."""

    def __init__(
        self, section: ProfilerConfig, run_folder: Path, device: torch.device, rank: int
    ) -> None:
        self._section, self._device, self._rank = section, device, rank
        self._file = run_folder / PROFILE_FILE
        self._folder = (
            Path(section.profiler_dir) if section.profiler_dir else run_folder / "profile_traces"
        )
        self._chosen = rank in section.profiler_ranks or not section.profiler_ranks
        self._open: ProfileWindow | None = None
        self._begin_at = section.profiler_wait if section.use_profiler and self._chosen else -1
        self._signalled = False
        self._looked, self._seen = 0.0, time.time() - process_age_s()
        signal.signal(signal.SIGUSR2, self._note)

    def _note(self, *_: Any) -> None:
        self._signalled = True

    def step(self, state: TrainState) -> None:
        """Opens, advances or closes a window. Call it before the first step and after each step."""
        if self._open is not None:
            if self._open.is_over_after_step():
                self.close()
        elif state.steps_in_launch == self._begin_at or state.steps_in_launch and self._asked():
            self._begin()

    def close(self) -> None:
        """Ends an open window, which then holds the steps so far."""
        if self._open is not None:
            window, self._open = self._open, None
            window.close()

    def dump_at_failure(self, kind: type[BaseException] | None, *_: Any) -> None:
        """When memory ran out: leaves a snapshot of the allocator, as the end of a block of `with`."""
        if kind is not None and issubclass(kind, torch.OutOfMemoryError):
            from fms_fsdp.extras.profile_window import dump_memory

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

    def _begin(self) -> None:
        from fms_fsdp.extras.profile_window import ProfileWindow

        self._open = ProfileWindow(self._section, self._folder, self._device, self._rank)
