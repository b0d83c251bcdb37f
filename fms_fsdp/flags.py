"""Command line and overlay files → a typed, frozen config dataclass.

    argv ── fire (splits --name=value; text stays text) ─┐
    --config=a.toml,b.json (later wins) ─────────────────┴─ merge (flags win) ── coerce by field type ── dataclass

`-` and `_` are equal in names. Nothing is guessed and nothing is ignored: an unknown name, a value that does not fit its field and a stray
argument are `ValueError`s of one line. Works for `TrainConfig` (sections) and for any flat dataclass whose fields come from `config.flag`.
`python -m fms_fsdp.flags` prints docs/configuration.md.
"""

from __future__ import annotations

import dataclasses
import difflib
import json
import os
import re
import tomllib
import typing
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, TypeVar

import fire

from fms_fsdp.config import TrainConfig
from fms_fsdp.config.effects import refuse_typed_for_nothing
from fms_fsdp.config.flag import is_in_name, resume_rule
from fms_fsdp.config.values import Field, coerce, one_line, shown, unwrap

C = TypeVar("C")

SHIPPED = Path(__file__).parent / "configs"


@dataclass(frozen=True)
class Parsed(Generic[C]):
    """A config and where its values come from: `origins[name]` is "flag" or the overlay's path; absent for defaults."""

    config: C
    origins: Mapping[str, str]
    overridden: tuple[str, ...]


def declared_fields(config_type: type[Any]) -> dict[str, Field]:
    """Flat name → Field, in the order of declaration; fields that are dataclasses themselves are sections."""
    found: dict[str, Field] = {}
    hints = typing.get_type_hints(config_type)
    for item in dataclasses.fields(config_type):
        inner = hints[item.name]
        if dataclasses.is_dataclass(inner) and isinstance(inner, type):
            for name, spec in declared_fields(inner).items():
                assert name not in found, f"flag {name} is declared in two sections"
                found[name] = dataclasses.replace(spec, section=item.name)
        else:
            rules = {"resume": resume_rule(item, config_type), "in_name": is_in_name(item, config_type)}
            found[item.name] = Field(item.name, "", inner, item.default, **{**item.metadata, **rules})
    return found


def parse_flags(config_type: type[C], argv: Sequence[str], usage: str = "python main_training.py") -> C:
    """The config that `argv` (without the program's name) describes. `--help` prints all flags and exits with 0.

    Raises:
        ValueError: an unknown flag, a value that does not fit, a stray argument, an unreadable overlay.
    """
    return parse_with_origins(config_type, argv, usage).config


def parse_with_origins(
    config_type: type[C], argv: Sequence[str], usage: str = "python main_training.py"
) -> Parsed[C]:
    """Like `parse_flags`, with the origin of every value that is not a default, and what one overlay took from another."""
    try:
        return _parse(config_type, argv, usage)
    except ValueError as error:
        raise ValueError(one_line(str(error))) from error


def _parse(config_type: type[C], argv: Sequence[str], usage: str) -> Parsed[C]:
    fields = declared_fields(config_type)
    texts = _split(argv, getattr(config_type, "POSITIONAL", ""))
    if texts.keys() & {"help", "h"}:
        if os.environ.get("RANK", "0") == "0":
            print(help_text(config_type, usage))
        raise SystemExit(0)
    given = {key: _agreed(key, values, fields) for key, values in texts.items()}
    overlays = given.pop("config", "")
    folder = given.pop("config_dir", "")
    if folder and not overlays:
        raise ValueError(f"--config_dir ({folder}) is only used to find --config; add --config=NAME")
    values: dict[str, Any] = {}
    origins: dict[str, str] = {}
    overridden: list[str] = []
    for name in overlays.split(",") if overlays else ():
        path = _find_overlay(name, folder)
        for key, value in _read_overlay(path, fields).items():
            if key in values:
                overridden.append(f"{key}: {path} replaces {origins[key]}")
            values[key], origins[key] = value, str(path)
    for key, text in given.items():
        _known(key, fields, "--" + key)
        if key in values:
            overridden.append(f"{key}: the flag replaces {origins[key]}")
        values[key], origins[key] = text, "flag"
    typed: dict[str, Any] = {}
    for key, value in values.items():
        try:
            typed[key] = coerce(fields[key], value)
        except ValueError as error:
            raise error if origins[key] == "flag" else ValueError(f"{origins[key]}: {error}") from None
    config = _build(config_type, fields, typed)
    if isinstance(config, TrainConfig):
        refuse_typed_for_nothing(config, origins)
    return Parsed(config, origins, tuple(overridden))


