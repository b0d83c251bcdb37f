"""Reads the configurations of other programs as a flat list of keys; nothing in them is executed.

    YAML, TOML, JSON   nested names are joined by dots: optimizer.params.lr
    any other file     the arguments of a command in a shell script, or arguments alone

A value that only a run of the program could know, such as `$(nproc)`, is undecided.
"""

from __future__ import annotations

import re
import shlex
import tomllib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fms_fsdp.config.values import shown
from fms_fsdp.errors import MissingInput, UserError
from fms_fsdp.files import load_unique_json

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
    if Path(path).suffix.lower() == ".py":
        raise UserError(
            f"{shown(path)} is a Python file, which translate no longer reads; "
            "docs/migrate/other-frameworks.md has the main keys of nanoGPT"
        )
    kind, read = _READERS.get(Path(path).suffix.lower(), ("arguments", _read_arguments))
    try:
        found = []
        for key in read(text):
            name = key.name.replace("-", "_").lower()
            place = key.place or str(_line_of(text, name))
            found.append(Key(name, key.value, f"{path}:{place}", key.undecided))
            if len(found) > _MAX_KEYS:
                raise ValueError(f"there are more than {_MAX_KEYS:,} keys")
    except (ValueError, RecursionError, MemoryError) as error:
        if isinstance(error, UserError):
            raise
        text = shown(str(error)) or type(error).__name__
        raise UserError(f"{shown(path)} is not valid {kind}: {text}; correct the file") from None
    if found and found[0].name.startswith("config."):
        kind = "config.json"
    if kind == "arguments":  # a later one replaces an earlier one
        return kind, list({key.name: key for key in found}.values())
    for i, key in enumerate(found):
        if any(key.name == other.name for other in found[:i]):
            raise UserError(f"{key.place}: {shown(key.name)} is set twice; remove one of them")
    return kind, found


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
        elif isinstance(value, dict):  # an empty table sets nothing
            yield Key(f"{prefix}{name}", None, "")
        else:
            yield Key(f"{prefix}{name}", value, "")


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
                yield Key(key, loader.construct_object(inner, deep=True) or _plain(inner), line)

    def _plain(node: Any) -> Any:
        value = loader.construct_object(node, deep=True)
        return None if isinstance(value, dict) else value

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


_QUOTED = r"\\.|'[^']*'|\"(?:\\.|[^\"\\])*\""
_TOKEN = re.compile(rf"(?<!\S)#[^\n]*|{_QUOTED}", re.DOTALL)
_HERE_DOCUMENT = re.compile(r"(?<!<)<<(?!<)-?\s*['\"]?(\w+)")
# >log, 2> log, &>> log, <<< "text", 2>&1, but not the < of a quoted text
_REDIRECTION = r"(?<!\S)(?:\d|&)?(?:<<<|>>|>|<)(?:&\d|\s*(?:\"[^\"]*\"|'[^']*'|[^\s;&|)]+))"
_OUTSIDE_QUOTES = re.compile(
    rf"(?P<kept>{_QUOTED})|(?P<dropped>{_REDIRECTION})|(?P<end>[;)])", re.DOTALL
)
_UNKNOWN = "$..."  # a part of a value that only the shell knows
_OPENING = ("if", "for", "while", "until", "case")
_CLOSING = ("fi", "done", "esac")
_ARRAY = r"(\w+)(\+?)=\(([^()]*)\)"  # A=(--b c), A+=(--b c)
_ENDS = ("|", "||", "&", "&&", ";", ")")  # of a command


def _statements(text: str) -> Iterator[str]:
    """Yields the statements of a shell script without comments and here-documents.

    A backslash, an open quote or an open bracket continues a line.
    """
    held = ""  # lines of a statement that is not complete
    is_quoted = False
    end = ""  # the word that ends the here-document
    for line in text.splitlines():
        if end:
            if line.strip() == end:
                end = ""
            continue
        if line.lstrip().startswith("#") and not is_quoted:
            continue
        is_continued = line.endswith("\\")
        if is_continued:
            held += line[:-1] + " "
        else:
            held += line + "\n"
        bare = _TOKEN.sub("", held)
        is_quoted = '"' in bare or "'" in bare
        is_open = bare.count("(") > bare.count(")")
        if is_continued or is_quoted or is_open:
            continue
        here = _HERE_DOCUMENT.search(held)
        if here is not None:
            end = here[1]
        yield _TOKEN.sub(_without_comment, held).strip()
        held = ""
    if held.strip():
        raise ValueError(f"a quote or bracket is not closed after {shown(held.strip()[:40])}")


def _without_comment(token: re.Match[str]) -> str:
    return "" if token[0].startswith("#") else token[0]


