"""Every precision from the flag to the checkpoint: bytes kept, two ranks, and a resume."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
from torch.distributed.checkpoint import FileSystemReader

from fms_fsdp import load_model
from fms_fsdp.config import TrainConfig
from fms_fsdp.config.parse import parse_flags
from tests.cli import TINY, losses, trained

LENGTH = ("--global_batch_size=4", "--checkpoint_interval=3", "--warmup=0")
KEPT = {  # bytes a parameter in memory and in a checkpoint
    "fp32": (16, 12),
    "bf16": (16, 12),
    "bf16_mixed_sr": (18, 12),
    "bf16 --optimizer_state_dtype=bf16": (12, 8),
    "bf16 --param_dtype=bf16": (12, 10),
    "bf16_pure": (8, 6),
    "bf16_pure --grad_accum_dtype=fp32": (10, 6),
    "fp16": (16, 12),
    "float8": (16, 12),
}
SHARDED = ("bf16_pure", "fp16", "float8")
RESUMED = ("bf16_pure", "bf16_mixed_sr", "fp16")  # stochastic rounding, a loss scale


@pytest.mark.slow
@pytest.mark.parametrize("name", KEPT)
def test_precision_keeps_the_bytes_predicted(tmp_path: Path, name: str) -> None:
    flags = [*TINY, *LENGTH, "--num_steps=6", *f"--precision={name}".split()]
    flags += ["--seq_length=16"] if name == "fp16" else []  # its matmuls are slow on most CPUs
    alone = [*flags, "--grad_accum_steps=2", f"--output_dir={tmp_path}/1"]
    trained(*alone)
    one = losses(tmp_path / "1")
    assert one[-1] < one[0]
    if name in SHARDED:
        trained(*flags, "--sharding_strategy=fsdp", f"--output_dir={tmp_path}/2", nproc=2)
        assert losses(tmp_path / "2") == pytest.approx(one, rel=3e-3)
    if name in RESUMED:
        trained(*alone, "--resume_step=3")
        assert losses(tmp_path / "1")[-3:] == one[-3:]
    items = FileSystemReader(tmp_path / "1/checkpoints/step_6").read_metadata().state_dict_metadata
    sizes = [
        value.properties.dtype.itemsize
        for key, value in items.items()
        if "q_proj" in key and ".step" not in key
    ]
    in_memory, saved = KEPT[name]
    assert sum(sizes) == saved * len(sizes) / 3
    log = (tmp_path / "1" / "log.txt").read_text()
    memory = log[log.index("memory estimate:") :].partition(")")[0]
    parts = dict(re.findall(r"(\w+)\s+([\d.]+) MiB", memory))
    kept = sum(float(parts[name]) for name in ("weights", "gradients", "optimizer")) * 2**20
    n = sum(parameter.numel() for parameter in load_model(str(tmp_path / "1"))[0].parameters())
    assert kept == pytest.approx(in_memory * n, rel=0.01)


@pytest.mark.slow
def test_change_of_precision_is_logged(tmp_path: Path) -> None:
    flags = (*TINY, *LENGTH, f"--output_dir={tmp_path}/r")
    trained(*flags, "--precision=bf16_pure", "--num_steps=3")
    weights = load_model(f"{tmp_path}/r")[0].state_dict()
    trained(*flags, "--precision=fp32", "--num_steps=6")
    change = "precision: bf16 compute, bf16 weights, bf16 moments -> fp32"
    assert change in (tmp_path / "r" / "log.txt").read_text() and len(losses(tmp_path / "r")) == 6
    assert all(torch.equal(each, each.bfloat16().float()) for each in weights.values())


@pytest.mark.parametrize(
    ("flag", "name"),
    [
        ("--precision=bfloat16", "bf16"),
        ("--precision=Mixed", "bf16"),
        ("--precision=float32", "fp32"),
        ("--precision=half", "fp16"),
        ("--mixed_precision=False", "fp32"),
        ("--param_dtype=bf16", "bf16"),
    ],
)
def test_precision_accepts_other_names(flag: str, name: str) -> None:
    assert parse_flags(TrainConfig, [flag]).precision.named == name
