"""Whole launches with parts whose code for a GPU differs: each starts, and its steps wait for nothing."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.cli import TINY, trained
from tests.nullcuda.conftest import Device

pytestmark = pytest.mark.slow
FLAGS = (*TINY, "--trackers=none", "--num_steps=5", "--checkpoint_interval=0", "--save_last=False")
LAUNCHES = (
    "--precision=bf16_mixed_sr --recompute=blocks --recompute_segment=2",
    "--pos_emb=relative",
    "--pos_emb=relative --document_mask=True --num_kv_heads=2 --recompute=ops",
    "--pos_emb=relative --attn_window=32 --attn_window_pattern=LG --attn_dropout=0.1",
    "--rampup_batch_size=1,1,6 --global_batch_size=4 --batch_size=2 --rampup_micro_batch=True",
    "--teacher_path=TEACHER",
    "--teacher_path=TEACHER --z_loss=1e-4 --precision=fp16 --grad_accum_steps=2",
)


@pytest.mark.parametrize("flags", LAUNCHES)
def test_a_launch_ends_and_only_reports_wait(
    device: Device, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, flags: str
) -> None:
    monkeypatch.setenv("NULLCUDA_SYNC", "warn")
    teacher = tmp_path / "teacher"
    if "TEACHER" in flags:
        trained(*TINY, "--trackers=none", "--num_steps=1", f"--output_dir={teacher}")
    given = flags.replace("TEACHER", str(teacher)).split()
    done = device("main_training.py", *FLAGS, *given, f"--output_dir={tmp_path / 'run'}")
    assert done.returncode == 0 and "finished 5 steps" in done.stdout, done.stderr[-3000:]
    waits = set(re.findall(r"(\S+\.py):\d+: UserWarning: called a synchronizing", done.stderr))
    assert {Path(path).name for path in waits} <= {"interval.py"}, waits  # reads of a report
