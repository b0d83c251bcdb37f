"""scripts/train.slurm with stand-ins for the commands of SLURM: its requests and exit status."""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.scripts.conftest import environment, wait_for

Submit = Callable[..., subprocess.Popen[str]]

SRUN = """#!/bin/bash
echo "$*" >"${0%/*}/srun.txt"
[[ -z "${SRUN_STATUS:-}" ]] || trap 'exit "$SRUN_STATUS"' EXIT
while [[ "$1" == --* ]]; do shift; done
SLURM_STEP_NUM_NODES=1 SLURM_PROCID=0 "$@"
"""
# The script looks at its job every three seconds: here thirty times as often, and each time is noted.
SLEEP = f"""#!/bin/bash
echo "$*" >>"${{0%/*}}/slept.txt"
exec {shutil.which("sleep")} 0.1
"""


@pytest.fixture
def submit(repo: Path) -> Submit:
    """Starts train.slurm as SLURM does: a copy of it, elsewhere. What it asks of SLURM is in asked.txt."""
    fake = repo / "fake"
    fake.mkdir()
    for name, text in {
        "srun": SRUN,
        "scontrol": "",
        "scancel": "",
        "squeue": "echo 4000000000",
        "sleep": SLEEP,
    }.items():
        note = f'#!/bin/bash\necho "{name} $*" >>"{repo}/asked.txt"\n{text}\n'
        is_script = text.startswith("#!")
        (fake / name).write_text(text if is_script else note)
        (fake / name).chmod(0o755)
    copy = repo.parent / "slurm_script"
    copy.write_text((repo / "scripts/train.slurm").read_text())

    def start(*flags: str, **settings: str) -> subprocess.Popen[str]:
        job = {
            "SLURM_JOB_ID": "7",
            "SLURM_JOB_NODELIST": "node1",
            "SLURM_SUBMIT_DIR": str(repo / "scripts"),
        }
        env = environment(**{**job, "MAX_RESTARTS": "0", **settings})
        return subprocess.Popen(
            ["bash", copy, *flags],
            cwd="/",
            env=env | {"PATH": f"{fake}:{os.environ['PATH']}"},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    return start


def asked(repo: Path) -> list[str]:
    """What was asked of SLURM, except when the job ends."""
    return [
        line
        for line in (repo / "asked.txt").read_text().splitlines()
        if not line.startswith("squeue")
    ]


def num_looks(repo: Path) -> int:
    """Returns how often the script has looked at its job."""
    notes = repo / "fake/slept.txt"
    return len(notes.read_text().splitlines()) if notes.exists() else 0


@pytest.mark.slow
@pytest.mark.parametrize(
    ("plan", "status"),
    [("finished:0", 0), ("failed:1", 137)],
)
def test_elastic_job_outlives_a_node(repo: Path, submit: Submit, plan: str, status: int) -> None:
    """srun gives the status of a node that was killed; how the run ended counts."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    there = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "RDZV_CONF": "last_call_timeout=1"}
    job = submit(
        "--num_steps=3", PLAN=plan, NNODES="1:3", LOCAL_ADDR="127.0.0.1", SRUN_STATUS="137", **there
    )
    output = job.communicate(timeout=300)[0]
    assert job.returncode == status, output
    options = (repo / "fake/srun.txt").read_text().split()
    assert {"--no-kill", "--wait=0"} <= set(options) and "--wait=300" not in options


def test_nodes_of_a_fixed_number_end_together(repo: Path, submit: Submit) -> None:
    submit("--num_steps=3", NNODES="3").communicate(timeout=300)
    options = (repo / "fake/srun.txt").read_text().split()
    assert "--wait=300" in options and "--no-kill" not in options


ARRAY = {"SLURM_ARRAY_JOB_ID": "5", "SLURM_ARRAY_TASK_ID": "2", "SLURM_ARRAY_TASK_MAX": "10"}


@pytest.mark.parametrize(
    ("plan", "settings", "status", "requests", "words"),
    [
        ("finished:0", {}, 0, [], "the run is finished"),
        ("finished:0", ARRAY, 0, ["scancel --state=PENDING 5"], "the run is finished"),
        ("resume_me:75", {}, 75, ["scontrol requeue 7"], "requeued, to resume from step 3"),
        ("resume_me:75", ARRAY, 75, [], "task 2 of 10 stopped in time; the next task continues"),
        ("failed:1", {}, 1, [], "failed with status 1"),
        ("bad_input:2", {}, 2, [], "bad_input: as told"),
    ],
)
def test_job_ends_with_status_and_requests(
    repo: Path,
    submit: Submit,
    plan: str,
    settings: dict[str, str],
    status: int,
    requests: list[str],
    words: str,
) -> None:
    of_another_job = {"SLURM_JOB_END_TIME": "1000"}  # from which this one was submitted
    job = submit(PLAN=plan, **of_another_job, **settings)
    output, _ = job.communicate(timeout=300)
    assert job.returncode == status and words in output, output
    assert asked(repo) == requests
    folder = repo / ("runs/job-5" if settings else "runs/job-7")
    assert (folder / "slurm_job").read_text() == ("5\n" if settings else "7\n")
    call = json.loads((repo / "called.json").read_text())
    assert call["env"]["SLURM_JOB_END_TIME"] == "4000000000"


@pytest.mark.parametrize("before", ["finished", "resume_me"])
def test_status_of_earlier_job_hides_no_failure(repo: Path, submit: Submit, before: str) -> None:
    """An elastic launch failed before it had the run directory, and the job said: finished."""
    (repo / "fake/srun").write_text("#!/bin/bash\nexit 2\n")
    (repo / "runs/job-7").mkdir(parents=True)
    (repo / "runs/job-7/status.json").write_text(f'{{"status": "{before}", "step": 9}}')
    job = submit(NNODES="1:3")
    output, _ = job.communicate(timeout=300)
    assert job.returncode == 2 and "failed with status 2" in output, output


def test_hanging_squeue_delays_no_job(repo: Path, submit: Submit) -> None:
    """With `timeout` of a fraction of a second in place of a minute."""
    (repo / "fake/squeue").write_text(f"#!/bin/bash\nexec {shutil.which('sleep')} 600\n")
    short = f'#!/bin/bash\nexec {shutil.which("timeout")} 0.2 "${{@:2}}"\n'
    (repo / "fake/timeout").write_text(short)
    (repo / "fake/timeout").chmod(0o755)
    job = submit()
    output, _ = job.communicate(timeout=60)
    assert job.returncode == 0 and "the run is finished" in output, output


def test_failing_requeue_is_tried_again(repo: Path, submit: Submit) -> None:
    scontrol = repo / "fake/scontrol"
    scontrol.write_text(
        f'{scontrol.read_text()}\n[[ $(grep -c requeue "{repo}/asked.txt") == 2 ]]\n'
    )
    job = submit(PLAN="resume_me:75")
    output, _ = job.communicate(timeout=300)
    assert job.returncode == 75 and "cannot be requeued" not in output, output
    assert asked(repo) == ["scontrol requeue 7"] * 2


def test_job_at_exit_step_is_not_requeued(repo: Path, submit: Submit) -> None:
    for _ in range(2):  # the second one makes no step
        job = submit(
            PLAN="resume_me:75",
            REASON="--exit_step (3) is reached, at step 3; run the same command to resume",
        )
        output, _ = job.communicate(timeout=300)
        assert job.returncode == 75 and "stopped at --exit_step" in output, output
    assert asked(repo) == []


def test_stop_does_not_reach_another_job(repo: Path, submit: Submit) -> None:
    """The folder is another launch's: this job's launch was refused, or has not yet taken it."""
    job = submit(PLAN="stop_file")
    wait_for(repo / "waiting")
    folder = repo / "runs/job-7"
    (folder / "slurm_job").write_text("6\n")
    looks = num_looks(repo)
    job.send_signal(signal.SIGTERM)
    deadline = time.monotonic() + 30
    while num_looks(repo) < looks + 3:  # the first may have begun before the signal
        assert time.monotonic() < deadline
        time.sleep(0.05)
    assert not (folder / "STOP").exists()
    (folder / "slurm_job").write_text("7\n")
    output, _ = job.communicate(timeout=300)
    assert job.returncode == 75, output


@pytest.mark.slow
def test_job_without_a_step_ends_the_chain(repo: Path, submit: Submit) -> None:
    for status, words in (
        (75, "requeued"),
        (1, "error: this job finished no step; give it more --time"),
    ):
        job = submit(PLAN="resume_me:75")
        output, _ = job.communicate(timeout=300)
        assert job.returncode == status and words in output, output
    assert asked(repo) == ["scontrol requeue 7"]


def test_job_after_a_failure_may_end_at_an_earlier_step(repo: Path, submit: Submit) -> None:
    """A node failed at step 9, after the last checkpoint; the chain ended with "finished no step"."""
    (repo / "runs/job-7").mkdir(parents=True)
    (repo / "runs/job-7/status.json").write_text('{"status": "running", "step": 9}')
    output, _ = submit(PLAN="resume_me:75").communicate(timeout=300)
    assert "requeued, to resume from step 3" in output, output


def test_launch_that_never_begins_ends_the_chain(repo: Path, submit: Submit) -> None:
    (repo / "runs/job-7").mkdir(parents=True)
    (repo / "runs/job-7/status.json").write_text('{"status": "failed", "step": 9}')
    (repo / "main_training.py").write_text("import sys\nsys.exit(75)\n")
    job = submit()
    output, _ = job.communicate(timeout=300)
    assert job.returncode == 1 and "this job finished no step" in output, output


@pytest.mark.parametrize(
    ("number", "requests"), [(signal.SIGUSR1, ["scontrol requeue 7"]), (signal.SIGTERM, [])]
)
def test_signal_makes_the_stop_file(
    repo: Path,
    submit: Submit,
    number: signal.Signals,
    requests: list[str],
) -> None:
    """USR1 and TERM both have the run save; only the warning of the time limit lets the job go on.

    The first touch fails, as with a stale file handle.
    """
    touch = repo / "fake/touch"
    touch.write_text(f'#!/bin/bash\nmkdir "{repo}/touched" && exit 1\nexec /usr/bin/touch "$@"\n')
    touch.chmod(0o755)
    job = submit(PLAN="stop_file")
    wait_for(repo / "waiting")
    job.send_signal(number)
    output, _ = job.communicate(timeout=300)
    assert job.returncode == 75, output
    assert asked(repo) == requests, output


def test_stop_file_of_user_is_no_requeue(repo: Path, submit: Submit) -> None:
    job = submit(PLAN="stop_file")
    wait_for(repo / "waiting")
    (repo / "runs/job-7/STOP").touch()
    output, _ = job.communicate(timeout=300)
    assert job.returncode == 75 and "stopped on request" in output
    assert asked(repo) == []


def test_outside_of_slurm_is_rejected(repo: Path) -> None:
    for settings in (
        {},
        {"SLURM_SUBMIT_DIR": str(repo)},
        {"SLURM_JOB_ID": "7"},
        {"SLURM_SUBMIT_DIR": "/no", "SLURM_JOB_ID": "7"},
    ):
        ended = subprocess.run(
            ["bash", repo / "scripts/train.slurm"],
            env=environment(**settings),
            capture_output=True,
            text=True,
        )
        assert (ended.returncode, ended.stderr.count("\n")) == (2, 1) and ended.stderr.startswith(
            "train.slurm: SLURM_"
        )


@pytest.mark.parametrize("text", ["", '{"step": null}', '{"step": "x[$(touch ran)]"}'])
def test_corrupt_status_stops_no_chain(repo: Path, submit: Submit, text: str) -> None:
    (repo / "runs/job-7").mkdir(parents=True)
    (repo / "runs/job-7/status.json").write_text(text)
    job = submit(PLAN="resume_me:75")
    output, _ = job.communicate(timeout=300)
    assert job.returncode == 75 and "requeued, to resume from step 3" in output, output


def test_bad_input_is_rejected_before_any_work(repo: Path, submit: Submit) -> None:
    job = submit("--num_step=5")
    output, _ = job.communicate(timeout=300)
    assert job.returncode == 2 and "--num_step is not a flag; did you mean --num_steps?" in output
    job = submit(SLURM_SUBMIT_DIR="/")
    output, _ = job.communicate(timeout=300)
    assert job.returncode == 2 and "SLURM_SUBMIT_DIR (/) must lie in the repository" in output
    assert not (repo / "called.json").exists() and not (repo / "runs").exists()
