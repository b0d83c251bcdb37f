"""scripts/gpu_session.sh as far as a machine without a GPU can tell: its commands, what it calls a pass."""

from __future__ import annotations

import functools
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from fms_fsdp.data.tokenizer import load_tokenizer
from tests.cli import ROOT, TINY, run
from tests.test_docs import read_by_its_parser

sys.path.insert(0, str(ROOT / "benchmarks"))

from gpu_compare import RULES, SMOKE, first_wrong  # noqa: E402


def slot(*argv: str | Path, **environment: str) -> subprocess.CompletedProcess[str]:
    command = ["bash", "scripts/gpu_session.sh", *map(str, argv)]
    settings = os.environ | {"PYTHON": sys.executable} | environment
    return subprocess.run(
        command, cwd=ROOT, env=settings, capture_output=True, text=True, timeout=300
    )


def compare(folder: Path, part: int) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "benchmarks/gpu_compare.py", str(folder), str(part)]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)


@functools.cache
def commands(part: str, gib: int) -> list[str]:
    """What a part calls on a GPU of this memory."""
    printed = slot(part, "/tmp", DRY_RUN="1", GPU_GIB=str(gib))
    assert printed.returncode == 0, printed.stderr
    return printed.stdout.splitlines()


@pytest.mark.parametrize("gib", [79, 139])
@pytest.mark.parametrize("part", ["1", "2", "3", "4", "5"])
def test_every_command_is_one_that_its_program_takes(part: str, gib: int) -> None:
    assert len(commands(part, gib)) >= 4
    for line in commands(part, gib):
        read_by_its_parser(line)


def test_the_tokenizer_of_the_slot_is_one_that_prepare_knows() -> None:
    (line,) = (line for line in commands("4", 139) if " prepare " in line)
    (name,) = (word.partition("=")[2] for word in line.split() if word.startswith("--tokenizer="))
    assert load_tokenizer(name).vocabulary.size >= 256


def test_the_smoke_has_seven_runs_and_what_is_best_comes_before_the_rest() -> None:
    assert len(commands("1", 139)) == 7 and commands("1", 139) == commands("3", 139)[:7]
    precisions = ("--precision=bf16_pure", "--precision=float8", "--optimizer_state_dtype=bf16")
    for gib in (79, 139):
        found = [
            next((word for word in precisions if word in line), "") for line in commands("2", gib)
        ]
        assert found == ["", *precisions, ""], found


def test_a_machine_whose_name_does_not_resolve_can_launch() -> None:
    """torchrun gives its workers the machine's name as their meeting point, and they wait for it for ever."""
    files = [
        *ROOT.glob("scripts/*.sh"),
        *ROOT.glob("benchmarks/*.[ps][yh]"),
        *ROOT.glob("tests/**/*.py"),
    ]
    for path in set(files) - {Path(__file__), ROOT / "tests" / "scripts" / "test_scripts.py"}:
        words = re.sub('["(),]', " ", path.read_text()).split()
        places = [i for i, word in enumerate(words) if word == "--standalone"]
        assert all(words[i + 1] == "--local-addr=127.0.0.1" for i in places), path


def test_every_rule_has_its_runs_and_every_sweep_its_rule() -> None:
    text = (ROOT / "scripts" / "gpu_session.sh").read_text()
    assert {name for rule in RULES for name in rule[:2]} <= set(text.split())
    assert set(SMOKE) <= {rule.run for rule in RULES}
    needed = re.findall(r"^ *sweep \S+ (\w+) ", text, re.MULTILINE)
    assert len(needed) >= 12 and set(needed) <= {rule.run for rule in RULES}


@pytest.mark.parametrize("gpus", [0, 1, 4])
def test_the_axes_are_measured_where_there_are_several_gpus(tmp_path: Path, gpus: int) -> None:
    python = fake_python(tmp_path, f"echo {gpus}")
    printed = slot("5", tmp_path, PYTHON=str(python), DRY_RUN="1", GPU_GIB="139").stdout
    assert ("benchmarks/bench_parallel.py --device=cuda" in printed) == (gpus > 1)


@pytest.mark.parametrize("part", ["", "6", "one"])
def test_another_part_is_refused(part: str) -> None:
    refused = slot(*([part] if part else []))
    assert (refused.returncode, refused.stdout) == (
        2,
        "",
    ) and "must be a number from 1 to 5" in refused.stderr


def made_up(folder: Path, **losses: float) -> None:
    """Runs of one report."""
    for name, loss in losses.items():
        (folder / "runs" / name).mkdir(parents=True)
        record = {"step": 1, "loss": loss, "data_fingerprint": 1, "skipped_steps": 0}
        (folder / "runs" / name / "metrics.jsonl").write_text(json.dumps(record) + "\n")


