"""The files of `prepare`'s input, and their slices.

    --input -> parse_input, find_files -> plan_slices -> Slice

A slice is a fixed part of the input and the unit of parallel work. It depends on the files and
`slice_bytes` only, never on the number of processes. Plain JSON lines are split at line ends,
Parquet at row groups; compressed and text files stay whole.
"""

from __future__ import annotations

import fnmatch
import glob
import os
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path

import pyarrow.parquet as pq

from fms_fsdp.config.values import counted
from fms_fsdp.errors import MissingInput, UserError, is_absent, note_once
from fms_fsdp.files import exists, is_file, is_folder
from fms_fsdp.prepare.documents import (
    COMPRESSED,
    Document,
    Part,
    Problem,
    TextFormat,
    file_format,
    has_known_ending,
    read_part,
    reading,
    suffix_of,
)

# Bytes of text per byte of a file, roughly.
_EXPANSION = {".gz": 4, ".zst": 4, ".xz": 5, ".bz2": 4, ".parquet": 3}
_RESERVED = ("meta", "validation", "test")
# a word in the name of a file or folder with one split of a dataset, as in
# test-00000-of-00002.parquet and, of a cache of the package datasets, wikitext-test.arrow
_SPLIT = re.compile(r"(?:^|[-_.])(train|validation|valid|val|dev|eval|test)(?:[-_.]|$)")
# the folder of a revision in a cache of the Hugging Face Hub
_REVISION = re.compile(r"(?:^|/)([0-9a-f]{40})/")
_SHOWN_FILES = 3  # in a note
# Files of the package datasets beside its .arrow files.
_DATASETS_METADATA = {"dataset_info.json", "state.json", "dataset_dict.json"}
# The results of map, filter and the like, which the package saves with the files they are made from.
_DATASETS_CACHE = re.compile(r"cache-[0-9a-f]{16}(_\d{5}_of_\d{5})?\.arrow")


@dataclass(frozen=True)
class InputFile:
    """A file to read; `name` is relative to the folder in which it was found."""

    path: str
    name: str
    size: int
    mtime_ns: int


@dataclass(frozen=True)
class Slice:
    """Consecutive parts of one source, read by one process."""

    index: int
    parts: tuple[Part, ...]

    @property
    def num_bytes(self) -> int:
        return sum(part.num_bytes for part in self.parts)


def parse_input(text: str) -> dict[str, list[str]]:
    """Returns source name -> paths. A path without NAME= is named after its folder or file.

    A comma belongs to the path unless NAME= follows it, or the path without NAME= does not exist.
    """
    sources = dict[str, list[str]]()
    unnamed = dict[str, str]()  # the path of each source that has its name from it
    for given, path in _split_input(text):
        if not path or given == "":
            raise UserError(
                f"--input={text} must have the form [NAME=]PATH[,[NAME=]PATH…]; write e.g. "
                "data/web,code=src"
            )
        name = _name_of(path) if given is None else given
        if name in unnamed:
            first = unnamed[name]
            raise UserError(
                f"--input={first} is not the only source named {name}; write NAME={first}"
            )
        if given is None:
            unnamed[name] = path
        if not re.fullmatch(r"[A-Za-z0-9_][A-Za-z0-9_.-]*", name) or name in _RESERVED:
            rule = f"letters, digits, _ . - and not {', '.join(_RESERVED)}"
            raise UserError(f"--input={path}: a source name must be {rule}; write NAME=PATH")
        sources.setdefault(name, []).append(path)
    return sources


def _split_input(text: str) -> Iterator[tuple[str | None, str]]:
    """Yields the given name, None without NAME=, and the path of each source."""
    items = [text] if _exists(text) else re.split(r",(?=[^,=/]*=)", text)
    for item in items:
        given, equals, path = item.partition("=")
        # An "=" in a path is none of NAME=: the path exists, or has a folder before it.
        is_named = bool(equals) and "/" not in given and not _exists(item.split("/")[0])
        if is_named:
            yield given, path
        elif _exists(item):
            yield None, item
        else:
            for each in item.split(","):
                yield None, each


def _exists(path: str) -> bool:
    return exists(os.path.expanduser(path))


