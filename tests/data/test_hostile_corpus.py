"""A corpus that someone else made reads and writes nothing but its own files."""

import json
import os
import shutil
import tempfile
from pathlib import Path
from typing import Any

import pytest

from fms_fsdp.config import DataConfig, EvalConfig
from fms_fsdp.data.validation import open_held_out, scan_held_out
from fms_fsdp.prepare.command import prepare
from fms_fsdp.prepare.prepare_flags import PrepareConfig
from tests.data.corpora import write_corpus, write_counts

NAMES = ["../../victim", "/etc/passwd", "a/b", "..", "a\0b", "a\nb", "a\x1b[2Jb", "", 7, None]


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("prepared")
    words = Path(tempfile.__file__).read_text()
    (folder / "text").mkdir()
    for i in range(40):
        (folder / "text" / f"{i}.txt").write_text(f"{words[i * 300 :][:300]}{i}")
    settings: dict[str, Any] = {"train_tokenizer": True, "vocab_size": 400, "split": (60, 40)}
    prepare(PrepareConfig(f"web={folder}/text", f"{folder}/corpus", num_workers=1, **settings))
    return folder


@pytest.fixture
def corpus(prepared: Path, tmp_path: Path) -> Path:
    return shutil.copytree(prepared / "corpus", tmp_path / "a" / "b" / "corpus")


def describe(corpus: Path, **changes: Any) -> None:
    path = corpus / "meta" / "tokenizer.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def evaluated(corpus: Path) -> bool:
    """Whether the held-out source knows the bytes of its tokens."""
    data = DataConfig(data_path=str(corpus), seq_length=16)
    flags = EvalConfig(eval_interval=1, eval_steps=3)
    (source,) = open_held_out(flags, scan_held_out(flags, data, None, vocab_size=400), 1)
    source.stream.close()
    return source.token_bytes is not None


def test_tokenizer_elsewhere_is_neither_read_nor_overwritten(
    prepared: Path, corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "a" / "t").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "a" / "t"))
    shutil.copy(corpus / "tokenizer.model", tmp_path / "a" / "victim")  # would be read
    (tmp_path / "victim").write_text("mine")
    before = {path for path in tmp_path.rglob("*") if path.name != ".lock"}
    match = r"meta/tokenizer.json (names a file|says file_name) \(.*; .*remove the (entry|file)$"
    for name in NAMES:
        describe(corpus, file_name=name)
        with pytest.raises(ValueError, match=match):
            evaluated(corpus)
        with pytest.raises(ValueError, match=match):
            prepare(PrepareConfig(f"more={prepared}/text", str(corpus), num_workers=1))
    assert (tmp_path / "victim").read_text() == "mine"
    assert {path for path in tmp_path.rglob("*") if path.name != ".lock"} == before


def test_bytes_of_wordpiece_are_unknown(prepared: Path, tmp_path: Path) -> None:
    """It drops spaces, so the bytes of the text cannot be told from its tokens."""
    tokenizers = pytest.importorskip("tokenizers")
    characters = [chr(code) for code in range(33, 127)]
    pieces = ["[UNK]", "[SEP]", "text", *characters, *(f"##{each}" for each in characters)]
    vocab = {piece: number for number, piece in enumerate(pieces)}
    raw = tokenizers.Tokenizer(tokenizers.models.WordPiece(vocab, unk_token="[UNK]"))
    raw.pre_tokenizer = tokenizers.pre_tokenizers.BertPreTokenizer()
    raw.save(str(tmp_path / "pieces.json"))
    settings: dict[str, Any] = {"tokenizer": str(tmp_path / "pieces.json"), "split": (60, 40)}
    prepare(PrepareConfig(f"web={prepared}/text", f"{tmp_path}/out", num_workers=1, **settings))
    assert not evaluated(tmp_path / "out")
    assert evaluated(prepared / "corpus")


