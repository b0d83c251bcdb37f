"""One launch: who may write into a run folder, what a signal does, what a refused launch leaves."""

from __future__ import annotations

import os
import pty
import shlex
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from fms_fsdp.checkpoint.folders import corrupt_files, problem
from fms_fsdp.config import BatchPlan, TrainingConfig, plan_batch
from fms_fsdp.run.run_dir import lock_folder
from tests.cli import ROOT, TINY, metrics, run, status, trained
from tests.warm import running

LONG = (*TINY, "--num_steps=100000", "--trackers=none")


def content(folder: Path) -> dict[str, bytes]:
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in folder.rglob("*")
        if path.is_file()
    }


def flip_a_byte(checkpoint: Path) -> None:
    """In the middle of its tensors."""
    file = next(checkpoint.glob("*.distcp"))
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(data)


def hear_all_signals() -> None:
    """In a new process: the tests may run under nohup, or in a shell's background, which ignore some."""
    for number in (signal.SIGHUP, signal.SIGINT):
        signal.signal(number, signal.SIG_DFL)


def start(*argv: str, **settings: object) -> subprocess.Popen[bytes]:
    command = [sys.executable, "main_training.py", *argv]
    settings |= {
        "cwd": ROOT,
        "env": os.environ | {"OMP_NUM_THREADS": "1"},
        "preexec_fn": hear_all_signals,
    }
    return subprocess.Popen(command, **settings)  # type: ignore[call-overload,no-any-return]


def wait_for(condition: Callable[[], bool], patience_s: float = 90) -> None:
    deadline = time.monotonic() + patience_s
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def has_steps(folder: Path, count: int = 2) -> Callable[[], bool]:
    file = folder / "metrics.jsonl"
    return lambda: file.exists() and file.read_bytes().count(b"\n") >= count


def test_a_launch_that_the_lock_refuses_leaves_the_folder_of_the_running_one_as_it_is(
    tmp_path: Path,
) -> None:
    trained(*TINY, "--num_steps=1", f"--output_dir={tmp_path}")
    with lock_folder(tmp_path):
        before = content(tmp_path)
        result = run(*TINY, "--num_steps=2", f"--output_dir={tmp_path}")
        assert result.returncode == 2 and "is in use by process" in result.stderr
        assert content(tmp_path) == before


def test_a_second_launch_in_one_process_is_not_refused_by_the_first_one(tmp_path: Path) -> None:
    """It said that its own process was writing there."""
    flags = [*TINY, "--trackers=none", f"--output_dir={tmp_path}"]
    code = f"from main_training import main\nflags = {flags}\n"
    code += "print([main([*flags, f'--num_steps={n}']) for n in (1, 0, 2)])"
    ended = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert "[0, 2, 0]" in ended.stdout and "must have one writer" not in ended.stderr, ended.stderr


def test_the_last_sound_checkpoint_outlives_a_damaged_newer_one(tmp_path: Path) -> None:
    argv = [*TINY, "--checkpoint_interval=1", f"--output_dir={tmp_path}"]
    root = tmp_path / "checkpoints"
    trained(*argv, "--num_steps=3")
    flip_a_byte(root / "step_3")
    output = trained(*argv, "--num_steps=4", "--keep_last_n=1")
    assert "is corrupt" in output and "resuming from step 2" in output
    assert sorted(path.name for path in root.iterdir()) == [".lock", "step_3.damaged-1", "step_4"]
    assert not problem(root / "step_4") and not corrupt_files(root / "step_4")


@pytest.mark.slow
def test_a_run_whose_only_checkpoint_is_damaged_does_not_start_afresh(tmp_path: Path) -> None:
    argv = [*TINY, f"--output_dir={tmp_path}"]
    trained(*argv, "--num_steps=1")
    flip_a_byte(tmp_path / "checkpoints" / "step_1")
    for _ in range(2):  # the first launch sets it aside
        result = run(*argv, "--num_steps=2")
        assert result.returncode == 2 and "no usable checkpoint" in result.stderr, result.stderr


