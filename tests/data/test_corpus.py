"""Bad input: rejected when the corpus is opened if it can be seen there, in one line."""

import errno
import os
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet
import pytest

from fms_fsdp.data import corpus as corpus_module
from fms_fsdp.data.corpus import open_corpus
from fms_fsdp.errors import ReadFailed, UserError
from tests.data.corpora import SEP, Files, write_corpus, write_counts, write_lists, write_scalars

SIZES = {"web": [3000, 2000], "code": [1500]}
DOCUMENTS = [np.arange(10, 40), np.arange(50, 90)]
ENDED = [np.append(document, SEP) for document in DOCUMENTS]


@pytest.fixture
def files(tmp_path: Path) -> Files:
    return write_corpus(tmp_path, SIZES)


def check_rejected(files: Files, match: str, batch: int | None = None, **changes: Any) -> None:
    settings = {"seq_length": 64, **changes}
    with pytest.raises((ValueError, FileNotFoundError), match=match) as caught:
        files.corpus(**settings)
        if batch is not None:
            files.stream(batch, **settings).batch_at(1)
    assert "\n" not in str(caught.value)


def test_unknown_name_lists_only_sources(tmp_path: Path) -> None:
    """The folders of `prepare` were listed too, and the last source was not."""
    names = [*"abcd", "deep/g", "e", "f", "z"]
    files = write_corpus(tmp_path, {name: [200] for name in names})
    for inner in ("meta/prepare/arr", "meta/prepare/text", "meta/tokenizer", "notes"):
        (tmp_path / inner).mkdir(parents=True)
        (tmp_path / inner / "file.json").write_text("{}")
    check_rejected(files, f"--datasets=nope .*; found: {', '.join(names)}$", datasets=("nope",))


def test_source_inside_another_is_rejected(files: Files) -> None:
    write_lists(files.root / "web" / "deep" / "a.arrow", DOCUMENTS)
    for names in ((), ("web", "web/deep")):
        check_rejected(files, "--datasets=web/deep is inside web", datasets=names)


def test_folder_without_shards_is_rejected(files: Files, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "empty" / "notes").touch()
    (tmp_path / "text").mkdir()
    pyarrow.parquet.write_table(pa.table({"text": ["a"]}), tmp_path / "text" / "part.parquet")
    for name, fix in (("empty", "make some with"), ("text", ".*part.parquet is text: .* prepare")):
        match = f"--datasets={name} must contain .arrow shards; {fix}"
        check_rejected(files, match, datasets=(name,))
    match = "--data_path=.*text must contain .arrow shards; part.parquet is text"
    check_rejected(Files(tmp_path / "text"), match)


def test_unfinished_prepare_is_named(tmp_path: Path) -> None:
    """The error advised to make shards of its plan.json."""
    (tmp_path / "meta/prepare/code").mkdir(parents=True)
    (tmp_path / "meta/prepare/code/plan.json").write_text("{}")
    match = "must contain .arrow shards; it holds an unfinished `prepare`: run that command again"
    check_rejected(Files(tmp_path), match)


def test_shard_unlike_its_counts_is_rejected(files: Files) -> None:
    path = files.root / "web" / "shard-00001.arrow"
    path.write_bytes(b"")
    check_rejected(files, "shard web/shard-00001.arrow is not a complete Arrow IPC file; restore")
    write_lists(path, DOCUMENTS)
    check_rejected(files, r"has 2 documents and 70 tokens, but the counts file says \d+ and \d+")
    path.unlink()
    check_rejected(
        files, r"web/shard-00001.arrow is listed in meta/\*counts\*.csv but does not exist"
    )


def test_batch_must_be_divisible_by_ranks(files: Files) -> None:
    match = r"--global_batch_size=12 must be divisible by 5 .*; use 10 or 15"
    with pytest.raises(ValueError, match=match):
        files.stream(12, 0, 5, seq_length=64)
    with pytest.raises(ValueError, match=r"--global_batch_size=2 .* divisible by 4 .*; use 4$"):
        files.stream(2, 0, 4, seq_length=64)


