"""Prompts as token ids, for the texts that a model writes during training and by the command `generate`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from fms_fsdp.config import DataConfig, EvalConfig
from fms_fsdp.data.kept_tokenizer import find_tokenizer
from fms_fsdp.data.tokenizer import Tokenizer
from fms_fsdp.errors import UserError


@dataclass(frozen=True)
class Prompts:
    """The texts and their ids; an empty text is the end of a document, behind which a new one begins."""

    texts: tuple[str, ...]
    ids: tuple[tuple[int, ...], ...]
    end_token: int


def encode_prompts(tokenizer: Tokenizer, texts: Sequence[str], context: int) -> Prompts:
    """The prompts of a model with `context` positions.

    Raises:
        ValueError: one leaves no position for a token behind it.
    """
    end = tokenizer.vocabulary.eos_id
    ids = tuple(tuple(row.tolist()) or (end,) for row in tokenizer.encode(texts))
    if (longest := max(map(len, ids))) >= context:
        rule = f"must have 1 to {context - 1}, for the context of the model is {context}"
        raise UserError(f"prompts (up to {longest} tokens) {rule}; shorten them")
    return Prompts(tuple(texts), ids, end)


def scan_prompts(section: EvalConfig, data: DataConfig, context: int) -> Prompts | None:
    """The prompts of the samples during training, for one rank, which sends them to the others; None where
    there are to be none.

    Raises:
        ValueError: no tokenizer is beside the data, or a prompt is too long.
        OSError: the file of prompts cannot be read.
    """
    if not section.sample_interval:
        return None
    tokenizer = find_tokenizer(data.data_path) if data.data_path else None
    if tokenizer is None:
        rule = f"needs a tokenizer beside the data ({data.data_path or 'none'})"
        raise UserError(
            f"--sample_interval ({section.sample_interval}) {rule}; leave it out, or use data of `prepare`"
        )
    texts = section.sample_prompts or ("",)
    if len(texts) == 1 and Path(texts[0]).is_file():
        texts = tuple(Path(texts[0]).read_text().splitlines()) or ("",)
    return encode_prompts(tokenizer, texts, context)
