"""A run and the names of runs that an earlier version recorded (record_today.py) hold in this one too."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from tests.cli import losses, status, trained
from tests.run.record_today import TODAY, flags, name_of


@pytest.fixture
def today(tmp_path: Path) -> Path:
    shutil.unpack_archive(TODAY, tmp_path)
    return tmp_path


def test_a_recorded_run_goes_on_with_the_losses_it_had(today: Path) -> None:
    """Recorded with torch 2.13 on x86-64. Another build can round differently, so it compares to 1e-5."""
    run = today / "run"
    shown = trained(*flags(today / "data", run))
    assert "resuming from step 3" in shown
    assert losses(run) == pytest.approx(json.loads((today / "losses.json").read_text()), rel=1e-5)
    assert status(run)["status"] == "finished" and status(run)["step"] == 6


def test_default_names_of_runs_are_those_on_record(
    today: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else a run would begin again at step 0, in another folder."""
    monkeypatch.chdir(today)
    recorded = json.loads((today / "run_names.json").read_text())
    assert len(recorded) > 180 and {line: name_of(line) for line in recorded} == recorded
