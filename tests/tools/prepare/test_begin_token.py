"""A begin token in front of documents: stored, kept, stripped or added, and told by the shards."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from fms_fsdp.__main__ import main
from fms_fsdp.data.tokenizer import load_tokenizer
from fms_fsdp.data.tokenizer import shards_bos_id as begin_token

BEGIN = "--bos_token=<|begin_of_text|>"  # 256, of the byte tokenizer
IDS = ("--vocab_size=258", "--eos_id=257", "--num_workers=1")


@pytest.fixture(scope="module")
def texts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("texts") / "some.jsonl"
    path.write_text(
        "\n".join(json.dumps({"text": f"page {number}", "ask": "? "}) for number in range(20))
    )
    return path


def made(
    command: str, source: Path, output: Path, *flags: str
) -> tuple[list[list[int]], str | None]:
    """The documents of the shards, and what the shards say of a begin token."""
    argv = [command, f"--input=web={source}", f"--output={output}", *flags]
    assert main(argv) == 0
    table = pa.ipc.open_file(output / "web" / "shard-00000.arrow").read_all()
    says = table.schema.metadata.get(b"has_bos")
    return table.column("tokens").to_pylist(), None if says is None else says.decode()


def test_documents_begin_with_the_token_and_the_export_hears_of_it(
    texts: Path, tmp_path: Path
) -> None:
    plain, no = made("prepare", texts, tmp_path / "plain", "--tokenizer=byte", "--num_workers=1")
    begun, yes = made(
        "prepare", texts, tmp_path / "begun", "--tokenizer=byte", "--num_workers=1", BEGIN
    )
    assert begun == [[256, *document] for document in plain] and (no, yes) == ("false", "true")
    tokenizer = load_tokenizer("byte")
    assert begin_token(str(tmp_path / "begun"), tokenizer) == 256
    assert begin_token(str(tmp_path / "plain"), tokenizer) is None


def test_a_begin_token_in_front_of_a_prompt_is_no_label(texts: Path, tmp_path: Path) -> None:
    flags = ("--tokenizer=byte", "--num_workers=1", "--prompt_key=ask", BEGIN)
    documents, says = made("prepare", texts, tmp_path / "asked", *flags)
    marked = [token - (1 << 31) for token in documents[0][:3]]
    assert marked == [256, ord("?"), ord(" ")] and documents[0][3] == ord("p") and says == "true"
    assert begin_token(str(tmp_path / "asked"), load_tokenizer("byte")) == 256
    again, _ = made("convert", tmp_path / "asked" / "web", tmp_path / "again", *IDS)
    bare, _ = made(
        "convert",
        tmp_path / "asked" / "web",
        tmp_path / "bare",
        *IDS,
        "--bos=strip",
        "--bos_id=256",
    )
    back, says = made(
        "convert", tmp_path / "bare" / "web", tmp_path / "back", *IDS, "--bos=add", "--bos_id=256"
    )
    assert again == back == documents and says == "true", "marks go along"
    assert bare == [document[1:] for document in documents]
    schema = pa.ipc.open_file(tmp_path / "bare" / "web" / "shard-00000.arrow").schema
    assert schema.metadata[b"has_masks"] == b"true" and schema.metadata[b"max_token_id"] == b"112"


def test_ids_of_others_keep_lose_or_get_the_token(texts: Path, tmp_path: Path) -> None:
    plain, _ = made("prepare", texts, tmp_path / "plain", "--tokenizer=byte", "--num_workers=1")
    begun, _ = made(
        "prepare", texts, tmp_path / "begun", "--tokenizer=byte", "--num_workers=1", BEGIN
    )
    cases: tuple[tuple[str, tuple[str, ...], Any, str | None], ...] = (
        ("plain", (), plain, None),
        ("begun", (), begun, None),
        ("begun", ("--bos_id=256",), begun, "true"),
        ("plain", ("--bos_id=256",), plain, "false"),
        ("begun", ("--bos=strip", "--bos_id=256"), plain, "false"),
        ("plain", ("--bos=strip", "--bos_id=256"), plain, "false"),
        ("begun", ("--bos=add", "--bos_id=256"), begun, "true"),
        ("plain", ("--bos=add", "--bos_id=256"), begun, "true"),
    )
    for number, (name, flags, documents, says) in enumerate(cases):
        output = tmp_path / f"out{number}"
        assert made("convert", tmp_path / name / "web", output, *IDS, *flags) == (
            documents,
            says,
        ), flags


@pytest.mark.parametrize(
    ("command", "flags", "text"),
    [
        ("prepare", ("--tokenizer=byte", "--bos_token=<s>"), "--bos_token=<s> is not a token"),
        ("convert", (*IDS, "--bos=add"), "--bos=add requires --bos_id"),
        (
            "convert",
            (*IDS, "--bos=add", "--bos_id=258"),
            "--bos_id=258 must be below --vocab_size=258",
        ),
    ],
)
def test_a_token_that_is_none_is_refused(
    command: str, flags: tuple[str, ...], text: str, texts: Path, tmp_path: Path, capsys: Any
) -> None:
    assert main([command, f"--input=web={texts}", f"--output={tmp_path / 'out'}", *flags]) == 2
    assert text in capsys.readouterr().err
