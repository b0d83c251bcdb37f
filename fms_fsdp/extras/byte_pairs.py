"""Files of tiktoken (a token in base64 and its rank in each line) → the content of a tokenizer.json.

Such a file says neither how text is cut into words nor which special tokens there are. Both are known for the
published ones, which the number of their ranks tells apart.

Source: https://github.com/openai/tiktoken (openai_public.py), https://github.com/meta-llama/llama-models,
https://huggingface.co/Qwen/Qwen-7B (tokenization_qwen.py); https://huggingface.co/docs/tokenizers (fields)
"""

from __future__ import annotations

import base64
import binascii
import json
from collections.abc import Iterator, Set
from typing import Any, NamedTuple

from fms_fsdp.errors import UserError

_ENDINGS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_WORDS = (
    _ENDINGS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|%s| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_GPT2 = r"'(?:[sdmt]|ll|ve|re)| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_O200K = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+{_ENDINGS}?|"
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*{_ENDINGS}?|"
    r"\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


class _Known(NamedTuple):
    """A published vocabulary: how it cuts text into words, its size, and the special tokens that have a
    name."""

    name: str
    words: str
    size: int
    special: dict[int, str]


_BY_RANKS = {
    50256: _Known("r50k_base", _GPT2, 50257, {50256: "<|endoftext|>"}),
    50280: _Known("p50k_base", _GPT2, 50281, {50256: "<|endoftext|>"}),
    100256: _Known("cl100k_base", _WORDS % r"\p{N}{1,3}", 100277, {100257: "<|endoftext|>"}),
    128000: _Known(
        "Llama 3",
        _WORDS % r"\p{N}{1,3}",
        128256,
        {128000: "<|begin_of_text|>", 128001: "<|end_of_text|>", 128009: "<|eot_id|>"},
    ),
    151643: _Known(
        "Qwen", _WORDS % r"\p{N}", 151646, {151643: "<|endoftext|>", 151645: "<|im_end|>"}
    ),
    199998: _Known("o200k_base", _O200K, 200019, {199999: "<|endoftext|>"}),
    200000: _Known(
        "Llama 4",
        _O200K,
        202048,
        {200000: "<|begin_of_text|>", 200001: "<|end_of_text|>", 200008: "<|eot|>"},
    ),
}


def is_tiktoken(data: bytes) -> bool:
    """Whether the first line is a token in base64 and a rank."""
    return _token_and_rank(data.partition(b"\n")[0]) is not None


def of_tiktoken(data: bytes, name: str) -> str:
    """The tokenizer.json of such a file.

    Raises:
        UserError: it is damaged, or none of the published ones.
    """
    found = [_token_and_rank(line) for line in data.splitlines() if line]
    ranks = dict(pair for pair in found if pair is not None) if None not in found else {}
    known = _BY_RANKS.get(len(ranks))
    if known is None or len(set(ranks.values())) < len(ranks) or max(ranks.values()) >= known.size:
        others = ", ".join(f"{count:,} ({each.name})" for count, each in _BY_RANKS.items())
        raise UserError(
            f"--tokenizer ({name}) has {len(ranks):,} different tokens; files of tiktoken must have "
            f"{others}. Give another tokenizer as tokenizer.json"
        )
    characters = dict(enumerate(byte_characters()))
    vocab = {token.decode("latin-1").translate(characters): rank for token, rank in ranks.items()}
    unused = set(range(known.size)).difference(vocab.values())
    special = {number: known.special.get(number, f"<|special_{number}|>") for number in unused}
    vocab |= zip(special.values(), special, strict=True)
    merges = list(map(list, pairs_of(vocab, special.keys())))
    model = {"type": "BPE", "vocab": vocab, "merges": merges, "ignore_merges": True}
    words = {
        "type": "Split",
        "pattern": {"Regex": known.words},
        "behavior": "Isolated",
        "invert": False,
    }
    by_bytes = {
        "type": "ByteLevel",
        "add_prefix_space": False,
        "trim_offsets": False,
        "use_regex": False,
    }
    cut = {"type": "Sequence", "pretokenizers": [words, by_bytes]}
    return json.dumps(
        tokenizer_json(model, special, pre_tokenizer=cut, decoder=by_bytes), ensure_ascii=False
    )


def tokenizer_json(model: dict[str, Any], special: dict[int, str], **parts: Any) -> dict[str, Any]:
    """The content of a tokenizer.json: its model, its special tokens by id, and other parts."""
    added = [
        {"id": number, "content": text, "special": True}
        | dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
        for number, text in sorted(special.items())
    ]
    parts = dict.fromkeys(("normalizer", "pre_tokenizer", "post_processor", "decoder")) | parts
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": added,
        **parts,
        "model": model,
    }


def byte_characters() -> Iterator[str]:
    """The character that stands for each byte: itself where it is printable, else one from 256 on (GPT-2)."""
    other = 256
    for byte in range(256):
        if 33 <= byte <= 126 or 161 <= byte <= 172 or 174 <= byte:
            yield chr(byte)
        else:
            yield chr(other)
            other += 1


def pairs_of(vocab: dict[str, int], others: Set[int]) -> list[tuple[str, str]]:
    """The pairs that make each piece, the likelier pieces first: an earlier id is a higher score. `others`
    are no pieces."""
    found = []
    for piece, number in vocab.items():
        if number in others:
            continue
        for at in range(1, len(piece)):
            left, right = vocab.get(piece[:at]), vocab.get(piece[at:])
            if left is not None and right is not None and not {left, right} & others:
                found.append((number, left, right, piece[:at], piece[at:]))
    return [(left, right) for *_, left, right in sorted(found)]


def _token_and_rank(line: bytes) -> tuple[bytes, int] | None:
    """Returns the token and the rank of a line; None for a line of another kind."""
    token, _, rank = line.strip().partition(b" ")
    try:
        return base64.b64decode(token, validate=True), int(rank)
    except (ValueError, binascii.Error):
        return None
