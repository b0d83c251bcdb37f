"""Jobs over processes, with a line of progress.

Each job is a picklable value that a module-level function handles; results come in the order in which jobs
finish. Workers are spawned (no inherited threads or locks), ignore Ctrl-C, which the parent handles, and end
with their parent even if that is killed.
"""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from datetime import timedelta
from typing import TypeVar

from fms_fsdp.errors import UserError

Job = TypeVar("Job")
Result = TypeVar("Result")

_INTERVAL_S = 5.0  # between lines of progress
_PR_SET_PDEATHSIG = 1  # Linux: the signal that a process gets when its parent dies; prctl(2)


def available_cores() -> int:
    """Cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def note(text: str) -> None:
    """Prints one line about what is going on to stderr."""
    print(f"prepare: {text}", file=sys.stderr, flush=True)


def run_jobs(
    work: Callable[[Job], Result], jobs: Sequence[Job], size: Callable[[Job], int], workers: int, label: str
) -> Iterator[tuple[Job, Result]]:
    """Yields (job, result) as jobs finish; the largest begin first. `size` of a job: its bytes, roughly.

    With one worker the jobs run in this process, in their order.

    Raises:
        UserError: a process was killed from outside. What a job raises passes through; the other jobs end.
    """
    num_workers, sizes = min(workers, len(jobs)), list(map(size, jobs))
    if num_workers > 1:
        results = _run_in_processes(work, jobs, sizes, num_workers)
    else:
        results = ((i, work(job)) for i, job in enumerate(jobs))
    total_mb, done_mb = max(1e-6, sum(sizes) / 1e6), 0.0
    started = told = time.monotonic()
    for count, (i, result) in enumerate(results, start=1):
        done_mb += sizes[i] / 1e6
        now = time.monotonic()
        if count == len(jobs) or now - told >= _INTERVAL_S:
            told, elapsed_s = now, max(1e-3, now - started)
            left_s = elapsed_s * (total_mb - done_mb) / max(1e-6, done_mb)
            rate = f"{done_mb:,.1f} of {total_mb:,.1f} MB ({done_mb / elapsed_s:,.1f} MB/s)"
            note(f"{label}: {count} of {len(jobs)} slices, {rate}, {timedelta(seconds=round(left_s))} left")
        yield jobs[i], result


def _run_in_processes(
    work: Callable[[Job], Result], jobs: Sequence[Job], sizes: Sequence[int], num_workers: int
) -> Iterator[tuple[int, Result]]:
    before = set(multiprocessing.active_children())
    context = multiprocessing.get_context("spawn")
    pool = ProcessPoolExecutor(num_workers, context, initializer=_start_worker)
    try:
        by_size = sorted(range(len(jobs)), key=lambda i: -sizes[i])
        futures = {pool.submit(work, jobs[i]): i for i in by_size}
        for future in as_completed(futures):
            yield futures.pop(future), future.result()
        pool.shutdown()
    except BrokenProcessPool:
        remedy = "run the command again with fewer workers or a lower --shard_tokens: it goes on from here"
        raise UserError(f"--num_workers: a process was killed, perhaps out of memory; {remedy}") from None
    finally:
        pool.shutdown(wait=False, cancel_futures=True)
        for process in set(multiprocessing.active_children()) - before:
            process.terminate()


def _start_worker() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    if hasattr(libc := ctypes.CDLL(None), "prctl"):  # at once, before the command can be run again
        libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    threading.Thread(target=_end_with_parent, daemon=True).start()


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)
