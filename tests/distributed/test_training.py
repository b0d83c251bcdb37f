"""Training on several ranks has the losses and the data of one process."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.cli import TINY, made_once, metrics, trained

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
