"""Learning-rate schedules: pure functions of the step, with no state to save."""

from __future__ import annotations

import math


def cosine_with_warmup(step: int, *, peak: float, warmup_steps: int, num_steps: int, min_ratio: float) -> float:
    """The learning rate of 1-based `step`: linear to `peak` at `warmup_steps`, a half cosine to `min_ratio * peak` at `num_steps`, then flat.

    Source: Loshchilov and Hutter, "SGDR", https://arxiv.org/abs/1608.03983 (one period, no restart).
    """
    if step < warmup_steps:
        return peak * step / warmup_steps
    if step >= num_steps:
        return peak * min_ratio
    progress = (step - warmup_steps) / max(1, num_steps - warmup_steps)
    return peak * (min_ratio + (1 - min_ratio) * 0.5 * (1 + math.cos(math.pi * progress)))
