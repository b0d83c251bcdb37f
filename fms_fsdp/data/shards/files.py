"""Access to files: size, ranged reads, listing. The only code of the stream that touches storage.

`LocalFiles` reads with `os.pread`, which releases the interpreter lock, through a bounded set of open
descriptors. Another storage is another class with the same methods (extras/remote_files.py); nothing else
changes.
"""

from __future__ import annotations

import errno
import os
import weakref
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias

from fms_fsdp.data.order.permute import I64
from fms_fsdp.data.shards.lru import Lru
from fms_fsdp.safe_names import open_regular

if TYPE_CHECKING:
    from fms_fsdp.extras.remote_files import RemoteFiles

MAX_OPEN_FILES = 48
Files: TypeAlias = "LocalFiles | RemoteFiles"


@dataclass
class StorageCounters:
    """What was asked of the storage so far: reads sent and sent again, bytes received, seconds that readers
    waited."""

    requests: int = 0
    retries: int = 0
    num_bytes: int = 0
    stall_s: float = 0.0

    def __str__(self) -> str:
        return (
            f"{self.requests} requests ({self.retries} retries), {self.num_bytes:,} bytes, "
            f"{self.stall_s:.1f} s waited"
        )


class LocalFiles:
    """Files below a local folder, with at most `max_open` descriptors open at a time. Paths are relative to
    `root`. Errors are OSError.

    `counters`: what an object store was asked. `num_threads`: that may use one instance at a time, and read
    the faster for it. Can be pickled, for another process: it has the same files there, and looks at none of
    them to open.
    """

    counters: StorageCounters | None = None
    # several only wait for one another where files are in the page cache: three times as long (measured)
    num_threads = 1

    def __init__(self, root: str, max_open: int = MAX_OPEN_FILES) -> None:
        self.root, self._max_open = root, max_open
        self._open: Lru[str, int] = Lru(max_open, on_evict=os.close)
        weakref.finalize(self, self._open.clear)

    def walk(self, folder: str) -> Iterator[str]:
        """Yields the path of every file below `folder`, following links, in no particular order."""
        yield from self._walk(folder, (os.path.realpath(os.path.join(self.root, folder)),))

    def _walk(self, folder: str, parents: tuple[str, ...]) -> Iterator[str]:
        with os.scandir(os.path.join(self.root, folder)) as entries:
            for entry in entries:
                path = f"{folder}/{entry.name}" if folder else entry.name
                if entry.name.startswith("."):
                    continue
                try:
                    is_folder = entry.is_dir()
                except OSError as error:  # a link to itself: whoever opens it gets the error
                    if error.errno != errno.ELOOP:
                        raise
                    is_folder = False
                if not is_folder:
                    yield path
                    continue
                real = os.path.realpath(entry.path)
                if real not in parents:  # a link to a folder above would never end
                    yield from self._walk(path, (*parents, real))

    def size(self, path: str) -> int:
        """Returns the size of a file in bytes."""
        return os.fstat(self._descriptor(path)).st_size

    def pread(self, path: str, num_bytes: int, offset: int) -> bytes:
        """Returns up to `num_bytes` bytes at `offset`: fewer at the end of the file."""
        return os.pread(self._open.get(path) or self._descriptor(path), num_bytes, offset)

    def prefetch(self, path: str, offsets: I64, sizes: I64) -> None:
        """Says which ranges will be read soon, those at negative offsets from the end; returns at once,
        raises nothing. Of local files the page cache reads ahead."""

    def clone(self) -> LocalFiles:
        """Returns access to the same files for another thread."""
        return LocalFiles(self.root, self._max_open)

    def __reduce__(self) -> tuple[Any, ...]:
        return LocalFiles, (self.root, self._max_open)

    def close(self) -> None:
        """Closes what is open; later reads open it again."""
        self._open.clear()

    def _descriptor(self, path: str) -> int:
        descriptor = self._open.get(path)
        if descriptor is None:
            descriptor = self._open.put(path, open_regular(os.path.join(self.root, path)))
        return descriptor
