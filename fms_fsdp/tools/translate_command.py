"""`python -m fms_fsdp translate`: the run that the configuration of another program describes.

    read keys -> find the program -> table of the program -> combine -> TOML, lists, check

config/other_programs.toml has a table per program: the flag of each key, the flags of each value,
the program's own defaults, and keys without a counterpart. program_rules.py has what keys mean
together. A value that decides the run and that neither the input nor the program defines is
missing: no default of ours takes its place.
"""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Collection, Iterator
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, ClassVar

from fms_fsdp.config import TrainConfig, flag
from fms_fsdp.config.batch_plan import BatchPlan, global_batch
from fms_fsdp.config.flag import coerce, unused_flags
from fms_fsdp.config.parse import parse_flags
from fms_fsdp.config.train_config import other_programs
from fms_fsdp.config.values import counted, must_be_one_of, one_line, shown
from fms_fsdp.errors import UserError
from fms_fsdp.files import check_output_is_new, write_atomically
from fms_fsdp.models.flops import num_params
from fms_fsdp.models.variants import resolve_model
from fms_fsdp.plan import NOTHING, plan, plan_length, plan_schedule, resolve
from fms_fsdp.predict.memory import GIB
from fms_fsdp.run.machine import Machine
from fms_fsdp.run.memory_budget import MemoryBudget
from fms_fsdp.tools.other_configs import Key, read_keys
from fms_fsdp.tools.program_rules import combine
from fms_fsdp.tools.translation import (
    CONVERSIONS,
    LISTS,
    TABLE,
    Translation,
    as_text,
    check,
    shown_key,
    unusable,
)

PROGRAMS = tuple(name for name, table in other_programs()["programs"].items() if "title" in table)
_REMOVED = ("hf", "litgpt", "nanogpt", "nanochat")
_WITHOUT_THEM = (
    "docs/migrate/other-frameworks.md has the main keys of Trainer, litgpt, nanoGPT and nanochat"
)


@dataclass(frozen=True)
class TranslateConfig:
    """The configuration of another program, and where its translation is written."""

    examples: ClassVar[tuple[str, ...]] = (
        "160M.yml local_setup.yml --output=run.toml",
        "--from=megatron --num_devices=64 pretrain.slurm",
    )
    files: tuple[str, ...] = flag(
        (), "FILE…: YAML, TOML, JSON or a shell script", positional=True, form="path", required=True
    )
    output: str = flag("", "TOML file to write (default: print it)", form="path")
    from_: str = flag(
        "",
        f"program of the files: {', '.join(PROGRAMS)} (default: recognized by their keys)",
    )
    num_devices: int | None = flag(
        None, "number of devices (default: the input's, or the fewest)", min=1, max=2**20
    )
    allow_missing: bool = flag(False, "exit with status 0 although keys have no counterpart")

    def __post_init__(self) -> None:
        if not self.files:
            raise UserError("translate requires a file; use `translate FILE [FILE …]`")
        if self.from_ in _REMOVED:
            raise UserError(f"--from={self.from_} was removed; {_WITHOUT_THEM}")
        if self.from_ and self.from_ not in PROGRAMS:
            rule = must_be_one_of(PROGRAMS, self.from_, cutoff=0.5)
            raise UserError(f"--from={shown(self.from_)} {rule}")
        if self.output:
            check_output_is_new(Path(self.output))


class Program:
    """The table of a program, with the tables that it is based on."""

    def __init__(self, name: str) -> None:
        tables = other_programs()["programs"]
        own = tables[name]
        self.name = name
        self.title = own["title"]
        self.formats = own["formats"]
        self.flags = dict[str, list[str]]()
        self.values = dict[str, dict[str, Any]]()
        self.absent = dict[str, Any]()
        self.notes = own.get("notes", [])
        self.includes = own.get("includes", "").split()
        self.rules = own.get("rules", "").split()
        self.versions = own["versions"]
        self.lists: dict[str, list[str]] = {"changes": [], "no effect": []}
        for table in [*(tables[base] for base in own.get("bases", ())), own]:
            for key in table.get("same", "").split():
                self.flags.setdefault(key, []).append(key.rpartition(".")[2])
            for target, sources in table.get("flags", {}).items():
                if isinstance(sources, str):
                    sources = [sources]
                for source in sources:
                    key, _, conversion = source.partition(" ")
                    self.flags.setdefault(key, []).append(f"{target} {conversion}")
            self.values |= table.get("values", {})
            self.absent |= table.get("absent", {})
            self.lists["changes"] += table.get("changes", "").split()
            self.lists["no effect"] += table.get("no_effect", "").split()

    def list_of(self, name: str) -> str:
        """Returns the list of a key without a flag, or ""."""
        for status, patterns in self.lists.items():
            if name in patterns:
                return status
        for status, patterns in self.lists.items():  # a name itself comes before any pattern
            if any(fnmatchcase(name, pattern) for pattern in patterns):
                return status
        return ""

    def knows(self, name: str) -> bool:
        has_meaning = name in self.flags or name in self.values or name in self.rules
        return has_meaning or bool(self.list_of(name))


