"""Dropout over a resume, and biases of distances, on several ranks."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.cli import TINY, losses, trained
from tests.distributed.launch import train_each

BASE = (
    *TINY,
    "--global_batch_size=4",
    "--num_steps=3",
    "--checkpoint_interval=2",
    "--mixed_precision=False",
)
EVALUATED = ("--eval_interval=3", "--eval_steps=1")


def assert_step_3_is_repeated(folder: Path) -> None:
    """Asserts that the loss of step 3 is the same before and after the resume."""
    found = []
    for line in (folder / "metrics.jsonl").read_text().splitlines():
        record = json.loads(line)
        if "loss" in record and "event" not in record and record["step"] == 3:
            found.append(record["loss"])
    assert len(found) == 2 and found[0] == found[1]


@pytest.mark.slow
def test_resume_repeats_the_dropout_of_each_rank(tmp_path: Path) -> None:
    drops = ("--dropout=0.2", "--attn_dropout=0.2", "--ffn_dropout=0.2")
    flags = (*BASE, *EVALUATED, "--pos_emb=alibi", "--parallel_residual=True")
    dropping = (*flags, *drops, f"--output_dir={tmp_path}/run")
    train_each([dropping, [*dropping, "--resume_step=2"]], 2)
    assert_step_3_is_repeated(tmp_path / "run")
    trained(*flags, "--num_steps=1", f"--output_dir={tmp_path}/none")
    assert abs(losses(tmp_path / "none")[0] - losses(tmp_path / "run")[0]) > 1e-3


@pytest.mark.slow
def test_relative_positions_train_on_ranks_and_resume(tmp_path: Path) -> None:
    relative = ("--pos_emb=relative", "--relative_buckets=12", "--relative_max_distance=40")
    relative += ("--document_mask=True", "--attn_window=30", "--attn_window_pattern=LG")
    flags = (*BASE, *EVALUATED, *relative, "--learning_rate=1e-2")
    alone = [*flags, f"--output_dir={tmp_path}/1"]
    train_each([alone, [*alone, "--resume_step=2"]])
    assert_step_3_is_repeated(tmp_path / "1")
    sharded = ("--sharding_strategy=fsdp", "--recompute=blocks", "--tie_embeddings=False")
    trained(*flags, *sharded, f"--output_dir={tmp_path}/2", nproc=2)
    one, two = losses(tmp_path / "1"), losses(tmp_path / "2")
    assert two == pytest.approx(one, rel=1e-5)
