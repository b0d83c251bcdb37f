"""docs/extending.md is true: a copy of the code follows it and has one flag more."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import textwrap
from functools import partial
from pathlib import Path

import pytest

from fms_fsdp.checkpoint.folders import find_checkpoint
from fms_fsdp.config import TrainConfig
from tests.cli import ROOT, TINY, losses
from tests.warm import launch
from tests.warm_shell import look_in

PAGE = (ROOT / "docs" / "extending.md").read_text()


def run_python(folder: Path, *command: str, path: str = "") -> subprocess.CompletedProcess[str]:
    """Runs Python in the folder, with the code of `path`, by default of the folder."""
    variables = {"PYTHONPATH": path or str(folder), "OMP_NUM_THREADS": "1"}
    return subprocess.run(
        [sys.executable, *command],
        cwd=folder,
        env=os.environ | variables,
        capture_output=True,
        text=True,
        timeout=300,
    )


def copy_code(folder: Path) -> None:
    ignored = shutil.ignore_patterns("__pycache__")
    shutil.copytree(ROOT / "fms_fsdp", folder / "fms_fsdp", ignore=ignored)
    shutil.copyfile(ROOT / "main_training.py", folder / "main_training.py")


def test_flag_is_added_as_the_page_says(tmp_path: Path) -> None:
    copy_code(tmp_path)
    block = re.search(r"## A flag.*?\n( *)```python\n(.*?)\n *```", PAGE, re.DOTALL)
    assert block is not None and "`OptimConfig`" in PAGE[: block.start(2)]
    row = textwrap.indent(textwrap.dedent(block[2]), "    ")
    path = tmp_path / "fms_fsdp" / "config" / "optim.py"
    before, name, after = path.read_text().partition("    learning_rate: float")
    path.write_text(f"{before}{row}\n{name}{after}")
    helped = run_python(tmp_path, "main_training.py", "--help=all").stdout
    assert "  --label_smoothing=FLOAT [0.0]\n      Fraction of the prob" in helped
    written = run_python(tmp_path, "-m", "fms_fsdp.tools.flags_page").stdout
    assert (
        "`--label_smoothing` float | `0.0` | Fraction" in written
        and ". *logged, name* |" in written
    )
    rejected = run_python(tmp_path, "main_training.py", "--label_smoothing=1")
    assert (rejected.returncode, rejected.stdout) == (2, "")
    assert rejected.stderr == "error: --label_smoothing=1 must be below 1\n"
    code = "import fms_fsdp.config as c; print(c.TrainConfig(optim=c.OptimConfig({})).run_name)"
    default, other = (
        run_python(tmp_path, "-c", code.format(given)).stdout
        for given in ("", "label_smoothing=0.1")
    )
    assert default == f"{TrainConfig().run_name}\n" != other != ""


def test_paths_of_the_page_exist() -> None:
    paths = re.findall(r"`((?:fms_fsdp|tests|docs|scripts)/[\w./-]*)`", PAGE)
    assert len(paths) > 5 and all((ROOT / path).exists() for path in paths), paths


@pytest.mark.slow
def test_users_variant_trains_as_the_page_says(tmp_path: Path) -> None:
    script = re.search(r"## A variant.*?```python\n(.*?)\n```", PAGE, re.DOTALL)
    assert script is not None and "`my_training.py`" in PAGE
    (tmp_path / "my_training.py").write_text(script[1])
    flags = ["--model_variant=mine", *TINY[1:], "--num_steps=1", "--output_dir=run"]
    done = run_python(tmp_path, "my_training.py", *flags, path=str(ROOT))
    assert done.returncode == 0, done.stderr
    assert find_checkpoint(tmp_path / "run" / "checkpoints") is not None
    recorded = json.loads((tmp_path / "run" / "config.json").read_text())
    assert recorded["resolved"]["model"]["hidden_size"] == 96


@pytest.mark.slow
def test_documented_optimizer_trains_inside_and_outside(tmp_path: Path) -> None:
    section = PAGE.partition("## An optimizer")[2].partition("\n## ")[0]
    (module,) = re.findall(r"```python\n(.*?)```", section, re.DOTALL)
    assert len(module.splitlines()) <= 32
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "signed.py").write_text(module)
    copy_code(tmp_path)
    edits = {
        "config/optim.py": ("OPTIMIZERS = tuple(", 'OPTIMIZERS = tuple("signed "'),
        "optim/optimizers.py": ('"sm3": own.SM3,', '"sm3": own.SM3, "signed": own.SignMomentum,'),
    }
    for name, (before, after) in edits.items():
        path = tmp_path / "fms_fsdp" / name
        path.write_text(path.read_text().replace(before, after))
    with open(tmp_path / "fms_fsdp" / "optim" / "sharded_optimizers.py", "a") as file:
        file.write(f"\n\nclass {module.partition('class ')[2]}")
    flags = [*TINY, "--num_steps=3"]
    of_user = [*flags, "--optimizer=signed:SignMomentum", f"--output_dir={tmp_path / 'of_user'}"]
    done = launch(of_user, before=partial(look_in, str(outside)))
    assert done.returncode == 0, done.stderr
    # An edited copy of the code is imported by a process of its own.
    own = [*flags, "--optimizer=signed", f"--output_dir={tmp_path / 'own'}"]
    ended = run_python(tmp_path, "main_training.py", *own)
    assert ended.returncode == 0, ended.stderr
    assert losses(tmp_path / "of_user") == losses(tmp_path / "own")
    assert len(losses(tmp_path / "own")) == 3
