"""Our tokenizers → the files that Hugging Face's `AutoTokenizer` reads: tokenizer.json beside the original.

    byte           BPE without merges over the 256 bytes
    sentencepiece  its pieces as BPE with merges, or as unigram; bytes spell what no piece holds
    huggingface    as it is

Source: https://huggingface.co/docs/tokenizers (the fields of tokenizer.json)
"""

from __future__ import annotations

import base64
import importlib
import json
import random
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from fms_fsdp.data.byte_pairs import byte_characters, pairs_of, tokenizer_json
from fms_fsdp.data.tokenizer import Tokenizer

_SPACE = "\u2581"
_ENDS = ("<|begin_of_text|>", "<|end_of_text|>")
_TEXTS = 10_000  # that are compared
_LETTERS = ((0x20, 0x7E), (0x1, 0x2FFF), (0x4E00, 0x9FFF), (0x1F300, 0x1F6FF))


def write_tokenizer(tokenizer: Tokenizer, folder: Path, max_len: int) -> str:
    """Writes the files; returns a sentence where a reader of tokenizer.json gets other ids, or may."""
    tokenizer.save(folder)
    eos_id, kind = tokenizer.vocabulary.eos_id, tokenizer.vocabulary.kind
    if kind == "huggingface":
        content = json.loads((folder / "tokenizer.json").read_text())
    elif kind == "byte":
        content = _of_bytes()
    else:
        content = _of_sentencepiece((folder / "tokenizer.model").read_bytes())
    if content is None:
        return "tokenizer.json has no such kind of sentencepiece: tokenizer.model is there alone"
    eos = next((added["content"] for added in content["added_tokens"] if added["id"] == eos_id), None)
    if eos is None and isinstance(content["model"]["vocab"], dict):
        eos = next(piece for piece, number in content["model"]["vocab"].items() if number == eos_id)
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "model_max_length": max_len, "eos_token": eos}
    # llama.cpp adds a begin token and a space where nothing is said
    settings |= {"add_bos_token": False, "add_eos_token": False}
    if kind == "sentencepiece" and "Prepend" not in json.dumps(content["normalizer"]):
        settings["add_prefix_space"] = False
    settings |= {"clean_up_tokenization_spaces": False, "model_input_names": ["input_ids", "attention_mask"]}
    (folder / "tokenizer.json").write_text(json.dumps(content, ensure_ascii=False, indent=1) + "\n")
    (folder / "tokenizer_config.json").write_text(json.dumps(settings, indent=1) + "\n")
    return _difference(tokenizer, folder) if kind == "sentencepiece" else ""


def _difference(tokenizer: Tokenizer, folder: Path) -> str:
    """A sentence on the texts whose ids in tokenizer.json are others, "" if there are none: half of the texts
    are of pieces, half of any letters."""
    if find_spec("tokenizers") is None:
        return "tokenizer.json was not compared with tokenizer.model: the package tokenizers is not installed"
    draw, texts = random.Random(0), list[str]()
    visible = [number for number, size in enumerate(tokenizer.token_bytes().tolist()) if size]
    for _ in range(_TEXTS // 2):
        texts.append(tokenizer.decode(draw.choices(visible, k=draw.randint(1, 30))))
        texts.append("".join(chr(draw.randint(*draw.choice(_LETTERS))) for _ in range(draw.randint(1, 30))))
    fast: Any = importlib.import_module("tokenizers").Tokenizer.from_file(str(folder / "tokenizer.json"))
    theirs, ours = fast.encode_batch(texts, add_special_tokens=False), tokenizer.encode(texts)
    others = [text for text, a, b in zip(texts, theirs, ours, strict=True) if a.ids != b.tolist()]
    if not others:
        return ""
    found = f"for {len(others)} of {_TEXTS:,} strings, such as {min(others, key=len)!r}"
    return f"tokenizer.json gives other ids than tokenizer.model {found}"


def _of_bytes() -> dict[str, Any]:
    by_bytes = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False, "use_regex": False}
    vocab = {character: number for number, character in enumerate(byte_characters())}
    vocab |= {text: 256 + number for number, text in enumerate(_ENDS)}
    model = {"type": "BPE", "vocab": vocab, "merges": []}
    special = {256: _ENDS[0], 257: _ENDS[1]}
    return tokenizer_json(model, special, pre_tokenizer=by_bytes, decoder=by_bytes)


def _of_sentencepiece(model: bytes) -> dict[str, Any] | None:
    """The content of tokenizer.json; None for a kind that it does not have."""
    proto: Any = importlib.import_module("sentencepiece.sentencepiece_model_pb2")
    parsed = proto.ModelProto()
    parsed.ParseFromString(model)
    rules, kind = parsed.normalizer_spec, parsed.trainer_spec.model_type
    is_bpe = kind == proto.TrainerSpec.BPE
    is_known = is_bpe or kind == proto.TrainerSpec.UNIGRAM
    if not is_known or not rules.escape_whitespaces or parsed.trainer_spec.treat_whitespace_as_suffix:
        return None
    pieces = [piece.piece for piece in parsed.pieces]
    kinds = proto.ModelProto.SentencePiece
    silent = (kinds.CONTROL, kinds.UNKNOWN, kinds.USER_DEFINED)
    special = {number: piece.piece for number, piece in enumerate(parsed.pieces) if piece.type in silent}
    unknown = next(number for number, piece in enumerate(parsed.pieces) if piece.type == kinds.UNKNOWN)
    content: dict[str, Any]
    shared = {"byte_fallback": any(piece.type == kinds.BYTE for piece in parsed.pieces)}
    if is_bpe:
        vocab = {piece: number for number, piece in enumerate(pieces)}
        merges = [list(pair) for pair in pairs_of(vocab, set(special) | _bytes_among(pieces))]
        content = {
            "type": "BPE",
            "vocab": vocab,
            "merges": merges,
            "unk_token": pieces[unknown],
            "fuse_unk": True,
        }
    else:
        scores = [[piece.piece, piece.score] for piece in parsed.pieces]
        content = {"type": "Unigram", "vocab": scores, "unk_id": unknown}
    undo: list[dict[str, Any]] = [{"type": "Replace", "pattern": {"String": _SPACE}, "content": " "}]
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
    return {number for number, piece in enumerate(pieces) if len(piece) == 6 and piece.startswith("<0x")}
