"""The formats of `prepare`'s input, and the documents in a file.

    Part ── read_part ──> Document | Problem

Text is verbatim, without a UTF-8 byte order mark at the start of a file. A record that cannot be
read is a `Problem` with its file and line, which the caller counts.
"""

from __future__ import annotations

import io
import json
import lzma
import os
import re
import zlib
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import islice
from typing import IO, Any, NamedTuple

import pyarrow as pa
import pyarrow.parquet as pq

from fms_fsdp.errors import UserError
from fms_fsdp.files import map_or_read
from fms_fsdp.packages import is_installed

DOCUMENT_LIMIT = 64 << 20  # bytes; tokenizers need about 50 times the size of a document
FORMATS = {
    ".jsonl": "jsonl",
    ".ndjson": "jsonl",
    ".json": "json",
    ".parquet": "parquet",
    ".arrow": "arrow",
}
COMPRESSED = (".gz", ".zst", ".xz", ".bz2")
_TEXT_ENDING = ".txt"
_ENDING = r"\.(gz|zst|xz|bz2)$"  # of a compressed file
_TABLES = (".csv", ".tsv")
_UNSUPPORTED = re.compile(
    r"\.(zip|tar|tgz|tbz2?|txz|tzst|7z|rar|lz|lz4|lzma|lzo|br|z|sz|snappy|gzip|bz|bzip2|zstd)$"
    r"|\.tar\.(gz|zst|xz|bz2)$|\.(parquet|arrow)\.(gz|zst|xz|bz2)$"
)
_BOM = b"\xef\xbb\xbf"
_UTF16_BOMS = (b"\xff\xfe", b"\xfe\xff")  # UTF-32 in little endian begins with the first, too
_UTF32_BOM = b"\0\0\xfe\xff"
_ICONV = "iconv -f UTF-16 -t UTF-8"
_READ_BYTES = 1 << 13  # of a compressed file, per step
_MAX_OUTPUT_BYTES = 1 << 20  # of a decompressor, per step


class Document(NamedTuple):
    """A text and its UTF-8 bytes; the first `prompt` characters are a prompt."""

    text: str
    data: bytes
    prompt: int = 0


class Problem(NamedTuple):
    """A record that is not used; `malformed` ones count against --max_bad_lines."""

    reason: str
    where: str = ""
    malformed: bool = False


Records = Iterator[Document | Problem]


@dataclass(frozen=True)
class Part:
    """Part of a file: bytes [start, stop) of JSON lines, row groups of Parquet, or the full file."""

    path: str
    start: int
    stop: int
    num_bytes: int  # of text, roughly
    limit: int | None = None  # records to read at most


@dataclass(frozen=True)
class TextFormat:
    """JSON keys or columns of the text (`a.b` is a field of a struct), and the separator in text files."""

    text_key: str = "text"
    text_separator: str = ""
    prompt_key: str = ""

    @property
    def keys(self) -> list[str]:
        keys = self.text_key.split(",")
        if self.prompt_key:
            keys.insert(0, self.prompt_key)
        return keys


def suffix_of(path: str) -> str:
    return os.path.splitext(path)[1].lower()


def file_format(path: str) -> str:
    """Returns a value of FORMATS, or `text`, from the name of the file."""
    suffix = suffix_of(path)
    if suffix not in COMPRESSED:
        return FORMATS.get(suffix, "text")
    inner = FORMATS.get(suffix_of(path[: -len(suffix)]), "text")
    return "text" if inner in ("parquet", "arrow") else inner


def check_format(path: str, form: TextFormat) -> None:
    """Raises UserError for archives, other compressed files, tables of text, and text with --prompt_key."""
    name = path.lower()
    if _UNSUPPORTED.search(name):
        raise UserError(
            f"--input={path} is an archive, or compressed by another program; unpack it (plain, .gz, "
            ".zst, .xz and .bz2 files are read), or --exclude it"
        )
    if suffix_of(re.sub(_ENDING, "", name)) in _TABLES and not form.text_separator:
        raise UserError(
            f"--input={path} is a table, not text; convert it to JSON lines or Parquet, --exclude it, or "
            "set --text_separator"
        )
    if form.prompt_key and file_format(path) == "text":
        raise UserError(
            f"--prompt_key={form.prompt_key} requires records, and {path} is text; exclude the file, or "
            "use JSON lines"
        )


def has_known_ending(name: str) -> bool:
    """Returns whether the ending of a file tells its format, also a format that is rejected."""
    if file_format(name) != "text" or _UNSUPPORTED.search(name.lower()):
        return True
    plain = re.sub(_ENDING, "", name.lower())
    return suffix_of(plain) in (_TEXT_ENDING, *_TABLES)


