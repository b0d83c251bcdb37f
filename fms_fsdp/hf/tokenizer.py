"""Tokenizers of Hugging Face checkpoints, through the packages of the extra `hf`.

tokenizer.json, vocab.json + merges.txt ── tokenizers ─┐
any other format ── transformers.AutoTokenizer ────────┴─ HFTokenizer
byte, sentencepiece, HFTokenizer ── export_tokenizer ── tokenizer.json + tokenizer_config.json
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np

from fms_fsdp.config.values import shown
from fms_fsdp.data.tokenizer import (
    PROBES,
    TextRules,
    Tokenizer,
    Tokens,
    UsedTokenizer,
    Vocabulary,
    load_tokenizer,
    no_end_token,
    piece_bytes,
)
from fms_fsdp.errors import FULL_DISK, UserError, note_once
from fms_fsdp.files import write_atomically, write_json
from fms_fsdp.hf.chat import NO_CHAT, ChatSettings, end_ids, token_text
from fms_fsdp.hf.config import read_json

_END_NAMES = (
    "</s>",
    "<|end_of_text|>",
    "<|endoftext|>",
    "<eos>",
    "<|eot_id|>",
    "<|im_end|>",
    "[SEP]",
)


os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")  # prepare runs a process per core


def _missing(package: str, purpose: str) -> UserError:
    return UserError(f"{purpose} requires the package {package}; run: pip install {package}")


class HFTokenizer:
    """A tokenizer of the package tokenizers."""

    def __init__(self, path: Path, eos_token: str = "") -> None:
        name = f"--tokenizer ({path})"
        try:
            import tokenizers
        except ImportError:
            raise _missing("tokenizers", name) from None
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
        settings = path.with_name("tokenizer_config.json")
        named = eos_token or token_text(
            read_json(settings) if settings.is_file() else {}, "eos_token"
        )
        ids = map(self._tokenizer.token_to_id, (named,) if named else _END_NAMES)
        known = [number for number in ids if number is not None]
        added = self._tokenizer.get_added_tokens_decoder()  # "</s>" may be a piece of text, too
        eos_id = next((number for number in known if number in added), known[0] if known else None)
        if eos_id is None:
            raise UserError(no_end_token(str(path), eos_token))
        if largest >= 1 << 24:
            raise UserError(f"{name}: the largest id ({largest:,}) must be below {1 << 24:,}")
        digest = hashlib.sha256(self._content).hexdigest()
        self.vocabulary = Vocabulary(
            "huggingface", 1 + largest, eos_id, digest, "tokenizer.json", eos_token
        )

    def encode(self, texts: Sequence[str]) -> list[Tokens]:
        rows = self._tokenizer.encode_batch_fast(list(texts), add_special_tokens=False)
        return [np.array(row.ids, dtype=np.uint32) for row in rows]

    def decode(self, ids: Sequence[int]) -> str:
        return str(self._tokenizer.decode(list(map(int, ids))))

    def added_tokens(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Returns the ids that the tokenizer adds before and after a text."""
        plain = self._tokenizer.encode("a", add_special_tokens=False).ids
        ids = self._tokenizer.encode("a").ids
        starts = range(len(ids) - len(plain) + 1)
        start = next((at for at in starts if ids[at : at + len(plain)] == plain), 0)
        return tuple(ids[:start]), tuple(ids[start + len(plain) :])

    def token_bytes(self) -> Tokens:
        content = json.loads(self._content)
        is_byte_level = "ByteLevel" in json.dumps(
            [content.get("pre_tokenizer"), content.get("decoder")]
        )
        table = np.zeros(self.vocabulary.size, dtype=np.int64)
        for piece, number in self._tokenizer.get_vocab(with_added_tokens=False).items():
            table[number] = (
                len(piece) if is_byte_level else piece_bytes(piece)
            )  # a character per byte
        for number, token in self._tokenizer.get_added_tokens_decoder().items():
            table[number] = 0 if token.special else len(token.content.encode())
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

    def save(self, folder: Path) -> None:
        write_atomically(folder / self.vocabulary.file_name, self._content, sync=True)
        end = self._tokenizer.id_to_token(self.vocabulary.eos_id)
        write_json(folder / "tokenizer_config.json", {"eos_token": end})


