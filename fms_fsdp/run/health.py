"""Guards a run: gradients that are not finite, loss spikes, and steps that never end."""

from __future__ import annotations

import faulthandler
import math
import threading
import time
from functools import partial
from pathlib import Path

import torch

from fms_fsdp.checkpoint.folders import newest_healthy_step
from fms_fsdp.config import TrainConfig
from fms_fsdp.distributed.mesh import Mesh
from fms_fsdp.distributed.runtime import HostCopy
from fms_fsdp.errors import RunFailed
from fms_fsdp.logs import log, rank_log
from fms_fsdp.metrics.interval import describe_data
from fms_fsdp.run.status import RunStatus, end_process
from fms_fsdp.state import TrainState


class NonFiniteGuard:
    """Counts consecutive steps whose gradient was not finite; at --max_bad_steps ends the run.

    The optimizer skips such a step on the device, and a step without labels. The count is
    `state.non_finite_steps`, which starts with the checkpoint's, so restarts do not hide it; steps
    that a dynamic loss scale skipped do not count. On a GPU a step is read while the next one
    runs, so that the host does not wait. `checkpoints`: the folder, for advice.
    """

    def __init__(self, cfg: TrainConfig, checkpoints: Path, mesh: Mesh, state: TrainState) -> None:
        self.cfg = cfg
        self.limit = cfg.training.max_bad_steps  # 0: never
        self.checkpoints = checkpoints
        self.mesh = mesh
        self.state = state
        self._pending: tuple[int, HostCopy] | None = None

    def check(self, step: int, grad_norm: torch.Tensor, num_labels: torch.Tensor) -> None:
        """Takes a step's gradient norm and labels, which are equal on all ranks.

        Raises:
            RunFailed: `limit` consecutive steps were not finite, or the loss scale is minimal.
        """
        values = [grad_norm, num_labels.to(grad_norm)]
        scale = self.state.loss_scale
        if scale is not None and scale.is_dynamic:
            values += [scale.last_scale, scale.scale, scale.is_stuck]
        copy = HostCopy(torch.stack(values))
        self.settle()
        self._pending = step, copy
        if not grad_norm.is_cuda:
            self.settle()

    def settle(self) -> None:
        """Completes the counts in `state`, up to the last step."""
        if self._pending is not None:
            step, copy = self._pending
            self._pending = None
            self._count(step, *copy.read())

    def finish(self) -> None:
        """Raises RunFailed at the end of a run whose last two or more steps were not finite."""
        self.settle()
        count = self.state.non_finite_steps
        if count > 1:
            raise RunFailed(
                f"the last {count} steps were not finite, so the last checkpoint is useless; "
                f"{self._advice()}"
            )

    def _count(self, step: int, norm: float, num_labels: float, *scales: float) -> None:
        data = ""
        if not num_labels or not math.isfinite(norm):
            data = describe_data(self.state.stream, self.mesh, step)
        if not num_labels:
            log.warning("step %d has no labels; it changed nothing. %s", step, data)
        elif math.isfinite(norm):
            self.state.non_finite_steps = 0
            self.state.last_finite_step = step
        elif scales:
            before, now, is_stuck = scales
            text = f"step {step}: the gradient overflows fp16; skipped, loss scale {before:g}"
            if is_stuck:
                raise RunFailed(
                    f"{text} is --min_loss_scale. {data} Set --precision=bf16 or fp32; {self._advice()}"
                )
            log.info("%s -> %g", text, now)
        else:
            self.state.non_finite_steps += 1
            count = self.state.non_finite_steps
            so_far = f"{count} consecutive"
            if self.limit:
                so_far = f"{count} of at most {self.limit} consecutive"
            text = f"step {step} skipped: gradient norm is {norm} ({so_far}). {data}"
            log.warning(text)
            if self.limit and count >= self.limit:
                raise RunFailed(f"{text} {self._advice()}")

    def _advice(self) -> str:
        step = newest_healthy_step(self.checkpoints)
        start = f"start again ({self.cfg.keep_name})"
        if step is not None:
            start = f"resume from step {step} (--resume_step={step} {self.cfg.keep_name})"
        return f"{start} with a lower --learning_rate, or skip the data with --skip_steps"


class Watchdog:
    """Ends this process with status 1, with stacks on record, after `timeout_s` without `alive()`.

    The timeout of collectives is not enough: a rank may hang outside of a collective.
    """

    def __init__(self, timeout_s: float, path: Path, status: RunStatus) -> None:
        self._timeout_s = timeout_s
        self._path = path
        self._status = status
        self._alive_at = time.monotonic()
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="watchdog", daemon=True)
        self._thread.start()

    def alive(self, extra_s: float = 0.0) -> None:
        """Restarts the countdown, and adds `extra_s`, e.g. for a save on another rank."""
        self._alive_at = time.monotonic() + extra_s

    def close(self) -> None:
        self._closed.set()
        self._thread.join()

    def _watch(self) -> None:
        pause_s = min(1.0, self._timeout_s / 10)
        before = time.monotonic()
        while not self._closed.wait(pause_s):
            now = time.monotonic()
            # A suspended process (SIGSTOP, Ctrl-Z) wakes up late: that time does not count.
            lost_s = now - before - pause_s
            if lost_s > pause_s:
                self._alive_at += lost_s
            before = now
            silent_s = now - self._alive_at
            if silent_s > self._timeout_s:
                end_process(1, partial(self._report, silent_s, pause_s))

    def _report(self, silent_s: float, pause_s: float) -> None:
        stacks = f"stacks of all threads: {self._path}"
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            with open(self._path, "a", encoding="utf-8") as file:
                faulthandler.dump_traceback(file)
        except OSError as error:
            stacks = f"its stacks cannot be written: {error.strerror}"
        reason = (
            f"no step for {silent_s:.0f} s (--collective_timeout_s={self._timeout_s:g}); {stacks}"
        )
        self._status.fail(reason)  # before the log, whose lock may be held by the thread that hangs
        rank_log.error(reason)
        time.sleep(3 * pause_s)  # torchrun kills the other ranks: let them write first
