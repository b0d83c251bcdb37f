"""How a flag is declared: a dataclass field with its documentation. Imports nothing but the standard library."""

from __future__ import annotations

from dataclasses import field
from typing import Any


def flag(
    default: Any,
    help: str,
    *,
    choices: tuple[str, ...] = (),
    minimum: float | None = None,
    maximum: float | None = None,
    advanced: bool = False,
    resume: str = "",
) -> Any:
    """A dataclass field with its documentation: what `--help` prints and what a value must satisfy.

    `resume`: what another value does to a run that goes on from a checkpoint: "free", it trains the same; "announced", it takes effect from there
    on and is logged; "refused"; "" is the section's own `RESUME`.
    """
    metadata = dict(help=help, choices=choices, minimum=minimum, maximum=maximum, advanced=advanced, resume=resume)
    if isinstance(default, list | dict):
        raise TypeError("a flag's default must be immutable")
    return field(default=default, metadata=metadata)


def joined(values: Any) -> str:
    return ",".join(f"{value:g}" if isinstance(value, float) else str(value) for value in values)