def test_sources_share_vocabulary_and_tokenizer(files: Files, tmp_path: Path) -> None:
    assert files.corpus(seq_length=64).vocab_size == 5000
    big = {"max_token_id": "5999", "tokenizer_digest": "x"}
    write_lists(tmp_path / "big" / "a.arrow", [np.arange(6000)], **big)
    match = "shard big/a.arrow has token 5999, which must be below --vocab_size=5000"
    check_rejected(files, match, batch=2, datasets=("big",))
    write_lists(tmp_path / "other" / "a.arrow", DOCUMENTS * 10, tokenizer_digest="y")
    match = "tokenizer_digest is x in shard big/a.arrow but y in other/a.arrow"
    check_rejected(files, match, datasets=("big", "other"))


@pytest.mark.parametrize("on_missing", ["error", "mask"])
def test_token_beyond_vocabulary_names_its_document(tmp_path: Path, on_missing: str) -> None:
    write_scalars(tmp_path / "big" / "a.arrow", [np.arange(100, 200), np.full(100, 5000)])
    match = (
        r"big/a.arrow has token 5000 in document 1, which must be below --vocab_size=5000; raise "
        r"--vocab_size to the size of the tokenizer, or restore the shard "  # a mask does not hide it
        r"\[big sequence \d, step 1\]"
    )
    check_rejected(Files(tmp_path), match, batch=3, on_missing=on_missing)


