"""Parses numbers, and formats values and hints for messages."""

from __future__ import annotations

import difflib
import math
import re
from collections.abc import Iterable, Sequence
from decimal import Decimal
from fractions import Fraction
from typing import Any

_MAX_DIGITS, _MAX_SHOWN = 64, 200  # characters
_SUFFIXES = {"k": 10**3, "m": 10**6, "b": 10**9, "t": 10**12}
_SUFFIXES |= {"": 1, "ki": 2**10, "mi": 2**20, "gi": 2**30}


def parse_number(text: str) -> Fraction | None:
    """Returns the exact number of a decimal text, or None; exponents are clipped to ±999."""
    match = re.fullmatch(r"([+-]?(?:[0-9][0-9_]*\.?[0-9]*|\.[0-9]+))(?:[eE]([+-]?[0-9]+))?", text)
    if match is None or len(text) > _MAX_DIGITS:
        return None
    exponent = max(-999, min(999, int(match[2] or 0)))
    try:
        return Fraction(match[1].replace("_", "")) * Fraction(10) ** exponent
    except ValueError:
        return None


def parse_int(text: str) -> int | None:
    """Returns the exact integer of 4096, 5_000_000, 4k, 2M, 1.5B, 4Ki or 1e6, or None."""
    match = re.fullmatch(r"(.*?)(ki|mi|gi|[kmbt]?)", text, re.IGNORECASE)
    number = parse_number(match[1]) if match is not None else None
    if match is None or number is None:
        return None
    number *= _SUFFIXES[match[2].lower()]
    return int(number) if number.denominator == 1 else None


def parse_float(text: str) -> float | None:
    """Returns a finite number, or None."""
    try:
        number = float(text) if len(text) <= _MAX_DIGITS else math.nan
    except ValueError:
        return None
    return number if math.isfinite(number) else None


def one_line(text: str) -> str:
    """Joins lines and escapes control characters, which could forge lines of a log."""
    text = " ".join(text.split())
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def shown(text: str) -> str:
    """Returns a text as messages quote it: on one line, cut after 200 characters."""
    text = one_line(text[: _MAX_SHOWN + 1])
    return text if len(text) <= _MAX_SHOWN else text[:_MAX_SHOWN] + "…"


def counted(number: int, noun: str) -> str:
    """Returns "1 rank" or "1,024 ranks"."""
    return f"{number:,} {noun}" if number == 1 else f"{number:,} {noun}s"


def joined(values: Any) -> str:
    """Returns a value, or the values of a list, as messages quote them."""
    items = values if isinstance(values, list | tuple) else [values]
    return ",".join(f"{value:g}" if isinstance(value, float) else str(value) for value in items)


def typed(value: Any) -> str:
    """Returns a value exactly as the command line takes it; a comma within an item is escaped."""
    if not isinstance(value, tuple):
        return str(value)
    return ",".join(str(item).replace(",", r"\,") for item in value)


def short(value: float, digits: int = 6) -> str:
    """Returns a number in few characters: 0.25, 12k, 3e-5."""
    for size, letter in ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= size:
            return f"{value / size:.{digits}g}{letter}"
    power = math.floor(math.log10(abs(value))) if value else 0
    is_tiny = -300 < power < -3
    return f"{value / 10.0**power:.{digits}g}e{power}" if is_tiny else f"{value:.{digits}g}"


def plain(value: float, digits: int = 3) -> str:
    """Returns a rounded number without an exponent: 0.0000123, 18,000."""
    return f"{Decimal(f'{value:.{digits}g}'):,f}"


def format_bytes(num_bytes: float) -> str:
    """Returns a size in GiB, below 1 GiB in MiB."""
    if num_bytes >= 2**30:
        return f"{num_bytes / 2**30:,.1f} GiB"
    return f"{num_bytes / 2**20:.1f} MiB"


def rounded_bytes(num_bytes: float) -> str:
    """Returns a size with three digits: 131 GiB, and 18.9 MiB below 1 GiB."""
    if num_bytes >= 2**30:
        return f"{plain(num_bytes / 2**30)} GiB"
    return f"{plain(num_bytes / 2**20)} MiB"


def did_you_mean(known: Iterable[str], word: str, *, cutoff: float = 0.75, mark: str = "") -> str:
    """Returns a hint with the known words that extend `word` or that it extends, else with the most
    similar one; "" if no word is similar enough.

    `mark` is printed before each word.
    """
    known = list(known)
    word = word[:100]
    near = [
        each
        for each in known
        if min(len(each), len(word)) >= 3 and (each.startswith(word) or word.startswith(each))
    ]
    if not 1 <= len(near) <= 3:
        near = difflib.get_close_matches(word, known, n=1, cutoff=cutoff)
    return f"; did you mean {' or '.join(mark + each for each in near)}?" if near else ""


def must_be_one_of(known: Sequence[str], word: str, *, cutoff: float) -> str:
    """Returns the constraint that lists all known words, with a hint for `word`."""
    return f"must be one of {', '.join(known)}{did_you_mean(known, word, cutoff=cutoff)}"
