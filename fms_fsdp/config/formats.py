"""Parses flags whose text has a format of its own: durations, step ranges, epochs, fractions."""

from __future__ import annotations

import re
from fractions import Fraction
from typing import NamedTuple

from fms_fsdp.config.values import parse_int, parse_number, shown
from fms_fsdp.errors import UserError


class Duration(NamedTuple):
    """A part of a run, in "steps", "samples" or "tokens", or as a "fraction" of its steps."""

    number: Fraction
    unit: str


def parse_duration(flag: str, text: str) -> Duration:
    """Parses `2000`, `0.05`, `216320samples` or `10Btokens`; a decimal below 1 is a fraction.

    1.0 is an error, because it could be the entire run, or one step.
    """
    digits = text.strip().lower()
    unit = ""
    for each in ("steps", "samples", "tokens"):
        if digits.endswith(each):
            digits = digits.removesuffix(each).removesuffix(" ")
            unit = each
            break
    if "." in digits and not unit:
        fraction = parse_number(digits)
        if fraction is not None and 0 < fraction < 1:
            return Duration(fraction, "fraction")
        if fraction == 1:  # the entire run in other programs, one step as a number
            raise UserError(
                f"--{flag}={shown(text)} must be a fraction of the run below 1, or steps without a "
                "decimal point; write 0.99 for most of the run, or 1 for one step"
            )
    integer = parse_int(digits)
    if integer is None or not 0 <= integer <= 10**15:
        raise UserError(
            f"--{flag}={shown(text)} must be a duration: steps (2000), a fraction of the run "
            "below 1 (0.05), samples (216320samples) or tokens (10Btokens)"
        )
    return Duration(Fraction(integer), unit or "steps")


def parse_skips(flag: str, text: str) -> list[tuple[int, int]]:
    """Parses half-open step ranges: `100:120,300:310`."""
    ranges = []
    for item in filter(None, text.replace(" ", "").split(",")):
        match = re.fullmatch(r"(\d{1,15}):(\d{1,15})", item)
        if match is None or not 1 <= int(match[1]) < int(match[2]):
            raise UserError(
                f"--{flag}={shown(item)} must be a:b with 1 <= a < b, the steps a to b - 1; "
                "write 100:120"
            )
        ranges.append((int(match[1]), int(match[2])))
    return ranges


class StepRange(NamedTuple):
    """The multiples of `every` from `first` to `last`; a `last` of None has no end."""

    first: int
    last: int | None
    every: int

    def holds(self, step: int) -> bool:
        if step < self.first:
            return False
        if self.last is not None and step > self.last:
            return False
        return step % self.every == 0


def parse_ranges(flag: str, text: str) -> list[StepRange]:
    """Parses `1-1000:100,20000-`: the multiples of 100 up to 1000, and all steps from 20000."""
    ranges = []
    for item in filter(None, text.replace(" ", "").split(",")):
        match = re.fullmatch(r"(\d{1,15})-(\d{1,15})?(?::0*([1-9]\d{0,14}))?", item)
        is_valid = match is not None
        if match is not None:
            first = int(match[1])
            last = int(match[2]) if match[2] else None
            is_valid = last is None or last >= max(1, first)
        if match is None or not is_valid:
            raise UserError(
                f"--{flag}={shown(item)} must be FIRST-LAST:EVERY, where LAST and EVERY are "
                "optional; write 1-1000:100 or 20000-"
            )
        ranges.append(StepRange(first, last, int(match[3] or 1)))
    return ranges


def parse_named_interval(flag: str, text: str) -> tuple[str, int]:
    """Parses `*_ms@100`: names, and the minimum number of steps between two of their records."""
    names, at, digits = text.partition("@")
    every: int | None = 1
    if at:
        every = parse_int(digits)
    if not names or every is None or not 1 <= every <= 10**15:
        raise UserError(
            f"--{flag}={shown(text)} must be NAMES or NAMES@STEPS; write *_ms or *_ms@100"
        )
    return names, every


def parse_block_fraction(flag: str, text: str) -> Fraction:
    """Parses a fraction of the blocks in (0, 1]: `1`, `1/2`, `0.33` or `every:k`."""
    quoted = f"--{flag}={shown(text)}"
    if text.startswith("every:"):
        text = f"1/{text.removeprefix('every:')}"
    above, _, below = text.partition("/")
    dividend = parse_number(above)
    divisor = parse_number(below or "1")
    if dividend is None or not divisor:
        raise UserError(f"{quoted} must be a fraction such as 1, 1/2, 0.33 or every:k")
    fraction = dividend / divisor
    if 1 < fraction <= 1000 and fraction.denominator == 1:  # upstream fms-fsdp: every k-th block
        fix = f"for one block in {fraction} write 1/{fraction} or every:{fraction}"
        raise UserError(f"{quoted} must be at most 1; {fix}")
    if not Fraction(1, 10**6) <= fraction <= 1:
        fix = ""
        if fraction == 0:
            fix = "; to recompute none use --fsdp_activation_checkpointing=False"
        raise UserError(f"{quoted} must be above 0 and at most 1{fix}")
    return fraction


def parse_epochs(flag: str, text: str) -> tuple[str, float] | None:
    """Parses epochs of all data (`1.5`) or of one source (`wiki:2`); None for "" and "-1"."""
    if text in ("", "-1"):
        return None
    source, _, digits = text.rpartition(":")
    number = parse_number(digits)
    if number is None or not 0 < number <= 10**6:
        raise UserError(
            f"--{flag}={shown(text)} must be above 0 and at most 1,000,000, and may name a source; "
            "write 2 or wiki:2"
        )
    return source, float(number)
