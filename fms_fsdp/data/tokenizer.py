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
import os
import re
from collections.abc import Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from fms_fsdp.atomic import write_atomically, write_json
from fms_fsdp.config.values import shown
from fms_fsdp.data.byte_pairs import is_tiktoken, of_tiktoken
from fms_fsdp.errors import MissingInput, UserError, note_once
from fms_fsdp.safe_names import safe_name, shown_name
from fms_fsdp.typed_json import TEXT, or_none, parse_table, read_table, whole

Tokens = npt.NDArray[Any]
_END_NAMES = ("</s>", "<|end_of_text|>", "<|endoftext|>", "<eos>", "<|eot_id|>", "<|im_end|>", "[SEP]")
_LARGEST_ID = 1 << 24
# what a folder of Hugging Face says of its texts
TOKENIZER_FILES = tuple(
    "tokenizer.json tokenizer_config.json special_tokens_map.json added_tokens.json tokenizer.model "
    "vocab.json merges.txt vocab.txt spiece.model sentencepiece.bpe.model tekken.json chat_template.jinja "
    "generation_config.json".split()
)
KEPT_AS = {"byte": "", "sentencepiece": "tokenizer.model", "huggingface": "tokenizer.json"}


@dataclass(frozen=True)
class Vocabulary:
    """What a shard must know of its tokenizer; `file_name` is the copy beside the shards ("" for bytes)."""

    kind: str  # byte | sentencepiece | huggingface
    size: int
    eos_id: int
    digest: str
    file_name: str
    eos_token: str = ""  # as asked for, where the tokenizer's own was not wanted

    def kept_in(self, folder: Path) -> str:
        """What `load_tokenizer` takes for the copy in that folder."""
        return str(folder / self.file_name) if self.file_name else self.kind


def parse_description(data: bytes, told_by: str) -> tuple[Vocabulary, Any]:
    """Returns what the file meta/tokenizer.json says: the vocabulary, and what the tokenizer was trained on.

    Raises: UserError.
    """
    try:
        content = json.loads(data)
        values = {spec.name: content[spec.name] for spec in fields(Vocabulary)}
    except (ValueError, KeyError, TypeError, RecursionError):
        raise UserError(f"{told_by} is not what prepare wrote; restore or remove it") from None
    vocabulary, kinds = Vocabulary(**values), {"size": int, "eos_id": int}
    for name, value in values.items():
        if not isinstance(value, kinds.get(name, str)) or (name == "kind" and value not in KEPT_AS):
            rule = f"says {name} ({shown_name(value)}), which prepare never writes"
            raise UserError(f"{told_by} {rule}; restore or remove it")
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
        eos = int(self._processor.piece_to_id(eos_token)) if eos_token else int(self._processor.eos_id())
        if eos < 0 or (eos_token and self._processor.id_to_piece(eos) != eos_token):
            raise UserError(_no_end(name, eos_token))
        self.vocabulary = Vocabulary(
            "sentencepiece", size, eos, hashlib.sha256(model).hexdigest(), KEPT_AS["sentencepiece"], eos_token
        )

    def encode(self, texts: Sequence[str]) -> list[Tokens]:
        rows = self._processor.encode(list(texts), out_type=int, num_threads=1)
        return [np.array(row, dtype=np.uint32) for row in rows]

    def decode(self, ids: Sequence[int]) -> str:
        return str(self._processor.decode([int(i) for i in ids]))

    def token_bytes(self) -> Tokens:
        model = self._processor
        table = np.zeros(self.vocabulary.size, dtype=np.int64)
        for i in range(self.vocabulary.size):
            if not (model.is_control(i) or model.is_unknown(i) or model.is_unused(i)):
                table[i] = _piece_bytes(model.id_to_piece(i))
        return table

    def token_id(self, token: str) -> int | None:
        number = int(self._processor.piece_to_id(token))
        return number if self._processor.id_to_piece(number) == token else None

    def save(self, folder: Path) -> None:
        write_atomically(folder / self.vocabulary.file_name, self._model, sync=True)


class HuggingFaceTokenizer:
    """A `tokenizer.json`, or one made of GPT-2's `vocab.json` and `merges.txt` or of a file of tiktoken.

    Needs the package `tokenizers`."""

    def __init__(self, path: Path, eos_token: str = "") -> None:
        os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")  # prepare runs one process per core already
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
        except BaseException as error:  # the package raises bare Exceptions, and panics that are none
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
            raise UserError(_no_end(str(path), eos_token))
        largest = max(self._tokenizer.get_vocab(with_added_tokens=True).values())
        size = 1 + whole(0, _LARGEST_ID).check(f"--tokenizer ({path}): the largest id", largest)
        digest = hashlib.sha256(self._content).hexdigest()
        self.vocabulary = Vocabulary("huggingface", size, eos, digest, KEPT_AS["huggingface"], eos_token)

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
        return str(self._tokenizer.decode([int(i) for i in ids]))

    def token_bytes(self) -> Tokens:
        content = json.loads(self._content)
        # a character is a byte
        by_bytes = "ByteLevel" in json.dumps([content.get("pre_tokenizer"), content.get("decoder")])
        table = np.zeros(self.vocabulary.size, dtype=np.int64)
        for piece, i in self._tokenizer.get_vocab(with_added_tokens=False).items():
            table[i] = len(piece) if by_bytes else _piece_bytes(piece)
        for added in content.get("added_tokens", []):
            table[added["id"]] = 0 if added["special"] else len(added["content"].encode())
        return table

    def token_id(self, token: str) -> int | None:
        number: int | None = self._tokenizer.token_to_id(token)
        return number

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
    """What a file says of a token: its text, or a table with its content; "" for null."""
    said = TEXT.check(f"content of {name}", said.get("content")) if isinstance(said, dict) else said
    return or_none(TEXT).check(name, said) or ""


def _piece_bytes(piece: str) -> int:
    """UTF-8 bytes of a sentencepiece piece: a byte as <0x0A>, or text with U+2581 for a space."""
    return 1 if re.fullmatch(r"<0x[0-9A-F]{2}>", piece) else len(piece.replace("\u2581", " ").encode())


def _no_end(name: str, eos_token: str) -> str:
    if eos_token:
        return f"--eos_token ({eos_token}) is not a token of {name}"
    return f"--tokenizer ({name}) names no end-of-document token; choose one of its tokens with --eos_token"


def load_tokenizer(name: str, eos_token: str = "") -> Tokenizer:
    """The tokenizer `byte`, or that of a file or folder; what has not changed since is not read again.

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
    """The tokenizer of a file; `digest` of that file and of those beside it that count."""
    if path.suffix == ".json" or is_tiktoken(data := path.read_bytes()):
        return HuggingFaceTokenizer(path, eos_token)
    return SentencePieceTokenizer(data, name, eos_token)
