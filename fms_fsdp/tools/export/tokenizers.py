"""Our tokenizers → the files that Hugging Face's `AutoTokenizer` reads: tokenizer.json beside the original.

    byte           BPE without merges over the 256 bytes
    sentencepiece  its pieces as BPE with merges, or as unigram; bytes spell what no piece holds
    huggingface    as it is, but for the tokens that it adds around a text

Source: https://huggingface.co/docs/tokenizers (the fields of tokenizer.json)
"""

from __future__ import annotations

import base64
import importlib
import json
from pathlib import Path
from typing import Any

from fms_fsdp.data.tokenizer import Tokenizer
from fms_fsdp.extras.byte_pairs import byte_characters, pairs_of, tokenizer_json

_SPACE = "\u2581"
_ENDS = ("<|begin_of_text|>", "<|end_of_text|>")


def write_tokenizer(
    tokenizer: Tokenizer, folder: Path, max_len: int, begin: int | None = None
) -> bool:
    """Writes the files, by which a text has the ids of training, with the token `begin` before them if there
    is one; returns whether a tokenizer.json is among them."""
    tokenizer.save(folder)
    eos_id, kind = tokenizer.vocabulary.eos_id, tokenizer.vocabulary.kind
    if kind == "huggingface":
        content = json.loads((folder / "tokenizer.json").read_text())
    elif kind == "byte":
        content = _of_bytes()
    else:
        content = _of_sentencepiece((folder / "tokenizer.model").read_bytes())
    if content is None:
        return False
    eos, bos = (_name_of(content, number) for number in (eos_id, begin))
    content |= {"post_processor": _post_processor(content.get("post_processor"), begin, bos)}
    content |= {"truncation": None, "padding": None}  # no row of training had any
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": max_len,
        "eos_token": eos,
    }
    # llama.cpp adds a begin token and a space where nothing is said; transformers 5 read the post_processor
    settings |= {"bos_token": bos} if bos is not None else {}
    settings |= {"add_bos_token": begin is not None, "add_eos_token": False}
    if kind == "sentencepiece" and "Prepend" not in json.dumps(content["normalizer"]):
        settings["add_prefix_space"] = False
    settings |= {
        "clean_up_tokenization_spaces": False,
        "model_input_names": ["input_ids", "attention_mask"],
    }
    (folder / "tokenizer.json").write_text(json.dumps(content, ensure_ascii=False, indent=1) + "\n")
    (folder / "tokenizer_config.json").write_text(json.dumps(settings, indent=1) + "\n")
    return True


def _name_of(content: dict[str, Any], number: int | None) -> str | None:
    """The name of a token in a tokenizer.json; None where there is none of this number."""
    names, vocab = dict[int | None, str](), content["model"]["vocab"]
    if isinstance(vocab, dict):
        names.update((number, piece) for piece, number in vocab.items())
    else:  # of a unigram model: pieces and scores
        names.update((number, piece) for number, (piece, _) in enumerate(vocab))
    names.update((entry["id"], entry["content"]) for entry in content.get("added_tokens", []))
    return names.get(number)


def _post_processor(
    old: dict[str, Any] | None, begin: int | None, name: str | None
) -> dict[str, Any] | None:
    """What tokenizer.json does at last: it puts `begin` before a text, or nothing; the tokens of its own go,
    and the offsets of byte pieces stay."""
    parts = (
        [old]
        if old is not None and old.get("type") != "Sequence"
        else (old or {}).get("processors", [])
    )
    kept = [part for part in parts if part["type"] == "ByteLevel"]
    if begin is not None:
        first = {"SpecialToken": {"id": name, "type_id": 0}}
        single = [first, {"Sequence": {"id": "A", "type_id": 0}}]
        pair = [*single, {"Sequence": {"id": "B", "type_id": 1}}]
        tokens = {name: {"id": name, "ids": [begin], "tokens": [name]}}
        kept.append(
            {"type": "TemplateProcessing", "single": single, "pair": pair, "special_tokens": tokens}
        )
    return {"type": "Sequence", "processors": kept} if len(kept) > 1 else next(iter(kept), None)


