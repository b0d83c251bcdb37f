"""Command line and overlay files → a typed, frozen config dataclass.

    argv ── fire (splits --name=value; text stays text) ─┐
    --config=a.toml,b.json (later wins) ─────────────────┴─ merge (flags win) ── coerce ── dataclass

`-` and `_` are equal in names. An unknown name, a value that does not fit its flag, a stray argument and a
flag given twice with two values are `ValueError`s of one line. Works for `TrainConfig` (sections) and for any
flat dataclass whose fields `config.flag` declares. `python -m fms_fsdp.flags` prints docs/configuration.md.
"""

from __future__ import annotations

import difflib
import inspect
import json
import os
import re
import tomllib
import typing
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any, Generic, TypeVar

import fire

from fms_fsdp.config import TrainConfig
from fms_fsdp.config.effects import refuse_idle_flags
from fms_fsdp.config.flag import Flag, build_config, flag_table, flag_values
from fms_fsdp.config.values import coerce, one_line, shown
from fms_fsdp.errors import printing

C = TypeVar("C")

SHIPPED = Path(__file__).parent / "configs"


@dataclass(frozen=True)
class Parsed(Generic[C]):
    """A config and the origins of its values: "flag" or the path of an overlay; a default has none."""

    config: C
    origins: Mapping[str, str]
    overridden: tuple[str, ...]


def parse_flags(config_type: type[C], argv: Sequence[str], usage: str = "python main_training.py") -> C:
    """The config of `parse_with_origins`."""
    return parse_with_origins(config_type, argv, usage).config


def parse_with_origins(
    config_type: type[C], argv: Sequence[str], usage: str = "python main_training.py"
) -> Parsed[C]:
    """The config of `argv`, which is without the program's name. `--help` prints all flags and exits with 0.

    Raises:
        ValueError: an unknown flag, a value that does not fit, a stray argument, an unreadable overlay.
    """
    try:
        return _parse(config_type, argv, usage)
    except ValueError as error:
        raise ValueError(one_line(str(error))) from error


def _parse(config_type: type[C], argv: Sequence[str], usage: str) -> Parsed[C]:
    table = flag_table(config_type)
    texts = _split(argv, next((row.name for row in table.values() if row.positional), ""))
    if texts.keys() & {"help", "h"}:
        if os.environ.get("RANK", "0") == "0":
            with printing():
                print(help_text(config_type, usage))
        raise SystemExit(0)
    given = {name: _agreed_text(name, same, table) for name, same in texts.items()}
    overlays, folder = given.pop("config", ""), given.pop("config_dir", "")
    if folder and not overlays:
        raise ValueError(f"--config_dir ({folder}) is only used to find --config; add --config=NAME")
    values: dict[str, Any] = {}
    origins: dict[str, str] = {}
    overridden: list[str] = []
    for overlay in overlays.split(",") if overlays else ():
        path = _find_overlay(overlay, folder)
        for name, value in _read_overlay(path, table).items():
            if name in values:
                overridden.append(f"{name}: {path} replaces {origins[name]}")
            values[name], origins[name] = value, str(path)
    for name, text in given.items():
        _check_known(name, table, "--" + name)
        if name in values:
            overridden.append(f"{name}: the flag replaces {origins[name]}")
        values[name], origins[name] = text, "flag"
    for name, value in values.items():
        try:
            values[name] = coerce(table[name], value)
        except ValueError as error:
            raise error if origins[name] == "flag" else ValueError(f"{origins[name]}: {error}") from None
    config = build_config(config_type, values)
    if isinstance(config, TrainConfig):
        refuse_idle_flags(config, origins)
    return Parsed(config, origins, tuple(overridden))


def _split(argv: Sequence[str], positional: str) -> dict[str, list[str]]:
    """Name → texts of each `--name=value` or `--name value`. `--name` alone is "True", `--noname` "False".

    Arguments without a name make up the list of the flag `positional`, if there is one.
    """
    caught: dict[str, list[str]] = {}
    strays: list[str] = []

    @fire.decorators.SetParseFn(str)  # type: ignore[untyped-decorator]
    def catch(*stray: str, **named: str) -> None:
        strays.extend(stray)
        for name, text in named.items():
            caught.setdefault(name.replace("-", "_"), []).append(text)

    groups: list[list[str]] = [[]]  # fire gets one flag at a time: it would keep the last of two equal names
    for argument in argv:
        if re.match(r"--?[^\W\d]", argument):
            groups.append([])
        elif argument.startswith("--") or argument in ("-", "-="):
            raise ValueError(f"argument ({shown(argument)}) is not a flag; write --name=value")
        groups[-1].append(argument)
    for group in filter(None, groups):
        fire.Fire(catch, command=group, name="flags")
    if strays and not positional:
        raise ValueError(f"argument ({shown(strays[0])}) is not a flag; write --name=value")
    if strays:
        caught.setdefault(positional, []).append(",".join(strays))
    return caught


