"""Text ↔ token ids, for preparing data, for generating text and for bits per byte.

    load_tokenizer("byte" | FILE | FOLDER) ── encode(texts) → token arrays ── decode(ids) → text

Invariant: `decode(encode([text])[0]) == text` for the byte tokenizer and for sentencepiece models trained
here (identity normalisation, no dummy prefix, byte fallback), except for U+2581, sentencepiece's own mark for
a space. Models from elsewhere keep their own rules.
"""

from __future__ import annotations

import functools
import hashlib
import json
import re
from collections.abc import Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from fms_fsdp.atomic import write_atomically
from fms_fsdp.config.values import shown
from fms_fsdp.errors import MissingInput, UserError
from fms_fsdp.safe_names import safe_name, shown_name

Tokens = npt.NDArray[Any]
KEPT_AS = {"byte": "", "sentencepiece": "tokenizer.model", "huggingface": "tokenizer.json"}


@dataclass(frozen=True)
class Vocabulary:
    """The facts that a shard keeps of its tokenizer; `file_name` is the copy beside the shards ("" for
    bytes)."""

    kind: str  # byte | sentencepiece | huggingface
    size: int
    eos_id: int
    digest: str
    file_name: str
    eos_token: str = ""  # as asked for, where the tokenizer's own was not wanted

    def kept_in(self, folder: Path) -> str:
        """Returns the name by which `load_tokenizer` opens the copy in that folder."""
        return str(folder / self.file_name) if self.file_name else self.kind


def parse_description(data: bytes, told_by: str) -> tuple[Vocabulary, Any]:
    """Returns the content of the file meta/tokenizer.json: the vocabulary, and the data that trained the
    tokenizer.

    Raises: UserError.
    """
    try:
        content = json.loads(data)
        values = {spec.name: content[spec.name] for spec in fields(Vocabulary)}
    except (ValueError, KeyError, TypeError, RecursionError):
        raise UserError(
            f"{told_by} is not what prepare wrote; restore or remove the file"
        ) from None
    vocabulary, kinds = Vocabulary(**values), {"size": int, "eos_id": int}
    for name, value in values.items():
        if not isinstance(value, kinds.get(name, str)) or (name == "kind" and value not in KEPT_AS):
            rule = f"says {name} ({shown_name(value)}), which prepare never writes"
            raise UserError(f"{told_by} {rule}; restore or remove the file")
    if vocabulary.kind != "byte" or vocabulary.file_name:
        safe_name(vocabulary.file_name, told_by)
    return vocabulary, content.get("trained_on")


class Tokenizer(Protocol):
    """What every tokenizer can do. Ids of `encode` hold no begin or end token."""

    vocabulary: Vocabulary

    def encode(self, texts: Sequence[str]) -> list[Tokens]:
        """One array of ids per text."""

    def decode(self, ids: Sequence[int]) -> str:
        """The text of the ids; begin and end tokens are left out."""

    def token_bytes(self) -> Tokens:
        """UTF-8 bytes that each id stands for, int64; 0 for begin, end and other control tokens."""

    def token_id(self, token: str) -> int | None:
        """The id of the token that is named so; None where there is none."""

    def unk_id(self) -> int | None:
        """Returns the id that stands for text outside the vocabulary; None if there is none."""

    def save(self, folder: Path) -> None:
        """Writes `vocabulary.file_name` into the folder."""


class ByteTokenizer:
    """The UTF-8 bytes as ids 0–255; 256 begins and 257 ends a document."""

    vocabulary = Vocabulary(
        "byte", 258, 257, hashlib.sha256(b"utf-8 bytes, bos 256, eos 257").hexdigest(), ""
    )

    def encode(self, texts: Sequence[str]) -> list[Tokens]:
        return [np.frombuffer(text.encode(), dtype=np.uint8).astype(np.uint16) for text in texts]

    def decode(self, ids: Sequence[int]) -> str:
        return bytes(i for i in ids if i < 256).decode(errors="replace")

    def token_bytes(self) -> Tokens:
        return (np.arange(self.vocabulary.size) < 256).astype(np.int64)

    def token_id(self, token: str) -> int | None:
        return {"<|begin_of_text|>": 256, "<|end_of_text|>": 257}.get(token)

    def unk_id(self) -> int | None:
        return None

    def save(self, folder: Path) -> None:
        """Nothing to save."""


