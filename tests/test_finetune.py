"""Training on prompts and responses: the loss is that of the responses, by hand, on any number of ranks."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

import fms_fsdp
from fms_fsdp.config import DataConfig
from fms_fsdp.data.corpus import open_corpus
from fms_fsdp.data.stream import build_stream
from fms_fsdp.generate import load
from fms_fsdp.tools.export import ExportConfig
from fms_fsdp.tools.export import main as export
from fms_fsdp.tools.prepare.command import PrepareConfig, prepare
from tests.cli import metrics, run, trained
from tests.test_evaluate import evaluations

SEQ, END = 32, 257
FLAGS = ("--model_variant=tiny", f"--seq_length={SEQ}", "--report_interval=1", "--precision=fp32")
STEPS = ("--num_steps=2", "--checkpoint_interval=1", "--global_batch_size=8", "--eval_interval=2")


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Prompts are capital letters, responses small ones; a plain source has digits."""
    folder = tmp_path_factory.mktemp("supervised")
    words = [
        "".join(chr(97 + (number * place) % 26) for place in range(3, 3 + number % 9))
        for number in range(400)
    ]
    pairs = [{"prompt": word.upper() + "?", "response": f"{word}."} for word in words]
    (folder / "qa.jsonl").write_text("".join(json.dumps(pair) + "\n" for pair in pairs))
    texts = [{"text": str(number) * (number % 7 + 3)} for number in range(300)]
    (folder / "plain.jsonl").write_text("".join(json.dumps(text) + "\n" for text in texts))
    split = (80.0, 20.0)
    for name, keys in (("qa", {"prompt_key": "prompt", "text_key": "response"}), ("plain", {})):
        inputs = f"{name}={folder / name}.jsonl"
        prepare(
            PrepareConfig(
                inputs, str(folder / "data"), tokenizer="byte", num_workers=1, split=split, **keys
            )
        )
    return folder / "data"


def by_hand(
    run_folder: Path, data: Path, step: int, seed: int, checkpoint: str
) -> tuple[float, int]:
    """The mean loss of the responses in the rows of a step, and their number, by the weights of a checkpoint.
    A response is told by its letters alone, without masks."""
    model, _ = fms_fsdp.load_model(str(run_folder / "checkpoints" / checkpoint))
    section = DataConfig(data_path=str(data), seq_length=SEQ, loss_on="all")
    sizes = {"global_batch_size": 8, "dp_rank": 0, "dp_size": 1}
    stream = build_stream(section, open_corpus(section), seed=seed, vocab_size=258, **sizes)
    batch, kept = stream.batch_at(step), torch.zeros(512, dtype=torch.bool)
    for characters in (range(97, 123), map(ord, ".0123456789"), [END]):
        kept[list(characters)] = True
    labels_BS = torch.where(
        kept[batch.labels_BS.clamp(min=0)] & (batch.labels_BS >= 0), batch.labels_BS, -100
    )
    stream.close()
    with torch.no_grad():
        logits_BSV = model(batch.tokens_BS)
    loss = F.cross_entropy(logits_BSV.double().flatten(0, 1), labels_BS.flatten(), reduction="mean")
    return loss.item(), int((labels_BS >= 0).sum())


@pytest.mark.parametrize(
    ("nproc", "flags"),
    [
        (0, ("--batch_size=2",)),
        (2, ("--batch_size=2", "--sharding_strategy=ddp")),
        (2, ("--cp_size=2",)),
    ],
)
def test_the_loss_is_that_of_the_responses_by_hand(
    corpus: Path, tmp_path: Path, nproc: int, flags: tuple[str, ...]
) -> None:
    trained(
        *FLAGS, *STEPS, *flags, f"--data_path={corpus}", f"--output_dir={tmp_path}", nproc=nproc
    )
    loss, count = by_hand(tmp_path, corpus, 2, 2023, "step_1")
    assert 8 * SEQ / 4 < count < 8 * SEQ
    assert metrics(tmp_path)[2]["loss"] == pytest.approx(loss, rel=1e-6)


def test_another_choice_of_tokens_is_announced_and_changes_training_and_validation(
    corpus: Path, tmp_path: Path
) -> None:
    flags = (*FLAGS, *STEPS, "--batch_size=8", f"--data_path={corpus}", f"--output_dir={tmp_path}")
    assert run(*flags, "--exit_interval=1").returncode == 75
    told = trained(*flags, "--loss_on=all")
    assert "from step 2: --loss_on response -> all" in told
    responses, _ = by_hand(tmp_path, corpus, 2, 2023, "step_1")
    assert abs(metrics(tmp_path)[2]["loss"] - responses) > 1e-3
    everything = evaluations(tmp_path, attempt=2)[2]["eval/loss"]
    other = tmp_path / "other"
    weights = (
        "--load_model_only=True",
        f"--ckpt_load_path={tmp_path}/checkpoints",
        "--eval_at_start=True",
    )
    trained(*flags, *weights, f"--output_dir={other}")
    assert abs(evaluations(other)[0]["eval/loss"] - everything) > 1e-3


def test_loss_on_is_refused_where_no_shard_is_read() -> None:
    result = run(
        "--model_variant=tiny", "--use_dummy_dataset=True", "--loss_on=all", "--num_steps=1"
    )
    assert (
        result.returncode == 2
        and "--loss_on=all has no effect with --use_dummy_dataset" in result.stderr
    )


@pytest.mark.parametrize("is_begun", [True, False])
def test_an_export_adds_a_begin_token_if_and_only_if_the_training_saw_one(
    tmp_path: Path, is_begun: bool
) -> None:
    from transformers import AutoTokenizer

    texts = [{"text": str(number) * 20} for number in range(100)]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(text) + "\n" for text in texts))
    source, data, run_folder, exported = (
        str(tmp_path / name) for name in ("a.jsonl", "data", "run", "hf")
    )
    bos = "<|begin_of_text|>" if is_begun else ""
    prepare(PrepareConfig(source, data, tokenizer="byte", num_workers=1, bos_token=bos))
    trained(*FLAGS, "--num_steps=1", f"--data_path={data}", f"--output_dir={run_folder}")
    export(ExportConfig(path=run_folder, output=exported))
    settings = json.loads((tmp_path / "hf/tokenizer_config.json").read_text())
    assert settings["add_bos_token"] is is_begun
    before = (256,) if is_begun else ()
    assert (
        load(run_folder, None, "cpu").rules.before
        == load(exported, None, "cpu").rules.before
        == before
    )
    ids = AutoTokenizer.from_pretrained(exported)("ab")["input_ids"]
    assert ids == [*before, 97, 98]
