"""When a launch ends before the run does: signals, the stop file, steps, tokens and time, agreed on by all ranks.

Every rank calls `Limits.stop_after(step)` after every step. Signals may reach any rank, the stop file and the clock are read by rank 0; one small
all-reduce on the CPU makes them everybody's. The launch then saves and ends as "resume_me": the same command goes on.
"""

from __future__ import annotations

import math
import os
import signal
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType

import torch

from fms_fsdp.config import TrainingConfig
from fms_fsdp.runtime import max_over_ranks, process_age_s

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
    """The limits of one launch, and `reason`: in words, why it ends.

    `save_s(step)`: seconds that saving may take if the launch ends after the step that follows. `spent`: seconds of this launch by part.
    """

    section: TrainingConfig
    folder: Path
    rank: int
    start: int
    rows_per_step: int
    tokens_per_step: int
    signals: StopSignal
    save_s: Callable[[int], float]
    spent: Mapping[str, float]
    eval_interval: int
    reason: str = ""
    _step_began: float = field(default_factory=time.monotonic)
    _slowest_step_s: float = 0.0
    _slowest_eval_s: float = 0.0
    _spent_before: Mapping[str, float] = field(default_factory=dict)
    _file_checked: float = 0.0

    def remove_stop_file(self) -> None:
        """At the start of a launch: a file older than this process asked an earlier launch to stop."""
        path = self.folder / STOP_FILE
        if self.rank == 0 and path.exists() and path.stat().st_mtime < time.time() - process_age_s():
            path.unlink(missing_ok=True)

    def stop_after(self, step: int) -> bool:
        """Whether this launch ends with `step` (collective, on the CPU: every rank, every step)."""
        now = time.monotonic()
        self._measure(step, now)
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

    def _measure(self, step: int, now: float) -> None:
        """Notes how long the last step took, and apart from it the evaluation and the save before it."""
        parts = ("eval", "checkpoint")
        beside = {part: self.spent.get(part, 0.0) - self._spent_before.get(part, 0.0) for part in parts}
        if step > self.start + 1:  # the first step compiles and warms up
            step_s = now - self._step_began - sum(beside.values())
            self._slowest_step_s = max(0.9 * self._slowest_step_s, step_s)
        self._slowest_eval_s = max(self._slowest_eval_s, beside["eval"])
        self._step_began, self._spent_before = now, dict(self.spent)

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
            left_s = self._time_left_s()
            if left_s < math.inf and left_s < self.margin_s(step):
                return _TIME
            if now - self._file_checked >= 1.0:
                self._file_checked = now
                if (self.folder / STOP_FILE).exists():
                    return _FILE
        return _NONE

    def margin_s(self, step: int) -> float:
        """What another step after `step` and the end may take: the slowest recent step twice, the evaluations that are due, the saves with
        half as much again, and 10 s; or `--exit_margin_s`."""
        if self.section.exit_margin_s is not None:
            return self.section.exit_margin_s
        num_evals = sum(self.eval_interval > 0 and at % self.eval_interval == 0 for at in (step, step + 1))
        return 2 * self._slowest_step_s + num_evals * self._slowest_eval_s + 1.5 * self.save_s(step) + 10

    def _time_left_s(self) -> float:
        left = math.inf
        if self.section.exit_duration_in_mins:
            left = 60 * self.section.exit_duration_in_mins - process_age_s()
        if job_end := os.environ.get("SLURM_JOB_END_TIME", ""):
            left = min(left, float(job_end) - time.time())
        return left
