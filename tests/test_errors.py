"""Who is told what: one line for what the user can correct, a traceback for a bug."""

from __future__ import annotations

import errno
import os
import re
import subprocess
from pathlib import Path

import pytest

from fms_fsdp import __main__ as commands
from fms_fsdp.data.shards import MissingShardError, ShardError
from fms_fsdp.errors import MissingInput, ReadFailed, StorageError, UserError, checking_input
from fms_fsdp.packages import import_function, is_installed
from tests import cli

BUG = "operands could not be broadcast together"
BUGS = [
    ValueError(BUG),
    OSError("the library is confused"),
    OSError(errno.EBADF, "Bad file descriptor"),
    FileNotFoundError("no errno, no name"),
    FileNotFoundError(errno.ENOENT, "no name"),
    UnicodeDecodeError("utf-8", b"x", 0, 1, "invalid"),
    KeyError("x"),
]
FOR_THE_USER = [
    UserError("--x (1) must be 2;\n write 2"),
    ShardError("shard (a) is cut"),
    MissingShardError("shard (a) is missing"),
    MissingInput("--data_path (a) is not there"),
    StorageError("s3://a failed 3 times"),
    FileNotFoundError(errno.ENOENT, "No such file or directory", "a"),
    PermissionError(errno.EACCES, "Permission denied", "a"),
    OSError(errno.EROFS, "Read-only file system", "a"),
    OSError(errno.ENOSPC, "No space left on device"),
]


@pytest.mark.parametrize("bug", BUGS, ids=repr)
def test_bug_passes_checking_input(bug: Exception) -> None:
    with pytest.raises(type(bug)) as raised, checking_input():
        raise bug
    assert raised.value is bug and not isinstance(bug, UserError)


@pytest.mark.parametrize("name", ["EIO", "ESHUTDOWN", "ECONNABORTED", "ECOMM", "EKEYEXPIRED"])
def test_unknown_error_code_is_the_storage(name: str) -> None:
    code = getattr(errno, name)
    with pytest.raises(ReadFailed), checking_input():
        raise OSError(code, os.strerror(code), "a")


@pytest.mark.parametrize("error", FOR_THE_USER, ids=repr)
def test_user_error_becomes_one_line(error: Exception) -> None:
    with pytest.raises(UserError) as raised, checking_input(on_one_rank=True, data_step=3):
        raise error
    assert str(raised.value) == " ".join(str(error).split())
    assert (raised.value.on_one_rank, raised.value.data_step) == (True, 3)


def _run_command(error: Exception, monkeypatch: pytest.MonkeyPatch) -> int:
    def fail(folder: str) -> None:
        raise error

    monkeypatch.setattr("fms_fsdp.tools.ckpt_command._step_folders", fail, raising=True)
    return commands.main(["ckpt", "verify", "--path=somewhere"])


@pytest.mark.parametrize("bug", BUGS[:3], ids=repr)
def test_bug_of_command_is_not_bad_input(bug: Exception, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(type(bug)):
        _run_command(bug, monkeypatch)


@pytest.mark.parametrize("error", FOR_THE_USER[-3:], ids=repr)
def test_unusable_file_of_command_is_one_line(
    error: Exception, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert _run_command(error, monkeypatch) == 2
    assert capsys.readouterr().err.count("\n") == 1


def test_shut_down_storage_is_no_closed_pipe(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Python has one class for both, and the command ended with 0 and without a word."""
    error = OSError(errno.ESHUTDOWN, "Cannot send after transport endpoint shutdown", "a/step_1")
    assert isinstance(error, BrokenPipeError)
    assert _run_command(error, monkeypatch) == 1
    assert "a/step_1 cannot be read: Cannot send" in capsys.readouterr().err


def run_broken(folder: Path, kind: str) -> subprocess.CompletedProcess[str]:
    """Runs on a user's stream that fails at step 2."""
    broken = (
        "--dataset_builder=tests.data.broken_stream:build",
        f"--data_kwargs=kind={kind},step=2",
    )
    flags = (cli.TINY[0], *cli.TINY[2:], "--num_steps=4", f"--output_dir={folder}")
    return cli.run(*flags, *broken)


def test_bug_of_users_stream_is_a_traceback(tmp_path: Path) -> None:
    ended = run_broken(tmp_path, "bug")
    assert ended.returncode == 1
    for text in (ended.stderr, (tmp_path / "log.txt").read_text()):
        assert "Traceback" in text and f"ValueError: {BUG}" in text and "broken_stream.py" in text
    assert "error:" not in re.sub(r"\w+Error:", "", ended.stderr)
    assert cli.status(tmp_path)["status"] == "failed" and BUG in cli.status(tmp_path)["reason"]


def test_bad_data_of_users_stream_is_one_line(tmp_path: Path) -> None:
    ended = run_broken(tmp_path, "bad_data")
    assert ended.returncode == 2 and "Traceback" not in ended.stderr
    assert "error: record (7) of a.bin is cut; restore it" in ended.stderr
    assert (cli.status(tmp_path)["status"], cli.status(tmp_path)["data_step"]) == ("bad_input", 2)


@pytest.mark.parametrize(
    "name",
    [
        "",
        ":",
        "os:",
        ".os:getcwd",
        "os.path",
        "os:getcwd.x",
        "o s:x",
        "no_such:build",
        "os:environ",
    ],
)
def test_name_of_no_function_is_rejected(name: str) -> None:
    with pytest.raises(UserError, match="must be importable as module:function"):
        import_function(name, "--model_builder")


def test_error_of_users_module_is_passed_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "raises_at_import.py").write_text("int('x')\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ValueError, match="invalid literal") as raised:
        import_function("raises_at_import:build", "--model_builder")
    assert not isinstance(raised.value, UserError)
    assert import_function("os:getcwd", "--model_builder") is os.getcwd


def test_folder_is_not_its_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """wandb writes into a folder wandb of the working folder, from which Python imports."""
    for name in ("some_tracker", "other_tracker"):
        (tmp_path / name).mkdir()
    (tmp_path / "other_tracker/__init__.py").touch()
    monkeypatch.syspath_prepend(tmp_path)
    found = [is_installed(name) for name in ("some_tracker", "other_tracker", "no_tracker")]
    assert found == [False, True, False]
