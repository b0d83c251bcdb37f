"""The whole flow under torchrun: the same losses and data at every world size, and resumes that change it.

Bad input is reported once.
"""

from __future__ import annotations

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
        pytest.param(2, ["--sharding_strategy=zero1", "--batch_size=1"], marks=pytest.mark.slow),
        pytest.param(2, ["--sharding_strategy=zero2", "--batch_size=2"], marks=pytest.mark.slow),
        pytest.param(2, ["--sharding_strategy=ddp", "--batch_size=4"], marks=pytest.mark.slow),
        pytest.param(
            4,
            ["--sharding_strategy=hsdp", "--hsdp_shard_size=2", "--batch_size=1"],
            marks=pytest.mark.slow,
        ),
    ],
)
def test_losses_and_data_are_those_of_one_process(
    alone: Path, tmp_path: Path, nproc: int, argv: list[str]
) -> None:
    trained(*FP32, *argv, *WATCHED, f"--output_dir={tmp_path}", nproc=nproc)
    assert losses(tmp_path) == pytest.approx(losses(alone), rel=1e-5)
    for step, record in metrics(alone).items():
        assert metrics(tmp_path)[step]["data_fingerprint"] == record["data_fingerprint"]
        for name in ("grad_norm", "grad_norm_max", "param_norm"):
            assert metrics(tmp_path)[step][name] == pytest.approx(record[name], rel=1e-4)
        assert metrics(tmp_path)[step]["grad_zeros"] == record["grad_zeros"] > 0
    assert (
        "run folder" not in (tmp_path / f"log.rank{nproc - 1}.txt").read_text()
    )  # rank 0 tells that


@pytest.mark.slow
def test_a_run_of_two_ranks_goes_on_with_four_then_one(alone: Path, tmp_path: Path) -> None:
    steps = [f"--num_steps={n}" for n in (2, 4, 6)]
    flat = ["--min_lr_ratio=1", "--warmup_steps=1"]  # a schedule that does not depend on num_steps
    base = [*FP32, *flat, f"--output_dir={tmp_path / 'changing'}"]
    trained(*base, steps[0], "--sharding_strategy=fsdp", nproc=2)
    trained(*base, steps[1], "--sharding_strategy=hsdp", "--hsdp_shard_size=2", nproc=4)
    trained(*base, steps[2])
    trained(*FP32, *flat, f"--output_dir={tmp_path / 'alone'}")
    assert losses(tmp_path / "changing") == pytest.approx(losses(tmp_path / "alone"), rel=1e-5)


@pytest.mark.slow
def test_a_resume_on_two_ranks_is_exact_to_the_last_bit(tmp_path: Path) -> None:
    import shutil

    argv = [*FP32, "--sharding_strategy=fsdp"]
    trained(*argv, f"--output_dir={tmp_path / 'whole'}", nproc=2)
    shutil.copytree(
        tmp_path / "whole" / "checkpoints" / "step_3", tmp_path / "again" / "checkpoints" / "step_3"
    )
    trained(*argv, f"--output_dir={tmp_path / 'again'}", nproc=2)
    assert losses(tmp_path / "again") == losses(tmp_path / "whole")[3:]


def test_bad_input_under_torchrun_is_printed_once_and_not_again_by_restarts() -> None:
    result = run("--model_varient=7b", nproc=2, torchrun=("--max-restarts=1",))
    assert result.returncode != 0
    assert (
        result.stderr.count("error: --model_varient is not a flag; did you mean --model_variant?")
        == 1
    )


def test_bad_input_found_by_all_ranks_is_told_once(tmp_path: Path) -> None:
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