def _read_tokenizer_json(path: Path, name: str) -> bytes:
    """Returns the content of a tokenizer.json, converted from other formats by the packages."""
    if path.name == "vocab.json":
        import tokenizers

        merges = str(path.with_name("merges.txt"))
        content = str(tokenizers.ByteLevelBPETokenizer(str(path), merges).to_str()).encode()
    elif path.suffix == ".json" and path.name != "tokenizer_config.json":
        content = path.read_bytes()
    else:
        try:
            from transformers import AutoTokenizer
        except ImportError:
            raise _missing("transformers", name) from None
        auto: Any = AutoTokenizer
        opened = auto.from_pretrained(path.parent, local_files_only=True)
        if len(opened) <= len(opened.all_special_tokens):
            raise UserError(f"{name} has no vocabulary that transformers reads; download it again")
        if not opened.is_fast:
            raise UserError(f"{name} has no fast tokenizer in transformers; give a tokenizer.json")
        content = opened.backend_tokenizer.to_str().encode()
    parsed = json.loads(content)
    if dropout := parsed["model"].get("dropout"):
        note_once(f"{name} drops merges at random (dropout={dropout}); the dropout is switched off")
        parsed["model"]["dropout"] = None
        content = json.dumps(parsed, ensure_ascii=False).encode()
    return content


def find_hf_tokenizer(folder: Path) -> Tokenizer | None:
    """Returns the tokenizer of a checkpoint folder, None without one.

    Raises:
        UserError: it cannot be read, or names no EOS token.
    """
    try:
        return load_tokenizer(str(folder))
    except FileNotFoundError:
        return None


def hf_used_tokenizer(folder: Path, name: str) -> UsedTokenizer:
    """Returns the tokenizer that the weights of a checkpoint were trained with, if it can be read."""
    with suppress(UserError):
        if (found := find_hf_tokenizer(folder)) is not None:
            return UsedTokenizer(name, found.vocabulary.digest, lambda: found)
    note_once(
        f"no tokenizer in {folder} can be read: it is not compared with the tokenizer of the data"
    )
    return UsedTokenizer(name, "", lambda: None)


def hf_text_rules(folder: Path, tokenizer: Tokenizer | None) -> TextRules:
    """Returns the tokens that the tokenizer of a checkpoint adds around a text, and those that end it.

    Raises:
        UserError: a file is malformed.
    """
    ends = end_ids(folder)
    if isinstance(tokenizer, HFTokenizer):
        return TextRules(*tokenizer.added_tokens(), ends)
    path, around = folder / "tokenizer_config.json", list[tuple[int, ...]]()
    settings = read_json(path) if path.is_file() else {}
    for key, usual in (("bos", "<s>"), ("eos", "</s>")):
        is_added = settings.get(f"add_{key}_token") is True and tokenizer is not None
        text = token_text(settings, f"{key}_token") or usual
        number = tokenizer.token_id(text) if is_added and tokenizer is not None else None
        around.append(() if number is None else (number,))
    return TextRules(around[0], around[1], ends)


