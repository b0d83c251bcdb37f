"""benchmarks/gpu_slot.sh as far as a machine without a GPU can tell: its commands, what it calls a pass."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.cli import ROOT, TINY, run
from tests.test_docs import read_by_its_parser


def slot(*argv: str | Path, **environment: str) -> subprocess.CompletedProcess[str]:
    command = ["bash", "benchmarks/gpu_slot.sh", *map(str, argv)]
    settings = os.environ | {"PYTHON": sys.executable} | environment
    return subprocess.run(command, cwd=ROOT, env=settings, capture_output=True, text=True, timeout=300)


def compare(folder: Path, part: int) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "benchmarks/gpu_compare.py", str(folder), str(part)]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)


@pytest.mark.parametrize("part", ["1", "2", "3", "4"])
def test_every_command_is_one_that_its_program_takes(part: str, tmp_path: Path) -> None:
    printed = slot(part, tmp_path, DRY_RUN="1")
    assert printed.returncode == 0, printed.stderr
    lines = [line for line in printed.stdout.splitlines() if not line.startswith("signalled ")]
    assert len(lines) >= 4
    for line in lines:
        read_by_its_parser(line)


def test_every_rule_has_its_runs() -> None:
    sys.path.insert(0, str(ROOT / "benchmarks"))
    from gpu_compare import RULES

    text = (ROOT / "benchmarks" / "gpu_slot.sh").read_text().split()
    assert {name for rule in RULES for name in rule[:2]} <= set(text)


@pytest.mark.parametrize("part", ["", "5", "one"])
def test_another_part_is_refused(part: str) -> None:
    refused = slot(*([part] if part else []))
    assert (refused.returncode, refused.stdout) == (2, "") and "must be 1, 2, 3 or 4" in refused.stderr


@pytest.mark.parametrize("part", ["3", "4"])
def test_nothing_is_measured_before_part_1_passes(part: str, tmp_path: Path) -> None:
    refused = slot(part, tmp_path)
    assert refused.returncode == 2 and "part 1 must pass first" in refused.stderr
    assert [path.name for path in tmp_path.glob("runs/*")] == []


@pytest.mark.slow
def test_losses_are_compared_and_what_is_missing_or_wrong_fails(tmp_path: Path) -> None:
    """Real runs under the names of three cases: one agrees, one has another seed, the others are missing."""
    quiet = ("--checkpoint_interval=0", "--save_last=False", "--num_steps=3")
    for name, seed in {"fp32": "1", "fp32_cpu": "1", "bf16": "2"}.items():
        done = run(*TINY, *quiet, f"--seed={seed}", f"--output_dir={tmp_path}/runs/{name}")
        assert done.returncode == 0, done.stderr
    result = compare(tmp_path, 1)
    found = json.loads((tmp_path / "results.json").read_text())["part 1"]
    rows = {row["what"]: row for row in found["rows"]}
    assert result.returncode == 1 and not found["passes"] and found["versions"]["torch"]
    assert rows["fp32 against fp32_cpu"]["passes"] and rows["fp32 against fp32_cpu"]["found"].startswith(
        "0; grad_norm "
    )
    assert "other data at step 1" in rows["bf16 against fp32"]["found"]
    assert not any(row["passes"] for what, row in rows.items() if what != "fp32 against fp32_cpu")
    assert (
        "| fp32 against fp32_cpu | 0; grad_norm " in result.stdout
        and " | at most 0.0001 | yes |" in result.stdout
    )
    # the missing features are told one by one
    assert compare(tmp_path, 2).returncode == 1
    assert set(json.loads((tmp_path / "results.json").read_text())) == {"part 1", "part 2"}
