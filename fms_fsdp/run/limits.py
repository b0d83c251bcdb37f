"""When a launch ends before the run does: signals, the stop file, steps, tokens and time, agreed on by all
ranks.

Steps, tokens and samples are counted by every rank alike. What only one rank knows, a signal, the stop file,
the clock, is a *request*: before each step every rank adds its own; their sum over ranks is sent with
the number of labels, which the step adds up anyway. The launch then saves after that step and ends as
"resume_me": the same command goes on.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from fms_fsdp.config import TrainingConfig
from fms_fsdp.run.stop_signal import StopSignal
from fms_fsdp.runtime import HostCopy, job_end, process_age_s
from fms_fsdp.state import Hook, Progress, Requests, StepResult

STOP_FILE = "STOP"


@dataclass
class Limits(Hook):
    """The limits of one launch; the reason of its end is written to `progress.stop`. `spent`: seconds of this
    launch by part."""

    tells = ("requests", "stop")

    section: TrainingConfig
    folder: Path
    is_main: bool
    signals: StopSignal
    spent: Mapping[str, float]
    eval_interval: int
    _step_began: float = field(default_factory=time.monotonic)
    _slowest_step_s: float = 0.0
    _slowest_eval_s: float = 0.0
    _spent_before: Mapping[str, float] = field(default_factory=dict)
    _file_checked: float = 0.0
    _heard: HostCopy | None = None
    _is_late: bool = False

    def before_step(self, progress: Progress) -> None:
        """Writes what this rank asks for into `progress.requests`."""
        if self.section.exit_step and self.section.exit_step <= progress.start:
            progress.stop = f"--exit_step ({self.section.exit_step}) is reached"
            return
        now = time.monotonic()
        self._measure(progress, now)
        by_file = by_clock = False
        if self.is_main:
            if now - self._file_checked >= 1.0:
                self._file_checked = now
                by_file = (self.folder / STOP_FILE).exists()
            by_clock = any(left_s < self.margin_s(progress) for left_s, _ in self._ends())
        progress.requests = Requests(bool(self.signals.name), by_file, by_clock, bool(progress.problem))

    def _measure(self, progress: Progress, now: float) -> None:
        """Measures the last step; its evaluation and its save are measured apart."""
        parts = ("eval", "checkpoint")
        beside = {part: self.spent.get(part, 0.0) - self._spent_before.get(part, 0.0) for part in parts}
        if progress.steps_of_launch > 1:  # the first step compiles and warms up
            step_s = now - self._step_began - sum(beside.values())
            self._slowest_step_s = max(0.9 * self._slowest_step_s, step_s)
        self._slowest_eval_s = max(self._slowest_eval_s, beside["eval"])
        self._step_began, self._spent_before = now, dict(self.spent)

    def after_step(self, progress: Progress, result: StepResult) -> None:
        """Sets `progress.stop` if this launch ends with this step; the same on every rank.

        On a GPU the requests of the step before count, so that the host does not wait for its newest work.
        """
        self.signals.can_save = True
        self._is_late = result.requests.device.type == "cuda"
        before, self._heard = self._heard, HostCopy(result.requests)
        heard = before if self._is_late else self._heard
        requests = Requests(*heard.read()) if heard else Requests()
        progress.stop = self._limit_reached(progress) or self._request_heard(progress, requests)

    def _limit_reached(self, progress: Progress) -> str:
        section, (rows, tokens) = self.section, progress.seen_in_launch
        if section.exit_interval and progress.steps_of_launch >= section.exit_interval:
            return f"--exit_interval ({section.exit_interval}) steps are done"
        if section.exit_step and progress.step >= section.exit_step:
            return f"--exit_step ({section.exit_step}) is reached"
        if section.exit_tokens and tokens >= section.exit_tokens:
            return f"--exit_tokens ({section.exit_tokens}) are reached"
        if section.exit_samples and rows >= section.exit_samples:
            return f"--exit_samples ({section.exit_samples}) are reached"
        return ""

    def _request_heard(self, progress: Progress, requests: Requests) -> str:
        if requests.records:
            return progress.problem or "rank 0 cannot write its records"
        if requests.signal:
            self.signals.came_to_peer = True
            return f"stopped by {self.signals.name or 'a signal to another rank'}"
        if requests.file:
            return f"stopped by the file {self.folder / STOP_FILE}"
        if requests.clock:
            return min(self._ends(), default=(0.0, "the end of rank 0's time is near"))[1]
        return ""

    def margin_s(self, progress: Progress) -> float:
        """What the next step, one more and the end may take: the slowest recent step twice (three times where
        requests are heard late), the evaluations that are due, the saves with half as much again, and 10 s;
        or `--exit_margin_s`."""
        if self.section.exit_margin_s is not None:
            return self.section.exit_margin_s
        step = progress.step + 1
        steps = range(step, step + (3 if self._is_late else 2))
        num_evals = sum(self.eval_interval > 0 and at % self.eval_interval == 0 for at in steps)
        return (
            len(steps) * self._slowest_step_s
            + num_evals * self._slowest_eval_s
            + 1.5 * progress.expected_save_s(step)
            + 10
        )

    def _ends(self) -> Iterator[tuple[float, str]]:
        """The seconds that are left by each clock, and what is said when they are too few."""
        if minutes := self.section.exit_duration_in_mins:
            yield 60 * minutes - process_age_s(), f"--exit_duration_in_mins ({minutes:g}) are nearly over"
        if (end := job_end()) is not None:
            yield end - time.time(), "the job's end is near"
