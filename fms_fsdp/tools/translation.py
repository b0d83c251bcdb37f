"""The flags of ours that the keys of another program give, and what is known of each key."""

from __future__ import annotations

import re
import reprlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Any

from fms_fsdp.config import TrainConfig
from fms_fsdp.config.flag import build_config, coerce, flag_table
from fms_fsdp.config.train_config import other_programs
from fms_fsdp.config.values import parse_number, shown
from fms_fsdp.errors import UserError
from fms_fsdp.tools.other_configs import Key

TABLE = flag_table(TrainConfig)
BASE = "194m"  # a variant whose shape flags replace
LISTS = {  # status of a key: title of its list
    "unknown": "unknown key, may change results",
    "changes": "no counterpart, changes results",
    "undecided": "undecided",
    "no effect": "no counterpart, no effect on results",
    "default": "our default already",
}
STOPPING = ("unknown", "changes", "undecided")
# What decides results or cost: a flag of each line must come from the input or from a default that
# the program defines. Ours would be silently wrong.
_DECIDING = """
num_steps num_samples num_tokens num_epochs
batch_size global_batch_size
seq_length
learning_rate
lr_schedule
warmup
min_lr min_lr_ratio
weight_decay
adam_beta1
adam_beta2
grad_clip
precision mixed_precision
data_path use_dummy_dataset
"""
SHAPE = "num_layers\nhidden_size\nnum_attention_heads"
_DECIDING_SHAPE = f"""{SHAPE}
ffn_hidden_size
norm
activation
pos_emb
dropout
attn_dropout
vocab_size _tokenizer
"""
_MAX_SIZE = 2**22  # of a flag that is no length of the run; larger numbers are typing errors
_SIZES = f"{SHAPE} ffn_hidden_size seq_length max_seq_len vocab_size batch_size".split()
_OFF = ("false", "0", "0.0", "", "none")


class Program:
    """The table of a program, with the tables that it is based on."""

    def __init__(self, name: str) -> None:
        programs = other_programs()["programs"]
        self.name = name
        self.table = programs[name]
        self.title = self.table["title"]
        self.tables = [*(programs[base] for base in self.table.get("bases", ())), self.table]
        self.values = self.merged("values")
        self.flags = dict[str, list[tuple[str, str]]]()  # key -> flags, each with a conversion
        for table in self.tables:
            for key in table.get("same", "").split():
                self.flags.setdefault(key, []).append((key.rpartition(".")[2], ""))
            for flag, sources in table.get("flags", {}).items():
                for source in [sources] if isinstance(sources, str) else sources:
                    key, _, conversion = source.partition(" ")
                    self.flags.setdefault(key, []).append((flag, conversion))

    def merged(self, name: str) -> dict[str, Any]:
        """Returns a table of all tables; the program's own comes last."""
        found = dict[str, Any]()
        for table in self.tables:
            found |= table.get(name, {})
        return found

    def words(self, name: str) -> list[str]:
        return " ".join(table.get(name, "") for table in self.tables).split()

    def is_other(self, file: object) -> bool:
        """Returns whether a Python file of the program trains another model, such as BERT."""
        return any(fnmatchcase(str(file), pattern) for pattern in self.words("others"))

    def has_flags(self, name: str) -> bool:
        return name in self.flags or name in self.values or name in self.words("rules")

    def list_of(self, name: str) -> str:
        """Returns the list of a key without a flag, or ""."""
        for is_match in (str.__eq__, fnmatchcase):  # a name itself comes before any pattern
            for status in ("changes", "no_effect"):
                if any(is_match(name, pattern) for pattern in self.words(status)):
                    return status.replace("_", " ")
        return ""

    def flags_of(self, name: str) -> set[str]:
        """Returns the flags that are not known where the value of a key is not."""
        flags = {flag for flag, _ in self.flags.get(name, ())}
        for chosen in self.values.get(name, {}).values():
            flags |= chosen.keys()
        for table in self.tables:
            for flag, patterns in table.get("decides", {}).items():
                if any(fnmatchcase(name, pattern) for pattern in patterns.split()):
                    flags.add(flag)
        return flags


