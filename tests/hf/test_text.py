"""Tokens that the tokenizer of a Hugging Face checkpoint adds to a text, and those of an export."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from fms_fsdp.__main__ import main
from fms_fsdp.data.kept_tokenizer import shards_bos_id
from fms_fsdp.errors import UserError
from fms_fsdp.hf.chat import ChatSettings, parse_chat_settings, read_chat_settings
from fms_fsdp.hf.hf_tokenizer import export_tokenizer, hf_text_rules
from fms_fsdp.tokenizers.load import load_tokenizer
from fms_fsdp.tokenizers.tokenizer import ByteTokenizer, TextRules
from tests.hf_folders import BEGIN, END, change_json, template, write_folder, write_tokenizer_json

CHAT = (
    "{{ bos_token }}{% for m in messages %}{{ m.role }}: {{ m.content }}{{ eos_token }}{% endfor %}"
)
BERT = {"type": "BertProcessing", "sep": [END, 257], "cls": [BEGIN, 256]}
ROBERTA = BERT | {"type": "RobertaProcessing", "trim_offsets": True, "add_prefix_space": False}
ADDED: dict[str, tuple[Any, TextRules]] = {
    "nothing": (None, TextRules()),
    "begin, as Llama 3": (template(), TextRules((256,))),
    "both": (template(end=257), TextRules((256,), (257,))),
    "end": (template(begin=None, end=257), TextRules((), (257,))),
    "Bert": (BERT, TextRules((256,), (257,))),
    "Roberta": (ROBERTA, TextRules((256,), (257,))),
}
TEXTS = ["", " ", "the thing", "  in\n\n the   ", "日本 é", "\t<x>"]


def ids_of_transformers(folder: Path) -> list[list[int]]:
    from transformers import AutoTokenizer

    if not (folder / "config.json").exists():
        (folder / "config.json").write_text('{"model_type": "llama"}')
    opened: Any = AutoTokenizer.from_pretrained(folder)
    return [opened(text).input_ids for text in TEXTS]


@pytest.mark.parametrize("name", ADDED)
def test_added_tokens_are_those_of_transformers(name: str, tmp_path: Path) -> None:
    processor, rules = ADDED[name]
    write_tokenizer_json(tmp_path, processor)
    change_json(
        tmp_path / "tokenizer_config.json", lambda said: said | {"add_bos_token": name != "both"}
    )
    tokenizer = load_tokenizer(str(tmp_path))
    assert hf_text_rules(tmp_path, tokenizer) == rules
    ours = [[*rules.before, *row.tolist(), *rules.after] for row in tokenizer.encode(TEXTS)]
    assert ids_of_transformers(tmp_path) == ours


def test_added_tokens_of_other_tokenizers_follow_the_settings(tmp_path: Path) -> None:
    settings = {"add_bos_token": True, "bos_token": "<|begin_of_text|>"}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    assert hf_text_rules(tmp_path, ByteTokenizer()) == TextRules((256,), ())
    settings |= {"add_bos_token": False, "add_eos_token": True, "eos_token": "<|end_of_text|>"}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    assert hf_text_rules(tmp_path, ByteTokenizer()) == TextRules((), (257,))


@pytest.mark.parametrize(("name", "bos"), [*((name, 256) for name in ADDED), ("both", None)])
def test_exported_tokenizer_gives_ids_of_training(
    name: str, bos: int | None, tmp_path: Path
) -> None:
    from transformers import AutoTokenizer

    write_tokenizer_json(tmp_path, ADDED[name][0])
    ours, folder = load_tokenizer(str(tmp_path)), tmp_path / "out"
    folder.mkdir()
    assert export_tokenizer(ours, folder, 64, bos) == ""
    before = () if bos is None else (bos,)
    expected = [[*before, *ids.tolist()] for ids in ours.encode(TEXTS)]
    assert ids_of_transformers(folder) == expected
    theirs: Any = AutoTokenizer.from_pretrained(folder)
    assert [theirs.decode(ids[len(before) :]) for ids in expected] == TEXTS
    assert hf_text_rules(folder, load_tokenizer(str(folder))) == TextRules(before)


def test_tokenizer_without_added_tokens_is_exported(tmp_path: Path) -> None:
    tokenizers = pytest.importorskip("tokenizers")
    words = tokenizers.models.WordLevel({"a": 0, "</s>": 1}, unk_token="a")
    content = json.loads(tokenizers.Tokenizer(words).to_str())
    del content["added_tokens"]
    (tmp_path / "tokenizer.json").write_text(json.dumps(content))
    (tmp_path / "out").mkdir()
    export_tokenizer(load_tokenizer(str(tmp_path)), tmp_path / "out", 64, None)
    settings = json.loads((tmp_path / "out" / "tokenizer_config.json").read_text())
    assert settings["eos_token"] == "</s>"


def test_export_of_a_short_model_prints_no_length_warning(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert export_tokenizer(load_tokenizer("byte"), tmp_path, 4, None) == ""
    assert capfd.readouterr() == ("", "")


@pytest.mark.parametrize("kind", ["byte", "bpe", "unigram"])
def test_bos_is_exported_for_every_kind(kind: str, tmp_path: Path) -> None:
    from fms_fsdp.prepare.command import train_sentencepiece

    if kind != "byte":
        model = train_sentencepiece(iter(["the thing in a line " * 40] * 9), 270, kind)
        (tmp_path / "tokenizer.model").write_bytes(model)
    ours = load_tokenizer("byte" if kind == "byte" else str(tmp_path / "tokenizer.model"))
    begin = 256 if kind == "byte" else ours.token_id("<s>")
    (tmp_path / "out").mkdir()
    assert begin is not None and export_tokenizer(ours, tmp_path / "out", 64, begin) == ""
    assert ids_of_transformers(tmp_path / "out") == [
        [begin, *row.tolist()] for row in ours.encode(TEXTS)
    ]


def test_chat_settings_are_kept_for_exports(tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    source = tmp_path / "source"
    source.mkdir()
    write_tokenizer_json(source)
    given = {"chat_template": CHAT, "bos_token": BEGIN, "pad_token": BEGIN}
    change_json(source / "tokenizer_config.json", lambda said: said | given)
    generation = {"eos_token_id": [257, 256, 9999], "temperature": 0.6, "do_sample": True}
    (source / "generation_config.json").write_text(json.dumps(generation))
    (tmp_path / "text.txt").write_text("the thing in a line")
    for output, name in (("one", source), ("two", tmp_path / "one/tokenizer.json")):
        argv = ["prepare", f"{tmp_path}/text.txt", f"--output={tmp_path / output}"]
        assert main([*argv, f"--tokenizer={name}", "--num_workers=1"]) == 0
    chat = read_chat_settings(tmp_path / "two")
    ours = load_tokenizer(str(tmp_path / "two"))
    assert chat.generation_settings(ours) == {"eos_token_id": [257, 256], "pad_token_id": 256}
    assert chat.note(ours) == f"not carried over from {source}: temperature"
    (tmp_path / "out").mkdir()
    assert export_tokenizer(ours, tmp_path / "out", 64, None, chat) == ""
    theirs: Any = AutoTokenizer.from_pretrained(tmp_path / "out")
    text = theirs.apply_chat_template([{"role": "user", "content": "in"}], tokenize=False)
    assert text == f"{BEGIN}user: in{END}"
    assert (theirs.bos_token_id, theirs.pad_token_id, theirs.eos_token_id) == (256, 256, 257)
    assert theirs("in").input_ids == [260]


def test_malformed_chat_settings_are_rejected(tmp_path: Path) -> None:
    for content in ("", "[1]", '{"end_ids": [-1]}', '{"end_ids": 3}', '{"x": 1}', '{"source": 1}'):
        with pytest.raises(UserError, match="chat.json was not written by prepare; restore"):
            parse_chat_settings(content.encode(), "meta/chat.json")
    (tmp_path / "tokenizer_config.json").write_text('{"chat_template": 5}')
    with pytest.raises(UserError, match="chat_template=5 must be text; correct or remove it"):
        read_chat_settings(tmp_path)
    (tmp_path / "chat_template.jinja").write_bytes("é".encode("latin-1"))
    with pytest.raises(UserError, match="chat_template.jinja must be UTF-8 text; convert"):
        read_chat_settings(tmp_path)


def test_bos_of_shards_is_recorded(tmp_path: Path) -> None:
    tokenizer = load_tokenizer("byte")
    for first in ([256], []):
        folder = tmp_path / f"begin{first}"
        folder.mkdir()
        table = pa.table({"input_ids": [[*first, *b"the thing in a line"]] * 30})
        pq.write_table(table, folder / "in.parquet")
        argv = ["convert", f"--input={folder}/in.parquet", f"--output={folder}/out"]
        assert main([*argv, "--tokenizer=byte"]) == 0
        assert shards_bos_id(str(folder / "out"), tokenizer) == (256 if first else None)
    assert shards_bos_id(str(tmp_path / "nothing"), tokenizer) is None


def test_tokenizer_dropout_is_off(tmp_path: Path) -> None:
    write_tokenizer_json(tmp_path, dropout=0.9)
    tokenizer = load_tokenizer(str(tmp_path))
    rows = {tuple(tokenizer.encode(["the thing in the"])[0].tolist()) for _ in range(30)}
    assert len(rows) == 1 and 259 in next(iter(rows))


def test_changed_tokenizer_file_is_read_again(tmp_path: Path) -> None:
    path = write_tokenizer_json(tmp_path)
    first = load_tokenizer(str(tmp_path))
    assert load_tokenizer(str(tmp_path)) is first
    change_json(path, lambda said: said["model"].update(merges=[["t", "h"]]))
    assert load_tokenizer(str(tmp_path)).encode(["the"])[0].tolist() == [258, ord("e")]
    change_json(tmp_path / "tokenizer_config.json", lambda said: said.update(eos_token=BEGIN))
    assert load_tokenizer(str(tmp_path)).vocabulary.eos_id == 256


def test_malformed_tokenizer_config_is_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_folder(tmp_path, tokenizer=True)
    (tmp_path / "tokenizer_config.json").write_text("[1]")
    assert main(["generate", f"--path={tmp_path}", "--prompt=a"]) == 2
    error = capsys.readouterr().err
    assert "tokenizer_config.json must hold an object, not a list" in error
    assert error.count("\n") == 1


def test_any_chat_setting_counts() -> None:
    assert not ChatSettings() and not ChatSettings(source="x", not_carried=("y",))
    each = [dict(chat_template="x"), dict(bos_token="x"), dict(pad_token="x"), dict(end_ids=(1,))]
    assert all(ChatSettings(**given) for given in each)  # type: ignore[arg-type]
