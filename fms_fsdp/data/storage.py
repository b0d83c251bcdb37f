"""Files in a folder, listed once and read in ranges.

    sizes                    ──> names of all files, from the folders alone
    size(path)               ──> of one file, when it is opened
    read(path, size, offset) ──> pread; opened again and retried if the storage fails

object_store.py reads those of s3, gs and az.
"""

from __future__ import annotations

import errno
import logging
import os
import resource
import stat
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any, TypeVar

from fms_fsdp.config.values import counted
from fms_fsdp.data.shards import Shard
from fms_fsdp.errors import (
    MissingInput,
    StorageError,
    UserError,
    is_storage_failure,
    note_once,
    read_failed,
)
from fms_fsdp.files import is_folder, open_regular

T = TypeVar("T")
Result = TypeVar("Result")

logger = logging.getLogger(__name__)
NUM_LOCAL_TRIES = 6  # 8 s: a server of NFS that is restarted, or moves, answers again in seconds
# This process or machine lacks descriptors or memory, or the file is in use: it may be valid.
SHORTAGES = {errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.EAGAIN, errno.EINTR, errno.EBUSY}
NUM_THREADS = 16  # a call to a parallel file system takes milliseconds, in which others can run
PROGRESS_S = 10.0
LOST_AND_FOUND = "lost+found"  # of the file system, at the root of a disk; only root may read it


@dataclass(frozen=True)
class Listing:
    """The files below a folder, without hidden ones.

    sizes   by path, in order; None for a local file, because its size takes a call per file
    links   the paths that are symbolic links
    """

    sizes: dict[str, int | None]
    links: frozenset[str] = frozenset()

    def below(self, folder: str) -> Listing:
        """Returns the files in a subfolder."""
        start = f"{folder}/"
        sizes = {
            path.removeprefix(start): size
            for path, size in self.sizes.items()
            if path.startswith(start)
        }
        links = {path.removeprefix(start) for path in self.links if path.startswith(start)}
        return Listing(sizes, frozenset(links))


