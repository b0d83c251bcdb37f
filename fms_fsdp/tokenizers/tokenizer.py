"""Tokenizers: text to token ids and back.

    load_tokenizer("byte" | FILE | FOLDER) ── encode(texts) -> token arrays ── decode(ids) -> text

Bytes and sentencepiece models need no further package; huggingface.py reads every other format.

Invariant: `decode(encode([text])[0]) == text` for bytes and for sentencepiece models that `prepare`
trained (identity normalization, no dummy prefix, byte fallback), except for U+2581, sentencepiece's
mark for a space.
"""

from __future__ import annotations

import hashlib
import itertools
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from fms_fsdp.config.values import shown
from fms_fsdp.errors import UserError, note_once
from fms_fsdp.files import write_atomically

Tokens = npt.NDArray[Any]
FILE_NAMES = {"byte": "", "sentencepiece": "tokenizer.model", "huggingface": "tokenizer.json"}
_PLAIN_TEXT = "The quick brown fox isn't here; 12 of 345 times."  # normal in any normalization
# for `encode_continuations`: the first that a tokenizer knows, and does not join with the text
_CHARACTERS_BEFORE = ("\n", "|", ":", "0", "a")
# texts that tokenizers split in different ways
PROBES = (
    "The quick brown fox, isn't it? 'Tis DON'T\u00a0naïve Ünïcode.",
    "  two spaces,\tTabs\n\n\nlines\r\n   trailing   ",
    "0 12 345 6789 3.14159 1,000,000 2026-11-22",
    "def f(x: int) -> str:\n    return x[0:-1] != {'a': \"b\"}  # TODO\n",
    "漢字かな交じり文 한국어 Русский текст العربية हिन्दी 😀👩‍👩‍👧",
    "https://example.org/a_b?c=%20d&e=f#g [SEP] <endoftext>",
)


@dataclass(frozen=True)
class Vocabulary:
    """The tokenizer as shards record it. `file_name`: the copy next to the shards ("" for bytes)."""

    kind: str  # byte | sentencepiece | huggingface
    size: int
    eos_id: int
    digest: str
    file_name: str
    eos_token: str = ""  # --eos_token, if it replaces the tokenizer's own

    def kept_in(self, folder: Path) -> str:
        """Returns the name by which `load_tokenizer` opens the copy in that folder."""
        return str(folder / self.file_name) if self.file_name else self.kind


@dataclass(frozen=True)
class TextRules:
    """Ids around a text that the model reads, and ids that end a text that it generates."""

    before: tuple[int, ...] = ()
    after: tuple[int, ...] = ()
    ends: tuple[int, ...] = ()


NO_RULES = TextRules()


class Tokenizer(Protocol):
    """The interface of all tokenizers. `encode` adds no BOS or EOS token."""

    vocabulary: Vocabulary

    def encode(self, texts: Sequence[str]) -> list[Tokens]:
        """Returns one array of ids, (length of the text in tokens), per text."""

    def decode(self, ids: Sequence[int]) -> str:
        """Returns the text of the ids without BOS and EOS tokens."""

    def token_bytes(self) -> Tokens:
        """Returns the UTF-8 bytes of each id, int64; 0 for control tokens."""

    def token_id(self, token: str) -> int | None:
        """Returns the id of a token, None if there is none of that name."""

    def unk_id(self) -> int | None:
        """Returns the id that stands for text outside the vocabulary; None if there is none."""

    def save(self, folder: Path) -> None:
        """Writes `vocabulary.file_name` into the folder."""


class ByteTokenizer:
    """UTF-8 bytes as ids 0-255; 256 is BOS, 257 EOS."""

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
        """Writes nothing: the byte tokenizer has no file."""


