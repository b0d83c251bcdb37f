"""Formats, names and fields that `prepare` reads or rejects."""

from __future__ import annotations

import bz2
import errno
import glob
import gzip
import json
import lzma
import os
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import zstandard

from fms_fsdp.__main__ import main
from fms_fsdp.prepare.command import prepare
from fms_fsdp.prepare.documents import Problem, TextFormat
from fms_fsdp.prepare.input_files import find_files, parse_input
from fms_fsdp.prepare.prepare_flags import PrepareConfig
from fms_fsdp.prepare.writer import Stats
from tests.prepare.test_documents import FORM, read_all

LINES = b'{"text": "a"}\n{"text": "b"}\n'
COMPRESS: dict[str, Callable[[bytes], bytes]] = {
    "gz": gzip.compress,
    "xz": lzma.compress,
    "bz2": bz2.compress,
    "zst": zstandard.ZstdCompressor().compress,
}


def texts(path: str | Path, form: TextFormat = FORM) -> list[str]:
    records = read_all(Path(path), form=form)
    return [record.reason if isinstance(record, Problem) else record.text for record in records]


def run(tmp_path: Path, path: str | Path, **flags: Any) -> Stats:
    settings = {"output": f"{tmp_path}/out", "tokenizer": "byte", "num_workers": 1, **flags}
    return prepare(PrepareConfig(f"x={path}", **settings))["x"]


# Compression


@pytest.mark.parametrize("suffix", COMPRESS)
def test_compressed_files_are_read_to_the_end(tmp_path: Path, suffix: str) -> None:
    compress = COMPRESS[suffix]
    (tmp_path / f"x.jsonl.{suffix}").write_bytes(compress(LINES) + compress(LINES))
    (tmp_path / f"y.txt.{suffix}").write_bytes(compress(b"text" * 99_999))
    assert texts(tmp_path) == ["a", "b", "a", "b", "text" * 99_999]


@pytest.mark.parametrize("suffix", COMPRESS)
def test_corrupt_compressed_file_is_rejected(tmp_path: Path, suffix: str) -> None:
    compress, path = COMPRESS[suffix], tmp_path / f"x.jsonl.{suffix}"
    member = compress(b"".join(b'{"text": "%d"}\n' % i for i in range(9999)))
    corrupt, half = b"\1" + member[1:], member[: len(member) // 2]
    for data in (corrupt, half, member + corrupt, member + half):
        path.write_bytes(data)
        with pytest.raises(ValueError, match=rf"x.jsonl.{suffix} cannot be read: .*; repair"):
            texts(path)


@pytest.mark.parametrize("suffix", COMPRESS)
def test_zero_padding_after_a_member_is_skipped(tmp_path: Path, suffix: str) -> None:
    member = COMPRESS[suffix](LINES)
    for size in (1, 512, 99_999):
        (tmp_path / f"x.jsonl.{suffix}").write_bytes(member + bytes(size) + member + bytes(size))
        assert texts(tmp_path) == ["a", "b", "a", "b"]


def write_large_window(path: Path, size: int = 3 << 20) -> None:
    form = zstandard.ZstdCompressionParameters(window_log=30, enable_ldm=True)
    with open(path, "wb") as file:
        # without the size of the content, as from a pipe: else the window is as small as the content
        writer = zstandard.ZstdCompressor(compression_params=form).stream_writer(file)
        for _ in range(size >> 20):
            writer.write(b"a" * ((1 << 20) - 1) + b"\n")
        writer.close()


@pytest.mark.parametrize("before", [b"", COMPRESS["zst"](b"first\n")])
def test_large_zstd_window_is_read_or_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, before: bytes
) -> None:
    path, form = tmp_path / "x.txt.zst", TextFormat(text_separator="\n")
    write_large_window(path)
    path.write_bytes(before + path.read_bytes())
    assert len(texts(path, form)) == 3 + bool(before)
    monkeypatch.setitem(sys.modules, "zstandard", None)
    with pytest.raises(ValueError, match=r"above 128 MiB; .*pip install zstandard"):
        texts(path, form)


