"""A run and the names of runs that an earlier version recorded (record_today.py) hold in this one too."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from tests.cli import losses, status, trained
from tests.run.record_today import DATA, LOSSES, NAMES, RUN, flags, name_of


def test_a_recorded_run_goes_on_with_the_losses_it_had(tmp_path: Path) -> None:
    """Recorded with torch 2.13 on x86-64. Another build can round differently, so it compares to 1e-5."""
    run = tmp_path / "run"
    shutil.copytree(RUN, run)
    shown = trained(*flags(DATA, run))
    assert "resumed from step 3" in shown
    assert losses(run) == pytest.approx(json.loads(LOSSES.read_text()), rel=1e-5)
    assert status(run)["status"] == "finished" and status(run)["step"] == 6


def test_default_names_of_runs_are_those_on_record(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else a run would begin again at step 0, in another folder."""
    monkeypatch.chdir(tmp_path)
    recorded = json.loads(NAMES.read_text())
    assert len(recorded) > 180 and {line: name_of(line) for line in recorded} == recorded
