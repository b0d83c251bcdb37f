"""The input of `prepare`: files, their formats, and the documents in them.

    --input -> parse_input, find_files -> plan_slices -> Slice -> read_part -> Document | Problem

A slice is a fixed part of the input and the unit of parallel work. It depends on the files and
`slice_bytes` only, never on the number of processes. Plain JSON lines are split at line ends, Parquet at
row groups; compressed and text files stay whole. Text is verbatim, without a UTF-8 byte order mark at the
start of a file.
"""

from __future__ import annotations

import fnmatch
import glob
import io
import json
import lzma
import os
import re
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import islice, pairwise
from pathlib import Path
from typing import IO, Any, NamedTuple

import pyarrow as pa
import pyarrow.parquet as pq

from fms_fsdp.config.values import counted
from fms_fsdp.errors import MissingInput, UserError, is_installed, note_once
from fms_fsdp.files import map_or_read

DOCUMENT_LIMIT = 64 << 20  # bytes; tokenizers need about 50 times the size of a document
FORMATS = {
    ".jsonl": "jsonl",
    ".ndjson": "jsonl",
    ".json": "json",
    ".parquet": "parquet",
    ".arrow": "arrow",
}
_TEXT_ENDING = ".txt"
_COMPRESSED = (".gz", ".zst", ".xz", ".bz2")
_EXPANSION = {
    ".gz": 4,
    ".zst": 4,
    ".xz": 5,
    ".bz2": 4,
    ".parquet": 3,
}  # bytes of text per byte, roughly
_ENDING = r"\.(gz|zst|xz|bz2)$"  # of a compressed file
_TABLES = (".csv", ".tsv")
_UNSUPPORTED = re.compile(
    r"\.(zip|tar|tgz|tbz2?|txz|tzst|7z|rar|lz|lz4|lzma|lzo|br|z|sz|snappy|gzip|bz|bzip2|zstd)$"
    r"|\.tar\.(gz|zst|xz|bz2)$|\.(parquet|arrow)\.(gz|zst|xz|bz2)$"
)
_RESERVED = ("meta", "validation", "test")
# the first word of a file or folder with one split of a dataset, as in test-00000-of-00002.parquet
_SPLIT = re.compile(r"(train|validation|valid|val|dev|eval|test)([-_.]|$)")
_SHOWN_FILES = 3  # in a note
_DATASETS_METADATA = {
    "dataset_info.json",
    "state.json",
    "dataset_dict.json",
}  # of the package datasets
_BOM = b"\xef\xbb\xbf"
_READ_BYTES, _MAX_OUTPUT_BYTES = 1 << 13, 1 << 20  # of a compressed file, per step
_MAX_DEPTH = 64  # of JSON values that are parsed
_JSON_TOKEN = re.compile(r'"(?:[^"\\]|\\.)*"|[][{}]', re.DOTALL)


@dataclass(frozen=True)
class InputFile:
    """A file to read; `name` is relative to the folder in which it was found."""

    path: str
    name: str
    size: int
    mtime_ns: int


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
class Slice:
    """Consecutive parts of one source, read by one process."""

    index: int
    parts: tuple[Part, ...]

    @property
    def num_bytes(self) -> int:
        return sum(part.num_bytes for part in self.parts)


@dataclass(frozen=True)
class TextFormat:
    """JSON keys or columns of the text (`a.b` is a field of a struct), and the separator in text files."""

    text_key: str = "text"
    text_separator: str = ""
    prompt_key: str = ""

    @property
    def keys(self) -> list[str]:
        return ([self.prompt_key] if self.prompt_key else []) + self.text_key.split(",")


# Files


