"""Checkpoints of a launch: which ones stay, what they record, and how long a save is expected to take."""

from __future__ import annotations

import errno
import json
import os
import re
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from fms_fsdp.checkpoint import folders
from fms_fsdp.checkpoint.folders import (
    Checkpoint,
    CompleteCheckpoints,
    complete_steps,
    replace_metadata,
)
from fms_fsdp.checkpoint.retention import parse_schedule
from fms_fsdp.config import BatchPlan, TrainConfig
from fms_fsdp.distributed.axes import ParallelDims
from fms_fsdp.distributed.world import World
from fms_fsdp.models.flops import num_params
from fms_fsdp.run.resume_point import ResumePoint
from fms_fsdp.run.startup_log import save_estimates
from fms_fsdp.state import TrainMetadata
from tests.checkpoint.signing import flip_a_bit
from tests.checkpoint.test_checkpointer import is_bad, made, manager_of, saved, shape
from tests.cli import TINY, metrics, run, status, trained
from tests.specs import budget, resolved


def test_skipped_checkpoints_do_not_count(tmp_path: Path) -> None:
    """Step 30 is damaged in a way that sizes do not tell; the launch went on from 20, and wrote 25."""
    saved(tmp_path, 10, 20, 25, 30)
    flip_a_bit(tmp_path / "step_30" / "__0_0.distcp")
    assert complete_steps(tmp_path) == [10, 20, 25, 30] and is_bad(tmp_path / "step_30")
    assert left_of(tmp_path, 2) == [20, 25, 30] and left_of(tmp_path, 1) == [25, 30]


def test_corrupt_checkpoints_do_not_count_and_stay(tmp_path: Path) -> None:
    saved(tmp_path, 10, 20, 25)
    with open(tmp_path / "step_20" / "__0_0.distcp", "ab") as file:
        file.write(b"x")
    assert left_of(tmp_path, 2) == [10, 25] and (tmp_path / "step_20").is_dir()
    (tmp_path / "step_25" / "__0_0.distcp").unlink()
    assert left_of(tmp_path, 1) == [10] and (tmp_path / "step_20").is_dir()


def test_unchanged_checkpoints_are_read_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A run reads its checkpoints after every save. A file that is replaced or removed is noticed."""
    saved(tmp_path, 10, 20, 25)
    paths = [tmp_path / f"step_{step}" for step in (10, 20, 25)]
    read: list[str] = []
    problem = folders.problem

    def noted(folder: Path) -> str:
        read.append(folder.name)
        return problem(folder)

    monkeypatch.setattr(folders, "problem", noted)
    complete = CompleteCheckpoints()
    first = [complete.read(path) for path in paths]
    assert read == ["step_10", "step_20", "step_25"]
    assert [complete.read(path) for path in paths] == first and len(read) == 3

    assert first[1] is not None
    replace_metadata(paths[1], replace(first[1], validation_loss=2.5))
    (paths[2] / "__0_0.distcp").unlink()
    found = [complete.read(path) for path in paths]
    assert read[3:] == ["step_20", "step_25"]
    assert found[0] == first[0] and found[2] is None
    assert found[1] is not None and found[1].validation_loss == 2.5


def left_of(root: Path, last: int) -> list[int]:
    """The complete checkpoints after a launch that started at step 20 and wrote 25 deletes old ones."""
    manager, state = manager_of(root, *made(0), in_background=False, keep_last_n=last)
    manager.start, manager._written = 20, {25}
    manager._delete_old()
    manager.close()
    return complete_steps(root)


def test_folder_that_vanishes_ends_no_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """CheckpointDeleted went into the loop of rank 0, if a folder was removed by hand."""
    saved(tmp_path, 10, 20, 25)
    is_complete = folders.is_complete

    def complete_then_removed(folder: Path) -> bool:
        found = is_complete(folder)
        if folder.name == "step_10":
            shutil.rmtree(folder)
        return found

    monkeypatch.setattr(folders, "is_complete", complete_then_removed)
    assert left_of(tmp_path, 1) == [25]


def test_links_and_files_do_not_prevent_deletion(tmp_path: Path) -> None:
    """A link was renamed and stayed, and because of a file nothing was ever deleted."""
    root = tmp_path / "checkpoints"
    saved(root, 10, 20, 25)
    (root / "step_10").rename(tmp_path / "archive")
    (root / "step_10").symlink_to(tmp_path / "archive")
    (root / "step_5").touch()
    assert left_of(root, 1) == [25]
    assert sorted(path.name for path in root.iterdir()) == ["step_25", "step_5"]
    assert (tmp_path / "archive" / folders.FILES).exists()


def test_failing_storage_at_evaluation_ends_no_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The run was finished and saved, and ended with a traceback (from Python 3.14: without a word)."""
    manager, state = manager_of(tmp_path, *made(0), in_background=False)
    state.step = 3
    state.evaluation_pending = True
    manager.save(state, wait=True)
    state.evaluation_pending = False
    stat = os.stat

    def failing(path: Any, **options: Any) -> os.stat_result:
        if path == tmp_path / "step_3":
            raise OSError(errno.EIO, "Input/output error", str(path))
        return stat(path, **options)

    with monkeypatch.context() as patch:
        patch.setattr(os, "stat", failing)
        manager.add_evaluation(state)
    manager.close()
    assert "the evaluation of step 3 is not in" in caplog.text


