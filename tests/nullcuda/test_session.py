"""Each case of scripts/gpu_session.sh ends as its table expects, on GPUs of 80 and of 141 GB."""

from __future__ import annotations

import functools
import json
import shlex
from pathlib import Path

import pytest

from tests.nullcuda.conftest import SIZES, Device
from tests.test_gpu_session import commands

pytestmark = pytest.mark.slow


@functools.cache
def sweeps(name: str) -> dict[str, list[str]]:
    """The flags of what parts 2 and 5 measure on that GPU, by the name of the case."""
    gib = int(float(SIZES[name]))
    lines = [
        shlex.split(line) for part in "25" for line in commands(part, gib) if "bench_train" in line
    ]
    output = ["--output=" in word for word in lines[0]].index(True)
    return {Path(line[output]).stem: line[output + 1 :] for line in lines}


CASES = [(name, case) for name in SIZES for case in sweeps(name)]


@pytest.mark.parametrize(("name", "case"), CASES)
def test_session_case_fits_its_gpu(device: Device, tmp_path: Path, name: str, case: str) -> None:
    """By bench_train.py, with a round in place of three."""
    result, flags = tmp_path / "result.json", sweeps(name)[case]
    script = "benchmarks/bench_train.py"
    done = device(script, "--rounds=1", f"--output={result}", *flags, name=name, timeout=1200)
    assert done.returncode == 0, done.stderr[-3000:]
    (row,) = json.loads(result.read_text())["results"]
    assert "problem" not in row, row["problem"]


@pytest.mark.parametrize("name", SIZES)
def test_running_out_of_memory_ends_as_the_table_expects(
    device: Device, tmp_path: Path, name: str
) -> None:
    (line,) = (line for line in commands("4", 139) if "/out_of_memory" in line)
    _, *words = shlex.split(line)
    folder = tmp_path / "run"
    flags = [
        f"--output_dir={folder}" if word.startswith("--output_dir=") else word for word in words
    ]
    done = device(*flags, name=name)
    assert done.returncode == 1 and "what would help" in done.stderr, done.stderr[-3000:]
    assert list(folder.glob("**/memory_rank0.pickle"))
