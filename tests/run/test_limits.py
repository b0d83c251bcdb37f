"""When a launch must begin to end so that it ends in time."""

from __future__ import annotations

import signal
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from fms_fsdp.config import TrainingConfig
from fms_fsdp.run.limits import Limits
from fms_fsdp.run.stop_signal import StopSignal
from fms_fsdp.state import Progress, StepResult


def limits(folder: Path, spent: dict[str, float], eval_interval: int = 0, **flags: float) -> Limits:
    section = TrainingConfig(**flags)  # type: ignore[arg-type]
    # real ones would take the signals of the tests' own process
    signals: Any = SimpleNamespace(name="", can_save=False)
    return Limits(section, folder, True, signals, spent, eval_interval)


def beginning() -> Progress:
    return Progress(0, 100, expected_save_s=lambda step: 20.0)


def stepped(ends: Limits, spent: dict[str, float], progress: Progress, **parts: float) -> str:
    """A step of a second and so many seconds of other things after it; none of it is waited for."""
    ends.before_step(progress)
    progress.count(2, 10)
    zero = torch.zeros(())
    ends.after_step(progress, StepResult(zero, zero, zero, torch.tensor(progress.requests)))
    ends._step_began -= 1.0 + sum(parts.values())
    for part, seconds in parts.items():
        spent[part] = spent.get(part, 0.0) + seconds
    return progress.stop


def margin_before(ends: Limits, step: int) -> float:
    progress = beginning()
    progress.step = step - 1
    return ends.margin_s(progress)


def test_an_evaluation_and_a_save_are_no_part_of_a_step(tmp_path: Path) -> None:
    spent: dict[str, float] = {}
    ends = limits(tmp_path, spent, eval_interval=10)
    progress = beginning()
    for step in range(1, 9):
        stepped(ends, spent, progress, **({"eval": 60.0, "checkpoint": 30.0} if step == 5 else {}))
    assert margin_before(ends, 12) == pytest.approx(2 * 1 + 1.5 * 20 + 10, abs=1)
    assert margin_before(ends, 10) == margin_before(ends, 9) == pytest.approx(60 + margin_before(ends, 12))


def test_the_first_save_of_a_launch_is_in_the_margin(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No step has been measured and no save made: what a save is expected to take is left all the same."""
    monkeypatch.delenv("SLURM_JOB_END_TIME", raising=False)
    for seconds_left, stops in ((39.0, True), (45.0, False)):
        spent: dict[str, float] = {}
        ends = limits(tmp_path, spent, exit_duration_in_mins=1)
        monkeypatch.setattr("fms_fsdp.run.limits.process_age_s", lambda left=seconds_left: 60 - left)
        assert bool(stepped(ends, spent, beginning())) is stops


def test_a_margin_that_is_given_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for given, stops in ((300.0, True), (5.0, False)):
        monkeypatch.setenv("SLURM_JOB_END_TIME", str(time.time() + 60))
        ends = limits(tmp_path, {}, exit_margin_s=given)
        reason = stepped(ends, {}, beginning())
        assert reason == ("the job's end is near" if stops else "")


@pytest.mark.parametrize(("minutes", "job_s"), [(1, 600), (60, 30), (None, 30), (1, None)])
def test_the_clock_that_runs_out_first_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, minutes: float | None, job_s: float | None
) -> None:
    """A run that its job's end stopped said `--exit_duration_in_mins (None)`."""
    monkeypatch.delenv("SLURM_JOB_END_TIME", raising=False)
    if job_s is not None:
        monkeypatch.setenv("SLURM_JOB_END_TIME", str(time.time() + job_s))
    monkeypatch.setattr("fms_fsdp.run.limits.process_age_s", lambda: 30.0)
    given = {} if minutes is None else {"exit_duration_in_mins": minutes}
    reason = stepped(limits(tmp_path, {}, exit_margin_s=100.0, **given), {}, beginning())
    of_job = "the job's end is near"
    assert reason == ("--exit_duration_in_mins (1) are nearly over" if minutes == 1 else of_job)


@pytest.mark.parametrize(
    "flags", [{"exit_interval": 3}, {"exit_step": 13}, {"exit_tokens": 30}, {"exit_samples": 6}]
)
def test_a_limit_ends_the_launch_with_the_step_that_reaches_it(
    tmp_path: Path, flags: dict[str, float]
) -> None:
    """Launches count their own steps, tokens and samples; `--exit_step` counts those of the run."""
    ends = limits(tmp_path, {}, **flags)
    progress = Progress(10, 100)
    reasons = [stepped(ends, {}, progress) for _ in range(3)]
    ((flag, value),) = flags.items()
    assert reasons[:2] == ["", ""] and reasons[2].startswith(f"--{flag} ({value})")


def test_a_launch_at_its_exit_step_stops_before_a_step(tmp_path: Path) -> None:
    progress = Progress(5, 100)
    limits(tmp_path, {}, exit_step=5).before_step(progress)
    assert progress.stop == "--exit_step (5) is reached" and progress.step == 5


def test_the_stop_file_is_seen_by_rank_0_alone_and_ends_the_launch(tmp_path: Path) -> None:
    (tmp_path / "STOP").touch()
    other = limits(tmp_path, {})
    other.is_main = False
    assert stepped(other, {}, beginning()) == ""
    assert stepped(limits(tmp_path, {}), {}, beginning()) == f"stopped by the file {tmp_path / 'STOP'}"


def test_a_signal_and_records_that_cannot_be_written_end_the_launch(tmp_path: Path) -> None:
    ends, progress = limits(tmp_path, {}), beginning()
    assert stepped(ends, {}, progress) == "" and ends.signals.can_save
    ends.signals.name = "SIGTERM"
    assert stepped(ends, {}, progress) == "stopped by SIGTERM"
    progress.problem = "metrics.jsonl cannot be written: No space left on device"
    assert stepped(ends, {}, progress) == progress.problem


def test_the_second_interrupt_ends_the_launch_at_once_and_the_first_does_not() -> None:
    heard = StopSignal.__new__(StopSignal)  # the whole one would take the signals of this process
    heard._interrupts = 0
    heard._interrupt(signal.SIGINT, None)
    heard._interrupt(signal.SIGTERM, None)
    with pytest.raises(KeyboardInterrupt):
        heard._interrupt(signal.SIGINT, None)