def _of_bytes() -> dict[str, Any]:
    by_bytes = {
        "type": "ByteLevel",
        "add_prefix_space": False,
        "trim_offsets": False,
        "use_regex": False,
    }
    vocab = dict(zip([*byte_characters(), *_ENDS], range(258), strict=True))
    model, special = {"type": "BPE", "vocab": vocab, "merges": []}, dict(enumerate(_ENDS, 256))
    return tokenizer_json(model, special, pre_tokenizer=by_bytes, decoder=by_bytes)


def _of_sentencepiece(model: bytes) -> dict[str, Any] | None:
    """The content of tokenizer.json; None for a kind that it does not have."""
    proto: Any = importlib.import_module("sentencepiece.sentencepiece_model_pb2")
    parsed = proto.ModelProto()
    parsed.ParseFromString(model)
    rules, kind = parsed.normalizer_spec, parsed.trainer_spec.model_type
    is_bpe = kind == proto.TrainerSpec.BPE
    is_known = is_bpe or kind == proto.TrainerSpec.UNIGRAM
    if (
        not is_known
        or not rules.escape_whitespaces
        or parsed.trainer_spec.treat_whitespace_as_suffix
    ):
        return None
    pieces = [piece.piece for piece in parsed.pieces]
    kinds = proto.ModelProto.SentencePiece
    silent = (kinds.CONTROL, kinds.UNKNOWN, kinds.USER_DEFINED)
    special = {
        number: piece.piece for number, piece in enumerate(parsed.pieces) if piece.type in silent
    }
    unknown = next(
        number for number, piece in enumerate(parsed.pieces) if piece.type == kinds.UNKNOWN
    )
    content: dict[str, Any]
    shared = {"byte_fallback": any(piece.type == kinds.BYTE for piece in parsed.pieces)}
    if is_bpe:
        vocab = {piece: number for number, piece in enumerate(pieces)}
        merges = [list(pair) for pair in pairs_of(vocab, set(special) | _bytes_among(pieces))]
        content = {"type": "BPE", "vocab": vocab, "merges": merges}
        content |= {"unk_token": pieces[unknown], "fuse_unk": True}
    else:
        scores = [[piece.piece, piece.score] for piece in parsed.pieces]
        content = {"type": "Unigram", "vocab": scores, "unk_id": unknown}
    undo: list[dict[str, Any]] = [
        {"type": "Replace", "pattern": {"String": _SPACE}, "content": " "}
    ]
    undo += [{"type": "ByteFallback"}, {"type": "Fuse"}]
    if rules.add_dummy_prefix:
        undo.append({"type": "Strip", "content": " ", "start": 1, "stop": 0})
    normalizer = {"type": "Sequence", "normalizers": _steps_before(rules)}
    decoder = {"type": "Sequence", "decoders": undo}
    return tokenizer_json(content | shared, special, normalizer=normalizer, decoder=decoder)


def _steps_before(rules: Any) -> list[dict[str, Any]]:
    """What sentencepiece does to a text before it cuts it."""
    steps: list[dict[str, Any]] = []
    if rules.precompiled_charsmap:
        table = base64.b64encode(rules.precompiled_charsmap).decode()
        steps.append({"type": "Precompiled", "precompiled_charsmap": table})
    if rules.remove_extra_whitespaces:
        for pattern, content in ((r"\A +| +\z", ""), (" {2,}", " ")):
            steps.append({"type": "Replace", "pattern": {"Regex": pattern}, "content": content})
    if rules.add_dummy_prefix:
        steps.append({"type": "Prepend", "prepend": _SPACE})
    return [*steps, {"type": "Replace", "pattern": {"String": " "}, "content": _SPACE}]


def _bytes_among(pieces: list[str]) -> set[int]:
    return {
        number for number, piece in enumerate(pieces) if len(piece) == 6 and piece.startswith("<0x")
    }
