"""The process: its place in the world, its device and precision, the process group, signals, and rank 0's log."""

from __future__ import annotations

import gc
import logging
import os
import platform
import random
import signal
import sys
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from fms_fsdp.config import ParallelConfig, TrainingConfig

log = logging.getLogger("fms_fsdp")


@dataclass(frozen=True)
class World:
    """This process among all: from torchrun's environment, or alone."""

    rank: int
    local_rank: int
    world_size: int
    local_world_size: int
    restart: int

    @staticmethod
    def from_env() -> World:
        def read(name: str, default: int) -> int:
            return int(os.environ.get(name, default))

        size = read("WORLD_SIZE", 1)
        restart = read("TORCHELASTIC_RESTART_COUNT", 0)
        return World(read("RANK", 0), read("LOCAL_RANK", 0), size, read("LOCAL_WORLD_SIZE", size), restart)


def pick_device(world: World) -> torch.device:
    """This rank's GPU, or the CPU where the machine has none.

    Raises:
        ValueError: the node has GPUs, but fewer than ranks.
    """
    if not torch.cuda.is_available():
        return torch.device("cpu")
    if world.local_rank >= torch.cuda.device_count():
        raise ValueError(
            f"--nproc_per_node ({world.local_world_size}) must not exceed the node's GPUs ({torch.cuda.device_count()}); lower it"
        )
    return torch.device("cuda", world.local_rank)


def cpu_has_bf16() -> bool:
    """Whether this CPU multiplies bf16 natively (AMX, AVX512-BF16 or ARM bf16), by the kernel's list of features."""
    try:
        text = Path("/proc/cpuinfo").read_text()
    except OSError:
        return False
    features = next((line.split() for line in text.splitlines() if line.lower().startswith(("flags", "features"))), [])
    return bool({"amx_bf16", "avx512_bf16", "bf16"} & set(features))


def resolve_mixed_precision(section: ParallelConfig, device: torch.device) -> bool:
    """Whether to compute in bf16: as asked, else wherever the hardware does so natively; logs what was chosen and why.

    Raises:
        ValueError: a GPU without bf16, unless fp32 was asked for.
    """
    wanted = section.mixed_precision
    if device.type == "cuda":
        if wanted is not False and not torch.cuda.is_bf16_supported(including_emulation=False):
            name = torch.cuda.get_device_name(device)
            raise ValueError(f"--mixed_precision (True) needs bf16, which {name} lacks; add --mixed_precision=False")
        return wanted is not False
    native = cpu_has_bf16()
    if wanted and not native:
        log.warning("--mixed_precision=True: this CPU has no native bf16, so bf16 is emulated and slow")
    if wanted is None:
        log.info("mixed_precision: %s (this CPU %s native bf16)", native, "has" if native else "has no")
    return native if wanted is None else wanted


def start(
    section: ParallelConfig, training: TrainingConfig, world: World, device: torch.device, *, group: bool
) -> None:
    """Seeds, kernels, and, if `group`, the process group (collective: every rank).

    nccl serves GPU tensors and gloo CPU ones, so that small host-side agreements never wait for the GPU. Every restart of torchrun gets a
    store prefix of its own: stale keys of the last attempt otherwise race with the new ranks.
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
    if not group:
        return
    accelerated = device.type == "cuda" and section.dist_backend != "gloo"
    backend = "cpu:gloo,cuda:nccl" if accelerated else "gloo"
    timeout = timedelta(seconds=section.collective_timeout_s)
    store: Any = None  # torch finds its own by the environment
    if "MASTER_ADDR" not in os.environ:
        store = dist.HashStore()
    elif os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
        port = int(os.environ["MASTER_PORT"])
        agent = dist.TCPStore(os.environ["MASTER_ADDR"], port, is_master=False, timeout=timeout)
        store = dist.PrefixStore(f"attempt{world.restart}", agent)
    dist.init_process_group(
        backend,
        store=store,
        rank=world.rank if store is not None else -1,
        world_size=world.world_size if store is not None else -1,
        timeout=timeout,
        device_id=device if accelerated else None,
    )


def stop() -> None:
    """Takes the process group down. The caller must have dropped model, optimizer and mesh: gloo aborts at exit otherwise."""
    gc.collect()
    if dist.is_initialized():
        dist.destroy_process_group()


def sum_over_ranks(tensor: torch.Tensor) -> torch.Tensor:
    """The element-wise sum over all ranks, in place (collective: every rank)."""
    if dist.is_initialized() and dist.get_world_size() > 1:
        dist.all_reduce(tensor)
    return tensor


def agree_on(value: int) -> int:
    """Rank 0's value on every rank (collective: every rank)."""
    if not dist.is_initialized():
        return value
    tensor = torch.tensor([value])
    dist.broadcast(tensor, src=0)
    return int(tensor.item())


class StopSignal:
    """SIGTERM, SIGINT or SIGUSR1 asks for a stop after the current step; a second SIGINT interrupts at once."""

    def __init__(self) -> None:
        self.name = ""
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1):
            signal.signal(number, self._note)

    def _note(self, number: int, frame: FrameType | None) -> None:
        if self.name and number == signal.SIGINT:
            raise KeyboardInterrupt
        self.name = signal.Signals(number).name

    def agreed(self) -> bool:
        """Whether any rank was asked to stop (collective, on the CPU: every rank, every step)."""
        return bool(sum_over_ranks(torch.tensor([1 if self.name else 0])).item())


def set_up_log(world: World) -> None:
    """Rank 0 prints plain lines; other ranks only print what went wrong, with their rank."""
    handler = logging.StreamHandler(sys.stdout)
    prefix = "" if world.rank == 0 else f"[rank {world.rank}] "
    handler.setFormatter(logging.Formatter(prefix + "%(message)s"))
    log.handlers[:] = [handler]
    log.propagate = False
    log.setLevel(logging.INFO if world.rank == 0 else logging.ERROR)


def log_to_file(path: Path) -> None:
    """Also appends rank 0's lines to `path`, with the time."""
    handler = logging.FileHandler(path)
    handler.setFormatter(logging.Formatter("%(asctime)s %(message)s", "%Y-%m-%d %H:%M:%S"))
    log.addHandler(handler)


def versions() -> dict[str, str]:
    """What a result depends on: versions of Python, torch and CUDA, and the hardware."""
    found = {"python": platform.python_version(), "torch": torch.__version__, "platform": platform.machine()}
    if torch.cuda.is_available():
        found |= {"cuda": str(torch.version.cuda), "gpu": torch.cuda.get_device_name()}
    return found
