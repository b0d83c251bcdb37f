"""scripts/cron.slurm submits itself again, and scripts/run_folder.sh runs the scripts that are due.

The commands of SLURM are scripts that record their calls.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import time
from pathlib import Path

import pytest

from tests.cli import ROOT

SQUEUE = "echo '4:00:00|gpu|lab|(null)'"
AGAIN = "sbatch --parsable --time=4:00:00 --partition=gpu --account=lab --dependency=afterany:17"


def executable(path: Path, text: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/usr/bin/env bash\n{text}")
    path.chmod(0o755)
    return path


def cron(
    folder: Path,
    *arguments: str,
    sbatch: str = "echo 18",
    squeue: str = SQUEUE,
    **environment: str,
) -> tuple[subprocess.CompletedProcess[str], list[str]]:
    """What the job gives, and the calls of SLURM that it makes."""
    calls = folder / "calls"
    for name, more in {"sbatch": sbatch, "scancel": "", "squeue": squeue, "sleep": ""}.items():
        note = "" if name in ("squeue", "sleep") else f'echo "{name} $*" >>{calls}'
        executable(folder / "bin" / name, f"{note}\n{more}\n")
    settings = {
        "PATH": f"{folder}/bin:{os.environ['PATH']}",
        "SLURM_JOB_ID": "17",
        "SLURM_SUBMIT_DIR": str(ROOT),
    }
    ended = subprocess.run(
        ["bash", ROOT / "scripts" / "cron.slurm", *arguments],
        env=os.environ | settings | environment,
        capture_output=True,
        text=True,
        timeout=300,
    )
    return ended, calls.read_text().splitlines() if calls.exists() else []


def test_job_submits_the_next_one(
    tmp_path: Path,
) -> None:
    ended, calls = cron(tmp_path, "30", "bash", "-c", "echo copied; false")
    assert ended.returncode == 0 and ended.stdout == "copied\n", ended.stderr
    assert calls == [
        f"{AGAIN} --begin=now+30minutes scripts/cron.slurm 30 bash -c echo copied; false"
    ]


@pytest.mark.parametrize(("num_failures", "status", "num_calls"), [(2, 0, 3), (9, 1, 5)])
def test_failing_sbatch_is_tried_again(
    tmp_path: Path, num_failures: int, status: int, num_calls: int
) -> None:
    """One "Socket timed out" ended the chain for ever, without the command."""
    sbatch = f"[[ $(wc -l <{tmp_path}/calls) -gt {num_failures} ]] && echo 18"
    ended, calls = cron(tmp_path, "30", "echo", "copied", sbatch=sbatch)
    assert (ended.returncode, ended.stdout, len(calls)) == (status, "copied\n", num_calls)
    assert ("cannot be submitted" in ended.stderr) == (status == 1)


def test_hanging_squeue_ends_no_chain(tmp_path: Path) -> None:
    """It took all the time of the job, before the next one was submitted."""
    executable(tmp_path / "bin" / "timeout", f'shift\nexec {shutil.which("timeout")} 0.2 "$@"\n')
    sleep = f"exec {shutil.which('sleep')} 8"
    began = time.monotonic()
    ended, calls = cron(tmp_path, "30", "echo", "copied", squeue=sleep)
    assert time.monotonic() - began < 8 and ended.stdout == "copied\n", ended.stderr
    assert len(calls) == 1 and calls[0].startswith("sbatch --parsable --dependency=afterany:17")


@pytest.mark.parametrize("submitted", ["18", "18;alpha"])  # the second: of several clusters
def test_chain_ends_when_the_run_is_finished(tmp_path: Path, submitted: str) -> None:
    sbatch = f"echo '{submitted}'"
    ended, calls = cron(tmp_path, "5", "echo", "runs/x FINISHED step 7", sbatch=sbatch)
    assert ended.returncode == 0 and len(calls) == 2 and calls[1] == "scancel 18"


@pytest.mark.parametrize(
    ("arguments", "environment", "text"),
    [
        (("0", "true"), {}, "MINUTES (0) must be a whole number above 0"),
        (("5",), {}, "a command must follow"),
        (("5", "true"), {"SLURM_JOB_ID": ""}, "SLURM_JOB_ID must be set by SLURM"),
        (("5", "true"), {"SLURM_SUBMIT_DIR": "/nowhere"}, "SLURM_SUBMIT_DIR must be a folder"),
    ],
)
def test_wrong_call_submits_nothing(
    arguments: tuple[str, ...], environment: dict[str, str], text: str, tmp_path: Path
) -> None:
    ended, calls = cron(tmp_path, *arguments, **environment)
    assert ended.returncode == 2 and text in ended.stderr and not calls


def run_folder(*arguments: object) -> subprocess.CompletedProcess[str]:
    command = ["bash", ROOT / "scripts" / "run_folder.sh", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=300)


def test_scripts_run_once_per_hour_or_day(tmp_path: Path) -> None:
    log = tmp_path / "log"
    for name in ("cron.hourly/copy", "cron.daily/prune"):
        executable(tmp_path / name, f"echo {name} >>{log}\n")
    (tmp_path / "cron.hourly" / "notes.txt").write_text("no script")
    for _ in range(2):
        ended = run_folder(tmp_path)
        assert ended.returncode == 0, ended.stderr
    assert log.read_text().split() == ["cron.hourly/copy", "cron.daily/prune"]
    for stamp, minutes in (("cron.hourly/.stamps/copy", 61), ("cron.daily/.stamps/prune", 61)):
        then = (tmp_path / stamp).stat().st_mtime - 60 * minutes
        os.utime(tmp_path / stamp, (then, then))
    executable(tmp_path / "cron.hourly" / "failing", "exit 7\n")
    ended = run_folder(tmp_path)
    assert ended.returncode == 1 and "cron.hourly/failing failed with status 7" in ended.stderr
    assert log.read_text().split() == ["cron.hourly/copy", "cron.daily/prune", "cron.hourly/copy"]


def test_script_without_a_stamp_stops_no_other(tmp_path: Path) -> None:
    """As on a full disk. The end of the first `touch` was the end of all."""
    executable(tmp_path / "cron.hourly/a", "echo ran a\n")
    (tmp_path / "cron.hourly/.stamps").symlink_to(tmp_path / "gone/stamps")
    executable(tmp_path / "cron.daily/b", "echo ran b\n")
    ended = run_folder(tmp_path)
    assert ended.returncode == 1 and "ran b" in ended.stdout and "ran a" not in ended.stdout


def test_missing_folder_is_rejected(tmp_path: Path) -> None:
    for arguments in ((), (tmp_path / "none",), (tmp_path, tmp_path)):
        ended = run_folder(*arguments)
        assert ended.returncode == 2 and "must be a folder" in ended.stderr
