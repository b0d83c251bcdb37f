"""Pictures of the docs against the scripts that make them."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.cli import ROOT


def texts(drawing: Path) -> list[str]:
    """Returns the labels, which are equal with every version of matplotlib, unlike the outlines."""
    return re.findall(r"<t(?:ext|span)[^>]*>([^<]+)</t", drawing.read_text())


@pytest.mark.slow  # estimates seven launches of an 8B model
def test_memory_picture_is_what_estimate_predicts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("matplotlib")
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    from pictures import BARS, main

    assert main(["memory", str(tmp_path / "memory.svg")]) == 0
    found = texts(tmp_path / "memory.svg")
    advice = "run `python benchmarks/pictures.py memory docs/guides/memory.svg`"
    assert found == texts(ROOT / "docs/guides/memory.svg"), advice
    assert any("predicted by estimate" in text for text in found)
    assert {name.partition(",")[0] for name in BARS} <= {text.rstrip(",") for text in found}
