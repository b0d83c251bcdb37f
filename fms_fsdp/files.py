"""Files and folders that a reader sees complete or not at all, and names of files from other files.

Network and FUSE file systems lack some operations (sync of folders, rename over a file, mmap, a
size). Without them a write still ends well, and one note says what is missing.

Anyone may have written a file that names others: such a name is used below its own folder or not at
all, and opening it never waits. Links on the disk are followed, because the user made them.
Standard library only.
"""

from __future__ import annotations

import errno
import fcntl
import json
import math
import mmap
import os
import re
import shutil
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from fms_fsdp.errors import StorageError, UserError, is_absent, note_once

# A file system answers with one of these codes if it lacks the operation. EINVAL is among them:
# fsync of a folder has it on CIFS and gocryptfs.
UNSUPPORTED = {errno.EINVAL, errno.EOPNOTSUPP, errno.ENOSYS}

# ASCII and Latin-1 controls, lone surrogates, the two separators that end a line
_UNPRINTABLE = re.compile("[\x00-\x1f\x7f-\x9f\ud800-\udfff\u2028\u2029]")


def write_atomically(path: Path, content: str | bytes, *, sync: bool = False) -> None:
    """Replaces the file in one step. `sync`: a power failure leaves the old or the new content, complete.

    Raises:
        OSError: the folder cannot be written, or the disk is full; the old file stays.
    """
    if isinstance(content, str):
        content = content.encode()
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    path.parent.mkdir(parents=True, exist_ok=True)
    try:
        with open(temporary, "wb") as file:
            file.write(content)
            if sync:
                file.flush()
                sync_to_disk(file.fileno(), temporary)
        replace_file(temporary, path)
    except OSError:
        temporary.unlink(missing_ok=True)
        raise


def sync_to_disk(descriptor: int, path: Path) -> None:
    """Waits until an open file or folder is on disk, if its file system can sync such a thing.

    Raises:
        OSError: the content could not be written.
    """
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in UNSUPPORTED:
            raise
        # Nothing was lost: the system writes the content later, as it does without fsync. To fail
        # here would mean that no checkpoint is ever saved.
        kind = "folders" if path.is_dir() else "files"
        note_once(
            f"the file system cannot sync {kind} ({error.strerror}): "
            "a power failure may lose what was written last"
        )


def sync_folder(folder: Path) -> None:
    """Waits until the names in a folder are on disk; see `sync_to_disk`."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        sync_to_disk(descriptor, folder)
    finally:
        os.close(descriptor)


def replace_file(temporary: Path, path: Path) -> None:
    """Renames a file over another one, in one step if the file system can.

    Raises:
        OSError: it cannot be renamed.
    """
    try:
        os.replace(temporary, path)
    except FileExistsError:  # as of file systems that cannot rename over a file
        note_once(
            "the file system cannot replace a file in one step: a process that is killed meanwhile "
            "leaves none"
        )
        path.unlink()
        os.rename(temporary, path)


def free_bytes(folder: str | os.PathLike[str]) -> int | None:
    """Returns the free space for a new file; None if the file system reports no size, as some of FUSE."""
    stats = os.statvfs(folder)
    if not stats.f_blocks:
        return None
    return stats.f_bavail * stats.f_frsize


def map_or_read(path: str | os.PathLike[str]) -> mmap.mmap | bytes:
    """Returns the content of a file, mapped if the file system can map files."""
    with open(path, "rb") as file:
        try:
            if os.fstat(file.fileno()).st_size:  # an empty file cannot be mapped
                return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        except OSError as error:
            if error.errno not in {errno.ENODEV, *UNSUPPORTED}:
                raise
        return file.read()


def read_json(path: Path) -> dict[str, Any]:
    """Returns the object in a JSON file; {} if the file is missing or contains no JSON object.

    Raises:
        OSError: the file cannot be read, which does not mean that it is missing.
    """
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        if is_absent(error):
            return {}
        raise
    except (ValueError, RecursionError):
        return {}
    return content if isinstance(content, dict) else {}


def load_unique_json(text: str) -> Any:
    """Returns the content of JSON that somebody wrote by hand.

    Raises:
        ValueError: it is not JSON, or an object has a name twice, of which `json.loads` takes the last.
    """

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        content = dict[str, Any]()
        for name, value in pairs:
            if name in content:
                raise ValueError(f"{name} is set twice")
            content[name] = value
        return content

    return json.loads(text, object_pairs_hook=unique)


def read_json_object(path: Path, *, fix: str = "download it again") -> dict[str, Any]:
    """Returns the object in a JSON file that the user chose; errors end with `fix`.

    Raises:
        UserError: the file cannot be read, or has no object.
    """
    try:
        content = json.loads(path.read_bytes())
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error.strerror}; {fix}") from None
    except (ValueError, RecursionError) as error:
        raise UserError(f"{path} is not JSON: {error}; {fix}") from None
    if not isinstance(content, dict):
        kind = type(content).__name__
        raise UserError(f"{path} must hold an object, not a {kind}; {fix}")
    return content


def finite_json(value: Any) -> Any:
    """Returns JSON values with None in place of NaN and infinity, which JSON does not have."""
    if isinstance(value, dict):
        return {key: finite_json(part) for key, part in value.items()}
    if isinstance(value, list | tuple):
        return [finite_json(part) for part in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value


def write_json(path: Path, content: Any) -> None:
    """Writes indented JSON, atomically and synced to disk."""
    write_atomically(path, json.dumps(content, indent=1) + "\n", sync=True)


def is_folder(path: str | os.PathLike[str]) -> bool:
    """Returns whether a folder is there.

    os.path.isdir, and Path.is_dir from Python 3.14, also return False if the storage fails: a run
    would start from scratch instead of resuming.

    Raises:
        OSError: the storage does not answer, or the path may not be searched.
    """
    return stat.S_ISDIR(_mode(path))


def is_file(path: str | os.PathLike[str]) -> bool:
    """Returns whether a regular file is there; see `is_folder`."""
    return stat.S_ISREG(_mode(path))


def exists(path: str | os.PathLike[str]) -> bool:
    """Returns whether a file or folder is there; see `is_folder`."""
    return _mode(path) != 0


def _mode(path: str | os.PathLike[str]) -> int:
    """Returns the mode of a file or folder; 0 if there is none."""
    try:
        return os.stat(path).st_mode
    except ValueError:  # a null character
        return 0
    except OSError as error:
        if is_absent(error):
            return 0
        raise


def safe_name(name: object, named_in: str, *, folders: bool = False) -> str:
    """Returns a name from the file `named_in`, if it leads below a folder; with `folders` it may contain "/".

    Raises:
        UserError: it leads elsewhere; the message names `named_in`.
    """
    if not isinstance(name, str) or not name:
        rule = "must be a text that is not empty"
    elif _UNPRINTABLE.search(name):
        rule = "must hold no control character"
    elif name.startswith("/") or (not folders and "/" in name):
        rule = "must be a relative path" if folders else "must be a bare name without '/'"
    elif ".." in name.split("/") or name == ".":
        rule = "must not lead out of the folder"
    else:
        return name
    raise UserError(
        f"{named_in} names a file ({shown_name(name)}) that {rule}; correct or remove the entry"
    )


def has_control_character(text: str) -> bool:
    """Returns whether a text can break a line of a log or move the cursor of a terminal."""
    return _UNPRINTABLE.search(text) is not None


def shown_name(name: object) -> str:
    """Returns a name of any origin as one short line of ASCII."""
    text = ascii(name)
    if len(text) > 80:
        return f"{text[:76]}…{text[-1]}"  # the last one is the quote
    return text


def open_regular(path: str | os.PathLike[str]) -> int:
    """Returns a descriptor to read a regular file; a pipe or a device is rejected at once.

    Raises:
        OSError: it is not a regular file, or cannot be read.
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise StorageError(f"{os.fspath(path)} must be a regular file; remove what stands there")
    return descriptor