@pytest.mark.parametrize(
    ("dtype", "token"), [("int64", -100), ("int64", -1), ("uint64", 2**64 - 100)]
)
def test_negative_or_64_bit_token_is_rejected(tmp_path: Path, dtype: str, token: int) -> None:
    for at, size, mask in ((0, 32, True), (5, 1, True), (29, 32, False), (29, 1, False)):
        document = np.arange(10, 40).astype(dtype)
        document[at] = token
        write_lists(tmp_path / "big" / "a.arrow", [document] * 50, dtype=dtype)
        match = r"big/a.arrow has token 9223372036854775807 in document \d+, which must be below"
        flags = {"seq_length": size, "document_mask": mask, "on_missing": "mask"}
        check_rejected(Files(tmp_path), match, batch=1500 // size, **flags)


def test_separator_is_read_from_shards(files: Files, tmp_path: Path) -> None:
    assert files.corpus(sep_token=None, seq_length=64).sep_token == SEP
    silent = write_corpus(tmp_path / "silent", {"x": [300]}, layout="scalars", stored=True)
    match = rf"shard x/.* does not name its separator; set --sep_token .* all end with {SEP}\)"
    check_rejected(silent, match, sep_token=None)
    write_lists(tmp_path / "web" / "z.arrow", DOCUMENTS, sep_token="7")
    match = r"sep_token is 3 in shard .* but 7 in web/z.arrow"
    check_rejected(files, match, sep_token=None, datasets=("web",))
    write_lists(tmp_path / "web" / "z.arrow", DOCUMENTS, sep_token="7", has_eos="true")
    match = "--sep_token=3 does not match shard web/z.arrow, whose documents end with 7;"
    check_rejected(files, match, datasets=("web",))


def test_separator_must_be_stored_consistently(tmp_path: Path) -> None:
    path, mixed = tmp_path / "web" / "a.arrow", [DOCUMENTS[0], ENDED[1]] * 20
    write_scalars(path, mixed)
    match = rf"shard web/a.arrow has documents with and without a trailing separator \({SEP}\)"
    check_rejected(Files(tmp_path), match)
    write_scalars(path, DOCUMENTS)
    write_scalars(tmp_path / "web" / "b.arrow", ENDED)
    match = r"shard web/b.arrow differs from other shards of source web: .* separator \(3\)"
    check_rejected(Files(tmp_path), match)
    (tmp_path / "web" / "b.arrow").unlink()
    for has_eos, documents, word in (
        ("true", DOCUMENTS * 20, "without"),
        ("true", mixed, "without"),
        ("false", ENDED * 20, "with"),
    ):
        write_lists(path, documents, has_eos=has_eos)
        match = rf"has documents .*{word} a trailing .* \(3\), but says has_eos={has_eos}; "
        check_rejected(Files(tmp_path), match)
    write_lists(path, mixed, has_eos="false")  # some texts may end with the token by chance
    assert Files(tmp_path).corpus(seq_length=64).sources[0].delimiter == 1


def test_malformed_counts_are_rejected(files: Files) -> None:
    write_counts(files.root, [("web/shard-00000.arrow", "many", 3)])  # type: ignore[list-item]
    check_rejected(files, "meta/counts.csv must have rows of .*'many'; correct or remove the file")


def test_large_corpus_is_checked_while_read(files: Files, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fms_fsdp.data.corpus.OPENED_AT_START", 0)
    os.truncate(files.root / "web" / "shard-00001.arrow", 100)
    match = r"web/shard-00001.arrow is not a complete .* \[web sequence \d+, step \d+\]"
    with files.stream(2, seq_length=64) as stream, pytest.raises(ValueError, match=match):
        for step in range(1, 60):
            stream.batch_at(step)


@pytest.mark.parametrize("layout", ["lists", "scalars"])
@pytest.mark.parametrize("opened_at_start", [1, 256])
def test_full_shard_counted_as_empty_is_rejected(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, layout: str, opened_at_start: int
) -> None:
    """No step opens it: its tokens were left out without a word."""
    monkeypatch.setattr(corpus_module, "OPENED_AT_START", opened_at_start)
    files = write_corpus(tmp_path, {"web": [3000, 2000]}, layout=layout, stored=True)
    num_docs = [len(shard) for shard in files.documents["web"]]
    rows = [("web/shard-00000.arrow", num_docs[0], files.offset("web", 1, 0))]
    write_counts(tmp_path, [*rows, ("web/shard-00001.arrow", num_docs[1], 0)])
    match = rf"shard-00001.arrow has {num_docs[1]} documents and \d+ tokens, but .* says {num_docs[1]} and 0"
    check_rejected(files, match)


def test_shard_truncated_while_read_is_named(files: Files) -> None:
    path = files.root / "one" / "a.arrow"
    write_lists(path, [np.arange(10, 200)] * 30, chunk=1000)
    match = r"shard one/a.arrow is truncated at byte \d+; .* \[one sequence \d+, step \d+\]"
    with files.stream(4, seq_length=64, datasets=("one",)) as stream:
        stream.batch_at(1)
        os.truncate(path, path.stat().st_size * 6 // 10)
        with pytest.raises(ValueError, match=match):
            for step in range(2, 20):
                stream.batch_at(step)


def test_shard_removed_while_read_is_named(files: Files) -> None:
    match = r"shard web/.* cannot be read: .* \[web sequence \d+, step 1\]"
    with files.stream(4, seq_length=64, datasets=("web",)) as stream:
        for shard in (files.root / "web").iterdir():
            shard.unlink()
        with pytest.raises(ValueError, match=match):
            stream.next_batch()


def test_symbolic_links_are_followed(files: Files, tmp_path: Path) -> None:
    (tmp_path / "linked").symlink_to(tmp_path / "web")
    corpus = files.corpus(seq_length=64, datasets=("linked",))
    assert corpus.sources[0].num_tokens == files.num_tokens("web")


@pytest.mark.parametrize("scheme", ["", "file://"])
def test_linked_shards_and_sources_count_once(
    files: Files, tmp_path: Path, scheme: str, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "all").symlink_to("web")  # sorts before its target
    (tmp_path / "web/a-copy.arrow").symlink_to("shard-00000.arrow")
    (tmp_path / "code/web.arrow").symlink_to("../web/shard-00001.arrow")
    section = files.section(seq_length=64, data_path=f"{scheme}{tmp_path}")
    found = {source.name: source.num_tokens for source in open_corpus(section).sources}
    assert found == {name: files.num_tokens(name) for name in ("code", "web")}
    notes = capsys.readouterr().err.replace("shard-0000", "")
    if not scheme:  # each note is printed once per process
        assert "source all skipped, because it is a link: all/a-copy.arrow is web/0.arrow" in notes
        assert "source web: 1 shard skipped" in notes and "web/a-copy.arrow is web/0.arrow" in notes
    with pytest.raises(UserError, match=r"--datasets=all must not consist of links .*; remove it"):
        files.corpus(seq_length=64, datasets=("all", "web"))


def test_digests_follow_names_order_and_counts(files: Files, tmp_path: Path) -> None:
    section = files.section(seq_length=64, on_missing="mask")
    before = {source.name: source.digest for source in open_corpus(section).sources}
    (tmp_path / "web" / "shard-00001.arrow").rename(tmp_path / "web" / "x.arrow")
    after = {source.name: source.digest for source in open_corpus(section).sources}
    assert after["code"] == before["code"] != before["web"] != after["web"]


def test_validation_folder_is_no_source(files: Files, tmp_path: Path) -> None:
    """`prepare --split` writes it with its own meta/; it is trained on only if it is named."""
    write_corpus(tmp_path / "validation", SIZES)
    assert [source.name for source in files.corpus(seq_length=64).sources] == ["code", "web"]
    named = files.corpus(seq_length=64, datasets=("validation/web",))
    assert [source.name for source in named.sources] == ["validation/web"]


@pytest.mark.parametrize("folder", ["validation", "test"])
def test_copied_held_out_shards_are_no_source(
    files: Files, tmp_path: Path, folder: str, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copytree(tmp_path / "web", tmp_path / folder / "web")
    assert [source.name for source in files.corpus(seq_length=64).sources] == ["code", "web"]
    assert f"own meta/: {folder}/web; name them" in capsys.readouterr().err
    named = files.section(seq_length=64, data_path=str(tmp_path / folder))
    assert [source.name for source in open_corpus(named).sources] == ["web"]


def test_folder_is_another_corpus_if_it_has_counts(
    files: Files, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "web/meta").mkdir()
    (tmp_path / "web/meta/README.md").write_text("notes")
    assert [source.name for source in files.corpus(seq_length=64).sources] == ["code", "web"]
    (tmp_path / "web/meta/counts.csv").write_text("dataset/filename,documents,tokens\n")
    assert [source.name for source in files.corpus(seq_length=64).sources] == ["code"]
    assert "own meta/: web; name them" in capsys.readouterr().err
    (tmp_path / "code/meta").mkdir()
    (tmp_path / "code/meta/tokenizer.json").write_text("{}")
    with pytest.raises(UserError, match="has sources only in other corpora .* e.g. code; set"):
        files.corpus(seq_length=64)


@pytest.mark.parametrize("code", [errno.EIO, errno.ENXIO])
def test_each_failed_read_is_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    """The last tokens of documents, of shards that do not name their separator, raised OSError."""
    files = write_corpus(tmp_path, {"web": [300]}, layout="scalars")
    pread, calls = os.pread, 0
    monkeypatch.setattr("fms_fsdp.data.storage.time.sleep", lambda seconds: None)

    def failing(descriptor: int, size: int, offset: int) -> bytes:
        nonlocal calls
        calls += 1
        if calls > allowed:
            raise OSError(code, os.strerror(code))
        return pread(descriptor, size, offset)

    allowed = 1 << 30
    monkeypatch.setattr(os, "pread", failing)
    files.corpus(seq_length=8)
    total = calls
    num_errors = 0
    for number in range(total):
        allowed = number
        calls = 0
        try:
            files.corpus(seq_length=8)
        except ReadFailed:
            assert code == errno.EIO
            num_errors += 1
        except UserError:
            assert code == errno.ENXIO
            num_errors += 1
    assert num_errors == total > 15


def test_shards_of_other_data_below_a_source_are_not_read(tmp_path: Path) -> None:
    """The log named the folder as held-out, and the source trained on its shards."""
    for path in ("x", "validation/y", "test/deep/y", "meta/z", "inner/w"):
        write_lists(tmp_path / f"{path}.arrow", DOCUMENTS)
        write_lists(tmp_path / "web" / f"{path}.arrow", DOCUMENTS)
    for folder in (tmp_path, tmp_path / "web"):
        (folder / "inner/meta").mkdir()
        (folder / "inner/meta/tokenizer.json").write_text("{}")
    files = Files(tmp_path)
    (alone,) = files.corpus(seq_length=8, datasets=(".",)).sources
    assert [path for path in alone.paths if not path.startswith("web/")] == ["x.arrow"]
    (web,) = files.corpus(seq_length=8, datasets=("web",)).sources
    assert "web/inner/w.arrow" not in web.paths and "web/x.arrow" in web.paths
    for name in ("web/inner", "validation"):  # named, they are sources
        (named,) = files.corpus(seq_length=8, datasets=(name,)).sources
        assert len(named.paths) == 1


@pytest.mark.parametrize("first", ["empty", "corrupt", "missing"])
def test_unusable_first_shard_decides_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, first: str
) -> None:
    """Of many shards one per source is opened. Without its documents, 63 of 64 sequences were masked."""
    monkeypatch.setattr(corpus_module, "OPENED_AT_START", 2)
    paths = [tmp_path / f"web/shard-{number}.arrow" for number in range(4)]
    for path in paths:
        write_scalars(path, [] if first == "empty" and path == paths[0] else ENDED * 20)
    stored = sum(map(len, ENDED)) * 20
    sizes = [(0, 0) if first == "empty" and path == paths[0] else (40, stored) for path in paths]
    rows = [(f"web/{path.name}", *size) for path, size in zip(paths, sizes, strict=True)]
    write_counts(tmp_path, rows)
    files = Files(tmp_path)
    flags = {"seq_length": 32, "on_missing": "fail" if first == "empty" else "mask"}
    before = files.stream(4, **flags)
    state = before.state_dict()
    if first == "corrupt":
        os.truncate(paths[0], 100)
    if first == "missing":
        paths[0].unlink()
    stream = files.stream(4, **flags)
    stream.load_state_dict(state, 0)
    (now,), (then,) = stream.corpus.sources, before.corpus.sources
    assert now.delimiter == then.delimiter == 0


def test_unclosed_quote_in_counts_is_one_line(tmp_path: Path) -> None:
    files = write_corpus(tmp_path, SIZES)
    counts = tmp_path / "meta/counts.csv"
    counts.write_text('dataset/filename,documents,tokens\n"' + "x" * 140_000)
    check_rejected(files, "meta/counts.csv must have rows of .*; correct or remove the file")


def test_shard_of_another_tokenizer_is_no_data(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of many shards one per source is opened at the start; the others trained without a word."""
    monkeypatch.setattr(corpus_module, "OPENED_AT_START", 1)
    for number, digest in enumerate("ab"):
        path = tmp_path / f"web/shard-{number}.arrow"
        write_lists(path, DOCUMENTS * 40, tokenizer_digest=digest * 16)
    sizes = (80, 40 * sum(map(len, DOCUMENTS)))
    write_counts(tmp_path, [(f"web/shard-{number}.arrow", *sizes) for number in range(2)])
    files = Files(tmp_path)
    with pytest.raises(
        ValueError, match="shard-1.arrow has tokenizer_digest b.*, but other shards a"
    ):
        files.stream(64, seq_length=64, on_missing="mask").batch_at(1)
