"""Declares flags as dataclass fields, one row per flag, and converts texts to their types.

    seq_length: int = fixed_flag(4096, min=1, orders_data=True)
    \"\"\"Tokens per sequence, the context length of training.\"\"\"

The row and its docstring hold everything about a flag: --help, docs/reference/flags.md, the checks
of values, the default run name and the resume rules read them.
"""

from __future__ import annotations

import ast
import dataclasses
import inspect
import os
import re
import sys
import textwrap
import typing
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, partial
from itertools import pairwise
from typing import Any, TypeVar

from fms_fsdp.config.values import (
    joined,
    must_be_one_of,
    parse_float,
    parse_int,
    shown,
)
from fms_fsdp.errors import UserError

C = TypeVar("C")

_LARGEST = {int: 10**15, float: 1e30}  # of a number whose row has no `max`
_MAX_TEXT = 1024  # characters
# forbidden in every text: control characters other than tabs and line ends
_UNDECODED = re.compile("[\ud800-\udfff]")
_CONTROLS = re.compile("[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f]")
_BOOLS = dict.fromkeys(("true", "1", "yes", "on"), True)
_BOOLS |= dict.fromkeys(("false", "0", "no", "off"), False)
_EXAMPLES = {
    int: "an integer such as 4096, 5_000_000, 2M or 4Ki",
    float: "a number such as 0.1 or 3e-4",
}
_PATTERNS = {
    "folder name": (r"(?!\.{1,2}$)[^/]{0,200}", "must be a name of at most 200 characters, no '/'"),
    "source name": (r"(?!/)(?!(.*/)?\.\.(/|$)).*", "must be the name of a subfolder, without '..'"),
    "module:function": (
        r"([^\W\d]\w*(\.[^\W\d]\w*)*:[^\W\d]\w*)?",
        "must be module:function, which Python can import",
    ),
    "key=value": (r"[^=]*=.*", "must be key=value; separate several by commas"),
}


@dataclass(frozen=True)
class Flag:
    """One row of the table of flags.

    choices      words, separated by spaces; `aliases` are other words for them
    words        words that may replace a number, separated by spaces
    form         "path", "text" (kept verbatim), "text or file", or a key of `_PATTERNS`
    parse        called with the flag's name and text; raises UserError for an invalid text
    needs        the flag without which this one has no effect: "a" that is set, or "a=x"; a section
                 whose flags have more conditions has a method `without_effect`
    resume       effect of another value in a resumed run: "free" (none on training), "logged" (the
                 new value is used, and logged) or "fixed" (an error)
    in_name      the default run name depends on the flag; by default of "logged" and "fixed" ones
    orders_data  the flag decides the order of data that starts from scratch
    positional   arguments without a name belong to this flag
    required     the command does not run without it; --help says so
    help         replaces the docstring
    """

    default: Any
    help: str = ""
    choices: tuple[str, ...] = ()
    aliases: Mapping[str, str] = dataclasses.field(default_factory=dict)
    words: tuple[str, ...] = ()
    min: float | None = None
    max: float | None = None
    above: float | None = None
    below: float | None = None
    form: str = ""
    parse: Callable[[str, str], object] | None = None
    needs: str = ""
    resume: str = "free"
    in_name: bool = False
    orders_data: bool = False
    advanced: bool = False
    positional: bool = False
    required: bool = False
    name: str = ""
    section: str = ""
    type: Any = None

    @property
    def is_optional(self) -> bool:
        return type(None) in typing.get_args(self.type)

    @property
    def is_list(self) -> bool:
        return typing.get_origin(self.type) is tuple

    @property
    def kind(self) -> type[int | float | bool | str]:
        """The type of one value, without `| None` and without the tuple."""
        kind: type[int | float | bool | str] = (typing.get_args(self.type) or (self.type,))[0]
        return kind


@dataclass(frozen=True)
class WithoutEffect:
    """Flags that have no effect.

    names        the flags
    condition    after "has no effect"
    fix          after "remove --NAME or"
    others       the flags of the condition
    """

    names: tuple[str, ...]
    condition: str
    fix: str
    others: tuple[str, ...]


def flag(default: Any, help: str = "", **row: Any) -> Any:
    """Declares a flag as a dataclass field; `row` holds other fields of `Flag`."""
    for name in ("choices", "words"):
        if isinstance(row.get(name), str):
            row[name] = tuple(row[name].split())
    row.setdefault("in_name", row.get("resume", "free") != "free")
    return dataclasses.field(default=default, metadata={"flag": Flag(default, help, **row)})


logged_flag = partial(flag, resume="logged")
fixed_flag = partial(flag, resume="fixed")


