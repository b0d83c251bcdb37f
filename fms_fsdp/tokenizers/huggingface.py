"""Tokenizers of Hugging Face checkpoints, through the packages of the extra `hf`.

tokenizer.json, vocab.json + merges.txt ── tokenizers ─┐
any other format ── transformers.AutoTokenizer ────────┴─ HFTokenizer
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from fms_fsdp.config.values import shown
from fms_fsdp.errors import UserError, note_once
from fms_fsdp.files import read_json_object, write_atomically, write_json
from fms_fsdp.tokenizers.tokenizer import (
    Tokens,
    Vocabulary,
    no_end_token,
    piece_bytes,
    token_text,
)

_END_NAMES = (
    "</s>",
    "<|end_of_text|>",
    "<|endoftext|>",
    "<eos>",
    "<|eot_id|>",
    "<|im_end|>",
    "[SEP]",
)
# classes of transformers; others split numbers or letters in another way
_LIKE_GPT2 = ("GPT2Tokenizer", "RobertaTokenizer", "CodeGenTokenizer")

# C0, C1 and F5 to FF, which byte-level tokenizers write as the characters of these numbers
_BYTES_NOT_IN_UTF8 = "ÀÁõö÷øùúûüýþÿ"

os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")  # prepare runs a process per core


def missing_package(package: str, purpose: str) -> UserError:
    return UserError(f"{purpose} requires the package {package}; run: pip install {package}")


class HFTokenizer:
    """A tokenizer of the package tokenizers."""

    def __init__(self, path: Path, eos_token: str = "") -> None:
        self._name = str(path)
        name = f"--tokenizer ({path})"
        try:
            import tokenizers
        except ImportError:
            raise missing_package("tokenizers", name) from None
        try:
            self._content = _read_tokenizer_json(path, name)
            self._tokenizer = tokenizers.Tokenizer.from_buffer(self._content)
            largest = max(self._tokenizer.get_vocab(with_added_tokens=True).values())
        except UserError:
            raise
        except (
            BaseException
        ) as error:  # the package raises bare Exceptions, and panics that are none
            if isinstance(error, KeyboardInterrupt | SystemExit):
                raise
            raise UserError(
                f"{name} cannot be read: {shown(str(error))}; replace the file"
            ) from error
        self._tokenizer.encode_special_tokens = True  # "<|endoftext|>" in a document is text
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        named = eos_token
        settings = path.with_name("tokenizer_config.json")
        if not named and settings.is_file():
            named = token_text(read_json_object(settings), "eos_token")
        eos_id = self._find_end((named,) if named else _END_NAMES)
        if eos_id is None:
            raise UserError(no_end_token(str(path), eos_token))
        if largest >= 1 << 24:
            raise UserError(f"{name}: the largest id ({largest:,}) must be below {1 << 24:,}")
        digest = hashlib.sha256(self._content).hexdigest()
        self.vocabulary = Vocabulary(
            "huggingface", 1 + largest, eos_id, digest, "tokenizer.json", eos_token
        )

    def _find_end(self, names: Sequence[str]) -> int | None:
        """Returns the id of the first of these tokens, preferably of an added one."""
        ids = [self._tokenizer.token_to_id(name) for name in names]
        known = [number for number in ids if number is not None]
        added = self._tokenizer.get_added_tokens_decoder()
        for number in known:
            if number in added:
                return number
        return known[0] if known else None  # "</s>" may also be a piece of text

    def encode(self, texts: Sequence[str]) -> list[Tokens]:
        try:
            rows = self._tokenizer.encode_batch_fast(list(texts), add_special_tokens=False)
        except Exception as error:
            if type(error) is not Exception:  # the package has no class for its own errors
                raise
            raise UserError(
                f"--tokenizer ({self._name}) cannot encode the text: {shown(str(error))}; use a "
                "tokenizer with an unknown token or byte fallback"
            ) from error
        return [np.array(row.ids, dtype=np.uint32) for row in rows]

    def decode(self, ids: Sequence[int]) -> str:
        return str(self._tokenizer.decode(list(map(int, ids))))

    def added_tokens(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Returns the ids that the tokenizer adds before and after a text."""
        plain = self._tokenizer.encode("a", add_special_tokens=False).ids
        ids = self._tokenizer.encode("a").ids
        start = 0
        for position in range(len(ids) - len(plain) + 1):
            if ids[position : position + len(plain)] == plain:
                start = position
                break
        return tuple(ids[:start]), tuple(ids[start + len(plain) :])

    def token_bytes(self) -> Tokens:
        content = json.loads(self._content)
        steps = json.dumps([content.get("pre_tokenizer"), content.get("decoder")])
        is_byte_level = "ByteLevel" in steps
        table = np.zeros(self.vocabulary.size, dtype=np.int64)
        for piece, number in self._tokenizer.get_vocab(with_added_tokens=False).items():
            if is_byte_level:
                table[number] = len(piece)  # a character per byte
            else:
                table[number] = piece_bytes(piece)
        for number, token in self._tokenizer.get_added_tokens_decoder().items():
            table[number] = 0 if token.special else len(token.content.encode())
        table[self.vocabulary.eos_id] = 0  # of vocab.json, it is not an added token
        return table

    def token_id(self, token: str) -> int | None:
        number: int | None = self._tokenizer.token_to_id(token)
        return number

    def unk_id(self) -> int | None:
        model = json.loads(self._content)["model"]
        if isinstance(model.get("unk_id"), int):  # of unigram models
            return int(model["unk_id"])
        token = model.get("unk_token")
        return self.token_id(token) if isinstance(token, str) else None

    def drops_text(self) -> bool:
        """Returns whether text without a token is dropped: BPE does so without an unknown token."""
        content = json.loads(self._content)
        model = content["model"]
        if "merges" not in model or model.get("unk_token"):
            return False
        # Some tokenizers write bytes as characters in their normalizer.
        if "ByteLevel" in json.dumps([content.get("normalizer"), content.get("pre_tokenizer")]):
            from tokenizers.pre_tokenizers import ByteLevel

            pieces = set(ByteLevel.alphabet()) - set(_BYTES_NOT_IN_UTF8)
        elif model.get("byte_fallback"):
            pieces = {f"<0x{number:02X}>" for number in range(256)}
        else:
            return True
        return not pieces <= self._tokenizer.get_vocab(with_added_tokens=False).keys()

    def save(self, folder: Path) -> None:
        write_atomically(folder / self.vocabulary.file_name, self._content, sync=True)
        end = self._tokenizer.id_to_token(self.vocabulary.eos_id)
        write_json(folder / "tokenizer_config.json", {"eos_token": end})