def translate(program: Program, keys: list[Key], hf_config: str = "") -> Translation:
    """Returns our flags for the keys of a program.

    Raises:
        UserError: a value has the wrong type.
    """
    by_name = {key.name: key for key in keys}
    found = Translation(program.title, by_name, notes=list(program.notes))
    if hf_config:
        found.flags["hf_config"] = hf_config, ()
    for key in keys:
        found.status[key] = _assign(found, program, key)
    has_shape = bool({"hf_config", "init_from_hf", "model_variant"} & found.flags.keys())
    for name, value in program.absent.items():
        is_shape = name == "_vocab_multiple"
        if name in TABLE:
            # No shape of others contains whether it is scaled.
            is_shape = TABLE[name].section == "model" and name != "residual_scaled_init"
        if is_shape and has_shape:
            continue
        if name not in found.flags:
            found.flags[name] = value, ()
    combine(found, program.name)
    _drop_unused(found)
    for key in keys:
        if found.status[key] != "written":
            continue
        given = [name for name, (_, sources) in found.flags.items() if key in sources]
        if not given:
            found.status[key] = "no effect"
        elif all(map(found.is_default, given)):
            found.status[key] = "default"
    return found


def _assign(found: Translation, program: Program, key: Key) -> str:
    """Adds the flags of a key; returns its status."""
    name = key.name
    listed = program.list_of(key.name)
    flags = dict[str, Any]()
    if key.undecided or (name in program.includes and isinstance(key.value, str)):
        has_flag = name in program.flags or name in program.values or name in program.rules
        if listed == "no effect" and not has_flag:
            return "no effect"
        return "undecided"
    if name in program.rules:
        return "default"  # unless program_rules.py finds an effect
    values = program.values.get(name)
    if values is not None:
        text = as_text(key.value)
        pattern = next((each for each in values if fnmatchcase(text, each)), None)
        if pattern is None:
            return "changes"
        flags |= values[pattern]
    if name.startswith("config.") and "hf_config" in found.flags:
        flags["hf_config"] = found.get("hf_config")
    rules = program.flags.get(name, [])
    if key.value in (None, "", "auto"):  # the program's own default
        rules = []
    try:
        for rule in rules:
            target, _, conversion = rule.partition(" ")
            value = CONVERSIONS[conversion](key.value)
            if value is not None:
                flags[target] = value
                check(target, value)
    except (UserError, TypeError) as error:
        raise unusable(key, error) from None
    if not flags:
        if values is not None:
            return "default"
        is_off = as_text(key.value) in ("null", "false", "0", "0.0", "", "none")
        if name in program.flags or (is_off and listed != "no effect"):
            return "no effect"
        return listed or "unknown"
    for target, value in flags.items():
        old, sources = found.flags.get(target, (value, ()))
        row = TABLE.get(target)
        is_same = as_text(old) == as_text(value)
        if not is_same and row is not None:
            is_same = coerce(row, old) == coerce(row, value)
        if not is_same and target != "hf_config":
            return "undecided"
        found.flags[target] = old, (*sources, key)
    return "written"


def _drop_unused(found: Translation) -> None:
    """Removes flags without effect; their keys have none either."""
    try:
        config = _parse(found)
    except UserError:  # the check reports it
        return
    for row, *_ in unused_flags(config):
        found.flags.pop(row.name, None)


def toml_lines(found: Translation) -> Iterator[str]:
    """Yields the TOML by section; each line names the keys that it comes from."""
    yield f"# translated from {found.title}"
    yield from (f"# {one_line(command)}" for command in found.commands)
    section = ""
    for name, row in TABLE.items():
        if name not in found.flags:
            continue
        value, keys = found.flags[name]
        value = coerce(row, value)
        if value == row.default:
            continue
        if row.section != section:
            section = row.section
            yield f"\n[{section}]"
        causes = [shown_key(key).replace(" = ", ": ", 1) for key in keys[:4]]
        if name == "model_variant" and not keys:
            causes = ["its shape is replaced below"]
        cause = ", ".join(causes) or f"default of {found.title}"
        yield f"{name} = {_toml(value)}  # {shown(cause)}"


def _toml(value: Any) -> str:
    if isinstance(value, tuple):
        return f"[{', '.join(map(_toml, value))}]"
    if isinstance(value, str | bool):
        return json.dumps(value, ensure_ascii=False)
    return str(value)


