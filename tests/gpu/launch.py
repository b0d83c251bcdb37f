"""Runs with the GPU, which the test process itself does not see."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from tests.cli import ROOT, metrics, run

SMALL = (
    "--model_variant=194m",
    "--num_layers=4",
    "--num_kv_heads=2",
    "--seq_length=512",
    "--batch_size=4",
    "--num_steps=10",
    "--report_interval=1",
    "--use_dummy_dataset=True",
    "--checkpoint_interval=0",
    "--save_last=False",
    "--trackers=none",
)
Records = dict[int, dict[str, Any]]


def with_gpu() -> dict[str, str]:
    """The environment with the first GPU that the tests were given."""
    return os.environ | {"CUDA_VISIBLE_DEVICES": os.environ["GPUS_OF_TESTS"].partition(",")[0]}


def train(folder: Path, *flags: str, gpu: bool = True, nproc: int = 0, status: int = 0) -> Records:
    """The reports of a run that must end with `status`, by step; no step was skipped."""
    environment = {"OMP_NUM_THREADS": str(os.cpu_count())}
    if gpu:
        environment["CUDA_VISIBLE_DEVICES"] = with_gpu()["CUDA_VISIBLE_DEVICES"]
    result = run(*SMALL, *flags, f"--output_dir={folder}", nproc=nproc, **environment)
    assert result.returncode == status, f"{result.stdout}\n{result.stderr}"
    records = metrics(folder)
    assert all(record["skipped_steps"] == 0 for record in records.values())
    return records


def call(module: str, function: str) -> None:
    """Calls a function of tests.gpu in a process with the GPU and the program's allocator; it asserts by
    itself."""
    grow = "from fms_fsdp.process import let_gpu_memory_grow; let_gpu_memory_grow()"  # before torch
    code = f"{grow}\nfrom tests.gpu.{module} import {function}; {function}()"
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=ROOT,
        env=with_gpu() | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, done.stderr