@contextmanager
def _open_stream(path: str) -> Iterator[Any]:
    """Opens a file and decompresses it. Python opens it: pyarrow takes only UTF-8 names."""
    suffix = suffix_of(path)
    with open(path, "rb", buffering=1 << 20) as file:
        if suffix not in COMPRESSED:
            yield file
            return
        if suffix == ".gz":
            import gzip

            stream: Any = gzip.GzipFile(fileobj=file)  # skips zero padding after a member
        elif suffix == ".zst" and not is_installed("zstandard"):
            stream = pa.CompressedInputStream(pa.PythonFile(file), "zstd")  # windows up to 128 MiB
        else:
            stream = _Members(file, _decompressor_of(suffix))
        with io.BufferedReader(stream, 1 << 20) as decompressed:
            yield decompressed


def _decompressor_of(suffix: str) -> Callable[[], Any]:
    """Returns a function that makes the decompressor of one member (or frame) of a file."""
    if suffix == ".zst":
        import zstandard

        frames = zstandard.ZstdDecompressor(max_window_size=1 << 31)
        return frames.decompressobj
    if suffix == ".xz":
        return lzma.LZMADecompressor
    import bz2

    return bz2.BZ2Decompressor


class _Members(io.RawIOBase):
    """The decompressed bytes of all members of a file.

    `lzma.open` and `bz2.open` ignore everything after a corrupt second member, and the readers of
    zstandard take a truncated file for a complete one. Here both are errors; only zero padding is
    skipped.
    """

    def __init__(self, file: IO[bytes], make_decompressor: Callable[[], Any]) -> None:
        self._chunks = _decompress(file, make_decompressor)
        self._rest = b""

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        while not self._rest:
            chunk = next(self._chunks, None)
            if chunk is None:
                return 0
            self._rest = chunk
        size = min(len(buffer), len(self._rest))
        buffer[:size] = self._rest[:size]
        self._rest = self._rest[size:]
        return size


def _decompress(file: IO[bytes], make_decompressor: Callable[[], Any]) -> Iterator[bytes]:
    data = file.read(_READ_BYTES)
    while data:
        member = make_decompressor()
        # zstandard takes no limit: its output is bounded by the size of the input
        limit = () if hasattr(member, "flush") else (_MAX_OUTPUT_BYTES,)
        while not member.eof:
            yield member.decompress(data, *limit)
            if not getattr(member, "needs_input", True):  # the limit held back a part of the output
                data = b""
                continue
            data = file.read(_READ_BYTES)
            if not data and not member.eof:
                raise EOFError("the file is truncated")
        data = (member.unused_data + data).lstrip(b"\0")
        while not data:  # zero padding between members
            block = file.read(_READ_BYTES)
            if not block:
                return
            data = block.lstrip(b"\0")


@contextmanager
def open_arrow(path: str) -> Iterator[tuple[pa.Schema, Iterator[pa.RecordBatch]]]:
    """Opens an Arrow file, or a complete Arrow stream, as the package datasets writes it."""
    data = map_or_read(path)
    is_file = data[:6] == b"ARROW1"
    if not is_file and data[-8:] != b"\xff\xff\xff\xff\0\0\0\0":
        raise pa.ArrowInvalid("the file is neither an Arrow file nor a complete Arrow stream")
    source = pa.BufferReader(pa.py_buffer(data))
    if is_file:
        file = pa.ipc.open_file(source)
        yield file.schema, map(file.get_batch, range(file.num_record_batches))
    else:
        stream = pa.ipc.open_stream(source)
        yield stream.schema, stream


def read_part(part: Part, form: TextFormat) -> Records:
    """Yields the records of a part in order, at most `part.limit`; problems count as records.

    Raises:
        UserError: the file cannot be read, or has no such column.
    """
    readers: dict[str, Callable[[Part, TextFormat], Records]] = {
        "jsonl": _read_json_lines,
        "json": _read_json,
        "parquet": _read_parquet,
        "arrow": _read_arrow,
        "text": _read_text,
    }
    with reading(part.path):
        yield from islice(readers[file_format(part.path)](part, form), part.limit)


@contextmanager
def reading(path: str) -> Iterator[None]:
    """Names the file in errors of the system, of decompression and of pyarrow."""
    try:
        yield
    except UserError:
        raise
    except Exception as error:
        if "too much memory" in str(error):  # pyarrow, of a frame of zstd
            raise UserError(
                f"--input={path} has a compression window above 128 MiB; install zstandard (pip install "
                "zstandard), or compress it with zstd --long=27"
            ) from None
        if not _is_about_content(error):
            raise
        raise UserError(
            f"--input={path} cannot be read: {error}; repair or exclude the file"
        ) from error


