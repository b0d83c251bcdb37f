"""Documents out of files: text, source code, JSON lines and Parquet.

    file | folder | glob ── find_files ── [InputFile] ── plan_slices ── [Slice] ── read_part ── Document | Problem …

A slice is a fixed piece of the input, the unit of parallel work: it depends on the files and `slice_bytes` alone, never on the number of
processes. A plain JSON-lines file is cut at line boundaries, Parquet at row groups; compressed and text files stay whole. Text is verbatim:
line ends, tabs and spaces are kept; only a UTF-8 byte order mark at the start of a file is dropped, as it is not text.
"""

from __future__ import annotations

import fnmatch
import glob
import gzip
import io
import json
import os
import re
import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import IO, Any, NamedTuple

DOCUMENT_LIMIT = 64 << 20  # bytes; tokenizers need some 50 times the size of a document
_EXPANSION = {".gz": 4, ".zst": 4, ".parquet": 3}  # rough bytes of text per byte on disk, to balance slices
_JSON_LINES = (".jsonl", ".ndjson", ".jsonl.gz", ".jsonl.zst", ".json.gz", ".json.zst", ".ndjson.gz", ".ndjson.zst")
_BOM = b"\xef\xbb\xbf"


class Document(NamedTuple):
    """One text and its UTF-8 bytes."""

    text: str
    data: bytes


class Problem(NamedTuple):
    """An input record that is no document. `malformed` ones count against --max_bad_lines, others are only reported."""

    reason: str
    where: str
    malformed: bool


@dataclass(frozen=True)
class InputFile:
    """A file to read; `name` is relative to the folder it was found in."""

    path: str
    name: str
    size: int
    mtime_ns: int
    kind: str  # jsonl | parquet | text


@dataclass(frozen=True)
class Part:
    """A piece of a file: bytes [start, stop) of plain JSON lines, row groups [start, stop) of Parquet, else all of it."""

    path: str
    kind: str
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
    """Where the text is inside a record: the JSON keys or Parquet columns, and what separates documents of a text file."""

    text_key: str = "text"
    text_separator: str = ""

    @property
    def keys(self) -> list[str]:
        return self.text_key.split(",")


def file_kind(path: str) -> str:
    """`jsonl`, `parquet` or `text`, from the name alone."""
    lower = path.lower()
    return "jsonl" if lower.endswith(_JSON_LINES) else "parquet" if lower.endswith(".parquet") else "text"


def find_files(path: str, include: Sequence[str] = (), exclude: Sequence[str] = ()) -> list[InputFile]:
    """The files that `path` (file, folder or glob with `**`) names, in byte order of their relative names.

    Hidden files and folders and `__pycache__` are passed over, links are followed. The patterns match relative names, `*` crosses `/`.

    Raises:
        FileNotFoundError: nothing is there, or nothing is left of it.
    """
    path = os.path.expanduser(path)
    if os.path.isfile(path):
        root, names = os.path.split(path)[0], [os.path.basename(path)]
    elif os.path.isdir(path):
        root, names = path, _walk(path)
    else:
        root = os.path.dirname(re.split(r"[*?[]", path)[0])
        if not glob.has_magic(path) or not os.path.isdir(root or "."):
            raise FileNotFoundError(f"--input ({path}) does not exist; give a file, a folder or a quoted glob")
        whole = re.compile(
            _glob_pattern(path[len(root) :].lstrip("/")) + "(?:/.*)?"
        )  # a matched folder gives its files
        names = [name for name in _walk(root or ".") if whole.fullmatch(name)]
    if include:
        names = [name for name in names if any(fnmatch.fnmatchcase(name, pattern) for pattern in include)]
    names = [name for name in names if not any(fnmatch.fnmatchcase(name, pattern) for pattern in exclude)]
    if not names:
        raise FileNotFoundError(f"--input ({path}) holds no files to read; check the folder, --include and --exclude")
    files = []
    for name in sorted(set(names), key=os.fsencode):
        full = os.path.join(root, name)
        stat = os.stat(full)
        files.append(InputFile(full, name, stat.st_size, stat.st_mtime_ns, file_kind(name)))
    return files


