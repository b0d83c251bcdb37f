"""Reads configurations in YAML, TOML and JSON as a flat list of keys; nothing in them is executed.

Nested names are joined by dots: optimizer.params.lr. A value that only a run of the program could
know, such as `${multiply:1,2}`, is undecided.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fms_fsdp.config.values import shown
from fms_fsdp.errors import MissingInput, UserError
from fms_fsdp.files import is_file, load_unique_json

_MAX_BYTES = 2**20
_MAX_KEYS = 5000
_MAX_DEPTH = 20


@dataclass(frozen=True, eq=False)
class Key:
    """A key of the input. `undecided`: the reason why the value is not known, or ""."""

    name: str  # in lower case, words joined by "_"
    value: Any
    place: str  # file:line
    undecided: str = ""


def read_keys(path: str) -> tuple[str, list[Key]]:
    """Returns the format of a file and its keys, in their order.

    Raises:
        UserError: the file cannot be read, is malformed, or sets a key twice.
    """
    check_is_no_script(path)
    text = read_text(path)
    suffix = Path(path).suffix.lower()
    if suffix not in FORMATS:
        raise UserError(f"{shown(path)} must be YAML, TOML or JSON; name it with its suffix")
    kind, read = FORMATS[suffix]
    keys = dict[str, Key]()
    try:
        for key in read(text):
            name = key.name.replace("-", "_").lower()
            place = f"{path}:{key.place or _line_of(text, name)}"
            if name in keys:
                raise UserError(f"{place}: {shown(name)} is set twice; remove one of them")
            keys[name] = Key(name, key.value, place, key.undecided)
            if len(keys) > _MAX_KEYS:
                raise ValueError(f"there are more than {_MAX_KEYS:,} keys")
    except (ValueError, RecursionError, MemoryError) as error:
        if isinstance(error, UserError):
            raise
        reason = shown(str(error)) or type(error).__name__
        raise UserError(f"{shown(path)} is not valid {kind}: {reason}; correct the file") from None
    if any(name.startswith("config.") for name in keys):
        kind = "config.json"
    return kind, list(keys.values())


def read_text(path: str) -> str:
    """Returns the text of a configuration.

    Raises:
        UserError: the file cannot be read, is too large, or is not text.
    """
    try:
        with open(path, "rb") as file:
            content = file.read(_MAX_BYTES + 1)  # of /dev/zero too
        text = content.decode("utf-8-sig")
    except FileNotFoundError:
        raise MissingInput(f"{shown(path)} does not exist; name a configuration") from None
    except OSError as error:
        raise UserError(f"{shown(path)} cannot be read: {error.strerror}; name a file") from None
    except UnicodeDecodeError:
        raise UserError(f"{shown(path)} is not text; name the configuration itself") from None
    if len(content) > _MAX_BYTES or "\0" in text:
        raise UserError(f"{shown(path)} is not a configuration of at most 1 MiB; name another file")
    return text


def check_is_no_script(path: str) -> None:
    """Raises UserError for a shell script: its variables are known only while it runs."""
    is_script = path.endswith((".sh", ".slurm", ".sbatch"))
    if not is_script and not path.endswith(".py") and is_file(path):
        with open(path, "rb") as file:
            is_script = file.read(2) == b"#!"
    if is_script:
        raise UserError(
            f"{shown(path)} is a script; run it with `fms-fsdp translate` before its command, or with: "
            'srun() { fms-fsdp translate srun "$@"; }; export -f srun'
        )


def _line_of(text: str, name: str) -> int:
    """Returns the first line that holds the last word of a key."""
    word = re.escape(name.rpartition(".")[2]).replace("_", "[-_]")
    match = re.search(rf"(?<!\w)(?<!\w-){word}(?![\w-])", text, re.IGNORECASE)
    if match is None:
        return 1
    return 1 + text.count("\n", 0, match.start())


def _flatten(content: dict[str, Any], prefix: str = "") -> Iterator[Key]:
    if prefix.count(".") > _MAX_DEPTH:
        raise ValueError("tables are nested too deeply")
    for name, value in content.items():
        if isinstance(value, dict) and value:
            yield from _flatten(value, f"{prefix}{name}.")
        else:  # an empty table sets nothing
            yield Key(f"{prefix}{name}", None if value == {} else value, "")


def _read_toml(text: str) -> Iterator[Key]:
    yield from _flatten(tomllib.loads(text))


def _read_json(text: str) -> Iterator[Key]:
    content = load_unique_json(text)
    if not isinstance(content, dict):
        raise ValueError("it must hold an object")
    yield from _flatten(content, "config." if "model_type" in content else "")


def _read_yaml(text: str) -> Iterator[Key]:
    try:
        import yaml
    except ImportError:
        raise UserError("YAML requires the package pyyaml; run: pip install pyyaml") from None
    loader = yaml.SafeLoader(text)

    def read(node: Any, prefix: str) -> Iterator[Key]:
        if prefix.count(".") > _MAX_DEPTH:
            raise ValueError("mappings are nested too deeply")
        for name, inner in node.value:
            key = f"{prefix}{name.value}"
            line = str(name.start_mark.line + 1)
            if inner.tag.startswith("!"):
                yield Key(key, None, line, f"the tag {inner.tag} is not followed")
            elif name.tag.endswith(":merge"):
                yield Key(key, None, line, "a merge is not followed")
            elif isinstance(inner, yaml.MappingNode) and inner.value:
                yield from read(inner, f"{key}.")
            else:
                value = loader.construct_object(inner, deep=True)
                yield Key(key, None if value == {} else value, line)

    try:
        root = loader.get_single_node()
        if root is not None and not isinstance(root, yaml.MappingNode):
            raise ValueError("it must hold keys with values")
        found = list(read(root, "")) if root is not None else []
    except yaml.YAMLError as error:
        raise ValueError(str(error)) from None
    values = {key.name: key.value for key in found}
    yield from (_interpolated(key, values) for key in found)


def _interpolated(key: Key, values: dict[str, Any], depth: int = 0) -> Key:
    """Returns a key with the value of `${a.b}`, or of `${.b}` next to it."""
    if not isinstance(key.value, str) or "${" not in key.value:
        return key
    name = ""
    match = re.fullmatch(r"\$\{(\.*)([\w.]+)\}", key.value)
    if match is not None:
        dots, name = match.groups()
        if dots:  # one for the table of the key, and one for each table around it
            tables = key.name.split(".")[: -len(dots)]
            name = ".".join([*tables, name])
    if name not in values or depth > _MAX_DEPTH:
        return Key(key.name, None, key.place, f"{shown(key.value)} is not evaluated")
    found = _interpolated(Key(name, values[name], ""), values, depth + 1)
    return Key(key.name, found.value, key.place, found.undecided)


FORMATS: dict[str, tuple[str, Callable[[str], Iterator[Key]]]] = {
    ".yaml": ("yaml", _read_yaml),
    ".yml": ("yaml", _read_yaml),
    ".toml": ("toml", _read_toml),
    ".json": ("json", _read_json),
}
