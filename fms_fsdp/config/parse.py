"""Builds a config from the command line and from TOML or JSON files; formats help and logs.

defaults < --config=a.toml,b.json (the later file wins) < flags; `-` and `_` are equal in names. A
later layer also removes flags of earlier ones that cannot be used with its own (`replaced_by`).
"""

from __future__ import annotations

import re
import shlex
import shutil
import textwrap
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import groupby, pairwise
from pathlib import Path
from typing import Any, Generic, TypeVar

from fms_fsdp.config.flag import (
    Flag,
    build_config,
    coerce,
    flag_table,
    flag_values,
    help_texts,
    non_defaults,
    unmet,
    unused_flags,
)
from fms_fsdp.config.train_config import (
    TrainConfig,
    answers_for_others,
    by_name,
    check_removed,
    other_programs,
)
from fms_fsdp.config.values import did_you_mean, one_line, shown, typed
from fms_fsdp.console import PROGRAM, print_and_end
from fms_fsdp.errors import UserError
from fms_fsdp.files import load_unique_json

C = TypeVar("C")

TRAINING = f"{PROGRAM} train" if PROGRAM else "python main_training.py"
PRESETS = Path(__file__).parent / "presets"
FIRST_FLAGS = (
    "model_variant data_path use_dummy_dataset seq_length batch_size num_steps learning_rate "
    "sharding_strategy eval_interval run_name"
)
_WIDEST = 110  # characters of a line of --help
FLAGS_WIDTH = 96  # characters of a line of `describe_changes`
# flags that are not part of a config: no file and no run name contains them
_FILES = {name: Flag("", name=name, type=str, form="path") for name in ("config", "config_dir")}
_DRY_RUN = Flag(False, name="dry_run", type=bool)
# flags of a line say the same thing in different ways: a later layer with one of them removes the
# others
_ALTERNATIVES = (
    ("num_steps", "num_tokens", "num_samples", "num_epochs"),
    ("model_variant", "hf_config", "init_from_hf"),
    ("warmup", "warmup_steps"),
    ("min_lr", "min_lr_ratio"),
    ("checkpoint_interval", "checkpoint_schedule"),
    ("precision", "mixed_precision"),
    ("recompute", "fsdp_activation_checkpointing"),
)


@dataclass(frozen=True)
class Parsed(Generic[C]):
    """A config, and where its values come from: "flag" or a file; a default has no origin.

    notes    flags without effect that do not come from the command line alone
    dry_run  the launch only checks and reports, and writes nothing
    """

    config: C
    origins: Mapping[str, str]
    overridden: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    dry_run: bool = False


def parse_flags(config_type: type[C], argv: Sequence[str], usage: str = TRAINING) -> C:
    """Returns the config of `parse`."""
    return parse(config_type, argv, usage).config


def parse(config_type: type[C], argv: Sequence[str], usage: str = TRAINING) -> Parsed[C]:
    """Parses `argv` without the program's name; `--help` prints the flags and exits with 0.

    Raises:
        UserError: an unknown or contradictory flag, an invalid value, an unreadable file.
    """
    try:
        return _parse(config_type, argv, usage)
    except UserError as error:
        raise UserError(one_line(str(error))) from error


def _parse(config_type: type[C], argv: Sequence[str], usage: str) -> Parsed[C]:
    table = flag_table(config_type)
    command = usage.rpartition(" ")[2]
    outside = dict(_FILES)
    if config_type is TrainConfig:
        outside["dry_run"] = _DRY_RUN
    texts = _split(argv, {**table, **outside})
    asked = texts.get("help", texts.get("h"))
    if asked:
        print_and_end(help_text(config_type, usage, every="all" in asked))
    unknown = [name for name in texts if name not in table and name not in outside]
    if unknown:
        raise UserError(". ".join(_unknown(f"--{name}", name, table, command) for name in unknown))
    given = {name: coerce(outside[name], texts.pop(name)) for name in outside if name in texts}
    files = given.get("config", "")
    folder = given.get("config_dir", "")
    if folder and not files:
        raise UserError(
            f"--config_dir={shown(folder)} has no effect without --config; remove --config_dir or "
            "set --config=NAME"
        )
    layers: list[tuple[str, Mapping[str, Any]]] = []  # origin, values; a later one wins
    if files:
        for name in files.split(","):
            path = _find_file(coerce(_FILES["config"], name), folder)
            layers.append((str(path), _read_file(path, table, command)))
    values = dict[str, Any]()
    origins = dict[str, str]()
    overridden = list[str]()
    for origin, layer in [*layers, ("flag", texts)]:
        by = "the flag" if origin == "flag" else origin
        for name, reason in replaced_by(layer, values).items():
            overridden.append(f"{name}: {reason} of {by} replaces {origins.pop(name)}")
            del values[name]
        for name, value in layer.items():
            if name in values:
                overridden.append(f"{name}: {by} replaces {origins[name]}")
            values[name] = value
            origins[name] = origin
    for name, value in values.items():
        try:
            values[name] = coerce(table[name], value)
        except UserError as error:
            if origins[name] == "flag":
                raise
            raise UserError(f"{origins[name]}: {error}") from None
    notes = list(_omit_sources(values))
    config = build_config(config_type, values)
    for row, text, others in unused_flags(config):
        if {origins.get(name, "flag") for name in (row.name, *others)} == {"flag"}:
            raise UserError(text)
        notes.append(text.partition(";")[0])
    return Parsed(config, origins, tuple(overridden), tuple(notes), given.get("dry_run", False))


