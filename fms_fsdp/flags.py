"""Command line and overlay files → a typed, frozen config dataclass.

    argv ── fire (splits --name=value; text stays text) ─┐
    --config=a.toml,b.json (later wins) ─────────────────┴─ merge (flags win) ── coerce ── dataclass

`-` and `_` are equal in names. An unknown name, a value that does not fit its flag, a stray argument and a
flag given twice with two values are `UserError`s of one line. Works for `TrainConfig` (sections) and for any
flat dataclass whose fields `config.flag` declares.
"""

from __future__ import annotations

import difflib
import json
import re
import textwrap
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import groupby
from pathlib import Path
from typing import Any, Generic, TypeVar

import fire

from fms_fsdp.config import TrainConfig
from fms_fsdp.config.flag import Flag, build_config, flag_table, flag_values, non_defaults
from fms_fsdp.config.rules import refuse_idle_flags
from fms_fsdp.config.values import coerce, one_line, shown
from fms_fsdp.errors import PROGRAM, UserError, print_and_end

C = TypeVar("C")

DRY_RUN = Flag(
    False,
    "check all that a launch checks, say what it would do, and write nothing; no part of a run",
    name="dry_run",
    type=bool,
)
TRAINING = f"{PROGRAM} train" if PROGRAM else "python main_training.py"
SHIPPED = Path(__file__).parent / "configs"
_FILES = {"config", "config_dir"}  # of flags; the other names are rows of the table
FIRST_FLAGS = "model_variant data_path use_dummy_dataset seq_length batch_size num_steps learning_rate"
FIRST_FLAGS += " sharding_strategy eval_interval run_name"


@dataclass(frozen=True)
class Parsed(Generic[C]):
    """A config and the origins of its values: "flag" or the path of an overlay; a default has none.

    `dry_run`: the launch is only asked what it would do; that is no flag of a run, and no file can ask it.
    """

    config: C
    origins: Mapping[str, str]
    overridden: tuple[str, ...]
    dry_run: bool = False


def parse_flags(config_type: type[C], argv: Sequence[str], usage: str = TRAINING) -> C:
    """The config of `parse_with_origins`."""
    return parse_with_origins(config_type, argv, usage).config


def parse_with_origins(config_type: type[C], argv: Sequence[str], usage: str = TRAINING) -> Parsed[C]:
    """The config of `argv`, which is without the program's name. `--help` prints all flags and exits with 0.

    Raises:
        UserError: an unknown flag, a value that does not fit, a stray argument, an unreadable overlay.
    """
    try:
        return _parse(config_type, argv, usage)
    except UserError as error:
        raise UserError(one_line(str(error))) from error


def _parse(config_type: type[C], argv: Sequence[str], usage: str) -> Parsed[C]:
    table = flag_table(config_type)
    asks = {DRY_RUN.name: DRY_RUN} if config_type is TrainConfig else {}
    typed = {**table, **asks}  # what the command line may hold
    texts, bare = _split(argv, next((row.name for row in table.values() if row.positional), ""))
    if asked := texts.get("help", texts.get("h")):
        print_and_end(help_text(config_type, usage, every="all" in asked))
    known = typed.keys() | _FILES
    if unknown := [_is_no_flag(name, typed, "--" + name) for name in texts if name not in known]:
        raise UserError(". ".join(unknown))
    for name in bare:
        if name not in typed or typed[name].kind is not bool:
            raise UserError(f"--{name} needs a value; write --{name}=VALUE (--help=all explains the flag)")
    given = {name: _agreed_text(name, same, typed) for name, same in texts.items()}
    overlays, folder = given.pop("config", ""), given.pop("config_dir", "")
    dry_run = bool(asks and coerce(DRY_RUN, given.pop(DRY_RUN.name, False)))
    if folder and not overlays:
        raise UserError(f"--config_dir ({folder}) is only used to find --config; add --config=NAME")
    values: dict[str, Any] = {}
    origins: dict[str, str] = {}
    overridden: list[str] = []
    layers: list[tuple[str, Mapping[str, Any]]] = []
    for name in overlays.split(",") if overlays else ():
        path = _find_overlay(name, folder)
        layers.append((str(path), _read_overlay(path, table)))
    for origin, content in [*layers, ("flag", given)]:
        for name, value in content.items():
            if name in values:
                by = "the flag" if origin == "flag" else origin
                overridden.append(f"{name}: {by} replaces {origins[name]}")
            values[name], origins[name] = value, origin
    for name, value in values.items():
        try:
            values[name] = coerce(table[name], value)
        except UserError as error:
            raise error if origins[name] == "flag" else UserError(f"{origins[name]}: {error}") from None
    config = build_config(config_type, values)
    if isinstance(config, TrainConfig):
        refuse_idle_flags(config, origins)
    return Parsed(config, origins, tuple(overridden), dry_run)