class SentencePieceTokenizer:
    """A sentencepiece model file."""

    def __init__(self, model: bytes, name: str, eos_token: str = "") -> None:
        import sentencepiece

        self._model = model
        try:
            self._processor = sentencepiece.SentencePieceProcessor(model_proto=model)
            size = int(self._processor.vocab_size())
            for number in range(size):  # a damaged one may have pieces that are no text
                self._processor.id_to_piece(number)
        except (RuntimeError, UnicodeDecodeError) as error:
            text = shown(str(error))
            raise UserError(f"--tokenizer ({name}) is not a sentencepiece model: {text}") from error
        eos = (
            int(self._processor.piece_to_id(eos_token))
            if eos_token
            else int(self._processor.eos_id())
        )
        if eos < 0 or (eos_token and self._processor.id_to_piece(eos) != eos_token):
            raise UserError(no_end_token(name, eos_token))
        self.vocabulary = Vocabulary(
            "sentencepiece",
            size,
            eos,
            hashlib.sha256(model).hexdigest(),
            KEPT_AS["sentencepiece"],
            eos_token,
        )

    def encode(self, texts: Sequence[str]) -> list[Tokens]:
        rows = self._processor.encode(list(texts), out_type=int, num_threads=1)
        return [np.array(row, dtype=np.uint32) for row in rows]

    def decode(self, ids: Sequence[int]) -> str:
        return str(self._processor.decode(list(map(int, ids))))

    def token_bytes(self) -> Tokens:
        model = self._processor
        table = np.zeros(self.vocabulary.size, dtype=np.int64)
        for i in range(self.vocabulary.size):
            if not (model.is_control(i) or model.is_unknown(i) or model.is_unused(i)):
                table[i] = piece_bytes(model.id_to_piece(i))
        return table

    def token_id(self, token: str) -> int | None:
        number = int(self._processor.piece_to_id(token))
        return number if self._processor.id_to_piece(number) == token else None

    def unk_id(self) -> int | None:
        number = int(self._processor.unk_id())
        return number if number >= 0 else None

    def save(self, folder: Path) -> None:
        write_atomically(folder / self.vocabulary.file_name, self._model, sync=True)


def piece_bytes(piece: str) -> int:
    """UTF-8 bytes of a sentencepiece piece: a byte as <0x0A>, or text with U+2581 for a space."""
    return (
        1 if re.fullmatch(r"<0x[0-9A-F]{2}>", piece) else len(piece.replace("\u2581", " ").encode())
    )


def no_end_token(name: str, eos_token: str) -> str:
    if eos_token:
        return f"--eos_token ({eos_token}) is not a token of {name}"
    return f"--tokenizer ({name}) names no end-of-document token; choose one of its tokens with --eos_token"


def load_tokenizer(name: str, eos_token: str = "") -> Tokenizer:
    """Returns the tokenizer `byte`, or that of a file or folder. An unchanged file is not read again.

    The files are `tokenizer.model`, `tokenizer.json`, `vocab.json` with `merges.txt`, or one of tiktoken.

    Raises:
        FileNotFoundError, UserError: no such file, not a tokenizer, or one without an end token.
    """
    if name == "byte":
        return ByteTokenizer()
    path = Path(name).expanduser()
    if path.is_dir():
        names = ("tokenizer.json", "tokenizer.model", "vocab.json")
        found = [path / known for known in names if (path / known).is_file()]
        if not found:
            raise MissingInput(f"--tokenizer ({name}) holds none of {', '.join(names)}")
        path = found[0]
    if not path.is_file():
        raise MissingInput(
            f"--tokenizer ({name}) does not exist; give byte, a model file, or --train_tokenizer"
        )
    digest = hashlib.sha256()
    for file in (path, path.with_name("tokenizer_config.json"), path.with_name("merges.txt")):
        digest.update(hashlib.sha256(file.read_bytes()).digest() if file.is_file() else b"-")
    return _open_tokenizer(path, name, eos_token, digest.hexdigest())


@functools.lru_cache(maxsize=4)
def _open_tokenizer(path: Path, name: str, eos_token: str, digest: str) -> Tokenizer:
    """Returns the tokenizer of a file; `digest`: of that file and of the files beside it that count."""
    data = path.read_bytes()
    is_sentencepiece = (
        data.startswith(b"\n") and path.suffix != ".json"
    )  # the mark of its first field
    if not is_sentencepiece:
        from fms_fsdp.extras.byte_pairs import is_tiktoken

        if path.suffix == ".json" or is_tiktoken(data):
            from fms_fsdp.extras.hf_tokenizer import HuggingFaceTokenizer

            return HuggingFaceTokenizer(path, eos_token)
    return SentencePieceTokenizer(data, name, eos_token)