def replaced_by(layer: Mapping[str, Any], earlier: Mapping[str, Any]) -> dict[str, str]:
    """Returns the flags of earlier layers that a later layer removes, each with the flag that replaces it.

    Both map names to values, as texts or as a file has them.
    """
    replaced = dict[str, str]()
    for name, value in layer.items():
        if not _is_set(value):  # a flag that is cleared replaces nothing
            continue
        for group in _ALTERNATIVES:
            if name in group:
                replaced |= dict.fromkeys(group, name)
    # Weights belong to the sources for which they were written.
    is_new = _items(layer.get("datasets", "")) != _items(earlier.get("datasets", ""))
    if "datasets" in layer and is_new:
        replaced["weights"] = "datasets"
    return {
        name: by
        for name, by in replaced.items()
        if name not in layer and _is_set(earlier.get(name))
    }


def _is_set(value: Any) -> bool:
    return _items(value) not in ("", "none", "null", "-1")  # --num_epochs=-1 sets no length


def _items(value: Any) -> str:
    """Returns a value, or the items of a list, as the command line takes them."""
    if isinstance(value, list):
        value = tuple(value)
    return typed(value).lower()


def flag_texts(config_type: type[Any], argv: Sequence[str]) -> dict[str, str]:
    """Returns name -> text of the flags in `argv`, with names in one spelling.

    Raises:
        UserError: a flag has no value, an invalid one, or two.
    """
    return _split(argv, {**flag_table(config_type), **_FILES, "dry_run": _DRY_RUN})


def _split(argv: Sequence[str], table: Mapping[str, Flag]) -> dict[str, str]:
    """Returns name -> text of `--name=text`, `--name text`, `--switch` and `--noswitch`.

    With `--help` the result has that alone.
    """
    given = dict[str, tuple[str, Any]]()
    texts = dict[str, str]()
    for argument, following in pairwise([*argv, "--"]):
        if not re.match(r"--?[^\W\d]", argument):
            if argument.startswith("--") or argument in ("-", "-="):
                raise UserError(f"{shown(argument)} is not a flag; write --name=value")
            continue
        name, equals, text = argument.lstrip("-").partition("=")
        name = _field_name(name, table)
        is_bare = not equals and re.match(r"--?([^\W\d]|$)", following) is not None
        if is_bare and name not in table and name.removeprefix("no") in table:
            name = name.removeprefix("no")
            text = "False"
        elif is_bare:
            text = "True"
        elif not equals:
            text = following
        row = table.get(name)
        if is_bare and row is not None and row.kind is not bool:
            raise UserError(
                f"--{name} requires a value; write --{name}=VALUE (--help=all explains the flag)"
            )
        value = text if row is None else coerce(row, text)
        first_text, first = given.setdefault(name, (text, value))
        if value != first:
            raise UserError(
                f"--{name}={shown(first_text)} is also set to {shown(text)}; remove one of them"
            )

    if not argv:
        return texts
    asked = given.keys() & {"help", "h"}
    if asked:
        return {name: given[name][0] for name in asked}
    import fire  # a third of the time of `--help`

    @fire.decorators.SetParseFn(str)  # type: ignore[untyped-decorator]
    def collect(*strays: str, **named: str) -> None:
        texts.update({_field_name(name, table): text for name, text in named.items()})
        if not strays:
            return
        positional = [row.name for row in table.values() if row.positional]
        if not positional:
            raise UserError(f"{shown(strays[0])} is not a flag; write --name=value")
        texts.setdefault(positional[0], ",".join(strays))

    fire.Fire(collect, command=list(argv), name="flags")
    return texts


def _field_name(name: str, table: Mapping[str, Flag]) -> str:
    """Returns the name of a flag; the field of a Python keyword such as `from` ends with `_`."""
    name = name.replace("-", "_")
    if f"{name}_" in table:
        return f"{name}_"
    return name


