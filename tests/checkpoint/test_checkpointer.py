"""Checkpoints: what counts as complete, which one is taken, and that ranks may reach a save in any order."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from fms_fsdp.checkpoint.checkpointer import (
    complete_steps,
    find_start,
    load_checkpoint,
    open_checkpoint,
    save_checkpoint,
)
from fms_fsdp.config import OptimConfig
from fms_fsdp.optim.optimizers import build_optimizer
from tests.distributed.launch import run_ranks

STATE: dict[str, Any] = {"tokens_seen": 7}


def made(seed: int) -> tuple[nn.Module, torch.optim.AdamW]:
    """A small model after one optimizer step."""
    torch.manual_seed(seed)
    model = nn.Linear(4, 3)
    optimizer = build_optimizer(OptimConfig(), model)
    model(torch.randn(2, 4)).sum().backward()
    optimizer.step()
    return model, optimizer


def saved(root: Path, step: int, seed: int = 0) -> Path:
    return save_checkpoint(root, step, *made(seed), STATE, attempt=1)


def test_a_checkpoint_gives_back_weights_moments_and_state(tmp_path: Path) -> None:
    folder = saved(tmp_path, 5)
    assert [path.name for path in tmp_path.iterdir()] == ["step_5"]
    checkpoint = open_checkpoint(folder)
    assert checkpoint is not None and checkpoint.step == 5 and checkpoint.state["tokens_seen"] == 7
    (model, optimizer), (expected, reference) = made(1), made(0)
    load_checkpoint(checkpoint, model, optimizer)
    for mine, theirs in zip(model.parameters(), expected.parameters(), strict=True):
        assert torch.equal(mine, theirs)
        for key, value in reference.state[theirs].items():
            assert torch.equal(optimizer.state[mine][key], value), key


def test_what_is_not_complete_does_not_count(tmp_path: Path) -> None:
    saved(tmp_path, 5)
    for name, files in {
        "step_9.partial-1": [".metadata", "train_state.json"],
        "step_7": ["train_state.json"],
        "step_8": [".metadata"],
        "step_x": [".metadata", "train_state.json"],
        "notes": [],
    }.items():
        (tmp_path / name).mkdir()
        for file in files:
            (tmp_path / name / file).write_text("{}")
    (tmp_path / "step_11").write_text("a file")
    assert complete_steps(tmp_path) == [5] and complete_steps(tmp_path / "nowhere") == []


def test_steps_are_compared_as_numbers(tmp_path: Path) -> None:
    for step in (9, 10, 2):
        saved(tmp_path, step)
    newest = open_checkpoint(tmp_path)
    assert newest is not None and newest.step == 10


def test_the_runs_own_checkpoint_wins_over_the_one_to_load(tmp_path: Path) -> None:
    own, other = str(tmp_path / "own"), str(tmp_path / "other")
    assert find_start(own, "") == (None, False)
    saved(Path(other), 4)
    found, continues = find_start(own, other)
    assert found is not None and found.folder == Path(other) / "step_4" and not continues
    saved(Path(own), 2)
    found, continues = find_start(own, other)
    assert found is not None and found.folder == Path(own) / "step_2" and continues
    with pytest.raises(ValueError, match="--ckpt_load_path"):
        find_start(str(tmp_path / "none"), str(tmp_path / "nowhere"))


def late_save(root: str, late_rank: int) -> list[str]:
    """All ranks save, one of them a second after the others."""
    if dist.get_rank() == late_rank:
        time.sleep(1)
    model, optimizer = made(0)
    folder = save_checkpoint(Path(root), 3, model, optimizer, STATE, attempt=1)
    return sorted(path.name for path in folder.iterdir())


@pytest.mark.parametrize("late_rank", [0, 1])
def test_ranks_may_reach_a_save_in_any_order(tmp_path: Path, late_rank: int) -> None:
    """A rank ahead of rank 0 makes the folder first: rank 0 must neither fail at that nor remove what it wrote."""
    names = run_ranks(late_save, 2, str(tmp_path), late_rank)
    assert names[0] == names[1] and ".metadata" in names[0] and "train_state.json" in names[0]
    assert json.loads((tmp_path / "step_3" / "train_state.json").read_text())["step"] == 3
