"""`--dry_run` describes a launch, is rejected as the launch would be, and writes nothing."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from fms_fsdp.config import TrainConfig
from fms_fsdp.config.parse import parse, parse_flags
from fms_fsdp.config.values import counted
from tests.cli import TINY, run, trained
from tests.run.test_launch import content
from tests.warm import Ended, launch

FLAGS = (*TINY, "--trackers=none", "--num_steps=4", "--recompute=auto")


def dry(folder: Path, *flags: str, ranks: int = 0) -> Ended:
    """What a dry run in that folder ends with."""
    return launch([*FLAGS, "--dry_run", *flags], ranks, cwd=folder)


@pytest.mark.parametrize("ranks", [0, 2])
def test_dry_run_describes_the_launch(tmp_path: Path, ranks: int) -> None:
    ended = dry(tmp_path, ranks=ranks)
    assert ended.returncode == 0 and set(ended.statuses) == {0}, ended.stderr
    assert not list(tmp_path.iterdir())
    name = parse_flags(TrainConfig, FLAGS).run_name  # `--dry_run` is no part of it
    for words in (
        "flags: --model_variant=tiny",
        "model: tiny, 500k parameters",
        f"batch: 2 sequences x {counted(max(1, ranks), 'rank')} x 1 accumulation step =",
        "recompute: auto chose none: about ",
        f"run directory: runs/{name}",
        "steps: 1 to 4",
        f"starting from scratch: no checkpoint in runs/{name}/checkpoints",
        "dry run: nothing was written",
    ):
        assert ended.stdout.count(words) == 1, (words, ended.stdout)
    assert "step 1/4" not in ended.stdout


@pytest.mark.slow
def test_dry_run_of_resume_changes_no_byte(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    trained(*FLAGS, f"--output_dir={folder}", "--num_steps=2")
    before = content(tmp_path)
    ended = dry(tmp_path, f"--output_dir={folder}", "--learning_rate=1e-3", ranks=2)
    assert ended.returncode == 0, ended.stderr
    assert "steps: 3 to 4" in ended.stdout and f"resuming from step 2 of {folder}" in ended.stdout
    assert "from step 3: --learning_rate 0.0003 -> 0.001" in ended.stdout
    done = launch([*TINY, "--num_steps=2", "--dry_run", f"--output_dir={folder}"], cwd=tmp_path)
    assert done.returncode == 0 and "steps: none, the run is already finished" in done.stdout
    rejected = dry(tmp_path, f"--output_dir={folder}", "--num_layers=3")
    assert rejected.returncode == 2
    assert "--num_layers=3 does not match the checkpoint" in rejected.stderr
    assert content(tmp_path) == before


def test_dry_run_rejects_what_a_launch_rejects(tmp_path: Path) -> None:
    """tests/bad_input.txt has more."""
    ended = dry(tmp_path, "--global_batch_size=3", ranks=2)
    assert ended.returncode == 2 and set(ended.statuses) == {2}
    assert ended.stderr.startswith("error: --global_batch_size=3 "), ended.stderr
    assert ended.stderr.count("\n") == 1
    assert not list(tmp_path.iterdir())


def test_dry_run_is_no_flag_of_the_config(tmp_path: Path) -> None:
    for flags, asked in (("--dry_run", True), ("--dry-run=yes", True), ("--dry_run=False", False)):
        parsed = parse(TrainConfig, [flags])
        assert parsed.dry_run == asked and parsed.config == TrainConfig() and not parsed.origins
    (tmp_path / "a.toml").write_text("dry_run = true\n")
    with pytest.raises(ValueError, match="dry_run is not a flag"):
        parse(TrainConfig, [f"--config={tmp_path / 'a.toml'}"])


@pytest.mark.slow
def test_torchrun_succeeds_after_a_dry_run(tmp_path: Path) -> None:
    outcome = {"LAUNCH_OUTCOME": str(tmp_path / "outcome")}
    flags = (*FLAGS, "--dry_run=True", f"--output_dir={tmp_path / 'run'}")
    ended = run(*flags, nproc=2, torchrun=(), **outcome)
    assert ended.returncode == 0 and ended.stdout.count("dry run: nothing was written") == 1
    assert os.listdir(tmp_path) in ([], ["outcome"])  # the file that a script asks for
