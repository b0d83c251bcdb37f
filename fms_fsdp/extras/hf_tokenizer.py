"""Tokenizers of Hugging Face: a tokenizer.json, or what becomes one."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from fms_fsdp.atomic import write_atomically, write_json
from fms_fsdp.config.values import shown
from fms_fsdp.data.tokenizer import KEPT_AS, Tokens, Vocabulary, no_end_token, piece_bytes
from fms_fsdp.errors import UserError, note_once
from fms_fsdp.extras.byte_pairs import of_tiktoken
from fms_fsdp.extras.typed_json import TEXT, or_none, parse_table, read_table, whole

_END_NAMES = (
    "</s>",
    "<|end_of_text|>",
    "<|endoftext|>",
    "<eos>",
    "<|eot_id|>",
    "<|im_end|>",
    "[SEP]",
)
_LARGEST_ID = 1 << 24
# what a folder of Hugging Face says of its texts
TOKENIZER_FILES = tuple(
    "tokenizer.json tokenizer_config.json special_tokens_map.json added_tokens.json tokenizer.model "
    "vocab.json merges.txt vocab.txt spiece.model sentencepiece.bpe.model tekken.json chat_template.jinja "
    "generation_config.json".split()
)


class HuggingFaceTokenizer:
    """A `tokenizer.json`, or one made of GPT-2's `vocab.json` and `merges.txt` or of a file of tiktoken.

    Needs the package `tokenizers`."""

    def __init__(self, path: Path, eos_token: str = "") -> None:
        os.environ.setdefault(
            "TOKENIZERS_PARALLELISM", "false"
        )  # prepare runs one process per core already
        try:
            import tokenizers
        except ImportError:
            raise UserError(
                f"--tokenizer ({path}) needs the package tokenizers; pip install tokenizers"
            ) from None
        content = path.read_bytes()
        try:
            if path.name == "vocab.json":
                merges = str(path.with_name("merges.txt"))
                content = tokenizers.ByteLevelBPETokenizer(str(path), merges).to_str().encode()
            elif path.suffix != ".json":
                content = of_tiktoken(content, str(path)).encode()
            self._content = _without_chance(content, str(path))
            self._tokenizer = tokenizers.Tokenizer.from_buffer(self._content)
        except UserError:
            raise
        except (
            BaseException
        ) as error:  # the package raises bare Exceptions, and panics that are none
            if isinstance(error, KeyboardInterrupt | SystemExit):
                raise
            raise UserError(f"--tokenizer ({path}) cannot be read: {shown(str(error))}") from error
        # a document that spells <|endoftext|> holds text, not the token
        self._tokenizer.encode_special_tokens = True
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        numbers = map(self._tokenizer.token_to_id, self._end_names(path, eos_token))
        known = [number for number in numbers if number is not None]
        added = self._tokenizer.get_added_tokens_decoder()  # "</s>" may be a piece of text, too
        eos = next((number for number in known if number in added), known[0] if known else None)
        if eos is None:
            raise UserError(no_end_token(str(path), eos_token))
        largest = max(self._tokenizer.get_vocab(with_added_tokens=True).values())
        size = 1 + whole(0, _LARGEST_ID).check(f"--tokenizer ({path}): the largest id", largest)
        digest = hashlib.sha256(self._content).hexdigest()
        self.vocabulary = Vocabulary(
            "huggingface", size, eos, digest, KEPT_AS["huggingface"], eos_token
        )

    @staticmethod
    def _end_names(path: Path, eos_token: str) -> Sequence[str]:
        if eos_token:
            return (eos_token,)
        settings = path.with_name("tokenizer_config.json")
        said = read_table(settings) if settings.is_file() else {}
        named = token_text(said.get("eos_token"), f"{settings}: eos_token")
        return (named,) if named else _END_NAMES

    def encode(self, texts: Sequence[str]) -> list[Tokens]:
        rows = self._tokenizer.encode_batch_fast(list(texts), add_special_tokens=False)
        return [np.array(row.ids, dtype=np.uint32) for row in rows]

    def decode(self, ids: Sequence[int]) -> str:
        return str(self._tokenizer.decode(list(map(int, ids))))

    def token_bytes(self) -> Tokens:
        content = json.loads(self._content)
        # a character is a byte
        by_bytes = "ByteLevel" in json.dumps([content.get("pre_tokenizer"), content.get("decoder")])
        table = np.zeros(self.vocabulary.size, dtype=np.int64)
        for piece, i in self._tokenizer.get_vocab(with_added_tokens=False).items():
            table[i] = len(piece) if by_bytes else piece_bytes(piece)
        for added in content.get("added_tokens", []):
            table[added["id"]] = 0 if added["special"] else len(added["content"].encode())
        return table

    def token_id(self, token: str) -> int | None:
        number: int | None = self._tokenizer.token_to_id(token)
        return number

    def unk_id(self) -> int | None:
        model = json.loads(self._content)["model"]
        if model.get("type") == "Unigram":
            number: int | None = model.get("unk_id")
            return number
        name = model.get("unk_token")
        return self.token_id(name) if isinstance(name, str) else None

    def save(self, folder: Path) -> None:
        write_atomically(folder / self.vocabulary.file_name, self._content, sync=True)
        end = self._tokenizer.id_to_token(self.vocabulary.eos_id)
        write_json(folder / "tokenizer_config.json", {"eos_token": end})


def _without_chance(content: bytes, name: str) -> bytes:
    """A tokenizer.json that cuts a text the same way each time: a dropout of merges is switched off."""
    parsed = parse_table(content, name)
    model = parsed.get("model")
    if not isinstance(model, dict) or not model.get("dropout"):
        return content
    rate = model["dropout"]
    note_once(f"{name} drops merges by chance (dropout {rate}), which is switched off here")
    return json.dumps(parsed | {"model": model | {"dropout": None}}, ensure_ascii=False).encode()


def token_text(said: Any, name: str) -> str:
    """Returns the text of a token by what a file says: its text, or a table with its content; "" for null."""
    said = TEXT.check(f"content of {name}", said.get("content")) if isinstance(said, dict) else said
    return or_none(TEXT).check(name, said) or ""
