"""docs/extending.md is true: a copy of the code follows it and has one flag more."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import textwrap
from pathlib import Path

from fms_fsdp.checkpoint.folders import find_checkpoint
from fms_fsdp.config import TrainConfig
from tests.cli import ROOT, TINY, metrics


def run_copy(tree: Path, *command: str) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {"PYTHONPATH": str(tree)}
    return subprocess.run(
        [sys.executable, *command],
        cwd=tree,
        env=environment,
        capture_output=True,
        text=True,
        timeout=120,
    )


def test_a_flag_is_added_as_the_page_says(tmp_path: Path) -> None:
    shutil.copytree(
        ROOT / "fms_fsdp", tmp_path / "fms_fsdp", ignore=shutil.ignore_patterns("__pycache__")
    )
    shutil.copyfile(ROOT / "main_training.py", tmp_path / "main_training.py")
    page = (ROOT / "docs" / "extending.md").read_text()
    block = re.search(r"## A flag.*?\n( *)```python\n(.*?)\n *```", page, re.DOTALL)
    assert block is not None and "`OptimConfig`" in page[: block.start(2)]
    row = textwrap.indent(textwrap.dedent(block[2]), "    ")
    path = tmp_path / "fms_fsdp" / "config" / "optim.py"
    before, name, after = path.read_text().partition("    learning_rate: float")
    path.write_text(f"{before}{row}\n{name}{after}")

    helped = run_copy(tmp_path, "main_training.py", "--help=all")
    assert (
        "  --label_smoothing (float, default 0.0)\n      Fraction of the prob" in helped.stdout
    ), helped.stderr
    written = run_copy(tmp_path, "-m", "fms_fsdp.tools.flags_page")
    assert "| `--label_smoothing` | float | `0.0` | logged | yes | Fraction" in written.stdout
    refused = run_copy(tmp_path, "main_training.py", "--label_smoothing=1")
    assert (refused.returncode, refused.stdout) == (2, "")
    assert refused.stderr == "error: --label_smoothing=1 must be below 1\n"
    code = "import fms_fsdp.config as c; print(c.TrainConfig(optim=c.OptimConfig({})).run_name)"
    names = [
        run_copy(tmp_path, "-c", code.format(given)).stdout for given in ("", "label_smoothing=0.1")
    ]
    assert names[0] == f"{TrainConfig().run_name}\n" != names[1] != ""


def test_the_page_names_at_most_three_files_for_each_addition() -> None:
    page = (ROOT / "docs" / "extending.md").read_text()
    sections = page.split("\n## ")[1:]
    assert [section.split("\n")[0].split()[-1] for section in sections] == [
        *("flag", "option", "variant", "optimizer", "format", "tracker")
    ]
    for section in sections:
        steps = re.findall(r"^(?:\d\.|-) .*", section, re.MULTILINE)
        assert 2 <= len(steps) <= 3, section
    for path in re.findall(r"`((?:fms_fsdp|tests|docs|scripts)/[\w./-]*)`", page):
        assert (ROOT / path).exists(), path


def test_a_variant_of_a_users_own_script_trains_as_the_page_says(tmp_path: Path) -> None:
    page = (ROOT / "docs" / "extending.md").read_text()
    script = re.search(r"## A variant.*?```python\n(.*?)\n```", page, re.DOTALL)
    assert script is not None and "`my_training.py`" in page
    (tmp_path / "my_training.py").write_text(script[1])
    flags = [
        "--model_variant=mine",
        "--use_dummy_dataset=True",
        "--seq_length=32",
        "--batch_size=2",
    ]
    flags += ["--num_steps=1", f"--output_dir={tmp_path / 'run'}"]
    done = subprocess.run(
        [sys.executable, "my_training.py", *flags],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    assert find_checkpoint(tmp_path / "run" / "checkpoints") is not None
    recorded = json.loads((tmp_path / "run" / "config.json").read_text())
    assert recorded["resolved"]["model"]["hidden_size"] == 96


def test_documented_optimizer_trains_inside_and_outside(tmp_path: Path) -> None:
    page = (ROOT / "docs" / "extending.md").read_text()
    section = page.partition("## An optimizer")[2].partition("\n## ")[0]
    (module,) = re.findall(r"```python\n(.*?)```", section, re.DOTALL)
    assert len(module.splitlines()) <= 32
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "signed.py").write_text(module)
    shutil.copytree(
        ROOT / "fms_fsdp", tmp_path / "fms_fsdp", ignore=shutil.ignore_patterns("__pycache__")
    )
    shutil.copyfile(ROOT / "main_training.py", tmp_path / "main_training.py")
    edits = {
        "config/optim.py": ("OPTIMIZERS = tuple(", 'OPTIMIZERS = tuple("signed "'),
        "optim/optimizers.py": ('"sm3": own.SM3,', '"sm3": own.SM3, "signed": own.SignMomentum,'),
    }
    for name, (before, after) in edits.items():
        path = tmp_path / "fms_fsdp" / name
        path.write_text(path.read_text().replace(before, after))
    with open(tmp_path / "fms_fsdp" / "optim" / "sharded_optimizers.py", "a") as file:
        file.write(f"\n\nclass {module.partition('class ')[2]}")
    losses = []
    for tree, optimizer in ((ROOT, "signed:SignMomentum"), (tmp_path, "signed")):
        run = tmp_path / optimizer.partition(":")[0] / f"run{len(losses)}"
        flags = [*TINY, "--num_steps=3", f"--optimizer={optimizer}", f"--output_dir={run}"]
        done = subprocess.run(
            [sys.executable, "main_training.py", *flags],
            cwd=tree,
            env=os.environ | {"PYTHONPATH": f"{tree}:{outside}", "OMP_NUM_THREADS": "1"},
            capture_output=True,
            text=True,
            timeout=120,
        )
        assert done.returncode == 0, done.stderr
        losses.append([record["loss"] for record in metrics(run).values()])
    assert losses[0] == losses[1] and len(losses[0]) == 3