def _name_of(path: str) -> str:
    """Returns the last folder or file of a path before wildcards, without endings."""
    folder, pattern = _split_pattern(path)
    if glob.has_magic(pattern.split("/")[0]):
        path = folder
    full = os.path.abspath(path)
    name = os.path.basename(full)
    if is_file(full):
        name = name.partition(".")[0]
    return re.sub("[^A-Za-z0-9_.-]+", "_", name)


def _split_pattern(path: str) -> tuple[str, str]:
    """Returns the leading part that exists, whose brackets are no pattern, and the rest."""
    path = os.path.expanduser(path)
    folder = path
    while folder and not exists(folder):
        folder = os.path.dirname(folder)
    return folder, path[len(folder) :].lstrip("/")


def find_files(
    path: str, include: Sequence[str] = (), exclude: Sequence[str] = (), output: Path | None = None
) -> list[InputFile]:
    """Returns the files of a file, folder or glob (`**` too), in byte order of their relative names.

    Skips hidden files and folders, `__pycache__` and the output, and follows links. Patterns match
    relative names. A file with several names counts once, by a name with a known ending if there is
    one: a cache of the Hugging Face Hub stores nameless files, and links with names to them.

    Raises:
        FileNotFoundError: there is nothing to read.
        UserError: the output is the input folder itself.
    """

    def matches(name: str, patterns: Sequence[str]) -> bool:
        return any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns)

    path = os.path.expanduser(path)
    found = [path]
    root = path if is_folder(path) else os.path.dirname(path)  # names are relative to it
    folder, pattern = _split_pattern(path)
    if pattern:
        root = folder
        found = list(_expand(folder or ".", pattern.split("/"), [os.path.realpath(folder or ".")]))
        if not glob.has_magic(pattern.split("/")[0]) or not is_folder(root or "."):
            raise MissingInput(
                f"--input={path} does not exist; give a file, a folder or a quoted glob"
            )
    own = os.path.realpath(output) if output else None
    if own == os.path.realpath(root or ".") and not is_file(path):
        raise UserError(
            f"--output={output} must not be the folder of --input={path}; choose another folder"
        )
    by_path: dict[str, str] = {}  # real path -> relative name
    dangling = set[str]()
    for each in found:
        for file in _walk(each, all_names=bool(include or exclude)):
            name = os.path.relpath(file, root or ".")
            real = os.path.realpath(file)
            if pattern and any(map(_is_hidden, name.split("/"))):
                continue
            if own is not None and real.startswith(f"{own}/"):
                continue
            if not matches(name, include or ["*"]) or matches(name, exclude):
                continue
            if _is_dangling(file):
                dangling.add(name)
                continue
            by_path[real] = min(name, by_path.get(real, name), key=_rank_of_name)
    if dangling:
        note_once(
            f"--input={path}: skipped {counted(len(dangling), 'link')} to files that do not exist: "
            f"{_shown(sorted(dangling))}"
        )
    names = sorted(by_path.values(), key=os.fsencode)
    if any(name.endswith(".arrow") for name in names):
        names = [name for name in names if os.path.basename(name) not in _DATASETS_METADATA]
        names = _without_copies(path, names)
    note_revisions(path, names)
    if not names:
        rule = "contains no files to read; check the folder, --include and --exclude"
        raise MissingInput(f"--input={path} {rule}")
    files = []
    for name in names:
        full = os.path.join(root, name)
        stat = os.stat(full)
        files.append(InputFile(full, name, stat.st_size, stat.st_mtime_ns))
    return files


def _without_copies(path: str, names: Sequence[str]) -> list[str]:
    """Drops the cache files of the package datasets, which repeat the rows of other files of their
    folder, and logs their names."""
    folders = set[str]()  # with a file that is not a cache
    for name in names:
        folder, base = os.path.split(name)
        if base.endswith(".arrow") and not _DATASETS_CACHE.fullmatch(base):
            folders.add(folder)
    kept = list[str]()
    skipped = list[str]()
    for name in names:
        folder, base = os.path.split(name)
        if folder in folders and _DATASETS_CACHE.fullmatch(base):
            skipped.append(name)
        else:
            kept.append(name)
    if skipped:
        note_once(
            f"--input={path}: skipped {counted(len(skipped), 'file')} in which the package datasets "
            f"caches changed rows of the others: {_shown(skipped)}; name such a file to read it"
        )
    return kept


