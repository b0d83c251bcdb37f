"""States of a run without model and data."""

from __future__ import annotations

from typing import Any

from fms_fsdp.state import TrainState


def bare_state(step: int, num_steps: int, **progress: Any) -> TrainState:
    """Returns the progress of a run that has no model."""
    nothing: Any = None
    return TrainState(nothing, nothing, nothing, num_steps, step, **progress)
