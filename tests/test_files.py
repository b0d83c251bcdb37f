"""Names read from files lead nowhere but below their folder."""

import os
from pathlib import Path

import pytest

from fms_fsdp.files import open_regular, safe_name


@pytest.mark.parametrize("name", ["a", "a.arrow", "..a", "a..b", ".metadata", "é €", "a b"])
def test_plain_names_are_given_back(name: str) -> None:
    assert safe_name(name, "x.json") == name
    assert safe_name(f"web/{name}", "x.json", folders=True) == f"web/{name}"


@pytest.mark.parametrize(
    "name",
    [
        "",
        ".",
        "..",
        "../x",
        "a/../x",
        "a/..",
        "/etc/passwd",
        "a\0b",
        "a\nb",
        "a\x1b[2J",
        "\ud800",
        "a\u2028",
        3,
    ],
)
@pytest.mark.parametrize("folders", [False, True])
def test_names_that_lead_out_of_the_folder_or_break_a_line_are_refused(
    name: object, folders: bool
) -> None:
    with pytest.raises(
        ValueError, match=r"^x.json names a file \(.*\) that must .*; correct or remove the entry$"
    ):
        safe_name(name, "x.json", folders=folders)


def test_a_bare_name_holds_no_folder_and_a_long_one_is_cut() -> None:
    with pytest.raises(ValueError, match="must be a bare name"):
        safe_name("a/b", "x.json")
    with pytest.raises(ValueError) as caught:
        safe_name("\n" * 10_000, "x.json")
    assert len(str(caught.value)) < 200


def test_pipes_devices_and_folders_are_refused_at_once_and_links_are_followed(
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