def _agreed_text(name: str, texts: Sequence[str], table: Mapping[str, Flag]) -> str:
    """The text of a flag that may be given more than once, but only with one value."""
    values = [coerce(table[name], text) if name in table else text for text in texts]
    for text, value in zip(texts, values, strict=True):
        if value != values[0]:
            raise ValueError(
                f"--{name} ({shown(texts[0])}) is also given as ({shown(text)}); leave one of them out"
            )
    return texts[0]


def _check_known(name: str, table: Mapping[str, Flag], quoted: str) -> None:
    if name not in table:
        near = difflib.get_close_matches(name[:100], table, n=1, cutoff=0.5)
        hint = f"did you mean --{near[0]}?" if near else "--help lists all flags"
        raise ValueError(f"{shown(quoted)} is not a flag; {hint}")


def _find_overlay(name: str, folder: str) -> Path:
    """The file of an overlay: the path as given, a file in --config_dir, or a shipped overlay."""
    for path in (Path(folder, name), Path(folder, f"{name}.toml"), SHIPPED / f"{name}.toml"):
        try:
            if path.is_file():
                return path
        except OSError as error:
            raise ValueError(f"--config ({shown(name)}) cannot be read: {error.strerror}") from None
    shipped = ", ".join(sorted(path.stem for path in SHIPPED.glob("*.toml")))
    where = f" in {shown(folder)}" if folder else ""
    raise ValueError(f"--config ({shown(name)}) is not a file{where}; shipped overlays: {shipped}")


def _read_overlay(path: Path, table: Mapping[str, Flag]) -> dict[str, Any]:
    """Flat name → value of a TOML or JSON overlay, whose tables are sections; leaves out `resolved`."""
    try:
        content = json.loads(path.read_text()) if path.suffix == ".json" else tomllib.loads(path.read_text())
    except (ValueError, OSError, RecursionError) as error:
        raise ValueError(f"--config ({path}) cannot be read: {shown(str(error))}") from None
    if not isinstance(content, dict):
        raise ValueError(f"--config ({path}) must hold flags by name, not a {type(content).__name__}")
    if isinstance(content.get("resolved"), dict):
        del content["resolved"]
    flat: dict[str, Any] = {}
    for section, name, value in _entries(content):
        quoted = f"{path}: [{section}] {name}" if section else f"{path}: {name}"
        sections = sorted({row.section for row in table.values()})
        if section and section not in sections:
            raise ValueError(
                f"{path}: the table [{section}] is not a section; sections: {', '.join(sections)}"
            )
        _check_known(name, table, quoted)
        if section and table[name].section != section:
            raise ValueError(f"{quoted} belongs to the table [{table[name].section}]; move it there")
        if name in flat and flat[name] != value:
            raise ValueError(
                f"{path}: {name} ({flat[name]}) is also given as ({value}); leave one of them out"
            )
        flat[name] = value
    return flat


def _entries(content: Mapping[str, Any]) -> Iterator[tuple[str, str, Any]]:
    """Section, name and value of each flag in an overlay; the section of a flag outside tables is ""."""
    for key, value in content.items():
        if isinstance(value, dict):
            for name, inner in value.items():
                yield key, name.replace("-", "_"), inner
        else:
            yield "", key.replace("-", "_"), value


def _sections(config_type: type[Any]) -> Iterator[tuple[str, list[Flag]]]:
    for section, rows in groupby(flag_table(config_type).values(), lambda row: row.section):
        yield section, list(rows)


def _type_name(row: Flag) -> str:
    return f"{row.kind.__name__}{',…' if row.is_list else ''}{' or none' if row.is_optional else ''}"


def _shown_value(value: Any) -> str:
    if isinstance(value, tuple):
        return ",".join(map(str, value)) or "empty"
    return "empty" if value == "" else str(value)


