"""Errors of one line for the user: a run is rejected or fails. Standard library only."""

from __future__ import annotations

import errno
import importlib
import importlib.util
import logging
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from typing import Any, NoReturn

# how the user called the commands; empty where main_training.py or another script runs
_CALLED = os.path.basename(sys.argv[0].replace("/__main__.py", ""))
PROGRAM = {"fms-fsdp": "fms-fsdp", "fms_fsdp": "python -m fms_fsdp"}.get(_CALLED, "")
_PACKAGES = ("torch", "fire", "numpy", "pyarrow")  # without one of them no command works
FULL_DISK = {errno.ENOSPC, errno.EDQUOT}
# The path names nothing. After any other error, the file may be there.
_ABSENT = {errno.ENOENT, errno.ENOTDIR, errno.ELOOP, errno.ENAMETOOLONG}
_ABOUT_PATHS = {*_ABSENT, errno.EACCES, errno.EPERM, errno.EROFS, errno.EISDIR}
# The call, the kind of file, or the limits of this process are the reason, and not the storage.
_ABOUT_CALLS = {errno.EINVAL, errno.EBADF, errno.ESPIPE, errno.EEXIST, errno.ENOTEMPTY, errno.EXDEV}
_ABOUT_CALLS |= {errno.EFBIG, errno.EMLINK, errno.EBUSY, errno.ETXTBSY, errno.ENXIO, errno.ENODEV}
_ABOUT_CALLS |= {errno.EOPNOTSUPP, errno.ENOSYS, errno.ENOLCK, errno.EPIPE, errno.E2BIG}
_ABOUT_CALLS |= {errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.EAGAIN, errno.EINTR}
_ABOUT_CALLS |= {errno.ENOEXEC, errno.ECHILD, errno.ESRCH}


def is_installed(name: str) -> bool:
    """Returns whether a package can be imported.

    A folder of its name is not the package: wandb writes its files into a folder wandb.
    """
    spec = importlib.util.find_spec(name)
    return spec is not None and spec.origin is not None  # a folder without __init__.py has none


def check_installed() -> None:
    """Ends the process with one line, where a package is missing: mostly the environment is not active."""
    for name in _PACKAGES:
        if not is_installed(name):
            remedy = (
                "source .venv/bin/activate (bash scripts/train.sh makes it), or pip install -e ."
            )
            print(f"error: {sys.executable} has no package {name}; {remedy}", file=sys.stderr)
            sys.exit(2)


class UserError(ValueError):
    """An error that the user can correct; the text is one line: --flag=value constraint; fix. The program shows
    one line for a UserError and for a known I/O error (`is_for_user`). Any other error is a bug, and has a
    traceback.

    `on_one_rank`: only this rank knows the error (it cannot read a shard), so this rank reports the
    error. `data_step`: the step whose data are wrong; the next attempt checks them first.
    """

    def __init__(
        self, text: str, *, on_one_rank: bool = False, data_step: int | None = None
    ) -> None:
        super().__init__(" ".join(text.split()))
        self.on_one_rank = on_one_rank
        self.data_step = data_step


class MissingInput(UserError, FileNotFoundError):
    """A file or folder that the user named and that is not there."""


class StorageError(UserError, OSError):
    """A storage that the user named and that gives a wrong answer or none."""


class RunFailed(Exception):
    """The run fails, and the code is not the reason: one line, exit status 1.

    `on_one_rank`: only this rank knows the reason (out of memory), so this rank reports the reason.
    """

    def __init__(self, text: str, *, on_one_rank: bool = False) -> None:
        super().__init__(text)
        self.on_one_rank = on_one_rank


class ReadFailed(RunFailed):
    """A storage did not answer, also not to further tries; see `read_failed`."""


def read_failed(name: object, reason: object, *, on_one_rank: bool = False) -> ReadFailed:
    """Returns the error for a file, or the like, of a storage that did not answer."""
    return ReadFailed(
        f"{name} cannot be read: {' '.join(str(reason).split())}; the file is not corrupt: "
        "repair the storage and start again",
        on_one_rank=on_one_rank,
    )