def _make_table(config_type: type[Any]) -> Mapping[str, Flag]:
    """Returns flat name -> row in order of declaration; a field that is a dataclass is a section."""
    table = dict[str, Flag]()
    types = typing.get_type_hints(config_type)
    for field in dataclasses.fields(config_type):
        kind = types[field.name]
        if dataclasses.is_dataclass(kind):
            rows = flag_table(typing.cast(type[Any], kind)).values()
            found = [dataclasses.replace(row, section=field.name) for row in rows]
        else:
            found = [dataclasses.replace(field.metadata["flag"], name=field.name, type=kind)]
        for row in found:
            assert row.name not in table, f"flag {row.name} is declared in two sections"
            table[row.name] = row
    return table


# mypy does not see that a class is hashable
flag_table: Callable[[type[Any]], Mapping[str, Flag]] = cache(_make_table)  # type: ignore[assignment]


def help_texts(config_type: type[Any]) -> dict[str, str]:
    """Returns flat name -> help: the docstring below the field, read from the source file."""
    texts = dict[str, str]()
    for kind in typing.get_type_hints(config_type).values():
        if dataclasses.is_dataclass(kind):
            texts |= help_texts(typing.cast(type[Any], kind))
    for base in filter(dataclasses.is_dataclass, reversed(config_type.__mro__)):
        declaration = ast.parse(textwrap.dedent(inspect.getsource(base))).body[0]
        assert isinstance(declaration, ast.ClassDef)
        for field, below in pairwise(declaration.body):
            match field, below:
                case (
                    ast.AnnAssign(target=ast.Name(id=name)),
                    ast.Expr(value=ast.Constant(value=str(doc))),
                ):
                    texts[name] = " ".join(doc.split()).removesuffix(".")
    return texts | {row.name: row.help for row in flag_table(config_type).values() if row.help}


def flag_values(config: Any) -> dict[str, Any]:
    """Returns flat name -> value of every flag."""
    values = {}
    for name, row in flag_table(type(config)).items():
        section = getattr(config, row.section) if row.section else config
        values[name] = getattr(section, name)
    return values


def non_defaults(config: Any) -> dict[str, Any]:
    """Returns flat name -> value of every flag that differs from its default."""
    table = flag_table(type(config))
    return {name: v for name, v in flag_values(config).items() if v != table[name].default}


def build_config(config_type: type[C], values: Mapping[str, Any]) -> C:
    """Builds the config with `values` by flat name, and defaults otherwise."""
    table = flag_table(config_type)
    types = typing.get_type_hints(config_type)
    sections: dict[str, dict[str, Any]] = {}
    for name, value in values.items():
        sections.setdefault(table[name].section, {})[name] = value
    fields = sections.pop("", {})
    for name, own in sections.items():
        fields[name] = types[name](**own)
    return config_type(**fields)


def only_one(config: Any, *names: str) -> None:
    """Raises UserError if more than one of these flags differs from its default."""
    given = [name for name in names if name in non_defaults(config)]
    if len(given) > 1:
        first, second = given[:2]
        raise UserError(
            f"--{first} and --{second} cannot be used together; remove --{first} or --{second}"
        )


def unused_flags(config: Any) -> Iterator[tuple[Flag, str, tuple[str, ...]]]:
    """Yields each changed flag without effect: its row, an error text, and the flags of the reason."""
    table = flag_table(type(config))
    changed = non_defaults(config)
    for each in _without_effect(config):
        for name in each.names:
            if name in changed:
                value = shown(joined(changed[name]))
                text = f"--{name}={value} has no effect {each.condition}; remove --{name} or {each.fix}"
                yield table[name], text, each.others


def _without_effect(config: Any) -> Iterator[WithoutEffect]:
    values = flag_values(config)
    changed = non_defaults(config)
    for name, row in flag_table(type(config)).items():
        if not row.needs:
            continue
        other, _, wanted = row.needs.partition("=")
        assert other in values, f"the flag {name} needs {other}, which is not a flag"
        is_met = other in changed and bool(values[other])
        if wanted:
            is_met = wanted in map(str, _as_tuple(values[other]))
        if not is_met:
            yield WithoutEffect((name,), unmet(row), f"set --{row.needs}", (other,))
    sections = [getattr(config, field.name) for field in dataclasses.fields(config)]
    for part in (config, *sections):
        if hasattr(part, "without_effect"):
            yield from part.without_effect()


def unmet(row: Flag) -> str:
    """Returns the condition under which the flag of a row has no effect."""
    return f"without --{row.needs}"


def without_all(names: Sequence[str]) -> str:
    """Returns the condition that none of these flags is set."""
    return f"without --{' or --'.join(names)}"


def _as_tuple(value: Any) -> tuple[Any, ...]:
    return value if isinstance(value, tuple) else (value,)


