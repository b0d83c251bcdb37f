"""The files that --input names: a file, a folder or a glob.

Invariant: the same files give the same list, in byte order of their names; nothing that the command itself writes is in it.
"""

from __future__ import annotations

import fnmatch
import glob
import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

_JSON_LINES = (
    ".jsonl",
    ".ndjson",
    ".jsonl.gz",
    ".jsonl.zst",
    ".json.gz",
    ".json.zst",
    ".ndjson.gz",
    ".ndjson.zst",
)
WRITTEN = (
    "NAME/shard-00000.arrow",
    "meta/counts.csv",
    "meta/summary.json",
    "tokenizer.model",
)  # to every output


@dataclass(frozen=True)
class InputFile:
    """A file to read; `name` is relative to the folder it was found in."""

    path: str
    name: str
    size: int
    mtime_ns: int
    kind: str  # jsonl | parquet | text


def file_kind(path: str) -> str:
    """`jsonl`, `parquet` or `text`, from the name alone."""
    lower = path.lower()
    return "jsonl" if lower.endswith(_JSON_LINES) else "parquet" if lower.endswith(".parquet") else "text"


def find_files(
    path: str, include: Sequence[str] = (), exclude: Sequence[str] = (), output: Path | None = None
) -> list[InputFile]:
    """The files that `path` (file, folder or glob with `**`) names, in byte order of their relative names.

    Hidden files and folders and `__pycache__` are passed over, links are followed. The patterns match relative names, `*` crosses `/`.

    Raises:
        FileNotFoundError: nothing is there, or nothing is left of it.
        ValueError: what is written to `output` would be read as input.
    """
    path = os.path.expanduser(path)
    if os.path.isfile(path):
        root, names, own = os.path.split(path)[0], [os.path.basename(path)], list[str]()
    elif os.path.isdir(path):
        root, names = path, _walk(path)
        own = _own_names(root, output)
    else:
        root = os.path.dirname(re.split(r"[*?[]", path)[0])
        if not glob.has_magic(path) or not os.path.isdir(root or "."):
            raise FileNotFoundError(
                f"--input ({path}) does not exist; give a file, a folder or a quoted glob"
            )
        whole = re.compile(
            _glob_pattern(path[len(root) :].lstrip("/")) + "(?:/.*)?"
        )  # a matched folder gives its files
        names = [name for name in _walk(root or ".") if whole.fullmatch(name)]
        own = [name for name in _own_names(root or ".", output) if whole.fullmatch(name)]
    names, own = _chosen(names, include, exclude), _chosen(own, include, exclude)
    if own:
        raise ValueError(
            f"--output ({output}) must not lie where --input ({path}) is read: {own[0]} would be read as text; "
            "choose another folder"
        )
    if not names:
        raise FileNotFoundError(
            f"--input ({path}) holds no files to read; check the folder, --include and --exclude"
        )
    files = []
    for name in sorted(set(names), key=os.fsencode):
        full = os.path.join(root, name)
        stat = os.stat(full)
        files.append(InputFile(full, name, stat.st_size, stat.st_mtime_ns, file_kind(name)))
    return files


def _chosen(names: Sequence[str], include: Sequence[str], exclude: Sequence[str]) -> list[str]:
    if include:
        names = [name for name in names if any(fnmatch.fnmatchcase(name, pattern) for pattern in include)]
    return [name for name in names if not any(fnmatch.fnmatchcase(name, pattern) for pattern in exclude)]


def _own_names(root: str, output: Path | None) -> list[str]:
    """Names below `root` of what is written to `output`, as far as `_walk` would find it."""
    inside = os.path.relpath(os.path.realpath(output), os.path.realpath(root)) if output else os.pardir
    folders = [] if inside == "." else inside.split("/")
    if any(_is_passed_over(folder) for folder in folders):  # ".." too
        return []
    return ["/".join([*folders, name]) for name in WRITTEN]


def _is_passed_over(name: str) -> bool:
    return name.startswith(".") or name == "__pycache__"


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
            if not _is_passed_over(sub) and real not in seen:
                seen.add(real)
                kept.append(sub)
        subfolders[:] = sorted(kept)
        full = [os.path.join(folder, name) for name in files if not name.startswith(".")]
        names += [os.path.relpath(name, root) for name in full if os.path.isfile(name)]
    return names
