"""When a launch ends before the run: signals, STOP file, steps, tokens, time. All ranks agree.

An event on one rank (a signal, the file, the clock, a full disk) is a request: the sum of the
requests over all ranks comes with the number of labels, which each step reduces anyway. Between two
steps, an evaluation sums the requests before each of its batches. The launch then saves and ends as
"resume_me": the same command resumes the run. Imports no torch.
"""

from __future__ import annotations

import os
import re
import select
import signal
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING

from fms_fsdp.config import TrainConfig
from fms_fsdp.process import process_age_s
from fms_fsdp.run.agent import agent_pid, launch_pid
from fms_fsdp.run.status import RESUME_ME, RunStatus

if TYPE_CHECKING:
    from fms_fsdp.distributed.runtime import HostCopy
    from fms_fsdp.run.checkpoints import CheckpointManager
    from fms_fsdp.state import TrainState

_STOPS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGHUP)


class StopSignals:
    """SIGTERM, SIGINT, SIGUSR1, SIGHUP ask for a stop after the step; a second SIGINT interrupts.

    A thread reads them from a pipe, because handlers do not run inside a collective. Before the
    first step there is nothing to save, and the process ends at once. A save of `checkpoints` that
    this rank has written is not interrupted. Only Python's main thread can handle signals;
    `notes` says so in other threads.
    """

    def __init__(self, status: RunStatus) -> None:
        self.name = ""
        self.can_save = False
        self._status = status
        self._interrupts = 0
        self.came_to_peer = False  # a signal to another rank has ended the launch
        self.checkpoints: CheckpointManager | None = None
        self.notes: list[str] = []
        self._agent = agent_pid()
        self._pipe, writer = os.pipe()
        os.set_blocking(writer, False)
        if threading.current_thread() is threading.main_thread():
            self._handle(writer)
        else:
            self.notes.append(
                "main() is not called in the main thread, so signals are not handled; "
                "stop the run by a file STOP in its directory"
            )
        threading.Thread(target=self._listen, name="signals", daemon=True).start()

    def wait_for_agent(self) -> None:
        """Waits up to 5 s for torchrun's signal, if another rank's signal ended the launch.

        When nodes join, the agents stop their workers one after the other. A worker that ends well
        before its own agent has asked would count as finished.
        """
        deadline = time.monotonic() + 5.0
        while self.came_to_peer and self._agent and not self.name and time.monotonic() < deadline:
            time.sleep(0.05)

    def _handle(self, writer: int) -> None:
        signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
        for number in _STOPS:
            if signal.getsignal(number) is not signal.SIG_IGN:  # nohup ignores SIGHUP
                signal.signal(number, self._count)

    def _count(self, number: int, frame: FrameType | None) -> None:
        if number != signal.SIGINT:
            return
        self._interrupts += 1
        is_committing = self.checkpoints is not None and self.checkpoints.is_committing
        if self._interrupts > 1 and not is_committing:
            raise KeyboardInterrupt

    def _listen(self) -> None:
        while True:
            ready, _, _ = select.select([self._pipe], [], [], 1.0)
            if ready:
                for number in os.read(self._pipe, 64):
                    if number in _STOPS:
                        self._ask(signal.Signals(number).name)
            with suppress(OSError):  # asked again in a second
                if self._agent and agent_pid() != self._agent:
                    self._agent = 0
                    self._ask("the end of torchrun's agent")

    def _ask(self, name: str) -> None:
        self.name = self.name or name
        if self._status.outcome:  # this rank ends already; status.json may have its own failure
            self._status.is_asked_to_end = True
            return
        if self._status.peer_failed():
            os._exit(1)  # a save would wait for the peer
        if not self.can_save:
            self._status.abort(RESUME_ME, f"stopped by {name} before the first step")


