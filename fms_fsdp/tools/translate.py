"""`python -m fms_fsdp translate`: the run that the configuration of another program describes.

    read keys -> find the program -> table of the program -> combine -> TOML, lists, check

config/other_programs.toml has a table per program: the flag of each key, the flags of each value, the
flags of absent keys, and keys without a counterpart. Flags that begin with `_` exist only here:
`_combine` makes flags of them, for example of a warmup that is a fraction of the decay.
"""

from __future__ import annotations

import json
import math
import re
import reprlib
import shlex
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, ClassVar

from fms_fsdp.config import TrainConfig, flag
from fms_fsdp.config.batch import BatchPlan, global_batch
from fms_fsdp.config.flag import coerce, flag_table, unused_flags
from fms_fsdp.config.parse import parse_flags
from fms_fsdp.config.train_config import other_programs
from fms_fsdp.config.values import counted, one_line, parse_number, shown
from fms_fsdp.errors import UserError
from fms_fsdp.files import write_atomically
from fms_fsdp.models.flops import num_params
from fms_fsdp.models.variants import resolve_model
from fms_fsdp.plan import NOTHING, plan, plan_length, plan_schedule, resolve
from fms_fsdp.predict.memory import GIB
from fms_fsdp.run.machine import Machine
from fms_fsdp.run.memory import MemoryBudget
from fms_fsdp.tools.other_configs import Key, read_keys
from fms_fsdp.tools.whole_folder import check_is_free

PROGRAMS = tuple(name for name, table in other_programs()["programs"].items() if "title" in table)
_TABLE = flag_table(TrainConfig)
_BASE = "194m"  # a variant whose shape flags replace
_SHAPE = {"num_layers", "hidden_size", "num_attention_heads"}
_SHAPE_DEFAULTS = {"_ffn_factor", "_glu_multiple", "_vocab_multiple", "_depth"}
_SCALED = "residual_scaled_init"  # which no shape of others contains
_LISTS = {  # status of a key: title of its list
    "unknown": "unknown key, may change results",
    "changes": "no counterpart, changes results",
    "undecided": "undecided",
    "no effect": "no counterpart, no effect on results",
    "default": "our default already",
}


@dataclass(frozen=True)
class TranslateConfig:
    """The configuration of another program, and where its translation is written."""

    examples: ClassVar[tuple[str, ...]] = (
        "160M.yml local_setup.yml --output=run.toml",
        "--from=megatron --num_devices=64 pretrain.slurm",
    )
    files: tuple[str, ...] = flag(
        (), "FILE…: YAML, TOML, JSON, Python or a shell script", positional=True, form="path"
    )
    output: str = flag("", "TOML file to write (default: print it)", form="path")
    from_: str = flag(
        "", "program of the files (default: recognized by their keys)", choices=PROGRAMS
    )
    num_devices: int | None = flag(
        None, "number of devices (default: the input's, or the fewest)", min=1, max=2**20
    )
    allow_missing: bool = flag(False, "exit with status 0 although keys have no counterpart")

    def __post_init__(self) -> None:
        if not self.files:
            raise UserError("translate requires a file; use `translate FILE [FILE …]`")
        if self.output:
            check_is_free(Path(self.output))


@dataclass
class Translation:
    """The flags of ours that keys give, and the status of each key.

    flags   flag -> its value and the keys that gave it; no keys for a default of the program
    status  key -> a key of `_LISTS`, or "written"
    """

    title: str
    flags: dict[str, tuple[Any, tuple[Key, ...]]] = field(default_factory=dict)
    status: dict[Key, str] = field(default_factory=dict)
    commands: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def get(self, name: str, default: Any = None) -> Any:
        return self.flags[name][0] if name in self.flags else default

    def set(self, name: str, value: Any, *sources: str) -> None:
        """Sets a flag; its keys are the keys of its sources.

        Raises:
            UserError: the flag does not take the value.
        """
        keys = tuple(key for each in sources if each in self.flags for key in self.flags[each][1])
        if name in _TABLE:
            try:
                coerce(_TABLE[name], value)
            except UserError as error:
                raise _unusable(keys[0], error) if keys else error from None
        self.flags[name] = value, tuple(dict.fromkeys(keys))

    def is_default(self, name: str) -> bool:
        row = _TABLE.get(name)
        return row is not None and coerce(row, self.get(name)) == row.default

    @property
    def missing(self) -> list[str]:
        """The flags without which the run is not defined, and that the program does not assume."""
        has_shape = {"hf_config", "init_from_hf", "model_variant"} & self.flags.keys()
        is_known = has_shape and self.get("model_variant") != _BASE
        return sorted(({"seq_length"} if is_known else {"seq_length", *_SHAPE}) - self.flags.keys())

    @property
    def is_complete(self) -> bool:
        stopping = {"unknown", "changes", "undecided"} & set(self.status.values())
        return not stopping and not self.missing


