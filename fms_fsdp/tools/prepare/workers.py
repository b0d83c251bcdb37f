"""Jobs over processes, with a line of progress.

Each job is a picklable value that a module-level function handles; results come in the order in which jobs finish.
Workers are spawned (no inherited threads or locks), ignore Ctrl-C, which the parent handles, and end with their parent
even if that is killed.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from typing import TypeVar

Job = TypeVar("Job")
Result = TypeVar("Result")

_INTERVAL_S = 10.0  # between lines of progress in a log; a terminal has one line, rewritten after every job


def available_cores() -> int:
    """Cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def note(text: str) -> None:
    """Prints one line about what is going on to stderr."""
    print(f"prepare: {text}", file=sys.stderr, flush=True)


def run_jobs(
    function: Callable[[Job], Result], jobs: Sequence[Job], sizes: Sequence[int], num_workers: int, label: str
) -> Iterator[tuple[Job, Result]]:
    """Yields (job, result) as jobs finish; the largest begin first. `sizes` are bytes, roughly.

    With one worker the jobs run in this process, in their order.

    Raises:
        ValueError: a process was killed from outside. What a job raises is raised here; the other processes end.
    """
    progress = _Progress(label, len(jobs), sum(sizes))
    num_workers = min(num_workers, len(jobs))
    if num_workers > 1:
        results = _run_in_processes(function, jobs, sizes, num_workers)
    else:
        results = ((i, function(job)) for i, job in enumerate(jobs))
    try:
        for i, result in results:
            progress.add(sizes[i])
            yield jobs[i], result
    finally:
        progress.close()


def _run_in_processes(
    function: Callable[[Job], Result], jobs: Sequence[Job], sizes: Sequence[int], num_workers: int
) -> Iterator[tuple[int, Result]]:
    before = set(multiprocessing.active_children())
    context = multiprocessing.get_context("spawn")
    pool = ProcessPoolExecutor(num_workers, context, initializer=_start_worker)
    try:
        by_size = sorted(range(len(jobs)), key=lambda i: -sizes[i])
        futures = {pool.submit(function, jobs[i]): i for i in by_size}
        for future in as_completed(futures):
            yield futures.pop(future), future.result()
        pool.shutdown()
    except BrokenProcessPool:
        raise ValueError(
            "--num_workers: a worker process was killed, perhaps out of memory; run the command again to go on "
            "where it stopped, with fewer workers or a lower --shard_tokens"
        ) from None
    finally:
        pool.shutdown(wait=False, cancel_futures=True)
        for process in set(multiprocessing.active_children()) - before:
            process.terminate()


def _start_worker() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=_end_with_parent, daemon=True).start()


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)


class _Progress:
    """What is done, the rate and the time left."""

    def __init__(self, label: str, num_jobs: int, num_bytes: int) -> None:
        self._label, self._num_jobs, self._num_bytes = label, num_jobs, max(1, num_bytes)
        self._jobs_done = self._bytes_done = 0
        self._started = self._shown = time.monotonic()

    def add(self, size: int) -> None:
        """Counts a finished job."""
        self._jobs_done += 1
        self._bytes_done += size
        now, terminal = time.monotonic(), sys.stderr.isatty()
        if not (terminal or self._jobs_done == self._num_jobs or now - self._shown >= _INTERVAL_S):
            return
        self._shown, elapsed, share = now, max(1e-3, now - self._started), self._bytes_done / self._num_bytes
        left_s = int(elapsed * (1 - share) / max(share, 1e-9))
        line = (
            f"{self._label}: {self._jobs_done} of {self._num_jobs} slices, {self._bytes_done / 1e6:,.1f} MB "
            f"({self._bytes_done / 1e6 / elapsed:,.1f} MB/s), {share:.0%}, {left_s // 60}:{left_s % 60:02d} left"
        )
        if terminal:
            print(f"\r\033[Kprepare: {line}", end="", file=sys.stderr, flush=True)
        else:
            note(line)

    def close(self) -> None:
        """Ends the line on a terminal."""
        if self._jobs_done and sys.stderr.isatty():
            print(file=sys.stderr)
