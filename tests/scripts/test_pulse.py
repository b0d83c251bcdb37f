"""scripts/pulse.sh without SLURM, and with a stand-in for squeue."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import time
from pathlib import Path

import pytest

from fms_fsdp.run.run_dir import lock_folder
from tests.cli import ROOT


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A run at step 20 that reported just now; nobody writes there any more."""
    run = tmp_path / "a run"
    run.mkdir()
    (run / "metrics.jsonl").write_text('{"step": 10, "loss": 2.0}\n{"step": 20, "loss": 1.0}\n')
    tell(run, "running")
    (run / ".lock").touch()
    return run


def tell(folder: Path, status: str) -> None:
    (folder / "status.json").write_text(
        json.dumps({"status": status, "step": 20, "reason": "told so"}) + "\n"
    )


def squeue(folder: Path, answer: str, code: int = 0) -> str:
    """A PATH on which squeue answers like this."""
    fake = folder.parent / "bin"
    fake.mkdir(exist_ok=True)
    (fake / "squeue").write_text(
        f'#!/bin/bash\n[[ "$*" == *"-j 123"* ]] || exit 9\necho "{answer}"\nexit {code}\n'
    )
    (fake / "squeue").chmod(0o755)
    return f"{fake}:{os.environ['PATH']}"


def pulse(folder: Path, *flags: str, path: str = "") -> tuple[int, str]:
    """Exit status, and what is said after the folder's name."""
    ended = subprocess.run(
        ["bash", ROOT / "scripts/pulse.sh", folder, *flags],
        env=os.environ | {"PATH": path or os.environ["PATH"]},
        capture_output=True,
        text=True,
        timeout=30,
    )
    note = f"pulse.sh: note: {folder}/console.txt cannot be written\n"
    assert ended.stderr in ("", note) or ended.returncode == 2, ended.stderr
    return ended.returncode, (ended.stdout.partition(f"{folder} ")[2] or ended.stderr).strip()


def age(folder: Path, minutes: float) -> None:
    then = time.time() - 60 * minutes
    for name in ("metrics.jsonl", "status.json"):
        os.utime(folder / name, (then, then))


def test_lock_decides_without_slurm(folder: Path) -> None:
    code, line = pulse(folder)
    assert code == 3 and line == "GONE no process writes there; status running: told so"
    with lock_folder(folder):
        assert pulse(folder) == (0, "TRAINING step 20, last sign 0 min ago")
        age(folder, 31)
        assert pulse(folder) == (1, "STALLED step 20, last sign 31 min ago")
        assert pulse(folder, "--stalled-after-min", "40")[0] == 0
    tell(folder, "finished")
    assert pulse(folder) == (0, "FINISHED step 20")
    assert [line.split()[4] for line in (folder / "console.txt").read_text().splitlines()] == [
        "run"
    ] * 5


@pytest.mark.parametrize(
    ("answer", "exit_status", "minutes", "code", "line"),
    [
        ("RUNNING None", 0, 1, 0, "TRAINING step 20, last sign 1 min ago"),
        ("SIGNALING None", 0, 99, 1, "STALLED step 20, last sign 99 min ago"),
        (
            "PENDING JobArrayTaskLimit\nRUNNING None",
            0,
            1,
            0,
            "TRAINING step 20, last sign 1 min ago",
        ),
        ("PENDING Resources", 0, 99, 0, "WAITING job 123: PENDING Resources"),
        ("", 0, 1, 3, "GONE job 123 is not in the queue; status running: told so"),
        (
            "slurm_load_jobs error: Invalid job id specified",
            1,
            1,
            3,
            "GONE job 123 is not in the queue; status running: told so",
        ),
        (
            "slurm_load_jobs error: Unable to contact slurm controller",
            1,
            1,
            4,
            "UNKNOWN slurm_load_jobs error: Unable to contact slurm controller",
        ),
    ],
)
def test_queue_decides_for_a_job(
    folder: Path, answer: str, exit_status: int, minutes: int, code: int, line: str
) -> None:
    path = squeue(folder, answer, exit_status)
    age(folder, minutes)
    assert pulse(folder, "--job", "123", path=path) == (code, line)
    (folder / "slurm_job").write_text("123\n")  # as train.slurm leaves it, at the start of each job
    os.utime(folder / "slurm_job", (1, 1))
    assert pulse(folder, path=path) == (code, line)


