"""Text of a flag, or a value of TOML or JSON → a value of the declared type.

    int: 1e6, 5_000_000, 2M, 4Ki      float: 3e-4      bool: yes, off      tuple: a,b      None: none

Every number has a limit, which is checked before any arithmetic.
"""

from __future__ import annotations

import difflib
import math
import operator
import re
from collections.abc import Sequence
from decimal import Decimal
from fractions import Fraction
from typing import Any

from fms_fsdp.config.flag import Flag
from fms_fsdp.errors import UserError

LARGEST = {int: 10**15, float: 1e30}  # the limits of a number whose row has none
_LONGEST_NUMBER, _LONGEST_TEXT, _LONGEST_SHOWN = 64, 1024, 200  # characters
_SUFFIXES = {"": 1, "k": 10**3, "m": 10**6, "b": 10**9, "t": 10**12, "ki": 2**10, "mi": 2**20, "gi": 2**30}
# what no text holds: controls but tabs and line ends, and halves of characters
_CONTROLS = re.compile("[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f\ud800-\udfff]")
_WORDS = {
    **dict.fromkeys(("true", "1", "yes", "on"), True),
    **dict.fromkeys(("false", "0", "no", "off"), False),
}
_EXAMPLES = {int: "an integer such as 4096, 5_000_000, 2M or 4Ki", float: "a number such as 0.1 or 3e-4"}


def one_line(text: str) -> str:
    """`text` on one line; control characters, which can forge lines, are spelled out."""
    text = " ".join(text.split())
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def shown(text: str) -> str:
    """`text` as messages quote it: on one line, cut after 200 characters."""
    text = one_line(text[: _LONGEST_SHOWN + 1])
    return text if len(text) <= _LONGEST_SHOWN else text[:_LONGEST_SHOWN] + "…"


def joined(values: Any) -> str:
    """A value, or the values of a list, as messages quote them."""
    items = values if isinstance(values, list | tuple) else [values]
    return ",".join(f"{value:g}" if isinstance(value, float) else str(value) for value in items)


def short(value: float, digits: int = 6) -> str:
    """A number in few characters: 0.25, 12k, 3e-5."""
    for size, letter in ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= size:
            return f"{value / size:.{digits}g}{letter}"
    power = math.floor(math.log10(abs(value))) if value else 0
    is_tiny = -300 < power < -3
    return f"{value / 10.0**power:.{digits}g}e{power}" if is_tiny else f"{value:.{digits}g}"


def plain(value: float, digits: int = 3) -> str:
    """The number, rounded to so many digits and written out: 0.0000123, 18,000."""
    return f"{Decimal(f'{value:.{digits}g}'):,f}"


def coerce(row: Flag, value: Any) -> Any:
    """`value` as the declared type of the flag.

    Raises:
        UserError: it does not fit the type, the choices, the range or the form.
    """
    word = value.lower() if isinstance(value, str) else value
    if row.is_optional and word in ("", "none", "null", None) and word not in row.choices:
        return None  # `none` can be a choice, as in --sharding_strategy=none
    if not row.is_list:
        return _scalar(row, value)
    items = value
    if isinstance(value, str):
        inside = value if row.form == "text" else value.strip("[]() ")
        items = inside.split(",") if inside else []
        if any(not (item if row.form == "text" else item.strip()) for item in items):
            raise UserError(f"--{row.name} ({shown(value)}) must have no empty part; write a,b")
    return tuple(_scalar(row, item) for item in (items if isinstance(items, list | tuple) else [items]))


def _scalar(row: Flag, value: Any) -> Any:
    if not isinstance(value, str | bool | int | float):
        kinds = f"{row.kind.__name__}, not a {type(value).__name__}"
        raise UserError(f"--{row.name} must be one value of type {kinds}")
    text = str(value) if not isinstance(value, bool) else str(value).lower()
    text = text if row.form == "text" else text.strip()
    quoted = f"--{row.name} ({shown(text)})"
    if row.kind is bool:
        if text.lower() not in _WORDS:
            raise UserError(f"{quoted} must be a boolean; write true or false")
        return _WORDS[text.lower()]
    if row.kind is str or text.lower() in row.words:
        return _text(row, text, quoted) if row.kind is str else text.lower()
    return _number(row, text, quoted)


def _number(row: Flag, text: str, quoted: str) -> int | float:
    number = whole_number(text) if row.kind is int else _float(text)
    if number is None:
        raise UserError(f"{quoted} must be {', or '.join([_EXAMPLES[row.kind], *row.words])}")
    most = LARGEST[row.kind] if row.maximum is None else row.maximum
    for bound, is_broken, rule in (
        (row.minimum, operator.lt, "at least"),
        (row.above, operator.le, "above"),
        (row.below, operator.ge, "below"),
        (most, operator.gt, "at most"),
        (-most, operator.lt, "at least"),
    ):
        if bound is not None and is_broken(number, bound):
            raise UserError(f"{quoted} must be {rule} {bound:{',' if isinstance(bound, int) else 'g'}}")
    return number


def _text(row: Flag, text: str, quoted: str) -> str:
    if _CONTROLS.search(text) if row.form == "text" else not text.isprintable():
        raise UserError(f"{quoted} must hold no control characters; remove the control characters")
    if len(text) > _LONGEST_TEXT:
        raise UserError(f"{quoted} must have at most {_LONGEST_TEXT} characters; shorten the text")
    if row.form not in ("", "text"):
        _check_form(row.form, text, quoted)
    if row.parse is not None:
        row.parse(row.name, text)
    if not row.choices or (row.form == "module:function" and ":" in text):
        return text
    text = row.aliases.get(text.lower(), text)
    if text.lower() not in row.choices:
        raise UserError(f"{quoted} {must_be_one_of(row.choices, text.lower(), cutoff=0.4)}")
    return text.lower()


def must_be_one_of(known: Sequence[str], word: str, *, cutoff: float) -> str:
    """The rule that lists all known words, with the known word that is most like `word`, if one is."""
    near = difflib.get_close_matches(word, known, n=1, cutoff=cutoff)
    return f"must be one of {', '.join(known)}" + (f"; did you mean {near[0]}?" if near else "")


def _check_form(form: str, text: str, quoted: str) -> None:
    """Raises UserError for a text that no file system can hold, or a path that leads out of a folder."""
    parts = text.split("/")
    if form == "folder name":
        if len(parts) > 1 or text in (".", "..") or len(text) > 200:
            raise UserError(f"{quoted} must be a bare name, without '/', of at most 200 characters")
        return
    if any(len(part.encode()) > 255 for part in parts):
        raise UserError(f"{quoted} must have no name longer than 255 bytes; shorten the name")
    if form == "source name" and (text.startswith("/") or ".." in parts):
        raise UserError(f"{quoted} must be a subfolder's name, relative and without '..'")


def exact_number(text: str) -> Fraction | None:
    """The exact number of a decimal text; None for other texts. An exponent beyond ±999 counts as ±999."""
    match = re.fullmatch(r"([+-]?(?:[0-9][0-9_]*\.?[0-9]*|\.[0-9]+))(?:[eE]([+-]?[0-9]+))?", text)
    if match is None or len(text) > _LONGEST_NUMBER:
        return None
    try:
        return Fraction(match[1].replace("_", "")) * Fraction(10) ** max(-999, min(999, int(match[2] or 0)))
    except ValueError:
        return None


def whole_number(text: str) -> int | None:
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