def _split(argv: Sequence[str], positional: str) -> tuple[dict[str, list[str]], list[str]]:
    """Name → texts of each `--name=value` or `--name value`, and the names that came without a value.

    `--name` alone is "True", `--noname` "False". Arguments without a name make up the list of the flag
    `positional`, if there is one.
    """
    caught: dict[str, list[str]] = {}
    strays: list[str] = []
    bare: list[str] = []

    @fire.decorators.SetParseFn(str)  # type: ignore[untyped-decorator]
    def catch(*stray: str, **named: str) -> None:
        strays.extend(stray)
        for name, text in named.items():
            caught.setdefault(name.replace("-", "_"), []).append(text)
            if len(group) == 1 and "=" not in group[0]:
                bare.append(name.replace("-", "_"))

    groups: list[list[str]] = [[]]  # fire gets one flag at a time: it would keep the last of two equal names
    for argument in argv:
        if re.match(r"--?[^\W\d]", argument):
            groups.append([])
        elif argument.startswith("--") or argument in ("-", "-="):
            raise UserError(f"argument ({shown(argument)}) is not a flag; write --name=value")
        groups[-1].append(argument)
    for group in filter(None, groups):
        fire.Fire(catch, command=group, name="flags")
    if strays and not positional:
        raise UserError(f"argument ({shown(strays[0])}) is not a flag; write --name=value")
    if strays:
        caught.setdefault(positional, []).append(",".join(strays))
    return caught, bare


def _agreed_text(name: str, texts: Sequence[str], table: Mapping[str, Flag]) -> str:
    """The text of a flag that may be given more than once, but only with one value."""
    values = [coerce(table[name], text) if name in table else text for text in texts]
    for text, value in zip(texts, values, strict=True):
        if value != values[0]:
            raise UserError(f"--{name} ({shown(texts[0])}) is also given as ({shown(text)}); leave one out")
    return texts[0]


def _is_no_flag(name: str, table: Mapping[str, Flag], quoted: str) -> str:
    """A sentence on a name that is no flag: the flag here for a flag of another program, or a similar
    flag."""
    answer = _other_names().get(name.rpartition(".")[2]) if "learning_rate" in table else None
    near = difflib.get_close_matches(name[:100], table, n=1, cutoff=0.75)
    hint = answer or (f"did you mean --{near[0]}?" if near else "--help=all lists all flags")
    return f"{shown(quoted)} is not a flag; {hint}"


@cache
def _other_names() -> dict[str, str]:
    """Flag of another program → the flag here, or why there is none."""
    content: dict[str, dict[str, Any]]
    content = tomllib.loads((Path(__file__).parent / "other_names.toml").read_text())
    here = {name: f"write {flag}" for flag, names in content["here"].items() for name in names}
    return here | content["gone"]


def _find_overlay(name: str, folder: str) -> Path:
    """The file of an overlay: the path as given, a file in --config_dir, or a shipped overlay."""
    for path in (Path(folder, name), Path(folder, f"{name}.toml"), SHIPPED / f"{name}.toml"):
        try:
            if path.is_file():
                return path
        except OSError as error:
            raise UserError(f"--config ({shown(name)}) cannot be read: {error.strerror}") from None
    shipped = ", ".join(sorted(path.stem for path in SHIPPED.glob("*.toml")))
    where = f" in {shown(folder)}" if folder else ""
    raise UserError(f"--config ({shown(name)}) is not a file{where}; shipped overlays: {shipped}")


