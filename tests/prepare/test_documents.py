"""Documents out of files: every document once whatever the cuts, and every oddity named."""

from __future__ import annotations

import gzip
import io
import json
import random
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from fms_fsdp.errors import UserError
from fms_fsdp.prepare import documents
from fms_fsdp.prepare.convert import read_token_file
from fms_fsdp.prepare.documents import Document, Problem, TextFormat, read_part
from fms_fsdp.prepare.input_files import find_files, plan_slices

FORM = TextFormat()


def read_all(
    path: Path, slice_bytes: int = 1 << 20, form: TextFormat = FORM, limit: int | None = None
) -> list[Document | Problem]:
    slices = plan_slices(find_files(str(path)), slice_bytes, form, limit)
    return [record for entry in slices for part in entry.parts for record in read_part(part, form)]


def texts(records: list[Document | Problem]) -> list[str]:
    return [record.text for record in records if isinstance(record, Document)]


def problems(records: list[Document | Problem]) -> list[Problem]:
    return [record for record in records if isinstance(record, Problem)]


def write_lines(path: Path, values: list[str], end: bytes = b"\n") -> Path:
    lines = [json.dumps({"text": value}, ensure_ascii=False).encode() for value in values]
    path.write_bytes(end.join(lines))
    return path


@pytest.mark.parametrize("end", [b"\n", b"\r\n", b"\n\n"])
def test_slices_lose_and_repeat_no_line(tmp_path: Path, end: bytes) -> None:
    rng = random.Random(0)
    values = ["".join(rng.choices("aé漢😀\n\t\u2028 ", k=rng.randrange(30))) for _ in range(40)]
    path = write_lines(tmp_path / "x.jsonl", values, end)
    for slice_bytes in (1, 2, 3, 7, 19, 37, 97, 500, 10**6):
        assert texts(read_all(path, slice_bytes)) == values
    path.write_bytes(path.read_bytes() + b"\n")  # with a line end at the end of the file
    assert texts(read_all(path, 50)) == values


def test_bad_lines_are_named_in_any_slice(tmp_path: Path) -> None:
    bad = {
        4: (b'{"text": "cut off', "not JSON"),
        21: (b'{"other": 1}', "key 'text' is missing or empty"),
        31: (b"[1]", "not a JSON object"),
        32: (b'{"text": 5}', "key 'text' is not a string"),
        33: (b'{"text": "\\ud800"}', "lone surrogate"),
        42: (b'{"text": "\xff"}', "not UTF-8"),
    }
    path = tmp_path / "x.jsonl"
    lines = [bad.get(number, (b'{"text": "a"}', ""))[0] for number in range(1, 51)]
    path.write_bytes(b"\n".join(lines))
    expected = [Problem(reason, f"{path}:{number}", True) for number, (_, reason) in bad.items()]
    for slice_bytes in (30, 100, 10**6):
        assert problems(read_all(path, slice_bytes)) == expected


def test_containers_hold_the_same_documents(tmp_path: Path) -> None:
    values = [f"document {i}\n\tindented é" for i in range(300)]
    lines = write_lines(tmp_path / "a.jsonl", values).read_bytes()
    members = gzip.compress(lines[:4000]) + gzip.compress(lines[4000:])
    (tmp_path / "b.json.gz").write_bytes(members)
    (tmp_path / "c.jsonl.zst").write_bytes(pa.compress(lines, "zstd", asbytes=True))
    (tmp_path / "d.jsonl").write_bytes(b"\xef\xbb\xbf" + lines)
    columns = {"id": list(range(300)), "text": values}
    pq.write_table(pa.table(columns), tmp_path / "e.parquet", row_group_size=17)
    column = pa.array(values, pa.large_string()).dictionary_encode()
    pq.write_table(pa.table({"text": column}), tmp_path / "f.parquet", row_group_size=50)
    for path in sorted(tmp_path.iterdir()):
        for slice_bytes in (500, 1 << 20):
            assert texts(read_all(path, slice_bytes)) == values, path
    path = tmp_path / "g.txt"
    path.write_text("<|end|>".join(values) + "<|end|>")
    assert texts(read_all(path, form=TextFormat(text_separator="<|end|>"))) == values


