"""Readings of the machine, each of which can fail at any time, and a meter of the energy of a rank."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch

Sensor = Callable[[], float]


def read_all(sensors: Mapping[str, Sensor]) -> dict[str, float]:
    """The readings by name; a sensor that fails has none."""
    readings = {}
    for name, sensor in sensors.items():
        with suppress(Exception):  # drivers raise anything; a reading is never worth a run
            readings[name] = sensor()
    return readings


def nvml_gpu(device: torch.device) -> tuple[Any, Any] | None:
    """NVML and the handle of a GPU in NVML; None without the package, a driver or a GPU of NVIDIA."""
    with suppress(Exception):  # drivers raise anything
        import pynvml

        pynvml.nvmlInit()
        uuid = torch.cuda.get_device_properties(device).uuid
        return pynvml, pynvml.nvmlDeviceGetHandleByUUID(f"GPU-{uuid}")
    return None


class EnergyMeter:
    """Joules of all counters of this rank since the last reading."""

    def __init__(self, counters: Mapping[str, Sensor]) -> None:
        self._counters, self._last = counters, read_all(counters)

    def read_j(self) -> float:
        """Joules since the last call, or since the start; 0 without counters."""
        before, self._last = self._last, read_all(self._counters)
        return sum((now - before[name] for name, now in self._last.items() if name in before), 0.0)


def find_meter(
    device: torch.device, local_rank: int, powercap: Path = Path("/sys/class/powercap")
) -> EnergyMeter:
    """The energy counters of this rank: NVML counts the GPU, and on local rank 0 RAPL the CPU packages
    (`intel-rapl:N`, on AMD too).

    Source: nvmlDeviceGetTotalEnergyConsumption, mJ since the driver was loaded.
    """
    counters: dict[str, Sensor] = {}
    for zone in powercap.glob("intel-rapl:*") if local_rank == 0 else ():
        if zone.name.count(":") == 1:
            counters[zone.name] = _Package(zone).read_j
    if device.type == "cuda" and (gpu := nvml_gpu(device)) is not None:
        nvml, handle = gpu
        counters["gpu"] = lambda: nvml.nvmlDeviceGetTotalEnergyConsumption(handle) / 1000
    return EnergyMeter(counters)


class _Package:
    """The kernel's counter of one package, in µJ; the counter wraps around at `max_energy_range_uj`.

    Source: Linux, power/powercap/powercap.rst.
    """

    def __init__(self, folder: Path) -> None:
        self._folder, self._last, self._wrapped = folder, 0, 0

    def read_j(self) -> float:
        now = int((self._folder / "energy_uj").read_text())
        if now < self._last:
            self._wrapped += int((self._folder / "max_energy_range_uj").read_text())
        self._last = now
        return (self._wrapped + now) / 1e6