def check_output_is_new(path: Path) -> None:
    """Raises UserError if the folder that --output names exists."""
    if path.exists():
        raise UserError(f"--output ({path}) must not exist; choose another, or remove it")


@contextmanager
def write_folder(path: Path) -> Iterator[Path]:
    """Yields a folder next to `path` that gets its name at the end, on disk, or is removed on an error.

    The remains of a killed process are removed first.

    Raises:
        UserError: another process writes this folder.
    """
    partial = path.with_name(f".{path.name}.partial")
    partial.mkdir(parents=True, exist_ok=True)
    with _locked_folder(partial, path):
        check_output_is_new(path)  # another export may have ended before the lock was free
        for child in partial.iterdir():
            if child.is_dir():
                shutil.rmtree(child)
            else:
                child.unlink()
        try:
            yield partial
            _sync_tree(partial)  # a power failure must not leave a complete name with empty files
            partial.rename(path)
            sync_folder(path.parent)
        except BaseException:
            shutil.rmtree(partial, ignore_errors=True)
            raise


def _sync_tree(root: Path) -> None:
    """Waits until the files below a folder, and their names, are on disk."""

    def fail(error: OSError) -> None:
        raise error  # os.walk would leave the folder out

    for folder, _, names in os.walk(root, onerror=fail):
        for name in names:
            path = Path(folder, name)
            with open(path, "rb") as file:
                sync_to_disk(file.fileno(), path)
        sync_folder(Path(folder))


@contextmanager
def _locked_folder(partial: Path, path: Path) -> Iterator[None]:
    """Locks the folder itself, which leaves no file in it; the lock ends with the process.

    A file system without locks protects nothing.
    """
    descriptor = os.open(partial, os.O_RDONLY | os.O_DIRECTORY)
    try:
        is_locked = True
        with suppress(OSError):
            is_locked = try_lock(descriptor)
        if not is_locked:
            raise UserError(
                f"--output ({path}) is being written by another export; wait for it, or choose "
                "another folder"
            )
        yield
    finally:
        os.close(descriptor)


def try_lock(descriptor: int) -> bool:
    """Locks an open file or folder; returns False if another process holds the lock.

    Raises:
        OSError: the file system has no locks, or fails.
    """
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        # CIFS says EACCES, not EAGAIN: to go on without the lock would mean two writers.
        if error.errno in (errno.EAGAIN, errno.EACCES):
            return False
        raise
    return True