class Program:
    """The table of a program, with the tables that it is based on."""

    def __init__(self, name: str) -> None:
        tables = other_programs()["programs"]
        own = tables[name]
        chain = [*(tables[base] for base in own.get("bases", ())), own]
        self.title, self.formats = own["title"], own["formats"]
        self.flags, self.values = dict[str, list[str]](), dict[str, dict[str, Any]]()
        self.absent, self.notes = dict[str, Any](), own.get("notes", [])
        self.includes = own.get("includes", "").split()
        self.lists: dict[str, list[str]] = {"changes": [], "no effect": []}
        for table in chain:
            for key in table.get("same", "").split():
                self.flags.setdefault(key, []).append(key.rpartition(".")[2])
            for target, keys in table.get("flags", {}).items():
                for key in [keys] if isinstance(keys, str) else keys:
                    name, _, conversion = key.partition(" ")
                    self.flags.setdefault(name, []).append(f"{target} {conversion}")
            self.values |= table.get("values", {})
            self.absent |= table.get("absent", {})
            self.lists["changes"] += table.get("changes", "").split()
            self.lists["no effect"] += table.get("no_effect", "").split()

    def list_of(self, name: str) -> str:
        """Returns the list of a key without a flag, or ""."""
        for status, patterns in self.lists.items():
            if name in patterns:
                return status
        matches = (s for s, names in self.lists.items() if any(fnmatchcase(name, n) for n in names))
        return next(matches, "")

    def knows(self, name: str) -> bool:
        return name in self.flags or name in self.values or bool(self.list_of(name))


def _text(value: Any) -> str:
    """Returns a value as the tables write it."""
    return "null" if value is None else re.sub(r"[\[\]' ]", "", str(value)).lower()


def _shown(key: Key) -> str:
    value = key.value if isinstance(key.value, str) else reprlib.repr(key.value)
    return shown(f"{key.name} = {value}")


def _unusable(key: Key, error: Exception) -> UserError:
    return UserError(f"{key.place}: {_shown(key)} cannot be used: {error}")


def _number(value: Any) -> Any:
    found = parse_number(str(value))
    if found is None or isinstance(value, bool):
        raise UserError("must be a number")
    return int(found) if found.denominator == 1 else float(value)


def _count(value: Any) -> int | None:
    """Returns an integer of at least 1, or None for others, such as a fraction or "auto"."""
    found = parse_number(str(value))
    return int(found) if found and found >= 1 and found.denominator == 1 else None


def _pair(value: Any) -> list[Any]:
    if not isinstance(value, list) or len(value) != 2:
        raise UserError("must be a list of two numbers")
    return value


CONVERSIONS: dict[str, Callable[[Any], Any]] = {  # None: as if the key were absent
    "": lambda value: value,
    "text": str,
    "number": _number,
    "not": lambda value: _text(value) not in ("true", "1"),
    "count": _count,
    "positive": lambda value: _number(value) if _number(value) > 0 else None,
    "duration": lambda value: str(value) if _number(value) > 0 else None,
    "zero_if_negative": lambda value: max(0, _number(value)),
    "first": lambda value: _pair(value)[0],
    "second": lambda value: _pair(value)[1],
    "samples": lambda value: f"{_number(value)}samples",
    "tokens": lambda value: f"{_number(value)}tokens",
    "every": lambda value: str(value) if _number(value) <= 1 else f"every:{_number(value)}",
}