class Storage:
    """The files in `data_path`. Reads may come from several threads.

    The files are listed when `sizes` is first read, unless there is a `listing`. Unpickled in
    another process, it opens the same files at `open` or the first read, without listing them.
    """

    is_remote = False

    def __init__(self, data_path: str, listing: Listing | None = None) -> None:
        """Opens the folder, unless it is listed already.

        Raises:
            UserError: the folder does not exist.
            ReadFailed: a local storage does not answer.
        """
        self.data_path = data_path
        self.root = data_path  # for messages, which must not show the secrets of an address
        if "://" in data_path:
            scheme, _, address = data_path.partition("?")[0].partition("://")
            host, _, _ = address.partition("/")
            if ":" in host or "@" in host:  # KEY:SECRET@HOST; a secret may contain "/"
                address = address.rpartition("@")[2]
            self.root = f"{scheme}://{address}"
        self._open = lru_cache(max_open_files())(self._open_file)
        if listing is not None:
            self.listing = listing
        else:
            self.open()

    def open(self) -> None:
        """Opens the folder, which another node may lack.

        Raises:
            UserError: the folder does not exist.
            ReadFailed: a local storage does not answer.
        """
        self._opened  # noqa: B018

    @cached_property
    def _opened(self) -> tuple[Any, str]:
        with self._errors_named():
            return _retried(self._open_filesystem, self.root)

    @property
    def _filesystem(self) -> Any:
        return self._opened[0]

    @property
    def _folder(self) -> str:
        return self._opened[1]

    @cached_property
    def listing(self) -> Listing:
        """The files, listed at the first use.

        Raises:
            UserError: the folder does not exist, or cannot be listed.
            ReadFailed: a local storage does not answer.
        """
        with self._errors_named():
            return _retried(self._list, self.root)

    @property
    def is_listed(self) -> bool:
        return "listing" in vars(self)

    @property
    def sizes(self) -> dict[str, int | None]:
        """The paths of all files, in order; see `Listing`. For the size of a file, call `size`."""
        return self.listing.sizes

    @contextmanager
    def _errors_named(self) -> Iterator[None]:
        try:
            yield
        except UserError:
            raise
        except (OSError, ValueError) as error:
            # Errors of pyarrow repeat the address, which may contain a secret.
            own, shown = (path.partition("://")[2] for path in (self.data_path, self.root))
            reason = str(error).replace(own, shown) if own else str(error)
            reason = " ".join(reason.split())
            if isinstance(error, FileNotFoundError) or "NO_SUCH_BUCKET" in reason:
                missing = f"--data_path={self.root} does not exist; correct the path"
                raise MissingInput(missing) from error
            raise StorageError(
                f"--data_path={self.root} cannot be listed: {reason}; check credentials and network"
            ) from error

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.data_path, self.listing)

    def size(self, path: str) -> int:
        """Returns the size of a file, of a local one as it is now.

        Raises:
            ReadFailed: the storage does not answer.
            OSError: the file does not exist, or cannot be opened.
        """

        def read_size() -> int:
            file = self._open(path)  # a name keeps the file open if other threads fill the cache
            return os.fstat(file.descriptor).st_size

        return self._retried_read(read_size, path)

    def read(self, path: str, size: int, offset: int) -> bytes:
        """Returns `size` bytes at `offset`, fewer at the end of the file.

        Raises:
            ReadFailed: the storage does not answer.
            OSError: the file cannot be read.
        """

        def read_range() -> bytes:
            file = self._open(path)
            return read_range_of(file.descriptor, size, offset)

        return self._retried_read(read_range, path)

    def _retried_read(self, read: Callable[[], T], path: str) -> T:
        # A stale handle stays stale: a further try opens the file again.
        return _retried(read, f"{self.root}/{path}", before_retry=self._open.cache_clear)

    def prefetch(self, path: str, ranges: Iterable[tuple[int, int]]) -> None:
        """Starts to fetch the byte ranges [start, stop); a local file is read when it is needed."""

    def prefetch_ends(self, path: str) -> None:
        """Starts to fetch the schema and the footer of a shard that will be opened soon."""

    def real_paths(self, paths: Iterable[str]) -> dict[str, str]:
        """Returns the path of each file without symbolic links.

        Resolves only the folders, and the files that are links: a call per file would take minutes
        for a large corpus on NFS.
        """
        parts = {path: f"{self._folder}/{path}".rpartition("/") for path in paths}
        folders = sorted({folder for folder, _, _ in parts.values()})
        real_folders = dict(zip(folders, in_threads(os.path.realpath, folders), strict=True))
        found = {
            path: f"{real_folders[folder]}/{name}" for path, (folder, _, name) in parts.items()
        }
        links = [path for path in found if path in self.listing.links]
        targets = in_threads(os.path.realpath, [found[path] for path in links])
        return found | dict(zip(links, targets, strict=True))

    def open_shard(self, path: str, delimiter: int = 0) -> Shard:
        """Opens a shard; see `shards.Shard`."""
        return Shard(self, path, delimiter)

    def close(self) -> None:
        """Closes open files; a later read opens them again."""
        self._open.cache_clear()

    def _open_file(self, path: str) -> Any:
        return LocalFile(open_regular(f"{self._folder}/{path}"))

    def _open_filesystem(self) -> tuple[Any, str]:
        """Returns the folder, and the pyarrow FileSystem of an object store that it is in."""
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
        return None, folder

    def _list(self) -> Listing:
        return list_files(self._folder)