def test_zstd_is_read_without_the_extra(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "zstandard", None)
    member = COMPRESS["zst"](LINES)
    (tmp_path / "x.jsonl.zst").write_bytes(member + member)
    assert texts(tmp_path) == ["a", "b", "a", "b"]
    (tmp_path / "x.jsonl.zst").write_bytes(member[:-3])
    with pytest.raises(ValueError, match="x.jsonl.zst cannot be read"):
        texts(tmp_path)


def test_archive_is_rejected(tmp_path: Path) -> None:
    names = "x.zip x.tar.gz x.TGZ x.jsonl.lz4 x.7z x.Z x.br x.parquet.gz x.jsonl.zstd".split()
    for name in names:
        (tmp_path / name).write_bytes(b"\0")
        with pytest.raises(ValueError, match=rf"{name} is an archive, .* unpack it"):
            run(tmp_path, tmp_path / name)
    (tmp_path / "a.txt").write_text("text")
    assert run(tmp_path, tmp_path, exclude=("x.*",), output=f"{tmp_path}/.out").documents == 1


@pytest.mark.parametrize("name", ["x.TSV", "x.csv.gz"])
def test_csv_is_rejected_without_a_separator(tmp_path: Path, name: str) -> None:
    data = b"text\na\nb\n"
    (tmp_path / name).write_bytes(gzip.compress(data) if name.endswith("gz") else data)
    with pytest.raises(ValueError, match=rf"{name} is a table.*convert it to JSON lines"):
        run(tmp_path, tmp_path / name)
    assert run(tmp_path, tmp_path / name, text_separator="\\n").documents == 3


# Names


def write_odd_names(folder: Path) -> None:
    """Writes nine documents into files whose names are not UTF-8."""
    table, root = pa.table({"text": ["p", "q"]}), os.fsencode(folder)
    for name in (b"\xe9.jsonl", b"\xe9.jsonl.gz", b"\xe9.txt", b"\xe9.jsonl.xz"):
        compress = COMPRESS.get(name.rpartition(b".")[2].decode(), bytes)
        with open(os.path.join(root, name), "wb") as file:
            file.write(compress(LINES))
    with open(os.path.join(root, b"\xe9.parquet"), "wb") as file:
        pq.write_table(table, file)
    path = os.path.join(root, b"\xe9.arrow")
    with open(path, "wb") as file, pa.ipc.new_file(file, table.schema) as writer:
        writer.write_table(table)


