"""Prompts as token ids, for the texts that a model writes during training and by the command `generate`."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from fms_fsdp.config import DataConfig, EvalConfig
from fms_fsdp.data.kept_tokenizer import find_tokenizer
from fms_fsdp.data.tokenizer import Tokenizer
from fms_fsdp.errors import UserError
from fms_fsdp.extras.text_rules import NO_RULES, TextRules, begin_token
from fms_fsdp.models.variants import LlamaConfig


@dataclass(frozen=True)
class Prompts:
    """The texts and their ids; an empty text is the end of a document, behind which a new one begins."""

    texts: tuple[str, ...]
    ids: tuple[tuple[int, ...], ...]
    ends: tuple[int, ...]


def read_lines(path: Path, name: str) -> list[str]:
    """The lines of a text file: they end with a line feed, with or without a carriage return before it, and
    with no other character. Raises: UserError for another encoding, with `name` as the name of the path."""
    try:
        lines = path.read_bytes().decode().split("\n")
    except UnicodeDecodeError as error:
        raise UserError(
            f"{name} ({path}) must be UTF-8: {error.reason} at byte {error.start}"
        ) from None
    return [line.removesuffix("\r") for line in (lines if lines[-1] else lines[:-1])]


def encode_texts(tokenizer: Tokenizer, texts: Sequence[str]) -> list[list[int]]:
    """The ids of each text. Raises: UserError for a text that is half a character (a lone surrogate)."""
    for text in texts:
        try:
            text.encode()
        except UnicodeEncodeError as error:
            rule = f"must be whole characters, not half of one (U+{ord(text[error.start]):04X})"
            raise UserError(f"a text {rule}; write the text otherwise") from None
    return [row.tolist() for row in tokenizer.encode(texts)]


def encode_prompts(
    tokenizer: Tokenizer, texts: Sequence[str], model: LlamaConfig, rules: TextRules = NO_RULES
) -> Prompts:
    """The prompts of a model.

    Raises:
        UserError: one leaves no position for a token behind it, or has a token that the model has not.
    """
    end, context = tokenizer.vocabulary.eos_id, model.max_seq_len
    ids = []
    for row in encode_texts(tokenizer, texts):
        ids.append((*rules.before, *row, *rules.after) or (end,))
    check_tokens(ids, model.vocab_size)
    if (longest := max(map(len, ids))) >= context:
        rule = f"must have 1 to {context - 1}, for the context of the model is {context}"
        raise UserError(f"prompts (up to {longest} tokens) {rule}; shorten them")
    return Prompts(tuple(texts), tuple(ids), (end, *rules.ends))


def check_tokens(ids: Iterable[Sequence[int]], vocab_size: int) -> None:
    """Raises UserError where a text has a token that a model of so many does not have."""
    if (largest := max(map(max, filter(None, ids)), default=0)) >= vocab_size:
        rule = f"has token {largest}, and the model has {vocab_size}"
        raise UserError(
            f"the tokenizer of the model {rule}: tokenizer and model do not belong together"
        )


def scan_prompts(section: EvalConfig, data: DataConfig, model: LlamaConfig) -> Prompts:
    """The prompts of the samples during training, for one rank, which sends them to the others.

    Raises:
        UserError: no tokenizer is beside the data, or a prompt is too long.
        OSError: the file of prompts cannot be read.
    """
    tokenizer = find_tokenizer(data.data_path) if data.data_path else None
    if tokenizer is None:
        rule = f"needs a tokenizer beside the data ({data.data_path or 'none'})"
        raise UserError(
            f"--sample_interval ({section.sample_interval}) {rule}; leave out the flag, or prepare the data"
        )
    texts = section.sample_prompts or ("",)
    if len(texts) == 1 and Path(texts[0]).is_file():
        texts = tuple(read_lines(Path(texts[0]), "--sample_prompts")) or ("",)
    begin = begin_token(data.data_path, tokenizer)
    return encode_prompts(tokenizer, texts, model, TextRules(() if begin is None else (begin,)))
