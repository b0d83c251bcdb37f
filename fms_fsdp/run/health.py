"""Watches a run from step to step: gradients that are not finite, loss spikes, and steps that never end.

A step whose gradient is not finite changes nothing: the optimizer skips it on the device (see train.py).
`BadSteps` counts such steps and ends the run when there are too many in a row, or in fp16 when the loss
scale can be halved no more; `SpikeDetector` only logs; `Watchdog` ends a process that hangs, with its stacks
on record.
"""

from __future__ import annotations

import faulthandler
import math
import os
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from fms_fsdp.errors import RunFailed
from fms_fsdp.runtime import HostCopy, log, own_log
from fms_fsdp.state import Hook, Progress, StepResult

if TYPE_CHECKING:
    from fms_fsdp.extras.loss_scale import LossScale


class TooManyBadSteps(RunFailed):
    """The gradient was not finite for more steps in a row than allowed, or at the lowest loss scale; the last
    checkpoint stands."""


@dataclass
class BadSteps(Hook):
    """Counts skipped steps. `describe(step)` names that step's data; it is called on every rank, for bad
    steps only. Steps that a dynamic `loss_scale` has skipped do not count: it is lowered until none is.

    On a GPU the norm of a step is read while the next step runs, so that the host never waits for the newest
    work of the device.
    """

    limit: int
    describe: Callable[[int], str]
    keep_name: str
    loss_scale: LossScale | None = None
    in_a_row: int = 0
    total: int = 0
    _pending: tuple[int, HostCopy] | None = None

    def after_step(self, progress: Progress, result: StepResult) -> None:
        """Notes the gradient norm of the step, the same on every rank (collective).

        Raises:
            TooManyBadSteps: `limit` steps in a row were skipped, or the loss scale can be halved no more.
        """
        outcome, scale = [result.grad_norm], self.loss_scale
        if scale is not None and scale.is_dynamic:
            outcome += [scale.before, scale.scale, scale.is_stuck]
        before, self._pending = self._pending, (progress.step, HostCopy(torch.stack(outcome)))
        if result.grad_norm.device.type != "cuda":
            before, self._pending = self._pending, None
        if before is not None:
            self._count(before[0], before[1].read())

    def after_training(self, progress: Progress) -> None:
        """Counts the last step, whose norm has not been read yet."""
        if self._pending is not None:
            (step, outcome), self._pending = self._pending, None
            self._count(step, outcome.read())

    def _count(self, step: int, outcome: Sequence[float]) -> None:
        grad_norm, *scales = outcome
        if math.isfinite(grad_norm):
            self.in_a_row = 0
            return
        if scales:
            return self._tell_overflow(step, *scales)
        self.in_a_row += 1
        self.total += 1
        text = (
            f"step {step}: the gradient norm is {grad_norm}; the step changed nothing ({self.in_a_row} in a "
            f"row, --max_bad_steps {self.limit}). {self.describe(step)}"
        )
        log.warning(text)
        if self.limit and self.in_a_row >= self.limit:
            advice = "Look at the data, pass over it with --skip_steps, or lower --learning_rate"
            raise TooManyBadSteps(f"{text} {advice} with {self.keep_name}")

    def _tell_overflow(self, step: int, before: float, now: float, is_stuck: float) -> None:
        text = f"step {step}: the gradient overflows fp16; the step changed nothing, the loss scale was"
        if not is_stuck:
            return log.info("%s %g and is %g", text, before, now)
        raise TooManyBadSteps(
            f"{text} {before:g}, the lowest (--min_loss_scale). {self.describe(step)} Use --precision=bf16 "
            "or fp32, pass over the data with --skip_steps, or lower --learning_rate with "
            f"{self.keep_name}"
        )


@dataclass
class SpikeDetector:
    """Compares each reported loss with the recent ones: a spike lies `threshold` of their deviations above
    their mean.

    Mean and deviation are exponential averages over about 50 reports, and do not take in the spikes
    themselves.
    """

    threshold: float
    _mean: float = 0.0
    _variance: float = 0.0
    _count: int = 0

    def is_spike(self, loss: float) -> bool:
        """Whether `loss` is a spike; also adds it to the averages. Never true before the 20th report."""
        if not math.isfinite(loss):
            return False
        deviation = max(math.sqrt(self._variance), 0.005 * abs(self._mean))
        if self.threshold and self._count >= 20 and loss - self._mean > self.threshold * deviation:
            return True
        self._count += 1
        weight = max(1 / self._count, 0.02)
        difference = loss - self._mean
        self._mean += weight * difference
        self._variance = (1 - weight) * (self._variance + weight * difference * difference)
        return False


class Watchdog(Hook):
    """A thread that ends this process with status 1 when nobody said `alive()` for `timeout_s`. The thread
    first writes the stacks of all threads to `folder`.

    The timeout of collectives is not enough: a rank may hang outside of a collective.
    """

    def __init__(self, timeout_s: float, folder: Path, rank: int, on_hang: Callable[[str], None]) -> None:
        self._timeout_s, self._path, self._on_hang = timeout_s, folder / f"rank{rank}.txt", on_hang
        self._heard = time.monotonic()
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="watchdog", daemon=True)
        self._thread.start()

    def before_step(self, progress: Progress) -> None:
        """A step that begins shows that this rank is alive."""
        self.alive()

    def alive(self) -> None:
        """Says that this rank is alive."""
        self._heard = time.monotonic()

    def close(self) -> None:
        """Ends the thread."""
        self._ended.set()
        self._thread.join()

    def _watch(self) -> None:
        pause_s = min(1.0, self._timeout_s / 10)
        while not self._ended.wait(pause_s):
            silent = time.monotonic() - self._heard
            if silent > self._timeout_s:
                self._path.parent.mkdir(parents=True, exist_ok=True)
                with open(self._path, "a") as file:
                    file.write(f"\nno step for {silent:.0f} s, and no save that moves\n")
                    file.flush()
                    faulthandler.dump_traceback(file)
                why = f"no step for {silent:.0f} s, and no save that moves (--collective_timeout_s)"
                reason = f"{why}; stacks of all threads: {self._path}"
                own_log.error(reason)
                self._on_hang(reason)
                # torchrun ends the others as soon as one ends: they record their stacks
                # first
                time.sleep(3 * pause_s)
                os._exit(1)