@pytest.mark.slow
def test_names_that_are_not_utf8_are_read(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "in"
    folder.mkdir()
    write_odd_names(folder)
    words = " ".join(chr(97 + i % 26) + chr(97 + i // 26 % 26) + str(i) for i in range(9999))
    (folder / os.fsdecode(b"\xe8.jsonl")).write_text(f'{{"text": "{words}"}}\nno JSON\n')
    flags = "--num_workers=2", "--shard_tokens=9999", f"--output={folder / '.out'}"
    assert main(["prepare", f"x={folder}", "--tokenizer=byte", *flags]) == 0
    out, err = capfd.readouterr()
    assert "\\udce8.jsonl:2 not JSON" in out and "Traceback" not in err
    assert json.loads((folder / ".out/meta/summary.json").read_text())["x"]["documents"] == 12
    train = "--train_tokenizer", "--vocab_size=300", f"--output={tmp_path / 'trained'}"
    assert main(["prepare", f"x={folder}", "--num_workers=1", *train]) == 0
    argv = ["convert", f"{folder}/.out/x", "--tokenizer=byte", f"--output={tmp_path / 'c'}"]
    assert main(argv) == 0
    capfd.readouterr()
    (folder / os.fsdecode(b"\xe9.jsonl.gz")).write_bytes(b"no gzip")
    argv = ["prepare", f"x={folder}", "--tokenizer=byte", f"--output={tmp_path / 'other'}"]
    assert main([*argv, "--num_workers=1"]) == 2
    (line,) = capfd.readouterr().err.splitlines()
    assert ".jsonl.gz cannot be read" in line


def test_folder_of_hub_cache_gives_its_records(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    hub = tmp_path / "datasets--own--set"
    snapshot = hub / "snapshots/5fc1/data"
    snapshot.mkdir(parents=True)
    for number, name in enumerate(("README.md", "train-0.jsonl", "test-0.jsonl")):
        blob = hub / f"blobs/{number}fe1"  # sorts before its name
        blob.parent.mkdir(exist_ok=True)
        blob.write_bytes(LINES)
        (snapshot / name).symlink_to(blob)
    (hub / "refs").mkdir()
    (hub / "refs/main").write_text("5fc1")
    assert run(tmp_path, hub).documents == 4
    notes = capsys.readouterr().err
    assert "skipped 2 files without a known ending" in notes
    assert ": refs/main, snapshots/5fc1/data/README.md; --include='*'" in notes
    assert "source x consists of several splits, test, train" in notes
    assert "revisions" not in notes
    for number in range(2):  # a file that differs between them
        revision = hub / "snapshots" / f"{number:040x}"
        revision.mkdir()
        (revision / "wiki-train.jsonl").write_bytes(LINES)
        (revision / "wiki-dev.jsonl").symlink_to(hub / "blobs/1fe1")
    assert run(tmp_path, hub / "snapshots", output=f"{tmp_path}/both").documents == 8
    assert "has 2 revisions of a dataset, 0000" in capsys.readouterr().err
    one = hub / "snapshots" / f"{0:040x}"
    assert run(tmp_path, one, output=f"{tmp_path}/one").documents == 4
    notes = capsys.readouterr().err
    assert "several splits, dev, train" in notes and "revisions" not in notes


@pytest.mark.parametrize("records", ["a.jsonl", "a.jsonl.gz", "a.json"])
def test_other_files_beside_records_are_skipped(
    tmp_path: Path, records: str, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "in"
    folder.mkdir()
    (folder / records).write_bytes(gzip.compress(LINES) if records.endswith("gz") else LINES)
    for name in ("LICENSE", "README", "SHA256SUMS", "a.jsonl.bak", "b.txt"):
        (folder / name).write_text("text")
    assert run(tmp_path, folder).documents == 3
    assert "skipped 4 files" in capsys.readouterr().err
    assert run(tmp_path, folder, include=("*",), output=f"{tmp_path}/all").documents == 7
    (folder / records).write_text("{}")
    if records == "a.json":  # a file of settings among code
        found = run(tmp_path, folder, output=f"{tmp_path}/code")
        assert (found.documents, found.num_bad) == (5, 1)


def test_path_that_exists_is_no_pattern(tmp_path: Path) -> None:
    folder = tmp_path / "corpus [v1]"
    folder.mkdir()
    (folder / "a [1].jsonl").write_bytes(LINES)
    for path in (folder, folder / "a [1].jsonl", folder / "*.jsonl", f"{tmp_path}/corpus [[]v1]/*"):
        assert texts(path) == ["a", "b"]
    assert list(parse_input(str(folder))) == ["corpus_v1_"]
    assert list(parse_input(f"{folder}/*.jsonl")) == ["corpus_v1_"]
    assert list(parse_input(f"web={folder}")) == ["web"]


def test_folder_with_equals_sign_is_a_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("lang=py").mkdir()
    Path("x,lang=c").mkdir()
    assert parse_input("lang=py") == {"lang_py": ["lang=py"]}
    assert parse_input("lang=py/*.jsonl") == {"lang_py": ["lang=py/*.jsonl"]}
    assert parse_input("x,lang=c") == {"x_lang_c": ["x,lang=c"]}
    assert parse_input("code=lang=py") == {"code": ["lang=py"]}
    assert parse_input("lang=c") == {"lang": ["c"]}


# Fields


def test_text_key_reaches_into_structs(tmp_path: Path) -> None:
    form, missing = TextFormat("doc.text"), "key 'doc.text' is missing or empty"
    (tmp_path / "x.jsonl").write_text('{"doc": {"text": "a"}}\n{"doc.text": "b"}\n{"doc": 1}\n')
    assert texts(tmp_path / "x.jsonl", form) == ["a", "b", missing]
    (tmp_path / "x.json").write_text('[{"doc": {"text": "a"}}]')
    assert texts(tmp_path / "x.json", form) == ["a"]
    table = pa.table({"doc": [{"text": "a", "id": 1}, {"text": None, "id": 2}, None], "z": [1] * 3})
    pq.write_table(table, tmp_path / "x.parquet")
    assert texts(tmp_path / "x.parquet", form) == ["a", missing, missing]
    for key in ("doc.body", "z.text", "doc.text.x"):
        with pytest.raises(ValueError, match=f"--text_key={key} is not a column of .*has doc, z"):
            texts(tmp_path / "x.parquet", TextFormat(key))


@pytest.mark.parametrize("kind", [pa.binary(), pa.large_binary(), pa.binary_view()])
def test_binary_column_with_utf8_is_read(tmp_path: Path, kind: pa.DataType) -> None:
    table = pa.table({"text": pa.array(["é".encode(), b"\xff"], kind)})
    with pa.OSFile(str(tmp_path / "x.arrow"), "wb") as file:
        with pa.ipc.new_file(file, table.schema) as writer:
            writer.write_table(table)
    pq.write_table(table, tmp_path / "x.parquet")
    assert texts(tmp_path) == ["é", "not UTF-8"] * 2


def test_json_that_python_cannot_read_is_malformed(tmp_path: Path) -> None:
    deep = "[" * 100_000 + "]" * 100_000
    lines = [
        f'{{"text": "a", "n": {"9" * 4000}, "deep": {"[" * 99 + "]" * 99}}}',
        f'{{"text": "b", "n": {"9" * 5000}}}',
        f'{{"text": "c", "deep": {deep}}}',
        '{"text": "d" "e"}',
    ]
    (tmp_path / "x.jsonl").write_text("\n".join(lines))
    assert texts(tmp_path / "x.jsonl") == ["a", "not JSON", "not JSON", "not JSON"]


def test_failing_storage_is_not_a_missing_input(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was "no such file", which nobody tries again."""
    path = tmp_path / "docs.jsonl"
    path.write_text('{"text": "a"}\n')
    stat = os.stat

    def failing(name: Any, *args: Any, **settings: Any) -> os.stat_result:
        if str(name).endswith("docs.jsonl"):
            raise OSError(errno.ESHUTDOWN, "Cannot send after transport endpoint shutdown", name)
        return stat(name, *args, **settings)

    monkeypatch.setattr(os, "stat", failing)
    with pytest.raises(OSError, match="Cannot send"):
        find_files(str(path))


@pytest.mark.parametrize("pattern", ["", "/*", "/**", "/**/*.txt", "/*/x.txt", "/[ab]/*"])
def test_folder_that_cannot_be_read_is_named(
    tmp_path: Path,
    pattern: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Its files were missing in the shards without a word."""
    for name in ("a", "b"):
        (tmp_path / "in" / name).mkdir(parents=True)
        (tmp_path / "in" / name / "x.txt").write_text(name)
    scandir = os.scandir
    listdir = os.listdir
    code = errno.EIO

    def failing(read: Callable[[Any], Any], folder: Any) -> Any:
        if str(folder).endswith("in/b"):
            raise OSError(code, os.strerror(code), folder)
        return read(folder)

    monkeypatch.setattr(os, "scandir", partial(failing, scandir))
    monkeypatch.setattr(os, "listdir", partial(failing, listdir))
    path = f"{tmp_path}/in{pattern}"
    if pattern == "/*/x.txt":  # reads no folder of that depth
        assert [file.name for file in find_files(path)] == ["a/x.txt", "b/x.txt"]
        return
    with pytest.raises(OSError, match="Input/output error"):
        find_files(path)
    code = errno.EACCES  # as of lost+found
    assert [file.name for file in find_files(path)] == ["a/x.txt"]
    assert f"skipped the folder {tmp_path}/in/b: Permission denied" in capsys.readouterr().err


def test_globs_match_as_those_of_python(tmp_path: Path) -> None:
    files = ["a.txt", "b.md", "x/a.txt", "x/y/a.txt", "x/y/z/b.txt", "w[1]/a.txt", ".hidden/a.txt"]
    for file in files:
        (tmp_path / file).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / file).write_text(file)
    (tmp_path / "x" / "linked").symlink_to(tmp_path / "w[1]")
    (tmp_path / "link.txt").symlink_to(tmp_path / "b.md")
    for pattern in (
        *(
            "*",
            "**",
            "*.txt",
            "**/*.txt",
            "**/a.txt",
            "x/**",
            "x/**/a.txt",
            "*/y/*",
            "**/y/**/*.txt",
        ),
        *("?.txt", "[ab].*", "x/*/*.txt", "w[1]/*", "**/[!a].txt"),
    ):
        found = glob.glob(f"{tmp_path}/{pattern}", recursive=True)
        expected = {
            os.path.realpath(file)
            for path in found
            for file in (
                [path] if os.path.isfile(path) else glob.glob(f"{path}/**", recursive=True)
            )
            if os.path.isfile(file)
        }
        if pattern == "w[1]/*":  # the folder exists, so its brackets are no pattern
            expected = {f"{tmp_path}/w[1]/a.txt"}
        given = find_files(f"{tmp_path}/{pattern}")
        assert {os.path.realpath(file.path) for file in given} == expected, pattern


@pytest.mark.parametrize("selected", ["current", "v2"])
def test_folder_with_two_names_is_excluded_by_one(tmp_path: Path, selected: str) -> None:
    """It was read under the first name alone: --exclude='current/*' lost the files of v2."""
    (tmp_path / "in/v2/part").mkdir(parents=True)
    (tmp_path / "in/v2/part/a.txt").write_text("a")
    (tmp_path / "in/current").symlink_to("v2")
    (tmp_path / "in/v2/part/loop").symlink_to(tmp_path / "in")
    folder = str(tmp_path / "in")
    names = [f"{selected}/part/a.txt"]
    other = "v2" if selected == "current" else "current"
    assert [file.name for file in find_files(folder, exclude=[f"{other}/*"])] == names
    assert [file.name for file in find_files(folder, include=[f"{selected}/part/*.txt"])] == names
    assert len(find_files(folder)) == 1


def test_caches_of_datasets_repeat_no_document(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """`map` on a data set that was loaded from a folder writes the changed rows into it."""
    folder = tmp_path / "in"
    folder.mkdir()
    table = pa.table({"text": ["a", "b"]})
    cache = "cache-0123456789abcdef"
    caches = [f"{cache}.arrow", f"{cache}_00000_of_00002.arrow"]
    for name in ("data-00000-of-00001.arrow", *caches):
        with pa.ipc.new_stream(str(folder / name), table.schema) as writer:
            writer.write_table(table)
    (folder / "state.json").write_text("{}")
    assert run(tmp_path, folder).documents == 2
    assert "skipped 2 files in which the package datasets" in capsys.readouterr().err
    assert texts(folder / caches[0]) == ["a", "b"]  # a file that was named itself is read
    (folder / "data-00000-of-00001.arrow").unlink()
    assert texts(folder) == ["a", "b", "a", "b"]  # nothing tells that they repeat another file
