"""The process: its place in the world, its device and precision, the process group, and rank 0's log."""

from __future__ import annotations

import logging
import os
import platform
import random
import re
import subprocess
import sys
import time
import uuid
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from functools import cache
from pathlib import Path
from typing import Any, TypeVar, cast

import numpy as np
import torch
import torch.distributed as dist

from fms_fsdp.config import ParallelConfig, Precision, PrecisionConfig, TrainingConfig
from fms_fsdp.config.values import shown
from fms_fsdp.console import Console
from fms_fsdp.cpu_tuning import keep_freed_memory
from fms_fsdp.errors import RunFailed, UserError, is_for_user

T = TypeVar("T")
log = logging.getLogger("fms_fsdp")  # for lines that are the same on all ranks: rank 0 prints them
# for what one rank alone knows: each rank prints, as with loggers of modules
own_log = logging.getLogger("fms_fsdp.rank")


@dataclass(frozen=True)
class World:
    """This process among all: from torchrun's environment, or alone."""

    rank: int
    local_rank: int
    world_size: int
    local_world_size: int

    @staticmethod
    def from_env() -> World:
        size = _from_environment("WORLD_SIZE", 1, range(1, 10**6))
        if size > 1 and (missing := {"RANK", "MASTER_ADDR", "MASTER_PORT"} - os.environ.keys()):
            raise UserError(f"WORLD_SIZE ({size}) needs {min(missing)} too; use torchrun, or unset the size")
        if size > 1:
            _from_environment("MASTER_PORT", 0, range(2**16))
        local_size = _from_environment("LOCAL_WORLD_SIZE", size, range(1, size + 1))
        local_rank = _from_environment("LOCAL_RANK", 0, range(local_size))
        return World(_from_environment("RANK", 0, range(size)), local_rank, size, local_size)


def _from_environment(name: str, default: int, valid: range) -> int:
    text = os.environ.get(name, str(default))
    if not re.fullmatch("[0-9]{1,9}", text) or int(text) not in valid:
        rule = f"must be a whole number from {valid.start} to {valid.stop - 1}, as torchrun sets it"
        raise UserError(f"{name} ({shown(text)}) {rule}; unset the variable, or start with torchrun")
    return int(text)


def job_end() -> float | None:
    """When the SLURM job ends, in seconds since 1970; None where SLURM does not say it as a number."""
    text = os.environ.get("SLURM_JOB_END_TIME", "")
    return float(text) if re.fullmatch(r"[0-9]{1,12}(\.[0-9]+)?", text) else None


def pick_device(world: World) -> torch.device:
    """This rank's GPU, or the CPU where the machine has none.

    Raises:
        UserError: the node has GPUs, but fewer than ranks.
    """
    if not torch.cuda.is_available():
        return torch.device("cpu")
    if world.local_rank >= torch.cuda.device_count():
        raise UserError(
            f"--nproc_per_node ({world.local_world_size}) must not exceed the node's GPUs "
            f"({torch.cuda.device_count()}); lower the number"
        )
    return torch.device("cuda", world.local_rank)


def cpu_has_bf16() -> bool:
    """Whether this CPU multiplies bf16 natively (AMX, AVX512-BF16 or ARM bf16), by the kernel's list of
    features."""
    try:
        text = Path("/proc/cpuinfo").read_text()
    except OSError:
        return False
    return bool(re.search(r"(?im)^(flags|features)\s.*\b(amx_bf16|avx512_bf16|bf16)\b", text))


def resolve_precision(section: PrecisionConfig, device: torch.device) -> Precision:
    """As asked, else bf16 wherever the hardware computes it natively; logs what was chosen and why."""
    wanted = section.named
    if device.type == "cuda":
        return section.resolve(wanted or "bf16")
    native = cpu_has_bf16()
    if wanted in ("fp16", "float8"):
        log.warning("--precision=%s is slow on a CPU, and here for tests", wanted)
    elif wanted not in (None, "fp32") and not native:
        log.warning("--precision=%s: this CPU has no native bf16, so bf16 is emulated and slow", wanted)
    if wanted is None:
        wanted = "bf16" if native else "fp32"
        log.info("precision: %s (this CPU %s native bf16)", wanted, "has" if native else "has no")
    return section.resolve(wanted)


