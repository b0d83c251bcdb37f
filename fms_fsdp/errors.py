"""Errors of one line for the user: a run is rejected or fails. Standard library only."""

from __future__ import annotations

import errno
import logging
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cache

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