class StopControl:
    """Sets `state.stop_reason` after the step at which this launch ends.

    save_s, eval_s   time for saving and evaluating if the launch ends now
    is_requested     whether any rank was asked to stop: no evaluation begins, and one under way ends.
                     A limit that was reached (`--exit_interval`) is no request
    reads_fail       whether the storage of any rank fails: the launch saves and ends as failed
    """

    def __init__(
        self,
        cfg: TrainConfig,
        stop_file: Path,
        signals: StopSignals,
        is_main: bool,
    ) -> None:
        self.cfg = cfg.training
        self.stop_file = stop_file
        self.signals = signals
        self.is_main = is_main
        self.eval_interval = cfg.eval.eval_interval
        self._launch_pid = launch_pid()
        self.save_s = 0.0
        self.eval_s = 0.0
        self._longest_eval_s = 0.0
        self._eval_total_s = 0.0  # of all evaluations so far
        self._slowest_step_s = 0.0
        self._step_began = 0.0  # time.monotonic()
        self._file_checked = 0.0  # time.monotonic()
        self._pending: HostCopy | None = None
        self.is_requested = False
        self.reads_fail = False

    def check_start(self, state: TrainState) -> None:
        """Ends the launch before its first step if `--exit_step` is reached already."""
        if state.is_done:  # only the evaluation of the last step is left
            return
        limit = self.cfg.exit_step
        if limit and limit <= state.start:
            state.stop_reason = f"--exit_step={limit} is reached"

    def expect(self, state: TrainState, eval_total_s: float, save_s: float) -> None:
        """Updates `save_s` and `eval_s` before a step; `eval_total_s`: of all evaluations so far."""
        self._longest_eval_s = max(self._longest_eval_s, eval_total_s - self._eval_total_s)
        self._eval_total_s = eval_total_s
        self.save_s = save_s
        soon = range(state.step + 1, state.step + 4)
        is_due = self.eval_interval and any(step % self.eval_interval == 0 for step in soon)
        self.eval_s = 0.0
        if is_due:
            self.eval_s = self._longest_eval_s

    def requests(self, state: TrainState) -> tuple[int, int, int, int]:
        """Returns the requests of this rank before a step: signal, file, clock, records."""
        self._step_began = time.monotonic()
        return self._requests(state, self.margin_s())

    def is_asked(self) -> bool:
        """Returns whether this rank is asked to stop, after the last step (not collective)."""
        return any(self._own_requests(self.margin_s()))

    def _requests(self, state: TrainState, margin_s: float) -> tuple[int, int, int, int]:
        has_record_error = int(bool(state.current.record_error))
        return (*self._own_requests(margin_s), has_record_error)

    def _own_requests(self, margin_s: float) -> tuple[int, int, int]:
        by_file = False
        by_clock = False
        if self.is_main:
            now = time.monotonic()
            if now - self._file_checked >= 1.0:  # the file system may be slow
                self._file_checked = now
                by_file = os.path.exists(self.stop_file)  # Path.exists raises if a storage fails
            by_clock = any(left < margin_s for left, _ in self._clocks())
        return int(bool(self.signals.name)), int(by_file), int(by_clock)

    def update(self, state: TrainState, requests: HostCopy) -> None:
        """Decides after a step; `requests`: the sums over all ranks.

        On a GPU the requests of the step before count, so that the host does not wait for this one.
        """
        self.signals.can_save = True
        if state.steps_in_launch > 1:  # the first step compiles
            step_s = time.monotonic() - self._step_began
            self._slowest_step_s = max(0.9 * self._slowest_step_s, step_s)
        late = self._pending
        self._pending = requests
        known = late if requests.is_late else requests
        sequences, tokens = state.seen_in_launch
        limits = {
            "exit_interval": state.steps_in_launch,
            "exit_step": state.step,
            "exit_tokens": tokens,
            "exit_samples": sequences,
        }
        for name, reached in limits.items():
            limit = getattr(self.cfg, name)
            if limit and reached >= limit:
                state.stop_reason = f"--{name}={limit} is reached"
        if known is not None:
            self._decide(state, known.read())

    def end_for_reads(self, state: TrainState) -> None:
        """Ends the launch because a rank cannot read the data; known on every rank."""
        self.reads_fail = True
        state.stop_reason = "the data cannot be read"

    def interrupts(self, state: TrainState) -> bool:
        """Returns whether an evaluation must end at its next batch (collective: every rank)."""
        from fms_fsdp.distributed.runtime import sum_over_ranks

        if not self.is_requested:
            # The margin keeps the time of an evaluation that is due: this is that evaluation.
            requests = self._requests(state, self.margin_s() - self._eval_margin_s())
            has_read_error = int(state.current.read_error is not None)
            self._decide(state, sum_over_ranks([*requests, has_read_error]))
        return self.is_requested

    def _decide(self, state: TrainState, requests: Sequence[int]) -> None:
        """Sets the reason to stop; `requests`: the sums over all ranks, errors of reads the last."""
        by_signal, by_file, by_clock, by_records, by_reads = requests
        self.is_requested = any(requests)
        if by_reads:
            self.end_for_reads(state)
        elif by_records:
            state.stop_reason = state.current.record_error or "rank 0 cannot write its records"
        elif by_signal:
            self.signals.came_to_peer = not self.signals.name
            state.stop_reason = f"stopped by {self.signals.name or 'a signal to another rank'}"
        elif by_file:
            state.stop_reason = f"stopped by the file {self.stop_file}"
        elif by_clock:
            _, state.stop_reason = min(self._clocks(), default=(0.0, "the time limit is near"))

    def margin_s(self) -> float:
        """Returns the time to end in: three steps, an evaluation, a save and a half, and 10 s."""
        if self.cfg.exit_margin_s is not None:
            return self.cfg.exit_margin_s
        return 3 * self._slowest_step_s + self.eval_s + 1.5 * self.save_s + 10

    def _eval_margin_s(self) -> float:
        """Returns the part of the margin that is for an evaluation."""
        if self.cfg.exit_margin_s is not None:
            return 0.0
        return self.eval_s

    def _clocks(self) -> Iterator[tuple[float, str]]:
        """Yields the seconds left by each clock, and the reason when they are too few."""
        minutes = self.cfg.exit_duration_in_mins
        if minutes:
            left = 60 * minutes - process_age_s(self._launch_pid)
            yield left, f"--exit_duration_in_mins={minutes:g} is nearly over"
        end = job_end()
        if end is not None:
            yield end - time.time(), "the end of the SLURM job is near"


def job_end() -> float | None:
    """Returns when the SLURM job ends, in seconds since 1970; None if SLURM gives no number."""
    text = os.environ.get("SLURM_JOB_END_TIME", "")
    if not re.fullmatch(r"[0-9]{1,12}(\.[0-9]+)?", text):
        return None
    return float(text)
