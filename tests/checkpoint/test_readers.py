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
from fms_fsdp.checkpoint.folders import Checkpoint, CheckpointDeleted, CorruptCheckpoint
from fms_fsdp.checkpoint.io import load_checkpoint
from tests.checkpoint.test_checkpointer import made, saved
from tests.cli import TINY, trained


@pytest.fixture
def deleted_while_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[Path], None]:
    """Returns a function after which the first choice in `root` is deleted, and step 2 appears."""

    def arm(root: Path) -> None:
        shutil.move(root / "step_2", tmp_path / "later")
        find, is_first = folders.find_checkpoint, [True]

        def found(*args: Any, **more: Any) -> Checkpoint | None:
            checkpoint = find(*args, **more)
            if is_first.pop() if is_first else False:
                shutil.move(tmp_path / "later", root / "step_2")
                folders.delete(root / "step_1")
            return checkpoint

        monkeypatch.setattr(folders, "find_checkpoint", found)

    return arm


@pytest.mark.parametrize("command", ["load_model", "export", "ckpt inspect", "evaluate"])
def test_readers_take_the_newest_after_a_deletion(
    tmp_path: Path, deleted_while_read: Callable[[Path], None], command: str
) -> None:
    run, flags = tmp_path / "run", ("--num_steps=2", "--checkpoint_interval=1", "--trackers=none")
    trained(*TINY, *flags, f"--output_dir={run}")
    deleted_while_read(run / "checkpoints")
    path = f"--path={run}"
    if command == "load_model":
        assert fms_fsdp.load_model(str(run))[0] is not None
    elif command == "export":
        assert main(["export", path, f"--output={tmp_path / 'hf'}"]) == 0
    elif command == "evaluate":
        assert main(["evaluate", path, "--eval_steps=1"]) == 0
    else:
        assert main([*command.split(), path]) == 0


def test_deleted_checkpoint_is_not_corrupt(
    tmp_path: Path, deleted_while_read: Callable[[Path], None], capsys: Any
) -> None:
    """A named step cannot be replaced: one line says how to keep it."""
    run, flags = tmp_path / "run", ("--num_steps=2", "--checkpoint_interval=1", "--trackers=none")
    trained(*TINY, *flags, f"--output_dir={run}")
    deleted_while_read(run / "checkpoints")
    assert main(["export", f"--path={run}", "--step=1", f"--output={tmp_path / 'hf'}"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "step_1 was deleted by its run while it was read" in line and "--keep_steps=1" in line


def test_load_tells_deleted_and_corrupt_apart(tmp_path: Path) -> None:
    saved(tmp_path, 1, 2)
    model, optimizers = made(1)
    file = tmp_path / "step_1" / "__0_0.distcp"
    content = bytearray(file.read_bytes())
    content[5000] ^= 1
    file.write_bytes(content)
    with pytest.raises(CorruptCheckpoint, match="its checksum is wrong"):
        load_checkpoint(tmp_path / "step_1", model, optimizers, is_alone=True)
    with pytest.raises(CheckpointDeleted, match="--keep_steps=3"):
        load_checkpoint(tmp_path / "step_3", model, optimizers, is_alone=True)


def test_errors_survive_the_way_between_ranks() -> None:
    folder = Path("runs/a/checkpoints/step_3")
    for error in (CheckpointDeleted(folder), CorruptCheckpoint(folder, "x is missing")):
        copy = pickle.loads(pickle.dumps(error))
        assert type(copy) is type(error) and str(copy) == str(error) and copy.folder == folder
