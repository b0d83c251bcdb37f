"""`--dry_run`: it says what a launch would do, is refused where the launch would be, and writes nothing."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from fms_fsdp.config import TrainConfig
from fms_fsdp.config.parse import parse, parse_flags
from tests.cli import TINY, run, trained
from tests.run.test_launch import content
from tests.warm import Ended, launch

FLAGS = (*TINY, "--trackers=none", "--num_steps=4", "--recompute=auto")


def dry(folder: Path, *flags: str, ranks: int = 0) -> Ended:
    """What a dry run in that folder ends with."""
    return launch([*FLAGS, "--dry_run", *flags], ranks, cwd=folder)


@pytest.mark.parametrize("ranks", [0, 2])
def test_a_dry_run_says_what_a_launch_would_do_and_leaves_an_empty_folder_empty(
    tmp_path: Path, ranks: int
) -> None:
    ended = dry(tmp_path, ranks=ranks)
    assert ended.returncode == 0 and set(ended.statuses) == {0}, ended.stderr
    assert not list(tmp_path.iterdir())
    name = parse_flags(TrainConfig, FLAGS).run_name  # `--dry_run` is no part of it
    for words in (
        "flags: --model_variant=tiny",
        "model: 500,352 parameters",
        f"batch: 2 sequences x {max(1, ranks)} ranks x 1 accumulation steps",
        "recompute: auto chose none: about ",
        f"run folder: runs/{name}",
        "steps: 1 to 4",
        f"starting from scratch: no checkpoint in runs/{name}/checkpoints",
        "dry run: nothing was written",
    ):
        assert ended.stdout.count(words) == 1, (words, ended.stdout)
    assert "step 1/4" not in ended.stdout


def test_a_dry_run_of_a_run_that_goes_on_says_from_where_and_changes_no_byte(
    tmp_path: Path,
) -> None:
    folder = tmp_path / "run"
    trained(*FLAGS, f"--output_dir={folder}", "--num_steps=2")
    before = content(tmp_path)
    ended = dry(tmp_path, f"--output_dir={folder}", "--learning_rate=1e-3", ranks=2)
    assert ended.returncode == 0, ended.stderr
    assert "steps: 3 to 4" in ended.stdout and f"resuming from step 2 of {folder}" in ended.stdout
    assert "from step 3: --learning_rate 0.0003 -> 0.001" in ended.stdout
    done = launch([*TINY, "--num_steps=2", "--dry_run", f"--output_dir={folder}"], cwd=tmp_path)
    assert (
        done.returncode == 0 and "steps: none, the run is already finished at step 2" in done.stdout
    )
    refused = dry(tmp_path, f"--output_dir={folder}", "--num_layers=3")
    assert (
        refused.returncode == 2 and "--num_layers=3 does not match the checkpoint" in refused.stderr
    )
    assert content(tmp_path) == before


@pytest.mark.parametrize(
    ("flag", "words"),
    [
        ("--batch_size=autox", "--batch_size=autox must be an integer"),
        ("--dry_run=maybe", "--dry_run=maybe must be true or false"),
        ("--sharding_strategy=none", "--sharding_strategy=none requires one process"),
        ("--global_batch_size=3", "--global_batch_size=3 must be divisible by"),
        ("--hidden_size=1M", "must fit the "),
        ("--resume=must", "--resume=must requires a checkpoint, but runs/"),
        ("--output_dir=/proc/run", "--output_dir=/proc/run must be writable"),
        ("--skip_steps=1:3 --num_steps=0", "--num_steps=0 must be at least 1"),
    ],
)
def test_a_dry_run_is_refused_in_one_line_where_the_launch_would_be(
    tmp_path: Path, flag: str, words: str
) -> None:
    flags = [each for each in FLAGS if each.partition("=")[0] not in flag]
    ended = launch([*flags, "--dry_run", *flag.split()], 2, cwd=tmp_path)
    assert ended.returncode == 2 and set(ended.statuses) == {2}
    assert ended.stderr.count("error: ") == 1 and words in ended.stderr, ended.stderr
    assert not list(tmp_path.iterdir())


def test_a_dry_run_is_asked_for_on_the_command_line_alone(tmp_path: Path) -> None:
    for flags, asked in (
        (["--dry_run"], True),
        (["--dry-run=yes"], True),
        (["--dry_run=False"], False),
        ([], False),
    ):
        parsed = parse(TrainConfig, flags)
        assert parsed.dry_run == asked and parsed.config == TrainConfig() and not parsed.origins
    (tmp_path / "a.toml").write_text("dry_run = true\n")
    with pytest.raises(ValueError, match="dry_run is not a flag"):
        parse(TrainConfig, [f"--config={tmp_path / 'a.toml'}"])


@pytest.mark.slow
def test_torchrun_ends_well_after_a_dry_run(tmp_path: Path) -> None:
    outcome = str(tmp_path / "outcome")
    ended = run(
        *FLAGS,
        "--dry_run=True",
        f"--output_dir={tmp_path / 'run'}",
        nproc=2,
        torchrun=(),
        LAUNCH_OUTCOME=outcome,
    )
    assert ended.returncode == 0 and ended.stdout.count("dry run: nothing was written") == 1
    assert os.listdir(tmp_path) in ([], ["outcome"])  # the file that a script asks for
