"""When a launch must begin to end so that it ends in time."""

from __future__ import annotations

import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from fms_fsdp.config import TrainingConfig
from fms_fsdp.run.limits import Limits


def limits(folder: Path, spent: dict[str, float], eval_interval: int = 0, **flags: float) -> Limits:
    section = TrainingConfig(**flags)  # type: ignore[arg-type]
    signals = SimpleNamespace(
        name="", can_save=False
    )  # a real one would take the signals of the tests' own process
    rest: Any = (signals, lambda step: 20.0, spent, eval_interval, str)
    return Limits(section, folder, 0, 0, 1, 1, *rest)


def stepped(ends: Limits, spent: dict[str, float], step: int, **parts: float) -> bool:
    """A step of a second and so many seconds of other things after it; none of it is waited for."""
    stops = ends.stop_after(step, torch.tensor(ends.requests(step)))
    ends._step_began -= 1.0 + sum(parts.values())
    for part, seconds in parts.items():
        spent[part] = spent.get(part, 0.0) + seconds
    return stops


def test_an_evaluation_and_a_save_are_no_part_of_a_step(tmp_path: Path) -> None:
    spent: dict[str, float] = {}
    ends = limits(tmp_path, spent, eval_interval=10)
    stepped(ends, spent, 1)
    for step in range(2, 9):
        stepped(ends, spent, step, **({"eval": 60.0, "checkpoint": 30.0} if step == 5 else {}))
    assert ends.margin_s(12) == pytest.approx(2 * 1 + 1.5 * 20 + 10, abs=1)
    assert ends.margin_s(10) == ends.margin_s(9) == pytest.approx(60 + ends.margin_s(12))


def test_the_first_save_of_a_launch_is_in_the_margin(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No step has been measured and no save made: what a save is expected to take is left all the same."""
    monkeypatch.delenv("SLURM_JOB_END_TIME", raising=False)
    for seconds_left, stops in ((39.0, True), (45.0, False)):
        spent: dict[str, float] = {}
        ends = limits(tmp_path, spent, exit_duration_in_mins=1)
        monkeypatch.setattr("fms_fsdp.run.limits.process_age_s", lambda left=seconds_left: 60 - left)
        assert stepped(ends, spent, 1) is stops


def test_a_margin_that_is_given_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for given, stops in ((300.0, True), (5.0, False)):
        monkeypatch.setenv("SLURM_JOB_END_TIME", str(time.time() + 60))
        ends = limits(tmp_path, {}, exit_margin_s=given)
        assert stepped(ends, {}, 1) is stops and (stops == ("the job's end is near" in ends.reason))
