"""The machine of a run, as far as its plan depends on it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch

from fms_fsdp.compiler import missing_for_compilation
from fms_fsdp.config import ParallelConfig
from fms_fsdp.distributed.runtime import min_over_ranks, run_on_rank0
from fms_fsdp.distributed.world import World
from fms_fsdp.packages import is_installed
from fms_fsdp.parallel.compile import compiles
from fms_fsdp.parallel.dtypes import cpu_has_bf16
from fms_fsdp.state import working_folder
from fms_fsdp.versions import versions

TRACKER_PACKAGES = ("wandb",)  # trackers with the package's name
# Fractions of the memory that a chosen micro-batch leaves free. The prediction does not include the
# CUDA context, NCCL and fragments. In a launch one sequence too many ends the run; an estimate is
# of a machine on which nothing else runs.
LAUNCH_MARGIN = 0.1
ESTIMATE_MARGIN = 0.05


@dataclass(frozen=True)
class Machine:
    """The ranks of a run, their device, and what the device supports.

    `here` describes this machine, `named` one that does not have to exist. Defaults are those of a
    machine that supports every flag.

    memory              bytes that every rank may use, by type of device; {} until it is measured
    margin              fraction of the memory that --batch_size=auto leaves free
    total_memory        bytes of a GPU, those that other programs use included; 0 if unknown
    has_bf16            whether the device computes bf16 natively
    capability          compute capability of a GPU; None if unknown
    missing_for_compilation    why blocks cannot be compiled, with a fix; "" if they can
    missing_packages    packages of trackers that are not installed
    versions            of packages and code, and working_dir: recorded in config.json
    """

    world: World
    device_type: str = "cuda"
    memory: Mapping[str, int] = field(default_factory=dict)
    margin: float = LAUNCH_MARGIN
    total_memory: int = 0
    device_name: str = ""
    has_bf16: bool = True
    capability: tuple[int, int] | None = None
    missing_for_compilation: str = ""
    missing_packages: tuple[str, ...] = ()
    versions: Mapping[str, str] = field(default_factory=dict)
    working_dir: str = ""

    @staticmethod
    def here(world: World, device: torch.device) -> Machine:
        """Returns the machine of this process, without its memory and versions."""
        missing = [name for name in TRACKER_PACKAGES if not is_installed(name)]
        machine = Machine(
            world,
            device.type,
            has_bf16=cpu_has_bf16(),
            missing_for_compilation=missing_for_compilation(device.type),
            missing_packages=tuple(missing),
            working_dir=working_folder(),
        )
        if device.type != "cuda":
            return machine
        return replace(
            machine,
            total_memory=torch.cuda.get_device_properties(device).total_memory,
            device_name=torch.cuda.get_device_name(device),
            has_bf16=torch.cuda.is_bf16_supported(including_emulation=False),
            capability=torch.cuda.get_device_capability(device),
        )

    @staticmethod
    def named(
        name: str, num_devices: int, devices_per_node: int = 8, hardware: str = ""
    ) -> Machine:
        """Returns a machine of GPUs of the table of devices, or of the file `hardware`.

        Raises:
            UserError: there is no such device.
        """
        from fms_fsdp.predict.devices import find_device

        device = find_device(name, hardware)
        return Machine.of_gpus(device.memory_bytes, num_devices, devices_per_node)

    @staticmethod
    def of_gpus(memory_bytes: int, num_devices: int, devices_per_node: int = 8) -> Machine:
        """Returns a machine of GPUs with this memory, and hosts with enough."""
        world = World(0, 0, num_devices, min(num_devices, devices_per_node))
        return Machine(world, memory={"cuda": memory_bytes, "cpu": 2**62})

    def measured(self, device: torch.device) -> Machine:
        """Returns the machine with its memory and versions (collective: every rank).

        The memory is the minimum over ranks, so that all ranks choose the same settings. The
        versions are those of rank 0, which alone asks git.
        """
        devices = {each.type: each for each in (device, torch.device("cpu"))}
        own = [available_memory(each, self.world.local_size) for each in devices.values()]
        memory = dict(zip(devices, min_over_ranks(own), strict=True))
        return replace(self, memory=memory, versions=run_on_rank0(versions))

    def compiles(self, section: ParallelConfig) -> bool:
        """Returns whether blocks are compiled."""
        return compiles(section, torch.device(self.device_type), self.missing_for_compilation)


def available_memory(device: torch.device, local_world_size: int) -> int:
    """Returns the bytes that a rank may use.

    Of a GPU that is all except other programs' memory; of a CPU, this rank's fraction of the free
    memory of the machine and its control group.
    """
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0] + torch.cuda.memory_reserved(device)
    limits = [limit for limit in (_free_memory(), _cgroup_limit()) if limit is not None]
    return min(limits, default=2**62) // local_world_size


def _free_memory() -> int | None:
    _, _, after = _text("/proc/meminfo").partition("MemAvailable:")
    if not after:
        return None
    return int(after.split()[0]) * 1024  # from KiB


def _cgroup_limit() -> int | None:
    """Returns the smallest memory limit of this process's control group and its parents.

    Reads versions 1 and 2; None if there is no limit.
    """
    limits = []
    for line in ["0::/", "0:memory:/", *_text("/proc/self/cgroup").splitlines()]:
        _, controllers, path = line.split(":", 2)
        if controllers not in ("", "memory"):
            continue
        root = "memory"
        name = "memory.limit_in_bytes"
        if controllers == "":  # version 2
            root = ""
            name = "memory.max"
        folder = Path(path.lstrip("/"))
        for parent in (folder, *folder.parents):
            text = _text(Path("/sys/fs/cgroup", root, parent, name)).strip()
            if text.isdigit():
                limits.append(int(text))
    return min(limits, default=None)


def _text(path: str | Path) -> str:
    try:
        return Path(path).read_text(encoding="utf-8")
    except OSError:
        return ""
