"""Tables of text: the one layout of every command."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence


def table(head: Sequence[str], rows: Iterable[Sequence[str]], text_columns: Collection[int] = (0,)) -> str:
    """The head and the rows in aligned columns: `text_columns` to the left, all others to the right."""
    lines = [head, *rows]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]

    def aligned(line: Sequence[str]) -> str:
        cells = zip(line, widths, strict=True)
        padded = [cell.ljust(w) if i in text_columns else cell.rjust(w) for i, (cell, w) in enumerate(cells)]
        return "  ".join(padded).rstrip()

    return "\n".join(map(aligned, lines))
