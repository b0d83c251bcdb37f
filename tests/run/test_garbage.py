"""Python's garbage is collected on the same steps on every rank: one that collects lets all wait."""

from __future__ import annotations

import gc
import json
from pathlib import Path

import main_training
from tests.cli import TINY


def test_garbage_is_collected_at_interval(tmp_path: Path) -> None:
    records, collected = tmp_path / "metrics.jsonl", list[int]()

    def note(phase: str, info: dict[str, int]) -> None:
        if phase == "start" and info["generation"] == 2 and records.exists():
            lines = [json.loads(line) for line in records.read_text().splitlines()]
            collected.append(max((line["step"] for line in lines if "loss" in line), default=0))

    flags = [*TINY, "--num_steps=7", "--report_interval=1", "--gc_interval=3"]
    gc.callbacks.append(note)
    try:
        status = main_training.main([*flags, f"--output_dir={tmp_path}"])
    finally:
        gc.callbacks.remove(note)
    assert status == 0 and gc.isenabled() and gc.get_freeze_count() == 0
    assert [step for step in collected if 0 < step < 7] == [3, 6]
