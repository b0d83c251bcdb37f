"""Files in an object store (s3, gs, az) or behind file://, read in ranges through a bounded cache on the
local disk.

    pread -> pages of 64 KiB -> in the cache? in flight? else -> runs of pages, to 2 MiB a request -> threads
                                                                 ^ prefetch: what a window needs, at once

Invariant: what is read depends on the store's bytes alone; the cache, retries and the order of arrival change
the time it takes and nothing else. Names and sizes come from one listing at the start. The cache is one
unlinked temporary file: the page cache keeps in memory what fits, and nothing is left behind by a killed
process.
"""

from __future__ import annotations

import logging
import os
import random
import shutil
import tempfile
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor
from functools import partial
from typing import Any, TypeVar

import numpy as np

from fms_fsdp.data.order.permute import I64
from fms_fsdp.data.shards.files import MAX_OPEN_FILES, StorageCounters
from fms_fsdp.data.shards.lru import Lru
from fms_fsdp.errors import MissingInput, StorageError
from fms_fsdp.extras.remote_uri import PERMANENT, is_denied, open_filesystem, shown, start_errors

PAGE = 1 << 16
RUN_PAGES = 32  # pages of one request at most
CACHE_BYTES = 16 << 30
NUM_THREADS = 16
START_TRIES = 4

logger = logging.getLogger(__name__)
Result = TypeVar("Result")
Page = tuple[str, int]  # path, number in the file
Request = Future[tuple[int, bytes]]  # its first page, its bytes


