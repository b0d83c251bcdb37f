"""The one table of text."""

from __future__ import annotations

import pytest

from fms_fsdp.console import table


def test_text_is_left_and_numbers_right() -> None:
    rows = [("a", "1", "x"), ("longer", "1,000", "")]
    assert table(("name", "n", "state"), rows, text_columns=(0, 2)).splitlines() == [
        "name        n  state",
        "a           1  x",
        "longer  1,000",
    ]


def test_every_row_has_all_columns() -> None:
    assert table(("name", "n"), []) == "name  n"
    with pytest.raises(ValueError):
        table(("name", "n"), [("a",)])