def raise_first(failures: Sequence[ReadFailed | None]) -> None:
    """Raises the error of the first rank that has one; `failures`: of all ranks, on every rank."""
    for rank, failure in enumerate(failures):
        if failure is None:
            continue
        if len(failures) == 1:
            raise ReadFailed(str(failure))
        raise ReadFailed(f"rank {rank}: {failure}")


def is_absent(error: OSError) -> bool:
    """Returns whether a path names nothing; another error leaves open whether the file is there."""
    return error.errno in _ABSENT


def is_storage_failure(error: BaseException) -> bool:
    """Returns whether a storage did not answer: its files may be valid, and a later read succeed.

    File systems have many codes for that (EIO, ESTALE, ESHUTDOWN, ECONNABORTED, EKEYEXPIRED, …), so
    these are all codes that say nothing about the path, the call, or a full disk.
    """
    if not isinstance(error, OSError) or error.errno is None:
        return False
    return error.errno not in (_ABOUT_PATHS | FULL_DISK | _ABOUT_CALLS)


def import_function(name: str, flag: str) -> Any:
    """Returns the user's function module:function, which a flag names.

    Raises:
        UserError: there is no such module or function. Errors of the module itself are not caught.
    """
    module, _, function = name.partition(":")
    rule = f"{flag}={name[:200]} must be importable as module:function"
    if not all(part.isidentifier() for part in (*module.split("."), function)):
        raise UserError(f"{rule}; name a module on PYTHONPATH and a function in it")
    try:
        imported = importlib.import_module(module)
    except ImportError as error:
        raise UserError(f"{rule}; {error}") from error
    if not callable(found := getattr(imported, function, None)):
        raise UserError(f"{rule}; module {module} has no function {function}")
    return found


def is_for_user(error: BaseException) -> bool:
    """Returns whether the user can correct the error: a UserError, a full disk, or a named file that is
    missing, forbidden or on a disk that cannot be written. Other errors, also of the system, are bugs."""
    if isinstance(error, UserError) or not isinstance(error, OSError):
        return isinstance(error, UserError)
    return error.errno in FULL_DISK or (error.errno in _ABOUT_PATHS and error.filename is not None)


@contextmanager
def checking_input(*, on_one_rank: bool = False, data_step: int | None = None) -> Iterator[None]:
    """Turns known I/O errors into UserError or ReadFailed, and notes in each who reports the error; other
    errors pass."""
    try:
        yield
    except UserError as error:
        error.on_one_rank |= on_one_rank
        error.data_step = error.data_step or data_step
        raise
    except ReadFailed as error:
        error.on_one_rank |= on_one_rank
        raise
    except OSError as error:
        if is_storage_failure(error):
            name = error.filename or "the data"
            raise read_failed(name, error.strerror, on_one_rank=on_one_rank) from error
        if not is_for_user(error):
            raise
        raise UserError(str(error), on_one_rank=on_one_rank, data_step=data_step) from error


@cache
def note_once(text: str) -> None:
    """Logs a note to the user once: in the log of a run (rank 0), or on stderr."""
    log = logging.getLogger("fms_fsdp")
    if log.handlers:
        log.info("note: %s", text)
    else:
        print(f"note: {text}", file=sys.stderr)


@contextmanager
def printing() -> Iterator[None]:
    """Lets a program that reads the output, such as `head`, stop early without an error here."""
    try:
        yield
        sys.stdout.flush()
    except BrokenPipeError as error:
        # Python uses this class for ESHUTDOWN as well, which a storage may answer for a file.
        if error.errno != errno.EPIPE or error.filename is not None:
            raise
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def env_rank() -> int:
    """Returns the rank of torchrun's variables; 0 if they are incomplete, so that the process reports it."""
    rank = env_int("RANK", 0)
    is_complete = {"MASTER_ADDR", "MASTER_PORT"} <= os.environ.keys()
    return rank if is_complete and rank < env_int("WORLD_SIZE", 0) else 0


def env_int(name: str, default: int) -> int:
    """Returns the number in an environment variable, the default if it has none; World.from_env
    rejects other texts."""
    text = os.environ.get(name, "")
    return int(text) if text.isdecimal() and len(text) < 7 else default


def print_and_end(text: str) -> NoReturn:
    """Prints `text` on rank 0 and ends the process with exit code 0, for flags such as --help."""
    if env_rank() == 0:
        with printing():
            print(text)
    raise SystemExit(0)