def parse_input(text: str) -> dict[str, list[str]]:
    """Returns source name -> paths. A path without NAME= is named after its folder or file.

    A comma belongs to the path unless NAME= follows it, or the path without NAME= does not exist.
    """
    sources, unnamed = dict[str, list[str]](), dict[str, str]()
    for item in [text] if _exists(text) else re.split(r",(?=[^,=/]*=)", text):
        given, equals, rest = item.partition("=")
        is_named = bool(equals) and "/" not in given and not _exists(item.split("/")[0])
        for path in [rest] if is_named else [item] if _exists(item) else item.split(","):
            if not path or (is_named and not given):
                raise UserError(
                    f"--input={text} must have the form [NAME=]PATH[,[NAME=]PATH…]; write e.g. "
                    "data/web,code=src"
                )
            name = given if is_named else _name_of(path)
            if first := unnamed.get(name):
                raise UserError(
                    f"--input={first} is not the only source named {name}; write NAME={first}"
                )
            if not is_named:
                unnamed[name] = path
            if not re.fullmatch(r"[A-Za-z0-9_][A-Za-z0-9_.-]*", name) or name in _RESERVED:
                rule = f"letters, digits, _ . - and not {', '.join(_RESERVED)}"
                raise UserError(f"--input={path}: a source name must be {rule}; write NAME=PATH")
            sources.setdefault(name, []).append(path)
    return sources


def _exists(path: str) -> bool:
    return os.path.exists(os.path.expanduser(path))


def _name_of(path: str) -> str:
    """Returns the last folder or file of a path before wildcards, without endings."""
    folder, pattern = _split_pattern(path)
    full = os.path.abspath(folder if glob.has_magic(pattern.split("/")[0]) else path)
    last = os.path.basename(full)
    return re.sub("[^A-Za-z0-9_.-]+", "_", last.partition(".")[0] if os.path.isfile(full) else last)


def _split_pattern(path: str) -> tuple[str, str]:
    """Returns the leading part that exists, whose brackets are no pattern, and the rest."""
    path = os.path.expanduser(path)
    folder = path
    while folder and not os.path.exists(folder):
        folder = os.path.dirname(folder)
    return folder, path[len(folder) :].lstrip("/")


def find_files(
    path: str, include: Sequence[str] = (), exclude: Sequence[str] = (), output: Path | None = None
) -> list[InputFile]:
    """Returns the files of a file, folder or glob (`**` too), in byte order of their relative names.

    Skips hidden files and folders, `__pycache__` and the output, and follows links. Patterns match relative
    names. A file with several names counts once, by a name with a known ending if there is one: a
    cache of the Hugging Face Hub stores nameless files, and links with names to them.

    Raises:
        FileNotFoundError: there is nothing to read.
        UserError: the output is the input folder itself.
    """

    def matches(name: str, patterns: Sequence[str]) -> bool:
        return any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns)

    path = os.path.expanduser(path)
    found, root = [path], path if os.path.isdir(path) else os.path.dirname(path)
    folder, pattern = _split_pattern(path)
    if pattern:
        root, found = folder, glob.glob(os.path.join(glob.escape(folder), pattern), recursive=True)
        if not glob.has_magic(pattern.split("/")[0]) or not os.path.isdir(root or "."):
            raise MissingInput(
                f"--input={path} does not exist; give a file, a folder or a quoted glob"
            )
    own = os.path.realpath(output) if output else "\0"
    if own == os.path.realpath(root or ".") and not os.path.isfile(path):
        raise UserError(
            f"--output={output} must not be the folder of --input={path}; choose another folder"
        )
    by_path: dict[str, str] = {}  # real path -> relative name
    for file in (file for each in found for file in _walk(each)):
        name, real = os.path.relpath(file, root or "."), os.path.realpath(file)
        is_hidden = found != [path] and any(map(_is_hidden, name.split("/")))
        if is_hidden or real.startswith(f"{own}/"):
            continue
        if matches(name, include or ["*"]) and not matches(name, exclude):
            by_path[real] = min(name, by_path.get(real, name), key=_rank_of_name)
    names = sorted(by_path.values(), key=os.fsencode)
    if any(name.endswith(".arrow") for name in names):
        names = [name for name in names if os.path.basename(name) not in _DATASETS_METADATA]
    if not names:
        rule = "contains no files to read; check the folder, --include and --exclude"
        raise MissingInput(f"--input={path} {rule}")
    stats = [(os.path.join(root, name), name, os.stat(os.path.join(root, name))) for name in names]
    return [InputFile(full, name, stat.st_size, stat.st_mtime_ns) for full, name, stat in stats]


