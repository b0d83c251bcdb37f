"""Tables of cases as text: a line each, with `|` between the columns."""

from __future__ import annotations

import pytest


def cases(text: str) -> pytest.MarkDecorator:
    """Parametrizes a test by the lines after the first, which names the columns."""
    lines = text.strip().splitlines()
    names, *rows = ([cell.strip() for cell in line.split("|")] for line in lines)
    return pytest.mark.parametrize(names, rows)
