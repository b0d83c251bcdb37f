"""Every precision, from the flag to the checkpoint: on one rank and two, and through a resume."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch.distributed.checkpoint import FileSystemReader

from fms_fsdp import load_model
from tests.cli import TINY, losses, trained

LENGTH = ("--global_batch_size=4", "--checkpoint_interval=3", "--warmup=0")
KEPT = {  # bytes a parameter in memory and in a checkpoint
    "fp32": (16, 12),
    "bf16": (16, 12),
    "bf16 --optimizer_state_dtype=bf16": (12, 8),
    "bf16 --param_dtype=bf16": (12, 10),
    "bf16_pure": (8, 6),
    "bf16_pure --grad_accum_dtype=fp32": (10, 6),
    "fp16": (16, 12),
    "float8": (16, 12),
}
RESUMED = ("bf16_pure", "fp16")  # what others do not have: rounding by chance, a loss scale


def log_of(run: Path) -> str:
    return (run / "log.txt").read_text()


@pytest.mark.slow
@pytest.mark.parametrize("name", KEPT)
def test_two_ranks_train_as_one_and_a_resume_repeats_it(tmp_path: Path, name: str) -> None:
    flags = (*TINY, *LENGTH, "--num_steps=6", *f"--precision={name}".split())
    flags += ("--seq_length=16",) if name == "fp16" else ()  # its products are slow on most CPUs
    trained(*flags, "--grad_accum_steps=2", f"--output_dir={tmp_path}/1")
    trained(*flags, "--sharding_strategy=fsdp", f"--output_dir={tmp_path}/2", nproc=2)
    one, two = losses(tmp_path / "1"), losses(tmp_path / "2")
    assert two == pytest.approx(one, rel=1e-6 if name == "fp32" else 3e-3) and one[-1] < one[0]
    if name in RESUMED:
        trained(*flags, "--grad_accum_steps=2", "--resume_step=3", f"--output_dir={tmp_path}/1")
        assert losses(tmp_path / "1")[-3:] == one[-3:]
    items = FileSystemReader(tmp_path / "1/checkpoints/step_6").read_metadata().state_dict_metadata
    matrices = {
        key: value for key, value in items.items() if "q_proj" in key and ".step" not in key
    }
    sizes = [value.properties.dtype.itemsize for value in matrices.values()]
    in_memory, saved = KEPT[name]
    assert sum(sizes) == saved * len(sizes) / 3, matrices
    memory = next(
        line for line in log_of(tmp_path / "1").splitlines() if line.startswith("GiB per rank:")
    )
    parts = dict(part.rsplit(" ", 1) for part in memory.partition("per rank: ")[2].split(", "))
    apart = ("gathered", "activations")
    kept = sum(float(size) for part, size in parts.items() if part not in apart) * 2**30
    n = sum(parameter.numel() for parameter in load_model(str(tmp_path / "1"))[0].parameters())
    assert kept == pytest.approx(in_memory * n, rel=0.01)


@pytest.mark.slow
def test_a_run_goes_on_in_another_precision_and_says_so(tmp_path: Path) -> None:
    flags = (*TINY, *LENGTH, f"--output_dir={tmp_path}/r")
    trained(*flags, "--precision=bf16_pure", "--num_steps=3")
    weights = load_model(f"{tmp_path}/r")[0].state_dict()
    trained(*flags, "--precision=fp32", "--num_steps=6")
    words = "precision: bf16 compute, bf16 weights, bf16 moments -> fp32"
    assert words in log_of(tmp_path / "r") and len(losses(tmp_path / "r")) == 6
    assert all(torch.equal(each, each.bfloat16().float()) for each in weights.values())


def test_a_precision_has_the_names_that_others_give_it() -> None:
    from fms_fsdp.config import TrainConfig
    from fms_fsdp.config.parse import parse_flags

    for text, name in {
        "bfloat16": "bf16",
        "Mixed": "bf16",
        "float32": "fp32",
        "half": "fp16",
    }.items():
        assert parse_flags(TrainConfig, [f"--precision={text}"]).precision.named == name
    assert parse_flags(TrainConfig, ["--mixed_precision=False"]).precision.named == "fp32"
    assert parse_flags(TrainConfig, ["--param_dtype=bf16"]).precision.named == "bf16"
