"""The tokens around a text that a model reads, and the tokens that end a text that a model writes.

    a folder of Hugging Face   what its tokenizer adds │ the end tokens of generation_config.json, config.json
    token shards               the begin token of their documents, if they have one

Source: transformers 5.23 (tokenization_utils_tokenizers.py): the post_processor of a tokenizer.json decides;
`add_bos_token` and `add_eos_token` count where there is no tokenizer.json.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

from fms_fsdp.data.corpus import SUFFIX
from fms_fsdp.data.storage import Storage
from fms_fsdp.data.tokenizer import Tokenizer
from fms_fsdp.errors import UserError
from fms_fsdp.extras.hf_tokenizer import token_text
from fms_fsdp.extras.typed_json import (
    ANYTHING,
    FLAG,
    TABLE,
    TEXT,
    list_of,
    or_none,
    read_table,
    whole,
)

_ID = whole(-1, 1 << 31)  # -1: none
_IDS = or_none(list_of(_ID))
_SAMPLED_SHARDS, _SAMPLED_DOCUMENTS = 4, 16


@dataclass(frozen=True)
class TextRules:
    """Ids that stand before and behind a text that is read, and ids that end one that is written."""

    before: tuple[int, ...] = ()
    after: tuple[int, ...] = ()
    ends: tuple[int, ...] = ()


NO_RULES = TextRules()


def rules_of_folder(folder: Path, tokenizer: Tokenizer | None) -> TextRules:
    """Returns the rules of a folder of Hugging Face.

    Raises:
        UserError: a file does not say them as it should.
    """
    ends = _end_tokens(folder)
    if (folder / "tokenizer.json").is_file():
        parts = or_none(TABLE).of(read_table(folder / "tokenizer.json"), "post_processor")
        return TextRules(*_added(parts or {}), ends)
    path, around = folder / "tokenizer_config.json", list[tuple[int, ...]]()
    said = read_table(path) if path.is_file() else {}
    for name in ("bos", "eos"):
        is_added = or_none(FLAG).of(said, f"add_{name}_token") and tokenizer is not None
        token = token_text(said.get(f"{name}_token"), f"{path}: {name}_token") if is_added else ""
        number = (
            tokenizer.token_id(token or _USUAL[name])
            if is_added and tokenizer is not None
            else None
        )
        around.append(() if number is None else (number,))
    return TextRules(around[0], around[1], ends)


_USUAL = {"bos": "<s>", "eos": "</s>"}  # of transformers, where a folder names no such token


def _end_tokens(folder: Path) -> tuple[int, ...]:
    for name in ("generation_config.json", "config.json"):
        if (folder / name).is_file():
            found = read_table(folder / name).get("eos_token_id")
            found = [found] if type(found) is int else found
            numbers: list[int] | None = _IDS.check(f"{folder / name}: eos_token_id", found)
            if numbers:
                return tuple(number for number in numbers if number >= 0)
    return ()


def _added(part: dict[str, Any]) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The ids before and behind a single text, of a post_processor or one of its parts."""
    kind = TEXT.of(part, "type")
    if kind in ("BertProcessing", "RobertaProcessing"):
        ids = [list_of(ANYTHING, 2).of(part, name, ["", -1])[-1] for name in ("cls", "sep")]
        first, last = (whole(0, 1 << 31).check(f"id of {kind}", number) for number in ids)
        return (first,), (last,)
    if kind == "Sequence":
        inner = list(map(_added, list_of(TABLE).of(part, "processors", [])))
        before = tuple(number for ids, _ in reversed(inner) for number in ids)
        return before, tuple(number for _, ids in inner for number in ids)
    if kind != "TemplateProcessing":
        return (), ()
    known, is_behind = TABLE.of(part, "special_tokens", {}), 0
    around: tuple[list[int], list[int]] = ([], [])
    for piece in list_of(TABLE).of(part, "single", []):
        is_behind = is_behind or int("Sequence" in piece)
        if (token := or_none(TABLE).of(piece, "SpecialToken")) is not None:
            name = TEXT.of(token, "id", "")
            entry = TABLE.check("a special token of the post_processor", known.get(name))
            around[is_behind].extend(list_of(whole(0, 1 << 31)).of(entry, "ids", []))
    return tuple(around[0]), tuple(around[1])


def begin_token(root: str, tokenizer: Tokenizer) -> int | None:
    """The token that all documents of a folder of shards begin with, if the shards say that they have a begin
    token, or if the token has no text, such as <s>; None where there is no such token, or no shard can be
    read."""
    try:
        storage = Storage(root)
        shards = (p for p in storage.sizes if p.endswith(SUFFIX) and not p.startswith("meta/"))
        first, says = set[int](), set[str]()
        for path in islice(shards, _SAMPLED_SHARDS):
            shard = storage.open_shard(path)
            first |= set(shard.first_tokens(_SAMPLED_DOCUMENTS))
            says.add(shard.metadata.get("has_bos", ""))
        storage.close()
    except (UserError, OSError):
        return None
    found = next(iter(first)) if len(first) == 1 else -1
    lengths = tokenizer.token_bytes()
    return found if 0 <= found < len(lengths) and (says == {"true"} or not lengths[found]) else None