def unique_files(files: Iterable[InputFile]) -> tuple[InputFile, ...]:
    """Returns each file once: a later name of it counts only if it alone has a known ending."""
    by_path: dict[str, InputFile] = {}
    for file in files:
        real = os.path.realpath(file.path)
        known = by_path.setdefault(real, file)
        if _has_known_ending(file.name) and not _has_known_ending(known.name):
            by_path[real] = file
    return tuple(by_path.values())


def skip_other_files(path: str, files: Sequence[InputFile], form: TextFormat) -> list[InputFile]:
    """Returns the files of a folder without those that accompany its records; notes their names.

    A file without a known ending is text in a folder of text. With JSON lines, Parquet and the like
    it is a README, a checksum or the backup of a shard. A file that was named itself is never skipped.
    """
    if os.path.isfile(os.path.expanduser(path)):
        return list(files)
    kept = [file for file in files if _has_known_ending(file.name)]
    skipped = [file for file in files if not _has_known_ending(file.name)]
    if not skipped or not any(_has_records(file.path, form) for file in kept):
        return list(files)
    names = ", ".join(file.name for file in skipped[:_SHOWN_FILES])
    more = ", …" if len(skipped) > _SHOWN_FILES else ""
    note_once(
        f"--input={path}: skipped {counted(len(skipped), 'file')} without a known ending, because "
        f"the folder has records: {names}{more}; --include='*' reads all files"
    )
    return kept


def note_splits(source: str, files: Iterable[InputFile]) -> None:
    """Notes that a source has a split for training and others: all of them become training data."""
    splits = set[str]()
    for file in files:
        if file_format(file.path) == "text":  # code has files such as test_x.py
            continue
        for part in file.name.lower().split("/"):
            match = _SPLIT.match(part)
            if match is not None:
                splits.add(match[1])
    if "train" in splits and len(splits) > 1:
        note_once(
            f"source {source} consists of several splits, {', '.join(sorted(splits))}, and all "
            "become training data; select one with --include, e.g. '*train*'"
        )


def _has_records(path: str, form: TextFormat) -> bool:
    """Returns whether a file contains records. A .json file of source code is text."""
    if file_format(path) != "json":
        return file_format(path) != "text"
    with _reading(path):
        return _json_content(path, form).kind != "text"


def _has_known_ending(name: str) -> bool:
    """Returns whether the ending of a file tells its format, also a format that is rejected."""
    if file_format(name) != "text" or _UNSUPPORTED.search(name.lower()):
        return True
    plain = re.sub(_ENDING, "", name.lower())
    return _suffix(plain) in (_TEXT_ENDING, *_TABLES)


def _rank_of_name(name: str) -> tuple[bool, bool, str]:
    """Returns the sort key of the names of one file: a known ending first, then any ending."""
    return not _has_known_ending(name), not _suffix(name), name


def _is_hidden(name: str) -> bool:
    return name.startswith(".") or name == "__pycache__"


def _walk(path: str) -> Iterator[str]:
    """Yields the files below a folder, each folder once; a file yields itself."""
    if os.path.isfile(path):
        yield path
    seen = {os.path.realpath(path)}
    for folder, subfolders, files in os.walk(path, followlinks=True):
        kept = []
        for sub in sorted(subfolders):
            real = os.path.realpath(os.path.join(folder, sub))
            if not _is_hidden(sub) and real not in seen:
                seen.add(real)
                kept.append(sub)
        subfolders[:] = kept
        for name in files:
            if not name.startswith(".") and os.path.isfile(file := os.path.join(folder, name)):
                yield file


# Formats


def _suffix(path: str) -> str:
    return os.path.splitext(path)[1].lower()