def describe_flags(parsed: Parsed[Any]) -> str:
    """The config by section. `*` marks a value that is not the default; its origin follows."""
    lines, values = [], flag_values(parsed.config)
    for section, rows in _sections(type(parsed.config)):
        lines.append(f"[{section}]")
        for row in rows:
            value = values[row.name]
            is_default, origin = value == row.default, parsed.origins.get(row.name, "")
            mark, ending = (" ", "") if is_default else ("*", f"  ({origin})")
            lines.append(f"  {mark} {row.name} = {_shown_value(value)}{ending}")
    return "\n".join([*lines, *(f"overridden: {item}" for item in parsed.overridden)])


def help_text(config_type: type[Any], usage: str) -> str:
    """All flags by section, with type, default, meaning and choices."""
    lines = [f"usage: {usage} [--config=a.toml,b.toml] [--config_dir=DIR] [--flag=value …]"]
    for section, rows in _sections(config_type):
        lines.append(f"\n{section}")
        for row in rows:
            choices = f" [{'|'.join(row.choices)}]" if row.choices else ""
            lines.append(f"  --{row.name} ({_type_name(row)}, default {_shown_value(row.default)}){choices}")
            lines.append(f"      {row.help}{' (advanced)' if row.advanced else ''}")
    return "\n".join(lines)


def markdown(config_type: type[Any]) -> str:
    """docs/configuration.md: a table for each section, and one for its advanced flags."""
    lines, types = [_PREFACE], typing.get_type_hints(config_type)
    for section, rows in _sections(config_type):
        lines.append(f"\n## {section}\n\n{inspect.cleandoc(types[section].__doc__)}\n")
        advanced = [row for row in rows if row.advanced]
        lines += [*_TABLE_HEAD, *(_table_row(row) for row in rows if not row.advanced)]
        if advanced:
            lines += [
                "\nAdvanced: keep the default unless you know why.\n",
                *_TABLE_HEAD,
                *map(_table_row, advanced),
            ]
    return "\n".join(lines) + "\n"


def _table_row(row: Flag) -> str:
    choices = f" One of {', '.join(f'`{choice}`' for choice in row.choices)}." if row.choices else ""
    cells = [f"`--{row.name}`", _type_name(row), f"`{_shown_value(row.default)}`", row.resume]
    return f"| {' | '.join([*cells, 'yes' if row.in_name else '', row.help])}.{choices} |"


_TABLE_HEAD = ("| flag | type | default | on resume | in the name | meaning |", "|---|---|---|---|---|---|")
_PREFACE = """# Configuration

`python -m fms_fsdp.flags` writes this page; a test checks that it agrees with the code.

Write flags in any order, as `--seq_length=2048` or `--seq-length 2048`. `--config=a.toml,b.toml` reads files
of flags. A later file replaces the values of an earlier one, and flags replace the values of files. A file
holds flags by name, at its top or in tables that have the names of the sections below. The file can also be
JSON: `--config=runs/NAME/config.json` repeats a run. `--config_dir=DIR` names the folder in which a file with
a bare name is looked for. The package ships overlays, which need no folder: `bench`, `profile`, `continue`
(train finished weights on other data), `pretrain_7b` and the shapes of GPT-3. It is useful to keep one file
for the model and one for the site: `--config=model.toml,site.toml`.

You can write an integer as `5_000_000`, `4k`, `2M`, `1B`, `4Ki` (4096) or `1e6`, a boolean as `true`/`false`,
`yes`/`no` or `1`/`0` in upper or lower case, and a list as `a,b`. `none` clears a value that can be absent. A
name that is not a flag is an error, which names the most similar flag. A flag that is given twice must have
the same value both times. A flag of the command line must have an effect. If other flags of the command line
prevent it, the launch is refused. If a file, the machine or the number of ranks prevents it, the log has a
note. All checks run before any work, in this order: flags, world and mesh, data, memory.

The column "on resume" says what happens if a run goes on from a checkpoint and the flag has another value.
`free`: the run trains the same. `announced`: the new value takes effect from that step on, and the log says
so. `refused`: the launch ends with one line. The flags of the model together must give the model of the
checkpoint.

The column "in the name" marks the flags that the default run name is made of. If one of them changes, the
command names another run, unless `--run_name` or `--output_dir` is given. Any other flag can change from
launch to launch, and the run goes on."""


if __name__ == "__main__":
    with printing():
        print(markdown(TrainConfig), end="")
