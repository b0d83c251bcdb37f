"""Documents out of files: text, source code, JSON, Parquet and Arrow.

    [InputFile] ── plan_slices ── [Slice] ── read_part ── Document | Problem …

A slice is a fixed piece of the input, the unit of parallel work: it depends on the files and `slice_bytes`
alone, never on the number of processes. A plain JSON-lines file is cut at line boundaries, Parquet at row
groups; compressed and text files stay whole. Text is verbatim: line ends, tabs and spaces are kept; only a
UTF-8 byte order mark at the start of a file is dropped, as it is not text.
"""

from __future__ import annotations

import io
import json
import os
import re
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import islice, pairwise
from typing import IO, Any, NamedTuple

import pyarrow as pa
import pyarrow.parquet as pq

from fms_fsdp.errors import UserError
from fms_fsdp.tools.prepare.input_files import InputFile
from fms_fsdp.tools.prepare.token_files import open_arrow

DOCUMENT_LIMIT = 64 << 20  # bytes; tokenizers need some 50 times the size of a document
_EXPANSION = {".gz": 4, ".zst": 4, ".parquet": 3}  # rough bytes of text per byte on disk, to balance slices
_KINDS = {
    "jsonl": re.compile(r"\.(jsonl|ndjson)(\.(gz|zst))?$"),
    "json": re.compile(r"\.json(\.(gz|zst))?$"),
    "parquet": re.compile(r"\.parquet$"),
    "arrow": re.compile(r"\.arrow$"),
}
_COMPRESSION = {".gz": "gzip", ".zst": "zstd"}
_BOM = b"\xef\xbb\xbf"


class Document(NamedTuple):
    """One text and its UTF-8 bytes; the first `prompt` characters are a prompt."""

    text: str
    data: bytes
    prompt: int = 0


class Problem(NamedTuple):
    """An input record that is no document; a `malformed` one counts against --max_bad_lines."""

    reason: str
    where: str = ""
    malformed: bool = False


Records = Iterator[Document | Problem]


@dataclass(frozen=True)
class Part:
    """A piece of a file: bytes [start, stop) of JSON lines, row groups of Parquet, or the whole file."""

    path: str
    start: int
    stop: int
    num_bytes: int  # of text, roughly
    limit: int | None = None  # records to read at most


@dataclass(frozen=True)
class Slice:
    """Consecutive parts of one source: what one process reads at a time."""

    index: int
    parts: tuple[Part, ...]

    @property
    def num_bytes(self) -> int:
        return sum(part.num_bytes for part in self.parts)


@dataclass(frozen=True)
class TextFormat:
    """Where the text of a record is (JSON keys, Parquet columns), and what separates texts in a text file.
    With `prompt_key` a text is a prompt and, under `text_key`, the response to it."""

    text_key: str = "text"
    text_separator: str = ""
    prompt_key: str = ""

    @property
    def keys(self) -> list[str]:
        return ([self.prompt_key] if self.prompt_key else []) + self.text_key.split(",")


def file_kind(path: str) -> str:
    """A key of _KINDS, or `text`, from the name alone."""
    return next((kind for kind, names in _KINDS.items() if names.search(path.lower())), "text")


def plan_slices(
    files: Sequence[InputFile], slice_bytes: int, form: TextFormat, limit_docs: int | None = None
) -> list[Slice]:
    """The files cut and grouped into slices of about `slice_bytes` of text each, in their order.

    `limit_docs` keeps the first that many records; they are counted by reading them.
    """
    slices: list[Slice] = []
    parts: list[Part] = []
    weight, left = 0, limit_docs
    for part in (part for file in files for part in _cut(file, slice_bytes)):
        if left is not None:
            part = replace(part, limit=left)
            left -= sum(1 for _ in read_part(part, form))
        if parts and weight + part.num_bytes > slice_bytes:
            slices.append(Slice(len(slices), tuple(parts)))
            parts, weight = [], 0
        parts.append(part)
        weight += part.num_bytes
        if left == 0:
            break
    return [*slices, Slice(len(slices), tuple(parts))]