def _shown(names: Sequence[str]) -> str:
    more = ", …" if len(names) > _SHOWN_FILES else ""
    return ", ".join(names[:_SHOWN_FILES]) + more


def unique_files(files: Iterable[InputFile]) -> tuple[InputFile, ...]:
    """Returns each file once: a later name of it counts only if it alone has a known ending."""
    by_path: dict[str, InputFile] = {}
    for file in files:
        real = os.path.realpath(file.path)
        known = by_path.setdefault(real, file)
        if has_known_ending(file.name) and not has_known_ending(known.name):
            by_path[real] = file
    return tuple(by_path.values())


def skip_other_files(path: str, files: Sequence[InputFile], form: TextFormat) -> list[InputFile]:
    """Drops the files that only accompany the records of a folder, and logs their names.

    A file without a known ending is text in a folder of text. With JSON lines, Parquet and the like
    it is a README, a checksum or the backup of a shard. A file that was named itself is never
    skipped.
    """
    if is_file(os.path.expanduser(path)):
        return list(files)
    kept = [file for file in files if has_known_ending(file.name)]
    skipped = [file for file in files if not has_known_ending(file.name)]
    if not skipped or not any(_has_records(file, form) for file in kept):
        return list(files)
    names = _shown([file.name for file in skipped])
    note_once(
        f"--input={path}: skipped {counted(len(skipped), 'file')} without a known ending, because "
        f"the folder has records: {names}; --include='*' reads all files"
    )
    return kept


def note_splits(source: str, files: Iterable[InputFile]) -> None:
    """Notes that a source has a split for training and others: all of them become training data."""
    names = [file.name for file in files if file_format(file.path) != "text"]  # code: test_x.py
    splits = splits_in(names)
    if "train" in splits and len(splits) > 1:
        note_once(
            f"source {source} consists of several splits, {', '.join(sorted(splits))}, and all "
            "become training data; select one with --include, e.g. '*train*'"
        )


def splits_in(names: Iterable[str]) -> set[str]:
    """Returns the splits of a dataset that the names of its files and folders mention."""
    splits = set[str]()
    for name in names:
        for part in name.lower().split("/"):
            match = _SPLIT.search(part)
            if match is not None:
                splits.add(match[1])
    return splits


def note_revisions(path: str, names: Iterable[str]) -> None:
    """Notes that a folder has several revisions of a dataset, which repeat most of its records."""
    revisions = dict[str, set[str]]()  # by dataset
    for name in names:
        match = _REVISION.search(name)
        if match is not None:
            revisions.setdefault(name[: match.start()], set()).add(match[1])
    for found in revisions.values():
        if len(found) > 1:
            note_once(
                f"--input={path} has {len(found)} revisions of a dataset, {_shown(sorted(found))}, "
                "and all are read; name the folder of one"
            )


def _has_records(file: InputFile, form: TextFormat) -> bool:
    """Returns whether a file contains records. A .json file of settings among source code has none."""
    if file_format(file.path) != "json":
        return file_format(file.path) != "text"
    first = next(read_part(Part(file.path, 0, file.size, file.size, limit=1), form), None)
    return isinstance(first, Document)


def _rank_of_name(name: str) -> tuple[bool, bool, str]:
    """Returns the sort key of the names of one file: a known ending first, then any ending."""
    return not has_known_ending(name), not suffix_of(name), name


def _is_hidden(name: str) -> bool:
    return name.startswith(".") or name == "__pycache__"


def _expand(folder: str, parts: Sequence[str], above: Sequence[str]) -> Iterator[str]:
    """Yields the files, folders and links to nothing below a folder that match the parts of a glob;
    with `**` at the end the folder itself.

    `above`: the real paths of this folder and those above it, against links that lead back. Not
    `glob.glob`, which takes a folder that cannot be read for an empty one.

    Raises:
        OSError: the storage does not give a folder, whose files would be missing in the shards.
    """
    if not parts or parts == ["**"]:
        yield folder
        return
    first, *rest = parts
    names = [first]
    if glob.has_magic(first):
        try:
            names = [name for name in sorted(os.listdir(folder)) if not _is_hidden(name)]
        except OSError as error:
            _note_or_raise(error)
            return
    if first == "**":
        yield from _expand(folder, rest, above)
        for name in names:
            path = os.path.join(folder, name)
            real = os.path.realpath(path)
            if is_folder(path) and real not in above:
                yield from _expand(path, parts, [*above, real])
        return
    for name in fnmatch.filter(names, first) if glob.has_magic(first) else names:
        path = os.path.join(folder, name)
        if exists(path) or _is_dangling(path):
            yield from _expand(path, rest, [*above, os.path.realpath(path)])