@pytest.mark.parametrize(
    ("rows", "accum", "dp_size", "plan"),
    [
        (8, None, 1, (8, 2)),
        (8, None, 2, (8, 1)),
        (8, None, 8, (2, 1)),
        (5, None, 2, (4, 2)),
        (None, None, 1, (8, 2)),
        (None, 4, 2, (2, 4)),
        (4, 2, 2, (4, 2)),
    ],
)
def test_another_number_of_ranks_keeps_the_global_batch(
    rows: int | None, accum: int | None, dp_size: int, plan: tuple[int, int]
) -> None:
    section = TrainingConfig(batch_size=rows, grad_accum_steps=accum)
    kept = plan_batch(section, dp_size, BatchPlan(8, 2, 1))
    assert (kept.batch_size, kept.grad_accum_steps) == plan and kept.global_batch_size == 16


def test_ranks_that_do_not_divide_the_global_batch_are_refused() -> None:
    text = r"16 must be divisible by 3 \(= data-parallel size 3\).*1, 2, 4, 8, 16"
    with pytest.raises(ValueError, match=text):
        plan_batch(TrainingConfig(), 3, BatchPlan(8, 2, 1))


@pytest.mark.parametrize(
    "number",
    [
        signal.SIGTERM,
        *(
            pytest.param(number, marks=pytest.mark.slow)
            for number in (signal.SIGUSR1, signal.SIGHUP, signal.SIGINT)
        ),
    ],
)
def test_a_signal_while_the_ranks_still_look_for_each_other_ends_the_launch_at_once(
    tmp_path: Path, number: signal.Signals
) -> None:
    rendezvous = {
        "RANK": "0",
        "WORLD_SIZE": "2",
        "MASTER_ADDR": "localhost",
        "MASTER_PORT": "29655",
    }
    command = [sys.executable, "main_training.py", *TINY, f"--output_dir={tmp_path / 'run'}"]
    process = subprocess.Popen(
        command,
        cwd=ROOT,
        env=os.environ | rendezvous,
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=hear_all_signals,
    )
    wait_for(lambda: len(os.listdir(f"/proc/{process.pid}/task")) > 1)  # it listens
    time.sleep(6 if number == signal.SIGTERM else 0)  # then it waits for the other rank
    process.send_signal(number)
    _, said = process.communicate(timeout=5)
    assert process.returncode == 75 and "before the first step" in said
    assert not (tmp_path / "run").exists()


def test_hangup_saves_as_sigterm_does(tmp_path: Path) -> None:
    process = start(*LONG, f"--output_dir={tmp_path}", stdout=subprocess.DEVNULL)
    wait_for(has_steps(tmp_path))
    process.send_signal(signal.SIGHUP)
    assert process.wait(60) == 75
    ended = status(tmp_path)
    assert (
        "SIGHUP" in ended["reason"]
        and (tmp_path / "checkpoints" / f"step_{ended['step']}").is_dir()
    )