def _cut(file: InputFile, slice_bytes: int) -> Iterator[Part]:
    size = file.size * _EXPANSION.get(_suffix(file.path), 1)
    pieces = -(-size // slice_bytes) or 1
    kind = file_kind(file.path)
    if kind == "parquet":
        with _reading(file.path), pq.ParquetFile(file.path) as table:
            end = table.metadata.num_row_groups
    elif kind == "jsonl" and size == file.size:
        end = size
    else:
        end, pieces = max(1, size), 1
    edges = sorted({end * i // pieces for i in range(pieces + 1)})
    for start, stop in pairwise(edges):
        yield Part(file.path, start, stop, size * (stop - start) // end)


def read_part(part: Part, form: TextFormat) -> Records:
    """The records of a part in order, at most `part.limit` of them (problems count as records).

    Raises:
        UserError: the file cannot be read at all, or a Parquet or Arrow file has no such column.
    """
    readers = {"jsonl": _read_json_lines, "json": _read_json, "parquet": _read_parquet, "arrow": _read_arrow}
    read = readers.get(file_kind(part.path), _read_text)
    with _reading(part.path):
        yield from islice(read(part, form), part.limit)


@contextmanager
def _reading(path: str) -> Iterator[None]:
    """Names the file where the system or pyarrow cannot read what it holds. Raises: UserError."""
    try:
        yield
    except (OSError, pa.ArrowInvalid, UnicodeDecodeError) as error:
        raise UserError(f"--input ({path}) cannot be read: {error}; repair or exclude the file") from error


def _open_stream(path: str) -> io.BufferedReader:
    """A decompressed byte stream."""
    return io.BufferedReader(pa.input_stream(path, compression=_COMPRESSION.get(_suffix(path))), 1 << 20)


def _suffix(path: str) -> str:
    return os.path.splitext(path)[1].lower()


def _read_json_lines(part: Part, form: TextFormat) -> Records:
    with _open_stream(part.path) as stream:
        is_plain = _suffix(part.path) not in _COMPRESSION
        position = 0
        if part.start:  # a line belongs to the part that holds its first byte
            stream.seek(part.start - 1)
            position = part.start - 1 + len(stream.readline())
        first = position
        for number, line in enumerate(stream, start=1):
            if is_plain and position >= part.stop:
                return
            text = line if position else line.removeprefix(_BOM)
            position += len(line)
            record = _parse_line(text, form) if text.strip() else Problem("blank line")
            if isinstance(record, str):
                record = Problem(record, f"{part.path}:{number + _lines_before(part.path, first)}", True)
            yield record


def _lines_before(path: str, stop: int) -> int:
    """Line ends in bytes [0, stop) of a plain file; only counted to name a bad line."""
    count = 0
    with open(path, "rb") as stream:
        while chunk := stream.read(min(stop, 1 << 20)):
            count += chunk.count(b"\n")
            stop -= len(chunk)
    return count


def _parse_line(line: bytes, form: TextFormat) -> Document | str:
    """The document of a JSON line, or what is wrong with it."""
    try:
        record = json.loads(line)
    except UnicodeDecodeError:
        return "not UTF-8"
    except (ValueError, RecursionError):
        return "not JSON"
    return _document(record, form) if isinstance(record, dict) else "not a JSON object"


def _document(record: dict[str, Any] | str, form: TextFormat) -> Document | str:
    """The document of a record, or what is wrong with it; a string is a text itself."""
    values: list[Any] = [record] if isinstance(record, str) else list(map(record.get, form.keys))
    for key, value in zip(form.keys, values, strict=False):
        if not isinstance(value, str):
            return f"key '{key}' is missing or empty" if value is None else f"key '{key}' is not a string"
    prompt = values.pop(0) if form.prompt_key and len(values) > 1 else ""
    text = prompt + "\n".join(values)
    if form.prompt_key and len(text) == len(prompt):
        return f"key '{form.text_key}' is empty"
    try:
        data = text.encode()
    except UnicodeEncodeError:
        return "lone surrogate"
    if len(data) > DOCUMENT_LIMIT:
        return f"longer than {DOCUMENT_LIMIT >> 20} MiB"
    return Document(text, data, len(prompt))


def _read_parquet(part: Part, form: TextFormat) -> Records:
    with pq.ParquetFile(part.path) as table:
        _check_columns(part.path, table.schema_arrow.names, form)
        first = sum(table.metadata.row_group(group).num_rows for group in range(part.start))
        groups = list(range(part.start, part.stop))
        batches = table.iter_batches(batch_size=256, row_groups=groups, columns=form.keys)
        yield from _numbered(f"{part.path}: row", _rows(batches, form), form, first)


def _read_arrow(part: Part, form: TextFormat) -> Records:
    """The rows of an Arrow file or stream, as the package datasets saves them."""
    with open_arrow(part.path) as (schema, batches):
        _check_columns(part.path, schema.names, form)
        yield from _numbered(f"{part.path}: row", _rows(batches, form), form)


def _check_columns(path: str, columns: Sequence[str], form: TextFormat) -> None:
    if missing := [key for key in form.keys if key not in columns]:
        has_tokens = "tokens" in columns or "input_ids" in columns
        remedy = "for token ids use `python -m fms_fsdp convert`" if has_tokens else "choose with --text_key"
        rule = f"is not a column of {path}, which has {', '.join(columns)}"
        raise UserError(f"--text_key ({missing[0]}) {rule}; {remedy}")


def _rows(batches: Iterable[pa.RecordBatch], form: TextFormat) -> Iterator[dict[str, Any]]:
    for batch in batches:
        yield from batch.select(form.keys).to_pylist()


def _numbered(
    what: str, records: Iterable[dict[str, Any] | str], form: TextFormat, before: int = 0
) -> Records:
    """The documents of the records, and what is wrong with the others, with the number of each."""
    for number, record in enumerate(records, start=before + 1):
        found = _document(record, form)
        yield Problem(found, f"{what} {number}", True) if isinstance(found, str) else found


def _read_json(part: Part, form: TextFormat) -> Records:
    """The records of an array or of JSON lines; a file that holds neither is one text."""
    is_compressed = _suffix(part.path) in _COMPRESSION
    with _open_stream(part.path) as stream:
        is_array = stream.peek(1).removeprefix(_BOM).lstrip()[:1] == b"["
        body = stream.read(DOCUMENT_LIMIT + 1) if is_array else stream.readline(DOCUMENT_LIMIT)
        has_more = bool(stream.readline(DOCUMENT_LIMIT).strip())
    if is_array and len(body) > DOCUMENT_LIMIT:
        rule = f"is a JSON array above {DOCUMENT_LIMIT >> 20} MiB"
        remedy = "write the records as JSON lines: jq -c '.[]' FILE >NAME.jsonl"
        raise UserError(f"--input ({part.path}) {rule}; {remedy}")
    records = _json_records(body) if is_array else []
    if _hold_text(records, form):
        yield from _numbered(f"{part.path}: record", records, form)
    elif is_compressed or (has_more and isinstance(_parse_line(body.removeprefix(_BOM), form), Document)):
        yield from _read_json_lines(part, form)
    else:
        yield from _read_text(part, form)


def _read_text(part: Part, form: TextFormat) -> Records:
    """One document per file, or what lies between the separators."""
    with _open_stream(part.path) as stream:
        head = stream.read(8192)
        if b"\0" in head:
            yield Problem("binary file", part.path)
            return
        if form.text_separator:
            pieces: Iterator[bytes | None] = _pieces(head, stream, form.text_separator.encode())
        else:
            body = head + stream.read(DOCUMENT_LIMIT)
            if len(body) > DOCUMENT_LIMIT:
                rule = f"is one document above {DOCUMENT_LIMIT >> 20} MiB"
                remedy = "cut the file with --text_separator, or write JSON lines"
                raise UserError(f"--input ({part.path}) {rule}; {remedy}")
            pieces = iter([body])
        for number, data in enumerate(pieces, start=1):
            if data is None:
                where = f"{part.path}: document {number}"
                yield Problem(f"longer than {DOCUMENT_LIMIT >> 20} MiB", where, malformed=True)
                continue
            if number == 1:
                data = data.removeprefix(_BOM)
            try:
                yield Document(data.decode(), data)
            except UnicodeDecodeError:
                where = f"{part.path}: document {number}" if form.text_separator else part.path
                yield Problem("not UTF-8", where)


def _pieces(head: bytes, stream: IO[bytes], separator: bytes) -> Iterator[bytes | None]:
    """What lies between the separators, None where it is too long; empty pieces are dropped."""
    rest, too_long, chunk = bytearray(), False, head
    while chunk:
        searched = max(0, len(rest) - len(separator) + 1)  # no separator begins before
        rest += chunk
        first, *more = rest[searched:].split(separator)
        if more:
            for piece in (rest[:searched] + first, *more[:-1]):
                if too_long or len(piece) > DOCUMENT_LIMIT:
                    yield None
                elif piece:
                    yield bytes(piece)
                too_long = False
            rest = more[-1]
        if len(rest) > DOCUMENT_LIMIT:
            too_long = True
            del rest[: len(rest) - len(separator) + 1]
        chunk = stream.read(1 << 20)
    if too_long:
        yield None
    elif rest:
        yield bytes(rest)


def _json_records(body: bytes) -> list[Any]:
    """The records of a JSON array, or of at least two JSON lines; none where the body is another text."""
    body = body.removeprefix(_BOM).strip()
    is_array = body.startswith(b"[")
    try:
        records = json.loads(body) if is_array else [json.loads(line) for line in body.splitlines()]
    except (ValueError, RecursionError):
        return []
    is_alike = {type(record) for record in records} in ({dict}, {str})
    return records if is_alike and len(records) >= (1 if is_array else 2) else []


def _hold_text(records: Sequence[Any], form: TextFormat) -> bool:
    return any(isinstance(_document(record, form), Document) for record in records)


def json_without_text(files: Sequence[InputFile], form: TextFormat) -> list[str]:
    """The .json files whose records, in an array or one a line, hold no text: each becomes one document."""
    found = []
    for file in files:
        if file.path.lower().endswith(".json") and file.size <= DOCUMENT_LIMIT:
            with open(file.path, "rb") as stream:
                records = _json_records(stream.read())
            if records and not _hold_text(records, form):
                found.append(file.path)
    return found
