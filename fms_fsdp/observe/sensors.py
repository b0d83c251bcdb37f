"""Readings of the machine, each of which can fail at any time."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import suppress
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
    """NVML and its handle of a GPU; None without the package, a driver or a GPU of NVIDIA."""
    try:
        import pynvml

        pynvml.nvmlInit()
        uuid = torch.cuda.get_device_properties(device).uuid
        return pynvml, pynvml.nvmlDeviceGetHandleByUUID(f"GPU-{uuid}")
    except Exception:  # noqa: BLE001 - drivers raise anything
        return None