@pytest.mark.slow
def test_nohup_goes_on_after_a_hangup(tmp_path: Path) -> None:
    command = ["nohup", sys.executable, "main_training.py", *LONG, f"--output_dir={tmp_path}"]
    process = subprocess.Popen(
        command, cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    wait_for(has_steps(tmp_path))
    process.send_signal(signal.SIGHUP)
    lines = (tmp_path / "metrics.jsonl").read_bytes().count(b"\n")
    wait_for(has_steps(tmp_path, lines + 20))
    process.send_signal(signal.SIGTERM)
    assert process.wait(60) == 75 and "SIGTERM" in status(tmp_path)["reason"]


@pytest.mark.slow
def test_a_terminal_that_is_closed_does_not_stop_the_save(tmp_path: Path) -> None:
    ours, theirs = pty.openpty()
    process = start(
        *LONG,
        f"--output_dir={tmp_path}",
        stdin=theirs,
        stdout=theirs,
        stderr=theirs,
        start_new_session=True,
    )
    os.close(theirs)
    os.set_blocking(ours, False)
    wait_for(has_steps(tmp_path))
    os.close(ours)  # without a controlling terminal no signal comes: all output fails from here on
    process.send_signal(signal.SIGHUP)
    assert process.wait(60) == 75
    ended = status(tmp_path)
    assert (
        ended["status"] == "resume_me"
        and (tmp_path / "checkpoints" / f"step_{ended['step']}").is_dir()
    )


@pytest.mark.parametrize("closed", [">&-", "2>&-"])
def test_run_with_a_closed_stream_trains(tmp_path: Path, closed: str) -> None:
    """`flush` of a stream that is None ended the launch before it had parsed its flags."""
    flags = [*TINY, "--trackers=none", "--num_steps=1", f"--output_dir={tmp_path / 'run'}"]
    command = shlex.join([sys.executable, "main_training.py", *flags])
    ended = subprocess.run(
        ["bash", "-c", f"exec {command} {closed}"], cwd=ROOT, capture_output=True, text=True
    )
    assert ended.returncode == 0, ended.stderr
    assert status(tmp_path / "run")["status"] == "finished"


@pytest.mark.slow
def test_a_run_outlives_the_shell_that_started_it(tmp_path: Path) -> None:
    command = f"{sys.executable} main_training.py {' '.join(LONG)} --output_dir={tmp_path}"
    script = f"{command} >/dev/null 2>&1 & echo $!"
    pid = int(
        subprocess.run(
            ["bash", "-c", script], cwd=ROOT, capture_output=True, text=True, check=True
        ).stdout
    )
    try:
        wait_for(has_steps(tmp_path, 30))
        assert status(tmp_path)["status"] == "running"
    finally:
        os.kill(pid, signal.SIGTERM)
    wait_for(lambda: status(tmp_path)["status"] == "resume_me")


def test_running_status_has_the_last_step(tmp_path: Path) -> None:
    """It was 0 until the launch ended."""
    with running([*LONG, f"--output_dir={tmp_path}"]):
        wait_for(has_steps(tmp_path, 5))
        reported = max(metrics(tmp_path))
        until = time.monotonic() + 3
        while status(tmp_path)["step"] < reported and time.monotonic() < until:
            time.sleep(0.05)
        assert status(tmp_path)["status"] == "running"
        assert status(tmp_path)["step"] >= reported


def test_a_stop_file_dated_ahead_of_the_clock_stops_no_later_launch(tmp_path: Path) -> None:
    stop = tmp_path / "STOP"
    stop.touch()
    ahead = time.time() + 10_000
    os.utime(stop, (ahead, ahead))
    trained(*TINY, "--num_steps=3", f"--output_dir={tmp_path}")
    assert status(tmp_path)["status"] == "finished" and not stop.exists()


def test_a_fresh_run_prints_a_dozen_lines_and_keeps_the_whole_configuration_in_its_log(
    tmp_path: Path,
) -> None:
    output = trained(*TINY, "--num_steps=2", f"--output_dir={tmp_path}").splitlines()
    first = next(number for number, line in enumerate(output) if line.startswith("step 1/2"))
    assert first <= 12 and all(len(line) <= 110 or str(tmp_path) in line for line in output), output
    assert any(
        line.startswith("flags: --model_variant=tiny --use_dummy_dataset=True") for line in output
    )
    assert not any("learning_rate" in line for line in output)
    log = (tmp_path / "log.txt").read_text()
    assert "    learning_rate = 0.0003" in log and "  * num_steps = 2  (flag)" in log
    assert all(line in log for line in output[1:])


def test_a_lock_names_its_last_owner_alone(tmp_path: Path) -> None:
    (tmp_path / ".lock").write_text(
        "process 1234567890 on a-machine-with-a-very-long-name.example.org\n"
    )
    with lock_folder(tmp_path, 0.0):
        assert (
            tmp_path / ".lock"
        ).read_text() == f"process {os.getpid()} on {socket.gethostname()}\n"
