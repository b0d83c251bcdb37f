"""Files in an object store (s3, gs, az), read in pages that a temporary file caches.

    read(path, size, offset) ──> pages of 256 KiB: from the cache, else fetched by 16 threads
    prefetch(path, ranges)   ──> the same pages, without waiting

Invariant: the bytes read depend on the stored bytes only. The cache of a store is one unlinked
temporary file.
"""

from __future__ import annotations

import os
import random
import shutil
import tempfile
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor
from functools import partial
from typing import Any
from urllib.parse import urlsplit

from fms_fsdp.data.storage import (
    Listing,
    LocalFile,
    Storage,
    _retried,
    logger,
    read_range_of,
    reporting_progress,
)
from fms_fsdp.errors import MissingInput, StorageError, UserError, read_failed
from fms_fsdp.process import env_int

SCHEMES = {"s3": "s3", "gs": "gs", "az": "abfs", "file": "file"}  # ours -> pyarrow's
PAGE = 1 << 18
CACHE_BYTES = 16 << 30
NUM_TRIES = 8  # with waits of half a minute in all


class ObjectStore(Storage):
    """The files below an address such as s3://BUCKET/FOLDER."""

    is_remote = True

    def __init__(self, data_path: str, listing: Listing | None = None) -> None:
        super().__init__(data_path, listing)
        self._pages = PageCache(self._fetch)
        self._asked_sizes = dict[str, int]()  # of files without a size in the listing

    def size(self, path: str) -> int:
        """Returns the size of a file. If the files are not listed, asks the store for this one.

        Raises:
            ReadFailed: the store does not answer.
            OSError: there is no such file.
        """
        size = self._asked_sizes.get(path)
        if size is None and self.is_listed:
            size = self.sizes.get(path)
        if size is None:
            with self._errors_named():
                size = _retried(partial(self._ask_size, path), self.root)
            self._asked_sizes[path] = size
        return size

    def _ask_size(self, path: str) -> int:
        from pyarrow import fs

        info = self._filesystem.get_file_info(f"{self._folder}/{path}")
        if info.type != fs.FileType.File:
            raise MissingInput(f"{path} is not in {self.root}; restore the file")
        return info.size

    def read(self, path: str, size: int, offset: int) -> bytes:
        """Returns `size` bytes at `offset`, fewer at the end of the file.

        Raises:
            ReadFailed: the store does not answer.
            OSError: the file cannot be read.
        """
        stop = min(offset + size, self.size(path))
        numbers = range(offset // PAGE, -(-stop // PAGE))
        data = b"".join(self._pages.get([(path, number) for number in numbers]))
        first = offset % PAGE
        return data[first : first + stop - offset]

    def prefetch(self, path: str, ranges: Iterable[tuple[int, int]]) -> None:
        """Starts to fetch the byte ranges [start, stop), which will be read soon."""
        numbers = {n for a, b in ranges for n in range(a // PAGE, -(-b // PAGE))}
        self._pages.start([(path, number) for number in sorted(numbers)])

    def prefetch_ends(self, path: str) -> None:
        """Starts to fetch the schema and the footer of a shard that will be opened soon."""
        if path in self.sizes:
            size = self.size(path)
            self.prefetch(path, [(0, 1), (max(0, size - 1), size)])

    def close(self) -> None:
        """Closes open files and drops pages that no thread has begun to fetch; a later read opens
        and fetches them again."""
        self._pages.cancel()
        super().close()

    def real_paths(self, paths: Iterable[str]) -> dict[str, str]:
        """Returns the paths in the store, which has no symbolic links, except below file://."""
        scheme = urlsplit(self.data_path).scheme
        if scheme == "file":
            return super().real_paths(paths)
        return {path: f"{scheme}://{self._folder}/{path}" for path in paths}

    def _open_filesystem(self) -> tuple[Any, str]:
        from pyarrow import fs

        address = self.data_path
        scheme = urlsplit(address).scheme
        if scheme not in SCHEMES:
            known = ", ".join(f"{name}://" for name in SCHEMES)
            raise UserError(
                f"--data_path={self.root} must be a folder or begin with one of {known}; correct the "
                "path"
            )
        if scheme != "file" and not urlsplit(address).netloc:
            raise UserError(
                f"--data_path={scheme}:// must name a bucket; write {scheme}://BUCKET/FOLDER"
            )
        if scheme == "gs" and "retry_limit_seconds" not in address:
            # Otherwise it waits for minutes.
            address += ("&" if "?" in address else "?") + "retry_limit_seconds=3"
        filesystem, folder = fs.FileSystem.from_uri(SCHEMES[scheme] + address[len(scheme) :])
        return filesystem, folder.rstrip("/")

    def _open_file(self, path: str) -> Any:
        self.size(path)  # an error names a file that is not there
        return self._filesystem.open_input_file(f"{self._folder}/{path}")

    def _list(self) -> Listing:
        if urlsplit(self.data_path).scheme == "file":
            return super()._list()
        from pyarrow import fs

        with reporting_progress(lambda: f"listing {self.root}"):
            found = self._filesystem.get_file_info(fs.FileSelector(self._folder, recursive=True))
        sizes = {
            each.path.removeprefix(f"{self._folder}/"): each.size
            for each in found
            if each.type == fs.FileType.File
        }
        return Listing({path: sizes[path] for path in sorted(sizes) if "/." not in f"/{path}"})

    def _fetch(self, path: str, number: int) -> bytes:
        """Reads a page from the store, and retries with exponential backoff."""
        wanted = min(PAGE, self.size(path) - number * PAGE)
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


Page = tuple[str, int]  # path, number in the file


class PageCache:
    """Pages of remote files in a temporary file, removed with the process; the least recently used
    page is replaced."""

    def __init__(self, fetch: Callable[[str, int], bytes]) -> None:
        ranks = env_int("LOCAL_WORLD_SIZE", 0) or 1
        free = shutil.disk_usage(tempfile.gettempdir()).free // (4 * ranks)
        self.num_pages = max(16, min(CACHE_BYTES, free) // PAGE)
        self.num_fetched = 0
        self._fetch = fetch
        with tempfile.TemporaryFile(buffering=0) as file:
            self._file = LocalFile(os.dup(file.fileno()))
        self._slots: OrderedDict[Page, int] = OrderedDict()
        self._free_slots = list[int]()  # of pages that could not be written
        self._has_warned = False
        self._coming: dict[Page, Future[bytes]] = {}
        self._lock = threading.Lock()
        self._pool = ThreadPoolExecutor(16, "storage")

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
            if page not in coming:
                yield self._cached(page)
                continue
            try:
                yield coming[page].result()
            except CancelledError:  # of `cancel`
                yield self._cached(page)

    def cancel(self) -> None:
        """Drops the pages that no thread has begun to fetch. At its end, the process would wait for
        all of them, also of a store that does not answer."""
        with self._lock:
            for page, future in list(self._coming.items()):
                if future.cancel():
                    del self._coming[page]

    def _cached(self, page: Page) -> bytes:
        with self._lock:
            slot = self._slots.get(page)
            if slot is not None:
                self._slots.move_to_end(page)
                return read_range_of(self._file.descriptor, PAGE, slot * PAGE)
        return next(iter(self.get([page])))  # replaced in the meantime

    def _load(self, page: Page) -> bytes:
        try:
            data = self._fetch(*page)
            with self._lock:
                self.num_fetched += 1
                self._store(page, data)
            return data
        finally:
            with self._lock:
                self._coming.pop(page, None)

    def _store(self, page: Page, data: bytes) -> None:
        """Writes a page to the temporary file. If that fails, the page is fetched again when it is
        read again. The caller holds the lock."""
        if self._free_slots:
            slot = self._free_slots.pop()
        elif len(self._slots) < self.num_pages:
            slot = len(self._slots)
        else:
            _, slot = self._slots.popitem(last=False)
        reason = "the file system is full"
        try:
            num_written = os.pwrite(self._file.descriptor, data, slot * PAGE)
        except OSError as error:
            num_written = 0
            reason = str(error.strerror)
        if num_written == len(data):
            self._slots[page] = slot
            return
        self._free_slots.append(slot)
        if not self._has_warned:
            self._has_warned = True
            logger.warning(
                "the page cache in %s cannot be written (%s), so pages are fetched again; free disk "
                "space, or set TMPDIR to another folder",
                tempfile.gettempdir(),
                reason,
            )
