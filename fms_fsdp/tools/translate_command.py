"""`python -m fms_fsdp translate`: the run that the configuration of another program describes.

    files or a command -> keys -> find the program -> its table -> combine -> TOML, lists, figures

config/other_programs.toml has a table per program: the flag of each key, the flags of each value,
the program's own defaults, and keys without a counterpart. program_rules.py has what keys mean
together. A value that decides the run and that neither the input nor the program defines is
missing: no default of ours takes its place, and no figure that depends on it is printed.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, ClassVar

from fms_fsdp.config import flag
from fms_fsdp.config.batch_plan import BatchPlan, last_step
from fms_fsdp.config.flag import flag_table, unused_flags
from fms_fsdp.config.train_config import other_programs
from fms_fsdp.config.values import counted, must_be_one_of, one_line, shown
from fms_fsdp.errors import UserError
from fms_fsdp.files import check_output_is_new, is_file, write_atomically
from fms_fsdp.models.flops import num_params
from fms_fsdp.models.variants import resolve_model
from fms_fsdp.optim.schedules import RunLength, find_milestones
from fms_fsdp.tools.command_reader import read_arguments, read_command
from fms_fsdp.tools.other_configs import FORMATS, Key, read_keys
from fms_fsdp.tools.program_rules import combine, sequences_per_step
from fms_fsdp.tools.translation import (
    CONVERSIONS,
    LISTS,
    TABLE,
    Program,
    Translation,
    as_text,
    checked,
    is_off,
    shown_key,
    unusable,
)

PROGRAMS = tuple(name for name, table in other_programs()["programs"].items() if "title" in table)
_REMOVED = ("hf", "litgpt", "nanogpt", "nanochat")
_WITHOUT_THEM = (
    "docs/migrate/other-frameworks.md has the main keys of Trainer, litgpt, nanoGPT and nanochat"
)
_COUNTED = set(
    """model_variant hf_config num_layers hidden_size ffn_hidden_size num_attention_heads
    num_kv_heads head_dim vocab_size vocab_multiple_of tie_embeddings norm qk_norm activation bias
    qkv_bias pos_emb relative_buckets max_seq_len seq_length""".split()
)
_LENGTH = {"num_steps", "num_samples", "num_tokens", "num_epochs", "rampup_batch_size"}
_SCHEDULE = {"lr_schedule", "warmup", "lr_decay", "constant_steps", "seq_length"}


@dataclass(frozen=True)
class TranslateConfig:
    """The configuration of another program, and where its translation is written."""

    examples: ClassVar[tuple[str, ...]] = (
        "160M.yml local_setup.yml --output=run.toml",
        "--output=run.toml torchrun --nproc_per_node 8 pretrain_gpt.py --num-layers 24 …",
    )
    files: tuple[str, ...] = flag(
        (),
        "FILE…: YAML, TOML or JSON; instead a whole COMMAND …, with these flags before it",
        positional=True,
        form="path",
        required=True,
    )
    output: str = flag("", "TOML file to write (default: print it)", form="path")
    from_: str = flag(
        "",
        f"program of the files: {', '.join(PROGRAMS)} (default: recognized by their keys)",
    )
    num_devices: int | None = flag(
        None, "number of devices (default: the input's)", min=1, max=2**20
    )
    allow_missing: bool = flag(False, "exit with status 0 although keys have no counterpart")

    def __post_init__(self) -> None:
        if self.from_ in _REMOVED:
            raise UserError(f"--from={self.from_} was removed; {_WITHOUT_THEM}")
        if self.from_ and self.from_ not in PROGRAMS:
            rule = must_be_one_of(PROGRAMS, self.from_, cutoff=0.5)
            raise UserError(f"--from={shown(self.from_)} {rule}")
        if self.output:
            check_output_is_new(Path(self.output))


def split_command(argv: Sequence[str]) -> tuple[list[str], list[str]]:
    """Returns our flags, with files, and the words of another program's command after them."""
    flags = list[str]()
    words = list(argv)
    while words and words[0].startswith("-"):
        word = words.pop(0)
        if word == "--":
            return flags, words
        name, equals, _ = word.lstrip("-").replace("-", "_").partition("=")
        row = flag_table(TranslateConfig).get("from_" if name == "from" else name)
        if row is None or equals:
            flags.append(word)
        elif row.kind is bool:
            flags.append(f"{word}=true")
        else:
            flags += [word, *words[:1]]
            del words[:1]
    if words and Path(words[0]).suffix.lower() not in FORMATS:
        return flags, words
    return flags + words, []


