"""Everything here needs a CUDA device that only counts, which is no part of the repository, and an
environment with a CUDA build of torch; it is skipped elsewhere.

The device is a folder with a script run.sh, which runs its arguments under a Python with the stand-in for
CUDA: `NULLCUDA`, or ../shared/tools/nullcuda beside the repository. The Python is `NULLCUDA_PYTHON`, or that
of .venv-torch-2.11, which scripts/test.sh --torch=2.11 makes.
"""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.cli import ROOT

Device = Callable[..., subprocess.CompletedProcess[str]]
SIZES = {"NVIDIA H100 80GB HBM3": "79.1", "NVIDIA H200": "139.8"}


def _python() -> str:
    return os.environ.get("NULLCUDA_PYTHON", str(ROOT / ".venv-torch-2.11" / "bin" / "python"))


def _is_missing() -> str:
    """Why nothing here can run; else nothing."""
    run, python = _folder() / "run.sh", Path(_python())
    if not run.is_file():
        return f"needs a CUDA device that only counts: {run} is not there (NULLCUDA)"
    versions = python.parent.parent.glob("lib/python3*/site-packages/torch/version.py")
    if not any("+cu" in path.read_text() for path in versions):
        return f"needs a Python with a CUDA build of torch: {python} has none (NULLCUDA_PYTHON)"
    return ""


def _folder() -> Path:
    return Path(os.environ.get("NULLCUDA", ROOT.parent / "shared" / "tools" / "nullcuda"))


@pytest.fixture(scope="session", autouse=True)
def there() -> None:
    """Skips where something is missing, and says what."""
    if missing := _is_missing():
        pytest.skip(missing)


@pytest.fixture
def device(tmp_path_factory: pytest.TempPathFactory, tmp_path: Path) -> Device:
    """Runs Python with these arguments on a device of that name."""
    work = tmp_path_factory.getbasetemp() / "nullcuda"

    def run(
        *argv: str | Path, name: str = "NVIDIA H200", timeout: float = 900
    ) -> subprocess.CompletedProcess[str]:
        settings = {
            "NULLCUDA_PYTHON": _python(),
            "NULLCUDA_WORK": str(work),
            "NULLCUDA_HOOK": str(tmp_path / "counts"),
            "NULLCUDA_NAME": name,
            "NULLCUDA_GIB": SIZES[name],
            "CUDA_VISIBLE_DEVICES": "0",
            "OMP_NUM_THREADS": "1",
            "PYTHONPATH": str(ROOT),
        }
        command = ["bash", str(_folder() / "run.sh"), *map(str, argv)]
        return subprocess.run(
            command,
            cwd=ROOT,
            env=os.environ | settings,
            capture_output=True,
            text=True,
            timeout=timeout,
        )

    return run


def found(done: subprocess.CompletedProcess[str]) -> list[dict[str, Any]]:
    """What steps.py printed of each case."""
    assert done.returncode == 0, done.stderr[-4000:]
    return [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