@dataclass
class Translation:
    """The flags of ours that keys give, and the status of each key.

    keys     of the input, by name
    flags    flag -> its value and the keys that gave it; no keys for a default of the program
    status   key -> a key of `LISTS`, or "written"
    missing  flags that decide the run, and that neither the input nor the program defines
    """

    program: Program
    keys: Mapping[str, Key]
    flags: dict[str, tuple[Any, tuple[Key, ...]]] = field(default_factory=dict)
    status: dict[Key, str] = field(default_factory=dict)
    missing: list[str] = field(default_factory=list)
    commands: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    has_vocabulary: bool = True  # else the data decides

    def given(self, key: str) -> str:
        """Returns the value of a key as the tables write it; "" if it is absent, empty or undecided."""
        found = self.keys.get(key)
        if found is None or found.undecided or found.value is None:
            return ""
        return as_text(found.value)

    def number_of(self, key: str, default: float = 0) -> Any:
        """Returns the number that a key holds; the default if it holds none.

        Raises:
            UserError: it holds something else.
        """
        if not self.given(key):
            return default
        try:
            return number(self.keys[key].value)
        except UserError as error:
            raise unusable(self.keys[key], error) from None

    def is_switch(self, key: str) -> bool:
        """Returns whether `true` is a value of the key; otherwise an option lacks its value."""
        return "true" in self.program.values.get(key, {})

    def get(self, name: str, default: Any = None) -> Any:
        return self.flags.get(name, (default, ()))[0]

    @property
    def num_devices(self) -> Any:
        return self.get("_num_devices", 0)

    def assign(self, name: str, value: Any, *sources: str) -> None:
        """Sets a flag. Its sources are flags, whose keys it takes, and keys, which are then written.

        Raises:
            UserError: the flag does not take the value.
        """
        keys = list[Key]()
        for source in sources:
            if source in self.flags:
                keys += self.flags[source][1]
            elif source in self.keys:
                keys.append(self.keys[source])
                self.mark("written", source)
        try:
            self.flags[name] = checked(name, value), tuple(dict.fromkeys(keys))
        except UserError as error:
            if not keys:
                raise
            raise unusable(keys[0], error) from None

    def drop(self, name: str, status: str) -> None:
        """Removes a flag; its keys have a status of their own."""
        _, keys = self.flags.pop(name)
        self.status |= dict.fromkeys(keys, status)

    def mark(self, status: str, *names: str) -> None:
        """Sets the status of keys, if the input has them and their values are known."""
        for name in names:
            if name in self.keys and not self.keys[name].undecided:
                self.status[self.keys[name]] = status

    @property
    def has_known_shape(self) -> bool:
        """Whether a variant or a Hugging Face model gives the shape."""
        if {"hf_config", "init_from_hf"} & self.flags.keys():
            return True
        return self.get("model_variant", BASE) != BASE

    @property
    def doubtful(self) -> set[str]:
        """The flags whose value is not known: a key is missing, undecided or has no counterpart."""
        flags = set(self.missing)
        for key, status in self.status.items():
            if status in ("undecided", "changes"):
                flags |= self.program.flags_of(key.name)
        return flags

    def find_missing(self) -> None:
        doubtful = self.doubtful
        groups = _DECIDING
        if not self.has_known_shape:
            groups += _DECIDING_SHAPE
        for names in map(str.split, groups.strip().splitlines()):
            if not names or doubtful & set(names):
                continue
            if all(self.get(name) in (None, "") for name in names):
                self.missing.append(names[0])
        needs_devices = not self.get("global_batch_size") and not self.num_devices
        if needs_devices and "num_devices" not in doubtful:
            self.missing.append("num_devices")

    @property
    def config(self) -> TrainConfig:
        """The config of a launch with these flags.

        Raises:
            UserError: a launch rejects them.
        """
        flags = {name: value for name, (value, _) in self.flags.items() if name in TABLE}
        return build_config(TrainConfig, flags)

    @property
    def is_complete(self) -> bool:
        return not self.missing and not set(STOPPING) & set(self.status.values())


def checked(name: str, value: Any) -> Any:
    """Returns the value of a flag in its type.

    Raises:
        UserError: the flag does not take it.
    """
    if name in TABLE:
        value = coerce(TABLE[name], value)
    if name in _SIZES and isinstance(value, int) and value > _MAX_SIZE:
        raise UserError(f"must be at most {_MAX_SIZE:,}")
    return value


def as_text(value: Any) -> str:
    """Returns a value as the tables write it."""
    if value is None:
        return "null"
    return re.sub(r"[\[\]' ]", "", str(value)).lower()


def is_off(value: Any) -> bool:
    return value is None or as_text(value) in _OFF


def shown_key(key: Key) -> str:
    value = key.value if isinstance(key.value, str) else reprlib.repr(key.value)
    return shown(f"{key.name} = {value}")


def unusable(key: Key, error: Exception) -> UserError:
    return UserError(f"{key.place}: {shown_key(key)} cannot be used: {error}")


def number(value: Any) -> Any:
    """Returns an integer or a float.

    Raises:
        UserError: the value is none.
    """
    found = parse_number(str(value))
    if found is None or isinstance(value, bool):
        raise UserError("must be a number")
    return int(found) if found.denominator == 1 else float(value)


def count(value: Any) -> int | None:
    """Returns an integer of at least 1, or None for others, such as a fraction or "auto"."""
    found = parse_number(str(value))
    return int(found) if found and found >= 1 and found.denominator == 1 else None


def _pair(value: Any) -> list[Any]:
    if not isinstance(value, list) or len(value) != 2:
        raise UserError("must be a list of two numbers")
    return value


def _recomputed_blocks(value: Any) -> str:
    """Returns a fraction such as 1/3, or `every:3` for the 3 of earlier versions of upstream."""
    numerator, _, denominator = str(value).partition("/")
    if number(numerator) > number(denominator or 1):
        return f"every:{value}"
    return str(value)


CONVERSIONS: dict[str, Callable[[Any], Any]] = {  # None: as if the key were absent
    "": lambda value: value,
    "text": str,
    "number": number,
    "not": is_off,
    "plus_one": lambda value: number(value) + 1,
    "count": count,
    "positive": lambda value: number(value) if number(value) > 0 else None,
    "zero_if_negative": lambda value: max(0, number(value)),
    "first": lambda value: _pair(value)[0],
    "second": lambda value: _pair(value)[1],
    "samples": lambda value: f"{number(value)}samples",
    "tokens": lambda value: f"{number(value)}tokens",
    "blocks": _recomputed_blocks,
}
