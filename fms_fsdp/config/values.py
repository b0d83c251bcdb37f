"""Parses numbers, and formats values and hints for messages."""

from __future__ import annotations

import difflib
import math
import re
from collections.abc import Iterable, Sequence
from decimal import Decimal
from fractions import Fraction
from typing import Any

_MAX_DIGITS = 64  # characters of a number
_MAX_SHOWN = 200  # characters of a text in a message
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
    if match is None:
        return None
    digits, suffix = match.groups()
    number = parse_number(digits)
    if number is None:
        return None
    number *= _SUFFIXES[suffix.lower()]
    if number.denominator != 1:
        return None
    return int(number)


def parse_float(text: str) -> float | None:
    """Returns a finite number, or None."""
    if len(text) > _MAX_DIGITS:
        return None
    if not text.isascii():  # float() also reads the digits of other scripts
        return None
    try:
        number = float(text)
    except ValueError:
        return None
    return number if math.isfinite(number) else None


def one_line(text: str) -> str:
    """Joins lines and escapes control characters, which could forge lines of a log."""
    characters = []
    for character in " ".join(text.split()):
        if not character.isprintable():
            character = character.encode("unicode_escape").decode()
        characters.append(character)
    return "".join(characters)


def shown(text: str) -> str:
    """Returns a text as messages quote it: on one line, cut after 200 characters."""
    text = one_line(text[: _MAX_SHOWN + 1])
    if len(text) > _MAX_SHOWN:
        return text[:_MAX_SHOWN] + "…"
    return text


def counted(number: int, noun: str) -> str:
    """Returns "1 rank" or "1,024 ranks"."""
    ending = "" if number == 1 else "s"
    return f"{number:,} {noun}{ending}"


def joined(values: Any) -> str:
    """Returns a value, or the values of a list, as messages quote them."""
    if isinstance(values, list | tuple):
        return ",".join(map(joined, values))
    if isinstance(values, float):
        return f"{values:g}"
    return str(values)


def typed(value: Any) -> str:
    """Returns a value exactly as the command line takes it; a comma within an item is escaped."""
    if not isinstance(value, tuple):
        return str(value)
    return ",".join(str(item).replace(",", r"\,") for item in value)


def short(value: float, digits: int = 6) -> str:
    """Returns a number in few characters: 0.25, 12k, 3e-5."""
    value = float(f"{value:.{digits}g}")  # 999,600 is 1M with three digits, not 1e+03k
    for size, letter in ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= size:
            return f"{value / size:.{digits}g}{letter}"
    power = math.floor(math.log10(abs(value))) if value else 0
    if -300 < power < -3:
        return f"{value / 10.0**power:.{digits}g}e{power}"
    return f"{value:.{digits}g}"


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
    """Returns a hint with the words that are probably meant; "" if no known word is similar enough.

    These are the known words that extend `word` or that it extends, if there are up to three, else
    the most similar one. `mark` is printed before each.
    """
    known = list(known)
    word = word[:100]
    near = []
    for each in known:
        is_extension = each.startswith(word) or word.startswith(each)
        if is_extension and min(len(each), len(word)) >= 3:
            near.append(each)
    if not 1 <= len(near) <= 3:
        near = difflib.get_close_matches(word, known, n=1, cutoff=cutoff)
    if not near:
        return ""
    return f"; did you mean {' or '.join(mark + each for each in near)}?"


def must_be_one_of(known: Sequence[str], word: str, *, cutoff: float) -> str:
    """Returns the constraint that lists all known words, with a hint for `word`."""
    return f"must be one of {', '.join(known)}{did_you_mean(known, word, cutoff=cutoff)}"
