"""Energy that this rank's GPU and, once a node, the CPU packages have used, where the hardware counts it."""

from __future__ import annotations

from pathlib import Path

import torch

from fms_fsdp.observe.sensors import Sensor, nvml_gpu, read_all

POWERCAP = Path("/sys/class/powercap")


class EnergyMeter:
    """Joules of all counters of this rank since the last reading."""

    def __init__(self, counters: list[Sensor]) -> None:
        self._counters = {str(number): counter for number, counter in enumerate(counters)}
        self._last = read_all(self._counters)

    def read_j(self) -> float:
        """Joules since the last call, or since the start; 0 without counters."""
        before, self._last = self._last, read_all(self._counters)
        return sum((now - before[name] for name, now in self._last.items() if name in before), 0.0)


def find_meter(device: torch.device, local_rank: int, powercap: Path = POWERCAP) -> EnergyMeter:
    """The counters of this rank: its GPU by NVML, and on local rank 0 the readable CPU packages by RAPL
    (`intel-rapl:N`).

    Source: nvmlDeviceGetTotalEnergyConsumption, mJ since the driver was loaded.
    """
    zones = sorted(powercap.glob("intel-rapl:*")) if local_rank == 0 else []  # AMD's are found there too
    counters: list[Sensor] = [_Package(zone).read_j for zone in zones if zone.name.count(":") == 1]
    if device.type == "cuda" and (gpu := nvml_gpu(device)) is not None:
        nvml, handle = gpu
        counters.append(lambda: nvml.nvmlDeviceGetTotalEnergyConsumption(handle) / 1000)
    return EnergyMeter(counters)


class _Package:
    """The kernel's counter of one package, in µJ; it wraps around at `max_energy_range_uj`.

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