def test_malformed_tokenizer_description_is_rejected(corpus: Path) -> None:
    for text in ("", "[1]", "null", "{}", "[" * 100_000, '{"kind": "byte"}', "\x00\xff"):
        (corpus / "meta" / "tokenizer.json").write_text(text)
        with pytest.raises(ValueError, match="meta/tokenizer.json was not written by prepare"):
            evaluated(corpus)


def test_tokenizer_kind_that_is_a_path_is_rejected(corpus: Path) -> None:
    describe(corpus, kind="/etc/passwd", file_name="")
    with pytest.raises(ValueError, match=r"says kind \('/etc/passwd'\), which prepare never"):
        evaluated(corpus)


def test_link_to_a_renamed_tokenizer_is_followed(corpus: Path) -> None:
    assert evaluated(corpus)
    (corpus / "tokenizer.model").rename(corpus.parent / "kept")
    (corpus / "mine.bin").symlink_to(corpus.parent / "kept")
    describe(corpus, file_name="mine.bin")
    assert evaluated(corpus)


def test_journal_with_other_files_is_rejected(prepared: Path, corpus: Path) -> None:
    (entry,) = (corpus / "meta" / "prepare" / "web").glob("slice-*.json")
    content = json.loads(entry.read_text())
    for name in ("../../x", "/etc/passwd", "a/b", "a\nb"):
        content["shards"][0]["file"] = name
        entry.write_text(json.dumps(content))
        config = PrepareConfig(f"web={prepared}/text", str(corpus), num_workers=1, split=(60, 40))
        with pytest.raises(ValueError, match=r"slice-00000.json names a file \(.*; correct or"):
            prepare(config)


def test_counts_that_leave_the_corpus_are_rejected(tmp_path: Path) -> None:
    files = write_corpus(tmp_path / "corpus", {"web": [3000]})
    shutil.copy(tmp_path / "corpus/web/shard-00000.arrow", tmp_path / "secret.arrow")
    match = r"counts\*.csv names a file \('.*'\) that must .*; correct or remove the entry$"
    for name in ("web/../../secret.arrow", "web/a\x1bb.arrow", "../web/x.arrow", "web/.."):
        rows = [("web/shard-00000.arrow", len(files.documents["web"][0]), 1), (name, 5, 100)]
        write_counts(tmp_path / "corpus", rows)
        with pytest.raises(ValueError, match=match):
            files.corpus(seq_length=64, on_missing="mask")


def test_pipes_and_devices_are_not_files(tmp_path: Path) -> None:
    files = write_corpus(tmp_path, {"web": [3000]}, counts=False)
    os.mkfifo(tmp_path / "web" / "pipe.arrow")
    (tmp_path / "web" / "zero.arrow").symlink_to("/dev/zero")
    (tmp_path / "meta").mkdir()
    os.mkfifo(tmp_path / "meta" / "counts.csv")
    assert files.corpus(seq_length=64).sources[0].paths == ["web/shard-00000.arrow"]


def test_line_break_in_shard_name_is_rejected(tmp_path: Path) -> None:
    files = write_corpus(tmp_path, {"web": [3000]}, counts=False)
    (tmp_path / "web" / "shard-00000.arrow").rename(tmp_path / "web" / "a\nb.arrow")
    match = r"^shard 'web/a\\nb.arrow' has a control character .*rename the file$"
    for path in (str(tmp_path), f"file://{tmp_path}"):
        with pytest.raises(ValueError, match=match):
            files.corpus(seq_length=64, data_path=path)


def test_link_to_itself_is_a_missing_shard(tmp_path: Path) -> None:
    files = write_corpus(tmp_path, {"web": [3000, 2000]})
    (tmp_path / "web" / "shard-00001.arrow").unlink()
    (tmp_path / "web" / "shard-00001.arrow").symlink_to("shard-00001.arrow")
    (tmp_path / "loop").symlink_to("loop")
    with pytest.raises(ValueError, match="web/shard-00001.arrow .* does not exist .*=mask"):
        files.corpus(seq_length=64)
    with files.stream(6, seq_length=64, on_missing="mask") as stream:
        for _ in range(12):
            stream.next_batch()
        assert stream.num_masked_rows > 0
