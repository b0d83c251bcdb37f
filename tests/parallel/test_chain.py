"""One run goes through eleven layouts by way of its checkpoints, with a kill in it."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.cli import ROOT, TINY, metrics, run, trained, under_torchrun
from tests.distributed.test_recovery import ENVIRONMENT, wait_for, workers

BASE = (*TINY, "--num_layers=4", "--precision=fp32", "--global_batch_size=8", "--num_steps=33")
BASE += ("--checkpoint_interval=3", "--keep_last_n=20", "--batch_size=2")
LAYOUTS: list[tuple[int, list[str]]] = [
    (0, []),
    (4, ["--pp_size=2", "--tp_size=2"]),
    (4, ["--tp_size=2", "--sharding_strategy=fsdp"]),
    (4, ["--sharding_strategy=fsdp"]),
    (4, ["--pp_size=2", "--cp_size=2", "--pp_schedule=zbv"]),
    (4, ["--tp_size=2", "--sharding_strategy=ddp"]),
    (4, ["--pp_size=2", "--pp_schedule=interleaved", "--recompute=blocks"]),
    (4, ["--sharding_strategy=hsdp", "--hsdp_shard_size=2"]),
    (2, ["--sharding_strategy=ddp"]),
    (2, ["--sharding_strategy=zero1", "--fsdp_blocks_per_group=2"]),
    (0, []),
]


def kill_behind(step: int, flags: list[str], nproc: int, folder: Path) -> None:
    """Starts the run and kills a worker with -9 as soon as the checkpoint of the step is there."""
    launch = [
        sys.executable,
        "-m",
        "tests.warm_torchrun",
        *under_torchrun(nproc)[3:],
        "main_training.py",
    ]
    with subprocess.Popen(
        [*launch, *flags], cwd=ROOT, env=ENVIRONMENT, stdout=subprocess.DEVNULL
    ) as process:
        assert wait_for((folder / "checkpoints" / f"step_{step}").is_dir, 300)
        for victim in workers(process.pid)[:1]:
            subprocess.run(["kill", "-9", str(victim)], check=True)
        assert process.wait(timeout=300) != 0
    time.sleep(0.5)


@pytest.mark.slow
def test_run_through_all_layouts_is_exact(tmp_path: Path) -> None:
    calm, changing = tmp_path / "calm", tmp_path / "changing"
    trained(*BASE, f"--output_dir={calm}")
    for turn, (nproc, flags) in enumerate(LAYOUTS):
        own = [*BASE, *flags, f"--output_dir={changing}"]
        if turn == 2:
            kill_behind(3 * turn + 3, own, nproc, changing)
            assert max(metrics(changing)) < 3 * (turn + 2)
            continue
        ended = run(*own, f"--exit_step={3 * turn + 3}", nproc=nproc)
        assert "is reached" in ended.stdout or "finished" in ended.stdout, ended.stderr
    # A stage of a pipeline lacks the weights of the others, but the model does not.
    assert "that the model does not have" not in (changing / "log.txt").read_text()
    alone, spread = metrics(calm), metrics(changing)
    assert sorted(spread) == sorted(alone) == list(range(1, 34))
    for step, record in alone.items():
        assert spread[step]["loss"] == pytest.approx(record["loss"], abs=1e-5), step
        assert spread[step]["grad_norm"] == pytest.approx(record["grad_norm"], rel=1e-4), step
        assert spread[step]["data_fingerprint"] == record["data_fingerprint"], step
