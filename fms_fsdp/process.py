"""A process: its rank and age, and its settings of threads, memory, garbage collection and open files.

Standard library only.
"""

from __future__ import annotations

import atexit
import ctypes
import gc
import os
import resource
import time
from contextlib import suppress
from pathlib import Path

_IMPORTED_AT = time.monotonic()
_MAX_OPEN_FILES = 65_536  # some programs walk through all numbers up to the limit


def before_torch() -> None:
    """Applies the settings that must precede the import of torch.

    The garbage collector is off until `gc.enable`, and at the end of the process: importing modules
    creates hundreds of thousands of objects, and all of them stay.
    """
    gc.disable()
    atexit.register(gc.freeze)
    set_thread_waiting()
    let_gpu_memory_grow()


def available_cores(control_groups: Path = Path("/sys/fs/cgroup")) -> int:
    """Returns the number of cores that this process may use, at least 1.

    Containers limit it by affinity or by a quota of their control group, of version 1 or 2.
    """
    cores = os.cpu_count() or 1
    if hasattr(os, "sched_getaffinity"):
        cores = len(os.sched_getaffinity(0))
    quota = ""
    period = "1"
    with suppress(OSError, ValueError):
        quota, period = (control_groups / "cpu.max").read_text(encoding="utf-8").split()
    with suppress(OSError):
        quota = (control_groups / "cpu/cpu.cfs_quota_us").read_text(encoding="utf-8").strip()
        period = (control_groups / "cpu/cpu.cfs_period_us").read_text(encoding="utf-8").strip()
    if quota.isdecimal() and period.isdecimal():  # "max" and "-1" are no limit
        cores = min(cores, -(-int(quota) // max(1, int(period))))
    return max(1, cores)


def set_thread_waiting() -> None:
    """Lets idle threads spin some microseconds before they sleep; with too few cores they sleep at once.

    The function must run before torch is imported.

    A thread that sleeps starts the next parallel region late. A thread that spins for long takes
    the core of another; libgomp's default is to spin for milliseconds. Variables that the user set
    stay as they are. The count was measured: on two free cores it gains as much as ten times the
    count, on shared cores it loses nothing (benchmarks/LOG.md).

    Source: https://gcc.gnu.org/onlinedocs/libgomp/GOMP_005fSPINCOUNT.html
    """
    cores = available_cores()
    threads = env_int("OMP_NUM_THREADS", 0) or cores
    ranks = env_int("LOCAL_WORLD_SIZE", 0) or 1
    if ranks * threads > cores:
        os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    elif "OMP_WAIT_POLICY" not in os.environ:
        os.environ.setdefault("GOMP_SPINCOUNT", "3000")


def let_gpu_memory_grow() -> None:
    """Lets torch's allocator on GPUs extend its segments in place: otherwise freed blocks of
    other sizes stay unused between them, and memory runs out early.

    The function must run before torch is imported. Settings of the user stay as they are.

    Source: https://docs.pytorch.org/docs/stable/notes/cuda.html (PYTORCH_ALLOC_CONF)
    """
    if not {"PYTORCH_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF"} & os.environ.keys():
        os.environ.setdefault("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")


def keep_freed_memory() -> bool:
    """Lets the C allocator keep freed memory for the next step; returns False where the allocator cannot.

    By default glibc gives large blocks back to the system when they are freed. The next step then
    gets new pages, and the system fills each with zeros first: some hundredths to a fifth of the
    speed on a CPU (benchmarks/LOG.md). Memory is held until the process ends; with FSDP its
    peak is up to 1.7 times as high (docs/limits.md). Variables that the user set stay as they
    are.

    Source: https://man7.org/linux/man-pages/man3/mallopt.3.html
    """
    chosen = ("MALLOC_MMAP_THRESHOLD_", "MALLOC_TRIM_THRESHOLD_", "GLIBC_TUNABLES")
    if any(name in os.environ for name in chosen):
        return False
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)  # glibc has it; musl and macOS do not
    if mallopt is None:
        return False
    trim_threshold = -1
    mmap_threshold = -3
    never = -1
    for size in (2**31 - 1, 2**25):  # glibc before 2.35 takes 32 MiB at most
        if mallopt(mmap_threshold, size):
            return bool(mallopt(trim_threshold, never))
    return False


def raise_open_file_limit() -> int:
    """Raises the soft limit of open files to the hard one, up to 65,536; returns the soft limit.

    A rank has sockets to other ranks, and rank 0 to all of them: with the usual limit of 1,024,
    a launch would end at a few hundred ranks. Child processes inherit the limit.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY:
        return _MAX_OPEN_FILES
    reachable = _MAX_OPEN_FILES
    if hard != resource.RLIM_INFINITY:
        reachable = min(hard, _MAX_OPEN_FILES)
    if soft >= reachable:
        return soft
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (reachable, hard))
    except (OSError, ValueError):  # macOS has a limit below its hard one
        return soft
    return reachable


def process_age_s(pid: int | None = None) -> float:
    """Returns the seconds since a process was started, by default this one.

    If that is unknown, it is the seconds since the import of this module.
    Not by /proc/uptime, which may be the container's (lxcfs), while the start is the machine's.
    """
    age_s = -1.0
    with suppress(OSError, ValueError, IndexError, AttributeError):  # AttributeError: not Linux
        content = Path(f"/proc/{pid or 'self'}/stat").read_text(encoding="utf-8", errors="replace")
        fields = content.rpartition(")")[2].split()
        started_s = int(fields[19]) / os.sysconf("SC_CLK_TCK")
        age_s = time.clock_gettime(time.CLOCK_BOOTTIME) - started_s
    return age_s if age_s >= 0 else time.monotonic() - _IMPORTED_AT


def env_rank() -> int:
    """Returns the rank of torchrun's variables; 0 if they are incomplete, so that the process reports it."""
    rank = env_int("RANK", 0)
    is_complete = {"MASTER_ADDR", "MASTER_PORT"} <= os.environ.keys()
    return rank if is_complete and rank < env_int("WORLD_SIZE", 0) else 0


def env_int(name: str, default: int) -> int:
    """Returns the number in an environment variable, the default if it has none; World.from_env
    rejects other texts."""
    text = os.environ.get(name, "")
    return int(text) if text.isdecimal() and len(text) < 7 else default
