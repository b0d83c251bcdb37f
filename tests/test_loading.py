"""`fms_fsdp.load_model`: a trained model in a notebook."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

import fms_fsdp
from fms_fsdp.prepare.command import prepare
from fms_fsdp.prepare.prepare_flags import PrepareConfig
from tests.cli import trained


@pytest.mark.slow
def test_model_of_two_ranks_loads_alone(tmp_path: Path) -> None:
    """With its tokenizer; it has the loss of the run."""
    text, data, folder = tmp_path / "text.jsonl", tmp_path / "data", tmp_path / "run"
    texts = [f"The {number}th sentence of a small book. " * 20 for number in range(60)]
    text.write_text("\n".join(json.dumps({"text": each}) for each in texts))
    options: dict[str, Any] = {"tokenizer": "byte", "split": (80, 20, 0), "num_workers": 1}
    prepare(PrepareConfig(input=f"book={text}", output=str(data), **options))
    flags = ["--model_variant=tiny", f"--data_path={data}", f"--output_dir={folder}"]
    flags += ["--seq_length=64", "--batch_size=2", "--num_steps=30", "--learning_rate=3e-3"]
    flags += ["--eval_interval=30", "--eval_steps=1", "--mixed_precision=False"]
    trained(*flags, "--trackers=none", nproc=2)
    model, tokenizer = fms_fsdp.load_model(str(folder))
    assert tokenizer is not None and not model.training
    tokens = torch.from_numpy(tokenizer.encode([texts[3]])[0].astype("int64"))[None, :65]
    logits = model(tokens[:, :-1])
    assert logits.shape == (1, 64, model.config.vocab_size) and logits.dtype == torch.float32
    loss_sum, count = model(tokens[:, :-1], tokens[:, 1:])
    records = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
    (trained_to,) = [record["eval/loss"] for record in records if "eval/loss" in record]
    assert abs((loss_sum / count).item() - trained_to) < 0.5 and trained_to < 2  # untrained: 5.5


def test_folder_without_a_checkpoint_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"path \(.*\) must hold a complete checkpoint of step 3"):
        fms_fsdp.load_model(str(tmp_path), step=3)


def test_model_of_synthetic_tokens_has_no_tokenizer(eight_steps: Path) -> None:
    model, tokenizer = fms_fsdp.load_model(f"{eight_steps}/checkpoints", step=2)
    assert tokenizer is None and model.config.num_layers > 0