def test_separator_may_cross_chunks(tmp_path: Path) -> None:
    path, form = tmp_path / "x.txt", TextFormat(text_separator="SEP")
    path.write_text("a" * 8191 + "SEPb" + "SEP" * 3 + "c" * 5000 + "\nSEP")
    assert texts(read_all(path, form=form)) == ["a" * 8191, "b", "c" * 5000 + "\n"]


def test_folder_gives_its_text_files_verbatim(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    root = tmp_path / "src"
    code = "def f():\r\n\tif x:\n        return 1  \n\n"
    files = {"pkg/b.py": code.encode(), "pkg/sub/a.py": b"\xef\xbb\xbfx", "empty.md": b""}
    files |= {"pkg/latin.txt": "é".encode("latin-1"), "pkg/pic.bin": b"\x89PNG\0\0"}
    hidden = (".git/x.py", "__pycache__/x.py", ".x.py", "pkg/.hidden/x.py")
    for name, data in (files | dict.fromkeys(hidden, b"hidden")).items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_bytes(data)
    (root / "pkg/sub/loop").symlink_to(root)
    (tmp_path / "outside.py").write_text("linked")
    (root / "linked.py").symlink_to(tmp_path / "outside.py")
    (root / "dangling.py").symlink_to(tmp_path / "nothing")
    records = read_all(root)
    assert texts(records) == ["", "linked", code, "x"]  # in byte order of the names
    skipped = "skipped 1 link to files that do not exist: dangling.py"
    assert skipped in capsys.readouterr().err
    assert sorted(problem.reason for problem in problems(records)) == ["binary file", "not UTF-8"]
    assert not any(problem.malformed for problem in problems(records))
    names = [file.name for file in find_files(str(root), include=["*.py"], exclude=["pkg/*"])]
    assert names == ["linked.py"]
    names = [file.name for file in find_files(f"{root}/**/*.py")]
    assert skipped in capsys.readouterr().err
    assert names == ["linked.py", "pkg/b.py", "pkg/sub/a.py"]


def test_limit_reads_the_first_records(tmp_path: Path) -> None:
    for i in range(4):
        write_lines(tmp_path / f"{i}.jsonl", [f"{i}-{j}" for j in range(10)])
    everything = texts(read_all(tmp_path))
    for limit in (1, 10, 11, 25, 99):
        for slice_bytes in (20, 10**6):
            assert texts(read_all(tmp_path, slice_bytes, limit=limit)) == everything[:limit]
            slices = plan_slices(find_files(str(tmp_path)), slice_bytes, FORM, limit)
            assert sum(part.num_bytes for part in slices) == 3 * min(limit, 40)


def test_several_keys_are_joined(tmp_path: Path) -> None:
    path = tmp_path / "x.jsonl"
    path.write_text('{"title": "T", "body": "B"}\n')
    assert texts(read_all(path, form=TextFormat("title,body"))) == ["T\nB"]


def test_wrong_parquet_is_rejected(tmp_path: Path) -> None:
    path = tmp_path / "x.parquet"
    path.write_bytes(b"plain")
    with pytest.raises(ValueError, match="x.parquet cannot be read: .*Parquet.*; repair or"):
        read_all(tmp_path)
    pq.write_table(pa.table({"content": ["a"]}), path)
    match = r"--text_key=text is not a column of .*content; set --text_key"
    with pytest.raises(ValueError, match=match):
        read_all(tmp_path)
    pq.write_table(pa.table({"tokens": [[1, 2]]}), path)
    with pytest.raises(ValueError, match="python -m fms_fsdp convert"):
        read_all(tmp_path)


@pytest.mark.parametrize("kind", ["parquet", "arrow"])
def test_two_columns_of_one_name_are_rejected(tmp_path: Path, kind: str) -> None:
    texts_and_ids = [pa.array(["a"]), pa.array(["b"]), pa.array([[1]]), pa.array([[2]])]
    table = pa.table(texts_and_ids, names=["text", "text", "tokens", "tokens"])
    path = tmp_path / f"x.{kind}"
    if kind == "parquet":
        pq.write_table(table, path)
    else:
        with pa.ipc.new_file(str(path), table.schema) as writer:
            writer.write_table(table)
    with pytest.raises(UserError, match=f"--text_key=text must be one column, but .*{kind} has 2"):
        read_all(path)
    with pytest.raises(UserError, match="has 2 columns tokens; write it with one"):
        list(read_token_file(str(path), ""))


def test_null_of_parquet_is_a_problem(tmp_path: Path) -> None:
    path = tmp_path / "x.parquet"
    pq.write_table(pa.table({"text": ["a", None, "c"]}), path)
    records = read_all(tmp_path)
    assert texts(records) == ["a", "c"]
    assert records[1] == Problem("key 'text' is missing or empty", f"{path}: row 2", True)
    pq.write_table(pa.table({"text": pa.array([], pa.string())}), path)
    assert read_all(tmp_path) == []


def test_path_without_files_is_rejected(tmp_path: Path) -> None:
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
def test_too_long_document_is_skipped_and_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, chunk: int
) -> None:
    monkeypatch.setattr(documents, "DOCUMENT_LIMIT", 10_000)
    lengths = {"a": 9_000, "b": 10_001, "c": 1, "d": 500_000, "SE": 4_000, "e": 10_000, "f": 40_000}
    values = [text * number for text, number in lengths.items()]
    expected = [value if len(value) <= 10_000 else None for value in values]
    stream = io.BytesIO("SEP".join(values).encode())
    monkeypatch.setattr(stream, "read", lambda size, read=stream.read: read(min(size, chunk)))
    found = documents._split_text(stream.read(8192), stream, b"SEP")
    assert [piece and piece.decode() for piece in found] == expected
    path = tmp_path / "x.txt"
    path.write_text("SEP".join(values))
    records = read_all(path, form=TextFormat(text_separator="SEP"))
    assert texts(records) == [value for value in expected if value]
    reason = "longer than 0 MiB"
    named = [Problem(reason, f"{path}: document {number}", True) for number in (2, 4, 7)]
    assert problems(records) == named