def _omit_sources(values: dict[str, Any]) -> Iterator[str]:
    """Removes the sources of weight 0 from `values`, and yields a note for each."""
    names = values.get("datasets", ())
    weights = values.get("weights", ())
    if not names or len(names) != len(weights) or not any(weights):
        return
    used = {name: weight for name, weight in zip(names, weights, strict=True) if weight}
    if len(used) < sum(map(bool, weights)):  # a source is named twice, which is an error later
        return
    values["datasets"] = tuple(used)
    values["weights"] = tuple(used.values())
    for name in names:
        if name not in used:
            yield f"source {name} is not read, because its weight is 0"


def _unknown(quoted: str, name: str, table: Mapping[str, Flag], command: str) -> str:
    """Returns an error text for a name that is not a flag, with the flag that was probably meant.

    The command's own flags come before training flags and names of other programs.
    """
    return f"{shown(quoted)} is not a flag{_hint_for(name, table, command)}"


def _hint_for(name: str, table: Mapping[str, Flag], command: str) -> str:
    content = other_programs()
    is_training = "learning_rate" in table
    answers = dict[str, str]()
    if is_training:
        answers |= content["removed"]["train"]
    answers |= content["removed"].get(command, {})
    answer = by_name(answers).get(name)
    if answer:
        return f"; {answer}"

    own = table.keys() - flag_table(TrainConfig).keys()
    similar = did_you_mean(sorted(own), name, mark="--")
    if similar:
        return similar

    if is_training:
        answer = answers_for_others().get(name.rpartition(".")[2])
        if answer:
            return f"; {answer}"
    else:
        flag = by_name(content["tools"]).get(name)
        if flag in table:
            return f"; write --{flag}"
    return did_you_mean(table, name, mark="--") or "; --help=all lists all flags"


def _find_file(name: str, folder: str) -> Path:
    """Returns the path as given, a file in --config_dir, or a preset."""
    for path in (Path(folder, name), Path(folder, f"{name}.toml"), PRESETS / f"{name}.toml"):
        try:
            if path.is_file():
                return path
        except OSError as error:
            raise UserError(
                f"--config={shown(name)} cannot be read: {error.strerror}; choose another file"
            ) from None
    presets = ", ".join(sorted(path.stem for path in PRESETS.glob("*.toml")))
    where = ""
    if folder:
        where = f" in {shown(folder)}"
    raise UserError(
        f"--config={shown(name)} is not a file{where}; use a file or a preset: {presets}"
    )


def _read_file(path: Path, table: Mapping[str, Flag], command: str) -> dict[str, Any]:
    """Returns flat name -> value of a TOML or JSON file, whose tables are sections."""
    try:
        text = path.read_text(encoding="utf-8-sig")  # editors of Windows begin a file with a mark
        content = load_unique_json(text) if path.suffix == ".json" else tomllib.loads(text)
    except (ValueError, OSError, RecursionError) as error:
        raise UserError(
            f"--config={path} cannot be read: {shown(str(error))}; correct or replace the file"
        ) from None
    if not isinstance(content, dict):
        raise UserError(
            f"--config={path} must contain flags by name, not a {type(content).__name__}; write a JSON "
            "object"
        )
    is_recorded = isinstance(content.get("resolved"), dict)  # a config.json
    if is_recorded:
        del content["resolved"]
    flat: dict[str, Any] = {}
    for section, name, value in _entries(content):
        quoted = f"{path}: [{section}] {name}" if section else f"{path}: {name}"
        sections = sorted({row.section for row in table.values()})
        if section and section not in sections:
            raise UserError(f"{path}: [{section}] is not a section; use {', '.join(sections)}")
        if name not in table:
            if is_recorded and check_removed(name, value):
                continue
            raise UserError(_unknown(quoted, name, table, command))
        if section and table[name].section != section:
            raise UserError(f"{quoted} belongs to [{table[name].section}]; move the flag there")
        if name in flat and flat[name] != value:
            raise UserError(f"{path}: {name} is set to {flat[name]} and to {value}; remove one")
        flat[name] = value
    return flat


def _entries(content: Mapping[str, Any]) -> Iterator[tuple[str, str, Any]]:
    """Yields section, name and value of each flag; the section is "" outside tables."""
    for key, value in content.items():
        if isinstance(value, dict):
            for name, inner in value.items():
                yield key, name.replace("-", "_"), inner
        else:
            yield "", key.replace("-", "_"), value


def rows_by_section(config_type: type[Any]) -> Iterator[tuple[str, list[Flag]]]:
    """Yields each section with its rows."""
    for section, rows in groupby(flag_table(config_type).values(), lambda row: row.section):
        yield section, list(rows)


def value_name(row: Flag) -> str:
    """Returns the values that a flag takes for --help: INT, fsdp|ddp or PATH,…"""
    if row.choices:
        name = "|".join(row.choices)
    elif row.kind is str:
        name = "PATH" if row.form == "path" else "TEXT"
    else:
        name = row.kind.__name__.upper()
    for word in row.words:
        name += f"|{word}"
    if row.is_list:
        name += ",…"
    return name


