"""Texts of flags with a form of their own: spans of a run, ranges of steps, numbers of passes, shares."""

from __future__ import annotations

import re
from fractions import Fraction
from typing import NamedTuple

from fms_fsdp.config.values import exact_number, shown, whole_number
from fms_fsdp.errors import UserError


class RunSpan(NamedTuple):
    """`unit`: steps, samples (rows), tokens, or share (of the run's steps)."""

    number: Fraction
    unit: str


def parse_span(flag: str, text: str) -> RunSpan:
    """The span in `2000`, `0.05`, `216320samples` or `10Btokens`; a number below 1 with a point is a share.

    Raises:
        UserError: none of these.
    """
    match = re.fullmatch(r"(.*?) ?(steps|samples|tokens|)", text.strip().lower())
    number, unit = (match[1], match[2]) if match else ("", "")
    share = exact_number(number) if "." in number and not unit else None
    if share is not None and 0 < share < 1:
        return RunSpan(share, "share")
    if (whole := whole_number(number)) is None or not 0 <= whole <= 10**15:
        raise UserError(
            f"--{flag} ({shown(text)}) must be a span: steps (2000), a share below 1 (0.05), samples "
            "(216320samples) or tokens (10Btokens)"
        )
    return RunSpan(Fraction(whole), unit or "steps")


def parse_skips(flag: str, text: str) -> list[tuple[int, int]]:
    """The ranges of steps [a, b) in `100:120,300:310`.

    Raises:
        UserError: one of them is no such range.
    """
    ranges = []
    for item in filter(None, text.replace(" ", "").split(",")):
        match = re.fullmatch(r"(\d{1,15}):(\d{1,15})", item)
        a, b = (int(match[1]), int(match[2])) if match else (0, 0)
        if not 1 <= a < b:
            raise UserError(
                f"--{flag} ({shown(item)}) must be a:b with 1 <= a < b, the steps a to b - 1; write 100:120"
            )
        ranges.append((a, b))
    return ranges


class StepRange(NamedTuple):
    """The multiples of `every` from `first` to `last`; `last` None has no end."""

    first: int
    last: int | None
    every: int

    def holds(self, step: int) -> bool:
        """Whether a step is one of these."""
        return self.first <= step <= (step if self.last is None else self.last) and step % self.every == 0


def parse_ranges(flag: str, text: str) -> list[StepRange]:
    """The ranges of steps in `1-1000:100,20000-`: multiples of 100 up to 1000, and all from 20000 on.

    Raises:
        UserError: one of them is no such range.
    """
    ranges = []
    for item in filter(None, text.replace(" ", "").split(",")):
        match = re.fullmatch(r"(\d{1,15})-(\d{1,15})?(?::(\d{1,15}))?", item)
        first, last, every = (
            (int(number) if number else None for number in match.groups()) if match else [0] * 3
        )
        if first is None or every == 0 or (last is not None and last < max(1, first)):
            raise UserError(
                f"--{flag} ({shown(item)}) must be FIRST-LAST:EVERY, and LAST and EVERY may be left out; "
                "write 1-1000:100 or 20000-"
            )
        ranges.append(StepRange(first, last, every or 1))
    return ranges


def parse_named_interval(flag: str, text: str) -> tuple[str, int]:
    """The names in `*_ms@100`, and the least number of steps between two of their records; 1 without `@`.

    Raises:
        UserError: what follows `@` is no such number.
    """
    names, at, digits = text.partition("@")
    every = whole_number(digits) if at else 1
    if not names or every is None or not 1 <= every <= 10**15:
        raise UserError(f"--{flag} ({shown(text)}) must be NAMES or NAMES@STEPS; write *_ms or *_ms@100")
    return names, every


def parse_selective_checkpointing(flag: str, text: str) -> Fraction:
    """The share of blocks to recompute, in (0, 1]: from `1`, `1/2`, `0.33` or `every:k` (every k-th block).

    Raises:
        UserError: the text is no such share. In fms-fsdp an integer k above 1 meant "every k-th"; the error
            says how to write that.
    """
    quoted = f"--{flag} ({shown(text)})"
    above, _, below = (f"1/{text[6:]}" if text.startswith("every:") else text).partition("/")
    dividend, divisor = exact_number(above), exact_number(below or "1")
    if dividend is None or not divisor:
        raise UserError(f"{quoted} must be a share such as 1, 1/2, 0.33 or every:k")
    share = dividend / divisor
    if 1 < share <= 1000 and share.denominator == 1:
        remedy = f"for one block in {share} write 1/{share} or every:{share}"
        raise UserError(f"{quoted} must not exceed 1; {remedy}")
    if not Fraction(1, 10**6) <= share <= 1:
        remedy = "; to checkpoint none use --fsdp_activation_checkpointing=False" if share == 0 else ""
        raise UserError(f"{quoted} must lie above 0 and at most at 1{remedy}")
    return share


def parse_epochs(flag: str, text: str) -> tuple[str, float] | None:
    """The source of a number of passes over the data ("" for all) and the number; None for "" and "-1".

    Raises:
        UserError: the text is neither a number above 0 nor such a number behind the name of a source.
    """
    source, _, digits = text.rpartition(":")
    number = exact_number(digits)
    if text in ("", "-1"):
        return None
    if number is None or not 0 < number <= 10**6:
        rule = "must be a number above 0 and at most 1,000,000, or such a number behind the name of a source"
        raise UserError(f"--{flag} ({shown(text)}) {rule}; write 2 or wiki:2")
    return source, float(number)
