"""The table of flags: each flag is one row, declared as a dataclass field.

    seq_length: int = announced_flag(4096, "number of tokens in a row", minimum=1)

A row holds all that is known of a flag. `--help`, docs/configuration.md, the checks of values, the default
run name and the rules of a resume read it. The name of the declaring function is the rule of a resume.
Standard library only.
"""

from __future__ import annotations

import dataclasses
import typing
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache, partial
from typing import Any, TypeVar

C = TypeVar("C")


@dataclass(frozen=True)
class Flag:
    """One row of the table.

    `resume`: what another value does to a run that goes on: "free", it trains the same; "announced", the new
    value takes effect and is logged; "refused". `in_name`: the default run name depends on the flag.
    `orders_data`: it decides the order of data that begin anew. `aliases`: other words for choices. `form`:
    what a text must be: "path", "folder name" or "source name"; a "text" keeps the spaces at its ends and
    its brackets. `words`: may stand in place of a number. `positional`: arguments without a name belong to
    this flag. `parse`: gets the name and the text of the flag, and raises UserError for a text without a
    meaning.
    `part`: the module of extras/ that only a run which chooses it loads, and that the flag belongs to.
    """

    default: Any
    help: str
    choices: tuple[str, ...] = ()
    words: tuple[str, ...] = ()
    aliases: Mapping[str, str] = dataclasses.field(default_factory=dict)
    minimum: float | None = None
    maximum: float | None = None
    above: float | None = None
    below: float | None = None
    form: str = ""
    resume: str = ""
    in_name: bool = False
    orders_data: bool = False
    advanced: bool = False
    positional: bool = False
    parse: Callable[[str, str], object] | None = None
    part: str = ""
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


def flag(default: Any, help: str, **rules: Any) -> Any:
    """A dataclass field that declares a flag; `rules` are fields of `Flag`."""
    rules.setdefault("in_name", rules.get("resume") in ("announced", "refused"))
    return dataclasses.field(default=default, metadata={"flag": Flag(default, help, **rules)})


free_flag = partial(flag, resume="free")
announced_flag = partial(flag, resume="announced")
refused_flag = partial(flag, resume="refused")


def _make_table(config_type: type[Any]) -> Mapping[str, Flag]:
    """Flat name → row, in the order of declaration; a field that is a dataclass itself is a section."""
    table, types = dict[str, Flag](), typing.get_type_hints(config_type)
    for field in dataclasses.fields(config_type):
        if dataclasses.is_dataclass(types[field.name]):
            rows = flag_table(types[field.name]).values()
            found = [dataclasses.replace(row, section=field.name) for row in rows]
        else:
            found = [dataclasses.replace(field.metadata["flag"], name=field.name, type=types[field.name])]
        for row in found:
            assert row.name not in table, f"flag {row.name} is declared in two sections"
            table[row.name] = row
    return table


# made once; a class can be hashed, which mypy does not see
flag_table: Callable[[type[Any]], Mapping[str, Flag]] = cache(_make_table)  # type: ignore[assignment]


def flag_values(config: Any) -> dict[str, Any]:
    """Flat name → value of every flag."""
    values = {}
    for name, row in flag_table(type(config)).items():
        values[name] = getattr(getattr(config, row.section) if row.section else config, name)
    return values


def non_defaults(config: Any) -> dict[str, Any]:
    """Flat name → value of every flag that is not at its default."""
    table = flag_table(type(config))
    return {name: value for name, value in flag_values(config).items() if value != table[name].default}


def build_config(config_type: type[C], values: Mapping[str, Any]) -> C:
    """The config that holds `values` by flat name, and defaults otherwise."""
    table, types = flag_table(config_type), typing.get_type_hints(config_type)
    sections: dict[str, dict[str, Any]] = {}
    for name, value in values.items():
        sections.setdefault(table[name].section, {})[name] = value
    fields = sections.pop("", {})
    for name, given in sections.items():
        fields[name] = types[name](**given)
    return config_type(**fields)
