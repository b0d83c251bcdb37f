"""Python's garbage is collected at the same steps on every rank: one that stops lets all wait."""

from __future__ import annotations

import gc

from fms_fsdp.state import Hook, Progress, StepResult


class GarbageCollector(Hook):
    """Collects after every `interval`-th step; 0 leaves the moment to Python."""

    def __init__(self, interval: int) -> None:
        self._interval = interval
        if interval:
            gc.collect()
            gc.freeze()  # what stands before the first step is not looked through again
            gc.disable()

    def after_step(self, progress: Progress, result: StepResult) -> None:
        """Collects if the step is a chosen one."""
        if self._interval and progress.step % self._interval == 0:
            gc.collect()

    def close(self) -> None:
        """Leaves the collection to Python again."""
        if self._interval:
            gc.enable()
            gc.unfreeze()
