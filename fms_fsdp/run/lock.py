"""One writer per folder: a lock that dies with its owner, wherever it runs. Standard library only.

A run locks its folder and its folder of checkpoints, by their real paths, without links and `..`.
"""

from __future__ import annotations

import fcntl
import os
import socket
import sys
import time
from collections.abc import Iterable
from functools import partial
from pathlib import Path
from typing import TextIO

from fms_fsdp.errors import UserError


def lock_folder(
    folder: Path, patience_s: float = 10.0, remedy: str = "stop that process, or choose another --run_name"
) -> TextIO:
    """Locks `folder/.lock` until the file that is returned is closed, or the process ends, however it ends.
    Waits `patience_s` for an owner that is about to end.

    On network file systems the lock holds between nodes (NFS 4, Lustre with -o flock, GPFS). A file system
    without locks guards nothing; a line on stderr says so.

    Raises:
        UserError: another process holds it.
    """
    file = open(folder / ".lock", "a+", opener=partial(os.open, mode=0o644))
    deadline = time.monotonic() + patience_s
    while True:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            break
        except BlockingIOError:
            if time.monotonic() > deadline:
                file.seek(0)
                owner = file.read().strip() or "another process"
                file.close()
                rule = f"must have one writer, and {owner} is writing there"
                raise UserError(f"folder ({folder}) {rule}; {remedy}") from None
            time.sleep(0.2)
        except OSError as error:
            print(f"{folder}: no lock against a second writer here ({error.strerror})", file=sys.stderr)
            break
    file.truncate(0)
    print(f"process {os.getpid()} on {socket.gethostname()}", file=file, flush=True)
    return file


_held: dict[Path, TextIO] = {}  # until the launch or the process ends


def lock_folders(folders: Iterable[Path], patience_s: float = 10.0) -> None:
    """Makes and locks the folders until `unlock_folders`, or the process ends. Folders that exist are locked
    first, so a refused launch makes nothing. A folder that this process has locked stays so.

    Raises:
        UserError: another process holds one of them, or one cannot be made.
    """
    real = {folder.resolve() for folder in folders} - _held.keys()
    for folder in sorted(real, key=lambda folder: (not folder.exists(), folder)):
        try:
            folder.mkdir(parents=True, exist_ok=True)
            _held[folder] = lock_folder(folder, patience_s)
        except OSError as error:
            raise UserError(
                f"folder ({folder}) must be one that can be made and written: {error.strerror}; choose "
                "another --output_dir"
            ) from error


def unlock_folders() -> None:
    """Gives back what `lock_folders` has locked: a launch is over, and its process may begin another one."""
    while _held:
        _held.popitem()[1].close()
