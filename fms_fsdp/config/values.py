"""Text of a flag, or a value of TOML or JSON → a value of the declared type.

    int: 1e6, 5_000_000, 2M, 4Ki      float: 3e-4      bool: yes, off      tuple: a,b      None: none, where it is allowed

Every number has a limit, which is checked before any arithmetic.
"""

from __future__ import annotations

import difflib
import operator
import re
import types
import typing
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

LARGEST = {int: 10**15, float: 1e30}  # of a number whose flag says nothing else
_LONGEST_NUMBER, _LONGEST_TEXT, _LONGEST_SHOWN = 64, 1024, 200  # characters
_SUFFIXES = {"": 1, "k": 10**3, "m": 10**6, "b": 10**9, "t": 10**12, "ki": 2**10, "mi": 2**20, "gi": 2**30}
_WORDS = {
    **dict.fromkeys(("true", "1", "yes", "on"), True),
    **dict.fromkeys(("false", "0", "no", "off"), False),
}
_EXAMPLES = {int: "an integer such as 4096, 5_000_000, 2M or 4Ki", float: "a number such as 0.1 or 3e-4"}


@dataclass(frozen=True)
class Field:
    """One flag: where it lives, its declared type and its documentation."""

    name: str
    section: str
    type: Any
    default: Any
    help: str
    choices: tuple[str, ...]
    minimum: float | None
    maximum: float | None
    above: float | None
    below: float | None
    advanced: bool
    resume: str
    in_name: bool


def one_line(text: str) -> str:
    """`text` without line breaks; control characters, which could forge lines or rule a terminal, are written out."""
    text = " ".join(text.split())
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def shown(text: str) -> str:
    """`text` as messages quote it: on one line, and not at any length."""
    text = one_line(text[: _LONGEST_SHOWN + 1])
    return text if len(text) <= _LONGEST_SHOWN else text[:_LONGEST_SHOWN] + "…"


def coerce(field: Field, value: Any) -> Any:
    """`value` as the field's declared type.

    Raises:
        ValueError: it does not fit the type, the choices or the range.
    """
    kind, optional = unwrap(field.type)
    cleared = (
        isinstance(value, str)
        and value.lower() in ("", "none", "null")
        and value.lower() not in field.choices
    )
    if optional and (
        value is None or cleared
    ):  # where none is a choice, as in --sharding_strategy=none, it is meant
        return None
    if typing.get_origin(kind) is not tuple:
        return _scalar(field, kind, value)
    items = value
    if isinstance(value, str):
        inside = value.strip("[]() ")
        items = inside.split(",") if inside else []
        if any(not item.strip() for item in items):
            raise ValueError(f"--{field.name} ({shown(value)}) must have no empty part; write a,b")
    if not isinstance(items, list | tuple):
        items = [items]
    return tuple(_scalar(field, typing.get_args(kind)[0], item) for item in items)


def unwrap(declared: Any) -> tuple[Any, bool]:
    """The type without `| None`, and whether None is allowed."""
    if typing.get_origin(declared) in (types.UnionType, typing.Union):
        inner = [part for part in typing.get_args(declared) if part is not type(None)]
        return inner[0], True
    return declared, False


def _scalar(field: Field, kind: Any, value: Any) -> Any:
    if not isinstance(value, str | bool | int | float):
        raise ValueError(
            f"--{field.name} must be one value of type {kind.__name__}, not a {type(value).__name__}"
        )
    text = str(value).strip() if not isinstance(value, bool) else str(value).lower()
    quoted = f"--{field.name} ({shown(text)})"
    if kind is bool:
        if text.lower() not in _WORDS:
            raise ValueError(f"{quoted} must be a boolean; write true or false")
        return _WORDS[text.lower()]
    if kind is str:
        return _text(field, text, quoted)
    number = _integer(text) if kind is int else _float(text)
    if number is None:
        raise ValueError(f"{quoted} must be {_EXAMPLES[kind]}")
    most = LARGEST[kind] if field.maximum is None else field.maximum
    for bound, broken, rule in (
        (field.minimum, operator.lt, "at least"),
        (field.above, operator.le, "above"),
        (field.below, operator.ge, "below"),
        (most, operator.gt, "at most"),
        (-most, operator.lt, "at least"),
    ):
        if bound is not None and broken(number, bound):
            raise ValueError(f"{quoted} must be {rule} {bound:{',' if isinstance(bound, int) else 'g'}}")
    return number


def _text(field: Field, text: str, quoted: str) -> str:
    if not text.isprintable():
        raise ValueError(f"{quoted} must hold no control characters; leave them out")
    if len(text) > _LONGEST_TEXT:
        raise ValueError(f"{quoted} must have at most {_LONGEST_TEXT} characters; shorten it")
    if not field.choices:
        return text
    if text.lower() not in field.choices:
        near = difflib.get_close_matches(text.lower(), field.choices, n=1, cutoff=0.4)
        hint = f"; did you mean {near[0]}?" if near else ""
        raise ValueError(f"{quoted} must be one of {', '.join(field.choices)}{hint}")
    return text.lower()


def exact_number(text: str) -> Fraction | None:
    """The number that a decimal text means, exactly; None for other texts. An exponent beyond ±999 counts as that."""
    match = re.fullmatch(r"([+-]?(?:[0-9][0-9_]*\.?[0-9]*|\.[0-9]+))(?:[eE]([+-]?[0-9]+))?", text)
    if match is None or len(text) > _LONGEST_NUMBER:
        return None
    try:
        return Fraction(match[1].replace("_", "")) * Fraction(10) ** max(-999, min(999, int(match[2] or 0)))
    except ValueError:
        return None


def _integer(text: str) -> int | None:
    """An exact integer from 4096, 5_000_000, 4k, 2M, 1.5B, 4Ki or 1e6; None for anything else."""
    match = re.fullmatch(r"(.*?)(ki|mi|gi|[kmbt]?)", text, re.IGNORECASE)
    number = exact_number(match[1]) if match is not None else None
    if match is None or number is None:
        return None
    number *= _SUFFIXES[match[2].lower()]
    return int(number) if number.denominator == 1 else None


def _float(text: str) -> float | None:
    try:
        number = float(text) if len(text) <= _LONGEST_NUMBER else float("nan")
    except ValueError:
        return None
    return number if abs(number) < float("inf") else None
