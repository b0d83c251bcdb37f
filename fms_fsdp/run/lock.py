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
from pathlib import Path
from types import TracebackType


class FolderLock:
    """Holds `folder/.lock` while inside `with`, or from `take` until the process ends, however it ends.

    On network file systems the lock holds between nodes (NFS 4, Lustre with -o flock, GPFS). A file system
    without locks guards nothing; a line on stderr says so.
    """

    def __init__(
        self, folder: Path, patience_s: float = 10.0, remedy: str = "stop it, or choose another --run_name"
    ) -> None:
        self._folder, self._patience_s, self._remedy = folder, patience_s, remedy
        self._descriptor = -1

    def take(self) -> FolderLock:
        """Takes the lock; waits `patience_s` for an owner that is about to end.

        Raises:
            ValueError: another process holds it.
        """
        path = self._folder / ".lock"
        self._descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
        deadline = time.monotonic() + self._patience_s
        while True:
            try:
                fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > deadline:
                    owner = path.read_text().strip() or "another process"
                    self.release()
                    rule = f"must have one writer, and {owner} is writing there"
                    raise ValueError(f"folder ({self._folder}) {rule}; {self._remedy}") from None
                time.sleep(0.2)
            except OSError as error:
                print(
                    f"{self._folder}: no lock against a second writer here ({error.strerror})",
                    file=sys.stderr,
                )
                break
        os.ftruncate(self._descriptor, 0)
        os.pwrite(self._descriptor, f"process {os.getpid()} on {socket.gethostname()}\n".encode(), 0)
        return self

    def release(self) -> None:
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1

    def __enter__(self) -> FolderLock:
        return self.take()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.release()


_held: list[FolderLock] = []  # until the process ends


def lock_folders(folders: Iterable[Path], patience_s: float = 10.0) -> None:
    """Makes and locks the folders until the process ends. Folders that exist are locked first, so a refused
    launch makes nothing.

    Raises:
        ValueError: another process holds one of them, or one cannot be made.
    """
    resolved = dict.fromkeys(folder.resolve() for folder in folders)
    for folder in sorted(resolved, key=lambda folder: not folder.exists()):
        try:
            folder.mkdir(parents=True, exist_ok=True)
            _held.append(FolderLock(folder, patience_s).take())
        except OSError as error:
            raise ValueError(
                f"folder ({folder}) must be one that can be made and written: {error.strerror}; choose "
                "another --output_dir"
            ) from error