class _Shell:
    """What a script would run, as far as its text says it.

    commands   with the variables of simple assignments replaced
    variables  name -> value. One that is set within `if`, `for`, `while` or `case` keeps its name in
               commands; if it then holds options, it is an option of its name without a known value
    """

    def __init__(self, text: str) -> None:
        self.variables = dict[str, str]()
        self.commands = list[str]()
        depth = 0  # of if, for, while and case
        for statement in _statements(text):
            for _ in range(3):  # nested substitutions
                statement = re.sub(r"\$\((?:[^()]|\([^()]*\))*\)|`[^`]*`", _UNKNOWN, statement)
            words = re.split(r"[\s;&|]+", _TOKEN.sub("", statement))
            depth += sum(word in _OPENING for word in words)
            array = re.fullmatch(r"(?:export\s+)?(\w+)(\+?)=\((.*)\)", statement, re.DOTALL)
            if array is not None:
                arrays = [array.groups()]
            elif depth:  # if …; then A+=(--b c); fi
                arrays = re.findall(_ARRAY, statement, re.DOTALL)
                statement = re.sub(_ARRAY, "", statement, flags=re.DOTALL)
            else:
                arrays = []
            for name, plus, value in arrays:
                if plus:
                    value = f"${name} {value}"
                self._assign(name, value, is_certain=depth == 0)
            if array is None:
                self._read(statement, depth)
            depth = max(0, depth - sum(word in _CLOSING for word in words))

    def expand(self, text: str) -> str:
        def value(match: re.Match[str]) -> str:
            return self.variables.get(match[1] or match[2], match[0])

        return re.sub(r"\$(?:(\w+)|\{(\w+)(?:\[[@*]\])?\})", value, text)

    def _read(self, statement: str, depth: int) -> None:
        """Reads assignments or a command; within `if`, commands may hold assignments as well."""
        statement = _OUTSIDE_QUOTES.sub(_spaced, statement)
        parts = [part for part in _words(statement) if part not in ("export", ";")]
        pairs = [re.fullmatch(r"(\w+)=(.*)", part, re.DOTALL) for part in parts]
        if not all(pairs):
            self.commands.append(self.expand(statement))
            if depth == 0:
                return
        values = dict[str, str]()
        for pair in pairs:
            if pair is not None:
                name, value = pair.groups()
                if depth and name in values:  # one of each branch
                    value = f"{values[name]} {value}"
                values[name] = value
        for name, value in values.items():
            self._assign(name, value, is_certain=depth == 0)

    def _assign(self, name: str, value: str, *, is_certain: bool) -> None:
        before = self.variables.get(name)
        if is_certain:
            self.variables[name] = self.expand(value)
            return
        appended = re.sub(rf"^\s*\$(?:{name}\b|\{{{name}(?:\[[@*]\])?\}})", "", value)
        if appended != value and "--" in value:
            options = re.findall(r"--[^\W\d][\w-]*", appended)
            added = "".join(f" {option} {_UNKNOWN}" for option in options)
            self.variables[name] = (before or "") + added
        elif "--" in value:  # options, or none
            self.variables[name] = f"--{name} {_UNKNOWN}"
        elif before is not None and not before.endswith(_UNKNOWN):
            del self.variables[name]


def _spaced(match: re.Match[str]) -> str:
    """Returns quoted text as it is, nothing for a redirection, and `;` or `)` as a word."""
    if match["kept"] is not None:
        return match["kept"]
    if match["dropped"] is not None:
        return " "
    return f" {match['end']} "


def _read_arguments(text: str) -> Iterator[Key]:
    shell = _Shell(text)
    values = list(shell.variables.values())
    calls = [call for call in map(_call, [*shell.commands, *values]) if call is not None]
    if calls:
        # `echo $CMD` has the same arguments as the command
        launcher, words = max(calls, key=lambda call: (len(call[1]), len(call[0])))
    else:
        launcher = []
        with_options = [each for each in shell.commands if re.search(r"(?<!\S)--[^\W\d]", each)]
        words = [word for each in with_options or values for word in _words(each)]
    yield from _options(launcher, "launcher.")
    yield from _options(words, "")


def _words(text: str) -> list[str]:
    try:
        return shlex.split(text.replace("\n", " "))
    except ValueError:  # an apostrophe of a message, or a quote within a variable
        return text.split()


def _call(text: str) -> tuple[list[str], list[str]] | None:
    """Returns the words before and after the Python program that a command starts, if it has options."""
    words = list[str]()
    for word in _words(text):
        if " --" in word:  # bash -c 'python x.py --a b'
            words += _words(_OUTSIDE_QUOTES.sub(_spaced, word))
        else:
            words.append(word)
    for i, word in enumerate(words):
        is_module = i > 0 and words[i - 1] == "-m" and not word.startswith("torch.")
        has_options = any(each.startswith("--") for each in words[i:])
        if has_options and (is_module or word.endswith(".py")):
            return words[:i], words[i + 1 :]
    return None


def _options(words: list[str], prefix: str) -> Iterator[Key]:
    """Yields a key for each `--name value…`, `--name=value`, `--switch`, and `-n value` of srun."""
    groups = list[list[str]]()
    for word in words:
        if re.match(r"--[^\W\d]", word) or (prefix and word in ("-n", "-N")):
            groups.append(list(word.lstrip("-").split("=", 1)))
        elif word in _ENDS:
            if not prefix:
                break
            groups.clear()  # of an earlier command in the line
        elif groups and not re.match(r"-([a-z]|-?$)", word):
            # What follows the value of a launcher's option is the program.
            if not prefix or len(groups[-1]) == 1:
                groups[-1].append(word)
    for name, *values in groups:
        hidden = [word for word in values if "$" in word]
        if hidden:
            reason = f"{shown(hidden[0])} is known only to the shell"
            yield Key(prefix + name, None, "", reason)
            continue
        value: Any = values
        if not values:
            value = True
        elif len(values) == 1:
            value = values[0]
        yield Key(prefix + name, value, "")


_READERS: dict[str, tuple[str, Callable[[str], Iterator[Key]]]] = {
    ".yaml": ("yaml", _read_yaml),
    ".yml": ("yaml", _read_yaml),
    ".toml": ("toml", _read_toml),
    ".json": ("json", _read_json),
}