def shown_value(value: Any) -> str:
    """Returns a value for people; "none" for an empty text or list."""
    if value is None:
        return "none"
    return typed(value) or "none"


def describe_changes(parsed: Parsed[Any]) -> str:
    """Returns the values that are not defaults as flags, which a shell can read.

    \\ ends a line that continues.
    """
    changed = non_defaults(parsed.config).items()
    lines = ["flags:"]
    for name, value in changed:
        word = shlex.quote(f"--{name}={typed(value)}")
        if len(lines[-1]) + len(word) > FLAGS_WIDTH:
            lines.append(" ")
        lines[-1] += f" {word}"
    return " \\\n".join(lines)


def describe_flags(parsed: Parsed[Any], used: Mapping[str, Any]) -> str:
    """Returns all flags by section; `*` marks a changed value, with its origin.

    used   values that were derived, for flags that are not set
    """
    lines = []
    values = flag_values(parsed.config)
    changed = non_defaults(parsed.config)
    for section, rows in rows_by_section(type(parsed.config)):
        lines.append(f"[{section}]")
        for row in rows:
            mark = " "
            origin = ""
            if row.name in changed:
                mark = "*"
                origin = f"  ({parsed.origins.get(row.name, 'flag')})"
            value = shown_value(values[row.name])
            if value in ("none", "auto") and row.name in used:
                value += f", which is {shown_value(used[row.name])}"
            lines.append(f"  {mark} {row.name} = {value}{origin}")
    return "\n".join([*lines, *(f"overridden: {item}" for item in parsed.overridden)])


def help_text(config_type: type[Any], usage: str, *, every: bool, width: int | None = None) -> str:
    """Returns value, default and help of flags; of training flags a few unless `every`.

    width   of the lines; None takes the terminal's
    """
    if width is None:
        width = min(shutil.get_terminal_size((100, 24)).columns, _WIDEST)
    lines = [f"usage: {usage} [--config=a.toml,b.toml] [--config_dir=DIR] [--flag=value …]"]
    if config_type is TrainConfig:
        lines += [
            "\nexamples:",
            f"  {usage} --model_variant=tiny --use_dummy_dataset=True --num_steps=20",
            "  torchrun --nproc_per_node=8 main_training.py --model_variant=7b --data_path=/data\n",
        ]
    examples = getattr(config_type, "examples", ())
    if examples:
        lines += ["\nexamples:", *(f"  {usage} {example}" for example in examples)]
    is_short = not every and "learning_rate" in flag_table(config_type)
    texts = help_texts(config_type)
    sections = list(rows_by_section(config_type))
    sections.sort(key=lambda section: section[0] != "")  # the command's own flags come first
    for section, rows in sections:
        if is_short and section:
            rows = [row for row in rows if row.name in FIRST_FLAGS.split()]
        if section and rows and not (is_short and config_type is TrainConfig):
            lines.append(f"\n{section}")
        for row in rows:
            lines += _help_of_flag(row, texts[row.name], width)
    if config_type is TrainConfig and is_short:
        lines.append(
            "\n--help=all lists every flag, --list_variants the models; --dry_run checks a launch and "
            "writes nothing"
        )
    elif is_short:
        lines.append(
            "\n--help=all also lists all other flags of a training, which the command takes"
        )
    return "\n".join(lines)


def _help_of_flag(row: Flag, text: str, width: int) -> list[str]:
    """Returns the lines of a flag: its values and the used default, then its text."""
    text, default = split_default(row, text)
    head = f"--{row.name.rstrip('_')}={value_name(row)}"
    if row.required:
        head += " (required)"
    elif default:
        head += f" [{default}]"
    if row.advanced:
        head += " (advanced)"
    wrap = partial(textwrap.wrap, width=width, break_long_words=False, break_on_hyphens=False)
    indent = " " * 6
    heads = wrap(head.replace("|", "| "), initial_indent="  ", subsequent_indent=indent)
    return [
        *[line.replace("| ", "|") for line in heads],
        *wrap(f"{text}{needs_note(row)}", initial_indent=indent, subsequent_indent=indent),
    ]


def split_default(row: Flag, text: str) -> tuple[str, str]:
    """Returns the help without "(default: …)", and the value that is used if the flag is not set.

    The value is "" if there is none.
    """
    match = re.fullmatch(r"(.*?) \(default: ([^()]+)\)(.*)", text, re.DOTALL)
    if shown_value(row.default) != "none":
        return text, shown_value(row.default)
    if match is None:
        return text, ""
    return match[1] + match[3], match[2]


def needs_note(row: Flag) -> str:
    """Returns the condition under which a flag has no effect, in brackets, or ""."""
    if not row.needs:
        return ""
    return f" (no effect {unmet(row)})"
