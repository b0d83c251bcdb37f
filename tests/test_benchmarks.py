"""The sweep of benchmarks/bench_train.py: real runs, and those that do not fit."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.cli import ROOT


@pytest.mark.slow
def test_a_sweep_survives_what_does_not_fit_and_marks_the_best(tmp_path: Path) -> None:
    flags = "--model_variant=tiny --seq_length=64 --batch_size=9000000,2,5000000 --mixed_precision=false"
    script = f"benchmarks/bench_train.py {flags} --rounds=1 --output={tmp_path}/r.json"
    command = f"ulimit -v 12000000; exec {sys.executable} {script}"
    done = subprocess.run(["bash", "-c", command], cwd=ROOT, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr
    record = json.loads((tmp_path / "r.json").read_text())
    fits, too_large, left_out = record["results"]
    assert fits["case"]["batch_size"] == "2" and fits["tokens_per_sec_per_device"] > 0 and fits["reports"]
    assert "memory" in too_large["problem"] and left_out["problem"].startswith("left out")
    assert record["versions"]["torch"] and "bench_train.py" in record["command"]
    rows = done.stdout.splitlines()
    assert rows[0].startswith("| batch_size | tokens/s/device") and " * |" in rows[2] and "memory" in rows[3]
