"""scripts/gpu_session.sh without a GPU: its commands, its criteria, interruptions."""

from __future__ import annotations

import functools
import json
import math
import os
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from fms_fsdp.data.batch import Batch
from tests.cli import ROOT
from tests.distributed.launch import run_ranks
from tests.gpu.shared_cases import all_cases, collectives_of
from tests.gpu.shared_gpu import (
    Results,
    Start,
    outcomes,
    run_cases,
    run_collectives,
    run_references,
)
from tests.parallel.layouts import with_documents
from tests.parallel.table import LAYOUTS, Bounds, Row, layout
from tests.test_docs import read_by_its_parser

sys.path.insert(0, str(ROOT / "benchmarks"))

from gpu_compare import RULES, SMOKE, first_wrong  # noqa: E402


def session(*argv: str | Path, **environment: str) -> subprocess.CompletedProcess[str]:
    command = ["bash", "scripts/gpu_session.sh", *map(str, argv)]
    settings = os.environ | {"PYTHON": sys.executable} | environment
    return subprocess.run(
        command, cwd=ROOT, env=settings, capture_output=True, text=True, timeout=300
    )


@functools.cache
def commands(part: str, gib: int) -> list[str]:
    """What a part calls on a GPU of this memory."""
    printed = session(part, "/tmp", DRY_RUN="1", GPU_GIB=str(gib))
    assert printed.returncode == 0, printed.stderr
    return printed.stdout.splitlines()


@pytest.mark.parametrize("gib", [79, 139])
@pytest.mark.parametrize("part", ["1", "2", "3", "4", "5", "6"])
def test_every_command_is_accepted_by_its_program(part: str, gib: int) -> None:
    assert len(commands(part, gib)) >= (1 if part == "6" else 4)
    for line in commands(part, gib):
        read_by_its_parser(line)


@pytest.mark.slow
def test_ranks_that_share_a_device_are_rehearsed(tmp_path: Path) -> None:
    """Two layouts of two ranks and their references, on the CPU; a second call repeats neither."""
    # no time limit decides: the test is of the results
    settings = {"DEVICE": "cpu", "BUDGET_S": "3600", "CASE_S": "1800"}
    settings["CASES"] = "hsdp 2x1 fp32,tp without sp fp32"
    done = session("6", tmp_path, **settings)
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    rows = json.loads((tmp_path / "results.json").read_text())["part 6"]["rows"]
    assert [row["what"] for row in rows] == ["hsdp 2x1 fp32, cpu", "tp without sp fp32, cpu"]
    assert all(row["found"].startswith("agrees: loss ") for row in rows)
    folder = tmp_path / "runs" / "shared_cpu"
    reference = json.loads((folder / "references.jsonl").read_text())
    assert len(reference["losses"]) == 10 and reference["losses"][9] < reference["losses"][0] - 0.1
    assert len(list((folder / "starts").iterdir())) == 2  # of one rank, and of two
    again = [sys.executable, "-m", "tests.gpu.shared_gpu", str(folder), "--device=cpu"]
    subprocess.run([*again, f"--cases={settings['CASES']}"], cwd=ROOT, check=True)
    assert len(list((folder / "starts").iterdir())) == 2


@pytest.mark.slow
def test_shared_cases_have_a_verdict(tmp_path: Path) -> None:
    """A case that differs from its reference, one that hangs, and one that this machine rejects."""
    fsdp = Row("fsdp", LAYOUTS["fsdp"], ("--precision=fp32",))
    wrong = replace(fsdp, name="wrong", bounds=Bounds(-1.0, -1.0))
    rejected = replace(fsdp, name="rejected", layout=layout("async_tp=True tp_size=2", tp=2))
    not_these_sizes = layout("sharding_strategy=ddp", dp_shard=2)
    broken = replace(fsdp, name="broken", layout=not_these_sizes)
    cases = [rejected, broken, wrong]
    results = Results(tmp_path)
    start = Start(tmp_path, "cpu", 2, cases, "aot_eager", timeout_s=1800)
    expected = run_references(start, results, math.inf)
    list(run_cases(start, results, expected, math.inf))
    rows = results.read("results.jsonl")
    assert rows["rejected"]["verdict"] == "–" and "--async_tp requires" in rows["rejected"]["found"]
    assert rows["broken"]["verdict"] == "ours" and "axis dp_replicate" in rows["broken"]["found"]
    assert rows["wrong"]["verdict"] == "ours" and rows["wrong"]["found"].startswith("loss ")
    assert rows["wrong"]["by plain torch"].startswith("trained")
    hung = next(outcomes(replace(start, cases=[fsdp], timeout_s=0.0), math.inf))[1]
    assert hung.status == "hung"
    assert not results.has_passed("wrong") and results.has_passed("rejected")


def test_cases_of_document_masks_have_documents() -> None:
    """Synthetic tokens are one document, whose mask would be no other than the causal one."""
    tokens = torch.tensor([[5, 16, 7, 8, 32, 48], [16, 1, 2, 3, 4, 5]])
    batch = with_documents(Batch(tokens, tokens, None, None), tokens % 16 == 0)
    assert batch.document_ids_BS.tolist() == [[0, 1, 1, 1, 2, 3], [0, 0, 0, 0, 0, 0]]
    assert batch.positions_BS.tolist() == [[0, 0, 1, 2, 0, 0], [0, 1, 2, 3, 4, 5]]


