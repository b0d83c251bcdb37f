"""Training on several ranks: the losses and data of one process, exact resumes, bad input reported once."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from tests.cli import TINY, losses, made_once, metrics, run, trained

FP32 = (
    *TINY,
    "--mixed_precision=False",
    "--global_batch_size=8",
    "--num_steps=6",
    "--checkpoint_interval=3",
)
WATCHED = ("--log_param_norm=True", "--log_num_zeros=True", "--log_all_ranks=True")


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One process, fp32, a global batch of 8 rows in four micro-steps."""
    flags = [*FP32, *WATCHED]
    return made_once(tmp_path_factory, "alone", lambda run: trained(*flags, f"--output_dir={run}"))


@pytest.mark.parametrize(
    ("nproc", "argv"),
    [
        (2, ["--sharding_strategy=fsdp"]),
        pytest.param(
            4,
            ["--sharding_strategy=hsdp", "--hsdp_shard_size=2", "--batch_size=1"],
            marks=pytest.mark.slow,
        ),
    ],
)
def test_losses_and_data_equal_one_process(
    alone: Path, tmp_path: Path, nproc: int, argv: list[str]
) -> None:
    trained(*FP32, *argv, *WATCHED, f"--output_dir={tmp_path}", nproc=nproc)
    found = metrics(tmp_path)
    for step, record in metrics(alone).items():
        for name in ("data_fingerprint", "grad_zeros"):
            assert found[step][name] == record[name]
        assert record["grad_zeros"] > 0
        assert found[step]["loss"] == pytest.approx(record["loss"], rel=1e-5)
        for name in ("grad_norm", "grad_norm_max", "param_norm"):
            assert found[step][name] == pytest.approx(record[name], rel=1e-4)
    log = (tmp_path / f"log.rank{nproc - 1}.txt").read_text()
    assert "run directory" not in log  # rank 0 logs it


@pytest.mark.slow
def test_resume_on_two_ranks_is_bit_exact(tmp_path: Path) -> None:
    whole, again = tmp_path / "whole", tmp_path / "again"
    argv = [*FP32, "--sharding_strategy=fsdp"]
    trained(*argv, f"--output_dir={whole}", nproc=2)
    shutil.copytree(whole / "checkpoints" / "step_3", again / "checkpoints" / "step_3")
    trained(*argv, f"--output_dir={again}", nproc=2)
    assert losses(again) == losses(whole)[3:]


@pytest.mark.slow
def test_bad_input_is_printed_once_despite_restarts(tmp_path: Path) -> None:
    result = run(
        "--model_variant=tiny",
        "--sharding_strategy=fsdp",
        f"--output_dir={tmp_path}",
        nproc=2,
        torchrun=("--max-restarts=1",),
    )
    assert result.returncode != 0
    assert result.stderr.count("error: ") == 1 and "--data_path" in result.stderr
    assert not list(tmp_path.iterdir())
