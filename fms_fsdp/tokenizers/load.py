"""The tokenizer of a name: `byte`, a file, or a folder."""

from __future__ import annotations

import functools
import hashlib
from pathlib import Path

from fms_fsdp.errors import MissingInput, UserError
from fms_fsdp.files import read_json_object
from fms_fsdp.packages import is_installed
from fms_fsdp.tokenizers.huggingface import HFTokenizer
from fms_fsdp.tokenizers.tokenizer import (
    FILE_NAMES,
    ByteTokenizer,
    SentencePieceTokenizer,
    Tokenizer,
)

# Files that belong to the one that names a tokenizer.
_BESIDE = ("tokenizer_config.json", "merges.txt", "added_tokens.json", "special_tokens_map.json")


def load_tokenizer(name: str, eos_token: str = "") -> Tokenizer:
    """Returns the tokenizer `byte`, or the one of a file or folder. An unchanged file is read once.

    Of a folder, the tokenizer is read that meta/tokenizer.json describes; without one,
    tokenizer.json is read before tokenizer.model if the package tokenizers is installed.

    Raises:
        FileNotFoundError, UserError: no such file, not a tokenizer, or one without an EOS token.
    """
    if name == "byte":
        return _byte_tokenizer(eos_token)
    path = Path(name).expanduser()
    described = path / "meta" / "tokenizer.json"  # of an output of `prepare`
    if described.is_file():
        description = read_json_object(described)
        kind = description.get("kind")
        if kind == "byte":
            return _byte_tokenizer(eos_token)
        file = path / FILE_NAMES.get(str(kind), "")
        if file.is_file():
            path = file
            # A sentencepiece model does not record the --eos_token that replaced its own.
            eos_token = eos_token or str(description.get("eos_token") or "")
    if path.is_dir():
        names = ["tokenizer.json", "tokenizer.model", "vocab.json", "tokenizer_config.json"]
        if not is_installed("tokenizers"):
            names = ["tokenizer.model", "tokenizer.json", "vocab.json", "tokenizer_config.json"]
        found = [path / each for each in names if (path / each).is_file()]
        if not found:
            raise MissingInput(f"--tokenizer ({name}) has none of {', '.join(names)}")
        path = found[0]
    if not path.is_file():
        raise MissingInput(
            f"--tokenizer ({name}) does not exist; set it to byte or a model file, or use --train_tokenizer"
        )
    digest = hashlib.sha256()
    for file in (path, *(path.with_name(each) for each in _BESIDE)):
        digest.update(hashlib.sha256(file.read_bytes()).digest() if file.is_file() else b"-")
    return _load(path, name, eos_token, digest.hexdigest())


def _byte_tokenizer(eos_token: str) -> Tokenizer:
    tokenizer = ByteTokenizer()
    if eos_token and tokenizer.token_id(eos_token) != tokenizer.vocabulary.eos_id:
        raise UserError(
            f"--eos_token={eos_token} is not the EOS token of --tokenizer=byte, <|end_of_text|>; "
            "remove the flag"
        )
    return tokenizer


@functools.lru_cache(maxsize=4)
def _load(path: Path, name: str, eos_token: str, digest: str) -> Tokenizer:
    """Loads a tokenizer; `digest` covers its files, so that the cache rereads a changed file."""
    if path.suffix == ".json":
        return HFTokenizer(path, eos_token)
    return SentencePieceTokenizer(path.read_bytes(), name, eos_token)
