"""Names read from files lead nowhere but below their folder."""

import os
from pathlib import Path

import pytest

from fms_fsdp.files import open_regular, safe_name


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
