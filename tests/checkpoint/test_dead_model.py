"""A model that one step made useless: the good checkpoint stays, and commands name the dead ones."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from fms_fsdp.__main__ import main
from fms_fsdp.checkpoint.folders import complete_steps, find_checkpoint, newest_healthy_step
from fms_fsdp.errors import UserError
from tests.checkpoint.signing import sign
from tests.checkpoint.test_checkpointer import made, manager_of, saved
from tests.cli import TINY, run, status


def set_non_finite_steps(folder: Path, count: int) -> None:
    state = json.loads((folder / "train_state.json").read_text())
    (folder / "train_state.json").write_text(json.dumps(state | {"non_finite_steps": count}))
    sign(folder)


@pytest.mark.slow
def test_dead_model_keeps_the_good_checkpoint(tmp_path: Path, capsys: Any) -> None:
    """The learning rate of 1e30 makes the weights useless in one finite step."""
    root = tmp_path / "checkpoints"
    flags = [*TINY, "--keep_last_n=1", "--checkpoint_interval=2", f"--output_dir={tmp_path}"]
    flags += ["--warmup_steps=0", "--lr_schedule=constant", "--trackers=none"]
    assert run(*flags, "--num_steps=16", "--exit_step=8").returncode == 75
    dead = run(*flags, "--num_steps=16", "--learning_rate=1e30")
    assert dead.returncode == 1 and status(tmp_path)["status"] == "failed"
    assert "the last 7 steps were not finite" in dead.stderr and "--resume_step=8" in dead.stderr
    assert complete_steps(root) == [8, 10, 12, 14, 16]
    assert main(["ckpt", "list", str(tmp_path)]) == 0
    assert "complete, ends in 7 non-finite steps" in capsys.readouterr().out
    assert main(["ckpt", "verify", str(root / "step_10"), "--weights"]) == 2
    assert "has a norm of" in capsys.readouterr().out
    assert main(["ckpt", "verify", str(root / "step_8"), "--weights"]) == 0
    export = ["export", f"--path={tmp_path}", f"--output={tmp_path / 'hf'}"]
    capsys.readouterr()
    assert main([*export, "--step=16"]) == 2
    assert "step_16 ends in 7 non-finite steps, so its weights" in capsys.readouterr().err
    again = run(*flags, "--num_steps=9")
    assert again.returncode == 0, again.stderr
    assert "resuming from step 8" in again.stdout
    assert "skipped step_16: ends in 7 non-finite steps" in again.stdout
    assert complete_steps(root) == [9] and (root / "step_16.superseded-1").is_dir()


@pytest.mark.slow
def test_dead_steps_are_counted_across_launches(tmp_path: Path) -> None:
    """A restart continues the count of the checkpoint that --resume_step names."""
    flags = [*TINY, "--max_bad_steps=8", f"--output_dir={tmp_path}", "--trackers=none"]
    flags += ["--warmup_steps=0", "--lr_schedule=constant", "--learning_rate=1e30"]
    assert run(*flags, "--num_steps=99", "--exit_step=6").returncode == 75  # step 1 is finite
    failed = run(*flags, "--num_steps=99", "--resume_step=6")
    assert failed.returncode == 1 and "step 9 skipped: gradient norm is nan" in failed.stderr
    assert "(8 of at most 8 consecutive)" in failed.stderr


@pytest.mark.parametrize(
    ("counts", "expected"),
    [
        ({4: 0, 6: 1}, 6),  # one bad step is bad luck
        ({4: 0, 6: 2}, 4),
        ({4: 0, 6: 1, 8: 3}, 4),  # step 6 is of the same series
        ({4: 1, 6: 0, 8: 2}, 6),
    ],
)
def test_dead_checkpoints_are_skipped(
    tmp_path: Path, counts: dict[int, int], expected: int
) -> None:
    saved(tmp_path, *counts)
    for step, count in counts.items():
        set_non_finite_steps(tmp_path / f"step_{step}", count)
    found = find_checkpoint(tmp_path)
    assert found is not None and found.step == expected
    newest = max(counts)
    named = find_checkpoint(tmp_path, newest)
    assert named is not None and named.step == newest
    assert newest_healthy_step(tmp_path) == max(step for step in counts if not counts[step])


def test_only_dead_checkpoints_are_an_error(tmp_path: Path) -> None:
    saved(tmp_path, 6)
    set_non_finite_steps(tmp_path / "step_6", 3)
    with pytest.raises(
        UserError, match=r"step_6: ends in 3 non-finite steps\); .* one of its checkpoints"
    ):
        find_checkpoint(tmp_path)


def test_deletion_waits_for_a_finite_step(tmp_path: Path) -> None:
    manager, state = manager_of(tmp_path, *made(0), in_background=False, keep_last_n=1)
    kept = []
    for step, count in enumerate((0, 1, 2, 0, 0), 1):
        state.step, state.non_finite_steps = step, count
        state.last_finite_step = step if not count else state.last_finite_step
        manager.save_if_due(state)
        manager._collect(wait=True)
        kept.append(complete_steps(tmp_path))
    assert kept == [[1], [1, 2], [1, 2, 3], [1, 2, 3, 4], [4, 5]]
    manager.close()


def test_failed_background_save_is_reported_next_step(tmp_path: Path) -> None:
    """A file stands where the save would make its folder."""
    reported: list[tuple[int, str]] = []
    manager, state = manager_of(
        tmp_path,
        *made(0),
        in_background=True,
        event=lambda name, step, reason: reported.append((step, reason)),
    )
    (tmp_path / "step_1.partial-1").write_text("in the way")
    state.step = 1
    manager.save_if_due(state)
    assert manager._work[-1].exception() is not None  # waits until the thread has ended
    state.step, manager.schedule = 2, type(manager.schedule)(())  # nothing is due
    manager.save_if_due(state)
    assert [step for step, _ in reported] == [1]
    manager.close()
