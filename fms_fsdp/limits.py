"""When a launch ends before the run does: signals, the stop file, steps, tokens and time, agreed on by all ranks.

Every rank calls `Limits.stop_after(step)` after every step. Signals may reach any rank, the stop file and the clock are read by rank 0; one small
all-reduce on the CPU makes them everybody's. The launch then saves and ends as "resume_me": the same command goes on.
"""

from __future__ import annotations

import signal
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType

import torch

from fms_fsdp.config import TrainingConfig
from fms_fsdp.runtime import job_end, max_over_ranks, process_age_s

STOP_FILE = "STOP"
_NONE, _SIGNAL, _FILE, _STEPS, _STEP, _TOKENS, _SAMPLES, _TIME = range(8)


class StopSignal:
    """SIGTERM, SIGINT or SIGUSR1 asks for a stop after the current step; a second SIGINT interrupts at once."""

    def __init__(self) -> None:
        self.name = ""
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1):
            signal.signal(number, self._note)

    def _note(self, number: int, frame: FrameType | None) -> None:
        if self.name and number == signal.SIGINT:
            raise KeyboardInterrupt
        self.name = signal.Signals(number).name


@dataclass
class Limits:
    """The limits of one launch. `save_s()` is what the last checkpoint took, `reason` in words why the launch ends."""

    section: TrainingConfig
    folder: Path
    rank: int
    start: int
    rows_per_step: int
    tokens_per_step: int
    signals: StopSignal
    save_s: Callable[[], float]
    reason: str = ""
    _step_began: float = field(default_factory=time.monotonic)
    _slowest_step_s: float = 0.0
    _file_checked: float = 0.0

    def remove_stop_file(self) -> None:
        """At the start of a launch: a file older than this process asked an earlier launch to stop."""
        path = self.folder / STOP_FILE
        if self.rank == 0 and path.exists() and path.stat().st_mtime < time.time() - process_age_s():
            path.unlink(missing_ok=True)

    def stop_after(self, step: int) -> bool:
        """Whether this launch ends with `step` (collective, on the CPU: every rank, every step)."""
        now = time.monotonic()
        if step > self.start + 1:  # the first step compiles and warms up
            self._slowest_step_s = max(0.9 * self._slowest_step_s, now - self._step_began)
        self._step_began = now
        code = int(max_over_ranks(torch.tensor([self._own_code(step, now)])).item())
        self.reason = {
            _NONE: "",
            _SIGNAL: f"stopped by {self.signals.name or 'a signal to another rank'}",
            _FILE: f"stopped by the file {self.folder / STOP_FILE}",
            _STEPS: f"--exit_interval ({self.section.exit_interval}) steps are done",
            _STEP: f"--exit_step ({self.section.exit_step}) is reached",
            _TOKENS: f"--exit_tokens ({self.section.exit_tokens}) are reached",
            _SAMPLES: f"--exit_samples ({self.section.exit_samples}) are reached",
            _TIME: f"--exit_duration_in_mins ({self.section.exit_duration_in_mins}) or the job's end is near",
        }[code]
        return code != _NONE

    def _own_code(self, step: int, now: float) -> int:
        section, done = self.section, step - self.start
        if self.signals.name:
            return _SIGNAL
        if section.exit_interval and done >= section.exit_interval:
            return _STEPS
        if section.exit_step and step == section.exit_step:
            return _STEP
        if section.exit_tokens and done * self.tokens_per_step >= section.exit_tokens:
            return _TOKENS
        if section.exit_samples and done * self.rows_per_step >= section.exit_samples:
            return _SAMPLES
        if self.rank == 0:
            if self._time_left_s() < self.margin_s:
                return _TIME
            if now - self._file_checked >= 1.0:
                self._file_checked = now
                if (self.folder / STOP_FILE).exists():
                    return _FILE
        return _NONE

    @property
    def margin_s(self) -> float:
        """What one more step and a checkpoint may take: the slowest recent step, the last save with half as much again, and 10 s."""
        return 2 * self._slowest_step_s + 1.5 * self.save_s() + 10

    def _time_left_s(self) -> float:
        left = float("inf")
        if self.section.exit_duration_in_mins:
            left = 60 * self.section.exit_duration_in_mins - process_age_s()
        if (end := job_end()) is not None:
            left = min(left, end - time.time())
        return left
