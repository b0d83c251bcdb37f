"""The flags of ours that the keys of another program give, and what is known of each key."""

from __future__ import annotations

import re
import reprlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from fms_fsdp.config import TrainConfig
from fms_fsdp.config.flag import coerce, flag_table
from fms_fsdp.config.values import parse_number, shown
from fms_fsdp.errors import UserError
from fms_fsdp.tools.other_configs import Key

TABLE = flag_table(TrainConfig)
BASE = "194m"  # a variant whose shape flags replace
SHAPE = ("num_layers", "hidden_size", "num_attention_heads")
LISTS = {  # status of a key: title of its list
    "unknown": "unknown key, may change results",
    "changes": "no counterpart, changes results",
    "undecided": "undecided",
    "no effect": "no counterpart, no effect on results",
    "default": "our default already",
}
STOPPING = ("unknown", "changes", "undecided")
# What decides results or cost: one flag of each group must come from the input or from a default
# that the program defines. Ours would be silently wrong.
_DECIDING = (
    ("num_steps", "num_samples", "num_tokens", "num_epochs"),
    ("batch_size", "global_batch_size"),
    ("seq_length",),
    ("learning_rate",),
    ("lr_schedule",),
    ("warmup",),
    ("min_lr", "min_lr_ratio"),
    ("weight_decay",),
    ("adam_beta1",),
    ("adam_beta2",),
    ("grad_clip",),
    ("precision", "mixed_precision"),
    ("data_path", "use_dummy_dataset"),
)
_DECIDING_SHAPE = (
    *((name,) for name in SHAPE),
    ("ffn_hidden_size",),
    ("norm",),
    ("activation",),
    ("pos_emb",),
    ("dropout",),
    ("attn_dropout",),
    ("vocab_size", "_tokenizer"),
)
_MAX_SIZE = 2**22  # of a flag that is no length of the run; larger numbers are typing errors
_SIZES = (*SHAPE, "ffn_hidden_size", "seq_length", "max_seq_len", "vocab_size", "batch_size")


@dataclass
class Translation:
    """The flags of ours that keys give, and the status of each key.

    keys     of the input, by name
    flags    flag -> its value and the keys that gave it; no keys for a default of the program
    status   key -> a key of `LISTS`, or "written"
    missing  flags that decide the run, and that neither the input nor the program defines
    """

    title: str
    keys: Mapping[str, Key]
    flags: dict[str, tuple[Any, tuple[Key, ...]]] = field(default_factory=dict)
    status: dict[Key, str] = field(default_factory=dict)
    missing: list[str] = field(default_factory=list)
    commands: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def given(self, key: str) -> str:
        """Returns the value of a key as the tables write it; "" if it is absent, empty or undecided."""
        found = self.keys.get(key)
        if found is None or found.undecided or found.value is None:
            return ""
        return as_text(found.value)

    def number_of(self, key: str, default: int = 0) -> Any:
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

    def get(self, name: str, default: Any = None) -> Any:
        if name not in self.flags:
            return default
        value, _ = self.flags[name]
        return value

    def set(self, name: str, value: Any, *sources: str) -> None:
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
                self.status[self.keys[source]] = "written"
        try:
            check(name, value)
        except UserError as error:
            if not keys:
                raise
            raise unusable(keys[0], error) from None
        self.flags[name] = value, tuple(dict.fromkeys(keys))

    def mark(self, status: str, *names: str) -> None:
        """Sets the status of keys, if the input has them."""
        for name in names:
            if name in self.keys:
                self.status[self.keys[name]] = status

    def is_default(self, name: str) -> bool:
        row = TABLE.get(name)
        return row is not None and coerce(row, self.get(name)) == row.default

    @property
    def has_known_shape(self) -> bool:
        """Whether a variant or a Hugging Face model gives the shape."""
        if {"hf_config", "init_from_hf"} & self.flags.keys():
            return True
        return self.get("model_variant", BASE) != BASE

    def find_missing(self) -> None:
        groups = list(_DECIDING)
        if not self.has_known_shape:
            groups += _DECIDING_SHAPE
        for names in groups:
            if all(self.get(name) in (None, "") for name in names):
                self.missing.append(names[0])
        if not self.get("global_batch_size") and not self.get("_num_devices"):
            self.missing.append("num_devices")

    @property
    def is_complete(self) -> bool:
        return not self.missing and not set(STOPPING) & set(self.status.values())


def check(name: str, value: Any) -> None:
    """Checks the value of a flag.

    Raises:
        UserError: the flag does not take it.
    """
    if name in TABLE:
        coerce(TABLE[name], value)
    if name in _SIZES and value is not None and number(value) > _MAX_SIZE:
        raise UserError(f"must be at most {_MAX_SIZE:,}")


def as_text(value: Any) -> str:
    """Returns a value as the tables write it."""
    if value is None:
        return "null"
    return re.sub(r"[\[\]' ]", "", str(value)).lower()


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


CONVERSIONS: dict[str, Callable[[Any], Any]] = {  # None: as if the key were absent
    "": lambda value: value,
    "text": str,
    "number": number,
    "not": lambda value: as_text(value) not in ("true", "1"),
    "count": count,
    "positive": lambda value: number(value) if number(value) > 0 else None,
    "zero_if_negative": lambda value: max(0, number(value)),
    "first": lambda value: _pair(value)[0],
    "second": lambda value: _pair(value)[1],
    "samples": lambda value: f"{number(value)}samples",
    "tokens": lambda value: f"{number(value)}tokens",
    "every": lambda value: str(value) if number(value) <= 1 else f"every:{number(value)}",
}