def test_what_is_wrong_is_not_measured_and_keeps_nothing_else_from_it(tmp_path: Path) -> None:
    """float8 is wrong; the wrong losses of a reference are those of all that rest on it."""
    made_up(tmp_path, fp32_cpu=5.0, fp32=5.0, bf16=5.01, cheap=5.01, compiled_float8=6.0)
    runs = tmp_path / "runs"
    assert first_wrong(runs, "cheap") is None
    wrong = {name: first_wrong(runs, name) for name in ("compiled_float8", "compiled_pure")}
    assert all(row is not None for row in wrong.values())
    called = fake_python(tmp_path, "")
    done = slot("2", tmp_path, PYTHON=str(called), GPU_GIB="139")
    measured = [
        line.split("--output=")[1].split()[0] for line in calls(tmp_path) if "bench_train" in line
    ]
    assert [Path(name).stem for name in measured] == ["best"]
    assert (
        done.returncode == 1
        and "compiled_float8 against bf16 must be at most 0.02: 0.2" in done.stderr
    )
    made_up(tmp_path / "other", fp32_cpu=5.0, fp32=6.0, bf16=6.0, cheap=6.0)
    row = first_wrong(tmp_path / "other" / "runs", "cheap")
    assert row is not None and row.what == "fp32 against fp32_cpu"


def fake_python(folder: Path, script: str) -> Path:
    """A Python that notes what it is called for; it only runs what compares, and else does as `script`."""
    path = folder / "python"
    text = f"""#!/bin/bash
        [[ "$1" != *gpu_compare.py ]] || exec {sys.executable} "$@"
        echo "$*" >>{folder}/calls.txt
        {script}"""
    path.write_text(text)
    path.chmod(0o755)
    return path


def calls(folder: Path) -> list[str]:
    return (
        (folder / "calls.txt").read_text().splitlines() if (folder / "calls.txt").exists() else []
    )


def test_a_machine_that_is_taken_away_loses_one_case_and_a_bare_one_goes_on(tmp_path: Path) -> None:
    """Each run leaves a report, a large file and a checkpoint; the fifth takes the machine away."""
    out, bare = tmp_path / "out", tmp_path / "bare"
    out.mkdir()
    leaves = """
        for word in "$@"; do [[ "$word" != --output_dir=* ]] || folder="${word#*=}"; done
        mkdir -p "$folder/checkpoints" && echo '{"step": 1}' >"$folder/metrics.jsonl"
        touch "$folder/checkpoints/weights" && truncate -s 9M "$folder/big.trace.json"
        """
    dies = f'{leaves} (($(wc -l <"{tmp_path}/calls.txt") != 5)) || kill -KILL -- $PPID'
    first = tmp_path / "first"
    ended = slot("1", first, PYTHON=str(fake_python(tmp_path, dies)), OUT=str(out), AT_ONCE="1")
    assert ended.returncode != 0 and len(calls(tmp_path)) >= 5
    (tmp_path / "calls.txt").unlink()
    taken = out / "gpu_session.tgz"
    before = subprocess.run(
        ["tar", "-tzf", taken], capture_output=True, text=True, check=True
    ).stdout
    done = {line.rpartition("/")[2] for line in before.splitlines() if line.endswith(".ok")}
    assert len(done) >= 3 and "checkpoints" not in before and "big" not in before
    slot(
        "1",
        bare,
        PYTHON=str(fake_python(tmp_path, leaves)),
        OUT=str(out),
        TAKE=str(taken),
        AT_ONCE="1",
    )
    assert len(calls(tmp_path)) == 7 - len(done)
    left = (bare / "runs" / "fp32_cpu.ok").read_text().splitlines()
    assert "fp32_cpu/big.trace.json" in left and (bare / "runs/fp32_cpu/metrics.jsonl").exists()
    packed = subprocess.run(
        ["tar", "-tzf", taken], capture_output=True, text=True, check=True
    ).stdout
    assert packed.count(".ok") == 7 and "results.json" in packed


@pytest.mark.slow
def test_losses_are_compared_and_what_is_missing_or_wrong_fails(tmp_path: Path) -> None:
    """Real runs under the names of three cases: one agrees, one has another seed, the others are missing."""
    quiet = ("--checkpoint_interval=0", "--save_last=False", "--num_steps=3")
    for name, seed in {"fp32": "1", "fp32_cpu": "1", "bf16": "2"}.items():
        done = run(*TINY, *quiet, f"--seed={seed}", f"--output_dir={tmp_path}/runs/{name}")
        assert done.returncode == 0, done.stderr
    result = compare(tmp_path, 3)
    found = json.loads((tmp_path / "results.json").read_text())["part 3"]
    rows = {row["what"]: row for row in found["rows"]}
    assert result.returncode == 1 and not found["passes"] and found["versions"]["torch"]
    assert rows["fp32 against fp32_cpu"]["passes"] and rows["fp32 against fp32_cpu"][
        "found"
    ].startswith("0; grad_norm ")
    assert "other data at step 1" in rows["bf16 against fp32"]["found"]
    assert not any(row["passes"] for what, row in rows.items() if what != "fp32 against fp32_cpu")
    assert (
        "| fp32 against fp32_cpu | 0; grad_norm " in result.stdout
        and " | at most 0.0001 | yes |" in result.stdout
    )
    # the missing features are told one by one
    assert compare(tmp_path, 4).returncode == 1
    assert set(json.loads((tmp_path / "results.json").read_text())) == {"part 3", "part 4"}
