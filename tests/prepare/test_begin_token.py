"""A BOS token before documents: stored, kept, stripped or added, and recorded in the shards."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
import sentencepiece

from fms_fsdp.__main__ import main
from fms_fsdp.data.kept_tokenizer import shards_bos_id
from fms_fsdp.errors import UserError
from fms_fsdp.tokenizers.load import load_tokenizer

BEGIN = "--bos_token=<|begin_of_text|>"  # 256, of the byte tokenizer
IDS = ("--vocab_size=258", "--eos_id=257", "--num_workers=1")


@pytest.fixture(scope="module")
def texts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("texts") / "some.jsonl"
    records = [json.dumps({"text": f"page {number}", "ask": "? "}) for number in range(20)]
    path.write_text("\n".join(records))
    return path


def made(
    command: str, source: Path, output: Path, *flags: str
) -> tuple[list[list[int]], str | None]:
    """Runs a command; returns the documents of the shards and their `has_bos`."""
    own = ("--tokenizer=byte",) if command == "prepare" else ("--vocab_size=258", "--eos_id=257")
    argv = [command, f"--input=web={source}", f"--output={output}", "--num_workers=1"]
    assert main([*argv, *own, *flags]) == 0
    table = pa.ipc.open_file(output / "web" / "shard-00000.arrow").read_all()
    has_bos = table.schema.metadata.get(b"has_bos")
    return table.column("tokens").to_pylist(), None if has_bos is None else has_bos.decode()


def test_bos_is_stored_kept_stripped_or_added(texts: Path, tmp_path: Path) -> None:
    plain, no = made("prepare", texts, tmp_path / "plain")
    begun, yes = made("prepare", texts, tmp_path / "begun", BEGIN)
    assert begun == [[256, *document] for document in plain] and (no, yes) == ("false", "true")
    tokenizer = load_tokenizer("byte")
    assert shards_bos_id(str(tmp_path / "begun"), tokenizer) == 256
    assert shards_bos_id(str(tmp_path / "plain"), tokenizer) is None
    bos_id = "--bos_id=256"
    cases: tuple[tuple[str, tuple[str, ...], Any, str | None], ...] = (
        ("plain", (), plain, None),
        ("begun", (), begun, None),
        ("begun", (bos_id,), begun, "true"),
        ("plain", (bos_id,), plain, "false"),
        ("begun", ("--bos=strip", bos_id), plain, "false"),
        ("plain", ("--bos=strip", bos_id), plain, "false"),
        ("begun", ("--bos=add", bos_id), begun, "true"),
        ("plain", ("--bos=add", bos_id), begun, "true"),
    )
    for number, (name, flags, *expected) in enumerate(cases):
        output = tmp_path / f"out{number}"
        assert made("convert", tmp_path / name / "web", output, *flags) == (*expected,), flags


def test_bos_before_a_prompt_is_no_label(texts: Path, tmp_path: Path) -> None:
    paths = {name: tmp_path / name for name in ("asked", "again", "bare", "back")}
    documents, has_bos = made("prepare", texts, paths["asked"], "--prompt_key=ask", BEGIN)
    assert [token - (1 << 31) for token in documents[0][:3]] == [256, ord("?"), ord(" ")]
    assert documents[0][3] == ord("p") and has_bos == "true"
    assert shards_bos_id(str(paths["asked"]), load_tokenizer("byte")) == 256
    again, _ = made("convert", paths["asked"] / "web", paths["again"])
    flags = "--bos=strip", "--bos_id=256"
    bare, _ = made("convert", paths["asked"] / "web", paths["bare"], *flags)
    flags = "--bos=add", "--bos_id=256"
    back, has_bos = made("convert", paths["bare"] / "web", paths["back"], *flags)
    assert again == back == documents and has_bos == "true", "the loss mask is kept"
    assert bare == [document[1:] for document in documents]
    metadata = pa.ipc.open_file(paths["bare"] / "web" / "shard-00000.arrow").schema.metadata
    assert metadata[b"has_masks"] == b"true" and metadata[b"max_token_id"] == b"112"


@pytest.mark.parametrize(
    ("command", "flags", "text"),
    [
        ("prepare", ("--tokenizer=byte", "--bos_token=<s>"), "--bos_token=<s> is not a token"),
        ("convert", (*IDS, "--bos=add"), "--bos=add requires --bos_id"),
        ("convert", (*IDS, "--bos=add", "--bos_id=258"), "--bos_id=258 must be below"),
    ],
)
def test_unknown_bos_is_rejected(
    command: str, flags: tuple[str, ...], text: str, texts: Path, tmp_path: Path, capsys: Any
) -> None:
    assert main([command, f"--input=web={texts}", f"--output={tmp_path / 'out'}", *flags]) == 2
    assert text in capsys.readouterr().err


def train_model(folder: Path, **options: Any) -> None:
    """Trains a small sentencepiece model, sp.model."""
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(["a b c"] * 9),
        model_prefix=str(folder / "sp"),
        vocab_size=270,
        model_type="bpe",
        byte_fallback=True,
        hard_vocab_limit=False,
        minloglevel=3,
        **options,
    )


def test_mistyped_bos_leaves_no_plan(texts: Path, tmp_path: Path) -> None:
    flags = ("--tokenizer=byte", "--num_workers=1", f"--output={tmp_path / 'out'}")
    argv = ["prepare", f"--input=web={texts}", *flags]
    assert main([*argv, "--bos_token=<s>"]) == 2
    assert main([*argv, BEGIN]) == 0  # it was "made with other bos_token"


def test_bos_that_is_the_eos_is_not_in_the_text(texts: Path, tmp_path: Path, capsys: Any) -> None:
    """As of GPT-2; and a model whose EOS token is only named by the flag."""
    train_model(tmp_path, eos_id=-1, user_defined_symbols=["<|end|>"])
    with pytest.raises(UserError, match="names no end-of-document token"):
        load_tokenizer(f"{tmp_path}/sp.model")
    with pytest.raises(UserError, match="--eos_token .<no>. is not a token"):
        load_tokenizer(f"{tmp_path}/sp.model", "<no>")
    flags = (f"--tokenizer={tmp_path}/sp.model", "--eos_token=<|end|>", "--bos_token=<|end|>")
    argv = ["prepare", f"--input=web={texts}", f"--output={tmp_path / 'out'}", *flags]
    assert main([*argv, "--num_workers=1"]) == 0
    assert "spell the EOS" not in capsys.readouterr().out


def test_bos_without_a_prompt_is_no_label_either(tmp_path: Path) -> None:
    """It was a label if no other record of its batch of a MB had a prompt."""
    (tmp_path / "x.jsonl").write_text('{"text": "a", "ask": ""}')
    documents, _ = made(
        "prepare", tmp_path / "x.jsonl", tmp_path / "out", "--prompt_key=ask", BEGIN
    )
    assert documents == [[256 + (1 << 31), ord("a")]]


@pytest.mark.parametrize("flags", [("--bos_token=<s>",), ("--prompt_key=ask",)])
def test_text_without_tokens_is_no_document(tmp_path: Path, flags: tuple[str, ...]) -> None:
    """Models such as T5's drop spaces; it was a document of the BOS token or the prompt alone."""
    train_model(tmp_path)
    records = [{"text": text, "ask": "a"} for text in ("  ", "b", " \n")]
    (tmp_path / "x.jsonl").write_text("\n".join(map(json.dumps, records)))
    argv = ["prepare", f"--input=web={tmp_path}/x.jsonl", f"--output={tmp_path}/out"]
    assert main([*argv, f"--tokenizer={tmp_path}/sp.model", "--num_workers=1", *flags]) == 0
    shard = pa.ipc.open_file(tmp_path / "out/web/shard-00000.arrow").read_all()
    (document,) = shard.column("tokens").to_pylist()
    assert len(document) > 1
