"""Documents out of files: every document once whatever the cuts, and every oddity named."""

from __future__ import annotations

import gzip
import io
import json
import os
import random
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from fms_fsdp.tools.prepare import inputs as documents
from fms_fsdp.tools.prepare.inputs import (
    Document,
    Problem,
    TextFormat,
    find_files,
    plan_slices,
    read_part,
)

FORM = TextFormat()


def read_all(
    path: Path, slice_bytes: int = 1 << 20, form: TextFormat = FORM, limit: int | None = None
):
    slices = plan_slices(find_files(str(path)), slice_bytes, form, limit)
    return [record for entry in slices for part in entry.parts for record in read_part(part, form)]


def texts(records) -> list[str]:
    return [record.text for record in records if isinstance(record, Document)]


def write_lines(path: Path, values: list[str], end: bytes = b"\n") -> Path:
    path.write_bytes(
        end.join(json.dumps({"text": value}, ensure_ascii=False).encode() for value in values)
    )
    return path


@pytest.mark.parametrize("end", [b"\n", b"\r\n", b"\n\n"])
def test_cuts_of_json_lines_lose_and_repeat_nothing(tmp_path: Path, end: bytes) -> None:
    rng = random.Random(0)
    values = ["".join(rng.choices("aé漢😀\n\t\u2028 ", k=rng.randrange(30))) for _ in range(40)]
    path = write_lines(tmp_path / "x.jsonl", values, end)
    for slice_bytes in [*range(1, 40), 97, 500, 10**6]:
        assert texts(read_all(path, slice_bytes)) == values
    path.write_bytes(
        path.read_bytes() + b"\n"
    )  # with and without a line end at the end of the file
    assert texts(read_all(path, 50)) == values


def test_bad_lines_are_named_with_their_line_number_in_any_slice(tmp_path: Path) -> None:
    lines = [b'{"text": "a"}'] * 50
    lines[3], lines[20], lines[41] = b'{"text": "cut off', b'{"other": 1}', b'{"text": "\xff"}'
    lines[30], lines[31], lines[32] = b"[1]", b'{"text": 5}', b'{"text": "\\ud800"}'
    path = tmp_path / "x.jsonl"
    path.write_bytes(b"\n".join(lines))
    for slice_bytes in (30, 100, 10**6):
        found = [record for record in read_all(path, slice_bytes) if isinstance(record, Problem)]
        assert [(problem.where, problem.reason) for problem in found] == [
            (f"{path}:4", "not JSON"),
            (f"{path}:21", "key 'text' is missing or empty"),
            (f"{path}:31", "not a JSON object"),
            (f"{path}:32", "key 'text' is not a string"),
            (f"{path}:33", "lone surrogate"),
            (f"{path}:42", "not UTF-8"),
        ]
        assert all(problem.malformed for problem in found)


def test_all_containers_hold_the_same_documents(tmp_path: Path) -> None:
    values = [f"document {i}\n\tindented é" for i in range(300)]
    lines = write_lines(tmp_path / "a.jsonl", values).read_bytes()
    (tmp_path / "b.json.gz").write_bytes(
        gzip.compress(lines[:4000]) + gzip.compress(lines[4000:])
    )  # two members
    with (
        pa.OSFile(str(tmp_path / "c.jsonl.zst"), "wb") as raw,
        pa.CompressedOutputStream(raw, "zstd") as packed,
    ):
        packed.write(lines)
    (tmp_path / "d.jsonl").write_bytes(b"\xef\xbb\xbf" + lines)
    columns = {"id": list(range(300)), "text": values}
    pq.write_table(pa.table(columns), tmp_path / "e.parquet", row_group_size=17)
    packed_column = pa.array(values, pa.large_string()).dictionary_encode()
    pq.write_table(pa.table({"text": packed_column}), tmp_path / "f.parquet", row_group_size=50)
    (tmp_path / "g.txt").write_text("<|end|>".join(values) + "<|end|>")
    for name in ("a.jsonl", "b.json.gz", "c.jsonl.zst", "d.jsonl", "e.parquet", "f.parquet"):
        for slice_bytes in (500, 1 << 20):
            assert texts(read_all(tmp_path / name, slice_bytes)) == values, name
    assert texts(read_all(tmp_path / "g.txt", form=TextFormat(text_separator="<|end|>"))) == values


