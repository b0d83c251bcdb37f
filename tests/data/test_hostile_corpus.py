"""A corpus that someone else made reads and writes nothing but its own files."""

import json
import os
import tempfile
from pathlib import Path
from typing import Any

import pytest

from fms_fsdp.config import DataConfig, EvalConfig
from fms_fsdp.data.validation import open_held_out, scan_held_out
from fms_fsdp.tools.prepare.command import PrepareConfig, prepare
from tests.data.corpora import Files, write_corpus, write_counts

HOSTILE = ["../../victim", "/etc/passwd", "a/b", "..", "a\0b", "a\nb", "a\x1b[2Jb", "", 7, None]


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    for i in range(40):
        (tmp_path / "text").mkdir(exist_ok=True)
        (tmp_path / "text" / f"{i}.txt").write_text(
            f"{Path(tempfile.__file__).read_text()[i * 300 :][:300]}{i}"
        )
    settings: dict[str, Any] = {
        "num_workers": 1,
        "split": (60, 40),
        "train_tokenizer": True,
        "vocab_size": 400,
    }
    prepare(
        PrepareConfig(f"web={tmp_path / 'text'}", str(tmp_path / "a" / "b" / "corpus"), **settings)
    )
    return tmp_path / "a" / "b" / "corpus"


def described(corpus: Path, **changes: Any) -> None:
    path = corpus / "meta" / "tokenizer.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def evaluated(corpus: Path) -> bool:
    """Whether the held-out source knows the bytes of its tokens."""
    data = DataConfig(data_path=str(corpus), seq_length=16)
    flags = EvalConfig(eval_interval=1, eval_steps=3)
    (source,) = open_held_out(flags, scan_held_out(flags, data, None, vocab_size=400), 1)
    source.stream.close()
    return source.token_bytes is not None


@pytest.mark.parametrize("name", HOSTILE)
def test_a_tokenizer_that_is_named_elsewhere_is_refused_and_overwrites_nothing(
    corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: object
) -> None:
    (tmp_path / "a" / "t").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "a" / "t"))
    (corpus.parent.parent / "victim").write_bytes(
        (corpus / "tokenizer.model").read_bytes()
    )  # what would be read
    (tmp_path / "victim").write_text("mine")
    before = sorted(path.relative_to(tmp_path) for path in tmp_path.rglob("*"))
    described(corpus, file_name=name)
    with pytest.raises(
        ValueError,
        match=r"meta/tokenizer.json (names a file|says file_name) \(.*; .*remove the (entry|file)$",
    ):
        evaluated(corpus)
    with pytest.raises(
        ValueError,
        match=r"meta/tokenizer.json (names a file|says file_name) \(.*; .*remove the (entry|file)$",
    ):
        prepare(PrepareConfig(f"more={tmp_path / 'text'}", str(corpus), num_workers=1))
    assert (tmp_path / "victim").read_text() == "mine"
    after = [path.relative_to(tmp_path) for path in tmp_path.rglob("*") if path.name != ".lock"]
    assert sorted(after) == [path for path in before if path.name != ".lock"]


@pytest.mark.parametrize(
    "text",
    ["", "[1]", "null", "{}", "[" * 100_000, '{"kind": "byte"}', "\x00\xff"],
    ids=lambda text: text[:9],
)
def test_a_description_of_the_tokenizer_that_is_none_is_refused(corpus: Path, text: str) -> None:
    (corpus / "meta" / "tokenizer.json").write_text(text)
    with pytest.raises(
        ValueError,
        match=r"meta/tokenizer.json was not written by prepare; restore or remove the file$",
    ):
        evaluated(corpus)


def test_a_kind_of_tokenizer_that_is_a_path_is_refused(corpus: Path) -> None:
    described(corpus, kind="/etc/passwd", file_name="")
    with pytest.raises(
        ValueError, match=r"says kind \('/etc/passwd'\), which prepare never writes"
    ):
        evaluated(corpus)