def start(
    section: ParallelConfig, training: TrainingConfig, world: World, device: torch.device, *, group: bool
) -> None:
    """Seeds, kernels, memory of the CPU, and, if `group`, the process group (collective: every rank).

    nccl serves GPU tensors and gloo CPU ones, so that small host-side agreements never wait for the GPU.
    Every restart of torchrun gets a store prefix of its own: stale keys of the last attempt otherwise race
    with the new ranks.
    """
    random.seed(training.seed)
    np.random.seed(training.seed % 2**32)
    torch.manual_seed(training.seed)
    torch.set_float32_matmul_precision(section.matmul_precision)
    if training.deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.use_deterministic_algorithms(True)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    else:
        keep_freed_memory()
    if not group:
        return
    backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" and section.dist_backend != "gloo" else "gloo"
    timeout = group_timeout(section)
    store: Any = None  # torch finds its own by the environment
    if "MASTER_ADDR" not in os.environ:
        store = dist.HashStore()
    elif os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
        port = int(os.environ["MASTER_PORT"])
        agent = dist.TCPStore(os.environ["MASTER_ADDR"], port, is_master=False, timeout=timeout)
        store = dist.PrefixStore(meet(agent, world, section.collective_timeout_s), agent)
    # without `device_id`: with one, groups of axes are split off, and gloo's part of them with nccl's options
    rank, size = (world.rank, world.world_size) if store is not None else (-1, -1)
    dist.init_process_group(backend, store=store, rank=rank, world_size=size, timeout=timeout)


def group_timeout(section: ParallelConfig) -> timedelta:
    """When a collective gives up: a minute after the watchdog, so that every rank's stacks are on record
    first.

    Only the group in which checkpoints are written has no limit of its own.
    """
    return timedelta(seconds=section.collective_timeout_s + 60)


def meet(store: dist.Store, world: World, timeout_s: float) -> str:
    """A name that all ranks of this attempt, and no others, know afterwards (collective: every rank).

    The store of torchrun's agent outlives its workers, and its restart counts differ between nodes: a node
    whose own workers were well does not count. So rank 0 calls with a fresh name, each rank answers with one
    of its own, and only a reply that holds one's own answer counts.
    """
    own, deadline = uuid.uuid4().hex, time.monotonic() + timeout_s
    if world.rank == 0:
        store.set("call", own)
        answers = [store.get(f"{own}/{rank}").decode() for rank in range(1, world.world_size)]
        store.set(f"{own}/reply", ",".join(answers))
        return own
    answered = ""
    while time.monotonic() < deadline:
        called = store.get("call").decode()
        if called != answered:
            store.set(f"{called}/{world.rank}", own)
            answered = called
        if store.check([f"{called}/reply"]) and own in store.get(f"{called}/reply").decode():
            return called
        time.sleep(0.02)
    raise RuntimeError(f"rank {world.rank}: rank 0 did not answer within {timeout_s} s")


def stop() -> None:
    """Takes the process group down."""
    if dist.is_initialized():
        dist.destroy_process_group()


def agreed(make: Callable[[], T]) -> T:
    """What `make` returns on rank 0, the only one that calls it, or the error it raises there, on every rank
    (collective).

    Raises:
        UserError: rank 0 met it, or a known I/O error; the others raise a UserError of the same text.
        RunFailed: rank 0 met another error, which it raises itself.
    """
    if not dist.is_initialized():
        return make()
    box: list[Any] = [None, None]
    failure: Exception | None = None
    if dist.get_rank() == 0:
        try:
            box[0] = make()
        except Exception as error:
            failure = error
            failed = RunFailed(f"rank 0 failed: {type(error).__name__}: {error}")
            box[1] = UserError(str(error)) if is_for_user(error) else failed
    dist.broadcast_object_list(box, src=0)
    if box[1] is not None:
        raise failure or box[1]
    return cast(T, box[0])


def least_of_ranks(values: Sequence[int]) -> list[int]:
    """The least of each value on any rank, so that all decide alike (collective: every rank)."""
    found = torch.tensor(values, dtype=torch.int64)
    if dist.is_initialized():
        dist.all_reduce(found, dist.ReduceOp.MIN)
    return cast(list[int], found.tolist())


