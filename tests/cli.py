"""Runs the entrypoint with a user's flags, and reads what it left behind."""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest

from tests.warm import ROOT as ROOT
from tests.warm import launch

CORPUS = ROOT / "tests" / "corpus.txt"  # paragraphs of prose, then some Python

# as scripts/train.sh sets it: torchrun with restarts is an error without it
STORE_PER_ATTEMPT = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
TINY = (
    "--model_variant=tiny",
    "--use_dummy_dataset=True",
    "--seq_length=64",
    "--report_interval=1",
)


def last_of_each(argv: Iterable[str]) -> list[str]:
    """The flags of which a later one replaces an earlier one of its name: a flag must not be given twice."""
    return list({argument.partition("=")[0]: argument for argument in argv}.values())


def under_torchrun(num_processes: int, *options: str) -> list[str]:
    """The command of so many processes, which meet by address: the name of a machine need not resolve."""
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--local-addr=127.0.0.1",
    ]
    return [*command, f"--nproc_per_node={num_processes}", *options]


def run(
    *argv: str,
    nproc: int = 0,
    torchrun: tuple[str, ...] | None = None,
    backend: str = "",
    **environment: str,
) -> subprocess.CompletedProcess[str]:
    """`python main_training.py ARGV`, with `nproc` as that many ranks; one thread each.

    The processes are forks of a server (tests/warm.py), unless `torchrun` gives options of the real one, or
    `environment` variables: the server has imported torch and the program, which read some variables while
    they are imported. `backend` is of torch.compile in forks.
    """
    flags = last_of_each(argv)
    if torchrun is None and not environment:
        return launch(flags, nproc, backend=backend)
    command = [sys.executable, "main_training.py"]
    if nproc:
        command = under_torchrun(nproc, *(torchrun or ()), "main_training.py")
    settings = {"OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1", **STORE_PER_ATTEMPT, **environment}
    return subprocess.run(
        [*command, *flags],
        cwd=ROOT,
        env=os.environ | settings,
        capture_output=True,
        text=True,
        timeout=240,
    )


def trained(*argv: str, nproc: int = 0, backend: str = "", **environment: str) -> str:
    """The output of a run that must end with 0."""
    result = run(*argv, nproc=nproc, backend=backend, **environment)
    assert result.returncode == 0, (
        f"exit status {result.returncode}\n{result.stdout}\n{result.stderr}"
    )
    return result.stdout


def made_once(factory: pytest.TempPathFactory, name: str, make: Callable[[Path], object]) -> Path:
    """The folder of that name, filled by `make` where no test of the session, in any worker of pytest-xdist,
    has asked for it yet. All share it, so none changes it."""
    base = factory.getbasetemp()
    shared = base.parent if "PYTEST_XDIST_WORKER" in os.environ else base
    folder, done = shared / f"once-{name}", shared / f"once-{name}.done"
    with open(shared / f"once-{name}.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # closing frees it
        if not done.exists():
            shutil.rmtree(folder, ignore_errors=True)  # of a `make` that failed
            folder.mkdir()
            make(folder)
            done.touch()
    return folder


def metrics(folder: Path) -> dict[int, dict[str, Any]]:
    """Step → the last report of that step."""
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return {
        record["step"]: record for record in lines if "loss" in record and "event" not in record
    }


def events(folder: Path, name: str) -> list[dict[str, Any]]:
    """The records of events of that name."""
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [record for record in lines if record.get("event") == name]


def losses(folder: Path) -> list[float]:
    return [record["loss"] for _, record in sorted(metrics(folder).items())]


def status(folder: Path) -> dict[str, Any]:
    content: dict[str, Any] = json.loads((folder / "status.json").read_text())
    return content
