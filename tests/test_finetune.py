"""Training on prompts and responses: the loss equals that of the responses by hand, on ranks."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
import torch
import torch.nn.functional as F

import fms_fsdp
from fms_fsdp.__main__ import main
from fms_fsdp.config import DataConfig
from fms_fsdp.data.corpus import open_corpus
from fms_fsdp.data.stream import build_stream
from fms_fsdp.generate import load
from fms_fsdp.hf.export import main as export
from fms_fsdp.hf.hf_flags import ExportConfig
from fms_fsdp.prepare.command import prepare
from fms_fsdp.prepare.prepare_flags import PrepareConfig
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
    texts = [{"text": str(number) * (number % 7 + 3)} for number in range(300)]
    keys = {"prompt_key": "prompt", "text_key": "response"}
    options: dict[str, Any] = {"tokenizer": "byte", "num_workers": 1, "split": (80.0, 20.0)}
    for name, records, more in (("qa", pairs, keys), ("plain", texts, {})):
        file = folder / f"{name}.jsonl"
        file.write_text("".join(json.dumps(record) + "\n" for record in records))
        prepare(PrepareConfig(f"{name}={file}", str(folder / "data"), **options, **more))
    return folder / "data"


def by_hand(run_folder: Path, data: Path) -> tuple[float, int]:
    """Returns the mean loss of the responses of step 2, by the weights of step 1, and their number.

    A response is known by its letters alone, without masks.
    """
    model, _ = fms_fsdp.load_model(str(run_folder), step=1)
    section = DataConfig(data_path=str(data), seq_length=SEQ, loss_on="all")
    sizes = {"global_batch_size": 8, "dp_rank": 0, "dp_size": 1}
    stream = build_stream(section, open_corpus(section), seed=2023, vocab_size=258, **sizes)
    batch, kept = stream.batch_at(2), torch.zeros(512, dtype=torch.bool)
    stream.close()
    kept[[*range(97, 123), *map(ord, ".0123456789"), END]] = True
    is_response = kept[batch.labels_BS.clamp(min=0)] & (batch.labels_BS >= 0)
    labels_BS = torch.where(is_response, batch.labels_BS, -100)
    with torch.no_grad():
        logits_BSV = model(batch.tokens_BS)
    loss = F.cross_entropy(logits_BSV.double().flatten(0, 1), labels_BS.flatten())
    return loss.item(), int(is_response.sum())


def test_only_sources_with_prompts_have_masks(corpus: Path) -> None:
    for name, has_masks, dtype in (("qa", b"true", b"uint32"), ("plain", None, b"uint16")):
        metadata = pa.ipc.open_file(corpus / name / "shard-00000.arrow").schema.metadata
        assert (metadata.get(b"has_masks"), metadata[b"dtype"]) == (has_masks, dtype)
    assert main(["inspect", "verify", f"--data_path={corpus}"]) == 0


def test_records_without_prompt_are_malformed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    records = '{"prompt": "a", "text": "b"}\n{"text": "b"}\n{"prompt": 3, "text": "b"}\n'
    (tmp_path / "some.jsonl").write_text(records + '{"prompt": "a", "text": ""}\n')
    (tmp_path / "page.txt").write_text("only text")
    flags = [
        f"--output={tmp_path}/out",
        "--prompt_key=prompt",
        "--tokenizer=byte",
        "--num_workers=1",
    ]
    assert main(["prepare", f"--input={tmp_path}/some.jsonl", *flags]) == 0
    out = capsys.readouterr().out
    for reason in ("'prompt' is missing", "'prompt' is not a string", "'text' is empty"):
        assert f"key {reason}" in out
    assert main(["prepare", f"--input={tmp_path}/page.txt", *flags]) == 2
    assert "--prompt_key=prompt requires records" in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.parametrize(
    ("nproc", "flag"),
    [
        (0, "--seed=2023"),
        (2, "--sharding_strategy=ddp"),
        (2, "--cp_size=2"),
    ],
)
def test_loss_is_that_of_responses(corpus: Path, tmp_path: Path, nproc: int, flag: str) -> None:
    flags = (*FLAGS, *STEPS, "--batch_size=2", flag)
    trained(*flags, f"--data_path={corpus}", f"--output_dir={tmp_path}", nproc=nproc)
    loss, count = by_hand(tmp_path, corpus)
    assert 8 * SEQ / 4 < count < 8 * SEQ
    assert metrics(tmp_path)[2]["loss"] == pytest.approx(loss, rel=1e-6)


@pytest.mark.slow
def test_loss_on_changes_training_and_validation(corpus: Path, tmp_path: Path) -> None:
    flags = (*FLAGS, *STEPS, "--batch_size=8", f"--data_path={corpus}", f"--output_dir={tmp_path}")
    assert run(*flags, "--exit_interval=1").returncode == 75
    assert "from step 2: --loss_on response -> all" in trained(*flags, "--loss_on=all")
    responses, _ = by_hand(tmp_path, corpus)
    assert abs(metrics(tmp_path)[2]["loss"] - responses) > 1e-3
    everything = evaluations(tmp_path, attempt=2)[2]["eval/loss"]
    other = tmp_path / "other"
    weights = ("--load_model_only=True", f"--ckpt_load_path={tmp_path}/checkpoints")
    trained(*flags, *weights, "--eval_at_start=True", f"--output_dir={other}")
    assert abs(evaluations(other)[0]["eval/loss"] - everything) > 1e-3


@pytest.mark.parametrize(("bos", "before"), [("<|begin_of_text|>", (256,)), ("", ())])
def test_export_adds_bos_of_the_training(tmp_path: Path, bos: str, before: tuple[int, ...]) -> None:
    from transformers import AutoTokenizer

    source, data, run_folder, exported = (
        str(tmp_path / name) for name in ("a.jsonl", "data", "run", "hf")
    )
    Path(source).write_text("".join(f'{{"text": "{str(n) * 20}"}}\n' for n in range(100)))
    prepare(PrepareConfig(source, data, tokenizer="byte", num_workers=1, bos_token=bos))
    trained(*FLAGS, "--num_steps=1", f"--data_path={data}", f"--output_dir={run_folder}")
    export(ExportConfig(path=run_folder, output=exported))
    settings = json.loads((tmp_path / "hf/tokenizer_config.json").read_text())
    assert settings["add_bos_token"] is bool(bos)
    for path in (run_folder, exported):
        assert load(path, None, "cpu").rules.before == before
    assert AutoTokenizer.from_pretrained(exported)("ab")["input_ids"] == [*before, 97, 98]