def test_separators_across_chunks_and_empty_pieces(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "x.txt"
    path.write_text("a" * 8191 + "SEPb" + "SEP" * 3 + "c" * 5000 + "\nSEP")
    assert texts(read_all(path, form=TextFormat(text_separator="SEP"))) == [
        "a" * 8191,
        "b",
        "c" * 5000 + "\n",
    ]


def test_folders_give_files_verbatim_and_report_what_is_no_text(tmp_path: Path) -> None:
    root = tmp_path / "src"
    for name in ("pkg/sub", ".git", "__pycache__", "pkg/.hidden"):
        (root / name).mkdir(parents=True)
    code = "def f():\r\n\tif x:\n        return 1  \n\n"
    (root / "pkg/b.py").write_bytes(code.encode())
    (root / "pkg/sub/a.py").write_bytes(b"\xef\xbb\xbfx")
    (root / "pkg/latin.txt").write_bytes("é".encode("latin-1"))
    (root / "pkg/pic.bin").write_bytes(b"\x89PNG\0\0")
    (root / "empty.md").write_bytes(b"")
    for name in (".git/x.py", "__pycache__/x.py", ".x.py", "pkg/.hidden/x.py"):
        (root / name).write_text("hidden")
    (root / "pkg/sub/loop").symlink_to(root)
    (tmp_path / "outside.py").write_text("linked")
    (root / "linked.py").symlink_to(tmp_path / "outside.py")
    (root / "dangling.py").symlink_to(tmp_path / "nothing")
    records = read_all(root)
    assert texts(records) == ["", "linked", code, "x"]  # in byte order of the names
    assert sorted(r.reason for r in records if isinstance(r, Problem)) == [
        "binary file",
        "not UTF-8",
    ]
    assert not any(r.malformed for r in records if isinstance(r, Problem))
    names = [file.name for file in find_files(str(root), include=["*.py"], exclude=["pkg/*"])]
    assert names == ["linked.py"]
    assert [file.name for file in find_files(f"{root}/**/*.py")] == [
        "linked.py",
        "pkg/b.py",
        "pkg/sub/a.py",
    ]


def test_limit_reads_the_first_records_only(tmp_path: Path) -> None:
    for i in range(4):
        write_lines(tmp_path / f"{i}.jsonl", [f"{i}-{j}" for j in range(10)])
    everything = texts(read_all(tmp_path))
    for limit in (1, 9, 10, 11, 25, 40, 99):
        for slice_bytes in (20, 10**6):
            assert texts(read_all(tmp_path, slice_bytes, limit=limit)) == everything[:limit]


def test_several_keys_are_joined(tmp_path: Path) -> None:
    path = tmp_path / "x.jsonl"
    path.write_text('{"title": "T", "body": "B"}\n')
    assert texts(read_all(path, form=TextFormat("title,body"))) == ["T\nB"]


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        (
            "cut.jsonl.gz",
            gzip.compress(os.urandom(5000))[:3000],
            ["cut.jsonl.gz", "cannot be read"],
        ),
        ("no.jsonl.gz", b"plain", ["no.jsonl.gz", "cannot be read"]),
        ("no.jsonl.zst", b"plain text, not zstd", ["no.jsonl.zst", "cannot be read"]),
        (
            "no.parquet",
            b"plain",
            ["no.parquet", "cannot be read", "Parquet", "repair or exclude the file"],
        ),
    ],
)
def test_broken_files_stop_with_their_name(
    tmp_path: Path, name: str, content: bytes, words: list[str]
) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ValueError) as error:
        read_all(tmp_path)
    assert all(word in str(error.value) for word in words)


def test_truncated_zstd_is_an_error_not_a_shorter_file(tmp_path: Path) -> None:
    path = tmp_path / "x.jsonl.zst"
    with pa.OSFile(str(path), "wb") as raw, pa.CompressedOutputStream(raw, "zstd") as packed:
        packed.write(b'{"text": "a"}\n' * 5000 + os.urandom(2000))
    path.write_bytes(path.read_bytes()[:-1000])
    with pytest.raises(ValueError, match="cannot be read"):
        read_all(path)


