"""A copy of the repository whose training is a stand-in, for the tests of the shell scripts."""

from __future__ import annotations

import os
import shutil
import sys
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]

# A main_training.py that notes how it was called and ends as it is told.
STAND_IN = """
import json, os, signal, sys, time
from fms_fsdp.config import TrainConfig
from fms_fsdp.config.flag import non_defaults
from fms_fsdp.config.parse import parse_flags
from fms_fsdp.run.status import RunStatus
from pathlib import Path
from types import SimpleNamespace
config = parse_flags(TrainConfig, sys.argv[1:])
folder = Path(config.output_dir)
folder.mkdir(parents=True, exist_ok=True)
launch = RunStatus()
launch.open(folder, 0)
called = {"argv": sys.argv[1:], "env": dict(os.environ), "changed": non_defaults(config)}
Path("called.json").write_text(json.dumps(called))
def end(status, code):
    launch.follow(SimpleNamespace(step=3))
    reason = os.environ.get("REASON", "as told")
    launch.end(status, reason)
    print(f"{status}: {reason}", flush=True)
    launch.__exit__(None, None, None)
    sys.exit(code)
plan = os.environ.get("PLAN", "finished:0")
print("said on stdout"); print("said on stderr", file=sys.stderr)
if plan == "wait":
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1):
        signal.signal(number, lambda *_: end("resume_me", 75))
    Path("waiting").touch()
    time.sleep(60)
if plan == "stop_file":
    Path("waiting").touch()
    deadline = time.monotonic() + 30
    while not (folder / "STOP").exists() and time.monotonic() < deadline:
        time.sleep(0.05)
    end("resume_me", 75)
if plan == "count":
    heard = []
    signal.signal(signal.SIGTERM, lambda *_: heard.append(1))
    Path("waiting").touch()
    deadline = time.monotonic() + 1.5
    while time.monotonic() < deadline:
        time.sleep(0.1)
    print("heard", len(heard), flush=True)
    end("resume_me", 75)
if plan == "crash":
    os.kill(os.getpid(), signal.SIGKILL)
end(plan.split(":")[0], int(plan.split(":")[1]))
"""


@pytest.fixture()
def repo(tmp_path: Path) -> Path:
    """A copy of the repository without an environment of its own, in a folder whose name has a space."""
    copy = tmp_path / "a folder"
    shutil.copytree(ROOT / "scripts", copy / "scripts")
    for name in ("pyproject.toml", "constraints.txt"):
        shutil.copy(ROOT / name, copy)
    (copy / "fms_fsdp").symlink_to(ROOT / "fms_fsdp")
    (copy / "main_training.py").write_text(STAND_IN)
    (copy / "data/quickstart-2/meta").mkdir(parents=True)
    (copy / "data/quickstart-2/meta/counts.csv").write_text("dataset/filename,documents,tokens\n")
    return copy


def environment(**changes: str) -> dict[str, str]:
    """That of the tests, without what SLURM and an earlier test of this process have set."""
    set_elsewhere = ("SLURM_", "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF")
    kept = {name: value for name, value in os.environ.items() if not name.startswith(set_elsewhere)}
    return {**kept, "PYTHON": sys.executable, "NPROC_PER_NODE": "1", "LC_ALL": "C", **changes}


def fake_python3(folder: Path, install: str) -> str:
    """A PATH whose python3 makes environments, has no packages, and runs `install` in place of pip."""
    folder.mkdir()
    (folder / "python3").write_text(
        "#!/bin/bash\n"
        'if [[ "$1 $2" == "-m venv" ]]; then mkdir -p "$3/bin"; cp "$0" "$3/bin/python"; exit 0; fi\n'
        f'if [[ "$1 $2 $3" == "-m pip install" ]]; then {install}; exit 3; fi\n'
        '[[ "$1" == "-c" && "$2" == *version_info* && $# == 2 ]]\n'
    )
    (folder / "python3").chmod(0o755)
    return f"{folder}:/usr/bin:/bin"


def wait_for(path: Path, patience_s: float = 30) -> None:
    deadline = time.monotonic() + patience_s
    while not path.exists():
        assert time.monotonic() < deadline, path
        time.sleep(0.02)