def _is_about_content(error: Exception) -> bool:
    known = OSError, EOFError, zlib.error, lzma.LZMAError, pa.ArrowInvalid, UnicodeDecodeError
    return isinstance(error, known) or type(error).__name__ == "ZstdError"  # of an optional package


def _read_json_lines(part: Part, form: TextFormat) -> Records:
    with _open_stream(part.path) as stream:
        is_plain = suffix_of(part.path) not in COMPRESSED
        position = 0
        _check_encoding(part.path, stream.peek(4))
        if part.start:  # a line belongs to the part that contains its first byte
            stream.seek(part.start - 1)
            position = part.start - 1 + len(stream.readline())
        first = position
        for number, line in enumerate(stream, start=1):
            if is_plain and position >= part.stop:
                return
            position += len(line)
            text = line.removeprefix(_BOM)
            if not text.strip():
                yield Problem("blank line")
                continue
            record = _parse_line(text, form)
            if isinstance(record, str):
                where = f"{part.path}:{number + _lines_before(part.path, first)}"
                yield Problem(record, where, malformed=True)
            else:
                yield record


def _check_encoding(path: str, head: bytes) -> None:
    """Raises UserError for JSON in UTF-16 or UTF-32: its lines can't be told apart by the byte
    0x0A, and the first character of JSON is ASCII, so a NUL in it is half of a wider one."""
    if head.startswith(_UTF16_BOMS) or b"\0" in head[:2]:
        raise UserError(
            f"--input={path} must be UTF-8, but is UTF-16 or UTF-32; convert it ({_ICONV} FILE "
            ">NAME.jsonl) or exclude the file"
        )


def _lines_before(path: str, stop: int) -> int:
    """Counts the line ends in bytes [0, stop) of a plain file, to name a malformed line."""
    count = 0
    with open(path, "rb") as stream:
        while chunk := stream.read(min(stop, 1 << 20)):
            count += chunk.count(b"\n")
            stop -= len(chunk)
    return count


def _parse_line(line: bytes, form: TextFormat) -> Document | str:
    """Returns the document of a JSON line, or the reason why there is none."""
    try:
        record = json.loads(line.decode())  # of bytes, json guesses the encoding
    except UnicodeDecodeError:
        return "not UTF-8"
    except (ValueError, RecursionError):
        return "not JSON"
    if not isinstance(record, dict):
        return "not a JSON object"
    return _document(record, form)


def _read_json(part: Part, form: TextFormat) -> Records:
    """Yields the records of an array, which begins with "[", or else those of JSON lines."""
    with _open_stream(part.path) as stream:
        head = stream.peek(4)
        _check_encoding(part.path, head)
        start = head.removeprefix(_BOM).lstrip()
        is_array = start[:1] == b"["
        body = stream.read(DOCUMENT_LIMIT + 1) if is_array else b""
    if not is_array:
        yield from _read_json_lines(part, form)
        return
    if len(body) > DOCUMENT_LIMIT:
        raise UserError(
            f"--input={part.path} is a JSON array above {DOCUMENT_LIMIT >> 20} MiB; write the records as "
            "JSON lines: jq -c '.[]' FILE >NAME.jsonl"
        )
    try:
        records = json.loads(body.removeprefix(_BOM).decode())
    except (ValueError, RecursionError) as error:
        reason = "not UTF-8" if isinstance(error, UnicodeDecodeError) else "not JSON"
        yield Problem(reason, part.path, malformed=True)
        return
    yield from _numbered(f"{part.path}: record", records, form)


def _document(record: Any, form: TextFormat) -> Document | str:
    """Returns the document of a record, or the reason why there is none; a string is a text itself."""
    if not isinstance(record, dict | str):
        return "not a JSON object"
    prompt = ""
    if isinstance(record, str):
        text = record
    else:
        values = list[str]()
        for key in form.keys:
            value = _field(record, key)
            if isinstance(value, bytes):  # of a binary column
                try:
                    value = value.decode()
                except UnicodeDecodeError:
                    return "not UTF-8"
            if value is None:
                return f"key '{key}' is missing or empty"
            if not isinstance(value, str):
                return f"key '{key}' is not a string"
            values.append(value)
        if form.prompt_key:
            prompt = values.pop(0)
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


def _field(record: Any, key: str) -> Any:
    """Returns the value of a key, or of `a.b`, the field b of the struct a; None if there is none."""
    if key in record or "." not in key:
        return record.get(key)
    outer, _, inner = key.partition(".")
    if not isinstance(record.get(outer), dict):
        return None
    return _field(record[outer], inner)