def _glob_pattern(text: str) -> str:
    """The regular expression of a glob: `*` and `?` stay within a folder, `**/` crosses any number of them."""
    pieces = {"**/": "(?:.*/)?", "**": ".*", "*": "[^/]*", "?": "[^/]"}
    found = re.findall(r"\*\*/|\*\*|[*?]|\[[^]]+\]|.", text, re.DOTALL)
    return "".join(pieces.get(piece) or (piece if len(piece) > 1 else re.escape(piece)) for piece in found)


def _walk(root: str) -> list[str]:
    names, seen = [], {os.path.realpath(root)}
    for folder, subfolders, files in os.walk(root, followlinks=True):
        kept = []
        for sub in subfolders:
            real = os.path.realpath(os.path.join(folder, sub))
            if not sub.startswith(".") and sub != "__pycache__" and real not in seen:
                seen.add(real)
                kept.append(sub)
        subfolders[:] = sorted(kept)
        full = [os.path.join(folder, name) for name in files if not name.startswith(".")]
        names += [os.path.relpath(name, root) for name in full if os.path.isfile(name)]
    return names


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
    size = file.size * _EXPANSION.get(os.path.splitext(file.path)[1].lower(), 1)
    pieces = -(-size // slice_bytes) or 1
    if file.kind == "parquet":
        with _opened_parquet(file.path) as table:
            end = table.metadata.num_row_groups
    elif file.kind == "jsonl" and size == file.size:
        end = size
    else:
        end, pieces = max(1, size), 1
    edges = sorted({end * i // pieces for i in range(pieces + 1)})
    for start, stop in zip(edges, edges[1:], strict=False):
        yield Part(file.path, file.kind, start, stop, size * (stop - start) // end)


def read_part(part: Part, form: TextFormat) -> Iterator[Document | Problem]:
    """The records of a part in order, at most `part.limit` of them (problems count as records).

    Raises:
        ValueError: the file cannot be read at all, or a Parquet file has no such column.
    """
    readers = {"jsonl": _read_json_lines, "parquet": _read_parquet, "text": _read_text}
    try:
        for count, record in enumerate(readers[part.kind](part, form), start=1):
            yield record
            if count == part.limit:
                return
    except (OSError, EOFError, zlib.error) as error:
        raise ValueError(f"--input ({part.path}) cannot be read: {error}; repair or exclude the file") from error


@contextmanager
def _opened(path: str) -> Iterator[IO[bytes]]:
    """A buffered, decompressed byte stream."""
    lower = path.lower()
    if lower.endswith(".gz"):
        with gzip.open(path, "rb") as stream:
            yield stream  # type: ignore[misc]
    elif lower.endswith(".zst"):
        import pyarrow as pa

        with pa.OSFile(path) as raw, pa.CompressedInputStream(raw, "zstd") as unpacked:
            yield io.BufferedReader(unpacked, 1 << 20)
    else:
        with open(path, "rb", buffering=1 << 20) as plain:
            yield plain


def _read_json_lines(part: Part, form: TextFormat) -> Iterator[Document | Problem]:
    with _opened(part.path) as stream:
        seekable = not part.path.lower().endswith((".gz", ".zst"))
        position = 0
        if part.start:  # a line belongs to the part that holds its first byte
            stream.seek(part.start - 1)
            position = part.start - 1 + len(stream.readline())
        first = position
        for number, line in enumerate(stream, start=1):
            if seekable and position >= part.stop:
                return
            length = len(line)
            if position == 0:
                line = line.removeprefix(_BOM)
            position += length
            if not line.strip():
                yield Problem("blank line", "", False)
                continue
            record = _parse_line(line, form)
            if isinstance(record, str):
                yield Problem(record, f"{part.path}:{number + _lines_before(part.path, first)}", True)
            else:
                yield record


def _lines_before(path: str, stop: int) -> int:
    """Line ends in bytes [0, stop) of a plain file; only counted to name a bad line."""
    count = 0
    if stop:
        with open(path, "rb") as stream:
            while stop > 0 and (chunk := stream.read(min(stop, 1 << 20))):
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
    if not isinstance(record, dict):
        return "not a JSON object"
    return _document([record.get(key) for key in form.keys], form.keys)


def _document(values: Sequence[Any], keys: Sequence[str]) -> Document | str:
    for key, value in zip(keys, values, strict=True):
        if not isinstance(value, str):
            return f"key '{key}' is missing or empty" if value is None else f"key '{key}' is not a string"
    text = "\n".join(values)
    try:
        data = text.encode()
    except UnicodeEncodeError:
        return "lone surrogate"
    return Document(text, data) if len(data) <= DOCUMENT_LIMIT else f"longer than {DOCUMENT_LIMIT >> 20} MiB"


@contextmanager
def _opened_parquet(path: str) -> Iterator[Any]:
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        table = pq.ParquetFile(path)
    except (pa.ArrowInvalid, OSError) as error:
        raise ValueError(f"--input ({path}) is not a readable Parquet file: {error}; repair or exclude it") from error
    with table:
        yield table


def _read_parquet(part: Part, form: TextFormat) -> Iterator[Document | Problem]:
    with _opened_parquet(part.path) as table:
        columns = table.schema_arrow.names
        for key in form.keys:
            if key not in columns:
                shown = ", ".join(columns)
                tokens = {"tokens", "input_ids"} & set(columns)
                remedy = "for token ids use `python -m fms_fsdp convert`" if tokens else "choose with --text_key"
                raise ValueError(f"--text_key ({key}) is not a column of {part.path}, which has {shown}; {remedy}")
        meta = table.metadata
        row = sum(meta.row_group(group).num_rows for group in range(part.start))
        groups = list(range(part.start, part.stop))
        for batch in table.iter_batches(batch_size=256, row_groups=groups, columns=form.keys):
            values = [batch.column(key).to_pylist() for key in form.keys]
            for record in zip(*values, strict=True):
                row += 1
                document = _document(record, form.keys)
                if isinstance(document, str):
                    yield Problem(document, f"{part.path}: row {row}", True)
                else:
                    yield document


def _read_text(part: Part, form: TextFormat) -> Iterator[Document | Problem]:
    """One document per file, or what lies between the separators."""
    with _opened(part.path) as stream:
        head = stream.read(8192)
        if b"\0" in head:
            yield Problem("binary file", part.path, False)
            return
        if form.text_separator:
            pieces = _pieces(head, stream, form.text_separator.encode())
        else:
            body = head + stream.read(DOCUMENT_LIMIT)
            if len(body) > DOCUMENT_LIMIT:
                raise ValueError(
                    f"--input ({part.path}) is one document above {DOCUMENT_LIMIT >> 20} MiB; "
                    "cut it with --text_separator or convert it to JSON lines"
                )
            pieces = iter([body])
        for number, data in enumerate(pieces, start=1):
            if number == 1 and data.startswith(_BOM):
                data = data[len(_BOM) :]
            try:
                yield Document(data.decode(), data)
            except UnicodeDecodeError:
                where = f"{part.path}: document {number}" if form.text_separator else part.path
                yield Problem("not UTF-8", where, False)


def _pieces(head: bytes, stream: IO[bytes], separator: bytes) -> Iterator[bytes]:
    """What lies between the separators; separators and empty pieces are dropped."""
    rest = head
    while True:
        *whole, rest = rest.split(separator)
        yield from (piece for piece in whole if piece)
        chunk = stream.read(1 << 20)
        if not chunk:
            break
        rest += chunk
    if rest:
        yield rest