class HostCopy:
    """Numbers of a device on their way to the host: `read` waits for the work queued before the copy, not for
    later work."""

    def __init__(self, values: torch.Tensor) -> None:
        self._values, self._event = values, None
        if values.device.type == "cuda":
            self._values = torch.empty_like(values, device="cpu", pin_memory=True)
            self._values.copy_(values, non_blocking=True)
            self._event = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._event.record()

    def read(self) -> Any:
        """The numbers, nested as the tensor is."""
        if self._event is not None:
            self._event.synchronize()
        return self._values.tolist()


def process_age_s() -> float:
    """Seconds since this process was started, by the kernel's account; 0 where there is none."""
    try:
        started = int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19])
        return float(Path("/proc/uptime").read_text().split()[0]) - started / os.sysconf("SC_CLK_TCK")
    except (OSError, ValueError, IndexError):
        return 0.0


class Phases:
    """How long each part of a launch took, from the start of the process to the first step."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self._last = time.monotonic() - process_age_s()

    def done(self, name: str) -> None:
        """Enters the time since the last phase ended under `name`."""
        now = time.monotonic()
        self.seconds[name] = self.seconds.get(name, 0.0) + now - self._last
        self._last = now

    def text(self) -> str:
        parts = ", ".join(f"{name} {took:.1f}" for name, took in self.seconds.items() if took >= 0.05)
        return f"{sum(self.seconds.values()):.1f} s from launch to the first step done: {parts}"


def set_up_log(world: World) -> None:
    """Rank 0 prints plain lines; the others, with their number, the warnings about what they alone know."""
    handler = Console(sys.stdout)
    prefix = "" if world.rank == 0 else f"[rank {world.rank}] "
    handler.setFormatter(logging.Formatter(prefix + "%(message)s"))
    handler.addFilter(lambda record: not hasattr(record, "for_files"))
    log.handlers[:] = [handler]
    log.propagate = False
    log.setLevel(logging.INFO if world.rank == 0 else logging.WARNING)
    if world.rank > 0:
        handler.addFilter(lambda record: record.name != log.name)


def log_for_files(text: str) -> None:
    """Appends a long text to log.txt, not to the terminal."""
    log.info(text, extra={"for_files": True})


def show_progress(text: str) -> None:
    """Rewrites the live line of a terminal; nothing where there is none."""
    for handler in log.handlers:
        if isinstance(handler, Console):
            handler.show(text)


def log_to_file(path: Path) -> None:
    """Also appends this rank's lines to `path`, with the time."""
    handler = logging.FileHandler(path)
    # metrics.jsonl reports a full disk
    handler.handleError = lambda record: None  # type: ignore[method-assign]
    handler.setFormatter(logging.Formatter("%(asctime)s %(message)s", "%Y-%m-%d %H:%M:%S"))
    log.addHandler(handler)
    log.setLevel(logging.INFO)


def versions() -> dict[str, str]:
    """What a result depends on: versions of Python, torch, CUDA and NCCL, and the hardware."""
    found = {"python": platform.python_version(), "torch": torch.__version__, "platform": platform.machine()}
    found |= _git_state()
    if torch.cuda.is_available():
        found |= {"cuda": str(torch.version.cuda), "gpu": torch.cuda.get_device_name()}
        if torch.distributed.is_nccl_available():
            version: tuple[int, ...] = torch.cuda.nccl.version()  # type: ignore[no-untyped-call]
            found["nccl"] = ".".join(map(str, version))
    return found


@cache
def _git_state() -> dict[str, str]:
    """The commit this code is at, and a hash of what differs from it; {} outside of a repository."""
    git, silent = ["git", "-C", str(Path(__file__).parent)], subprocess.DEVNULL
    try:
        commit = subprocess.check_output([*git, "rev-parse", "HEAD"], stderr=silent, timeout=10, text=True)
        diff = subprocess.check_output([*git, "diff", "HEAD"], stderr=silent, timeout=10)
    except (OSError, subprocess.SubprocessError):
        return {}
    return {"commit": commit[:12] + (f"+{zlib.crc32(diff):08x}" if diff else "")}