def list_files(root: str) -> Listing:
    """Returns the regular files below a folder, also those behind symbolic links.

    A folder gives the names and types of its entries, so only links take a call each. Folders and
    links are read by threads.

    Raises:
        OSError: a folder cannot be read.
    """
    paths = list[str]()  # also of the folders that threads are reading, for the progress
    links = list[str]()

    def read_folder(folder: str) -> tuple[list[str], list[str]]:
        """Adds the files of a folder to `paths`; returns its folders and links."""
        inner = list[str]()
        linked = list[str]()
        start = f"{folder}/" if folder else ""
        try:
            with os.scandir(f"{root}/{folder}") as entries:
                for entry in entries:
                    path = start + entry.name
                    if entry.name.startswith(".") or path == LOST_AND_FOUND:
                        continue
                    elif entry.is_symlink():
                        linked.append(path)
                    elif entry.is_dir():
                        inner.append(path)
                    elif entry.is_file():
                        paths.append(path)
        except FileNotFoundError:
            if not folder:
                raise
        return inner, linked

    with reporting_progress(lambda: f"listing {root}: {counted(len(paths), 'file')}"):
        # With each folder: its real path, after those of the folders with the links that led to it.
        folders: list[tuple[str, tuple[str, ...]]] = [("", (os.path.realpath(root),))]
        while folders:
            deeper = list[tuple[str, tuple[str, ...]]]()
            linked = list[tuple[str, tuple[str, ...]]]()
            found = in_threads(read_folder, [folder for folder, _ in folders])
            for (folder, reals), (inner, inner_links) in zip(folders, found, strict=True):
                for path in inner:
                    real = f"{reals[-1]}/{path.removeprefix(f'{folder}/')}"
                    deeper.append((path, (*reals[:-1], real)))
                linked += [(path, reals) for path in inner_links]
            targets = in_threads(_target, [f"{root}/{path}" for path, _ in linked])
            for (path, reals), (mode, target) in zip(linked, targets, strict=True):
                if stat.S_ISREG(mode):
                    links.append(path)
                if not stat.S_ISDIR(mode):
                    continue
                if any(os.path.commonpath([real, target]) == target for real in reals):
                    note_once(f"{root}/{path} skipped, because the link leads to a folder above it")
                    continue
                deeper.append((path, (*reals, target)))
            folders = deeper
    return Listing(dict.fromkeys(sorted([*paths, *links])), frozenset(links))


def _target(link: str) -> tuple[int, str]:
    """Returns the mode of the file or folder that a link leads to, 0 if it leads nowhere; and the
    real path of a folder."""
    try:
        mode = os.stat(link).st_mode
    except (FileNotFoundError, NotADirectoryError):
        return 0, ""
    except OSError as error:
        if error.errno == errno.ELOOP:
            return 0, ""
        raise
    return mode, os.path.realpath(link) if stat.S_ISDIR(mode) else ""


def in_threads(function: Callable[[T], Result], values: Iterable[T]) -> list[Result]:
    """Returns `function` of each value, computed by threads that wait for the storage at once."""
    with ThreadPoolExecutor(NUM_THREADS, "listing") as pool:
        return list(pool.map(function, values))


@contextmanager
def reporting_progress(text: Callable[[], str]) -> Iterator[None]:
    """Logs `text()` with the time while the context lasts: after 10, 20, 40, … seconds."""
    has_ended = threading.Event()

    def report() -> None:
        begin = time.monotonic()
        seconds = PROGRESS_S
        while not has_ended.wait(begin + seconds - time.monotonic()):
            note_once(f"{text()} after {seconds:g} s")
            seconds *= 2

    thread = threading.Thread(target=report, name="progress", daemon=True)
    thread.start()
    try:
        yield
    finally:
        has_ended.set()
        thread.join()


def _retried(
    read: Callable[[], T], name: str, *, before_retry: Callable[[], object] = lambda: None
) -> T:
    """Returns `read()`, and tries for some seconds while the storage does not answer, or the process
    lacks what it needs to read.

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
            if not is_storage_failure(error) and error.errno not in SHORTAGES:
                raise
            failure = read_failed(name, error.strerror)
            text = "try %d of %d failed: %s: %s"
            logger.warning(text, attempt + 1, NUM_LOCAL_TRIES, name, error.strerror)
    raise failure


def read_range_of(descriptor: int, size: int, offset: int) -> bytes:
    """Returns `size` bytes at `offset`, fewer at the end of the file only: one call may return fewer
    on some file systems (FUSE with direct_io), and never returns more than 2 GiB."""
    data = os.pread(descriptor, size, offset)
    while 0 < len(data) < size:
        more = os.pread(descriptor, size - len(data), offset + len(data))
        if not more:
            break
        data += more
    return data


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
