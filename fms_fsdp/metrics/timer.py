"""Time per phase of a launch and of the training loop."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise

import torch

from fms_fsdp.process import process_age_s

_TIMED_STEPS = 64  # number of steps per report whose CUDA events are kept
_BETWEEN_STEPS = ("start", "eval", "checkpoint", "logging")
_PASSES = ("forward", "backward", "forward_backward")
_REPORTED = ("forward", "backward", "clip", "optimizer", "eval", "checkpoint", "logging")


class PhaseTimer:
    """Attributes the wall time of a launch to phases.

    Phases of a step: data, forward, backward (forward_backward in a pipeline), clip, optimizer.
    Phases between steps: start, eval, checkpoint, logging. Any other phase counts as step time.
    On a GPU the host runs ahead of the device, so CUDA events time the phases of a step.
    """

    def __init__(self, device: torch.device) -> None:
        self._is_cuda = device.type == "cuda"
        self._seconds: dict[str, float] = {}
        self._steps = 0
        self._events: deque[list[tuple[str, torch.cuda.Event]]] = deque(maxlen=_TIMED_STEPS)
        self._last = time.perf_counter()
        self.totals: dict[str, float] = {}
        """Seconds per phase since the start of the launch."""

    def mark(self, phase: str) -> None:
        """Adds the time since the last mark to `phase`. The phase "device" waits for the GPU."""
        if self._is_cuda and phase == "device":
            torch.cuda.synchronize()
        now = time.perf_counter()
        elapsed = now - self._last
        self._last = now
        self._seconds[phase] = self._seconds.get(phase, 0.0) + elapsed
        self.totals[phase] = self.totals.get(phase, 0.0) + elapsed
        self._steps += phase == "optimizer"
        if self._is_cuda and phase in ("data", *_PASSES, "clip", "optimizer"):
            if phase == "data":
                self._events.append([])
            event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
            event.record()
            self._events[-1].append((phase, event))

    @contextmanager
    def phase(self, name: str, *, synchronize: bool = False) -> Iterator[None]:
        """Adds the time of the block to a phase; with `synchronize` the GPU's queue is not part of it."""
        self.mark("hooks")  # what came before belongs to the step
        if synchronize:
            self.mark("device")
        yield
        self.mark(name)

    def read(self) -> dict[str, float]:
        """Returns milliseconds per step since the last call and resets the timer.

        On a GPU, the device must have finished its work.
        """
        steps = max(1, self._steps)
        ms = {phase: 1000 * seconds / steps for phase, seconds in self._seconds.items()}
        step_ms = sum(value for phase, value in ms.items() if phase not in _BETWEEN_STEPS)
        complete = [events for events in self._events if events[-1][0] == "optimizer"]
        if complete:
            ms |= dict.fromkeys((*_PASSES, "clip", "optimizer"), 0.0)
        for events in complete:
            for (_, begin), (phase, end) in pairwise(events):
                ms[phase] += begin.elapsed_time(end) / len(complete)
        self._seconds = {}
        self._steps = 0
        self._events.clear()
        return {
            "step_time_ms": step_ms,
            "data_wait_ms": ms.get("data", 0.0),
            "forward_backward_ms": sum(ms.get(phase, 0.0) for phase in _PASSES),
            **{f"{phase}_ms": ms.get(phase, 0.0) for phase in _REPORTED},
        }


class LaunchPhases:
    """How long each phase of a launch took, from the start of the process to the first step."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self._last = time.monotonic() - process_age_s()

    def done(self, name: str) -> None:
        """Adds the time since the last phase ended to this one."""
        now = time.monotonic()
        self.seconds[name] = self.seconds.get(name, 0.0) + now - self._last
        self._last = now

    def text(self, *, compiled: bool) -> str:
        """Returns the seconds to the end of the first step, in total and of each phase."""
        names = {"first step": "compile and step" if compiled else "step"}
        parts = ", ".join(
            f"{names.get(name, name)} {took:.1f}"
            for name, took in self.seconds.items()
            if took >= 0.05
        )
        return f"first step after {sum(self.seconds.values()):.1f} s: {parts}"