def test_a_tokenizer_under_any_bare_name_and_links_of_the_user_are_followed(corpus: Path) -> None:
    assert evaluated(corpus)
    (corpus / "tokenizer.model").rename(corpus.parent / "kept")
    (corpus / "mine.bin").symlink_to(corpus.parent / "kept")
    described(corpus, file_name="mine.bin")
    assert evaluated(corpus)


@pytest.mark.parametrize("name", ["../../x", "/etc/passwd", "a/b", "a\nb"])
def test_a_journal_that_names_other_files_is_refused(
    corpus: Path, tmp_path: Path, name: str
) -> None:
    (entry,) = (corpus / "meta" / "prepare" / "web").glob("slice-*.json")
    content = json.loads(entry.read_text())
    content["shards"][0]["file"] = name
    entry.write_text(json.dumps(content))
    with pytest.raises(
        ValueError, match=r"slice-00000.json names a file \(.*; correct or remove the entry$"
    ):
        prepare(
            PrepareConfig(f"web={tmp_path / 'text'}", str(corpus), num_workers=1, split=(60, 40))
        )


@pytest.mark.parametrize(
    "name", ["web/../../secret.arrow", "web/a\x1bb.arrow", "../web/x.arrow", "web/.."]
)
def test_a_row_of_the_counts_that_leads_out_of_the_corpus_is_refused(
    tmp_path: Path, name: str
) -> None:
    files = write_corpus(tmp_path / "corpus", {"web": [3000]})
    (tmp_path / "secret.arrow").write_bytes(
        (tmp_path / "corpus/web/shard-00000.arrow").read_bytes()
    )
    rows = [("web/shard-00000.arrow", len(files.documents["web"][0]), 1), (name, 5, 100)]
    write_counts(tmp_path / "corpus", rows)
    with pytest.raises(
        ValueError,
        match=r"counts\*.csv names a file \('.*'\) that must .*; correct or remove the entry$",
    ):
        files.corpus(seq_length=64, on_missing="mask")


def test_pipes_and_devices_are_not_files(tmp_path: Path) -> None:
    files = write_corpus(tmp_path, {"web": [3000]}, counts=False)
    os.mkfifo(tmp_path / "web" / "pipe.arrow")
    (tmp_path / "web" / "zero.arrow").symlink_to("/dev/zero")
    (tmp_path / "meta").mkdir()
    os.mkfifo(tmp_path / "meta" / "counts.csv")
    assert files.corpus(seq_length=64).sources[0].paths == ["web/shard-00000.arrow"]


def test_a_shard_whose_name_breaks_the_line_is_refused(tmp_path: Path) -> None:
    files = Files(tmp_path)
    write_corpus(tmp_path, {"web": [3000]}, counts=False)
    (tmp_path / "web" / "shard-00000.arrow").rename(tmp_path / "web" / "a\nb.arrow")
    for path in (str(tmp_path), f"file://{tmp_path}"):
        with pytest.raises(
            ValueError,
            match=r"^shard 'web/a\\nb.arrow' has a control character .*rename the file$",
        ):
            files.corpus(seq_length=64, data_path=path)


def test_a_shard_that_is_a_link_to_itself_is_refused_by_name_and_masked_where_it_is_counted(
    tmp_path: Path,
) -> None:
    files = write_corpus(tmp_path, {"web": [3000, 2000]})
    (tmp_path / "web" / "shard-00001.arrow").unlink()
    (tmp_path / "web" / "shard-00001.arrow").symlink_to("shard-00001.arrow")
    (tmp_path / "loop").symlink_to("loop")
    with pytest.raises(
        ValueError,
        match="shard web/shard-00001.arrow is listed in .* does not exist .*--on_missing=mask",
    ):
        files.corpus(seq_length=64)
    with files.stream(6, seq_length=64, on_missing="mask") as stream:
        for _ in range(12):
            stream.next_batch()
        assert stream.num_masked_rows > 0
