"""Names read from files lead nowhere but below their folder."""

import errno
import fcntl
import json
import math
import mmap
import os
from pathlib import Path
from typing import Any, NoReturn

import pytest

from fms_fsdp.errors import UserError
from fms_fsdp.files import (
    exists,
    finite_json,
    map_or_read,
    open_regular,
    read_json,
    safe_name,
    write_atomically,
    write_folder,
)


@pytest.mark.parametrize("name", ["a.arrow", "..a", "a..b", ".metadata", "é €", "a b"])
def test_safe_names_are_returned(name: str) -> None:
    assert safe_name(name, "x.json") == name
    assert safe_name(f"web/{name}", "x.json", folders=True) == f"web/{name}"


@pytest.mark.parametrize(
    "name", ["", ".", "../x", "a/../x", "/etc/passwd", "a\0b", "a\nb", "a\x1b[2J", "\ud800", 3]
)
def test_unsafe_names_are_rejected(name: object) -> None:
    for folders in (False, True):
        with pytest.raises(ValueError, match=r"^x.json names a file \(.*\) that must "):
            safe_name(name, "x.json", folders=folders)


def test_folders_are_rejected_and_errors_short() -> None:
    with pytest.raises(ValueError, match="must be a bare name"):
        safe_name("a/b", "x.json")
    with pytest.raises(ValueError) as caught:
        safe_name("\n" * 10_000, "x.json")
    assert len(str(caught.value)) < 200


def test_only_regular_files_are_opened(
    tmp_path: Path,
) -> None:
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "file").write_bytes(b"abc")
    (tmp_path / "link").symlink_to(tmp_path / "file")
    for path in (tmp_path / "pipe", "/dev/zero", tmp_path):
        with pytest.raises(OSError, match="must be a regular file"):
            open_regular(path)
    descriptor = open_regular(tmp_path / "link")
    assert os.read(descriptor, 9) == b"abc"
    os.close(descriptor)


def test_writes_need_no_optional_capability(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Sync, rename over a file and mmap are missing on some network and FUSE file systems. None of them
    can be mounted in CI, so the calls answer as theirs."""
    replace = os.replace

    def no_sync(descriptor: int) -> NoReturn:
        raise OSError(errno.EOPNOTSUPP, "Operation not supported")

    def no_replace(source: Path, target: Path) -> None:
        if target.exists():
            raise FileExistsError(errno.EEXIST, "File exists")
        replace(source, target)

    def no_mmap(*given: Any, **settings: Any) -> NoReturn:
        raise OSError(errno.ENODEV, "No such device")

    monkeypatch.setattr(os, "fsync", no_sync)
    monkeypatch.setattr(os, "replace", no_replace)
    monkeypatch.setattr(mmap, "mmap", no_mmap)
    path = tmp_path / "status.json"
    for content in (b"old", b"new"):
        write_atomically(path, content, sync=True)
        assert map_or_read(path) == content
    assert list(tmp_path.iterdir()) == [path]
    assert capsys.readouterr().err.count("note: the file system cannot") == 2


def test_finite_json_replaces_nested_nan() -> None:
    content = {"loss": math.nan, "tasks": {"a": [math.inf, 1.5, None, "nan"]}}
    text = json.dumps(finite_json(content), allow_nan=False)
    assert json.loads(text) == {"loss": None, "tasks": {"a": [None, 1.5, None, "nan"]}}


def test_unreadable_record_is_not_a_missing_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """exports/due.json counted as empty, so the exports were never made."""
    assert read_json(tmp_path / "a") == {} and not exists(tmp_path / "a" / "b")

    def failing(path: object, *args: Any, **settings: Any) -> NoReturn:
        raise OSError(errno.ESHUTDOWN, "Cannot send", str(path))

    monkeypatch.setattr("io.open", failing)
    monkeypatch.setattr(os, "stat", failing)
    with pytest.raises(OSError, match="Cannot send"):
        read_json(tmp_path / "a")
    with pytest.raises(OSError, match="Cannot send"):
        exists(tmp_path)


def test_held_lock_of_cifs_is_respected(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """CIFS says EACCES: a second export emptied the folder of the first."""

    def held(descriptor: int, operation: int) -> NoReturn:
        raise PermissionError(errno.EACCES, "Permission denied")

    monkeypatch.setattr(fcntl, "flock", held)
    with pytest.raises(UserError, match="another export"), write_folder(tmp_path / "out"):
        pass