def _read_overlay(path: Path, table: Mapping[str, Flag]) -> dict[str, Any]:
    """Flat name → value of a TOML or JSON overlay, whose tables are sections; leaves out `resolved`."""
    try:
        content = json.loads(path.read_text()) if path.suffix == ".json" else tomllib.loads(path.read_text())
    except (ValueError, OSError, RecursionError) as error:
        raise UserError(f"--config ({path}) cannot be read: {shown(str(error))}") from None
    if not isinstance(content, dict):
        raise UserError(f"--config ({path}) must hold flags by name, not a {type(content).__name__}")
    if isinstance(content.get("resolved"), dict):
        del content["resolved"]
    flat: dict[str, Any] = {}
    for section, name, value in _entries(content):
        quoted = f"{path}: [{section}] {name}" if section else f"{path}: {name}"
        sections = sorted({row.section for row in table.values()})
        if section and section not in sections:
            raise UserError(f"{path}: the table [{section}] is no section; sections: {', '.join(sections)}")
        if name not in table:
            raise UserError(_is_no_flag(name, table, quoted))
        if section and table[name].section != section:
            raise UserError(f"{quoted} belongs to the table [{table[name].section}]; move the flag there")
        if name in flat and flat[name] != value:
            raise UserError(f"{path}: {name} ({flat[name]}) is also given as ({value}); leave one out")
        flat[name] = value
    return flat


def _entries(content: Mapping[str, Any]) -> Iterator[tuple[str, str, Any]]:
    """Section, name and value of each flag in an overlay; the section of a flag outside tables is ""."""
    for key, value in content.items():
        section, flags = (key, value) if isinstance(value, dict) else ("", {key: value})
        for name, inner in flags.items():
            yield section, name.replace("-", "_"), inner


def sections_of(config_type: type[Any]) -> Iterator[tuple[str, list[Flag]]]:
    """Each section with the rows of the section."""
    for section, rows in groupby(flag_table(config_type).values(), lambda row: row.section):
        yield section, list(rows)


def type_name(row: Flag) -> str:
    """The type of a flag in the words of the help."""
    others = [*row.words, *["none"] * row.is_optional]
    return " or ".join([f"{row.kind.__name__}{',…' if row.is_list else ''}", *others])


def shown_value(value: Any) -> str:
    """A value in the form of the command line."""
    if isinstance(value, tuple):
        return ",".join(map(str, value)) or "empty"
    return "empty" if value == "" else str(value)


def of_part(row: Flag) -> str:
    """The optional part that a flag belongs to, in brackets; "" for most flags."""
    return f" (part: {row.part})" if row.part else ""


def describe_changes(parsed: Parsed[Any]) -> str:
    """The values that are not defaults, as flags in lines of 110 characters."""
    changed = non_defaults(parsed.config).items()
    text = " ".join(["flags:", *(f"--{name}={shown_value(value)}" for name, value in changed)])
    return textwrap.fill(text, 110, subsequent_indent=" " * 7, break_long_words=False, break_on_hyphens=False)


def describe_flags(parsed: Parsed[Any]) -> str:
    """The config by section. `*` marks a value that is not the default; the origin of the value follows."""
    lines, values, changed = [], flag_values(parsed.config), non_defaults(parsed.config)
    for section, rows in sections_of(type(parsed.config)):
        lines.append(f"[{section}]")
        for row in rows:
            ending = f"  ({parsed.origins[row.name]})" if row.name in changed else ""
            lines.append(f"  {'*' if ending else ' '} {row.name} = {shown_value(values[row.name])}{ending}")
    return "\n".join([*lines, *(f"overridden: {item}" for item in parsed.overridden)])


def help_text(config_type: type[Any], usage: str, *, every: bool) -> str:
    """The flags by section, with type, default, meaning and choices: of a training the first ones, or `every`
    one."""
    lines = [f"usage: {usage} [--config=a.toml,b.toml] [--config_dir=DIR] [--flag=value …]"]
    first = FIRST_FLAGS.split() if config_type is TrainConfig and not every else ()
    for section, rows in sections_of(config_type):
        lines += [f"\n{section}"] if section and not first else []
        for row in rows:
            if first and row.name not in first:
                continue
            choices = f" [{'|'.join(row.choices)}]" if row.choices else ""
            lines.append(f"  --{row.name} ({type_name(row)}, default {shown_value(row.default)}){choices}")
            lines.append(f"      {row.help}{' (advanced)' if row.advanced else ''}{of_part(row)}")
    if first:
        lines.append(
            "\n--help=all lists every flag, --list_variants the models, --rules what is refused, "
            "--layouts what works with which axis; --dry_run checks a launch and writes nothing"
        )
    return "\n".join(lines)
