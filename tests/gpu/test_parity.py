"""Part 3 of scripts/gpu_session.sh: the GPU against the CPU and each feature against the plain run; and a
resumed run."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.cli import ROOT
from tests.gpu.launch import train, with_gpu

sys.path.insert(0, str(ROOT / "benchmarks"))

from gpu_compare import RULES, Rule, largest_difference  # noqa: E402

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The runs of part 3."""
    folder = tmp_path_factory.mktemp("session")
    environment = with_gpu() | {"PYTHON": sys.executable, "OMP_NUM_THREADS": str(os.cpu_count())}
    subprocess.run(
        ["bash", "scripts/gpu_session.sh", "3", folder], cwd=ROOT, env=environment, timeout=900
    )
    return folder / "runs"


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: f"{rule.run} {rule.reference}")
def test_losses_agree(runs: Path, rule: Rule) -> None:
    assert largest_difference(runs / rule.run, runs / rule.reference) <= rule.bound


def test_deterministic_runs_repeat_and_resume_to_the_last_bit(tmp_path: Path) -> None:
    """Through checkpoints that were copied to pinned memory and written in the background."""
    argv = ("--deterministic=True", "--checkpoint_interval=3")
    whole, again = train(tmp_path / "whole", *argv), train(tmp_path / "again", *argv)
    first = train(tmp_path / "parts", *argv, "--exit_step=6", status=75)
    assert max(first) == 6
    parts = train(tmp_path / "parts", *argv)
    losses = [[records[step]["loss"] for step in range(1, 11)] for records in (whole, again, parts)]
    assert losses[0] == losses[1] == losses[2]
