"""Predictions against what others published (the tables beside this file): the targets.

Sources: llm-foundry's scripts/train/benchmarking (MPT); torchtitan's benchmarks, KempnerForge and fms-fsdp.
"""

from __future__ import annotations

import csv
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.cli import ROOT

TABLES = [Path(__file__).with_name(f"published_{name}.tsv") for name in ("mpt", "llama")]


@pytest.fixture(autouse=True)
def _scripts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))


@pytest.mark.slow  # fits the efficiencies once for each size that is left out
def test_the_targets_hold_with_a_fit_on_other_sizes(
    capsys: pytest.CaptureFixture[str],
) -> None:
    from judge_plan import judge, left_out
    from published import read_published

    rows = [row for table in TABLES for row in read_published(table)]
    assert len(rows) == 88
    judged = judge(rows, left_out(rows))
    errors = sorted(abs(each.error) for each in judged if each.error is not None)
    assert len(errors) == 87, "one row has no local batch"
    assert errors[len(errors) // 2] <= 0.04
    assert sum(error <= 0.15 for error in errors) >= 0.9 * len(errors)


@pytest.mark.slow
def test_published_rows_fit_and_peaks_are_close() -> None:
    from judge_plan import judge
    from published import read_published

    judged = judge([row for table in TABLES for row in read_published(table)])
    errors = sorted(abs(each.error) for each in judged if each.error is not None)
    assert errors[len(errors) // 2] <= 0.03
    assert sum(error <= 0.15 for error in errors) >= 0.95 * len(errors)
    assert [each.row.name for each in judged if each.fits is False] == []
    peaks = [each.memory_error for each in judged if each.memory_error is not None]
    assert len(peaks) == 4 and max(map(abs, peaks)) <= 0.1


@pytest.mark.slow
def test_shipped_efficiencies_are_fitted_on_all_rows() -> None:
    from judge_plan import calibrate, efficiencies
    from published import read_published

    from fms_fsdp.predict.speed import EFFICIENCY

    rows = [row for table in TABLES for row in read_published(table) if row.step is not None]
    for generation, fitted in efficiencies(calibrate(rows)).items():
        assert EFFICIENCY[generation] == pytest.approx(fitted, rel=0.02), generation


@pytest.mark.parametrize("table", TABLES)
def test_columns_may_come_in_any_order(
    table: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from judge_plan import main

    with table.open(newline="") as file:
        rows = list(csv.DictReader(file, delimiter="\t"))
    some = rows[:8]
    names = list(rows[0])
    printed = []
    for order in (names, random.Random(3).sample(names, len(names))):
        path = tmp_path / "some.tsv"
        with path.open("w", newline="") as file:
            writer = csv.DictWriter(file, order, delimiter="\t", extrasaction="ignore")
            writer.writeheader()
            writer.writerows(some)
        assert main([str(path)]) == 0
        printed.append(capsys.readouterr().out)
    assert printed[0] == printed[1]
    assert printed[0].count("\n") > len(some) and "tokens/s: median error" in printed[0]
    assert ("no local batch" in printed[0]) is ("llama" in table.name)


@pytest.mark.parametrize(
    ("spoil", "words"),
    [
        (lambda text: "", "must have a header and rows"),
        (
            lambda text: text.replace("micro_batch", "rows"),
            "must have the columns of a published table",
        ),
        (lambda text: text.replace("\t2115", "\tfast"), "line 2, cannot be read"),
        (lambda text: text.replace("h100_80gb", "h1000"), "--device=h1000 must be described in"),
    ],
)
def test_a_table_that_cannot_be_read_is_refused_in_one_line(
    spoil: Callable[[str], str], words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from judge_plan import main

    path = tmp_path / "table.tsv"
    path.write_text(spoil(TABLES[0].read_text()))
    assert main([str(path)]) == 2
    told = capsys.readouterr().err
    assert words in told and told.count("\n") == 1
    assert main([str(tmp_path / "none.tsv")]) == 2


@pytest.mark.slow  # judges all rows
def test_a_picture_is_drawn(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from judge_plan import main

    argv: Any = [f"--plot={tmp_path}/plan.svg", *map(str, TABLES)]
    assert main(argv) == 0 and "tokens/s per GPU" in (tmp_path / "plan.svg").read_text()
