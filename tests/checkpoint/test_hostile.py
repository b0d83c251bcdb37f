"""Forged checkpoints, and folders with pipes and devices in them.

A run does not use them, `ckpt verify` names them, and nobody waits for them.
"""

from __future__ import annotations

import io
import json
import os
import pickle
import time
from collections.abc import Callable
from enum import Enum
from pathlib import Path
from typing import Any

import pytest
from torch.distributed.checkpoint import FileSystemReader

from fms_fsdp.__main__ import main as command
from fms_fsdp.checkpoint.folders import (
    FILES,
    INDEX,
    METADATA,
    STATE,
    CorruptCheckpoint,
    find_checkpoint,
)
from fms_fsdp.checkpoint.io import load_checkpoint
from fms_fsdp.errors import RunFailed, UserError
from tests.checkpoint.signing import sign
from tests.checkpoint.test_checkpointer import made, saved

PART = "__0_0.distcp"


def rewrite_state(change: Callable[[dict[str, Any]], object]) -> Callable[[Path], None]:
    def damage(folder: Path) -> None:
        state = json.loads((folder / STATE).read_text())
        change(state)
        (folder / STATE).write_text(json.dumps(state))
        sign(folder)

    return damage


def rewrite_metadata(change: Callable[[Any], object]) -> Callable[[Path], None]:
    def damage(folder: Path) -> None:
        metadata = FileSystemReader(folder).read_metadata()
        change(metadata)
        (folder / METADATA).write_bytes(pickle.dumps(metadata))
        (folder / INDEX).unlink()
        sign(folder)

    return damage


def replace(name: str, content: bytes, signed: bool = True) -> Callable[[Path], None]:
    def damage(folder: Path) -> None:
        if name == METADATA:  # which is read if there is no table
            (folder / INDEX).unlink()
        (folder / name).write_bytes(content)
        if signed:
            sign(folder)

    return damage


def fifo(name: str) -> Callable[[Path], None]:
    def damage(folder: Path) -> None:
        (folder / name).unlink()
        os.mkfifo(folder / name)

    return damage


def link(name: str, target: str) -> Callable[[Path], None]:
    def damage(folder: Path) -> None:
        (folder / name).unlink()
        (folder / name).symlink_to(target)

    return damage


def list_also(name: str) -> Callable[[Path], None]:
    def damage(folder: Path) -> None:
        sign(folder, **{name: (0, 0)})

    return damage


def drop_tensor(metadata: Any) -> None:
    del metadata.state_dict_metadata["model.head.norm.weight"]


def move_out(metadata: Any) -> None:
    for info in metadata.storage_data.values():
        info.relative_path = "../../secret"


DAMAGES: dict[str, Callable[[Path], None]] = {
    "a FIFO as files.json": fifo(FILES),
    "a FIFO as train_state.json": fifo(STATE),
    "a FIFO as .metadata": fifo(METADATA),
    "a FIFO as shards.index": fifo(INDEX),
    "a FIFO as a part": fifo(PART),
    "files.json nested deep": replace(FILES, b"[" * 100_000, signed=False),
    "train_state.json nested deep": replace(STATE, b'{"a":' * 100_000),
    "files.json of bytes": replace(FILES, b"\xff\xfe\x00", signed=False),
    "files.json lists /dev/zero": list_also("/dev/zero"),
    "files.json lists a file outside": list_also("../../secret"),
    "files.json lists a folder": list_also(".."),
    "files.json is a link to /dev/zero": link(FILES, "/dev/zero"),
    "a part is a link to /dev/zero": link(PART, "/dev/zero"),
    "another step": rewrite_state(lambda state: state.update(step=3)),
    ".metadata of another class": replace(METADATA, pickle.dumps({"a": 1})),
    ".metadata that reads an attribute": replace(
        METADATA, b"cbuiltins\ngetattr\n(ctorch\nSize\nVcount\ntR."
    ),
    ".metadata that is no pickle": replace(METADATA, b"hello"),
    "shards.index that is no table": replace(INDEX, b"hello"),
    "shards.index that is a pickle": replace(INDEX, pickle.dumps({"a": 1})),
}
# signed, and of DCP's own classes: no damage, but nothing to load, which runs no code and is one line
CONTENT: dict[str, Callable[[Path], None]] = {
    ".metadata without a tensor": rewrite_metadata(drop_tensor),
    ".metadata that leads outside": rewrite_metadata(move_out),
    "a part that is no tensors": lambda folder: replace(
        PART, b"x" * (folder / PART).stat().st_size
    )(folder),
}


def step_loaded(root: Path) -> int:
    """The step that a run starts from: if a checkpoint is damaged, the run looks for an older one."""
    corrupt: dict[Path, str] = {}
    while (found := find_checkpoint(root, corrupt=corrupt)) is not None:
        try:
            load_checkpoint(found.folder, *made(0), is_alone=True)
            return found.step
        except CorruptCheckpoint as error:
            corrupt[found.folder] = error.reason
    return 0


@pytest.mark.parametrize("name", CONTENT)
def test_forged_content_is_one_line(tmp_path: Path, name: str) -> None:
    saved(tmp_path / "run", 1, 2)
    (tmp_path / "secret").write_text("")
    CONTENT[name](tmp_path / "run" / "step_2")
    with pytest.raises(UserError, match="step_2 is of another model"):
        step_loaded(tmp_path / "run")


class OldPickler(pickle.Pickler):
    """Writes members of enums as Python 3.11.2 does, by `getattr`."""

    def reducer_override(self, value: Any) -> Any:
        return (getattr, (type(value), value.name)) if isinstance(value, Enum) else NotImplemented


def test_metadata_of_python_3_11_2_is_read(tmp_path: Path) -> None:
    saved(tmp_path / "run", 1)
    folder, written = tmp_path / "run" / "step_1", io.BytesIO()
    OldPickler(written).dump(FileSystemReader(folder).read_metadata())
    assert b"getattr" in written.getvalue()
    replace(METADATA, written.getvalue())(folder)
    assert step_loaded(tmp_path / "run") == 1


@pytest.mark.parametrize("name", [None, *DAMAGES])
def test_forged_checkpoint_is_skipped_and_verify_agrees(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str | None
) -> None:
    saved(tmp_path / "run", 1, 2)
    (tmp_path / "secret").write_text("")
    if name is not None:
        DAMAGES[name](tmp_path / "run" / "step_2")
    begin = time.monotonic()
    assert step_loaded(tmp_path / "run") == (2 if name is None else 1)
    assert command(["ckpt", "verify", f"--path={tmp_path / 'run'}"]) == (0 if name is None else 2)
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == ["step_1", "step_2"]
    assert lines[0].split()[1].startswith("valid")
    assert command(["ckpt", "list", f"--path={tmp_path / 'run'}"]) == 0
    assert time.monotonic() - begin < 10


@pytest.mark.parametrize("name", [FILES, STATE, METADATA, INDEX, PART])
def test_unreadable_file_is_not_corrupt(tmp_path: Path, name: str) -> None:
    """A link that leads to itself: neither missing nor of another size, and no read of it succeeds."""
    saved(tmp_path, 1, 2)
    link(name, name)(tmp_path / "step_2")
    with pytest.raises(OSError, match=name):
        find_checkpoint(tmp_path)
    if name in (INDEX, PART):  # which a load reads
        with pytest.raises(RunFailed, match=f"{name}.* not corrupt: repair the storage"):
            load_checkpoint(tmp_path / "step_2", *made(0), is_alone=True)
    assert command(["ckpt", "verify", f"--path={tmp_path}"]) == 2