def file_format(path: str) -> str:
    """Returns a value of FORMATS, or `text`, from the name of the file."""
    is_compressed = _suffix(path) in _COMPRESSED
    found = FORMATS.get(_suffix(path[: -len(_suffix(path))] if is_compressed else path), "text")
    return "text" if is_compressed and found in ("parquet", "arrow") else found


def check_format(path: str, form: TextFormat) -> None:
    """Raises UserError for archives, other compressed files, tables of text, and text with --prompt_key."""
    name = path.lower()
    if _UNSUPPORTED.search(name):
        raise UserError(
            f"--input={path} is an archive, or compressed by another program; unpack it (plain, .gz, "
            ".zst, .xz and .bz2 files are read), or --exclude it"
        )
    if _suffix(re.sub(_ENDING, "", name)) in _TABLES and not form.text_separator:
        raise UserError(
            f"--input={path} is a table, not text; convert it to JSON lines or Parquet, --exclude it, or "
            "set --text_separator"
        )
    if form.prompt_key and file_format(path) == "text":
        raise UserError(
            f"--prompt_key={form.prompt_key} requires records, and {path} is text; exclude the file, or "
            "use JSON lines"
        )


@contextmanager
def _open_stream(path: str) -> Iterator[Any]:
    """Opens a file and decompresses it. Python opens it: pyarrow takes only UTF-8 names."""
    suffix = _suffix(path)
    with open(path, "rb", buffering=1 << 20) as file:
        if suffix not in _COMPRESSED:
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

    `lzma.open` and `bz2.open` ignore everything after a corrupt second member, and the readers of zstandard
    take a truncated file for a complete one. Here both are errors; only zero padding is skipped.
    """

    def __init__(self, file: IO[bytes], make_decompressor: Callable[[], Any]) -> None:
        self._chunks, self._rest = _decompress(file, make_decompressor), b""

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        while not self._rest:
            chunk = next(self._chunks, None)
            if chunk is None:
                return 0
            self._rest = chunk
        size = min(len(buffer), len(self._rest))
        buffer[:size], self._rest = self._rest[:size], self._rest[size:]
        return size


def _decompress(file: IO[bytes], make_decompressor: Callable[[], Any]) -> Iterator[bytes]:
    data = file.read(_READ_BYTES)
    while data:
        member = make_decompressor()
        # zstandard takes no limit: its output is bounded by the size of the input
        limit = () if hasattr(member, "flush") else (_MAX_OUTPUT_BYTES,)
        while not member.eof:
            yield member.decompress(data, *limit)
            needs_input = getattr(member, "needs_input", True)
            data = file.read(_READ_BYTES) if needs_input else b""
            if needs_input and not data and not member.eof:
                raise EOFError("the file is truncated")
        data = (member.unused_data + data).lstrip(b"\0")
        while not data and (more := file.read(_READ_BYTES)):
            data = more.lstrip(b"\0")


@contextmanager
def open_arrow(path: str) -> Iterator[tuple[pa.Schema, Iterator[pa.RecordBatch]]]:
    """Opens an Arrow file, or a complete Arrow stream, as the package datasets writes it."""
    data = map_or_read(path)
    is_file = data[:6] == b"ARROW1"
    if not is_file and data[-8:] != b"\xff\xff\xff\xff\0\0\0\0":
        raise pa.ArrowInvalid("the file is neither an Arrow file nor a complete Arrow stream")
    source = pa.BufferReader(pa.py_buffer(data))
    reader = pa.ipc.open_file(source) if is_file else pa.ipc.open_stream(source)
    yield (
        reader.schema,
        map(reader.get_batch, range(reader.num_record_batches)) if is_file else reader,
    )


# Slices


def plan_slices(
    files: Sequence[InputFile], slice_bytes: int, form: TextFormat, limit_docs: int | None = None
) -> list[Slice]:
    """Splits and groups the files into slices of about `slice_bytes` of text, in their order.

    `limit_docs` keeps that many records from the start; they are counted by reading them.
    """
    slices, parts = list[Slice](), list[Part]()
    weight, left = 0, limit_docs
    for part in (part for file in files for part in _split(file, slice_bytes)):
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


def _split(file: InputFile, slice_bytes: int) -> Iterator[Part]:
    size = file.size * _EXPANSION.get(_suffix(file.path), 1)
    num_parts, end = -(-size // slice_bytes) or 1, max(1, size)
    if file_format(file.path) == "parquet":
        with _reading(file.path), open(file.path, "rb") as stream:
            end = pq.ParquetFile(stream).metadata.num_row_groups
    elif file_format(file.path) != "jsonl" or _suffix(file.path) in _COMPRESSED:
        num_parts = 1
    else:
        end = size
    for start, stop in pairwise(sorted({end * i // num_parts for i in range(num_parts + 1)})):
        yield Part(file.path, start, stop, size * (stop - start) // end)


# Documents


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
    with _reading(part.path):
        yield from islice(readers[file_format(part.path)](part, form), part.limit)


@contextmanager
def _reading(path: str) -> Iterator[None]:
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
        is_plain, position = _suffix(part.path) not in _COMPRESSED, 0
        if part.start:  # a line belongs to the part that contains its first byte
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
                record = Problem(
                    record, f"{part.path}:{number + _lines_before(part.path, first)}", True
                )
            yield record


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
        record = _parse_json(line)
    except UnicodeDecodeError:
        return "not UTF-8"
    except ValueError:
        return "not JSON"
    return _document(record, form) if isinstance(record, dict) else "not a JSON object"


def _parse_json(data: bytes) -> Any:
    """Parses JSON also if a field is an integer of thousands of digits, or nested very deep."""
    try:
        return json.loads(data)
    except UnicodeDecodeError:
        raise
    except (ValueError, RecursionError):
        text, kept, depth, start = data.decode(), list[str](), 0, 0
        for match in _JSON_TOKEN.finditer(text):
            if match[0] in ("[", "{"):
                depth += 1
                if depth == _MAX_DEPTH:
                    kept.append(text[start : match.start()])
            elif match[0] in ("]", "}"):
                if depth == _MAX_DEPTH:
                    kept.append("null")
                    start = match.end()
                depth -= 1
        try:
            return json.loads("".join([*kept, text[start:]]), parse_int=float)
        except RecursionError as error:  # unbalanced
            raise ValueError(str(error)) from error


def _document(record: dict[str, Any] | str, form: TextFormat) -> Document | str:
    """Returns the document of a record, or the reason why there is none; a string is a text itself."""
    values: list[Any] = (
        [record] if isinstance(record, str) else [_field(record, key) for key in form.keys]
    )
    for i, (key, value) in enumerate(zip(form.keys, values, strict=False)):
        if isinstance(value, bytes):  # of a binary column
            try:
                values[i] = value.decode()
            except UnicodeDecodeError:
                return "not UTF-8"
        elif not isinstance(value, str):
            return (
                f"key '{key}' is missing or empty"
                if value is None
                else f"key '{key}' is not a string"
            )
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


def _field(record: Any, key: str) -> Any:
    """Returns the value of a key, or of `a.b`, the field b of the struct a; None if there is none."""
    if key in record or "." not in key:
        return record.get(key)
    outer, _, inner = key.partition(".")
    return _field(record[outer], inner) if isinstance(record.get(outer), dict) else None


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
            has_tokens = "tokens" in schema.names or "input_ids" in schema.names
            remedy = (
                "for token ids use `python -m fms_fsdp convert`" if has_tokens else "set --text_key"
            )
            rule = f"is not a column of {path}, which has {', '.join(schema.names)}"
            raise UserError(f"--text_key={key} {rule}; {remedy}")
    return list(dict.fromkeys(columns))


def _has_field(fields: pa.Schema | pa.StructType, key: str) -> bool:
    if key in fields.names:
        return True
    outer, _, inner = key.partition(".")
    kind = fields.field(outer).type if inner and outer in fields.names else None
    return kind is not None and pa.types.is_struct(kind) and _has_field(kind, inner)


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
        yield Problem(found, f"{what} {number}", True) if isinstance(found, str) else found


def _read_json(part: Part, form: TextFormat) -> Records:
    """Yields the records of an array or of JSON lines; a file that contains neither is one text."""
    content = _json_content(part.path, form)
    if content.kind == "records":
        yield from _numbered(f"{part.path}: record", content.records, form)
    elif content.kind == "lines":
        yield from _read_json_lines(part, form)
    else:
        yield from _read_text(part, form)


class _JsonContent(NamedTuple):
    """The content of a .json file: parsed `records`, `lines` to parse one by one, or `text`."""

    kind: str
    records: list[Any]


def _json_content(path: str, form: TextFormat) -> _JsonContent:
    with _open_stream(path) as stream:
        is_array = stream.peek(1).removeprefix(_BOM).lstrip()[:1] == b"["
        body = stream.read(DOCUMENT_LIMIT + 1) if is_array else stream.readline(DOCUMENT_LIMIT)
        has_more = bool(stream.readline(DOCUMENT_LIMIT).strip())
    if is_array and len(body) > DOCUMENT_LIMIT:
        raise UserError(
            f"--input={path} is a JSON array above {DOCUMENT_LIMIT >> 20} MiB; write the records as "
            "JSON lines: jq -c '.[]' FILE >NAME.jsonl"
        )
    records = _json_records(body) if is_array else []
    if _contain_text(records, form):
        return _JsonContent("records", records)
    has_record = has_more and isinstance(_parse_line(body.removeprefix(_BOM), form), Document)
    if _suffix(path) in _COMPRESSED or has_record:
        return _JsonContent("lines", [])
    return _JsonContent("text", [])


def _json_records(body: bytes) -> list[Any]:
    """Returns the records of a JSON array or of two or more JSON lines, if all are objects or strings."""
    body = body.removeprefix(_BOM).strip()
    is_array = body.startswith(b"[")
    try:
        records = (
            _parse_json(body) if is_array else [_parse_json(line) for line in body.splitlines()]
        )
    except ValueError:
        return []
    is_uniform = {type(record) for record in records} in ({dict}, {str})
    return records if is_uniform and len(records) >= (1 if is_array else 2) else []


def _contain_text(records: Sequence[Any], form: TextFormat) -> bool:
    return any(isinstance(_document(record, form), Document) for record in records)


def _read_text(part: Part, form: TextFormat) -> Records:
    """Yields one document per file, or the texts between separators."""
    with _open_stream(part.path) as stream:
        head = stream.read(8192)
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
            where = f"{part.path}: document {number}" if form.text_separator else part.path
            if data is None:
                yield Problem(f"longer than {DOCUMENT_LIMIT >> 20} MiB", where, malformed=True)
                continue
            data = data.removeprefix(_BOM) if number == 1 else data
            try:
                yield Document(data.decode(), data)
            except UnicodeDecodeError:
                yield Problem("not UTF-8", where)


def _split_text(head: bytes, stream: IO[bytes], separator: bytes) -> Iterator[bytes | None]:
    """Yields the texts between separators without empty ones; None for one above the limit."""
    rest, is_too_long, chunk = bytearray(), False, head
    while chunk:
        searched = max(0, len(rest) - len(separator) + 1)  # no separator begins before
        rest += chunk
        first, *more = rest[searched:].split(separator)
        if more:
            for text in (rest[:searched] + first, *more[:-1]):
                if is_too_long or len(text) > DOCUMENT_LIMIT:
                    yield None
                elif text:
                    yield bytes(text)
                is_too_long = False
            rest = more[-1]
        if len(rest) > DOCUMENT_LIMIT:
            is_too_long = True
            del rest[: len(rest) - len(separator) + 1]
        chunk = stream.read(1 << 20)
    if is_too_long:
        yield None
    elif rest:
        yield bytes(rest)
