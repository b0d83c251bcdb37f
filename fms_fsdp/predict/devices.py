"""Devices: data sheets from tables in TOML."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from dataclasses import MISSING, dataclass, fields
from functools import cache
from pathlib import Path
from typing import Any

from fms_fsdp.config.values import must_be_one_of
from fms_fsdp.errors import UserError

_SHIPPED = Path(__file__).with_name("devices.toml")
_PEAKS = "peaks"  # the table of GPUs of which only the peak is known
GENERATIONS = ("ampere", "hopper")  # with efficiencies in speed.py


@dataclass(frozen=True)
class Device:
    """A device and its links; devices.toml explains the fields. `full_watts`: the power at which the
    peak was stated, if this device is given less. `gain`: how much faster this program was measured to
    compute than the efficiencies of its generation say."""

    name: str
    memory_gib: float
    tflops: Mapping[str, float]
    memory_gb_s: float
    node_gb_s: float
    net_gb_s: float
    watts: float
    source: str
    full_watts: float = 0.0
    generation: str = "hopper"
    gain: float = 1.0

    @property
    def memory_bytes(self) -> int:
        return int(self.memory_gib * 2**30)

    @property
    def clock(self) -> float:
        """The fraction of the stated clock that less power leaves.

        Power grows with the clock's third power, because the voltage rises with the clock.
        """
        if not self.full_watts:
            return 1.0
        return min(1.0, self.watts / self.full_watts) ** (1 / 3)

    @property
    def half_precision(self) -> str:
        """The dtype of 16 bits by whose peak MFU counts: bf16, or fp16 on an older device."""
        return "bf16" if "bf16" in self.tflops else "fp16"

    def peak(self, dtype: str) -> float:
        """Returns the FLOP/s of dense matmuls.

        Raises:
            UserError: the device has no such matmuls.
        """
        if dtype not in self.tflops:
            raise UserError(
                f"--device={self.name} has no matmuls in {dtype}, only in {', '.join(self.tflops)}; "
                f"set --precision={self.half_precision}, or choose another device"
            )
        return 1e12 * self.tflops[dtype]


@cache
def _read(path: Path) -> dict[str, Device]:
    tables = _read_toml(path)
    return {name: _device(name, table, path) for name, table in tables.items() if name != _PEAKS}


@cache
def _read_toml(path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise UserError(f"--hardware={path} cannot be read: {error}; fix the file") from error


def _device(name: str, table: Any, path: Path) -> Device:
    """Returns the device of a table.

    Raises:
        UserError: a field is missing, unknown or has another type.
    """
    where = f"--hardware={path}, device {name}:"
    known = {each.name: each for each in fields(Device)[1:]}
    required = {key for key, each in known.items() if each.default is MISSING}
    keys = set(table) if isinstance(table, dict) else set[str]()
    wrong = sorted((required - keys) | (keys - known.keys()))
    if wrong:
        raise UserError(
            f"{where} {', '.join(wrong)} is missing or unknown; the fields are {', '.join(known)}"
        )
    peaks = table["tflops"] if isinstance(table["tflops"], dict) else {}
    numbers = dict(peaks)
    for key, value in table.items():
        if key not in ("source", "generation", "tflops"):
            numbers[key] = value
    for key, value in numbers.items():
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < 1e9:
            raise UserError(f"{where} {key}={value} must be a number above 0; fix the file")
    if not {"bf16", "fp16"} & peaks.keys():
        raise UserError(
            f"{where} tflops={table['tflops']} must have a peak for bf16, or for fp16 on an older GPU; "
            "write e.g. { bf16 = 989 }"
        )
    generation = table.get("generation", "hopper")
    if generation not in GENERATIONS:
        choices = must_be_one_of(GENERATIONS, str(generation), cutoff=0.5)
        raise UserError(f"{where} generation={generation} {choices}")
    return Device(name, **table)


def find_device(name: str, path: str = "") -> Device:
    """Returns the device of this name in the user's file, else in the shipped table.

    Raises:
        UserError: there is no such device, or the file has another form.
    """
    devices = dict(_read(_SHIPPED))
    if path:
        devices |= _read(Path(path))
    if name not in devices:
        raise UserError(
            f"--device={name} must be described in --hardware=FILE.toml, as fms_fsdp/predict/devices.toml "
            f"does, or {must_be_one_of(list(devices), name, cutoff=0.4).removeprefix('must ')}"
        )
    return devices[name]


def known_device(gpu: str, memory_bytes: int) -> Device | None:
    """Returns the shipped device that the driver calls `gpu`, with the nearest memory, or None.

    Example: "NVIDIA H100 80GB HBM3" is h100_80gb, "NVIDIA H100 PCIe" is h100_pcie.
    """
    words = gpu.lower().replace("-", " ").split()
    if "mig" in words:  # a slice of a GPU, as in "NVIDIA H100 80GB HBM3 MIG 1g.10gb"
        return None
    words.append("".join(words[-2:]))  # rtx4090 of "RTX 4090", but not of "RTX 4090 Laptop GPU"
    found = []
    for device in _read(_SHIPPED).values():
        chip = device.name.split("_")[0]
        is_same_form = ("pcie" in words) == ("pcie" in device.name)
        if chip in words and is_same_form:
            found.append(device)
    return min(found, key=lambda device: abs(device.memory_bytes - memory_bytes), default=None)


def peak_16bit_flops(gpu: str) -> float | None:
    """Returns the dense FLOP/s of the GPU that the driver calls `gpu`; None if it is unknown.

    They are those of bf16, or of fp16 for a GPU without bf16. The peak of a MIG slice is unknown: its name does not contain its part of the multiprocessors.
    """
    if " MIG " in gpu:
        return None
    peaks: dict[str, float] = _read_toml(_SHIPPED)[_PEAKS]
    names = [name for name in peaks if name in gpu]
    if names:
        longest = max(names, key=len)  # if one name contains another
        return 1e12 * peaks[longest]
    device = known_device(gpu, 0)  # devices with one name differ in memory alone
    return None if device is None else device.peak(device.half_precision)
