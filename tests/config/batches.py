"""Batches and ramps whose answers test_recorded_batches.py compares with a record.

`python -m tests.config.batches` records the present answers. Record again only when another answer
is meant, and give the reason in the commit message: a resumed run keeps its batches.
"""

from __future__ import annotations

import json
import lzma
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

RECORD = Path(__file__).parent / "batches.json.xz"
NUM_CASES = 20_000


class Case(NamedTuple):
    """Flags of a launch, its data-parallel size, and the batch of the run that it resumes."""

    flags: dict[str, Any]
    dp_size: int
    saved: tuple[int, int, int] | None  # batch size, data-parallel size, accumulation steps
    samples_seen: int
    num_steps: int


def cases() -> Iterator[Case]:
    """Yields the same random cases each time."""
    draw = random.Random(5)
    for _ in range(NUM_CASES):
        flags: dict[str, Any] = {}
        if draw.random() < 0.5:
            flags["batch_size"] = draw.choice([1, 2, 3, 4, 6, 8, 16])
        if draw.random() < 0.3:
            flags["grad_accum_steps"] = draw.choice([1, 2, 3, 4, 8])
        if draw.random() < 0.6:
            flags["global_batch_size"] = draw.choice([1, 2, 4, 6, 8, 12, 16, 24, 32, 64, 96])
        if draw.random() < 0.4:
            start, increment = draw.choice([1, 2, 4, 8, 16]), draw.choice([1, 2, 4, 8, 16])
            samples = draw.choice([1, 10, 100, 1000, 12345])
            flags["rampup_batch_size"] = (start, increment, samples)
            if draw.random() < 0.3:
                flags["rampup_round"] = draw.choice([2, 4, 8])
            if draw.random() < 0.3:
                flags["rampup_micro_batch"] = True
        dp_size, saved = draw.choice([1, 2, 3, 4, 6, 8]), None
        if draw.random() < 0.5:
            saved = (draw.choice([1, 2, 4, 8]), draw.choice([1, 2, 4]), draw.choice([1, 2, 4, 8]))
        seen, num_steps = draw.choice([0, 0, 5, 50, 500, 5000]), draw.choice([0, 1, 7, 100])
        yield Case(flags, dp_size, saved, seen, num_steps)


def answer(case: Case) -> list[Any] | None:
    """Returns batch size, accumulation steps, intervals of the batch, samples of the first
    `num_steps` steps, and the steps that read 3 x `num_steps` samples; None for an error."""
    from fms_fsdp.config import BatchPlan, TrainingConfig, plan_batch
    from fms_fsdp.errors import UserError

    saved = None
    if case.saved is not None:
        size, dp_size, steps = case.saved
        saved = BatchPlan(size, steps, dp_size)
    try:
        cfg = TrainingConfig(**case.flags)
        kept = saved if cfg.global_batch_size is None else None
        plan = plan_batch(cfg, case.dp_size, kept, "--run_name=x")
        return [
            plan.batch_size,
            plan.grad_accum_steps,
            [list(phase) for phase in plan.phases(case.samples_seen)],
            plan.sequences_in(case.num_steps, case.samples_seen),
            plan.steps_for(case.num_steps * 3, case.samples_seen),
        ]
    except UserError:
        return None


def record() -> None:
    RECORD.write_bytes(lzma.compress(json.dumps(list(map(answer, cases()))).encode(), preset=9))


if __name__ == "__main__":
    record()