class RemoteFiles:
    """Files below a URI. Safe to use from several threads: clones are this object and share the cache.

    `counters` say what it cost. `cache_bytes`: default 16 GiB, or a quarter of the free disk shared by the
    ranks of this node if less.
    """

    num_threads = NUM_THREADS

    def __init__(
        self,
        data_path: str,
        *,
        filesystem: tuple[Any, str] | None = None,
        sizes: dict[str, int] | None = None,
        cache_bytes: int | None = None,
        max_tries: int = 8,
        backoff_s: float = 0.25,
    ) -> None:
        """Lists the files, unless their `sizes` are given. `filesystem` is (pyarrow FileSystem, path in it),
        by default what the URI says.

        Raises: UserError with one line.
        """
        self.root, self.counters = shown(data_path), StorageCounters()
        self._data_path = data_path
        self._max_tries, self._backoff_s = max_tries, backoff_s
        self._lock = threading.RLock()
        self._pool = ThreadPoolExecutor(NUM_THREADS, thread_name_prefix="storage")
        self._opened: Lru[str, Any] = Lru(MAX_OPEN_FILES)
        self._in_flight: dict[Page, Request] = {}
        with start_errors(data_path):
            self._filesystem, self._folder = filesystem or open_filesystem(data_path)
            self._sizes = sizes or self._retried(self.root, self._list, min(max_tries, START_TRIES))
        with tempfile.TemporaryFile(buffering=0) as file:
            self._cache = os.dup(file.fileno())
        weakref.finalize(self, os.close, self._cache)
        if cache_bytes is None:
            ranks = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
            cache_bytes = min(CACHE_BYTES, shutil.disk_usage(tempfile.gettempdir()).free // (4 * ranks))
        self._num_pages = max(1, cache_bytes // PAGE - 1)  # one more is written before the oldest goes
        self._free: list[int] = []
        self._slots: Lru[Page, int] = Lru(self._num_pages, on_evict=self._free.append)

    def walk(self, folder: str) -> Iterator[str]:
        prefix = f"{folder}/" if folder else ""
        return (path for path in self._sizes if path.startswith(prefix))

    def size(self, path: str) -> int:
        if path not in self._sizes:
            raise MissingInput(f"{path} is not in {self.root}")
        return self._sizes[path]

    def pread(self, path: str, num_bytes: int, offset: int) -> bytes:
        stop = min(offset + num_bytes, self.size(path))
        if offset >= stop:
            return b""
        parts: dict[int, bytes | Request] = {}
        first, last = offset // PAGE, (stop - 1) // PAGE
        with self._lock:
            futures = self._start(path, range(first, last + 1))
            for page in range(first, last + 1):
                begin, end = max(offset - page * PAGE, 0), min(stop - page * PAGE, PAGE)
                future = futures.get(page)
                slot = None if future else self._slots.get((path, page))
                parts[page] = future or os.pread(self._cache, end - begin, (slot or 0) * PAGE + begin)
        try:
            whole = [self._wait(part, page, offset, stop) for page, part in parts.items()]
        except CancelledError:  # another user of these files closed them
            return self.pread(path, num_bytes, offset)
        return whole[0] if len(whole) == 1 else b"".join(whole)

    def prefetch(self, path: str, offsets: I64, sizes: I64) -> None:
        """Starts to fetch ranges that will be read soon, those at negative offsets from the end; returns at
        once."""
        size = self._sizes.get(path, 0)
        begins = np.where(offsets < 0, np.maximum(offsets + size, 0), offsets)
        pages: set[int] = set()
        for begin, stop in zip(begins.tolist(), np.minimum(begins + sizes, size).tolist(), strict=True):
            pages.update(range(begin // PAGE, -(-stop // PAGE)))
        if len(pages) <= self._num_pages // 2:
            with self._lock:
                self._start(path, sorted(pages))

    def clone(self) -> RemoteFiles:
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        return partial(RemoteFiles, sizes=self._sizes), (self._data_path,)

    def close(self) -> None:
        """Gives up what is in flight but not waited for. The cache stays, until this object goes."""
        with self._lock:
            self._in_flight = {
                page: future for page, future in self._in_flight.items() if not future.cancel()
            }
            self._opened.clear()

    def _start(self, path: str, pages: range | list[int]) -> dict[int, Request]:
        """Returns, of the pages not in the cache, the requests that bring them, after sending those missing;
        needs the lock."""
        absent = [page for page in pages if self._slots.get((path, page)) is None]
        missing = [page for page in absent if (path, page) not in self._in_flight]
        while missing:
            count = 1
            while count < min(len(missing), RUN_PAGES) and missing[count] == missing[0] + count:
                count += 1
            run, missing = missing[:count], missing[count:]
            future = self._pool.submit(self._fetch, path, run[0], count)
            for page in run:
                self._in_flight[path, page] = future
        return {page: self._in_flight[path, page] for page in absent}

    def _wait(self, part: bytes | Request, page: int, offset: int, stop: int) -> bytes:
        """Returns the bytes of a page that lie in [offset, stop) of the file."""
        if isinstance(part, bytes):
            return part
        start = time.perf_counter()
        try:
            first, data = part.result()
        finally:
            with self._lock:
                self.counters.stall_s += time.perf_counter() - start
        base = first * PAGE
        return data[max(offset, page * PAGE) - base : min(stop, (page + 1) * PAGE) - base]

    def _fetch(self, path: str, first: int, count: int) -> tuple[int, bytes]:
        """Reads a run of pages and puts it into the cache; runs in the pool."""
        size = min(count * PAGE, self._sizes[path] - first * PAGE)
        pages = [(path, first + i) for i in range(count)]
        try:
            data = self._retried(
                f"{self.root}/{path}", lambda: self._read(path, size, first * PAGE), self._max_tries
            )
            with self._lock:
                self.counters.num_bytes += len(data)
                for i, page in enumerate(pages):
                    self._store(page, data[i * PAGE : (i + 1) * PAGE])
            return first, data
        finally:
            with self._lock:
                for page in pages:
                    self._in_flight.pop(page, None)

    def _store(self, page: Page, data: bytes) -> None:
        if self._slots.get(page) is not None:
            return
        slot = self._free.pop() if self._free else len(self._slots)
        try:
            os.pwrite(self._cache, data, slot * PAGE)
        except OSError as error:  # a full disk makes it slower, no more
            logger.warning(
                "the cache of %s cannot be written: %s; free space or set TMPDIR", self.root, error
            )
            self._free.append(slot)
            return
        self._slots.put(page, slot)

    def _read(self, path: str, size: int, offset: int) -> bytes:
        with self._lock:
            opened = self._opened.get(path)
        if opened is None:
            opened = self._filesystem.open_input_file(f"{self._folder}/{path}")
            with self._lock:
                self._opened.get(path) or self._opened.put(path, opened)
        data: bytes = opened.read_at(size, offset)
        if len(data) != size:
            raise StorageError(f"{len(data)} of {size} bytes at {offset} came")
        return data

    def _list(self) -> dict[str, int]:
        from pyarrow import fs

        found = self._filesystem.get_file_info(fs.FileSelector(self._folder, recursive=True))
        files = {i.path[len(self._folder) + 1 :]: i.size for i in found if i.type == fs.FileType.File}
        return {path: size for path, size in files.items() if "/." not in f"/{path}"}

    def _retried(self, name: str, action: Callable[[], Result], tries: int) -> Result:
        """Returns what `action` returns, tried again after growing waits. Raises: OSError with name, tries
        and last error."""
        from pyarrow.lib import ArrowException

        for attempt in range(1, tries + 1):
            with self._lock:
                self.counters.requests += 1
            try:
                return action()
            except (OSError, ArrowException) as caught:  # Azure's errors come as the latter
                error = caught if isinstance(caught, OSError) else OSError(str(caught))
                if isinstance(error, PERMANENT) or is_denied(error) or "NO_SUCH_BUCKET" in str(error):
                    raise error from caught
                reason = " ".join(str(error).split())
                if attempt == tries:
                    raise StorageError(f"{name} failed {tries} times, at last with: {reason}") from error
                wait = self._backoff_s * 2 ** (attempt - 1) * random.uniform(0.5, 1.5)
                logger.warning(
                    "%s: try %d of %d failed: %s; again in %.1f s", name, attempt, tries, reason, wait
                )
                with self._lock:
                    self.counters.retries += 1
                time.sleep(wait)
        raise AssertionError(tries)
