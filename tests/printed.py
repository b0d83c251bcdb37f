"""Compares an output that a page shows with the one that its commands print.

Numbers, times, sizes and hashes are compared by pattern, because they differ between machines, and the rest
literally. What `estimate` and `translate` print does not depend on the machine: all of it is literal.
"""

from __future__ import annotations

import re

CLOCK = re.compile(r"^(\d{4}-\d\d-\d\d )?\d\d:\d\d:\d\d ")
PATTERNS = (
    (re.compile(r"\b[0-9a-f]{12,}\b"), "HASH"),
    (re.compile(r"-?\b\d[\d,.]*(e[+-]?\d+)?([kMGT]|ms|s|m|h|d)?\b"), "N"),
    (re.compile(r"\bN [KMG]iB\b"), "N bytes"),
)


def missing_line(shown: str, printed: str, commands: str, *, varies: bool = False) -> str | None:
    """Returns the first line of `shown` that was not printed after the lines before it.

    A line `…` stands for any lines, and at the end of a line for its rest. With `varies` only the first
    word of each line counts, and none of an indented line, which is a document or its text.
    """
    is_exact = not re.sub(r"(?m)^.*fms_fsdp (estimate|translate) .*$", "", commands).strip()
    lines = iter([_pattern(line, is_exact) for line in printed.splitlines()])
    for line in shown.splitlines():
        wanted = _pattern(line, is_exact)
        if wanted in ("", "…") or (varies and line.startswith(" ")):
            continue
        if varies:
            is_found = any(printed_line.split()[:1] == wanted.split()[:1] for printed_line in lines)
        elif wanted.endswith("…"):
            start = wanted.removesuffix("…").rstrip()
            is_found = any(printed_line.startswith(start) for printed_line in lines)
        else:
            is_found = wanted in lines
        if not is_found:
            return line
    return None


def _pattern(line: str, is_exact: bool) -> str:
    line = " ".join(CLOCK.sub("", line.strip()).split())
    if is_exact:
        return line
    for expression, name in PATTERNS:
        line = expression.sub(name, line)
    return line
