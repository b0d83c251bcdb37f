"""Files in a folder, listed once and read in ranges.

    read(path, size, offset) ──> pread; opened again and retried if the storage fails

object_store.py reads those of s3, gs and az.
"""

from __future__ import annotations

import logging
import os
import resource
import time
from collections.abc import Callable, Iterable
from functools import lru_cache, partial
from typing import Any, TypeVar
from urllib.parse import urlsplit

from fms_fsdp.data.shards import Shard
from fms_fsdp.errors import (
    MissingInput,
    StorageError,
    UserError,
    is_storage_failure,
    read_failed,
)
from fms_fsdp.files import is_folder, open_regular

T = TypeVar("T")

logger = logging.getLogger(__name__)
NUM_LOCAL_TRIES = 6  # 8 s: a server of NFS that is restarted, or moves, answers again in seconds


class Storage:
    """The files in `data_path` and their `sizes`. Reads may come from several threads.

    Unpickled in another process, it opens the same files without listing them again.
    """

    is_remote = False

    def __init__(self, data_path: str, sizes: dict[str, int] | None = None) -> None:
        """Lists the files.

        Raises:
            UserError: the folder does not exist, or cannot be listed.
            ReadFailed: a local storage does not answer.
        """
        self.data_path = data_path
        self.root = data_path  # for messages, which must not show the secrets of an address
        if "://" in data_path:
            scheme, host, folder = urlsplit(data_path)[:3]
            self.root = f"{scheme}://{host.rpartition('@')[2]}{folder}"
        try:
            self._filesystem, self._folder = _retried(self._open_filesystem, self.root)
            self.sizes = _retried(self._list, self.root) if sizes is None else sizes
        except UserError:
            raise
        except (OSError, ValueError) as error:
            reason = " ".join(str(error).split())
            if isinstance(error, FileNotFoundError) or "NO_SUCH_BUCKET" in reason:
                missing = f"--data_path={self.root} does not exist; correct the path"
                raise MissingInput(missing) from error
            raise StorageError(
                f"--data_path={self.root} cannot be listed: {reason}; check credentials and network"
            ) from error
        self._open = lru_cache(max_open_files())(self._open_file)

    def __reduce__(self) -> tuple[Any, ...]:
        return open_storage, (self.data_path, self.sizes)

    def read(self, path: str, size: int, offset: int) -> bytes:
        """Returns `size` bytes at `offset`, fewer at the end of the file.

        Raises:
            ReadFailed: the storage does not answer.
            OSError: the file cannot be read.
        """
        # A stale handle stays stale: a further try opens the file again.
        return _retried(
            lambda: os.pread(self._open(path).descriptor, size, offset),
            f"{self.root}/{path}",
            before_retry=self._open.cache_clear,
        )

    def prefetch(self, path: str, ranges: Iterable[tuple[int, int]]) -> None:
        """Starts to fetch the byte ranges [start, stop); a local file is read when it is needed."""

    def prefetch_ends(self, path: str) -> None:
        """Starts to fetch the schema and the footer of a shard that will be opened soon."""
        size = self.sizes.get(path, 0)
        if size:
            self.prefetch(path, [(0, 1), (size - 1, size)])

    def real_paths(self, paths: Iterable[str]) -> dict[str, str]:
        """Returns the path of each file without symbolic links.

        Lists each folder once, and resolves only the links in it: a call per file would take
        minutes for a large corpus on NFS.
        """
        folders = dict[str, tuple[str, set[str]]]()  # real path of a folder, names of links in it
        found = {}
        for path in paths:
            folder, _, name = f"{self._folder}/{path}".rpartition("/")
            if folder not in folders:
                folders[folder] = _retried(partial(_links_in, folder), self.root)
            real_folder, links = folders[folder]
            real = f"{real_folder}/{name}"
            found[path] = os.path.realpath(real) if name in links else real
        return found

    def open_shard(self, path: str, delimiter: int = 0) -> Shard:
        """Opens a shard; see `shards.Shard`."""
        return Shard(self, path, delimiter)

    def close(self) -> None:
        """Closes open files; a later read opens them again."""
        self._open.cache_clear()

    def _open_file(self, path: str) -> Any:
        if path not in self.sizes:
            raise FileNotFoundError(f"{path} is not in {self.root}")
        return self._open_listed(f"{self._folder}/{path}")

    def _open_listed(self, path: str) -> Any:
        return LocalFile(open_regular(path))

    def _open_filesystem(self) -> tuple[Any, str]:
        """Returns a pyarrow FileSystem, which lists the files, and the folder in it."""
        from pyarrow import fs

        if not self.data_path:
            raise MissingInput(
                "--data_path is missing; set it to the --output of `python -m fms_fsdp prepare`, or "
                "set --use_dummy_dataset=True"
            )
        folder = os.path.abspath(os.path.expanduser(self.data_path))
        if not is_folder(folder):
            raise MissingInput(
                f"--data_path={self.data_path} is not a folder; make one with `python -m fms_fsdp "
                "prepare --input=FILES --output=FOLDER`, or set --use_dummy_dataset=True"
            )
        return fs.LocalFileSystem(), folder

    def _list(self) -> dict[str, int]:
        from pyarrow import fs

        found = self._filesystem.get_file_info(fs.FileSelector(self._folder, recursive=True))
        files = {
            i.path[len(self._folder) + 1 :]: i.size for i in found if i.type == fs.FileType.File
        }
        return {path: size for path, size in sorted(files.items()) if "/." not in f"/{path}"}


def _links_in(folder: str) -> tuple[str, set[str]]:
    """Returns the real path of a folder, and the names of the symbolic links in it."""
    real = os.path.realpath(folder)
    try:
        with os.scandir(real) as entries:
            return real, {entry.name for entry in entries if entry.is_symlink()}
    except (FileNotFoundError, NotADirectoryError):  # only the counts file lists its shards
        return real, set()


def _retried(
    read: Callable[[], T], name: str, *, before_retry: Callable[[], object] = lambda: None
) -> T:
    """Returns `read()`, and tries for some seconds while the storage does not answer.

    Raises:
        ReadFailed: it did not answer in time. OSError: another error, at once.
    """
    for attempt in range(NUM_LOCAL_TRIES):
        if attempt:
            time.sleep(0.25 * 2 ** (attempt - 1))
            before_retry()
        try:
            return read()
        except OSError as error:
            if not is_storage_failure(error):
                raise
            failure = read_failed(name, error.strerror)
            text = "try %d of %d failed: %s: %s"
            logger.warning(text, attempt + 1, NUM_LOCAL_TRIES, name, error.strerror)
    raise failure


class LocalFile:
    """An open file, closed when it has left the cache and no read uses it any more."""

    def __init__(self, descriptor: int) -> None:
        self.descriptor = descriptor

    def __del__(self) -> None:
        os.close(self.descriptor)


def max_open_files() -> int:
    """Returns how many shards stay open: 256, or a quarter of the process's limit."""
    soft_limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return 256 if soft_limit < 0 else max(16, min(256, soft_limit // 4))


def open_storage(data_path: str, sizes: dict[str, int] | None = None) -> Storage:
    """Returns the files of a folder, or of an address such as s3://BUCKET/FOLDER.

    Raises:
        UserError: the folder does not exist, or cannot be listed.
        ReadFailed: a local storage does not answer.
    """
    if "://" not in data_path:
        return Storage(data_path, sizes)
    from fms_fsdp.data.object_store import ObjectStore

    return ObjectStore(data_path, sizes)