def export_tokenizer(
    tokenizer: Tokenizer,
    folder: Path,
    max_len: int,
    bos_id: int | None,
    chat: ChatSettings = NO_CHAT,
) -> str:
    """Writes the files by which transformers.AutoTokenizer gives a text the ids of training, after `bos_id` if
    there is one, and applies the chat template. Returns a note for the user, "" if all is well.

    A sentencepiece model is converted by transformers: here if it is installed, else when it is loaded.
    """
    tokenizer.save(folder)
    vocabulary, kind = tokenizer.vocabulary, "PreTrainedTokenizerFast"
    settings: dict[str, Any] = {"model_max_length": max_len}
    if vocabulary.kind == "sentencepiece":
        from sentencepiece import sentencepiece_model_pb2

        model: Any = sentencepiece_model_pb2.ModelProto()  # type: ignore[attr-defined]
        model.ParseFromString((folder / "tokenizer.model").read_bytes())
        is_bpe = model.trainer_spec.model_type == model.trainer_spec.BPE
        kind = "LlamaTokenizer" if is_bpe else kind
        settings |= {"legacy": False, "add_prefix_space": model.normalizer_spec.add_dummy_prefix}
        names: dict[int, str] = {i: piece.piece for i, piece in enumerate(model.pieces)}
    else:
        path = folder / "tokenizer.json"
        content = _BYTES if vocabulary.kind == "byte" else read_json(path)
        vocab = content["model"]["vocab"]
        pairs = (
            vocab.items() if isinstance(vocab, dict) else ((x[0], i) for i, x in enumerate(vocab))
        )
        names = {number: piece for piece, number in pairs}
        names |= {entry["id"]: entry["content"] for entry in content["added_tokens"]}
        content = {**content, "truncation": None, "padding": None, "post_processor": None}
        if bos_id is not None:
            bos = names[bos_id]
            single = [
                {"SpecialToken": {"id": bos, "type_id": 0}},
                {"Sequence": {"id": "A", "type_id": 0}},
            ]
            content["post_processor"] = {
                "type": "TemplateProcessing",
                "single": single,
                "pair": [*single, {"Sequence": {"id": "B", "type_id": 1}}],
                "special_tokens": {bos: {"id": bos, "ids": [bos_id], "tokens": [bos]}},
            }
        path.write_text(json.dumps(content, ensure_ascii=False, indent=1) + "\n", encoding="utf-8")
    settings |= {"tokenizer_class": kind, "eos_token": names[vocabulary.eos_id]}
    settings |= chat.tokenizer_settings(tokenizer)
    settings |= {"bos_token": names[bos_id]} if bos_id is not None else {}
    # llama.cpp adds a BOS token if nothing is said
    settings |= {"add_bos_token": bos_id is not None, "add_eos_token": False}
    settings |= {"clean_up_tokenization_spaces": False}
    settings |= {"model_input_names": ["input_ids", "attention_mask"]}
    (folder / "tokenizer_config.json").write_text(
        json.dumps(settings, indent=1) + "\n", encoding="utf-8"
    )
    try:
        from transformers import AutoTokenizer

        load: Any = AutoTokenizer.from_pretrained
        exported = load(folder, local_files_only=True)
        if vocabulary.kind == "sentencepiece":  # for programs that read no tokenizer.model
            content = exported.backend_tokenizer.to_str(pretty=True)
            (folder / "tokenizer.json").write_text(content, encoding="utf-8")
            exported = load(folder, local_files_only=True)
        before = [] if bos_id is None else [bos_id]
        for text, ids in zip(PROBES, tokenizer.encode(PROBES), strict=True):
            found = exported(text, verbose=False)  # or it warns of texts longer than max_len
            if list(found.input_ids) != [*before, *ids.tolist()]:
                return f"transformers gives other ids than training, such as for {text[:40]!r}"
    except ImportError:
        purpose = "the comparison of the exported tokenizer with training"
        return str(_missing("transformers", purpose))
    except Exception as error:  # of the other program
        if isinstance(error, OSError) and error.errno in FULL_DISK:
            raise
        return f"transformers cannot read the tokenizer: {shown(str(error))}"
    return ""


def _added(number: int, content: str) -> dict[str, Any]:
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    return {"id": number, "content": content, "special": True} | flags


# UTF-8 bytes as ids 0-255, BOS 256, EOS 257: every character falls back to its bytes
_BYTES: dict[str, Any] = {
    "version": "1.0",
    "added_tokens": [_added(256, "<|begin_of_text|>"), _added(257, "<|end_of_text|>")],
    "normalizer": None,
    "pre_tokenizer": None,
    "decoder": {"type": "Sequence", "decoders": [{"type": "ByteFallback"}, {"type": "Fuse"}]},
    "model": {
        "type": "BPE",
        "vocab": {f"<0x{byte:02X}>": byte for byte in range(256)},
        "merges": [],
        "byte_fallback": True,
    },
}
