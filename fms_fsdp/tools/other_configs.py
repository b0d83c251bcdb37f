"""Reads configurations in YAML, TOML and JSON as a flat list of keys; nothing in them is executed.

Nested names are joined by dots: optimizer.params.lr. A value that only a run of the program could
know, such as `${multiply:1,2}`, is undecided.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from fms_fsdp.config.values import shown
from fms_fsdp.errors import MissingInput, UserError
from fms_fsdp.files import is_file, load_unique_json

FORMATS = {".yaml": "yaml", ".yml": "yaml", ".toml": "toml", ".json": "json"}
_MAX_BYTES = 2**20
_MAX_KEYS = 5000
_MAX_DEPTH = 20


@dataclass(frozen=True, eq=False)
class Key:
    """A key of the input. `undecided`: the reason why the value is not known, or ""."""

    name: str  # in lower case, words joined by "_"
    value: Any
    place: str  # file:line, or the program of a command
    undecided: str = ""


def read_keys(path: str) -> tuple[str, list[Key]]:
    """Returns the format of a file and its keys, in their order.

    Raises:
        UserError: the file cannot be read, is malformed, or sets a key twice.
    """
    check_is_no_script(path)
    kind = FORMATS.get(Path(path).suffix.lower())
    if kind is None:
        raise UserError(f"{shown(path)} must be YAML, TOML or JSON; name it with its suffix")
    text = read_text(path)
    keys = dict[str, Key]()
    try:
        content = _parse(kind, text)
        for name, value in _flatten(content):
            place = f"{path}:{_line_of(text, name)}"
            if name in keys:
                raise ValueError(f"{name} is set twice")
            reason = ""
            if isinstance(value, _Unread):
                reason = value.reason
            keys[name] = Key(name, None if reason else value, place, reason)
            if len(keys) > _MAX_KEYS:
                raise ValueError(f"there are more than {_MAX_KEYS:,} keys")
    except (ValueError, RecursionError, MemoryError) as error:
        if isinstance(error, UserError):
            raise
        text = shown(str(error)) or type(error).__name__
        raise UserError(f"{shown(path)} is not valid {kind}: {text}; correct the file") from None
    if "model_type" in content:
        kind = "config.json"
        keys = {
            f"config.{key.name}": replace(key, name=f"config.{key.name}") for key in keys.values()
        }
    return kind, [_follow(key, keys) for key in keys.values()]


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


def _flatten(content: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    if prefix.count(".") > _MAX_DEPTH:
        raise ValueError("tables are nested too deeply")
    for key, value in content.items():
        name = prefix + str(key).replace("-", "_").lower()
        if isinstance(value, dict) and value:
            yield from _flatten(value, f"{name}.")
        else:  # an empty table sets nothing
            yield name, None if value == {} else value


@dataclass
class _Unread:
    """A value that only a run of the program could know."""

    reason: str


def _parse(kind: str, text: str) -> dict[str, Any]:
    match kind:
        case "toml":
            content = tomllib.loads(text)
        case "json":
            content = load_unique_json(text)
        case _:
            content = _load_yaml(text) or {}
    if not isinstance(content, dict):
        raise ValueError("it must hold keys with values")
    return content


def _load_yaml(text: str) -> Any:
    try:
        import yaml
    except ImportError:
        raise UserError("YAML requires the package pyyaml; run: pip install pyyaml") from None

    class Loader(yaml.SafeLoader):  # type: ignore[misc]
        pass

    def read_mapping(loader: Loader, node: Any) -> dict[Any, Any]:
        names = [key.value for key, _ in node.value]
        for name in set(names):
            names.remove(name)
        if names:
            raise ValueError(f"{names[0]} is set twice")
        loader.flatten_mapping(node)  # follows <<
        return dict(loader.construct_pairs(node, deep=True))

    Loader.add_constructor("tag:yaml.org,2002:map", read_mapping)
    Loader.add_multi_constructor("!", lambda _, tag, __: _Unread(f"the tag !{tag} is not followed"))
    try:
        return yaml.load(text, Loader)
    except yaml.YAMLError as error:
        raise ValueError(str(error)) from None


def _follow(key: Key, keys: dict[str, Key], depth: int = 0) -> Key:
    """Returns a key with the value of `${a.b}`, or of `${.b}` next to it."""
    if not isinstance(key.value, str) or "${" not in key.value:
        return key
    match = re.fullmatch(r"\$\{(\.*)([\w.]+)\}", key.value)
    name = ""
    if match is not None:
        dots, name = match.groups()
        if dots:  # one for the table of the key, and one for each table around it
            name = ".".join([*key.name.split(".")[: -len(dots)], name])
    if name not in keys or depth > _MAX_DEPTH:
        return replace(key, value=None, undecided=f"{shown(key.value)} is not evaluated")
    found = _follow(keys[name], keys, depth + 1)
    return replace(key, value=found.value, undecided=found.undecided)