def translate(program: Program, keys: list[Key], hf_config: str = "") -> Translation:
    """Returns our flags for the keys of a program.

    Raises:
        UserError: a value has the wrong type.
    """
    keys = [key for key in keys if key.name != "launcher.program" or program.is_other(key.value)]
    by_name = {key.name: key for key in keys}
    found = Translation(program, by_name, notes=program.table.get("notes", []).copy())
    if hf_config:
        found.flags["hf_config"] = hf_config, ()
    for key in keys:
        found.status[key] = _assign(found, program, key)
    doubtful = found.doubtful
    defaults = program.merged("absent")
    if not {"hf_config", "init_from_hf", "model_variant"} & found.flags.keys():
        defaults |= program.merged("absent_shape")
    for name, value in defaults.items():
        if name not in found.flags and name not in doubtful:
            found.assign(name, value)
    combine(found)
    try:
        for row, *_ in list(unused_flags(found.config)):  # their keys have no effect either
            found.flags.pop(row.name, None)
    except UserError:  # the figures report it
        pass
    for key in keys:
        if found.status[key] != "written":
            continue
        given = {name: value for name, (value, sources) in found.flags.items() if key in sources}
        if not given:
            found.status[key] = "no effect"
        elif all(name in TABLE and TABLE[name].default == value for name, value in given.items()):
            found.status[key] = "default"
    return found


def _assign(found: Translation, program: Program, key: Key) -> str:
    """Adds the flags of a key; returns its status."""
    name = key.name
    listed = program.list_of(name)
    if key.undecided:
        is_harmless = listed == "no effect" and not program.has_flags(name)
        return "no effect" if is_harmless else "undecided"
    if name in program.words("rules"):
        return "default"  # unless program_rules.py finds an effect
    if key.value is None:  # the program's own default
        return "no effect" if program.has_flags(name) or listed else "unknown"
    flags = dict[str, Any]()
    values = program.values.get(name)
    if values is not None:
        text = as_text(key.value)
        patterns = [each for each in values if fnmatchcase(text, each)]
        if not patterns:
            return "undecided" if key.value is True else "changes"
        flags |= values[patterns[0]]
    if name.startswith("config.") and "hf_config" in found.flags:
        flags["hf_config"] = found.get("hf_config")
    try:
        for target, conversion in program.flags.get(name, ()):
            if key.value in ("", "auto"):
                continue
            row = TABLE.get(target)
            if key.value is True and (row is None or row.kind is not bool):
                return "undecided"  # an option without its value
            value = CONVERSIONS[conversion](key.value)
            if value is not None:
                flags[target] = value
        flags = {target: checked(target, value) for target, value in flags.items()}
    except (UserError, TypeError) as error:
        raise unusable(key, error) from None
    if not flags:
        if values is not None:
            return "default"
        if name in program.flags or (listed == "changes" and is_off(key.value)):
            return "no effect"
        return listed or "unknown"
    for target, value in flags.items():
        old, sources = found.flags.get(target, (value, ()))
        if value != old and target != "hf_config":
            return "undecided"
        found.flags[target] = old, (*sources, key)
    return "written"


