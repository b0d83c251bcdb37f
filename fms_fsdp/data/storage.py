"""Files in a folder or an object store (s3, gs, az), listed and read in ranges through pyarrow.

    read(path, size, offset) ── local ──> pread; opened again and retried if the storage fails
                             └─ remote ─> pages of 256 KiB: from the cache, else fetched by 16 threads
    prefetch(path, ranges)   ── remote ─> the same pages, without waiting

Invariant: the bytes read depend on the stored bytes only. The cache of a store is one unlinked
temporary file.
"""

from __future__ import annotations

import logging
import os
import random
import resource
import shutil
import tempfile
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
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
SCHEMES = {"s3": "s3", "gs": "gs", "az": "abfs", "file": "file"}  # ours -> pyarrow's
PAGE = 1 << 18
CACHE_BYTES = 16 << 30

NUM_TRIES = 8
NUM_LOCAL_TRIES = 6  # 8 s: a server of NFS that is restarted, or moves, answers again in seconds


class Storage:
    """The files in `data_path` and their `sizes`. Reads may come from several threads.

    Unpickled in another process, it opens the same files without listing them again.
    """

    def __init__(self, data_path: str, sizes: dict[str, int] | None = None) -> None:
        """Lists the files.

        Raises:
            UserError: the folder does not exist, or cannot be listed.
            ReadFailed: a local storage does not answer.
        """
        scheme, host, folder = ("", "", data_path)
        if "://" in data_path:
            scheme, host, folder = urlsplit(data_path)[:3]
        self.data_path = data_path
        # without secrets, for messages
        self.root = f"{scheme}://{host.rpartition('@')[2]}{folder}" if scheme else folder
        try:
            self._filesystem, self._folder = _retried(
                lambda: _open_filesystem(data_path, scheme), self.root
            )
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
        self._pages, self.is_remote = PageCache(self._fetch) if scheme else None, bool(scheme)

    def __reduce__(self) -> tuple[Any, ...]:
        return Storage, (self.data_path, self.sizes)

    def read(self, path: str, size: int, offset: int) -> bytes:
        """Returns `size` bytes at `offset`, fewer at the end of the file.

        Raises:
            ReadFailed: the storage does not answer.
            OSError: the file cannot be read.
        """
        if self._pages is None:
            # A stale handle stays stale: a further try opens the file again.
            return _retried(
                lambda: os.pread(self._open(path).descriptor, size, offset),
                f"{self.root}/{path}",
                before_retry=self._open.cache_clear,
            )
        stop = min(offset + size, self.sizes[path])
        numbers = range(offset // PAGE, -(-stop // PAGE))
        whole = b"".join(self._pages.get([(path, number) for number in numbers]))
        return whole[offset % PAGE : offset % PAGE + stop - offset]

    def prefetch(self, path: str, ranges: Iterable[tuple[int, int]]) -> None:
        """Starts to fetch the byte ranges [start, stop), which will be read soon."""
        if self._pages is not None:
            numbers = {n for a, b in ranges for n in range(a // PAGE, -(-b // PAGE))}
            self._pages.start([(path, number) for number in sorted(numbers)])

    def prefetch_ends(self, path: str) -> None:
        """Starts to fetch the schema and the footer of a shard that will be opened soon."""
        size = self.sizes.get(path, 0)
        if size:
            self.prefetch(path, [(0, 1), (size - 1, size)])

    def real_paths(self, paths: Iterable[str]) -> dict[str, str]:
        """Returns the path of each file without symbolic links; an object store has none.

        Lists each folder once, and resolves only the links in it: a call per file would take
        minutes for a large corpus on NFS.
        """
        if self.is_remote and urlsplit(self.data_path).scheme != "file":
            return {path: path for path in paths}
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
        place = f"{self._folder}/{path}"
        if self.is_remote:
            return self._filesystem.open_input_file(place)
        return _LocalFile(open_regular(place))

    def _fetch(self, path: str, number: int) -> bytes:
        """Reads a page from the store, and retries with exponential backoff."""
        wanted = min(PAGE, self.sizes[path] - number * PAGE)
        name = f"{self.root}/{path}"
        for attempt in range(NUM_TRIES):
            try:
                data: bytes = self._open(path).read_at(wanted, number * PAGE)
                if len(data) == wanted:
                    return data
                # The object is shorter than its listing said: not a storage that does not answer.
                reason = f"received {len(data)} of {wanted} bytes at {number * PAGE}"
                error: Exception = StorageError(f"{name}: {reason}")
            except (FileNotFoundError, PermissionError):
                raise
            except OSError as caught:
                if "ACCESS_DENIED" in str(caught):
                    raise
                error = read_failed(name, caught)
                reason = " ".join(str(caught).split())
            logger.warning("try %d of %d failed: %s: %s", attempt + 1, NUM_TRIES, name, reason)
            if attempt + 1 < NUM_TRIES:
                time.sleep(0.25 * 2**attempt * random.uniform(0.5, 1.5))
        raise error

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


class _LocalFile:
    """An open file, closed when it has left the cache and no read uses it any more."""

    def __init__(self, descriptor: int) -> None:
        self.descriptor = descriptor

    def __del__(self) -> None:
        os.close(self.descriptor)


def max_open_files() -> int:
    """Returns how many shards stay open: 256, or a quarter of the process's limit."""
    soft_limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return 256 if soft_limit < 0 else max(16, min(256, soft_limit // 4))


def _open_filesystem(data_path: str, scheme: str) -> tuple[Any, str]:
    """Returns (pyarrow FileSystem, folder in it)."""
    from pyarrow import fs

    if not scheme:
        folder = os.path.abspath(os.path.expanduser(data_path))
        if not data_path:
            raise MissingInput(
                "--data_path is missing; set it to the --output of `python -m fms_fsdp prepare`, or set "
                "--use_dummy_dataset=True"
            )
        if not is_folder(folder):
            raise MissingInput(
                f"--data_path={data_path} is not a folder; make one with `python -m fms_fsdp "
                "prepare --input=FILES --output=FOLDER`, or set --use_dummy_dataset=True"
            )
        return fs.LocalFileSystem(), folder
    if scheme not in SCHEMES:
        known = ", ".join(f"{name}://" for name in SCHEMES)
        raise UserError(
            f"--data_path={data_path} must be a folder or begin with one of {known}; correct the path"
        )
    if scheme != "file" and not urlsplit(data_path).netloc:
        raise UserError(
            f"--data_path={scheme}:// must name a bucket; write {scheme}://BUCKET/FOLDER"
        )
    if scheme == "gs" and "retry_limit_seconds" not in data_path:
        data_path += (
            "&?"["?" not in data_path] + "retry_limit_seconds=3"
        )  # else it waits for minutes
    filesystem, folder = fs.FileSystem.from_uri(SCHEMES[scheme] + data_path[len(scheme) :])
    return filesystem, folder.rstrip("/")


Page = tuple[str, int]  # path, number in the file


class PageCache:
    """Pages of remote files in a temporary file, removed with the process; the least recently used
    page is replaced."""

    def __init__(self, fetch: Callable[[str, int], bytes]) -> None:
        ranks = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
        free = shutil.disk_usage(tempfile.gettempdir()).free // (4 * ranks)
        self.num_pages = max(16, min(CACHE_BYTES, free) // PAGE)
        self.num_fetched = 0
        self._fetch = fetch
        with tempfile.TemporaryFile(buffering=0) as file:
            self._file = _LocalFile(os.dup(file.fileno()))
        self._slots: OrderedDict[Page, int] = OrderedDict()
        self._coming: dict[Page, Future[bytes]] = {}
        self._lock, self._pool = threading.Lock(), ThreadPoolExecutor(16, "storage")

    def start(self, pages: Iterable[Page]) -> dict[Page, Future[bytes]]:
        """Starts to fetch the pages that are not cached; returns their futures."""
        with self._lock:
            absent = [page for page in pages if page not in self._slots]
            for page in absent:
                if page not in self._coming:
                    self._coming[page] = self._pool.submit(self._load, page)
            return {page: self._coming[page] for page in absent}

    def get(self, pages: list[Page]) -> Iterable[bytes]:
        """Yields the pages in order."""
        coming = self.start(pages)
        for page in pages:
            yield coming[page].result() if page in coming else self._cached(page)

    def _cached(self, page: Page) -> bytes:
        with self._lock:
            slot = self._slots.get(page)
            if slot is not None:
                self._slots.move_to_end(page)
                return os.pread(self._file.descriptor, PAGE, slot * PAGE)
        return next(iter(self.get([page])))  # replaced in the meantime

    def _load(self, page: Page) -> bytes:
        try:
            data = self._fetch(*page)
            with self._lock:
                full = len(self._slots) >= self.num_pages
                slot = self._slots.popitem(last=False)[1] if full else len(self._slots)
                os.pwrite(self._file.descriptor, data, slot * PAGE)
                self._slots[page] = slot
                self.num_fetched += 1
            return data
        finally:
            with self._lock:
                self._coming.pop(page, None)
