"""When a launch ends before the run does: signals, the stop file, steps, tokens and time, agreed on by all ranks.

Steps, tokens and samples are counted by every rank alike. What only one rank knows, a signal, the stop file, the clock,
is a *request*: before each step every rank tells its own, and their sum over ranks travels with the number of labels,
which the step adds up anyway. The launch then saves after that step and ends as "resume_me": the same command goes on.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import torch

from fms_fsdp.config import TrainingConfig
from fms_fsdp.runtime import HostCopy, job_end, process_age_s
from fms_fsdp.stop_signal import StopSignal

STOP_FILE = "STOP"


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
    _heard: HostCopy | None = None

    def requests(self) -> list[int]:
        """What this rank asks for before a step: a stop by signal, by the file, by the clock; each 0 or 1."""
        now = time.monotonic()
        self._step_began = now
        asked = [int(bool(self.signals.name)), 0, 0]
        if self.rank == 0:
            if now - self._file_checked >= 1.0:
                self._file_checked = now
                asked[1] = int((self.folder / STOP_FILE).exists())
            asked[2] = int(self._time_left_s() < self.margin_s)
        return asked

    def stop_after(self, step: int, requests: torch.Tensor) -> bool:
        """Whether this launch ends with `step`, alike on every rank. `requests`: their sums over ranks.

        On a GPU those of the step before count, so that the host does not wait for the device's newest work.
        """
        if step > self.start + 1:  # the first step compiles and warms up
            self._slowest_step_s = max(0.9 * self._slowest_step_s, time.monotonic() - self._step_began)
        self.signals.can_save = True
        heard, self._heard = self._heard, HostCopy(requests)
        if requests.device.type != "cuda":
            heard = self._heard
        self.reason = self._limit_reached(step) or self._request_heard(heard.read() if heard else [0, 0, 0])
        return bool(self.reason)

    def before_first_step(self) -> bool:
        """Whether the launch ends before it makes a step: --exit_step lies at or before its start."""
        if self.section.exit_step and self.section.exit_step <= self.start:
            self.reason = f"--exit_step ({self.section.exit_step}) is reached"
        return bool(self.reason)

    def _limit_reached(self, step: int) -> str:
        section, done = self.section, step - self.start
        if section.exit_interval and done >= section.exit_interval:
            return f"--exit_interval ({section.exit_interval}) steps are done"
        if section.exit_step and step >= section.exit_step:
            return f"--exit_step ({section.exit_step}) is reached"
        if section.exit_tokens and done * self.tokens_per_step >= section.exit_tokens:
            return f"--exit_tokens ({section.exit_tokens}) are reached"
        if section.exit_samples and done * self.rows_per_step >= section.exit_samples:
            return f"--exit_samples ({section.exit_samples}) are reached"
        return ""

    def _request_heard(self, requests: list[int]) -> str:
        by_signal, by_file, by_clock = requests
        if by_signal:
            return f"stopped by {self.signals.name or 'a signal to another rank'}"
        if by_file:
            return f"stopped by the file {self.folder / STOP_FILE}"
        if by_clock:
            return f"--exit_duration_in_mins ({self.section.exit_duration_in_mins}) or the job's end is near"
        return ""

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
