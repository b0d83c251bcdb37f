"""Model options on one, two and four ranks, and dropout over a resume."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.cli import TINY, losses, trained

DROPS = (
    "--dropout=0.2",
    "--attn_dropout=0.2",
    "--ffn_dropout=0.2",
    "--eval_interval=3",
    "--eval_steps=1",
)
SHAPE = (
    "--norm=scalenorm",
    "--bias=True",
    "--qk_norm=True",
    "--vocab_multiple_of=96",
    "--pos_emb=alibi",
)
SHAPE += (
    "--activation=relu2",
    "--attn_window=9",
    "--attn_window_pattern=LG",
    "--parallel_residual=True",
)
SHAPE += ("--z_loss=1e-3", "--max_seq_len=80")
ROWS = (
    "--global_batch_size=4",
    "--num_steps=3",
    "--checkpoint_interval=2",
    "--mixed_precision=False",
)


@pytest.mark.slow
def test_losses_do_not_depend_on_the_number_of_ranks(
    tmp_path: Path,
) -> None:
    found = {}
    for ranks in (1, 2, 4):
        sharded = ("--sharding_strategy=fsdp", "--recompute=blocks") if ranks > 1 else ()
        trained(*TINY, *ROWS, *SHAPE, *sharded, f"--output_dir={tmp_path}/{ranks}", nproc=ranks)
        found[ranks] = losses(tmp_path / str(ranks))
    assert found[2] == pytest.approx(found[1], rel=1e-5) and found[4] == pytest.approx(
        found[1], rel=1e-5
    )


def test_a_resume_repeats_the_dropout_of_each_rank(tmp_path: Path) -> None:
    flags = (*TINY, *ROWS, *SHAPE, *DROPS, f"--output_dir={tmp_path}/run")
    trained(*flags, nproc=2)
    before = losses(tmp_path / "run")
    trained(*flags, "--resume_step=2", nproc=2)
    assert losses(tmp_path / "run") == before
    trained(*TINY, *ROWS, *SHAPE, f"--output_dir={tmp_path}/none")
    assert abs(losses(tmp_path / "none")[0] - before[0]) > 1e-3


def test_biases_of_distances_train_on_two_ranks_as_on_one_and_are_saved(tmp_path: Path) -> None:
    relative = (
        "--pos_emb=relative",
        "--relative_buckets=12",
        "--relative_max_distance=40",
        "--document_mask=True",
    )
    relative += (
        "--attn_window=30",
        "--attn_window_pattern=LG",
        "--learning_rate=1e-2",
    )
    flags = (*TINY, *ROWS, *relative, "--eval_interval=3", "--eval_steps=1")
    trained(*flags, f"--output_dir={tmp_path}/1")
    sharded = ("--sharding_strategy=fsdp", "--recompute=blocks", "--tie_embeddings=False")
    trained(*flags, *sharded, f"--output_dir={tmp_path}/2", nproc=2)
    one, two = losses(tmp_path / "1"), losses(tmp_path / "2")
    assert two == pytest.approx(one, rel=1e-5)
    trained(*flags, "--resume_step=2", f"--output_dir={tmp_path}/1")
    assert losses(tmp_path / "1") == one