def translate(program: Program, keys: list[Key], hf_config: str = "") -> Translation:
    """Returns our flags for the keys of a program.

    Raises:
        UserError: a value has the wrong type.
    """
    found = Translation(program.title, notes=list(program.notes))
    if hf_config:
        found.flags["hf_config"] = hf_config, ()
    for key in keys:
        found.status[key] = _assign(found, program, key)
    has_shape = bool({"hf_config", "init_from_hf", "model_variant"} & found.flags.keys())
    for name, value in program.absent.items():
        is_shape = name in _SHAPE_DEFAULTS or (name in _TABLE and _TABLE[name].section == "model")
        if name not in found.flags and not (is_shape and has_shape and name != _SCALED):
            found.flags[name] = value, ()
    _combine(found)
    _drop_unused(found)
    for key in keys:
        given = [name for name, (_, sources) in found.flags.items() if key in sources]
        if found.status[key] == "written" and not given:
            found.status[key] = "no effect"
        elif found.status[key] == "written" and all(map(found.is_default, given)):
            found.status[key] = "default"
    return found


def _assign(found: Translation, program: Program, key: Key) -> str:
    """Adds the flags of a key; returns its status."""
    name, listed, flags = key.name, program.list_of(key.name), dict[str, Any]()
    if key.undecided or (name in program.includes and isinstance(key.value, str)):
        return listed if listed == "no effect" else "undecided"
    values = program.values.get(name)
    if values is not None:
        text = _text(key.value)
        pattern = next((each for each in values if fnmatchcase(text, each)), None)
        if pattern is None:
            return "changes"
        flags |= values[pattern]
    if name.startswith("config.") and "hf_config" in found.flags:
        flags["hf_config"] = found.get("hf_config")
    try:
        for rule in program.flags.get(name, ()) if key.value not in (None, "", "auto") else ():
            target, _, conversion = rule.partition(" ")
            if (value := CONVERSIONS[conversion](key.value)) is not None:
                flags[target] = value
                if target in _TABLE:
                    coerce(_TABLE[target], value)
    except (UserError, TypeError) as error:
        raise _unusable(key, error) from None
    if not flags:
        if values is not None:
            return "default"
        is_off = _text(key.value) in ("null", "false", "0", "0.0", "", "none")
        is_known = name in program.flags or (listed == "changes" and is_off)
        return "no effect" if is_known else listed or "unknown"
    for target, value in flags.items():
        old, sources = found.flags.get(target, (value, ()))
        row = _TABLE.get(target)
        is_same = _text(old) == _text(value) or (row and coerce(row, old) == coerce(row, value))
        if not is_same and target != "hf_config":
            return "undecided"
        found.flags[target] = old, (*sources, key)
    return "written"


def _combine(found: Translation) -> None:
    """Makes flags of the flags that begin with `_`, and of flags that depend on one another."""
    steps = next((n for n in ("num_steps", "num_samples", "num_tokens") if found.get(n)), "")
    if steps:
        found.flags.pop("num_epochs", None)
    _combine_model(found)
    _combine_batch(found)
    _combine_schedule(found, steps)
    _combine_data(found)
    _combine_layout(found)
    if found.get("_load") and found.get("_load") == found.get("ckpt_save_path"):
        found.set("resume", "auto", "_load")  # a run resumes from the folder of its checkpoints
    elif found.get("_load"):
        found.status |= dict.fromkeys(found.flags["_load"][1], "changes")
    for name in [name for name in found.flags if name.startswith("_if_")]:
        if found.get(name[4:]) != found.get(name):
            found.status |= dict.fromkeys(found.flags[name][1], "changes")
    for name in [name for name in found.flags if name.startswith("_") and name != "_num_devices"]:
        del found.flags[name]


