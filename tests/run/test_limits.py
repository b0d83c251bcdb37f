"""When a launch must begin to end so that it ends in time."""

from __future__ import annotations

import signal
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from fms_fsdp.config import TrainConfig, TrainingConfig
from fms_fsdp.distributed.runtime import HostCopy
from fms_fsdp.run.status import RunStatus
from fms_fsdp.run.stop import StopControl, StopSignals
from fms_fsdp.state import TrainState
from fms_fsdp.train import end
from tests.states import bare_state


def limits(folder: Path, save_s: float = 20.0, **flags: float) -> StopControl:
    # real signals would be those of the tests' own process
    signals: Any = SimpleNamespace(name="", can_save=False)
    cfg = TrainConfig(training=TrainingConfig(**flags))  # type: ignore[arg-type]
    stop = StopControl(cfg, folder / "STOP", signals, True)
    stop.save_s = save_s
    return stop


def beginning() -> TrainState:
    return bare_state(0, 100)


def stepped(stop: StopControl, progress: TrainState) -> str:
    """A step of a second."""
    requests = stop.requests(progress)
    progress.count(2, 10)
    stop._step_began -= 1.0
    stop.update(progress, HostCopy(torch.tensor([*requests, 0])))
    return progress.stop_reason


def test_the_margin_has_steps_an_evaluation_and_a_save(tmp_path: Path) -> None:
    stop, progress = limits(tmp_path), beginning()
    for _ in range(8):
        stepped(stop, progress)
        stop._step_began -= (
            60.0  # an evaluation and a save between two steps do not count as a step
        )
    assert stop.margin_s() == pytest.approx(3 * 1 + 1.5 * 20 + 10, abs=1)
    stop.eval_s = 60.0
    assert stop.margin_s() == pytest.approx(60 + 3 * 1 + 1.5 * 20 + 10, abs=1)


