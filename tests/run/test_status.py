"""How a launch ends: status.json, exit status, and who prints."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from threading import Thread
from types import SimpleNamespace
from typing import NoReturn, cast

import pytest

from fms_fsdp.errors import RunFailed, UserError
from fms_fsdp.run.agent import agent_pid, await_rank0
from fms_fsdp.run.status import FINISHED, RESUME_ME, RunStatus
from fms_fsdp.state import TrainState
from tests.cli import ROOT


def status(folder: Path) -> dict[str, object]:
    content: dict[str, object] = json.loads((folder / "status.json").read_text())
    return content


def test_status_of_finished_run(tmp_path: Path) -> None:
    with RunStatus() as launch:
        launch.open(tmp_path, 0)
        assert status(tmp_path)["status"] == "running"
        launch.follow(cast(TrainState, SimpleNamespace(step=7)))
        launch.end(FINISHED, "done")
    assert launch.exit_status == 0
    ended = {"status": "finished", "step": 7, "reason": "done", "worlds": [[0, 1]]}
    assert status(tmp_path) == ended  # one rank from the first step on


def test_unlocked_launch_writes_only_its_outcome(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("LAUNCH_OUTCOME", str(tmp_path / "outcome.json"))
    with RunStatus():
        raise UserError("--x (1) must be 2")
    assert [path.name for path in tmp_path.iterdir()] == ["outcome.json"]
    content = json.loads((tmp_path / "outcome.json").read_text())
    assert content == {
        "status": "bad_input",
        "step": 0,
        "reason": "--x (1) must be 2",
        "attempt": 0,
        "claimed": False,
        "worlds": [],
    }


@pytest.mark.parametrize(
    ("attempt", "status", "claimed", "expected"),
    [
        (0, "failed", True, "bad_input"),  # of the attempt before: the launch ended with 0
        (1, "resume_me", True, "bad_input"),  # of the nodes before one joined: with 75
        (1, "failed", False, "failed"),  # of another rank
        (1, "running", True, "bad_input"),
    ],
)
def test_outcome_is_of_the_last_group(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    attempt: int,
    status: str,
    claimed: bool,
    expected: str,
) -> None:
    outcome = tmp_path / "outcome.json"
    outcome.write_text(json.dumps({"status": status, "attempt": attempt, "claimed": claimed}))
    monkeypatch.setenv("LAUNCH_OUTCOME", str(outcome))
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    with RunStatus():
        raise UserError("--x (1) must be 2")
    with RunStatus() as stopped:  # another rank, which torchrun ends
        stopped.end(RESUME_ME, "stopped by SIGTERM before the first step")
    assert json.loads(outcome.read_text())["status"] == expected


def test_job_of_an_earlier_launch_is_forgotten(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """pulse.sh looked for it, and reported a run outside of SLURM as gone."""
    for name in ("SLURM_ARRAY_JOB_ID", "SLURM_JOB_ID"):
        monkeypatch.delenv(name, raising=False)
    (tmp_path / "slurm_job").write_text("123\n")
    RunStatus().open(tmp_path, 0)
    assert not (tmp_path / "slurm_job").exists()


def test_first_failure_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = RunStatus()
    first.open(tmp_path, 0)
    monkeypatch.setenv("RANK", "1")
    with RunStatus() as other:
        other.open(tmp_path, 0)
        raise RunFailed("out of memory", on_one_rank=True)
    first.save_step()  # of a step that rank 0 ended meanwhile
    first.report(RuntimeError("connection closed by peer"))
    failed = {"status": "failed", "step": 0, "reason": "out of memory", "worlds": [[0, 1]]}
    assert status(tmp_path) == failed and first.peer_failed()


def test_step_of_rank0_waits_for_the_end_of_another_rank(tmp_path: Path) -> None:
    """Otherwise rank 0 replaces an end that was written since it looked."""
    rank0 = RunStatus()
    rank0.open(tmp_path, 0)
    rank0.follow(cast(TrainState, SimpleNamespace(step=7)))
    with open(tmp_path / "log.txt", "ab") as log:
        fcntl.flock(log, fcntl.LOCK_EX)  # another rank writes its end
        saving = Thread(target=rank0.save_step)
        saving.start()
        saving.join(0.2)
        assert saving.is_alive() and status(tmp_path)["step"] == 0
        ended = {"status": "bad_input", "step": 6, "reason": "has token 6000", "data_step": 8}
        (tmp_path / "status.json").write_text(json.dumps(ended))
    saving.join()
    assert status(tmp_path) == ended


def test_a_hanging_rank_keeps_no_other_from_its_end(tmp_path: Path) -> None:
    rank = RunStatus()
    rank.open(tmp_path, 0)
    with open(tmp_path / "log.txt", "ab") as log:
        fcntl.flock(log, fcntl.LOCK_EX)
        rank.fail("out of memory")
    assert status(tmp_path)["reason"] == "out of memory"


def test_failing_close_keeps_the_reason(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with RunStatus() as launch:
        launch.open(tmp_path, 0)
        launch.report(UserError("--x (1) must\n be 2"))
        raise OSError("the file is gone")
    told = capsys.readouterr().err
    assert told == "error: --x (1) must be 2\n[rank 0] then OSError: the file is gone\n"
    assert launch.exit_status == 2 and status(tmp_path)["status"] == "bad_input"
    assert status(tmp_path)["reason"] == "--x (1) must be 2"


STOPPED = f"""
import sys
sys.path.insert(0, {str(ROOT)!r})
from fms_fsdp.run.status import RESUME_ME, RunStatus
launch = RunStatus()
launch.outcome = RESUME_ME
sys.exit(launch.exit_status)
"""


@pytest.mark.parametrize(
    ("is_session", "has_shell", "exit_status"),
    [(True, False, 0), (True, True, 0), (False, False, 75)],
)
def test_stopped_launch_is_75_without_torchrun(
    is_session: bool, has_shell: bool, exit_status: int
) -> None:
    """torchrun starts a worker, which may be a script, as the leader of a session; a launch that only
    inherits the variable is not one."""
    command = [sys.executable, "-c", STOPPED]
    if has_shell:
        command = ["sh", "-c", '"$@"; exit $?', "sh", *command]
    environment = os.environ | {"TORCHELASTIC_RUN_ID": "x"}
    ended = subprocess.run(command, env=environment, start_new_session=is_session)
    assert ended.returncode == exit_status
    with RunStatus() as launch:
        launch.outcome = RESUME_ME
    assert launch.exit_status == 75


OPENED = f"""
import sys
from types import SimpleNamespace
sys.path.insert(0, {str(ROOT)!r})
from fms_fsdp.run.run_dir import RunDir
run_dir = RunDir(SimpleNamespace(output_dir=sys.argv[1], ckpt_save_path=sys.argv[1] + "/checkpoints"))
run_dir.open()
sys.exit(not run_dir.stop_file.exists())
"""


@pytest.mark.parametrize("is_started_again", [False, True])
def test_stop_is_for_ranks_that_torchrun_starts_again(
    tmp_path: Path, is_started_again: bool
) -> None:
    """A STOP that was made while the ranks before hung was deleted, as that of an earlier launch."""
    (tmp_path / "STOP").touch()
    time.sleep(0.1)  # the clock of processes has ticks of 10 ms
    environment = os.environ | ({"TORCHELASTIC_RUN_ID": "x"} if is_started_again else {})
    command = [sys.executable, "-c", OPENED, str(tmp_path)]
    ended = subprocess.run(command, env=environment, start_new_session=True)
    assert ended.returncode == (0 if is_started_again else 1)


def test_busy_process_has_not_lost_its_agent(monkeypatch: pytest.MonkeyPatch) -> None:
    """Too many open files counted as the end of torchrun, and the run stopped."""
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "x")
    code = errno.EMFILE

    def failing(path: Path) -> NoReturn:
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(Path, "read_bytes", failing)
    with pytest.raises(OSError, match="Too many open files"):
        agent_pid()
    code = errno.ENOENT
    assert agent_pid() == 0


def test_other_ranks_wait_until_rank_0_has_printed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """They slept for 5 s."""
    address = {"MASTER_ADDR": "test", "MASTER_PORT": str(os.getpid() % 60000), "WORLD_SIZE": "2"}
    for name, value in (address | {"RANK": "1"}).items():
        monkeypatch.setenv(name, value)
    began = time.monotonic()
    other = Thread(target=await_rank0)
    other.start()
    time.sleep(0.2)
    assert other.is_alive()
    monkeypatch.setenv("RANK", "0")
    with RunStatus():
        raise UserError("--x (1) must be 2")
    other.join()
    assert time.monotonic() - began < 4  # a busy machine
    assert capsys.readouterr().err == "error: --x (1) must be 2\n"


def test_bug_keeps_its_traceback(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with RunStatus() as launch:
        launch.open(tmp_path, 0)
        raise KeyError("lost")
    assert launch.exit_status == 1
    assert "Traceback" in capsys.readouterr().err and status(tmp_path)["status"] == "failed"


def test_empty_first_line_is_no_reason(tmp_path: Path) -> None:
    with RunStatus() as launch:
        launch.open(tmp_path, 0)
        raise RuntimeError("\n  stage 1 failed\n") from ValueError("the cause")
    assert status(tmp_path)["reason"] != "RuntimeError: "
    assert "stage 1 failed" in launch.reason or "the cause" in launch.reason


@pytest.mark.parametrize("on_one_rank", [False, True])
def test_restart_ends_after_bad_input(
    on_one_rank: bool,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Without LAUNCH_OUTCOME, torchrun starts the workers again; what one rank alone found may pass."""
    monkeypatch.delenv("LAUNCH_OUTCOME", raising=False)
    starts = 0
    for attempt in ("0", "1", "2"):
        error_file = tmp_path / f"attempt_{attempt}" / "0" / "error.json"
        monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(error_file))
        monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", attempt)
        try:
            with RunStatus() as launch:
                starts += 1
                raise UserError("--x (1) must be 2", on_one_rank=on_one_rank)
            ended = launch.exit_status
        except SystemExit as end:
            ended = end.code
        assert ended == 2
    assert starts == (3 if on_one_rank else 1)
    assert capsys.readouterr().err == "error: --x (1) must be 2\n"


def test_rank_with_bad_data_reports_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    RunStatus().open(tmp_path, 0)
    monkeypatch.setenv("RANK", "3")
    with RunStatus() as launch:
        launch.open(tmp_path, 0)
        raise UserError("shard x is truncated", on_one_rank=True)
    assert capsys.readouterr().err == "error: shard x is truncated\n"
    assert status(tmp_path)["status"] == "bad_input"