def _parse(found: Translation) -> TrainConfig:
    """Parses the TOML as a launch does."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "run.toml")
        path.write_text("\n".join(toml_lines(found)), encoding="utf-8")
        try:
            return parse_flags(TrainConfig, [f"--config={path}"])
        except UserError as error:
            raise UserError(str(error).replace(f"{path}: ", "")) from None


def check_run(
    config: TrainConfig, num_devices: int | None, missing: Collection[str] = ()
) -> Iterator[str]:
    """Yields the parameters, the length and the memory of a run, without what is missing.

    Raises:
        UserError: the run would be rejected.
    """
    length = config.data.seq_length
    training = config.training
    model = resolve_model(config.model, seq_length=length)
    parameters = f"parameters: {num_params(model):,}"
    if config.model.vocab_size or config.model.hf_config or not config.model.num_layers:
        yield parameters
    else:
        yield f"{parameters}, with {model.vocab_size:,} tokens; the data decides"

    section = config.parallel
    fewest = max(1, section.tp_size) * max(1, section.cp_size) * max(1, section.pp_size)
    machine = Machine.of_gpus(2**62, num_devices or fewest)
    rows = global_batch(training, resolve(config, machine).dims.size("dp"))
    if not {"batch_size", "num_devices"} & set(missing):
        yield f"tokens per step: {rows * length:,} = {rows:,} sequences of {length:,}"

    # The length and the schedule are those of one rank, so a layout that is rejected has them too.
    batch = BatchPlan(rows, 1, 1, training.rampup, True)
    if training.num_epochs:
        yield f"steps: those of {training.num_epochs} epochs of the data"
        any_length = replace(training, num_epochs="", num_tokens=10**12)
        config = replace(config, training=any_length)
    elif "num_steps" not in missing:
        steps = plan_length(config, batch, model.vocab_size, NOTHING)
        points = plan_schedule(config, batch, steps)
        unit = "tokens" if points.in_tokens else "steps"
        yield f"steps: {steps:,}"
        yield (
            f"schedule: {config.optim.lr_schedule}, {points.warmup:,} {unit} of warmup, decay from "
            f"{points.decay_start:,} to {points.decay_end:,}"
        )
    if "num_devices" in missing:
        return
    run = plan(config, machine)
    need = replace(MemoryBudget(machine).need(run), saves=0)
    yield f"memory: {need.total / GIB:.1f} GiB per rank on {counted(run.world_size, 'device')}"


def recognize(kinds: set[str], keys: list[Key]) -> str:
    """Returns the program that knows most of the keys, and at least half of them.

    Raises:
        UserError: none does, or more than one.
    """
    names = [key.name for key in keys if not key.name.startswith(("launcher.", "config."))]
    scores = dict[str, int]()  # the number of keys that each program knows
    for name in PROGRAMS:
        program = Program(name)
        if kinds <= {*program.formats, "config.json"}:
            scores[name] = sum(map(program.knows, names))
    highest = max(scores.values(), default=0)
    is_known = highest > 0 and 2 * highest >= len(names)
    best = [name for name, score in scores.items() if score == highest and is_known]
    if len(best) != 1:
        found = "are of no known program"
        if best:
            found = f"are keys of {' and '.join(best)}"
        raise UserError(
            f"the {counted(len(names), 'key')} {found}; set --from to one of {', '.join(PROGRAMS)}; "
            f"{_WITHOUT_THEM}"
        )
    return best[0]


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
                yield f"  {shown(key.place)}: {text}"
    yield from (f"differs without a key: {note}" for note in found.notes)
    if found.missing:
        names = [name.replace("num_devices", "--num_devices") for name in found.missing]
        yield f"missing: {', '.join(names)}; {found.title} has no default, and ours would be a guess"


def main(config: TranslateConfig) -> None:
    """Writes the TOML and prints the lists. The command `translate`.

    Raises:
        UserError: a file cannot be read, or its program is not known.
    """
    files = {path: read_keys(path) for path in dict.fromkeys(config.files)}
    keys = list[Key]()
    set_at = dict[str, str]()
    for _, own in files.values():
        for key in own:
            if key.name in set_at:
                other = set_at[key.name]
                raise UserError(
                    f"{key.place}: {shown(key.name)} is also set at {other}; remove one of them"
                )
            set_at[key.name] = key.place
            keys.append(key)
    if not keys:
        raise UserError(f"{shown(config.files[0])} has no keys; name a configuration")
    hf_configs = [path for path, (kind, _) in files.items() if kind == "config.json"]
    name = config.from_ or recognize({kind for kind, _ in files.values()}, keys)
    program = Program(name)
    found = translate(program, keys, hf_configs[0] if hf_configs else "")
    devices = config.num_devices or found.get("_num_devices")
    if config.num_devices and "num_devices" in found.missing:
        found.missing.remove("num_devices")
    lines = list(toml_lines(found))
    is_valid = True
    checks = list[str]()
    try:
        checks.extend(check_run(_parse(found), devices, found.missing))
    except UserError as error:
        is_valid = False
        checks.append(f"does not run as it is: {error}")
    title = f"{found.title} ({program.versions}): {counted(len(keys), 'key')}"
    text = [title, *report(found), *checks]
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
