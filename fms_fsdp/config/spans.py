"""Spans of a run: steps, samples, tokens, or a share of the run; and ranges of steps."""

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
