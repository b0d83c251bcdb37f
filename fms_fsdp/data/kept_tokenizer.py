"""The tokenizer that `prepare` keeps with its shards.

find_tokenizer(data_path) ── the tokenizer of token shards
"""

from __future__ import annotations

import json
import logging
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import fields
from itertools import islice
from pathlib import Path
from typing import Any

from fms_fsdp.data.corpus import SUFFIX
from fms_fsdp.data.open_storage import open_storage
from fms_fsdp.data.shards import Files
from fms_fsdp.errors import MissingInput, ReadFailed, UserError
from fms_fsdp.files import safe_name, shown_name
from fms_fsdp.tokenizers.load import load_tokenizer
from fms_fsdp.tokenizers.tokenizer import (
    FILE_NAMES,
    ByteTokenizer,
    Tokenizer,
    UsedTokenizer,
    Vocabulary,
)

_LARGEST_FILE = 1 << 28  # bytes of a tokenizer
_MAX_UNK_FRACTION = 1e-3  # of the tokens of a source

logger = logging.getLogger(__name__)


def parse_description(data: bytes, source: str) -> tuple[Vocabulary, Any]:
    """Returns the vocabulary in meta/tokenizer.json, and the data that the tokenizer was trained on.

    Raises:
        UserError: the content is not what `prepare` writes.
    """
    try:
        content = json.loads(data)
        values = {each.name: content[each.name] for each in fields(Vocabulary)}
    except (ValueError, KeyError, TypeError, RecursionError):
        raise UserError(
            f"{source} was not written by prepare; restore or remove the file"
        ) from None
    for name, value in values.items():
        kind = int if name in ("size", "eos_id") else str
        if not isinstance(value, kind) or (name == "kind" and value not in FILE_NAMES):
            rule = f"says {name} ({shown_name(value)}), which prepare never writes"
            raise UserError(f"{source} {rule}; restore or remove the file")
    if values["kind"] != "byte" or values["file_name"]:
        safe_name(values["file_name"], source)
    return Vocabulary(**values), content.get("trained_on")


class UnusableTokenizer(UserError):
    """The tokenizer of the data is there, and needs a package or space that the machine lacks."""


def find_tokenizer(root: str) -> Tokenizer | None:
    """Returns the tokenizer that `prepare` kept with the shards of a folder; None without one.

    Raises:
        UnusableTokenizer: it cannot be loaded, or copied to the temporary folder.
        UserError: its description was not written by `prepare`.
        OSError, ReadFailed: the storage does not give its files.
    """
    try:
        files = open_storage(root)
    except MissingInput:
        return None
    data = _read_if_there(files, "meta/tokenizer.json")
    if data is None:
        return None
    described, _ = parse_description(data, f"{files.root}/meta/tokenizer.json")
    if described.kind == "byte":
        return ByteTokenizer()
    model = _read_if_there(files, described.file_name)
    if model is None:
        logger.debug("no tokenizer in %s: %s does not exist", root, described.file_name)
        return None
    contents = {FILE_NAMES[described.kind]: model}
    settings = _read_if_there(files, "tokenizer_config.json")
    if settings is not None:
        contents["tokenizer_config.json"] = settings
    with _temporary_copy(contents) as folder:
        copy = str(folder / FILE_NAMES[described.kind])
        try:
            return load_tokenizer(copy, described.eos_token)
        except UserError as error:
            name = f"the tokenizer of {files.root}"
            reason = str(error).replace(f"--tokenizer ({copy})", name)
            raise UnusableTokenizer(reason) from error


def read_kept_file(root: str, path: str) -> bytes | None:
    """Returns a small file that `prepare` kept with the shards of a folder, None if there is none.

    Raises:
        UserError, OSError, ReadFailed: it cannot be read.
    """
    try:
        return _read_if_there(open_storage(root), path)
    except MissingInput:
        return None


@contextmanager
def _temporary_copy(contents: Mapping[str, bytes]) -> Iterator[Path]:
    """Writes files, by name, into a folder that exists within the context.

    Raises:
        UnusableTokenizer: there is no space for them. It must not look like a missing tokenizer, with
            which an export would continue: tempfile raises FileNotFoundError if no temporary folder
            can be written.
    """
    with ExitStack() as stack:
        try:
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
            for name, data in contents.items():
                (folder / name).write_bytes(data)
        except OSError as error:
            raise UnusableTokenizer(
                f"the tokenizer cannot be copied to the temporary folder: {error.strerror}; "
                "free disk space, or set TMPDIR to another folder"
            ) from error
        yield folder


def _read_if_there(files: Files, path: str) -> bytes | None:
    """Returns the content of a small file, None if there is none. Raises: UserError, OSError."""
    try:
        return _read(files, path)
    except FileNotFoundError:
        return None


def _read(files: Files, path: str) -> bytes:
    """Returns the content of a small file. Raises: UserError, OSError."""
    size = files.size(path)
    if size > _LARGEST_FILE:
        raise UserError(
            f"{path} ({size:,} bytes) must have at most {_LARGEST_FILE:,}; restore the file"
        )
    return files.read(path, size, 0)


def unk_warning(source: str, fraction: float) -> str:
    """Returns a warning if more than 0.1 % of the tokens of a source are `<unk>`, otherwise ""."""
    if fraction <= _MAX_UNK_FRACTION:
        return ""
    return (
        f"{fraction:.2%} of the tokens of source {source} are <unk>: the tokenizer lacks characters "
        "of the text; prepare it with another --tokenizer"
    )


def unk_warnings(files: Files, sources: Iterable[str]) -> list[str]:
    """Returns the `unk_warning` of each source whose `<unk>` tokens `prepare` counted."""
    try:
        summary = json.loads(_read(files, "meta/summary.json"))
        fractions = {
            name: float(summary[name]["unk_fraction"]) for name in sources if name in summary
        }
    except (ValueError, OSError, KeyError, TypeError, RecursionError):
        return []  # not written by this program
    except ReadFailed:  # on rank 0 alone; no step needs the file
        return []
    warnings = [unk_warning(name, fraction) for name, fraction in fractions.items()]
    return [warning for warning in warnings if warning]


def folder_tokenizer(name: str, digest: str, root: str) -> UsedTokenizer:
    """Returns the tokenizer of the shards in a folder, or of the shards that a checkpoint was trained on."""
    return UsedTokenizer(name, digest, lambda: find_tokenizer(root) if root else None)


def shards_bos_id(root: str, tokenizer: Tokenizer) -> int | None:
    """Returns the BOS token that all documents of a folder of shards begin with, from a sample of them; None
    without one. A first token counts if the shards record a BOS token, or if it has no text, such as <s>.

    Raises:
        UserError, OSError, ReadFailed: a shard is corrupt, or cannot be read.
    """
    try:
        storage = open_storage(root)
        shards = (p for p in storage.sizes if p.endswith(SUFFIX) and not p.startswith("meta/"))
        first = set[int]()
        has_bos = set[str]()
        for path in islice(shards, 4):
            shard = storage.open_shard(path)
            first |= set(shard.first_tokens(16))
            has_bos.add(shard.metadata.get("has_bos", ""))
        storage.close()
    except FileNotFoundError:  # the data are gone
        return None
    found = next(iter(first)) if len(first) == 1 else -1
    lengths = tokenizer.token_bytes()
    is_known = 0 <= found < len(lengths)
    return found if is_known and (has_bos == {"true"} or not lengths[found]) else None
