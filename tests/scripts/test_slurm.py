"""scripts/train.slurm on any SLURM that sbatch reaches: a chain of jobs has the loss curve of one run."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.cli import ROOT, TINY, losses, metrics, status, trained


def slurm(*command: str) -> str:
    """The output of a SLURM command that must work."""
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert ended.returncode == 0, f"{command}: {ended.stderr}"
    return ended.stdout


def why_not() -> str:
    """Why there is no SLURM to test on; "" if there is one."""
    if not shutil.which("sbatch"):
        return "no sbatch on PATH"
    try:
        nodes = slurm("sinfo", "-h", "-N", "-o", "%N %T").split("\n")
    except (AssertionError, subprocess.TimeoutExpired) as error:
        return f"sinfo does not answer: {str(error)[:200]}"
    idle = {line.split()[0] for line in nodes if line.endswith(" idle")}
    return "" if len(idle) >= 2 else f"SLURM must have two idle nodes, has {len(idle)}"


REASON = why_not()
pytestmark = [pytest.mark.slow, pytest.mark.skipif(bool(REASON), reason=REASON)]

NUM_STEPS = 80
FLAGS = (
    *TINY,
    "--dataset_builder=tests.scripts.paced_stream:build",
    "--global_batch_size=4",
    f"--num_steps={NUM_STEPS}",
    "--learning_rate=1e-3",  # train.sh has another default
    "--checkpoint_interval=5",
)


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> list[float]:
    folder = tmp_path_factory.mktemp("undisturbed")
    trained(*FLAGS, f"--output_dir={folder}", nproc=4)
    return losses(folder)


class Job:
    """A submitted chain: its number, its run directory and what it printed."""

    def __init__(self, *sbatch: str, nproc: int, pace_file: Path) -> None:
        settings = {"PYTHON": sys.executable, "NPROC_PER_NODE": str(nproc), "OMP_NUM_THREADS": "1"}
        settings["PACE_FILE"] = str(pace_file)
        command = [
            "sbatch",
            "--parsable",
            "--nodes=2",
            "--time=10",
            *sbatch,
            "scripts/train.slurm",
            *FLAGS,
        ]
        ended = subprocess.run(
            command,
            cwd=ROOT,
            env=os.environ | settings,
            capture_output=True,
            text=True,
            timeout=300,
        )
        assert ended.returncode == 0, ended.stderr
        self.number = ended.stdout.strip()
        self.folder, self.output = (
            ROOT / "runs" / f"job-{self.number}",
            ROOT / f"slurm-{self.number}.out",
        )

    def states(self) -> str:
        """The states of its jobs in the queue, "" once there are none."""
        ended = subprocess.run(
            ["squeue", "-h", "-j", self.number, "-o", "%T"],
            capture_output=True,
            text=True,
            timeout=300,
        )
        return " ".join(ended.stdout.split())

    def wait(self, what: Callable[[], bool], timeout_s: float = 150) -> None:
        deadline = time.monotonic() + timeout_s
        while not what():
            alive = self.states() or what()
            assert alive and time.monotonic() < deadline, (
                f"{self.states()}\n{self.output.read_text()[-3000:]}"
            )
            time.sleep(0.5)

    def has_reached(self, step: int) -> bool:
        return (self.folder / "metrics.jsonl").exists() and max(
            metrics(self.folder), default=0
        ) >= step

    def is_over(self) -> bool:
        return not self.states()


@pytest.fixture
def pace_file(tmp_path: Path) -> Path:
    """The file while which the steps of every job take half a second."""
    return tmp_path / "slowly"


@pytest.fixture
def submit(pace_file: Path) -> Iterator[Callable[..., Job]]:
    """Submits; at the end cancels and removes what the job made."""
    jobs: list[Job] = []

    def start(*sbatch: str, nproc: int = 2) -> Job:
        jobs.append(Job(*sbatch, nproc=nproc, pace_file=pace_file))
        return jobs[-1]

    yield start
    for job in jobs:
        subprocess.run(
            ["scancel", "--signal=KILL", "--full", job.number], capture_output=True, timeout=300
        )
        subprocess.run(["scancel", job.number], capture_output=True, timeout=300)
        job.wait(job.is_over)
        shutil.rmtree(job.folder, ignore_errors=True)
        job.output.unlink(missing_ok=True)


def pulse(job: Job) -> tuple[int, str]:
    ended = subprocess.run(
        ["bash", "scripts/pulse.sh", job.folder],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=300,
    )
    return ended.returncode, ended.stdout.partition(f"{job.folder} ")[2]


def are_nodes_local() -> bool:
    """Returns whether all nodes are this machine, so that one may be taken down."""
    addresses = re.findall(r"NodeAddr=(\S+)", slurm("scontrol", "show", "node"))
    return all(address.startswith("127.") for address in addresses)


def lose_a_node(job: Job) -> None:
    """Takes the second node of a job down until SLURM has requeued the job."""
    nodes = slurm("squeue", "-h", "-j", job.number, "-o", "%N").strip()
    lost = slurm("scontrol", "show", "hostnames", nodes).split()[1]
    slurm("scontrol", "update", f"nodename={lost}", "state=down", "reason=test")
    try:
        job.wait(lambda: job.states() == "PENDING")
    finally:  # it may have come back by itself, which this command then complains about
        subprocess.run(
            ["scontrol", "update", f"nodename={lost}", "state=resume"],
            capture_output=True,
            timeout=300,
        )


def test_chain_of_jobs_has_the_losses_of_one(
    submit: Callable[..., Job], undisturbed: list[float], pace_file: Path
) -> None:
    """Two nodes of two ranks: the first job is warned of its limit, the next one loses a node.

    The warning comes up to half a minute early: 20 to 50 seconds after the start of the job.
    """
    job = submit("--time=2", "--signal=B:USR1@70")
    job.wait(lambda: job.has_reached(1))
    assert pulse(job)[1].startswith("TRAINING step ")
    job.wait(lambda: job.states() == "PENDING" and status(job.folder)["status"] == "resume_me")
    assert "requeued, to resume from step" in job.output.read_text()
    assert pulse(job)[0] == 0 and "WAITING job" in pulse(job)[1]
    # Where a user must not raise a limit, more jobs follow.
    subprocess.run(["scontrol", "update", f"jobid={job.number}", "timelimit=10"], timeout=300)

    num_jobs = 2
    if are_nodes_local():
        num_jobs = 3
        pace_file.touch()
        saved = status(job.folder)["step"]
        job.wait(lambda: job.has_reached(saved + 2))
        lose_a_node(job)
        pace_file.unlink()

    job.wait(job.is_over, timeout_s=600)
    output = job.output.read_text()
    assert status(job.folder)["status"] == "finished", output[-3000:]
    assert losses(job.folder) == undisturbed
    attempts = [record["attempt"] for record in metrics(job.folder).values()]
    assert max(attempts) >= num_jobs  # on a busy machine more
    assert "resuming from step" in output and "the run is finished" in output
    assert "resuming from step" in (job.folder / "console.txt").read_text()
    assert pulse(job) == (0, f"FINISHED step {NUM_STEPS}\n")


def test_scancel_saves_and_does_not_requeue(submit: Callable[..., Job]) -> None:
    job = submit(nproc=1)
    job.wait(lambda: job.has_reached(2))
    slurm("scancel", job.number)
    job.wait(job.is_over)
    assert status(job.folder)["status"] == "resume_me", job.output.read_text()[-3000:]
    step = status(job.folder)["step"]
    assert step >= 2 and (job.folder / "checkpoints" / f"step_{step}").is_dir()
    assert "stopped on request" in job.output.read_text()
    assert pulse(job)[0] == 3 and "GONE" in pulse(job)[1]


def test_an_array_goes_on_and_ends_with_the_run(
    submit: Callable[..., Job], undisturbed: list[float]
) -> None:
    """The first task is warned as by `--signal=B:USR1`, the second finishes, the third is not needed."""
    job = submit("--array=1-3%1")
    job.wait(lambda: job.has_reached(3))
    # the signal arrives, though scancel 22.05 ends with an error where tasks are pending
    subprocess.run(
        ["scancel", "--batch", "--signal=USR1", f"{job.number}_1"], capture_output=True, timeout=300
    )
    job.wait(job.is_over)
    assert status(job.folder)["status"] == "finished", job.output.read_text()[-3000:]
    assert losses(job.folder) == undisturbed
    output = job.output.read_text()
    assert "task 1 of 3 stopped in time; the next task continues" in output
    assert ", task 2, on " in output and ", task 3, on " not in output
