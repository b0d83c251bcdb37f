"""How the CPU threads of a process wait for one another. It runs before torch is imported."""

from __future__ import annotations

import os


def set_thread_waiting() -> None:
    """Lets idle threads spin some microseconds before they sleep; with too few cores they sleep at once.

    A thread that sleeps starts the next parallel region late. A thread that spins for long takes the core of
    another; libgomp's default is to spin for milliseconds. Variables that the user set stay as they are. The
    count was measured: on two free cores it gains as much as ten times the count, on shared cores it loses
    nothing (docs/performance.md).

    Source: https://gcc.gnu.org/onlinedocs/libgomp/GOMP_005fSPINCOUNT.html
    """
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    threads = _positive("OMP_NUM_THREADS", cores)
    if _positive("LOCAL_WORLD_SIZE", 1) * threads > cores:
        os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    elif "OMP_WAIT_POLICY" not in os.environ:
        os.environ.setdefault("GOMP_SPINCOUNT", "3000")


def _positive(name: str, default: int) -> int:
    """A positive number of the environment; the default for other texts, which torch or torchrun refuse."""
    text = os.environ.get(name, "")
    return int(text) if text.isdecimal() and 0 < len(text) < 7 and int(text) else default
