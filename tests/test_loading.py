"""`fms_fsdp.load_model`: a trained model in a notebook."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

import fms_fsdp
from fms_fsdp.tools.prepare.command import PrepareConfig, prepare
from tests.cli import TINY, trained


def test_a_model_of_two_ranks_loads_alone_with_its_tokenizer_and_computes_the_loss_of_the_run(
    tmp_path: Path,
) -> None:
    text, data, folder = tmp_path / "text.jsonl", tmp_path / "data", tmp_path / "run"
    lines = [
        json.dumps({"text": f"The {number}th sentence of a small book. " * 20})
        for number in range(60)
    ]
    text.write_text("\n".join(lines))
    prepare(
        PrepareConfig(
            input=f"book={text}",
            output=str(data),
            tokenizer="byte",
            split=(80, 20, 0),
            num_workers=1,
        )
    )
    flags = [f"--data_path={data}", f"--output_dir={folder}", "--seq_length=64", "--batch_size=2"]
    flags += [
        "--eval_interval=30",
        "--eval_steps=1",
        "--mixed_precision=False",
        "--learning_rate=3e-3",
    ]
    trained("--model_variant=tiny", "--num_steps=30", "--trackers=none", *flags, nproc=2)
    model, tokenizer = fms_fsdp.load_model(str(folder))
    assert tokenizer is not None and not model.training
    prompt = torch.from_numpy(tokenizer.encode(["The 7th sentence"])[0].astype("int64"))[None]
    logits = model(prompt)
    assert (
        logits.shape == (1, prompt.shape[1], model.config.vocab_size)
        and logits.dtype == torch.float32
    )
    known = torch.from_numpy(tokenizer.encode([json.loads(lines[3])["text"]])[0].astype("int64"))[
        None, :65
    ]
    loss_sum, count = model(known[:, :-1], known[:, 1:])
    recorded = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    (trained_to,) = [line["eval/loss"] for line in recorded if "eval/loss" in line]
    assert abs((loss_sum / count).item() - trained_to) < 0.5 and trained_to < 2  # untrained: 5.5


def test_a_folder_without_a_checkpoint_is_told_in_one_line(tmp_path: Path) -> None:
    with pytest.raises(
        ValueError, match=r"path \(.*\) must hold a complete checkpoint of step 3; see"
    ):
        fms_fsdp.load_model(str(tmp_path), step=3)


def test_a_model_of_synthetic_tokens_has_no_tokenizer(tmp_path: Path) -> None:
    trained(*TINY, "--num_steps=2", "--trackers=none", f"--output_dir={tmp_path}")
    model, tokenizer = fms_fsdp.load_model(f"{tmp_path}/checkpoints", step=2)
    assert tokenizer is None and model.config.num_layers > 0