def toml_lines(found: Translation) -> Iterator[str]:
    """Yields the TOML by section; each line names the keys that it comes from."""
    title = found.program.title
    yield f"# translated from {title}"
    yield from (f"# {one_line(command)}" for command in found.commands)
    section = ""
    for name, row in TABLE.items():
        if name not in found.flags:
            continue
        value, keys = found.flags[name]
        if value == row.default:
            continue
        if row.section != section:
            section = row.section
            yield f"\n[{section}]"
        causes = [shown_key(key).replace(" = ", ": ", 1) for key in keys[:4]]
        if name == "model_variant" and not keys:
            causes = ["its shape is replaced below"]
        cause = ", ".join(causes) or f"default of {title}"
        yield f"{name} = {_toml(value)}  # {shown(cause)}"


def _toml(value: Any) -> str:
    if isinstance(value, tuple):
        return f"[{', '.join(map(_toml, value))}]"
    if isinstance(value, str | bool):
        return json.dumps(value, ensure_ascii=False)
    return str(value)


def figures(found: Translation, path: str = "run.toml") -> Iterator[str]:
    """Yields parameters, batch and length, unless they depend on what is not known.

    path   of the translation, for the command that predicts its memory

    Raises:
        UserError: a launch would reject the flags.
    """
    config = found.config
    doubtful = found.doubtful
    length = config.data.seq_length
    training = config.training
    if not doubtful & _COUNTED:
        model = resolve_model(config.model, seq_length=length)
        total = f"{num_params(model):,}"
        if not found.has_vocabulary:
            per_token = model.hidden_size * (1 if model.tie_embeddings else 2)
            others = num_params(model) - per_token * model.padded_vocab_size
            total = f"{others:,}, and {per_token:,} per token of the data's vocabulary"
        yield f"parameters: {total}"

    command = f"estimate --config={path} --device=h100_80gb --num_devices={found.num_devices}"
    rows = sequences_per_step(found)
    if rows and "seq_length" not in doubtful:
        yield f"tokens per step: {rows * length:,} = {rows:,} sequences of {length:,}"
    if rows and not training.global_batch_size:
        command += f" --global_batch_size={rows}"
    if found.num_devices:
        yield f"memory: python -m fms_fsdp {command}"

    if training.num_epochs:
        yield f"steps: those of {training.num_epochs} epochs of the data"
    if training.num_steps is None or training.rampup:
        if not rows or "seq_length" in doubtful:
            return
    if training.num_epochs or doubtful & _LENGTH:
        return
    # The length and the schedule are those of one rank.
    batch = BatchPlan(rows or 1, 1, 1, training.rampup, True)
    steps = last_step(training, batch, length)
    yield f"steps: {steps:,}"
    run = RunLength(steps, length, lambda step: batch.sequences_in(step) * length)
    points = find_milestones(config.optim, run, in_tokens=bool(batch.rampup))
    unit = "tokens" if points.in_tokens else "steps"
    if not doubtful & _SCHEDULE:
        yield (
            f"schedule: {config.optim.lr_schedule}, {points.warmup:,} {unit} of warmup, decay from "
            f"{points.decay_start:,} to {points.decay_end:,}"
        )


def recognize(kinds: set[str], keys: list[Key]) -> str:
    """Returns the program of these keys: the one that has keys which only it has.

    Raises:
        UserError: none does, or more than one.
    """
    names = {key.name for key in keys}
    programs = list[str]()
    for name in PROGRAMS:
        program = Program(name)
        is_format = kinds <= {*program.table["formats"], "config.json"}
        if is_format and names & set(program.words("marks")):
            programs.append(name)
    if len(programs) != 1:
        found = "are of no known program"
        if programs:
            found = f"are keys of {' and '.join(programs)}"
        raise UserError(
            f"the keys {found}; set --from to one of {', '.join(PROGRAMS)}; {_WITHOUT_THEM}"
        )
    return programs[0]