def _splits_as_gpt2(path: Path) -> bool:
    """Returns whether the tokenizer of a vocab.json splits text as GPT-2's, by the class that its
    folder names; without a name it is GPT-2's own pair of files."""
    if path.with_name("added_tokens.json").is_file():  # its tokens are not in vocab.json
        return False
    path_of_settings = path.with_name("tokenizer_config.json")
    if not path_of_settings.is_file():
        return True
    settings = read_json_object(path_of_settings)
    if settings.get("add_prefix_space"):
        return False
    name = str(settings.get("tokenizer_class") or "GPT2Tokenizer")
    return name.removesuffix("Fast") in _LIKE_GPT2


def _read_tokenizer_json(path: Path, name: str) -> bytes:
    """Returns the content of a tokenizer.json, converted from other formats by the packages."""
    if path.name == "vocab.json" and _splits_as_gpt2(path):
        import tokenizers

        merges = str(path.with_name("merges.txt"))
        content = str(tokenizers.ByteLevelBPETokenizer(str(path), merges).to_str()).encode()
    elif path.suffix == ".json" and path.name not in ("tokenizer_config.json", "vocab.json"):
        content = path.read_bytes()
    else:
        try:
            from transformers import AutoTokenizer
        except ImportError:
            raise missing_package("transformers", name) from None
        auto: Any = AutoTokenizer
        opened = auto.from_pretrained(path.parent, local_files_only=True)
        if len(opened) <= len(opened.all_special_tokens):
            raise UserError(f"{name} has no vocabulary that transformers reads; download it again")
        if not opened.is_fast:
            raise UserError(f"{name} has no fast tokenizer in transformers; give a tokenizer.json")
        content = opened.backend_tokenizer.to_str().encode()
    parsed = json.loads(content)
    dropout = parsed["model"].get("dropout")
    if dropout:
        note_once(f"{name} drops merges at random (dropout={dropout}); the dropout is switched off")
        parsed["model"]["dropout"] = None
        content = json.dumps(parsed, ensure_ascii=False).encode()
    return content
