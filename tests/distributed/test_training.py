"""Training on several ranks has the losses and the data of one process."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest

from tests.cli import (
    ROOT,
    TINY,
    last_of_each,
    made_once,
    metrics,
    trained,
    under_torchrun,
)
from tests.distributed.test_recovery import ENVIRONMENT, WARM_TORCHRUN

FP32 = (
    *TINY,
    "--mixed_precision=False",
    "--global_batch_size=8",
    "--num_steps=6",
    "--checkpoint_interval=3",
)
WATCHED = (
    "--log_param_norm=True",
    "--log_num_zeros=True",
    "--log_all_ranks=True",
    "--z_loss=0.001",
    "--eval_interval=3",
    "--eval_steps=2",
)
FSDP = ["--sharding_strategy=fsdp"]
HSDP = ["--sharding_strategy=hsdp", "--hsdp_shard_size=2", "--batch_size=1"]
AXES = [  # test_layouts.py trains with many more layouts, without launches
    pytest.param(2, FSDP, False, id="fsdp"),  # test_recovery.py starts fsdp by torchrun
    pytest.param(4, HSDP, True, id="hsdp", marks=pytest.mark.slow),
    pytest.param(2, ["--tp_size=2"], True, id="tp", marks=pytest.mark.slow),
    pytest.param(2, ["--cp_size=2"], True, id="cp", marks=pytest.mark.slow),
    pytest.param(2, ["--pp_size=2"], True, id="pp", marks=pytest.mark.slow),
]


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One process, fp32, a global batch of 8 rows in four micro-steps."""
    flags = [*FP32, *WATCHED]
    return made_once(tmp_path_factory, "alone", lambda run: trained(*flags, f"--output_dir={run}"))


def evaluations(run: Path) -> list[float]:
    """Returns the losses on held-out data."""
    records = map(json.loads, (run / "metrics.jsonl").read_text().splitlines())
    return [record["eval/loss"] for record in records if "eval/loss" in record]


@pytest.mark.parametrize(("nproc", "argv", "by_torchrun"), AXES)
def test_launch_equals_one_process(
    alone: Path, tmp_path: Path, nproc: int, argv: list[str], by_torchrun: bool
) -> None:
    """The loss, the other values of a report, evaluations and data."""
    flags = last_of_each([*FP32, *argv, *WATCHED, f"--output_dir={tmp_path}"])
    if by_torchrun:
        command = [*WARM_TORCHRUN, *under_torchrun(nproc)[3:], "main_training.py", *flags]
        ended = subprocess.run(
            command, cwd=ROOT, env=ENVIRONMENT, capture_output=True, text=True, timeout=240
        )
        assert ended.returncode == 0, ended.stderr
    else:
        trained(*flags, nproc=nproc)
    found = metrics(tmp_path)
    for step, record in metrics(alone).items():
        for name in ("data_fingerprint", "grad_zeros"):
            assert found[step][name] == record[name]
        assert record["grad_zeros"] > 0
        assert found[step]["loss"] == pytest.approx(record["loss"], rel=1e-5)
        for name in ("grad_norm", "grad_norm_max", "param_norm", "z_loss"):
            assert found[step][name] == pytest.approx(record[name], rel=1e-4)
    assert len(evaluations(alone)) >= 2
    assert evaluations(tmp_path) == pytest.approx(evaluations(alone), rel=1e-5)
    log = (tmp_path / f"log.rank{nproc - 1}.txt").read_text()
    assert "run directory" not in log  # rank 0 logs it