def _note_or_raise(error: OSError) -> None:
    """Lets the run go on without a folder that is gone or forbidden, such as lost+found."""
    if isinstance(error, PermissionError):
        note_once(f"--input: skipped the folder {error.filename}: {error.strerror}")
    elif not is_absent(error):
        raise error


def _walk(path: str, *, all_names: bool) -> Iterator[str]:
    """Yields the files and the links to nothing below a folder; a file yields itself.

    A folder with two names, as by a link `latest`, is read once or, with `all_names`, under both:
    --include and --exclude may select one of them.

    Raises:
        OSError: the storage does not give a folder, whose files would be missing in the shards.
    """
    if is_file(path) or _is_dangling(path):
        yield path
    # The real paths of folders that are not read again below each folder: itself and those above
    # it, against links that lead back, or else all that were seen.
    above = {path: {os.path.realpath(path)}}
    for folder, subfolders, files in os.walk(path, onerror=_note_or_raise, followlinks=True):
        reals = above.pop(folder)
        kept = []
        for name in sorted(subfolders):
            sub = os.path.join(folder, name)
            real = os.path.realpath(sub)
            if _is_hidden(name) or real in reals:
                continue
            if all_names:
                above[sub] = reals | {real}
            else:
                reals.add(real)
                above[sub] = reals
            kept.append(name)
        subfolders[:] = kept
        for name in files:
            file = os.path.join(folder, name)
            if not name.startswith(".") and (is_file(file) or _is_dangling(file)):
                yield file


def _is_dangling(path: str) -> bool:
    return os.path.islink(path) and not exists(path)


def plan_slices(
    files: Sequence[InputFile], slice_bytes: int, form: TextFormat, limit_docs: int | None = None
) -> list[Slice]:
    """Splits and groups the files into slices of about `slice_bytes` of text, in their order.

    `limit_docs` keeps that many records from the start; they are counted by reading them.
    """
    slices = list[Slice]()
    parts = list[Part]()  # of the next slice
    num_bytes = 0
    records_left = limit_docs
    all_parts = (part for file in files for part in _split(file, slice_bytes))
    for part in all_parts:
        if parts and num_bytes + part.num_bytes > slice_bytes:
            slices.append(Slice(len(slices), tuple(parts)))
            parts = []
            num_bytes = 0
        num_bytes += part.num_bytes
        if records_left is not None:
            part = replace(part, limit=records_left)
            records = list(map(_num_bytes, read_part(part, form)))
            records_left -= len(records)
            # The rate that is logged and the sample for a tokenizer would be those of the full file.
            part = replace(part, num_bytes=sum(records))
        parts.append(part)
        if records_left == 0:
            break
    return [*slices, Slice(len(slices), tuple(parts))]


def _num_bytes(record: Document | Problem) -> int:
    return len(record.data) if isinstance(record, Document) else 0


def _split(file: InputFile, slice_bytes: int) -> Iterator[Part]:
    """Splits a file into equal parts of at most `slice_bytes` of text, if its format allows it.

    Example: 10 row groups in 4 parts begin at 0, 2, 5 and 7.
    """
    size = file.size * _EXPANSION.get(suffix_of(file.path), 1)
    num_parts = max(1, -(-size // slice_bytes))
    end = size  # in bytes, or in row groups
    if file_format(file.path) == "parquet":
        with reading(file.path), open(file.path, "rb") as stream:
            end = pq.ParquetFile(stream).metadata.num_row_groups
    elif file_format(file.path) != "jsonl" or suffix_of(file.path) in COMPRESSED:
        num_parts = 1
        end = max(1, size)
    bounds = {end * i // num_parts for i in range(num_parts + 1)}
    for start, stop in pairwise(sorted(bounds)):
        yield Part(file.path, start, stop, size * (stop - start) // end)
