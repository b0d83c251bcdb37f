"""The files that --input names: files, folders and globs.

Invariant: the same files give the same list, in byte order of their names; nothing that the command itself
writes is in it.
"""

from __future__ import annotations

import fnmatch
import glob
import os
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from fms_fsdp.errors import MissingInput, UserError

# to an output
_WRITTEN = ("NAME/shard-00000.arrow", "meta/counts.csv", "meta/summary.json", "tokenizer.model")
_RESERVED = ("meta", "validation", "test")
_NOTES = {"dataset_info.json", "state.json", "dataset_dict.json"}  # of the package datasets, beside its data


@dataclass(frozen=True)
class InputFile:
    """A file to read; `name` is relative to the folder in which it was found."""

    path: str
    name: str
    size: int
    mtime_ns: int


def parse_input(text: str) -> dict[str, list[str]]:
    """NAME → its paths; a path without NAME= has the name of its folder or file, which no other has.

    A comma belongs to the path, unless NAME= follows it or the path without NAME= is not there.
    """
    sources: dict[str, list[str]] = {}
    unnamed = dict[str, str]()
    for given, path in _named_paths(text):
        name = given or _name_of(path)
        if first := unnamed.get(name):  # it stands first: after NAME= a comma belongs to the path
            raise UserError(f"--input ({first}) is not the only source named {name}; write NAME={first}")
        if not given:
            unnamed[name] = path
        if not re.fullmatch(r"[A-Za-z0-9_][A-Za-z0-9_.-]*", name) or name in _RESERVED:
            rule = f"must name a source with letters, digits, _ . - and not be one of {', '.join(_RESERVED)}"
            raise UserError(f"--input ({given or path}) {rule}; write NAME=PATH")
        sources.setdefault(name, []).append(path)
    return sources


def _named_paths(text: str) -> Iterator[tuple[str, str]]:
    """The names, "" where none is written, and the paths of --input."""
    for item in re.split(r",(?=[^,=/]*=)", text):
        name, equals, path = item.partition("=")
        is_named = equals and "/" not in name
        is_there = os.path.exists(os.path.expanduser(item))
        for part in [path] if is_named else [item] if is_there else item.split(","):
            if not part or (is_named and not name):
                rule = "must be [NAME=]PATH[,[NAME=]PATH…]; for example data/web,code=src"
                raise UserError(f"--input ({text}) {rule}")
            yield name if is_named else "", part


def _name_of(path: str) -> str:
    """The last folder or file of a path, in front of wildcards and without endings, as a source's name."""
    whole = os.path.abspath(os.path.expanduser(re.split(r"/?[^/]*[*?[]", path)[0]))
    last = os.path.basename(whole)
    return re.sub("[^A-Za-z0-9_.-]+", "_", last.partition(".")[0] if os.path.isfile(whole) else last)


def unique_files(found: Iterable[InputFile]) -> tuple[InputFile, ...]:
    """The files without those that an earlier path leads to as well."""
    by_real_path: dict[str, InputFile] = {}
    for file in found:
        by_real_path.setdefault(os.path.realpath(file.path), file)
    return tuple(by_real_path.values())


def find_files(
    path: str, include: Sequence[str] = (), exclude: Sequence[str] = (), output: Path | None = None
) -> list[InputFile]:
    """The files that `path` (file, folder or glob with `**`) names, in byte order of their relative names.

    Hidden files and folders and `__pycache__` are passed over, links are followed. The patterns match
    relative names, `*` crosses `/`.

    Raises:
        FileNotFoundError: nothing is there, or nothing is left of it.
        UserError: what is written to `output` would be read as input.
    """
    path = os.path.expanduser(path)
    if os.path.isfile(path):
        root, names, own = os.path.dirname(path), [os.path.basename(path)], list[str]()
    else:
        root, pattern = _root_and_pattern(path)
        names = list(filter(pattern.fullmatch, _walk(root or ".")))
        own = list(filter(pattern.fullmatch, _own_names(root or ".", output)))
    names, own = _chosen(names, include, exclude), _chosen(own, include, exclude)
    if any(name.endswith(".arrow") for name in names):
        names = [name for name in names if os.path.basename(name) not in _NOTES]
    if own:
        rule = f"must not lie where --input ({path}) is read: {own[0]} would be read as text"
        raise UserError(f"--output ({output}) {rule}; choose another folder")
    if not names:
        rule = "holds no files to read; check the folder, --include and --exclude"
        raise MissingInput(f"--input ({path}) {rule}")
    files = []
    for name in sorted(names, key=os.fsencode):
        full = os.path.join(root, name)
        stat = os.stat(full)
        files.append(InputFile(full, name, stat.st_size, stat.st_mtime_ns))
    return files


def _root_and_pattern(path: str) -> tuple[str, re.Pattern[str]]:
    """The folder to walk, and what the names below it must match; a folder that matches gives its files.

    In a glob `*` and `?` stay within a folder, `**/` crosses any number of them.
    """
    if os.path.isdir(path):
        return path, re.compile(".*", re.DOTALL)
    root = os.path.dirname(re.split(r"[*?[]", path)[0])
    if not glob.has_magic(path) or not os.path.isdir(root or "."):
        raise MissingInput(f"--input ({path}) does not exist; give a file, a folder or a quoted glob")
    wildcards = {"**/": "(?:.*/)?", "**": ".*", "*": "[^/]*", "?": "[^/]"}
    pieces = re.findall(r"\*\*/|\*\*|[*?]|\[[^]]+\]|.", path[len(root) :].lstrip("/"), re.DOTALL)
    translated = (wildcards.get(piece, piece if len(piece) > 1 else re.escape(piece)) for piece in pieces)
    return root, re.compile("".join(translated) + "(?:/.*)?")


def _chosen(names: Sequence[str], include: Sequence[str], exclude: Sequence[str]) -> list[str]:
    def matches(name: str, patterns: Sequence[str]) -> bool:
        return any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns)

    return [name for name in names if matches(name, include or ("*",)) and not matches(name, exclude)]


def _own_names(root: str, output: Path | None) -> list[str]:
    """Names below `root` of what is written to `output`, where `_walk` would find them."""
    inside = os.path.relpath(os.path.realpath(output), os.path.realpath(root)) if output else os.pardir
    folders = [] if inside == "." else inside.split("/")
    if any(_is_passed_over(folder) for folder in folders):  # ".." too
        return []
    return ["/".join([*folders, name]) for name in _WRITTEN]


def _is_passed_over(name: str) -> bool:
    return name.startswith(".") or name == "__pycache__"


def _walk(root: str) -> list[str]:
    names, seen = [], {os.path.realpath(root)}
    for folder, subfolders, files in os.walk(root, followlinks=True):
        kept = []
        for sub in sorted(subfolders):
            real = os.path.realpath(os.path.join(folder, sub))
            if not _is_passed_over(sub) and real not in seen:
                seen.add(real)
                kept.append(sub)
        subfolders[:] = kept
        for name in files:
            path = os.path.join(folder, name)
            if not name.startswith(".") and os.path.isfile(path):
                names.append(os.path.relpath(path, root))
    return names