def test_the_first_save_of_a_launch_is_in_the_margin(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No step has been measured and no save made: what a save is expected to take is left all the same."""
    monkeypatch.delenv("SLURM_JOB_END_TIME", raising=False)
    for seconds_left, stops in ((39.0, True), (45.0, False)):
        ends = limits(tmp_path, exit_duration_in_mins=1)
        age_s = 60 - seconds_left
        monkeypatch.setattr("fms_fsdp.run.stop.process_age_s", lambda pid, age_s=age_s: age_s)
        assert bool(stepped(ends, beginning())) is stops


def test_a_margin_that_is_given_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for given, stops in ((300.0, True), (5.0, False)):
        monkeypatch.setenv("SLURM_JOB_END_TIME", str(int(time.time()) + 60))
        ends = limits(tmp_path, exit_margin_s=given)
        reason = stepped(ends, beginning())
        assert reason == ("the end of the SLURM job is near" if stops else "")


@pytest.mark.parametrize(("minutes", "job_s"), [(1, 600), (60, 30), (None, 30), (1, None)])
def test_the_clock_that_runs_out_first_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, minutes: float | None, job_s: float | None
) -> None:
    """A run that its job's end stopped said `--exit_duration_in_mins (None)`."""
    monkeypatch.delenv("SLURM_JOB_END_TIME", raising=False)
    if job_s is not None:
        monkeypatch.setenv("SLURM_JOB_END_TIME", str(int(time.time()) + job_s))
    monkeypatch.setattr("fms_fsdp.run.stop.process_age_s", lambda pid: 30.0)
    given = {} if minutes is None else {"exit_duration_in_mins": minutes}
    reason = stepped(limits(tmp_path, exit_margin_s=100.0, **given), beginning())
    of_job = "the end of the SLURM job is near"
    assert reason == ("--exit_duration_in_mins=1 is nearly over" if minutes == 1 else of_job)


@pytest.mark.parametrize(("agent", "stops"), [(7, True), (0, False)])
def test_duration_counts_from_start_of_torchrun(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, agent: int, stops: bool
) -> None:
    """Each restart of the ranks began the time again: the scheduler killed the launch, which had not saved."""
    monkeypatch.delenv("SLURM_JOB_END_TIME", raising=False)
    monkeypatch.setattr("fms_fsdp.run.agent.agent_pid", lambda: agent)
    monkeypatch.setattr(
        "fms_fsdp.run.stop.process_age_s", lambda pid=None: 3590.0 if pid == 7 else 10.0
    )
    assert bool(stepped(limits(tmp_path, exit_duration_in_mins=60), beginning())) is stops


@pytest.mark.parametrize(
    "flags", [{"exit_interval": 3}, {"exit_step": 13}, {"exit_tokens": 30}, {"exit_samples": 6}]
)
def test_a_limit_ends_the_launch_with_the_step_that_reaches_it(
    tmp_path: Path, flags: dict[str, float]
) -> None:
    """Launches count their own steps, tokens and samples; `--exit_step` counts those of the run."""
    ends = limits(tmp_path, **flags)
    progress = bare_state(10, 100)
    reasons = [stepped(ends, progress) for _ in range(3)]
    ((flag, value),) = flags.items()
    assert reasons[:2] == ["", ""] and reasons[2].startswith(f"--{flag}={value}")


def test_the_stop_file_is_seen_by_rank_0_alone_and_ends_the_launch(tmp_path: Path) -> None:
    (tmp_path / "STOP").touch()
    other = limits(tmp_path)
    other.is_main = False
    assert stepped(other, beginning()) == ""
    assert stepped(limits(tmp_path), beginning()) == f"stopped by the file {tmp_path / 'STOP'}"


def test_request_of_another_rank_interrupts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An evaluation asks all ranks before each batch; the clock keeps no time for it any more."""
    asked = [[0, 0, 0, 0, 0], [1, 0, 0, 0, 0]]
    stop, progress = limits(tmp_path, exit_duration_in_mins=1000), beginning()
    name = "fms_fsdp.distributed.runtime.sum_over_ranks"
    monkeypatch.setattr(name, lambda requests: asked.pop(0))
    assert not stop.interrupts(progress) and not progress.stop_reason
    assert stop.interrupts(progress) and stop.interrupts(progress)
    assert progress.stop_reason == "stopped by a signal to another rank"
    monkeypatch.undo()
    stop = limits(tmp_path, exit_interval=1)
    assert stepped(stop, progress) and not stop.interrupts(progress)  # nobody asked


def test_the_second_interrupt_ends_the_launch_at_once_and_the_first_does_not() -> None:
    heard = StopSignals.__new__(StopSignals)  # the whole one would take the signals of this process
    checkpoints: Any = SimpleNamespace(is_committing=False)
    heard._interrupts, heard.checkpoints = 0, checkpoints
    heard._count(signal.SIGINT, None)
    heard._count(signal.SIGTERM, None)
    with pytest.raises(KeyboardInterrupt):
        heard._count(signal.SIGINT, None)
    checkpoints.is_committing = True  # then the launch ends soon, with the checkpoint
    heard._count(signal.SIGINT, None)


def test_signal_spares_a_launch_that_ends(tmp_path: Path) -> None:
    """Its own failure is in status.json: it was taken for a peer's, and the process ended unheard."""
    heard = StopSignals.__new__(StopSignals)
    heard.name = ""
    heard._status = RunStatus()
    heard._status.open(tmp_path, 0)
    heard._status.fail("out of disk space")
    heard._ask("SIGINT")
    assert heard._status.peer_failed() and heard._status.outcome == "failed"


def test_signal_ends_exports_of_launch_without_step(tmp_path: Path) -> None:
    """The launch aborted "before the first step", and its export continued without it."""
    stop = limits(tmp_path)
    could_save = []
    nothing = SimpleNamespace(settle=lambda: None, finish=lambda: None)
    checkpoints = SimpleNamespace(
        finish=lambda state: None,
        finish_exports=lambda state, is_stopped: could_save.append(stop.signals.can_save),
    )
    parts: Any = SimpleNamespace(guard=nothing, metrics=nothing, stop=stop, checkpoints=checkpoints)
    settings: Any = None
    end(settings, bare_state(100, 100), parts)
    assert could_save == [True]