def _split(argv: Sequence[str], positional: str = "") -> dict[str, list[str]]:
    """Name → texts of each `--name=value` or `--name value`, by fire; a bare `--name` is "True", `--noname` "False".

    Arguments that are no flags make up the list named `positional`, if there is one.
    """
    caught: dict[str, list[str]] = {}
    strays: list[str] = []

    @fire.decorators.SetParseFn(str)  # type: ignore[untyped-decorator]
    def catch(*stray: str, **named: str) -> None:
        strays.extend(stray)
        for name, text in named.items():
            caught.setdefault(name.replace("-", "_"), []).append(text)

    groups: list[list[str]] = [[]]  # fire gets one flag at a time: of one given twice it would keep the last
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


def _agreed(key: str, texts: Sequence[str], fields: Mapping[str, Field]) -> str:
    """The text of a flag that may be given more than once, always with one value."""
    values = [coerce(fields[key], text) if key in fields else text for text in texts]
    for text, value in zip(texts, values, strict=True):
        if value != values[0]:
            raise ValueError(
                f"--{key} ({shown(texts[0])}) is also given as ({shown(text)}); leave one of them out"
            )
    return texts[0]


def _known(key: str, fields: Mapping[str, Field], quoted: str) -> None:
    if key not in fields:
        near = difflib.get_close_matches(key[:100], fields, n=1, cutoff=0.5)
        hint = f"did you mean --{near[0]}?" if near else "--help lists all flags"
        raise ValueError(f"{shown(quoted)} is not a flag; {hint}")


def _find_overlay(name: str, folder: str) -> Path:
    """The overlay's file: the path as given, in --config_dir, or one shipped with the package by its bare name."""
    for path in (Path(folder, name), Path(folder, f"{name}.toml"), SHIPPED / f"{name}.toml"):
        try:
            if path.is_file():
                return path
        except OSError as error:
            raise ValueError(f"--config ({shown(name)}) cannot be read: {error.strerror}") from None
    shipped = ", ".join(sorted(path.stem for path in SHIPPED.glob("*.toml")))
    where = f" in {shown(folder)}" if folder else ""
    raise ValueError(f"--config ({shown(name)}) is not a file{where}; shipped overlays: {shipped}")


def _read_overlay(path: Path, fields: Mapping[str, Field]) -> dict[str, Any]:
    """Flat name → value of a TOML or JSON overlay; tables must be named after sections, `resolved` is passed over."""
    try:
        content = json.loads(path.read_text()) if path.suffix == ".json" else tomllib.loads(path.read_text())
    except (ValueError, OSError, RecursionError) as error:
        raise ValueError(f"--config ({path}) cannot be read: {shown(str(error))}") from None
    if not isinstance(content, dict):
        raise ValueError(f"--config ({path}) must hold flags by name, not a {type(content).__name__}")
    flat: dict[str, Any] = {}
    sections = {spec.section for spec in fields.values()}
    for key, value in content.items():
        if key == "resolved" and isinstance(value, dict):
            continue
        if not isinstance(value, dict):
            _put_once(flat, key.replace("-", "_"), value, path)
        elif key in sections:
            for name, inner in value.items():
                name = name.replace("-", "_")
                _known(name, fields, f"{path}: [{key}] {name}")
                if fields[name].section != key:
                    raise ValueError(
                        f"{path}: [{key}] {name} belongs to the table [{fields[name].section}]; move it there"
                    )
                _put_once(flat, name, inner, path)
        else:
            raise ValueError(
                f"{path}: the table [{key}] is not a section; sections: {', '.join(sorted(sections))}"
            )
    for name in flat:
        _known(name, fields, f"{path}: {name}")
    return flat


def _put_once(flat: dict[str, Any], name: str, value: Any, path: Path) -> None:
    if name in flat and flat[name] != value:
        raise ValueError(f"{path}: {name} ({flat[name]}) is also given as ({value}); leave one of them out")
    flat[name] = value


def _build(config_type: type[C], fields: Mapping[str, Field], values: Mapping[str, Any]) -> C:
    hints = typing.get_type_hints(config_type)
    sections = {spec.section for spec in fields.values()} - {""}
    parts = {s: hints[s](**{k: v for k, v in values.items() if fields[k].section == s}) for s in sections}
    return config_type(**parts, **{key: value for key, value in values.items() if not fields[key].section})


def _type_name(declared: Any) -> str:
    kind, optional = unwrap(declared)
    name = f"{typing.get_args(kind)[0].__name__},…" if typing.get_origin(kind) is tuple else kind.__name__
    return name + (" or none" if optional else "")


def _shown_default(value: Any) -> str:
    return (
        ",".join(map(str, value)) or "empty"
        if isinstance(value, tuple)
        else ("empty" if value == "" else str(value))
    )