def test_parquet_of_other_columns_names_them(tmp_path: Path) -> None:
    pq.write_table(pa.table({"content": ["a"]}), tmp_path / "x.parquet")
    with pytest.raises(
        ValueError, match=r"--text_key=text is not a column of .*content; set --text_key"
    ):
        read_all(tmp_path)
    pq.write_table(pa.table({"tokens": [[1, 2]]}), tmp_path / "x.parquet")
    with pytest.raises(ValueError, match="python -m fms_fsdp convert"):
        read_all(tmp_path)


def test_nulls_and_empty_parquet(tmp_path: Path) -> None:
    pq.write_table(pa.table({"text": ["a", None, "c"]}), tmp_path / "x.parquet")
    records = read_all(tmp_path)
    assert texts(records) == ["a", "c"]
    assert records[1] == Problem(
        "key 'text' is missing or empty", f"{tmp_path / 'x.parquet'}: row 2", True
    )
    pq.write_table(pa.table({"text": pa.array([], pa.string())}), tmp_path / "x.parquet")
    assert read_all(tmp_path) == []


def test_nothing_to_read(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="does not exist"):
        find_files(str(tmp_path / "nothing"))
    with pytest.raises(FileNotFoundError, match="contains no files to read"):
        find_files(str(tmp_path))


def test_huge_text_file_asks_for_a_separator(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(documents, "DOCUMENT_LIMIT", 10_000)
    (tmp_path / "x.txt").write_text("a\n" * 6000)
    with pytest.raises(ValueError, match="--text_separator"):
        read_all(tmp_path)
    assert len(texts(read_all(tmp_path, form=TextFormat(text_separator="\n")))) == 6000
    path = write_lines(tmp_path / "y.jsonl", ["a" * 9_000, "b" * 11_000])
    assert [isinstance(record, Problem) for record in read_all(path)] == [False, True]


@pytest.mark.parametrize("chunk", [1 << 20, 3000])
def test_a_piece_between_separators_beyond_the_limit_is_left_out_and_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, chunk: int
) -> None:
    monkeypatch.setattr(documents, "DOCUMENT_LIMIT", 10_000)
    values = [
        "a" * 9_000,
        "b" * 10_001,
        "c",
        "d" * 500_000,
        "SE" * 4_000,
        "e" * 10_000,
        "f" * 40_000,
    ]
    stream = io.BytesIO("SEP".join(values).encode())
    monkeypatch.setattr(stream, "read", lambda size, read=stream.read: read(min(size, chunk)))
    found = [
        None if piece is None else piece.decode()
        for piece in documents._split_text(stream.read(8192), stream, b"SEP")
    ]
    assert found == [value if len(value) <= 10_000 else None for value in values]
    (tmp_path / "x.txt").write_text("SEP".join(values))
    records = read_all(tmp_path / "x.txt", form=TextFormat(text_separator="SEP"))
    assert texts(records) == [value for value in values if len(value) <= 10_000]
    assert [r for r in records if isinstance(r, Problem)] == [
        Problem("longer than 0 MiB", f"{tmp_path / 'x.txt'}: document {number}", True)
        for number in (2, 4, 7)
    ]


