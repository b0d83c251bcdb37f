"""Jobs over processes, with one progress line.

Each job is a picklable value handled by a module-level function; results come back in the order in which jobs finish. Workers are spawned (no
inherited threads or locks), ignore Ctrl-C, which is the parent's to handle, and end with their parent even if that is killed.
"""

from __future__ import annotations

import concurrent.futures
import multiprocessing
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures.process import BrokenProcessPool
from typing import Any, TypeVar

Job = TypeVar("Job")
Result = TypeVar("Result")

_INTERVAL_S = (0.5, 10.0)  # between progress lines: on a terminal, in a log
_counters: Any = None  # documents, bytes of text, tokens: shared with the parent
_progress: Any = None  # in the parent, while it does the jobs itself


def available_cores() -> int:
    """Cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def count_progress(documents: int, num_bytes: int, tokens: int) -> None:
    """Adds to the counters behind the progress line; called by jobs."""
    if _counters is not None:
        with _counters.get_lock():
            for i, amount in enumerate((documents, num_bytes, tokens)):
                _counters[i] += amount
    if _progress is not None:
        _progress.show()


def note(text: str) -> None:
    """One line about what is going on, to stderr."""
    print(f"prepare: {text}", file=sys.stderr, flush=True)


def run_jobs(
    function: Callable[[Job], Result], jobs: Sequence[Job], sizes: Sequence[int], num_workers: int, label: str
) -> Iterator[tuple[Job, Result]]:
    """Yields (job, result) as they finish; the largest are begun first. `sizes` are bytes of text, roughly. One worker is this process.

    Raises:
        ValueError: a process was killed from outside. What a job raises is raised here; the other processes are ended.
    """
    if not jobs:
        return
    context = multiprocessing.get_context("spawn")
    counters = context.Array("q", 3)
    progress = _Progress(label, sum(sizes), counters)
    if min(num_workers, len(jobs)) == 1:
        yield from _run_here(function, jobs, progress)
        return
    by_size = sorted(range(len(jobs)), key=lambda i: -sizes[i])
    before = set(multiprocessing.active_children())
    pool = concurrent.futures.ProcessPoolExecutor(
        min(num_workers, len(jobs)), context, initializer=_start_worker, initargs=(counters,)
    )
    try:
        waiting = {pool.submit(function, jobs[i]): i for i in by_size}
        while waiting:
            finished, _ = concurrent.futures.wait(
                waiting, progress.interval, concurrent.futures.FIRST_COMPLETED
            )
            for future in finished:
                yield jobs[waiting.pop(future)], future.result()
            progress.show()
        pool.shutdown()
    except BrokenProcessPool:
        raise ValueError(
            "--num_workers: a worker process was killed, out of memory perhaps; run the command again to go on where it stopped, "
            "with fewer workers or a lower --shard_tokens"
        ) from None
    finally:
        pool.shutdown(wait=False, cancel_futures=True)
        for process in set(multiprocessing.active_children()) - before:
            process.terminate()
        progress.end()


def _run_here(
    function: Callable[[Job], Result], jobs: Sequence[Job], progress: _Progress
) -> Iterator[tuple[Job, Result]]:
    global _counters, _progress
    _counters, _progress = progress.counters, progress
    try:
        for job in jobs:
            yield job, function(job)
    finally:
        _counters = _progress = None
        progress.end()


def _start_worker(counters: Any) -> None:
    global _counters
    _counters = counters
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=_end_with_parent, daemon=True).start()


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)


class _Progress:
    """Rates and time left, on one line that is rewritten on a terminal."""

    def __init__(self, label: str, total_bytes: int, counters: Any) -> None:
        self.label, self.total_bytes, self.counters = label, total_bytes, counters
        self.terminal = sys.stderr.isatty()
        self.interval = _INTERVAL_S[0 if self.terminal else 1]
        self.started = self.shown = time.monotonic()

    def show(self, last: bool = False) -> None:
        now = time.monotonic()
        if not last and now - self.shown < self.interval:
            return
        self.shown = now
        documents, num_bytes, tokens = self.counters[:]
        elapsed = max(1e-3, now - self.started)
        line = f"{self.label}: {documents:,} documents ({documents / elapsed:,.0f}/s), "
        line += f"{num_bytes / 1e6:,.1f} MB ({num_bytes / 1e6 / elapsed:,.1f} MB/s)"
        line += f", {tokens / 1e6:,.1f} M tokens" if tokens else ""
        share = min(0.99, num_bytes / max(1, self.total_bytes))
        if not last and share > 0:
            left = elapsed * (1 - share) / share
            line += f", {share:.0%}, {int(left) // 60}:{int(left) % 60:02d} left"
        if self.terminal:
            print(f"\r\033[Kprepare: {line}", end="", file=sys.stderr, flush=True)
        else:
            note(line)

    def end(self) -> None:
        self.show(last=True)
        if self.terminal:
            print(file=sys.stderr)
