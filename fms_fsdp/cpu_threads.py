"""How the CPU threads of a process wait for one another. Standard library only: it must run before torch is imported."""

from __future__ import annotations

import os


def set_thread_waiting() -> None:
    """Threads that have a core each spin for some microseconds before they sleep; where there are fewer cores they sleep at once.

    A thread that sleeps comes back late for the next parallel region; one that spins for long takes the core of another.
    By itself libgomp spins for milliseconds. What the user set in the environment stays. The count was measured: on two
    free cores it gains as much as ten times of it, on cores that are shared it loses nothing (docs/performance.md).

    Source: https://gcc.gnu.org/onlinedocs/libgomp/GOMP_005fSPINCOUNT.html
    """
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    threads = _positive("OMP_NUM_THREADS", cores)
    if _positive("LOCAL_WORLD_SIZE", 1) * threads > cores:
        os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    elif "OMP_WAIT_POLICY" not in os.environ:
        os.environ.setdefault("GOMP_SPINCOUNT", "3000")


def _positive(name: str, default: int) -> int:
    """A number of the environment; the default where it is none: torch or torchrun refuse it."""
    text = os.environ.get(name, "")
    return int(text) if text.isdecimal() and 0 < len(text) < 7 and int(text) else default
