"""The devices that the planner knows, from tables in TOML: the shipped hardware.toml, and a user's own."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from dataclasses import MISSING, dataclass, fields
from functools import cache
from pathlib import Path
from typing import Any

from fms_fsdp.config.values import must_be_one_of
from fms_fsdp.errors import UserError
from fms_fsdp.predict.curves import CURVES

_SHIPPED = Path(__file__).with_name("hardware.toml")
_NUMBERS = ("memory_gib", "memory_gb_s", "node_gb_s", "net_gb_s", "watts", "full_watts")


@dataclass(frozen=True)
class DeviceKind:
    """A device and its links; hardware.toml says what each field is. `full_watts`: the power at which the
    peak was stated, where this device is given less."""

    name: str
    memory_gib: float
    tflops: Mapping[str, float]
    memory_gb_s: float
    node_gb_s: float
    net_gb_s: float
    watts: float
    source: str
    full_watts: float = 0.0
    curves: str = "hopper"

    @property
    def memory_bytes(self) -> int:
        return int(self.memory_gib * 2**30)

    @property
    def clock(self) -> float:
        """The share of the stated clock that less power leaves: power grows with the clock's third power,
        because the voltage rises with the clock."""
        return min(1.0, self.watts / self.full_watts) ** (1 / 3) if self.full_watts else 1.0

    def peak(self, dtype: str) -> float:
        """FLOP/s of dense products.

        Raises:
            UserError: the device has no such products.
        """
        if dtype not in self.tflops:
            have = ", ".join(self.tflops)
            raise UserError(f"--device ({self.name}) must have products in {dtype}; it has {have}")
        return 1e12 * self.tflops[dtype]


@cache
def _read(path: Path) -> dict[str, DeviceKind]:
    try:
        content = tomllib.loads(path.read_text())
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise UserError(f"--hardware ({path}) cannot be read: {error}") from error
    return {name: _device(name, table, path) for name, table in content.items()}


def _device(name: str, table: Any, path: Path) -> DeviceKind:
    """A device from its table.

    Raises:
        UserError: a field is missing, unknown or no positive number.
    """
    what = f"--hardware ({path}), device {name},"
    if not isinstance(table, dict):
        raise UserError(f"{what} must be a table of fields; write [{name}] above them")
    known = {field.name: field for field in fields(DeviceKind) if field.name != "name"}
    if unknown := sorted(table.keys() - known):
        raise UserError(
            f"{what} has a field {unknown[0]}, which {must_be_one_of(list(known), unknown[0], cutoff=0.5)}"
        )
    needed = [key for key, field in known.items() if field.default is MISSING]
    if missing := [key for key in needed if key not in table]:
        raise UserError(f"{what} must have the field {missing[0]}; the fields are {', '.join(known)}")
    numbers = {key: table[key] for key in _NUMBERS if key in table}
    if isinstance(table["tflops"], dict):
        numbers |= {f"tflops.{key}": value for key, value in table["tflops"].items()}
    for key, value in numbers.items() or {"tflops": None}.items():
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < 1e9:
            raise UserError(f"{what} field {key} ({value}) must be a number above 0")
    if not isinstance(table["tflops"], dict) or "bf16" not in table["tflops"]:
        raise UserError(f"{what} field tflops ({table['tflops']}) must name a peak; write {{ bf16 = 989 }}")
    if (curves := table.get("curves", "hopper")) not in CURVES:
        raise UserError(
            f"{what} field curves ({curves}) {must_be_one_of(list(CURVES), str(curves), cutoff=0.5)}"
        )
    return DeviceKind(name, **table)


def find_hardware(name: str, path: str = "") -> DeviceKind:
    """The device of that name in the user's file, if there is one, else in the shipped table.

    Raises:
        UserError: no such device, or the file is no such table.
    """
    devices = _read(_SHIPPED) | (_read(Path(path)) if path else {})
    if name not in devices:
        raise UserError(
            f"--device ({name}) {must_be_one_of(['cpu', *devices], name, cutoff=0.4)}; "
            f"--hardware=FILE.toml adds your own (fms_fsdp/predict/hardware.toml shows how)"
        )
    return devices[name]


def hardware_of(gpu: str, memory_bytes: int) -> DeviceKind | None:
    """The shipped device that a GPU with this name of its driver is: of those whose name it has, the one
    whose memory is nearest; None where none is known."""
    words = gpu.lower().replace("-", " ").split()
    found = [
        device
        for device in _read(_SHIPPED).values()
        if device.name.split("_")[0] in words and ("pcie" in words) == ("pcie" in device.name)
    ]
    return min(found, key=lambda device: abs(device.memory_bytes - memory_bytes), default=None)