def _read_parquet(part: Part, form: TextFormat) -> Records:
    with open(part.path, "rb") as file:
        table = pq.ParquetFile(file)
        columns = _columns(part.path, table.schema_arrow, form)
        first = sum(table.metadata.row_group(group).num_rows for group in range(part.start))
        groups = list(range(part.start, part.stop))
        batches = table.iter_batches(batch_size=256, row_groups=groups, columns=columns)
        yield from _read_batches(part.path, batches, columns, form, first)


def _read_arrow(part: Part, form: TextFormat) -> Records:
    with open_arrow(part.path) as (schema, batches):
        yield from _read_batches(part.path, batches, _columns(part.path, schema, form), form)


def _columns(path: str, schema: pa.Schema, form: TextFormat) -> list[str]:
    """Returns the columns that contain the keys. Raises: UserError: there is no such column."""
    columns = [key if key in schema.names else key.partition(".")[0] for key in form.keys]
    for key in form.keys:
        if not _has_field(schema, key):
            remedy = "set --text_key"
            if "tokens" in schema.names or "input_ids" in schema.names:
                remedy = "for token ids use `python -m fms_fsdp convert`"
            rule = f"is not a column of {path}, which has {', '.join(schema.names)}"
            raise UserError(f"--text_key={key} {rule}; {remedy}")
    for column in columns:
        if schema.names.count(column) > 1:
            raise UserError(
                f"--text_key={column} must be one column, but {path} has "
                f"{schema.names.count(column)} of this name; write the table without the others"
            )
    return list(dict.fromkeys(columns))


def _has_field(fields: pa.Schema | pa.StructType, key: str) -> bool:
    if key in fields.names:
        return True
    outer, _, inner = key.partition(".")
    if not inner or outer not in fields.names:
        return False
    kind = fields.field(outer).type
    return pa.types.is_struct(kind) and _has_field(kind, inner)


def _read_batches(
    path: str,
    batches: Iterable[pa.RecordBatch],
    columns: list[str],
    form: TextFormat,
    first: int = 0,
) -> Records:
    rows = (row for batch in batches for row in batch.select(columns).to_pylist())
    yield from _numbered(f"{path}: row", rows, form, first)


def _numbered(what: str, records: Iterable[Any], form: TextFormat, before: int = 0) -> Records:
    for number, record in enumerate(records, start=before + 1):
        found = _document(record, form)
        if isinstance(found, str):
            yield Problem(found, f"{what} {number}", malformed=True)
        else:
            yield found


def _read_text(part: Part, form: TextFormat) -> Records:
    """Yields one document per file, or the texts between separators."""
    with _open_stream(part.path) as stream:
        head = stream.read(8192)
        if head.startswith((*_UTF16_BOMS, _UTF32_BOM)):
            yield Problem(f"UTF-16 or UTF-32 (convert it: {_ICONV})", part.path)
            return
        if b"\0" in head:
            yield Problem("binary file", part.path)
            return
        if form.text_separator:
            texts = _split_text(head, stream, form.text_separator.encode())
        else:
            body = head + stream.read(DOCUMENT_LIMIT)
            if len(body) > DOCUMENT_LIMIT:
                raise UserError(
                    f"--input={part.path} is one document above {DOCUMENT_LIMIT >> 20} MiB; split it with "
                    "--text_separator, or write JSON lines"
                )
            texts = iter([body])
        for number, data in enumerate(texts, start=1):
            where = part.path
            if form.text_separator:
                where = f"{part.path}: document {number}"
            if data is None:
                yield Problem(f"longer than {DOCUMENT_LIMIT >> 20} MiB", where, malformed=True)
                continue
            if number == 1:
                data = data.removeprefix(_BOM)
            try:
                yield Document(data.decode(), data)
            except UnicodeDecodeError:
                yield Problem("not UTF-8", where)


def _split_text(head: bytes, stream: IO[bytes], separator: bytes) -> Iterator[bytes | None]:
    """Yields the texts between separators without empty ones; None for one above the limit."""
    rest = bytearray()
    is_too_long = False
    chunk = head
    while chunk:
        searched = max(0, len(rest) - len(separator) + 1)  # no separator begins before
        rest += chunk
        first, *others = rest[searched:].split(separator)
        if others:
            for text in (rest[:searched] + first, *others[:-1]):
                if is_too_long or len(text) > DOCUMENT_LIMIT:
                    yield None
                elif text:
                    yield bytes(text)
                is_too_long = False
            rest = others[-1]
        if len(rest) > DOCUMENT_LIMIT:
            is_too_long = True
            del rest[: len(rest) - len(separator) + 1]
        chunk = stream.read(1 << 20)
    if is_too_long:
        yield None
    elif rest:
        yield bytes(rest)
