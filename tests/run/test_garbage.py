"""Python's garbage is collected at the same steps on every rank."""

from __future__ import annotations

import gc

import pytest
import torch

from fms_fsdp.run.garbage import GarbageCollector
from fms_fsdp.state import Progress, StepResult


@pytest.mark.parametrize(("interval", "at"), [(3, [3, 6]), (1, [1, 2, 3, 4, 5, 6, 7]), (0, [])])
def test_garbage_is_collected_at_every_interval_and_left_to_python_afterwards(
    interval: int, at: list[int]
) -> None:
    zero, progress, collected = torch.zeros(()), Progress(0, 7), list[int]()

    def note(phase: str, info: dict[str, int]) -> None:
        if phase == "start" and info["generation"] == 2:
            collected.append(progress.step)

    assert gc.isenabled()
    collector = GarbageCollector(interval)
    try:
        assert gc.isenabled() == (interval == 0)
        gc.callbacks.append(note)
        for step in range(1, 8):
            progress.step = step
            collector.after_step(progress, StepResult(zero, zero, zero, zero))
        gc.callbacks.remove(note)
    finally:
        collector.close()
    assert gc.isenabled() and gc.get_freeze_count() == 0
    assert collected == at or (interval == 0 and set(collected) <= set(range(8)))
