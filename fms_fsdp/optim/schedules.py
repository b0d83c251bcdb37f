"""Learning-rate schedules: pure functions of the step and of a group's base rate, with no state to save."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial

from fms_fsdp.config import OptimConfig

Schedule = Callable[[int, float], float]


def build_schedule(section: OptimConfig, num_steps: int) -> Schedule:
    """The learning rate as a function of the 1-based step and the base rate, in a run of `num_steps`.

    Raises:
        ValueError: the warm-up is longer than the run.
    """
    return partial(
        cosine_with_warmup,
        warmup_steps=section.warmup(num_steps),
        num_steps=num_steps,
        min_ratio=section.min_lr_ratio,
    )


def cosine_with_warmup(
    step: int, base: float, *, warmup_steps: int, num_steps: int, min_ratio: float
) -> float:
    """The learning rate of 1-based `step`: linear to `base` at `warmup_steps`, a half cosine to
    `min_ratio * base` at `num_steps`, then flat.

    Source: Loshchilov and Hutter, "SGDR", https://arxiv.org/abs/1608.03983 (one period, no restart).
    """
    if step < warmup_steps:
        return base * step / warmup_steps
    if step >= num_steps:
        return base * min_ratio
    progress = (step - warmup_steps) / max(1, num_steps - warmup_steps)
    return base * (min_ratio + (1 - min_ratio) * 0.5 * (1 + math.cos(math.pi * progress)))