def test_folders_that_cannot_be_renamed_are_marked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """overlayfs cannot rename a folder of a container's image: no launch got past it."""
    saved(tmp_path, 10, 20, 30)
    rename = os.rename

    def failing(source: Path, target: Path) -> None:
        if source.name.startswith("step_") and "partial" not in source.name:
            raise OSError(errno.EXDEV, "Invalid cross-device link", str(source))
        rename(source, target)

    monkeypatch.setattr(os, "rename", failing)
    newest = tmp_path / "step_30"
    assert folders.rename_aside(newest, "superseded") == newest
    assert complete_steps(tmp_path) == [10, 20]
    assert folders.leftovers(tmp_path) == [(newest, "superseded")]
    saved(tmp_path, 30)  # trained again
    folders.delete(tmp_path / "step_10")
    assert complete_steps(tmp_path) == [20, 30] and not folders.leftovers(tmp_path)


@pytest.mark.slow
def test_checkpoint_records_validation_loss_of_its_step(tmp_path: Path) -> None:
    argv = [*TINY, "--eval_interval=3", "--eval_steps=1", "--checkpoint_schedule=3@3,2"]
    argv += ["--trackers=none", "--num_steps=8", "--eval_at_start=True"]
    trained(*argv, f"--output_dir={tmp_path}")
    states = [
        json.loads((tmp_path / "checkpoints" / f"step_{step}" / "train_state.json").read_text())
        for step in (3, 5, 7, 8)
    ]
    records = map(json.loads, (tmp_path / "metrics.jsonl").read_text().splitlines())
    found = [record["eval/loss"] for record in records if "eval/loss" in record]
    assert all(0 < state["save_s"] < 60 for state in states)
    # evaluated at 0, 3, 6 and, though 8 is no multiple of 3, at the end
    assert len(found) == 4
    assert [state["validation_loss"] for state in states] == [found[1], None, None, found[3]]


def test_best_checkpoint_and_ranges_stay(tmp_path: Path) -> None:
    """Sizes are logged at the start."""
    keep = "--keep_last_n=1 --keep_best=1 --keep_best_metric=grad_norm --keep_best_mode=max"
    argv = [*TINY, "--num_steps=7", "--checkpoint_interval=1", "--trackers=none", *keep.split()]
    argv += ["--keep_ranges=1-2", "--seed=4"]  # the largest is neither in the ranges nor the last
    text = trained(*argv, f"--output_dir={tmp_path}")
    root, found = tmp_path / "checkpoints", metrics(tmp_path)
    best = max(found, key=lambda step: found[step]["grad_norm"])
    assert best not in (1, 2, 7) and complete_steps(root) == sorted({1, 2, best, 7})
    mib = sum(path.stat().st_size for path in (root / "step_7").iterdir()) / 2**20
    logged = re.search(r"(\S+) MiB each; 7 planned, at most 4 kept \((\S+) MiB", text)
    assert logged and float(logged[1]) == pytest.approx(mib, rel=0.1)
    assert float(logged[2]) == pytest.approx(4 * float(logged[1]), rel=0.01)


def test_unknown_keep_best_metric_is_logged(tmp_path: Path) -> None:
    keep = "--keep_last_n=1 --keep_best=1 --keep_best_metric=grad_morn".split()
    text = trained(*TINY, "--num_steps=1", "--trackers=none", *keep, f"--output_dir={tmp_path}")
    assert "step 1 has no --keep_best_metric=grad_morn, so it is not ranked" in text


def test_full_disk_of_run_directory_saves_elsewhere(tmp_path: Path, small_disk: Path) -> None:
    """No file of the run can be written: the run reports it in one line and fails; nothing is lost."""
    run_dir = small_disk / "run"
    argv = [*TINY, "--num_steps=100000", "--checkpoint_interval=0", f"--ckpt_save_path={tmp_path}"]
    (small_disk / "filler").write_bytes(bytes(shutil.disk_usage(small_disk).free - 48 * 1024))
    result = run(*argv, f"--output_dir={run_dir}")
    assert result.returncode == 1 and "Traceback" not in result.stdout, result.stderr
    (line,) = result.stderr.splitlines()
    assert line.startswith(f"failed: {run_dir}/metrics.jsonl cannot be written: No space left")
    ended = status(run_dir)
    assert ended["status"] == "failed" and "metrics.jsonl" in ended["reason"]
    step = ended["step"]
    assert complete_steps(tmp_path) == [step] and not is_bad(tmp_path / f"step_{step}")


@pytest.mark.parametrize("known", [25.0, None])
def test_save_time_is_estimated_before_first_save(tmp_path: Path, known: float | None) -> None:
    """From the checkpoint of the start, or guessed from its size. Two saves can run at once."""
    cfg, config = TrainConfig(), shape()
    world, dims, batch = World(0, 0, 8, 2), ParallelDims("fsdp", dp_shard=8), BatchPlan(1, 1, 8)
    before = resolved(cfg, model=config, dims=dims, batch=batch, world_size=8)
    start = TrainMetadata(4, tokens_seen=4, rows_seen=4, save_s=known, **before.saved_with)
    resume = ResumePoint(Checkpoint(tmp_path / "step_4", start))
    one = (
        25.0 if known else 12 * num_params(shape()) / 4 / 2e8
    )  # a node's two ranks write a quarter
    save_s, _ = save_estimates(before, resume, budget(world))
    manager, _ = manager_of(tmp_path, *made(0), in_background=False, save_s=save_s)
    manager.schedule = parse_schedule("", 5)
    assert [manager.expected_s(step) for step in (4, 5, 6)] == pytest.approx([one, 2 * one, one])