def test_a_file_without_the_separator_is_read_in_linear_time_and_bounded_memory(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Every byte is searched once, and no more than the limit is held: counted, not timed."""
    monkeypatch.setattr(documents, "DOCUMENT_LIMIT", 1 << 20)
    chunks, largest = [b"a" * (1 << 16)] * 400, 0

    class Stream:
        def read(self, size: int) -> bytes:
            nonlocal largest
            largest = max(largest, tracemalloc.get_traced_memory()[0])
            return chunks.pop() if chunks else b""

    tracemalloc.start()
    try:
        assert list(documents._split_text(b"", Stream(), b"SEPARATOR")) == []  # type: ignore[arg-type]
        chunks[:] = [b"a" * (1 << 16)] * 400
        assert list(documents._split_text(b"a", Stream(), b"SEPARATOR")) == [None]  # type: ignore[arg-type]
    finally:
        tracemalloc.stop()
    assert largest < 3 << 20


@pytest.mark.parametrize(
    ("name", "body"),
    [
        ("x.json", '[{"text": "a"}, {"text": "b"}]'),
        ("x.json", '\ufeff [\n  {"id": 1, "text": "a"},\n {"text": "b"}\n]\n'),
        ("x.json", '["a", "b"]'),
        ("x.json", '{"text": "a"}\n{"text": "b"}\n'),
        ("x.JSON", '\ufeff{"text": "a"}\n{"text": "b"}'),
        ("x.json.gz", '["a", "b"]'),
        ("x.json.gz", '{"text": "a"}\n{"text": "b"}'),
    ],
)
def test_the_records_of_a_json_file_are_documents(tmp_path: Path, name: str, body: str) -> None:
    data = body.encode()
    (tmp_path / name).write_bytes(gzip.compress(data) if name.endswith("gz") else data)
    assert texts(read_all(tmp_path / name)) == ["a", "b"]


def test_a_record_of_an_array_that_is_no_document_is_named_and_a_large_array_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "x.json").write_text('[{"text": "a"}, {"text": null}, {"text": "b"}, {"text": 3}]')
    records = read_all(tmp_path / "x.json")
    assert texts(records) == ["a", "b"]
    assert [record for record in records if isinstance(record, Problem)] == [
        Problem("key 'text' is missing or empty", f"{tmp_path}/x.json: record 2", True),
        Problem("key 'text' is not a string", f"{tmp_path}/x.json: record 4", True),
    ]
    monkeypatch.setattr(documents, "DOCUMENT_LIMIT", 40)
    with pytest.raises(
        ValueError, match=r"--input=.*x.json is a JSON array above .*JSON lines: jq -c"
    ):
        read_all(tmp_path / "x.json")
    (tmp_path / "y.json").write_text('{"text": "a"}\n' * 10)  # lines are read one by one
    assert texts(read_all(tmp_path / "y.json")) == ["a"] * 10


@pytest.mark.parametrize("make", [pa.ipc.new_stream, pa.ipc.new_file])
def test_the_rows_of_an_arrow_file_are_documents(tmp_path: Path, make: Callable[..., Any]) -> None:
    """A stream is what the package datasets saves, beside two files about it."""
    table = pa.table({"text": ["a", None, "c"], "n": [1, 2, 3]})
    path = tmp_path / "data-00000-of-00001.arrow"
    with pa.OSFile(str(path), "wb") as sink, make(sink, table.schema) as writer:
        writer.write_table(table, max_chunksize=2)
    (tmp_path / "state.json").write_text('{"_fingerprint": "a"}')
    (tmp_path / "dataset_info.json").write_text("{}")
    records = read_all(tmp_path)
    assert texts(records) == ["a", "c"]
    assert (
        Problem("key 'text' is missing or empty", f"{path}: row 2", True) in records
        and len(records) == 3
    )
    with pytest.raises(
        ValueError, match=r"--text_key=body is not a column of .*, which has text, n"
    ):
        read_all(path, form=TextFormat(text_key="body"))
    path.write_bytes(path.read_bytes()[:-9])
    with pytest.raises(ValueError, match=r"--input=.*arrow .*; repair or exclude the file$"):
        read_all(path)


def test_json_files_that_are_no_records_stay_text_and_arrays_are_told(tmp_path: Path) -> None:
    contents = {
        "a": "{}",
        "b": "[1, 2]",
        "c": '["text"]',
        "d": '{"text": "a"}',
        "e": "[" * 100_000,
        "f": "",
        "g": "[]",
    }
    for name, text in contents.items():
        (tmp_path / f"{name}.json").write_text(text)
    (tmp_path / "z.json").write_text('[{"content": "a"}]')
    (tmp_path / "y.json").write_text('{"content": "a"}\n{"content": "b"}\n')
    found = texts(read_all(tmp_path))
    assert len(found) == 9 and found.count("text") == 1 and '[{"content": "a"}]' in found
    by_content = TextFormat(text_key="content")
    assert texts(read_all(tmp_path / "y.json", form=by_content)) == ["a", "b"]