def _combine_model(found: Translation) -> None:
    get, put = found.get, found.set
    if get("_half"):
        named = found.flags["precision"][1]  # keys that name it
        put("precision", get("precision" if named else "_half"), "precision", "_half")
    if get("_gelu") and get("activation") == "gelu_tanh":
        put("activation", get("_gelu"), "_gelu")
    if get("_norm_eps") and not get("norm_eps"):
        put("norm_eps", get("_norm_eps"), "_norm_eps")
    if get("_tokenizer") and not found.flags.get("vocab_size", ("", ("",)))[1]:
        del found.flags["vocab_size"]  # the data decides
    if depth := get("_depth"):
        put("num_layers", depth, "_depth")
        put("hidden_size", 64 * depth, "_depth")
        put("num_attention_heads", -(-depth // 2), "_depth")
    if get("max_seq_len") and not get("seq_length"):
        put("seq_length", get("max_seq_len"), "max_seq_len")
    width, is_gated = get("hidden_size"), get("activation") == "swiglu"
    if width and not get("ffn_hidden_size") and get("_ffn_factor"):
        inner = int(_number(width) * (8 / 3 if is_gated else get("_ffn_factor")))
        multiple = get("_glu_multiple", 1) if is_gated else 1  # below 0 it rounds up
        put("ffn_hidden_size", inner // multiple * multiple, "hidden_size")
    if multiple := get("_vocab_multiple"):
        rows = multiple * _number(get("tp_size", 1))
        put("vocab_multiple_of", rows, "_vocab_multiple", "tp_size")
    if _SHAPE & found.flags.keys() and not get("hf_config") and not get("model_variant"):
        put("model_variant", _BASE)


def _combine_batch(found: Translation) -> None:
    get, put = found.get, found.set
    if get("_batch_tokens"):
        rows = get("_batch_tokens") // _number(get("seq_length"))
        put("global_batch_size", rows, "_batch_tokens")
    if accum := get("_total_accum"):  # of all ranks together
        rows = _number(get("batch_size")) * accum
        put("global_batch_size", rows, "batch_size", "_total_accum")
    if _number(get("pp_size", 1)) <= 1:
        return
    # here a pipeline divides the micro-batch, which is all that a rank computes in a step
    put("pp_micro_batch_size", get("batch_size", 1), "batch_size")
    micro = found.flags.pop("batch_size", None)
    if get("global_batch_size"):
        put("grad_accum_steps", 1, "pp_micro_batch_size")
    elif micro is not None:
        rows = _number(micro[0]) * _number(get("grad_accum_steps", 1))
        put("batch_size", rows, "pp_micro_batch_size", "grad_accum_steps")
        put("grad_accum_steps", 1, "grad_accum_steps")


def _combine_schedule(found: Translation, steps: str) -> None:
    """`steps`: the flag of the run's length."""
    get, put = found.get, found.set
    unit = "samples" if steps == "num_samples" else ""
    end = f"{_number(get(steps))}{unit}" if steps in ("num_steps", "num_samples") else ""
    if ratio := get("_warmup_fraction"):  # of the decay
        length, unit = str(get("lr_decay") or end), ""
        if length.endswith("samples"):
            length, unit = length.removesuffix("samples"), "samples"
        warmup = f"{round(ratio * _number(length))}{unit}" if length else str(ratio)
        put("warmup", warmup, "_warmup_fraction")
    if get("lr_decay") and str(get("lr_decay")) == end and get("lr_schedule") != "wsd":
        put("lr_decay", None, "lr_decay")


def _combine_layout(found: Translation) -> None:
    get, put = found.get, found.set
    mode, option = get("_ac_mode"), get("_ac_option")
    if mode == "selective" and option == "op":
        put("recompute", "ops", "_ac_mode", "_ac_option")
    elif mode in ("full", "selective"):
        put("recompute", "blocks", "_ac_mode")
        if mode == "selective":
            put("selective_checkpointing", f"every:{option}", "_ac_option")
    if replicas := get("_replicate"):
        shard = get("_shard", -1)
        strategy = "ddp" if shard == 1 else "hsdp" if replicas > 1 else "fsdp"
        put("sharding_strategy", strategy, "_replicate", "_shard")
        if strategy == "hsdp" and shard > 1:
            put("hsdp_shard_size", shard, "_shard")
            put("_devices", replicas * shard * _other_axes(found), "_replicate", "_shard")
    if (layers := get("_recompute_layers")) and get("recompute") == "blocks":
        if get("_recompute_method") == "block":
            total = _number(get("num_layers"))
            share = f"{min(layers * _number(get('pp_size', 1)), total)}/{total}"
            put("selective_checkpointing", share, "_recompute_layers", "_recompute_method")
        else:
            put("recompute_segment", layers, "_recompute_layers", "_recompute_method")
    if devices := get("_devices"):
        devices *= get("_nodes", 1)
        put("_num_devices", devices, "_devices", "_nodes")
        found.commands.append(f"for {counted(devices, 'device')}")


def _other_axes(found: Translation) -> int:
    """Returns the number of devices that read the same sequences."""
    sizes = (_number(found.get(f"{axis}_size", 1)) for axis in ("tp", "cp", "pp"))
    return math.prod(max(1, size) for size in sizes)


def _combine_data(found: Translation) -> None:
    """Names the sources of the data, and adds the commands that make their shards."""
    kinds = ("_prefixes", "_tokens", "_text", "_dataset")
    kind = next((kind for kind in kinds if found.get(kind) not in (None, True)), "")
    if not kind:
        return
    given = found.get(kind)
    items = [str(each) for each in (given if isinstance(given, list) else str(given).split(","))]
    own = found.get("_data_weights") or []
    weights = [_number(each) for each in (own if isinstance(own, list) else [own])]
    if len(items) > 1 and parse_number(items[0]) is not None:  # 0.3 a 0.7 b
        weights, items = [_number(each) for each in items[::2]], items[1::2]
    names = [re.sub("(_text)?(_document)?$", "", Path(item).name) or "data" for item in items]
    names = [n if names.count(n) == 1 else f"{n}_{i}" for i, n in enumerate(names)]
    sources = (kind, "_dataset_config", "_data_weights", "_split")
    found.set("data_path", "data", *sources)
    found.set("datasets", names, *sources)
    if len(weights) == len(names) > 1:
        found.set("weights", weights, *sources)
    split = re.sub(r"[\[\] ]", "", str(found.get("_split") or ""))
    suffix = ".idx" if kind == "_prefixes" else ""
    files = [f"FOLDER_OF_{item}" if kind == "_dataset" else f"{item}{suffix}" for item in items]
    inputs = ",".join(f"{name}={file}" for name, file in zip(names, files, strict=True))
    command = "convert" if kind in ("_prefixes", "_tokens") else "prepare"
    options = f"--input={shlex.quote(inputs)} --output=data" + f" --split={split}" * bool(split)
    found.commands.append(f"python -m fms_fsdp {command} {options} --tokenizer=TOKENIZER")


def _drop_unused(found: Translation) -> None:
    """Removes flags without effect; their keys have none either."""
    try:
        config = _parse(found)
    except UserError:  # the check reports it
        return
    for row, _ in unused_flags(config):
        found.flags.pop(row.name, None)


def toml_lines(found: Translation) -> Iterator[str]:
    """Yields the TOML by section; each line names the keys that it comes from."""
    yield f"# translated from {found.title}"
    yield from (f"# {one_line(command)}" for command in found.commands)
    section = ""
    for name, row in _TABLE.items():
        if name not in found.flags:
            continue
        value, keys = found.flags[name]
        value = coerce(row, value)
        if value == row.default:
            continue
        if row.section != section:
            section = row.section
            yield f"\n[{section}]"
        causes = [_shown(key).replace(" = ", ": ", 1) for key in keys[:4]]
        if name == "model_variant" and not keys:
            causes = ["its shape is replaced below"]
        cause = ", ".join(causes) or f"default of {found.title}"
        yield f"{name} = {_toml(value)}  # {shown(cause)}"


def _toml(value: Any) -> str:
    if isinstance(value, tuple):
        return f"[{', '.join(map(_toml, value))}]"
    return json.dumps(value, ensure_ascii=False) if isinstance(value, str | bool) else str(value)


def _parse(found: Translation) -> TrainConfig:
    """Parses the TOML as a launch does."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "run.toml")
        path.write_text("\n".join(toml_lines(found)), encoding="utf-8")
        try:
            return parse_flags(TrainConfig, [f"--config={path}"])
        except UserError as error:
            raise UserError(str(error).replace(f"{path}: ", "")) from None


def check_run(config: TrainConfig, num_devices: int | None) -> Iterator[str]:
    """Yields the parameters, the length and the memory of a run.

    Raises:
        UserError: the run would be rejected.
    """
    length, training = config.data.seq_length, config.training
    model = resolve_model(config.model, seq_length=length)
    is_known = config.model.vocab_size or config.model.hf_config or not config.model.num_layers
    known = "" if is_known else f", with {model.vocab_size:,} tokens; the data decides"
    yield f"parameters: {num_params(model):,}{known}"

    section = config.parallel
    least = max(1, section.tp_size) * max(1, section.cp_size) * max(1, section.pp_size)
    machine = Machine.of_gpus(2**62, num_devices or least)
    rows = global_batch(training, resolve(config, machine).dims.size("dp"))
    yield f"tokens per step: {rows * length:,} = {rows:,} sequences of {length:,}"

    # The length and the schedule are those of one rank, so a layout that is rejected has them too.
    batch = BatchPlan(rows, 1, 1, training.rampup, True)
    if training.num_epochs:
        yield f"steps: those of {training.num_epochs} epochs of the data"
        any_length = replace(training, num_epochs="", num_tokens=10**12)
        config = replace(config, training=any_length)
    else:
        steps = plan_length(config, batch, model.vocab_size, NOTHING)
        points = plan_schedule(config, batch, steps, NOTHING.resume)
        unit = "tokens" if points.in_tokens else "steps"
        yield f"steps: {steps:,}"
        yield (
            f"schedule: {config.optim.lr_schedule}, {points.warmup:,} {unit} of warmup, decay from "
            f"{points.decay_start:,} to {points.decay_end:,}"
        )
    run = plan(config, machine)
    need = replace(MemoryBudget(machine).need(run), saves=0)
    yield f"memory: {need.total / GIB:.1f} GiB per rank on {counted(run.world_size, 'device')}"


def recognize(kinds: set[str], keys: list[Key]) -> str:
    """Returns the program that knows most of the keys.

    Raises:
        UserError: none, or more than one.
    """
    names = [key.name for key in keys if not key.name.startswith(("launcher.", "config."))]
    if not names and any(key.name.startswith("config.") for key in keys):
        return "hf"
    scores = {
        name: sum(map(program.knows, names))
        for name, program in ((name, Program(name)) for name in PROGRAMS)
        if kinds <= {*program.formats, "config.json"}
    }
    best = [name for name, score in scores.items() if score == max(scores.values()) > 0]
    if len(best) != 1:
        found = f"are keys of {' and '.join(best)}" if best else "are of no known program"
        raise UserError(
            f"the {counted(len(names), 'key')} {found}; set --from to one of {', '.join(PROGRAMS)}"
        )
    return best[0]


def report(found: Translation) -> Iterator[str]:
    """Yields the lists of keys; those that may change results have a line each."""
    for status, title in _LISTS.items():
        keys = [key for key, each in found.status.items() if each == status]
        if keys and status in ("default", "no effect"):
            yield f"{title}: {', '.join(shown(key.name) for key in keys)}"
        elif keys:
            yield f"{title}:"
            for key in keys:
                text = f"{shown(key.name)}: {key.undecided}" if key.undecided else _shown(key)
                yield f"  {shown(key.place)}: {text}"
    yield from (f"differs without a key: {note}" for note in found.notes)
    if found.missing:
        yield f"the input does not set {', '.join(found.missing)}; add them to the TOML"


def main(config: TranslateConfig) -> None:
    """Writes the TOML and prints the lists. The command `translate`.

    Raises:
        UserError: a file cannot be read, or its program is not known.
    """
    files = {path: read_keys(path) for path in dict.fromkeys(config.files)}
    keys = list[Key]()
    for _, own in files.values():
        for key in own:
            if other := next((each for each in keys if each.name == key.name), None):
                raise UserError(
                    f"{key.place}: {shown(key.name)} is also set at {other.place}; remove one of them"
                )
            keys.append(key)
    if not keys:
        raise UserError(f"{shown(config.files[0])} has no keys; name a configuration")
    hf_configs = [path for path, (kind, _) in files.items() if kind == "config.json"]
    name = config.from_ or recognize({kind for kind, _ in files.values()}, keys)
    found = translate(Program(name), keys, hf_configs[0] if hf_configs else "")
    devices = config.num_devices or found.get("_num_devices")
    lines, is_valid = list(toml_lines(found)), True
    checks = list[str]()
    try:
        checks.extend(check_run(_parse(found), devices))
    except UserError as error:
        is_valid = False
        checks.append(f"does not run as it is: {error}")
    text = [f"{found.title}: {counted(len(keys), 'key')}", *report(found), *checks]
    if config.output:
        write_atomically(Path(config.output), "\n".join(lines) + "\n")
        text.append(
            f"wrote {config.output}; train: python main_training.py --config={config.output}"
        )
    else:
        print("\n".join(lines) + "\n")
    print("\n".join(text if config.output else [f"# {line}" for line in text]))
    if not (is_valid and (found.is_complete or config.allow_missing)):
        sys.exit(1)