def report(found: Translation) -> Iterator[str]:
    """Yields the lists of keys; those that may change results have a line each."""
    for status, title in LISTS.items():
        keys = [key for key, each in found.status.items() if each == status]
        if keys and status in ("default", "no effect"):
            yield f"{title}: {', '.join(shown(key.name) for key in keys)}"
        elif keys:
            yield f"{title}:"
            for key in keys:
                text = shown_key(key)
                if key.undecided:
                    text = f"{shown(key.name)}: {key.undecided}"
                elif status == "undecided" and key.value is True and not found.is_switch(key.name):
                    text = f"{shown(key.name)}: it has no value"
                yield f"  {shown(key.place)}: {text}"
    yield from (f"differs without a key: {note}" for note in found.notes)
    if found.missing:
        names = [name.replace("num_devices", "--num_devices") for name in found.missing]
        title = found.program.title
        yield f"missing: {', '.join(names)}; {title} has no default, and ours would be a guess"


def read_input(words: Sequence[str], paths: Sequence[str]) -> tuple[set[str], list[Key], str]:
    """Returns the formats, the keys and the config.json of files, or of a command and its files."""
    keys = dict[str, Key]()
    kinds = set[str]()
    hf_config = ""
    arguments = list[Key]()
    if words:
        command = read_command(list(words))
        paths = command.files
        name = Path(command.program).name
        arguments = [
            Key("launcher.program", name, "command"),
            *read_arguments(command.arguments, name),
        ]
        arguments += command.devices()
        kinds |= {"arguments"} if command.arguments else set()
        for i, key in reversed(list(enumerate(arguments))):
            if key.name not in ("job.config_file", "deepspeed_config") or key.undecided:
                continue
            if is_file(str(key.value)):
                paths = [*paths, str(key.value)]
                del arguments[i]
            else:
                arguments[i] = Key(key.name, None, key.place, f"{key.value} does not exist")
    for path in dict.fromkeys(paths):
        kind, own = read_keys(path)
        kinds.add(kind)
        if kind == "config.json":
            hf_config = path
        for key in own:
            if key.name in keys:
                raise UserError(
                    f"{key.place}: {shown(key.name)} is also set at {keys[key.name].place}; "
                    "remove one of them"
                )
            keys[key.name] = key
    keys |= {key.name: key for key in arguments}  # they replace those of the files
    if not keys:
        raise UserError("the input has no keys; name a configuration or a command with options")
    return kinds, list(keys.values()), hf_config


def main(config: TranslateConfig, words: Sequence[str] = ()) -> None:
    """Writes the TOML and prints the lists. The command `translate`.

    words   the command of another program, instead of files

    Raises:
        UserError: a file cannot be read, or its program is not known.
    """
    if not words and not config.files:
        raise UserError("translate requires a file or a command; use `translate FILE [FILE …]`")
    kinds, keys, hf_config = read_input(words, config.files)
    program = Program(config.from_ or recognize(kinds, keys))
    if config.num_devices:
        keys = [key for key in keys if key.name != "launcher.devices"]
        keys.append(Key("launcher.devices", config.num_devices, "--num_devices"))
    found = translate(program, keys, hf_config)
    lines = list(toml_lines(found))
    is_valid = True
    text = [f"{program.title} ({program.table['versions']}): {counted(len(found.keys), 'key')}"]
    text += report(found)
    try:
        text += figures(found, config.output or "run.toml")
    except UserError as error:
        is_valid = False
        text.append(f"does not run as it is: {error}")
    if config.output:
        write_atomically(Path(config.output), "\n".join(lines) + "\n")
        text.append(
            f"wrote {config.output}; train: python main_training.py --config={config.output}"
        )
    else:
        print("\n".join(lines) + "\n")
        text = [f"# {line}" for line in text]  # so that all of the output is TOML
    print("\n".join(text))
    if not (is_valid and (found.is_complete or config.allow_missing)):
        sys.exit(1)
