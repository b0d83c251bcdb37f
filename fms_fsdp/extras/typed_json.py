"""JSON of other programs: a table is read as a table, and each value has a type, or is refused in one line.

    read_table(path) ── content ── kind.of(content, name) → the value, which fits

Standard library only.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fms_fsdp.config.values import shown
from fms_fsdp.errors import UserError


def read_table(path: Path) -> dict[str, Any]:
    """The table in a JSON file.

    Raises:
        UserError: the file cannot be read, or holds something else.
    """
    try:
        return parse_table(path.read_bytes(), str(path))
    except OSError as error:
        raise UserError(
            f"{path} cannot be read: {error.strerror}; fetch the folder again"
        ) from None


def parse_table(data: bytes, name: str) -> dict[str, Any]:
    """The table that JSON text holds. Raises: UserError, with the name of its place."""
    try:
        content = json.loads(data.decode())
    except (ValueError, RecursionError) as error:
        raise UserError(f"{name} is no JSON: {shown(str(error))}; fetch the file again") from None
    if not isinstance(content, dict):
        raise UserError(
            f"{name} must hold a table, not a {type(content).__name__}; fetch the file again"
        )
    return content


@dataclass(frozen=True)
class Kind:
    """The type of a value, in words and as a check."""

    words: str
    fits: Callable[[Any], bool]

    def check(self, name: str, value: Any) -> Any:
        """The value. Raises: UserError where it does not fit."""
        if not self.fits(value):
            raise UserError(f"{name} ({quoted(value)}) must be {self.words}")
        return value

    def of(self, content: Mapping[str, Any], name: str, usual: Any = None) -> Any:
        """The value of that name, or `usual` where there is none. Raises: UserError."""
        return self.check(name, content[name]) if name in content else usual


def quoted(value: Any) -> str:
    """A value as messages quote it."""
    try:
        return shown(str(value)[:999])
    except RecursionError:
        return f"a deep {type(value).__name__}"


def whole(first: int, last: int) -> Kind:
    """A whole number within limits; true and false are none."""
    words = f"a whole number from {first:,} to {last:,}"
    return Kind(words, lambda value: type(value) is int and first <= value <= last)


def number(first: float, last: float) -> Kind:
    """A finite number within limits; true and false are none."""
    words = f"a number from {first:g} to {last:g}"
    return Kind(words, lambda value: type(value) in (int, float) and first <= value <= last)


def one_of(*values: Any) -> Kind:
    """One of some values, of the same type."""
    types = {(type(value), value) for value in values}
    words = f"{'one of ' * (len(values) > 1)}{', '.join(map(str, values))}"
    return Kind(words, lambda value: isinstance(value, Hashable) and (type(value), value) in types)


def or_none(kind: Kind) -> Kind:
    """That kind, or null."""
    return Kind(f"{kind.words}, or null", lambda value: value is None or kind.fits(value))


def list_of(kind: Kind, most: int = 1 << 20) -> Kind:
    """A list of values of a kind."""
    words = f"a list, each {kind.words}"
    return Kind(
        words,
        lambda value: isinstance(value, list) and len(value) <= most and all(map(kind.fits, value)),
    )


_HALVES = re.compile("[\ud800-\udfff]")  # of characters: no file and no library takes them


ANYTHING = Kind("anything", lambda value: True)
FLAG = Kind("true or false", lambda value: isinstance(value, bool))
TEXT = Kind("a text", lambda value: isinstance(value, str) and not _HALVES.search(value))
TABLE = Kind("a table", lambda value: isinstance(value, dict))