class SentencePieceTokenizer:
    """A sentencepiece model."""

    def __init__(self, model: bytes, name: str, eos_token: str = "") -> None:
        import sentencepiece

        self._model = model
        try:
            self._processor = sentencepiece.SentencePieceProcessor(model_proto=model)
            size = int(self._processor.vocab_size())
            for number in range(size):  # pieces of a corrupt model may not be text
                self._processor.id_to_piece(number)
        except (RuntimeError, UnicodeDecodeError) as error:
            text = shown(str(error))
            raise UserError(
                f"--tokenizer ({name}) is not a sentencepiece model: {text}; set --tokenizer to its "
                "tokenizer.json"
            ) from error
        eos_id = self.token_id(eos_token) if eos_token else int(self._processor.eos_id())
        if eos_id is None or eos_id < 0:
            raise UserError(no_end_token(name, eos_token))
        digest = hashlib.sha256(model).hexdigest()
        self.vocabulary = Vocabulary(
            "sentencepiece", size, eos_id, digest, FILE_NAMES["sentencepiece"], eos_token
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
        table[self.vocabulary.eos_id] = 0  # --eos_token may be a user-defined piece
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
    """Returns the UTF-8 bytes of a sentencepiece piece: text with U+2581 for spaces, or a byte as <0x0A>."""
    if re.fullmatch(r"<0x[0-9A-F]{2}>", piece):
        return 1
    return len(piece.replace("\u2581", " ").encode())


def _try_encode(tokenizer: Tokenizer, *texts: str) -> list[list[int]]:
    """Returns the ids of texts, [] if the tokenizer has no id for a part of them."""
    try:
        return [row.tolist() for row in tokenizer.encode(texts)]
    except Exception:  # the package tokenizers raises it for a vocabulary without <unk>
        return []


def counts_bytes(tokenizer: Tokenizer) -> bool:
    """Returns whether `token_bytes` gives the length of a text, also with a space before it.

    Tokenizers that drop spaces (WordPiece) or mark the ends of words have other pieces than text.
    """
    rows = _try_encode(tokenizer, _PLAIN_TEXT)
    if not rows:
        return False
    num_bytes = int(tokenizer.token_bytes()[rows[0]].sum())
    return 0 <= num_bytes - len(_PLAIN_TEXT) <= 1


def replaces_space(tokenizer: Tokenizer) -> bool:
    """Returns whether a sentencepiece model without a piece for the space turns it into U+2581."""
    rows = _try_encode(tokenizer, "a b")
    return bool(rows) and "\u2581" in tokenizer.decode(rows[0])


def adds_space(tokenizer: Tokenizer) -> bool:
    """Returns whether the tokenizer puts a space before each text, as Llama 2's does."""
    joined = list(itertools.chain(*_try_encode(tokenizer, "a", "b")))
    # Byte-level tokenizers decode the first space, too; without a decoder, spaces stay marks.
    return tokenizer.decode(joined).replace("\u2581", "").strip() == "a b"


def encode_continuations(
    tokenizer: Tokenizer, texts: Sequence[str], unk_id: int | None
) -> list[Tokens]:
    """Returns the ids of texts that follow another text, so without a space that the tokenizer puts
    before a text: each is encoded after a character whose own ids are cut off."""
    rows = tokenizer.encode(texts)
    waiting = set(range(len(texts)))
    for before in _CHARACTERS_BEFORE:
        head = list(itertools.chain(*_try_encode(tokenizer, before)))
        if not head or unk_id in head:
            continue
        numbers = sorted(waiting)
        longer = tokenizer.encode([before + texts[number] for number in numbers])
        for number, row in zip(numbers, longer, strict=True):
            # Otherwise the character is part of a longer token.
            if np.array_equal(row[: len(head)], head):
                rows[number] = row[len(head) :]
                waiting.discard(number)
        if not waiting:
            break
    return rows


def no_end_token(name: str, eos_token: str) -> str:
    if eos_token:
        return f"--eos_token ({eos_token}) is not a token of {name}"
    return (
        f"--tokenizer ({name}) names no end-of-document token; set --eos_token to one of its tokens"
    )


def token_text(settings: Mapping[str, Any], key: str) -> str:
    """Returns the text of a special token of tokenizer_config.json, "" if it has none."""
    token = settings.get(key)
    if isinstance(token, dict):
        token = token.get("content")
    if token is not None and not (isinstance(token, str) and token.isprintable()):
        raise UserError(
            f"{key}={shown(str(token)[:99])} of tokenizer_config.json must be printable text"
        )
    return token or ""


@dataclass(frozen=True)
class UsedTokenizer:
    """The tokenizer that something was made with."""

    name: str  # of the thing, for a message
    digest: str  # of the tokenizer, "" if unknown
    find: Callable[[], Tokenizer | None]  # opens a copy, None if there is none


def check_same_tokenizer(one: UsedTokenizer, other: UsedTokenizer, remedy: str) -> None:
    """Checks that two things were made with the same tokenizer, as far as that is known.

    Two files of a tokenizer may differ, such as tokenizer.model and tokenizer.json: if the digests
    differ, the ids of `PROBES` are compared. Without a copy of one of them, a note says so.

    Raises:
        UserError: the tokenizers differ.
    """
    if not one.digest or not other.digest or one.digest == other.digest:
        return
    digests = f"{one.digest[:12]}, {other.digest[:12]}"
    ids = []
    for each in (one, other):
        found = each.find()
        if found is None or found.vocabulary.digest != each.digest:
            note_once(
                f"{one.name} and {other.name} record different tokenizers ({digests}), which may be two "
                f"files of one; they are not compared, because that of {each.name} is not there"
            )
            return
        ids.append([row.tolist() for row in found.encode(PROBES)])
    if ids[0] != ids[1]:
        raise UserError(
            f"{one.name} and {other.name} were made with different tokenizers ({digests}); {remedy}"
        )
