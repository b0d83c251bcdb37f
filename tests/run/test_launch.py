"""One launch: the run lock, signals, closed streams and terminals."""

from __future__ import annotations

import errno
import fcntl
import os
import pty
import re
import shlex
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from threading import Timer
from typing import Any, NoReturn

import pytest

from fms_fsdp.errors import UserError
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


def hear_all_signals() -> None:
    """In a new process: under nohup or in the background of a shell some signals are ignored."""
    for number in (signal.SIGHUP, signal.SIGINT):
        signal.signal(number, signal.SIG_DFL)


def start(*argv: str, **settings: Any) -> subprocess.Popen[Any]:
    return subprocess.Popen(
        [sys.executable, "main_training.py", *argv],
        cwd=ROOT,
        preexec_fn=hear_all_signals,
        **{"env": os.environ | {"OMP_NUM_THREADS": "1"}, **settings},
    )


def wait_for(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 90
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def has_steps(folder: Path, count: int = 2) -> Callable[[], bool]:
    file = folder / "metrics.jsonl"
    return lambda: file.exists() and file.read_bytes().count(b"\n") >= count


def saved_by(process: subprocess.Popen[Any], folder: Path, name: str) -> bool:
    """Whether the launch ended with a checkpoint because of this signal."""
    assert process.wait(60) == 75
    ended = status(folder)
    assert ended["status"] == "resume_me" and name in ended["reason"]
    return (folder / "checkpoints" / f"step_{ended['step']}").is_dir()


@pytest.mark.slow
def test_second_launch_of_one_process_runs(tmp_path: Path) -> None:
    """It said that its own process was writing there. A third one trains in a thread, where signals
    cannot be handled."""
    flags = [*TINY, "--trackers=none", f"--output_dir={tmp_path}"]
    code = f"from main_training import main\nfrom threading import Thread\nflags = {flags}\n"
    code += "print([main([*flags, f'--num_steps={n}']) for n in (1, 0, 2)])\n"
    code += "thread = Thread(target=main, args=([*flags, '--num_steps=3'],))\n"
    code += "thread.start(); thread.join()"
    ended = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert "[0, 2, 0]" in ended.stdout, ended.stderr
    assert ended.stdout.count("note: main() is not called in the main thread") == 1
    assert status(tmp_path)["step"] == 3 and "Traceback" not in ended.stderr


def test_port_in_use_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
        for name, value in (address | {"RANK": "0", "WORLD_SIZE": "2"}).items():
            monkeypatch.setenv(name, value)
        result = run(*TINY, f"--output_dir={tmp_path / 'run'}")
    assert result.returncode == 2
    assert result.stderr.startswith(f"error: MASTER_PORT={port} must be free on rank 0's machine")
    assert result.stderr.count("\n") == 1 and not (tmp_path / "run").exists()


INTERRUPTED = """
import os, signal, sys, threading, time
sys.path.insert(0, os.getcwd())
import main_training
from fms_fsdp.checkpoint import io

method = sys.argv[1]
original = getattr(io._Writer, method)


def slow(self, *arguments, **named):
    os.kill(os.getpid(), signal.SIGINT)
    time.sleep(1)
    return original(self, *arguments, **named)


setattr(io._Writer, method, slow)


def interrupt_once_it_trains():
    file = os.path.join(sys.argv[-1].partition("=")[2], "metrics.jsonl")
    while not os.path.exists(file) or open(file).read().count("\\n") < 3:
        time.sleep(0.05)
    os.kill(os.getpid(), signal.SIGINT)


threading.Thread(target=interrupt_once_it_trains, daemon=True).start()
os._exit(main_training.main(sys.argv[2:]))
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("method", "exit_status"),
    [("finish", 75), ("write_data", 1)],
)
def test_second_interrupt_spares_a_commit(tmp_path: Path, method: str, exit_status: int) -> None:
    """The first comes while the launch trains, the second within the save."""
    script, folder = tmp_path / "interrupted.py", tmp_path / "run"
    script.write_text(INTERRUPTED)
    flags = [*LONG, "--checkpoint_interval=0", f"--output_dir={folder}"]
    ended = subprocess.run(
        [sys.executable, str(script), method, *flags],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=120,
        preexec_fn=hear_all_signals,
    )
    assert ended.returncode == exit_status, ended.stderr
    saved = list((folder / "checkpoints").glob("step_*[0-9]"))
    if exit_status == 75:
        assert len([path for path in saved if "partial" not in path.name]) == 1
        assert status(folder)["status"] == "resume_me" and not ended.stderr
    else:
        assert all("partial" in path.name for path in saved)
        assert status(folder)["status"] == "failed"
        assert ended.stderr == "failed: interrupted by a second SIGINT; the last checkpoint stays\n"


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_signal_before_the_rendezvous_ends_at_once(tmp_path: Path, number: signal.Signals) -> None:
    address = {"MASTER_ADDR": "localhost", "MASTER_PORT": "29655"}
    environment = os.environ | address | {"RANK": "0", "WORLD_SIZE": "2"}
    flags = (*TINY, f"--output_dir={tmp_path / 'run'}")
    process = start(*flags, env=environment, stderr=subprocess.PIPE, text=True)
    wait_for(lambda: len(os.listdir(f"/proc/{process.pid}/task")) > 1)  # it listens
    time.sleep(6 if number == signal.SIGTERM else 0)  # then it waits for the other rank
    process.send_signal(number)
    _, said = process.communicate(timeout=5)
    assert process.returncode == 75 and "before the first step" in said
    assert not (tmp_path / "run").exists()


def test_hangup_saves_a_checkpoint(tmp_path: Path) -> None:
    process = start(*LONG, f"--output_dir={tmp_path}", stdout=subprocess.DEVNULL)
    wait_for(has_steps(tmp_path))
    process.send_signal(signal.SIGHUP)
    assert saved_by(process, tmp_path, "SIGHUP")


@pytest.mark.slow
def test_nohup_ignores_a_hangup(tmp_path: Path) -> None:
    command = ["nohup", sys.executable, "main_training.py", *LONG, f"--output_dir={tmp_path}"]
    quiet = subprocess.DEVNULL
    process = subprocess.Popen(command, cwd=ROOT, stdout=quiet, stderr=quiet)
    wait_for(has_steps(tmp_path))
    process.send_signal(signal.SIGHUP)
    lines = (tmp_path / "metrics.jsonl").read_bytes().count(b"\n")
    wait_for(has_steps(tmp_path, lines + 20))
    process.send_signal(signal.SIGTERM)
    assert saved_by(process, tmp_path, "SIGTERM")


@pytest.mark.slow
def test_closed_terminal_does_not_prevent_the_save(tmp_path: Path) -> None:
    ours, theirs = pty.openpty()
    streams = dict.fromkeys(("stdin", "stdout", "stderr"), theirs)
    process = start(*LONG, f"--output_dir={tmp_path}", start_new_session=True, **streams)
    os.close(theirs)
    os.set_blocking(ours, False)
    wait_for(has_steps(tmp_path))
    os.close(ours)  # without a controlling terminal no signal comes: from here all output fails
    process.send_signal(signal.SIGHUP)
    assert saved_by(process, tmp_path, "SIGHUP")


@pytest.mark.slow
@pytest.mark.parametrize("closed", [">&-", "2>&-"])
def test_launch_with_closed_stream_trains(tmp_path: Path, closed: str) -> None:
    """`flush` of a stream that is None ended the launch before it had parsed its flags."""
    flags = [*TINY, "--trackers=none", "--num_steps=1", f"--output_dir={tmp_path / 'run'}"]
    command = shlex.join([sys.executable, "main_training.py", *flags])
    ended = subprocess.run(["bash", "-c", f"exec {command} {closed}"], cwd=ROOT)
    assert ended.returncode == 0 and status(tmp_path / "run")["status"] == "finished"


def test_running_status_has_the_last_step(tmp_path: Path) -> None:
    """It was 0 until the launch ended."""
    with running([*LONG, f"--output_dir={tmp_path}"]):
        wait_for(has_steps(tmp_path, 5))
        reported = max(metrics(tmp_path))
        wait_for(lambda: status(tmp_path)["step"] >= reported)
        assert status(tmp_path)["status"] == "running"


def test_start_prints_a_dozen_lines(tmp_path: Path) -> None:
    output = trained(*TINY, "--num_steps=2", f"--output_dir={tmp_path}").splitlines()
    assert all(re.match(r"\d\d:\d\d:\d\d | {9}", line) for line in output)
    first = next(number for number, line in enumerate(output) if line[9:].startswith("step 1/2"))
    assert first <= 14 and all(len(line) <= 110 or str(tmp_path) in line for line in output), output
    assert any(line[9:].startswith("flags: --model_variant=tiny --use_") for line in output)
    assert not any("learning_rate" in line for line in output)
    log = (tmp_path / "log.txt").read_text()
    assert "    learning_rate = 0.0003" in log and "  * num_steps = 2  (flag)" in log
    assert all(line[9:] in log for line in output[1:])
    assert log.index("step 1/2") > log.index("learning_rate = 0.0003") > log.index("model: tiny")


@pytest.mark.parametrize("code", [errno.ENOLCK, errno.EOPNOTSUPP, errno.EACCES, errno.EIO])
def test_only_missing_locks_are_ignored(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    """On CIFS another process's lock is EACCES. It counted as "no locks", and two launches wrote."""

    def refuse(file: object, operation: int) -> NoReturn:
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(fcntl, "flock", refuse)
    if code == errno.EACCES:
        with pytest.raises(UserError, match="is in use by another process"):
            lock_folder(tmp_path, 0.0)
    elif code == errno.EIO:
        with pytest.raises(OSError, match="Input/output error"):
            lock_folder(tmp_path, 0.0)
    else:
        lock_folder(tmp_path, 0.0).close()


def test_lock_of_another_machine_is_awaited(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A file server keeps the lock of a node that died: the launch on its replacement ended as bad input."""
    own = lock_folder(tmp_path, 0.0)
    with pytest.raises(UserError, match="is in use by process"):  # one of this machine still runs
        lock_folder(tmp_path, 0.0, lease_s=60.0)
    (tmp_path / ".lock").write_text("process 7 on a-node-that-died\n")
    Timer(0.5, own.close).start()
    lock_folder(tmp_path, 0.0, lease_s=60.0).close()
    said = f"{tmp_path} is in use by process 7 on a-node-that-died: waiting 60 s\n"
    assert capsys.readouterr().err == said


def test_lock_names_its_owner(tmp_path: Path) -> None:
    lock = tmp_path / ".lock"
    lock.write_text("process 1234567890 on a-machine-with-a-very-long-name.example.org\n")
    with lock_folder(tmp_path, 0.0):
        assert lock.read_text() == f"process {os.getpid()} on {socket.gethostname()}\n"
