"""Readers of a run that trains, which deletes checkpoints while they are read."""

from __future__ import annotations

import pickle
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import fms_fsdp
from fms_fsdp.__main__ import main
from fms_fsdp.checkpoint import folders
from fms_fsdp.checkpoint.folders import (
    Checkpoint,
    CheckpointDeleted,
    CorruptCheckpoint,
    corrupt_files,
    format_files,
)
from fms_fsdp.checkpoint.io import load_checkpoint
from fms_fsdp.config import TrainConfig
from fms_fsdp.config.parse import parse_flags
from fms_fsdp.distributed.world import World
from fms_fsdp.errors import UserError
from fms_fsdp.run import resume
from tests.checkpoint.signing import flip_a_bit
from tests.checkpoint.test_checkpointer import made, saved
from tests.cli import TINY


@pytest.fixture
def run(eight_steps: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Returns a run whose chosen checkpoint is deleted while it is read, and step 4 appears."""
    run, later = tmp_path / "run", tmp_path / "later"
    shutil.copytree(eight_steps, run)
    root = run / "checkpoints"
    for step in (6, 8):
        shutil.rmtree(root / f"step_{step}")
    find, is_first = folders.find_checkpoint, [True]
    shutil.move(root / "step_4", later)

    def found(*args: Any, **more: Any) -> Checkpoint | None:
        checkpoint = find(*args, **more)
        if is_first:
            is_first.clear()
            shutil.move(later, root / "step_4")
            folders.delete(root / "step_2")
        return checkpoint

    monkeypatch.setattr("fms_fsdp.checkpoint.run_results.find_checkpoint", found)
    return run


@pytest.mark.parametrize("command", ["load_model", "export", "ckpt inspect", "evaluate"])
def test_readers_take_the_newest_after_deletion(run: Path, command: str) -> None:
    if command == "load_model":
        assert fms_fsdp.load_model(str(run))[0] is not None
    else:
        more = {"export": [f"--output={run.parent / 'hf'}"], "evaluate": ["--eval_steps=1"]}
        assert main([*command.split(), f"--path={run}", *more.get(command, [])]) == 0


def test_deleted_checkpoint_is_not_corrupt(run: Path, capsys: Any) -> None:
    """A named step cannot be replaced: one line tells how to keep it."""
    assert main(["export", f"--path={run}", "--step=2", f"--output={run.parent / 'hf'}"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "step_2 was deleted by its run while it was read" in line and "--keep_steps=2" in line


def test_load_tells_deleted_and_corrupt_apart(tmp_path: Path) -> None:
    saved(tmp_path, 1, 2)
    model, optimizers = made(1)
    flip_a_bit(tmp_path / "step_1" / "__0_0.distcp")
    with pytest.raises(CorruptCheckpoint, match="its checksum is wrong"):
        load_checkpoint(tmp_path / "step_1", model, optimizers, is_alone=True)
    with pytest.raises(CheckpointDeleted, match="--keep_steps=3"):
        load_checkpoint(tmp_path / "step_3", model, optimizers, is_alone=True)


def test_ranks_agree_that_a_checkpoint_is_deleted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each rank looked again, and caches differ: one chose another checkpoint, one ended."""
    saved(tmp_path, 1)
    folder = tmp_path / "step_1"
    of_rank_1 = ([], UserError("files.json is missing"), True)
    monkeypatch.setattr(resume, "gather_objects", lambda own: [own, of_rank_1])
    with pytest.raises(CheckpointDeleted):
        resume._verify(folder, World(0, 0, 2, 2))


def test_checkpoint_on_a_local_disk_is_an_error(
    eight_steps: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rank 0 saw it, another node did not: the launch looked again for ever."""
    looked = list[Path]()

    def misses(folder: Path, world: World) -> list[str]:
        looked.append(folder)
        assert len(looked) < 100
        raise CheckpointDeleted(folder)

    monkeypatch.setattr(resume, "_verify", misses)
    monkeypatch.setattr("time.sleep", lambda seconds: None)
    cfg = parse_flags(TrainConfig, [*TINY, f"--output_dir={eight_steps}"])
    with pytest.raises(UserError, match="step_8 must be visible on all nodes, but not every rank"):
        resume.find_resume_point(cfg, World(0, 0, 2, 1))


def test_deleted_checkpoint_is_replaced_by_next(
    eight_steps: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    verify = resume._verify

    def misses_first(folder: Path, world: World) -> list[str]:
        if folder.name == "step_8":
            monkeypatch.setattr(folders, "checkpoint_steps", lambda root: [2, 4, 6])
            raise CheckpointDeleted(folder)
        return verify(folder, world)

    monkeypatch.setattr(resume, "_verify", misses_first)
    cfg = parse_flags(TrainConfig, [*TINY, f"--output_dir={eight_steps}"])
    assert resume.find_resume_point(cfg, World(0, 0, 1, 1)).start.step == 6


def test_files_are_verified_beyond_the_timeout(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The rank that reads the file of a single writer let the others wait in a collective."""
    saved(tmp_path, 1)
    worked = list[str]()

    def noted(function: Callable[[], Any]) -> Any:
        worked.append("in a thread")
        return function()

    monkeypatch.setattr(resume, "run_long_on_every_rank", noted)
    assert resume._verify(tmp_path / "step_1", World(0, 0, 1, 1)) == []
    assert worked == ["in a thread"]


def test_errors_can_be_pickled_between_ranks() -> None:
    folder = Path("runs/a/checkpoints/step_3")
    for error in (CheckpointDeleted(folder), CorruptCheckpoint(folder, "x is missing")):
        copy = pickle.loads(pickle.dumps(error))
        assert type(copy) is type(error) and str(copy) == str(error) and copy.folder == folder


@pytest.mark.parametrize("num_ranks", [1, 2, 3, 7])
def test_each_file_is_verified_by_one_rank(tmp_path: Path, num_ranks: int) -> None:
    names = [*(f"__{writer}_0.distcp" for writer in range(5)), ".metadata"]
    for name in names:
        (tmp_path / name).write_text("other bytes")
    (tmp_path / folders.FILES).write_text(format_files({name: (11, 1) for name in names}))
    by_rank = [corrupt_files(tmp_path, rank, num_ranks) for rank in range(num_ranks)]
    assert sum(map(len, by_rank)) == len(names)
    for writer in range(5):
        assert any(f"__{writer}_0" in reason for reason in by_rank[writer % num_ranks])