def test_file_without_separator_is_read_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Chunks are dropped above the limit: memory is bounded, and no byte is searched twice."""
    monkeypatch.setattr(documents, "DOCUMENT_LIMIT", 1 << 20)
    chunks, largest = [b"a" * (1 << 16)] * 400, 0

    class Stream:
        def read(self, size: int) -> bytes:
            nonlocal largest
            largest = max(largest, tracemalloc.get_traced_memory()[0])
            return chunks.pop() if chunks else b""

    tracemalloc.start()
    try:
        assert list(documents._split_text(b"a", Stream(), b"SEPARATOR")) == [None]  # type: ignore[arg-type]
    finally:
        tracemalloc.stop()
    assert largest < 3 << 20


@pytest.mark.parametrize(
    ("name", "body"),
    [
        ("x.json", '[{"text": "a"}, {"text": "b"}]'),
        ("x.json", '\ufeff [\n  {"id": 1, "text": "a"},\n {"text": "b"}\n]\n'),
        ("x.json", '{"text": "a"}\n{"text": "b"}\n'),
        ("x.JSON", '\ufeff{"text": "a"}\n{"text": "b"}'),
        ("x.json.gz", '["a", "b"]'),
        ("x.json.gz", '{"text": "a"}\n{"text": "b"}'),
    ],
)
def test_records_of_json_file_are_documents(tmp_path: Path, name: str, body: str) -> None:
    data = body.encode()
    (tmp_path / name).write_bytes(gzip.compress(data) if name.endswith("gz") else data)
    assert texts(read_all(tmp_path / name)) == ["a", "b"]


def test_bad_record_or_large_json_array_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "x.json"
    path.write_text('[{"text": "a"}, {"text": null}, {"text": "b"}, {"text": 3}]')
    records = read_all(path)
    assert texts(records) == ["a", "b"]
    assert problems(records) == [
        Problem("key 'text' is missing or empty", f"{path}: record 2", True),
        Problem("key 'text' is not a string", f"{path}: record 4", True),
    ]
    monkeypatch.setattr(documents, "DOCUMENT_LIMIT", 40)
    with pytest.raises(ValueError, match=r"--input=.*x.json is a JSON array above .*: jq -c"):
        read_all(path)
    path.write_text('{"text": "a"}\n' * 10)  # lines are read one by one
    assert texts(read_all(path)) == ["a"] * 10


@pytest.mark.parametrize("make", [pa.ipc.new_stream, pa.ipc.new_file])
def test_rows_of_arrow_file_are_documents(tmp_path: Path, make: Callable[..., Any]) -> None:
    """The package datasets saves a stream, and two JSON files with it."""
    table = pa.table({"text": ["a", None, "c"], "n": [1, 2, 3]})
    path = tmp_path / "data-00000-of-00001.arrow"
    with pa.OSFile(str(path), "wb") as sink, make(sink, table.schema) as writer:
        writer.write_table(table, max_chunksize=2)
    (tmp_path / "state.json").write_text('{"_fingerprint": "a"}')
    (tmp_path / "dataset_info.json").write_text("{}")
    records = read_all(tmp_path)
    assert texts(records) == ["a", "c"]
    assert problems(records) == [Problem("key 'text' is missing or empty", f"{path}: row 2", True)]
    with pytest.raises(ValueError, match=r"--text_key=body is not a column .*, which has text, n"):
        read_all(path, form=TextFormat(text_key="body"))
    path.write_bytes(path.read_bytes()[:-9])
    with pytest.raises(ValueError, match=r"--input=.*arrow .*; repair or exclude the file$"):
        read_all(path)


@pytest.mark.parametrize("encoding", ["utf-16", "utf-16-le", "utf-16-be", "utf-32"])
def test_other_encodings_are_named(tmp_path: Path, encoding: str) -> None:
    for name, body in (("x.jsonl", '{"text": "да."}\n' * 9), ("x.json", '[{"text": "да."}]')):
        (tmp_path / name).write_text(body, encoding=encoding)
        for slice_bytes in (20, 1 << 20):
            with pytest.raises(ValueError, match=rf"{name} must be UTF-8.*iconv -f UTF-16"):
                read_all(tmp_path / name, slice_bytes)


def test_text_in_utf16_is_skipped_and_named(tmp_path: Path) -> None:
    (tmp_path / "x.txt").write_text("да", encoding="utf-16")
    (problem,) = problems(read_all(tmp_path))
    assert "iconv -f UTF-16" in problem.reason and not problem.malformed


def test_lines_are_decoded_as_utf8_alone(tmp_path: Path) -> None:
    path = tmp_path / "x.jsonl"
    line = '{"text": "да."}'
    other = [line.encode("utf-16-le"), line.encode("utf-16-be")]
    path.write_bytes(b"\n".join([line.encode(), *other, b"\xef\xbb\xbf" + line.encode()]))
    records = read_all(path)
    assert texts(records) == ["да.", "да."]  # files with a mark may have been joined
    assert [problem.reason for problem in problems(records)] == ["not JSON", "not JSON"]


def test_first_character_tells_array_from_lines(tmp_path: Path) -> None:
    path = tmp_path / "x.json"
    missing = "key 'text' is missing or empty"
    cases: dict[str, tuple[list[str], list[tuple[str, str]]]] = {
        '["text"]': (["text"], []),
        '{"text": "a"}': (["a"], []),
        "[]": ([], []),
        "[1, 2]": ([], [(": record 1", "not a JSON object"), (": record 2", "not a JSON object")]),
        '{\n"text": "a"\n}': ([], [(f":{n}", "not JSON") for n in (1, 2, 3)]),
        "[" * 100_000: ([], [("", "not JSON")]),
        '[{"content": "a"}]': ([], [(": record 1", missing)]),
        '{"content": "a"}\n{"text": "b"}\n': (["b"], [(":1", missing)]),
    }
    for body, (found, bad) in cases.items():
        path.write_text(body)
        records = read_all(path)
        assert texts(records) == found, body[:20]
        named = [Problem(reason, f"{path}{where}", True) for where, reason in bad]
        assert problems(records) == named, body[:20]
