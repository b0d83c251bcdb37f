"""Output of commands: tables of text in one layout, and a line of progress."""

from __future__ import annotations

import sys
from collections.abc import Collection, Iterable, Sequence


def table(
    head: Sequence[str], rows: Iterable[Sequence[str]], text_columns: Collection[int] = (0,)
) -> str:
    """Returns the head and the rows in aligned columns: `text_columns` left, all others right."""
    lines = [head, *rows]
    columns = list[list[str]]()
    for number, column in enumerate(zip(*lines, strict=True)):
        pad, width = str.ljust if number in text_columns else str.rjust, max(map(len, column))
        columns.append([pad(cell, width) for cell in column])
    return "\n".join("  ".join(cells).rstrip() for cells in zip(*columns, strict=True))


def show_progress(text: str) -> None:
    """Rewrites the last line of the terminal, where stderr is one."""
    if sys.stderr.isatty():
        print(f"\r\x1b[K{text}", end="", file=sys.stderr, flush=True)
