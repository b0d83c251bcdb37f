"""Exports that are due survive the end of a launch, and their checkpoints are kept for them."""

from __future__ import annotations

import errno
import logging
import os
import subprocess
import sys
import time
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NoReturn

import pytest
import torch.distributed as dist

from fms_fsdp.checkpoint.folders import STATE
from fms_fsdp.config import TrainConfig
from fms_fsdp.files import write_json
from fms_fsdp.hf.exporter import Exporter
from fms_fsdp.state import TrainMetadata
from tests.distributed.launch import run_ranks
from tests.specs import resolved

RECORD = resolved(TrainConfig()).saved_with


def exporter_of(folder: Path, start_step: int) -> Exporter:
    return Exporter(4, folder / "checkpoints", folder / "exports", start_step, is_main=True)


def due_after(folder: Path, monkeypatch: pytest.MonkeyPatch, script: str) -> Exporter:
    """Returns the exporter at the end of a run, whose exports run this script of a shell."""
    for step in (4, 8):
        write_json(
            folder / "checkpoints" / f"step_{step}" / STATE, TrainMetadata(step, **RECORD).content
        )
    logging.getLogger("fms_fsdp").propagate = True
    python = folder / "python"
    python.write_text(f"#!/bin/sh\n{script}\n")
    python.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(python))
    write_json(folder / "exports" / "due.json", {"steps": [4, 8]})
    return exporter_of(folder, 8)


def test_last_exports_keep_watchdog_alive(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An export that took longer than --collective_timeout_s ended a finished run as failed."""
    exporter = due_after(tmp_path, monkeypatch, "sleep 1.3")
    signs: list[float] = []
    exporter.finish(lambda: signs.append(time.monotonic()), lambda: False)
    assert exporter.due_steps() == () and len(signs) > 3
    assert max(after - before for before, after in pairwise(signs)) < 1.2


def test_stop_leaves_last_exports_due(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    exporter = due_after(tmp_path, monkeypatch, "sleep 60")
    exporter.finish(lambda: None, lambda: True)
    exporter.close()
    assert exporter.due_steps() == exporter_of(tmp_path, 8).due_steps() == (4, 8)


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
    second.finish(lambda: None, lambda: False)
    assert second.due_steps() == exporter_of(tmp_path, 12).due_steps() == ()
    assert [path.name for path in (tmp_path / "exports").iterdir()] == ["step_4"]


def test_verbose_export_ends_with_its_last_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Nobody read the pipe of its output, which holds 64 KiB: the run never ended."""
    script = "head -c 100000 /dev/zero | tr '\\0' x; echo; echo no tokenizer; exit 1"
    exporter = due_after(tmp_path, monkeypatch, script)
    deadline = time.monotonic() + 30
    exporter.finish(lambda: None, lambda: time.monotonic() > deadline)
    assert exporter.due_steps() == ()
    assert "step 8 was not exported: no tokenizer" in caplog.text


def test_export_that_cannot_start_is_logged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def failing(*args: object, **settings: object) -> NoReturn:
        raise BlockingIOError(errno.EAGAIN, "Resource temporarily unavailable")

    exporter = due_after(tmp_path, monkeypatch, "true")
    monkeypatch.setattr(subprocess, "Popen", failing)
    exporter.finish(lambda: None, lambda: False)
    assert exporter.due_steps() == ()
    assert "the export cannot start: Resource temporarily unavailable" in caplog.text


def test_export_of_a_nice_training_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """It was logged as not started, and ran beside the next one."""

    def set_as_a_user(kind: int, pid: int, niceness: int) -> None:
        if niceness < 15:
            raise PermissionError(errno.EACCES, "Permission denied")

    exporter = due_after(tmp_path, monkeypatch, "sleep 0.1")
    monkeypatch.setattr(os, "getpriority", lambda kind, pid: 15)
    monkeypatch.setattr(os, "setpriority", set_as_a_user)
    exporter.finish(lambda: None, lambda: False)
    assert exporter.due_steps() == () and "not exported" not in caplog.text


def test_failing_storage_leaves_last_exports_due(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """They were dropped, and were said to have no checkpoint."""
    exporter = due_after(tmp_path, monkeypatch, "true")
    stat = os.stat

    def failing(path: Any, **options: Any) -> os.stat_result:
        if os.fspath(path) == str(tmp_path / "checkpoints/step_8"):
            raise OSError(errno.EIO, "Input/output error", str(path))
        return stat(path, **options)

    with monkeypatch.context() as patch:
        patch.setattr(os, "stat", failing)
        exporter.finish(lambda: None, lambda: False)
    assert exporter.due_steps() == (8,) and "step_8" in caplog.text
    assert "no checkpoint" not in caplog.text and exporter_of(tmp_path, 8).due_steps() == (8,)


def finish_slow_export(folder: str) -> bool:
    """Returns on each rank whether the export has ended when `finish` returns."""
    with pytest.MonkeyPatch.context() as patch:
        if dist.get_rank() == 0:
            exporter = due_after(Path(folder), patch, f"sleep 0.7; touch '{folder}/exported'")
        else:
            exporter = Exporter(4, Path(folder), Path(folder), 8, is_main=False)
        exporter.finish(lambda: None, lambda: False)
    return Path(folder, "exported").exists()


def test_ranks_wait_for_last_exports(tmp_path: Path) -> None:
    """The other nodes ended, and srun killed the job with its exports ten minutes later."""
    assert run_ranks(finish_slow_export, 2, str(tmp_path)) == [True, True]