def test_hanging_squeue_is_not_awaited(folder: Path) -> None:
    """With `timeout` of a fraction of a second in place of a minute."""
    path = squeue(folder, "RUNNING None")
    fake = folder.parent / "bin"
    (fake / "squeue").write_text("#!/bin/bash\nexec sleep 60\n")
    short = f'#!/bin/bash\nexec {shutil.which("timeout")} 0.2 "${{@:2}}"\n'
    (fake / "timeout").write_text(short)
    (fake / "timeout").chmod(0o755)
    assert pulse(folder, "--job", "123", path=path) == (
        4,
        "UNKNOWN squeue does not answer within 60 s",
    )


def test_job_that_begins_is_not_stalled(folder: Path) -> None:
    """A requeued run loads for a while: the old reports say nothing yet."""
    age(folder, 99)
    (folder / "slurm_job").write_text("123\n")
    assert pulse(folder, path=squeue(folder, "RUNNING None")) == (
        0,
        "TRAINING step 20, last sign 0 min ago",
    )
    bare = folder.parent / "bare"
    bare.mkdir()
    assert pulse(bare, "--job", "123", path=squeue(folder, "RUNNING None"))[1].startswith(
        "TRAINING step 0, "
    )


def test_alert_gets_the_line(folder: Path) -> None:
    alert = ("--alert", f'echo "$1" >>"{folder}/alert.txt"')
    assert pulse(folder, *alert)[0] == 3
    assert f"pulse: {folder} GONE" in (folder / "alert.txt").read_text()
    tell(folder, "finished")
    assert pulse(folder, *alert)[0] == 0
    assert len((folder / "alert.txt").read_text().splitlines()) == 1


def test_alert_is_sent_when_disk_is_full(folder: Path) -> None:
    (folder / "console.txt").symlink_to("/dev/full")
    alert = ("--alert", f'echo "$1" >>"{folder}/alert.txt"')
    code, line = pulse(folder, *alert)
    assert code == 3
    assert line.startswith("GONE ")
    assert f"pulse: {folder} GONE" in (folder / "alert.txt").read_text()


@pytest.mark.parametrize(
    ("reason", "shown"),
    [
        (
            "out of memory, try --batch_size=1, or less",
            "out of memory, try --batch_size=1, or less",
        ),
        ("C:\\new \\ end", "C:\\new \\ end"),
        ("one\ntwo\x1b[31m", "onetwo[31m"),
    ],
)
def test_reason_is_printed_completely(folder: Path, reason: str, shown: str) -> None:
    (folder / "status.json").write_text(
        json.dumps({"status": "failed", "step": 20, "reason": reason}) + "\n"
    )
    assert pulse(folder) == (3, f"GONE no process writes there; status failed: {shown}")


def test_minutes_with_leading_zero_are_decimal(folder: Path) -> None:
    with lock_folder(folder):
        age(folder, 7)
        for minutes, code in (("08", 0), ("008", 0), ("07", 1), ("0", 1)):
            assert pulse(folder, "--stalled-after-min", minutes)[0] == code


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--stalled-after-min", "soon"], "--stalled-after-min (soon) must be a whole number"),
        (["--stalled-after-min", "x[$(echo 1 >&2)]"], "must be a whole number"),
        (["--stalled-after-min", "9" * 30], "must be a whole number"),
        (["--job"], "--job needs a value"),
        (["--jobs", "3"], "--jobs is not a flag"),
        (["elsewhere"], "RUN_FOLDER (elsewhere) must be the folder of a run"),
    ],
)
def test_wrong_arguments_are_rejected(folder: Path, flags: list[str], words: str) -> None:
    code, line = pulse(folder, *flags)
    assert code == 2 and words in line and "\n" not in line
