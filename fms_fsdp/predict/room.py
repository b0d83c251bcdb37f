"""Will it fit: the least that a rank needs, against the bytes that its machine has free.

    available = what is free of the GPU's memory, or min(cgroup limit, free RAM) / processes on this machine

memory.py counts what a rank needs; a run that is refused here could not take its first step.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from fms_fsdp.config.rule import Rule, judge
from fms_fsdp.predict.memory import MemoryEstimate

_GIB = 2**30


def available_memory(device: torch.device, local_world_size: int) -> int:
    """Bytes a rank may use: of a GPU what other programs leave, or its share of what the machine and the
    cgroup leave."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0] + torch.cuda.memory_reserved(device)
    limits = [limit for limit in (_free_ram(), _cgroup_limit()) if limit is not None]
    return min(limits, default=2**62) // local_world_size


@dataclass(frozen=True)
class Room:
    """What a rank needs of a device, the bytes that it may use there, and the name of the model."""

    need: MemoryEstimate
    device: torch.device
    available: int
    variant: str

    @property
    def suffices(self) -> bool:
        return self.need.total <= self.available

    @property
    def is_full_of_rows(self) -> bool:
        return 2 * self.need.rows > self.need.total

    @property
    def in_words(self) -> str:
        """What a rank may use, and what other programs use of a GPU, where that is much."""
        text = f"{self.available / _GIB:.1f} GiB of memory available to it"
        if self.device.type != "cuda":
            return text
        used = torch.cuda.mem_get_info(self.device)[1] - self.available
        return text if used < 2 * _GIB else f"{text}, beside {used / _GIB:.1f} GiB in use by other programs"

    @property
    def remedy(self) -> str:
        need, room = self.need, self.available - (self.need.total - self.need.state)
        flags = "--model_variant, --num_layers, --hidden_size, --ffn_hidden_size, --vocab_size"
        smaller = f"choose a smaller model ({flags})"
        if room > 0:
            devices = -(-need.state * need.dims.size("shard") // room)
            return f"shard over at least {devices} such devices (--sharding_strategy=fsdp), or {smaller}"
        if need.dims.strategy != "none" and need.dims.keeps_weights:
            by_block = "gather one block at a time (--sharding_strategy=fsdp, on several devices)"
            return f"{by_block}, or {smaller}"
        return smaller


def _facts(room: Room) -> Mapping[str, Any]:
    """The figures of messages on memory."""
    need = room.need
    return {
        "--seq_length and the batch": f"{need.rows / _GIB:.1f} GiB of rows and positions per rank",
        "model_variant": f"{room.variant}, {need.params:,} parameters a rank: {need.total / _GIB:.1f} GiB "
        f"per rank, {need.state / _GIB:.1f} of weights, gradients and optimizer state, "
        f"{(need.unit + need.gradients) / _GIB:.1f} unsharded",
        "available": room.in_words,
        "remedy": room.remedy,
    }


FITS: tuple[Rule[Room], ...] = (
    Rule("--seq_length and the batch", lambda room: room.suffices or not room.is_full_of_rows,
        "must fit the {available}",
        "lower one of --seq_length, --max_seq_len, --batch_size, --grad_accum_steps, --global_batch_size",
        "seq_length max_seq_len batch_size grad_accum_steps global_batch_size", _facts),
    Rule("model_variant", lambda room: room.suffices,
        "must fit the {available}", "{remedy}", "sharding_strategy", _facts),
)  # fmt: skip


def check_memory(need: MemoryEstimate, device: torch.device, local_world_size: int, variant: str) -> None:
    """Raises UserError, one line with both figures and a remedy, where a rank cannot hold its part."""
    judge(FITS, Room(need, device, available_memory(device, local_world_size), variant), {})


def _free_ram() -> int | None:
    words = _read("/proc/meminfo").partition("MemAvailable:")[2].split()
    return int(words[0]) * 1024 if words else None


def _cgroup_limit() -> int | None:
    """The smallest memory limit of this process's control group and its parents, version 1 or 2; None where
    there is none."""
    limits = []
    for line in ["0::/", "0:memory:/", *_read("/proc/self/cgroup").splitlines()]:
        _, controllers, path = line.split(":", 2)
        if controllers not in ("", "memory"):
            continue
        root, name = ("", "memory.max") if controllers == "" else ("memory", "memory.limit_in_bytes")
        folder = Path(path.lstrip("/"))
        for parent in (folder, *folder.parents):
            text = _read(Path("/sys/fs/cgroup", root, parent, name)).strip()
            if text.isdigit():
                limits.append(int(text))
    return min(limits, default=None)


def _read(path: str | Path) -> str:
    try:
        return Path(path).read_text()
    except OSError:
        return ""