def coerce(row: Flag, value: Any) -> Any:
    """Converts a text, or a value from TOML or JSON, to the type of the flag.

    Raises:
        UserError: the value does not fit the type, range, choices or form.
    """
    word = value.lower() if isinstance(value, str) else value
    if row.is_optional and word in ("", "none", "null", None) and word not in row.choices:
        return None  # `none` can be a choice: --sharding_strategy=none
    if not row.is_list:
        return _coerce_one(row, value)
    if isinstance(value, str):
        items = _split_items(row, value)
    elif isinstance(value, list | tuple):
        items = list(value)
    else:
        items = [value]
    return tuple(_coerce_one(row, item) for item in items)


def _split_items(row: Flag, value: str) -> list[str]:
    """Returns the items of a list; within a text, \\, is a comma, as `typed` writes it."""
    if row.form.startswith("text"):
        items = [part.replace(r"\,", ",") for part in re.split(r"(?<!\\),", value)]
        is_empty = value == ""
        has_gap = "" in items
    else:
        value = value.strip("[]() ")
        items = value.split(",")
        is_empty = value == ""
        has_gap = any(not item.strip() for item in items)
    if is_empty:
        return []
    if has_gap:
        raise UserError(f"--{row.name}={shown(value)} must not have an empty item; write a,b")
    return items


def _coerce_one(row: Flag, value: Any) -> Any:
    if not isinstance(value, str | bool | int | float):
        kinds = f"{row.kind.__name__}, not {type(value).__name__}"
        raise UserError(f"--{row.name} must be one value of type {kinds}")
    text = str(value)
    if isinstance(value, bool):
        text = text.lower()
    if not row.form.startswith("text"):
        text = text.strip()
    quoted = f"--{row.name.rstrip('_')}={shown(text)}"
    if row.kind is bool:
        if text.lower() not in _BOOLS:
            raise UserError(f"{quoted} must be true or false")
        return _BOOLS[text.lower()]
    if text.lower() in row.words:
        return text.lower()
    if row.kind is str:
        return _coerce_text(row, text, quoted)
    return _coerce_number(row, text, quoted)


def _coerce_number(row: Flag, text: str, quoted: str) -> int | float:
    number = parse_int(text) if row.kind is int else parse_float(text)
    if number is None:
        raise UserError(f"{quoted} must be {' or '.join([_EXAMPLES[row.kind], *row.words])}")
    largest = _LARGEST[row.kind] if row.max is None else row.max
    rule = ""
    if row.min is not None and number < row.min:
        rule = f"at least {_bound(row.min)}"
    elif row.above is not None and number <= row.above:
        rule = f"above {_bound(row.above)}"
    elif row.below is not None and number >= row.below:
        rule = f"below {_bound(row.below)}"
    elif number > largest:
        rule = f"at most {_bound(largest)}"
    elif number < -largest:
        rule = f"at least {_bound(-largest)}"
    if rule:
        raise UserError(f"{quoted} must be {rule}")
    return number


def _bound(value: float) -> str:
    return f"{value:,}" if isinstance(value, int) else f"{value:g}"


def _coerce_text(row: Flag, text: str, quoted: str) -> str:
    is_verbatim = row.form.startswith("text")
    if _UNDECODED.search(text):  # Python passes bytes that it cannot decode as surrogates
        raise UserError(
            f"{quoted} must be text in the encoding of the locale ({sys.getfilesystemencoding()}); set "
            "LC_ALL=C.UTF-8, or rename what it names"
        )
    is_clean = not _CONTROLS.search(text) if is_verbatim else text.isprintable()
    if not is_clean:
        raise UserError(f"{quoted} must not contain control characters; remove them")
    if len(text) > _MAX_TEXT:
        raise UserError(f"{quoted} must have at most {_MAX_TEXT} characters; shorten it")
    if row.form and not is_verbatim and any(len(part.encode()) > 255 for part in text.split("/")):
        raise UserError(f"{quoted} must not contain a name of more than 255 bytes; shorten it")
    if row.choices and not (row.form == "module:function" and ":" in text):
        text = row.aliases.get(text.lower(), text).lower()
        if text not in row.choices:
            raise UserError(f"{quoted} {must_be_one_of(row.choices, text, cutoff=0.4)}")
    elif row.form in _PATTERNS:
        pattern, rule = _PATTERNS[row.form]
        if not re.fullmatch(pattern, text):
            raise UserError(f"{quoted} {rule}")
    if row.form in ("path", "text or file"):
        text = _expand_path(text, quoted, may_be_text=row.form != "path")
    if row.parse is not None:
        row.parse(row.name, text)
    return text


def _expand_path(text: str, quoted: str, *, may_be_text: bool) -> str:
    """Returns a path with `~` expanded; an address such as s3://… is unchanged."""
    expanded = os.path.expanduser(text)
    if may_be_text and not os.path.isfile(expanded):
        return text
    if may_be_text:
        return expanded
    if "://" in text:
        return text
    variable = re.search(r"\$\w+|\$\{\w+\}", text)
    if variable and not os.path.lexists(expanded):
        raise UserError(
            f"{quoted} contains {variable[0]}, which the shell has not expanded; write the path"
        )
    return expanded