def describe(parsed: Parsed[Any]) -> str:
    """The config as parsed, by section; `*` marks what is not the default and says where it comes from."""
    lines = []
    section = None
    for name, spec in declared_fields(type(parsed.config)).items():
        if spec.section != section:
            section = spec.section
            lines.append(f"[{section}]")
        owner = getattr(parsed.config, spec.section) if spec.section else parsed.config
        value = getattr(owner, name)
        origin = parsed.origins.get(name, "")
        mark = (
            f"* {name} = {_shown_default(value)}  ({origin})"
            if value != spec.default
            else f"  {name} = {_shown_default(value)}"
        )
        lines.append("  " + mark)
    return "\n".join([*lines, *(f"overridden: {item}" for item in parsed.overridden)])


def help_text(config_type: type[Any], usage: str) -> str:
    """All flags by section, with type, default, meaning and choices."""
    lines = [f"usage: {usage} [--config=a.toml,b.toml] [--config_dir=DIR] [--flag=value …]"]
    section = None
    for spec in declared_fields(config_type).values():
        if spec.section != section:
            section = spec.section
            lines.append(f"\n{section}")
        choices = f" [{'|'.join(spec.choices)}]" if spec.choices else ""
        lines.append(
            f"  --{spec.name} ({_type_name(spec.type)}, default {_shown_default(spec.default)}){choices}"
        )
        lines.append(f"      {spec.help}{' (advanced)' if spec.advanced else ''}")
    return "\n".join(lines)


def markdown(config_type: type[Any]) -> str:
    """docs/configuration.md: one table per section, advanced flags in a table of their own."""
    fields = declared_fields(config_type)
    hints = typing.get_type_hints(config_type)
    lines = [_PREFACE]
    for section in dict.fromkeys(spec.section for spec in fields.values()):
        lines.append(f"\n## {section}\n\n{(hints[section].__doc__ or '').strip()}\n")
        for advanced in (False, True):
            rows = [spec for spec in fields.values() if spec.section == section and spec.advanced is advanced]
            if not rows:
                continue
            if advanced:
                lines.append("\nAdvanced: keep the default unless you know why.\n")
            lines += [
                "| flag | type | default | on resume | in the name | meaning |",
                "|---|---|---|---|---|---|",
            ]
            for spec in rows:
                choices = (
                    f" One of {', '.join(f'`{choice}`' for choice in spec.choices)}." if spec.choices else ""
                )
                default = f"`{_shown_default(spec.default)}`"
                cells = [
                    f"`--{spec.name}`",
                    _type_name(spec.type),
                    default,
                    spec.resume,
                    "yes" if spec.in_name else "",
                ]
                lines.append(f"| {' | '.join([*cells, spec.help])}.{choices} |")
    return "\n".join(lines) + "\n"


_PREFACE = """# Configuration

Generated by `python -m fms_fsdp.flags`; a test keeps it equal to the code.

Flags are flat (`--seq_length=2048`, `--seq-length 2048`), in any order. `--config=a.toml,b.toml` lays files over the defaults: a later file wins over an
earlier one, flags win over files. A file holds flags by name, at its top or in tables named after the sections below; `.json` is read too, so
`--config=runs/NAME/config.json` repeats a run. `--config_dir=DIR` is where bare names are looked for; the overlays shipped in `fms_fsdp/configs/` are found
by their bare name: `bench`, `profile`, `continue` (finished weights, other data), `pretrain_7b` and the shapes of GPT-3. A useful split is one file for the model and one
for the site: `--config=model.toml,site.toml`.

Integers may be written `5_000_000`, `4k`, `2M`, `1B`, `4Ki` (4096) or `1e6`; booleans `true`/`false`, `yes`/`no`, `1`/`0` in any case; lists `a,b`. `none` clears an optional
value. What is not known is an error that names the nearest flag; nothing is ignored. A flag that is given twice must say the same both times. One that is
typed has to have an effect: if other flags of the command leave it none, it is refused; if a file, the machine or the number of ranks does, a line of the log says so. Checks run before any work, in this order: flags, world and mesh, data, memory.

The column "on resume" says what another value does to a run that goes on from a checkpoint: `free`, it trains the same; `announced`, it takes effect from there on and is
logged; `refused`, it ends the launch with one line. For the model's flags it is the model they come to that must be the checkpoint's.

"In the name" are the flags that the default run name is made of. Another value of one of them names another run, unless `--run_name` or `--output_dir` is given; any
other flag may change from launch to launch and the run goes on."""


if __name__ == "__main__":
    print(markdown(TrainConfig), end="")
