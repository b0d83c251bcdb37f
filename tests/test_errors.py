"""Who is told what: one line for what the user can correct, a traceback for a bug."""

from __future__ import annotations

import errno
import os
import re
from pathlib import Path

import pytest

from fms_fsdp import __main__ as commands
from fms_fsdp.data.shards import MissingShardError, ShardError
from fms_fsdp.errors import (
    MissingInput,
    StorageError,
    UserError,
    checking_input,
    import_function,
)
from tests import cli

BUG = "operands could not be broadcast together"
BROKEN_STREAM = "--dataset_builder=tests.data.broken_stream:build"
BUGS = [
    ValueError(BUG),
    OSError("the library is confused"),
    OSError(errno.EBADF, "Bad file descriptor"),
    FileNotFoundError("no errno, no name"),
    FileNotFoundError(errno.ENOENT, "no name"),
    ConnectionResetError(errno.ECONNRESET, "reset", "peer"),
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
def test_a_bug_passes_the_checks_of_input_as_it_is(bug: Exception) -> None:
    with pytest.raises(type(bug)) as raised, checking_input():
        raise bug
    assert raised.value is bug and not isinstance(bug, UserError)


@pytest.mark.parametrize("error", FOR_THE_USER, ids=repr)
def test_what_the_user_can_correct_becomes_one_line_with_its_place(error: Exception) -> None:
    with pytest.raises(UserError) as raised, checking_input(on_one_rank=True, data_step=3):
        raise error
    assert str(raised.value) == " ".join(str(error).split())
    assert (raised.value.on_one_rank, raised.value.data_step) == (True, 3)


def _run_command(error: Exception, monkeypatch: pytest.MonkeyPatch) -> int:
    def fail(folder: str) -> None:
        raise error

    monkeypatch.setattr("fms_fsdp.tools.ckpt._step_folders", fail, raising=True)
    return commands.main(["ckpt", "verify", "--path=somewhere"])


@pytest.mark.parametrize("bug", BUGS[:3], ids=repr)
def test_a_bug_of_a_command_is_no_bad_input(
    bug: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(type(bug)):
        _run_command(bug, monkeypatch)


@pytest.mark.parametrize("error", FOR_THE_USER[-3:], ids=repr)
def test_a_file_that_a_command_cannot_use_is_told_in_one_line(
    error: Exception, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert _run_command(error, monkeypatch) == 2
    assert capsys.readouterr().err.count("\n") == 1


def test_a_bug_in_a_users_stream_ends_with_a_traceback_in_the_log_too(tmp_path: Path) -> None:
    run = tmp_path / "run"
    flags = [*cli.TINY[:1], *cli.TINY[2:], "--num_steps=4", f"--output_dir={run}", BROKEN_STREAM]
    ended = cli.run(*flags, "--data_kwargs=kind=bug,step=2")
    log = (run / "log.txt").read_text()
    assert ended.returncode == 1
    for text in (ended.stderr, log):
        assert "Traceback" in text and f"ValueError: {BUG}" in text and "broken_stream.py" in text
    assert "error:" not in re.sub(r"\w+Error:", "", ended.stderr)
    assert cli.status(run)["status"] == "failed" and BUG in cli.status(run)["reason"]


def test_bad_data_of_a_users_stream_are_one_line_with_their_step(tmp_path: Path) -> None:
    run = tmp_path / "run"
    flags = [*cli.TINY[:1], *cli.TINY[2:], "--num_steps=4", f"--output_dir={run}", BROKEN_STREAM]
    ended = cli.run(*flags, "--data_kwargs=kind=bad_data,step=2")
    assert ended.returncode == 2 and "Traceback" not in ended.stderr
    assert "error: record (7) of a.bin is cut; restore it" in ended.stderr
    assert (cli.status(run)["status"], cli.status(run)["data_step"]) == ("bad_input", 2)


@pytest.mark.parametrize(
    "name", ["", ":", "os:", ":getcwd", ".os:getcwd", "os.path", "os:getcwd.x", "o s:x"]
)
def test_a_name_that_is_no_function_is_refused(name: str) -> None:
    with pytest.raises(UserError, match="must be importable as module:function"):
        import_function(name, "--model_builder")


@pytest.mark.parametrize("name", ["no_such_module:build", "os:no_such_function", "os:environ"])
def test_a_module_without_such_a_function_is_refused(name: str) -> None:
    with pytest.raises(UserError, match="must be importable as module:function; "):
        import_function(name, "--model_builder")


def test_what_a_users_module_raises_is_not_taken_for_a_wrong_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "raises_at_import.py").write_text("int('x')\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ValueError, match="invalid literal") as raised:
        import_function("raises_at_import:build", "--model_builder")
    assert not isinstance(raised.value, UserError)
    assert import_function("os:getcwd", "--model_builder") is os.getcwd