def test_plain_torch_runs_the_collectives_of_every_layout() -> None:
    """On two ranks, without the product: the second opinion of a case that fails."""
    names = {name for case in all_cases() for name in collectives_of(case.layout)}
    known = {"all_reduce", "all_gather", "reduce_scatter", "all_to_all", "send_and_receive"}
    assert names == known
    run_ranks(run_collectives, 2, sorted(names), "cpu")


def test_smoke_and_best_case_come_first() -> None:
    assert len(commands("1", 139)) == 7 and commands("1", 139) == commands("3", 139)[:7]
    precisions = ("--precision=bf16_pure", "--precision=float8", "--optimizer_state_dtype=bf16")
    for gib in (79, 139):
        found = [
            next((word for word in precisions if word in line), "") for line in commands("2", gib)
        ]
        assert found == ["", *precisions, ""], found


def test_torchrun_needs_no_resolvable_host_name() -> None:
    """torchrun gives its workers the machine's name as their meeting point, and they wait for it for ever."""
    files = [
        *ROOT.glob("scripts/*.sh"),
        *ROOT.glob("benchmarks/*.[ps][yh]"),
        *ROOT.glob("tests/**/*.py"),
    ]
    read = {"scripts/test_scripts.py", "tools/test_translate.py"}  # commands that are read, not run
    for path in set(files) - {Path(__file__), *(ROOT / "tests" / name for name in read)}:
        words = re.sub('["(),]', " ", path.read_text()).split()
        places = [i for i, word in enumerate(words) if word == "--standalone"]
        assert all(words[i + 1] == "--local-addr=127.0.0.1" for i in places), path


def test_rules_and_sweeps_match() -> None:
    text = (ROOT / "scripts" / "gpu_session.sh").read_text()
    assert {name for rule in RULES for name in rule[:2]} <= set(text.split())
    assert set(SMOKE) <= {rule.run for rule in RULES}
    needed = re.findall(r"^ *sweep \S+ (\w+) ", text, re.MULTILINE)
    assert len(needed) >= 12 and set(needed) <= {rule.run for rule in RULES}
    sweeps = set(re.findall(r'^ *sweep "?(?:\${of})?(\w+)"? ', text, re.MULTILINE))
    runs = {rule.run for rule in RULES}
    assert len(sweeps) >= 12 and not sweeps & runs  # a run's name counts as measured


@pytest.mark.parametrize("gpus", [0, 1, 4])
def test_axes_are_measured_on_several_gpus(tmp_path: Path, gpus: int) -> None:
    python = fake_python(tmp_path, f"echo {gpus}")
    printed = session("5", tmp_path, PYTHON=str(python), DRY_RUN="1", GPU_GIB="139").stdout
    assert ("benchmarks/bench_parallel.py --device=cuda" in printed) == (gpus > 1)


@pytest.mark.parametrize("part", [[], ["7"]])
def test_other_part_is_rejected(part: list[str]) -> None:
    rejected = session(*part)
    assert (rejected.returncode, rejected.stdout) == (2, "")
    assert "must be a number from 1 to 6" in rejected.stderr


def made_up(folder: Path, **losses: float) -> None:
    """Runs of one report."""
    for name, loss in losses.items():
        (folder / "runs" / name).mkdir(parents=True)
        record = {"step": 1, "loss": loss, "data_fingerprint": 1, "skipped_steps": 0}
        (folder / "runs" / name / "metrics.jsonl").write_text(json.dumps(record) + "\n")


@pytest.mark.slow
def test_wrong_case_is_not_measured(tmp_path: Path) -> None:
    """float8 is wrong; the wrong losses of a reference are those of all that rest on it."""
    made_up(tmp_path, fp32_cpu=5.0, fp32=5.0, bf16=5.01, cheap=5.01, compiled_float8=6.0)
    runs = tmp_path / "runs"
    assert first_wrong(runs, "cheap") is None
    wrong = {name: first_wrong(runs, name) for name in ("compiled_float8", "compiled_pure")}
    assert all(row is not None for row in wrong.values())
    called = fake_python(tmp_path, "")
    done = session("2", tmp_path, PYTHON=str(called), GPU_GIB="139")
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


@pytest.mark.slow
def test_interrupted_machine_loses_one_case(tmp_path: Path) -> None:
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
    ended = session("1", first, PYTHON=str(fake_python(tmp_path, dies)), OUT=str(out), AT_ONCE="1")
    assert ended.returncode != 0 and len(calls(tmp_path)) >= 5
    (tmp_path / "calls.txt").unlink()
    taken = out / "gpu_session.tgz"
    before = subprocess.run(
        ["tar", "-tzf", taken], capture_output=True, text=True, check=True
    ).stdout
    done = {line.rpartition("/")[2] for line in before.splitlines() if line.endswith(".ok")}
    assert len(done) >= 3 and "checkpoints" not in before and "big" not in before
    session(
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
