"""How a flag is declared: a dataclass field with its documentation. Imports nothing but the standard library."""

from __future__ import annotations

from dataclasses import Field, field
from typing import Any

from fms_fsdp.config.values import shown


def flag(
    default: Any,
    help: str,
    *,
    choices: tuple[str, ...] = (),
    minimum: float | None = None,
    maximum: float | None = None,
    above: float | None = None,
    below: float | None = None,
    advanced: bool = False,
    resume: str = "",
    in_name: bool | None = None,
) -> Any:
    """A dataclass field with its documentation: what `--help` prints and what a value must satisfy.

    `resume`: what another value does to a run that goes on from a checkpoint: "free", it trains the same; "announced", it takes effect from there
    on and is logged; "refused"; "" is the section's own `RESUME`. `in_name`: whether the default run name depends on it;
    None: it does unless it is free.
    """
    metadata = dict(help=help, choices=choices, minimum=minimum, maximum=maximum, above=above, below=below)
    metadata |= dict(advanced=advanced, resume=resume, in_name=in_name)
    if isinstance(default, list | dict):
        raise TypeError("a flag's default must be immutable")
    return field(default=default, metadata=metadata)


def divisors(total: int, most: int) -> list[int]:
    """The divisors of `total` up to `most`, for messages."""
    return [number for number in range(1, min(total, most) + 1) if total % number == 0]


def resume_rule(spec: Field[Any], section: type[Any]) -> str:
    rule: str = spec.metadata["resume"] or getattr(section, "RESUME", "")
    return rule


def is_in_name(spec: Field[Any], section: type[Any]) -> bool:
    said: bool | None = spec.metadata["in_name"]
    return resume_rule(spec, section) in ("announced", "refused") if said is None else said


def check_bare_name(flag: str, name: str) -> None:
    """Raises ValueError where `name` would not be one folder's name."""
    if "/" in name or name in (".", "..") or len(name) > 200:
        raise ValueError(
            f"{flag} ({shown(name)}) must be a bare name, without '/', of at most 200 characters"
        )


def check_path(flag: str, path: str) -> None:
    """Raises ValueError where no file system could hold it."""
    if any(len(part.encode()) > 255 for part in path.split("/")):
        raise ValueError(f"{flag} ({shown(path)}) must have no name longer than 255 bytes; shorten it")


def check_source_name(flag: str, name: str) -> None:
    """Raises ValueError where `name` would not lie in the folder it is looked for in."""
    check_path(flag, name)
    if name.startswith("/") or ".." in name.split("/"):
        raise ValueError(f"{flag} ({shown(name)}) must be a subfolder's name, relative and without '..'")


def joined(values: Any) -> str:
    """A value, or the values of a list, as messages quote them."""
    items = values if isinstance(values, list | tuple) else [values]
    return ",".join(f"{value:g}" if isinstance(value, float) else str(value) for value in items)
