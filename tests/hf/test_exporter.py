"""Exports that are due survive the end of a launch, and their checkpoints are kept for them."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

from fms_fsdp.hf.exporter import Exporter


def exporter_of(folder: Path, start_step: int) -> Exporter:
    mesh: Any = SimpleNamespace(is_main=True)
    return Exporter(4, folder / "checkpoints", folder / "exports", mesh, start_step)


def test_due_exports_pass_to_next_launch(tmp_path: Path) -> None:
    first = exporter_of(tmp_path, 0)
    for step in range(1, 13):
        state: Any = SimpleNamespace(step=step, is_done=False)
        first.run_if_due(state)  # no checkpoint is complete
    first.close()
    assert first.due_steps() == (4, 8, 12)
    # The launch was killed between the end of this export and its record.
    (tmp_path / "exports/step_4").mkdir()
    second = exporter_of(tmp_path, 11)  # step 12 is trained again
    assert second.due_steps() == (8,)
    second.finish()
    assert second.due_steps() == exporter_of(tmp_path, 12).due_steps() == ()
    assert [path.name for path in (tmp_path / "exports").iterdir()] == ["step_4"]
