"""The tokenizer that `prepare` left beside shards, and whether two things have the same tokenizer.

shards: digest in their metadata ── checkpoint: digest in `resolved` ── a folder of Hugging Face
                └──────────────── check_same_tokenizer ────────────────┘
"""

from __future__ import annotations

import json
import logging
import tempfile
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from fms_fsdp.data.shards import Files
from fms_fsdp.data.storage import Storage
from fms_fsdp.data.tokenizer import (
    KEPT_AS,
    ByteTokenizer,
    Tokenizer,
    load_tokenizer,
    parse_description,
)
from fms_fsdp.errors import UserError

_DESCRIBED = "meta/tokenizer.json"
_END_NAMED = "tokenizer_config.json"  # beside a tokenizer.json
_SUMMARY = "meta/summary.json"
_MAX_UNK_FRACTION = 1e-3  # of the tokens of a source
_LARGEST_FILE = 1 << 28  # bytes of a tokenizer
# what tokenizers cut in different ways
_PROBES = (
    "The quick brown fox, isn't it? 'Tis DON'T\u00a0naïve Ünïcode.",
    "  two spaces,\tTabs\n\n\nlines\r\n   trailing   ",
    "0 12 345 6789 3.14159 1,000,000 2026-11-22",
    "def f(x: int) -> str:\n    return x[0:-1] != {'a': \"b\"}  # TODO\n",
    "漢字かな交じり文 한국어 Русский текст العربية हिन्दी 😀👩‍👩‍👧",
    "https://example.org/a_b?c=%20d&e=f#g <s></s><|endoftext|>[SEP]",
)

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class UsedTokenizer:
    """Which tokenizer something was made with. `name`: the thing, for a message; `digest`: of the tokenizer,
    "" if not known; `find` opens a copy, None if there is none."""

    name: str
    digest: str
    find: Callable[[], Tokenizer | None]


def folder_tokenizer(name: str, digest: str, root: str) -> UsedTokenizer:
    """Returns the tokenizer of the shards in a folder, or of the shards that a checkpoint was trained on."""
    return UsedTokenizer(name, digest, lambda: find_tokenizer(root) if root else None)


def check_same_tokenizer(one: UsedTokenizer, other: UsedTokenizer, remedy: str) -> None:
    """Checks that two things have the same tokenizer. Two files of one tokenizer may differ, as
    tokenizer.model and tokenizer.json do: where digests differ, a page of text is compared, if both files can
    be opened.

    Raises:
        UserError: they are two tokenizers.
    """
    if not one.digest or not other.digest or one.digest == other.digest:
        return
    ids = []
    for each in (one, other):
        found = each.find()
        if found is not None and found.vocabulary.digest == each.digest:
            ids.append([row.tolist() for row in found.encode(_PROBES)])
    if len(ids) < 2 or ids[0] != ids[1]:
        names = f"{one.name} is of tokenizer {one.digest[:12]}, {other.name} of {other.digest[:12]}"
        raise UserError(f"{names}; {remedy}")


def find_tokenizer(root: str) -> Tokenizer | None:
    """Returns the tokenizer that `prepare` left in a folder of shards, None if there is none.

    Raises: UserError for a description that cannot be trusted.
    """
    try:
        files = Storage(root)
        data = _read_whole(files, _DESCRIBED)
    except (ValueError, OSError) as error:
        logger.debug("no tokenizer there: %s", error)
        return None
    described, _ = parse_description(data, f"{files.root}/{_DESCRIBED}")
    if described.kind == "byte":
        return ByteTokenizer()
    try:
        with tempfile.TemporaryDirectory() as folder:
            copy = Path(folder) / KEPT_AS[described.kind]
            copy.write_bytes(_read_whole(files, described.file_name))
            with suppress(FileNotFoundError):
                if described.kind == "huggingface":
                    copy.with_name(_END_NAMED).write_bytes(_read_whole(files, _END_NAMED))
            return load_tokenizer(str(copy), described.eos_token)
    except (ValueError, OSError) as error:
        logger.debug("no tokenizer there: %s", error)
        return None


def unk_warning(source: str, fraction: float) -> str:
    """Returns a warning if more than 0.1 % of the tokens of a source are `<unk>`, else an empty text."""
    if fraction <= _MAX_UNK_FRACTION:
        return ""
    found = f"{fraction:.2%} of the tokens of source {source} are <unk>"
    return (
        f"{found}: the tokenizer lacks characters of the text; prepare it with another --tokenizer"
    )


def unk_warnings(files: Files, sources: Iterable[str]) -> list[str]:
    """Returns the warnings of `unk_warning` for sources whose `prepare` counted their `<unk>` tokens."""
    try:
        summary = json.loads(_read_whole(files, _SUMMARY))
        fractions = {
            name: float(summary[name]["unk_fraction"]) for name in sources if name in summary
        }
    except (ValueError, OSError, KeyError, TypeError, RecursionError):
        return []  # not written by this program
    return [text for name, each in fractions.items() if (text := unk_warning(name, each))]


def _read_whole(files: Files, path: str) -> bytes:
    """Returns the content of a small file. Raises: UserError, OSError."""
    if path not in files.sizes:
        raise FileNotFoundError(f"{files.root}/{path} does not exist")
    size = files.sizes[path]
    if size > _LARGEST_FILE:
        raise UserError(
            f"{path} ({size:,} bytes) must have at most {_LARGEST_FILE:,}; restore or remove the file"
        )
    return files.read(path, size, 0)
