"""The tokenizer of a Hugging Face checkpoint, and the tokenizer of an export.

byte, sentencepiece, HFTokenizer ── export_tokenizer ── tokenizer.json + tokenizer_config.json
"""

from __future__ import annotations

import json
from contextlib import suppress
from pathlib import Path
from typing import Any

from fms_fsdp.config.values import shown
from fms_fsdp.errors import FULL_DISK, UserError, note_once
from fms_fsdp.files import read_json_object
from fms_fsdp.hf.chat import NO_CHAT, ChatSettings, end_ids
from fms_fsdp.tokenizers.huggingface import HFTokenizer, missing_package
from fms_fsdp.tokenizers.load import load_tokenizer
from fms_fsdp.tokenizers.tokenizer import PROBES, TextRules, Tokenizer, UsedTokenizer, token_text

_FAST = "PreTrainedTokenizerFast"  # the class of transformers that reads tokenizer.json


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
    found = None
    with suppress(UserError):
        found = find_hf_tokenizer(folder)
    if found is not None:
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
    path = folder / "tokenizer_config.json"
    around = list[tuple[int, ...]]()
    settings = read_json_object(path) if path.is_file() else {}
    for key, usual in (("bos", "<s>"), ("eos", "</s>")):
        text = token_text(settings, f"{key}_token") or usual
        number = None
        if settings.get(f"add_{key}_token") is True and tokenizer is not None:
            number = tokenizer.token_id(text)
        around.append(() if number is None else (number,))
    return TextRules(around[0], around[1], ends)


def export_tokenizer(
    tokenizer: Tokenizer,
    folder: Path,
    max_len: int,
    bos_id: int | None,
    chat: ChatSettings = NO_CHAT,
) -> str:
    """Writes the tokenizer for transformers.AutoTokenizer; returns a note for the user, "" if all is well.

    It gives a text the ids of training, after `bos_id` if there is one, and applies the chat
    template. A sentencepiece model is converted by transformers: here if it is installed, else when
    it is loaded.
    """
    tokenizer.save(folder)
    settings: dict[str, Any] = {"model_max_length": max_len}
    if tokenizer.vocabulary.kind == "sentencepiece":
        own, names = _describe_sentencepiece(folder / "tokenizer.model")
        settings |= own
    else:
        settings["tokenizer_class"] = _FAST
        names = _write_tokenizer_json(tokenizer, folder / "tokenizer.json", bos_id)
    settings["eos_token"] = names[tokenizer.vocabulary.eos_id]
    settings |= chat.tokenizer_settings(tokenizer)
    if bos_id is not None:
        settings["bos_token"] = names[bos_id]
    # llama.cpp adds a BOS token if nothing is said
    settings |= {"add_bos_token": bos_id is not None, "add_eos_token": False}
    settings |= {"clean_up_tokenization_spaces": False}
    settings |= {"model_input_names": ["input_ids", "attention_mask"]}
    text = json.dumps(settings, indent=1) + "\n"
    (folder / "tokenizer_config.json").write_text(text, encoding="utf-8")
    return _compare_with_transformers(tokenizer, folder, bos_id)


def _describe_sentencepiece(path: Path) -> tuple[dict[str, Any], dict[int, str]]:
    """Returns the fields of tokenizer_config.json for a model, and the text of each id."""
    from sentencepiece import sentencepiece_model_pb2

    model: Any = sentencepiece_model_pb2.ModelProto()  # type: ignore[attr-defined]
    model.ParseFromString(path.read_bytes())
    is_bpe = model.trainer_spec.model_type == model.trainer_spec.BPE
    settings = {
        "tokenizer_class": "LlamaTokenizer" if is_bpe else _FAST,
        "legacy": False,
        "add_prefix_space": model.normalizer_spec.add_dummy_prefix,
    }
    return settings, {number: piece.piece for number, piece in enumerate(model.pieces)}


def _write_tokenizer_json(tokenizer: Tokenizer, path: Path, bos_id: int | None) -> dict[int, str]:
    """Writes a tokenizer.json that adds `bos_id` alone; returns the text of each id."""
    content = _BYTES if tokenizer.vocabulary.kind == "byte" else read_json_object(path)
    vocab = content["model"]["vocab"]
    if isinstance(vocab, dict):  # piece -> id
        names = {number: piece for piece, number in vocab.items()}
    else:  # [piece, score] by id
        names = {number: entry[0] for number, entry in enumerate(vocab)}
    names |= {entry["id"]: entry["content"] for entry in content.get("added_tokens") or []}
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
    return names


def _compare_with_transformers(tokenizer: Tokenizer, folder: Path, bos_id: int | None) -> str:
    """Returns how the exported tokenizer differs from that of training, "" if it does not."""
    try:
        from transformers import AutoTokenizer

        load: Any = AutoTokenizer.from_pretrained
        exported = load(folder, local_files_only=True)
        if (
            tokenizer.vocabulary.kind == "sentencepiece"
        ):  # for programs that read no tokenizer.model
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
        return str(missing_package("transformers", purpose))
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
