"""Energy that this rank's GPU and, once a node, the CPU packages have used, where the hardware counts it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

POWERCAP = Path("/sys/class/powercap")
Counter = Callable[[], float]


class EnergyMeter:
    """Joules of all counters of this rank since the last reading. A counter that fails is not read again."""

    def __init__(self, counters: list[Counter]) -> None:
        self._last: list[tuple[Counter, float]] = []
        for counter in counters:
            try:
                self._last.append((counter, counter()))
            except Exception:  # noqa: BLE001, S112 - drivers raise anything; energy is never worth a run
                continue

    def read_j(self) -> float:
        """Joules since the last call, or since the start; 0 without counters."""
        readings, self._last, joules = self._last, [], 0.0
        for counter, before in readings:
            try:
                now = counter()
            except Exception:  # noqa: BLE001, S112 - as above
                continue
            joules += now - before
            self._last.append((counter, now))
        return joules


def find_meter(device: torch.device, local_rank: int, powercap: Path = POWERCAP) -> EnergyMeter:
    """The counters of this rank: its GPU by NVML, and on local rank 0 the readable CPU packages by RAPL."""
    counters = _packages(powercap) if local_rank == 0 else []
    if device.type == "cuda" and (gpu := _gpu(device)) is not None:
        counters.append(gpu)
    return EnergyMeter(counters)


def _gpu(device: torch.device) -> Counter | None:
    """Joules of an NVIDIA GPU since its driver was loaded, or None.

    Source: nvmlDeviceGetTotalEnergyConsumption, in mJ.
    """
    try:
        import pynvml

        pynvml.nvmlInit()
        handle: Any = pynvml.nvmlDeviceGetHandleByUUID(f"GPU-{torch.cuda.get_device_properties(device).uuid}")
        return lambda: pynvml.nvmlDeviceGetTotalEnergyConsumption(handle) / 1000
    except Exception:  # noqa: BLE001 - no package, no driver, no NVIDIA
        return None


def _packages(powercap: Path) -> list[Counter]:
    """A counter of joules for each CPU package of the node (`intel-rapl:N`; AMD's are found there too)."""
    return [
        _Package(folder).read_j
        for folder in sorted(powercap.glob("intel-rapl:*"))
        if folder.name.count(":") == 1
    ]


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
