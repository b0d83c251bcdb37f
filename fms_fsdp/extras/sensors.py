"""What `--diagnostics` adds to a report: shared and resident memory, temperatures and clocks.

They are those of rank 0's node, each where the machine shows it.
"""

from __future__ import annotations

import shutil
from functools import partial
from pathlib import Path

import torch

from fms_fsdp.observe.metrics import memory
from fms_fsdp.observe.sensors import Sensor, nvml_gpu

_CPU_CHIPS = ("coretemp", "k10temp", "zenpower", "cpu_thermal")  # of Intel, AMD and ARM


def find_sensors(device: torch.device, sys_folder: Path = Path("/sys")) -> dict[str, Sensor]:
    """The sensors of this process, of its GPU by NVML, and of the node's CPUs: the hottest one, and the clock
    of the first core."""
    names = sys_folder.glob("class/hwmon/hwmon*/name")
    chips = [
        path.with_name("temp1_input") for path in names if path.read_text().strip() in _CPU_CHIPS
    ]
    clock = sys_folder / "devices/system/cpu/cpu0/cpufreq/scaling_cur_freq"
    sensors: dict[str, Sensor] = {
        "shm_gib": lambda: shutil.disk_usage("/dev/shm").used / 2**30,  # noqa: S108 - it is only looked at
        "host_rss_gib": lambda: memory(torch.device("cpu"))["mem_gib"],
        "cpu_temperature_c": lambda: max(int(chip.read_text()) for chip in chips) / 1000,
        "cpu_clock_mhz": lambda: int(clock.read_text()) / 1000,
    }
    if device.type == "cuda" and (gpu := nvml_gpu(device)) is not None:
        nvml, handle = gpu
        degrees, hertz = nvml.nvmlDeviceGetTemperature, nvml.nvmlDeviceGetClockInfo
        sensors["gpu_temperature_c"] = partial(degrees, handle, nvml.NVML_TEMPERATURE_GPU)
        sensors["gpu_clock_mhz"] = partial(hertz, handle, nvml.NVML_CLOCK_SM)
        sensors["gpu_memory_clock_mhz"] = partial(hertz, handle, nvml.NVML_CLOCK_MEM)
    return sensors
