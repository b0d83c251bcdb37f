"""A trained model outside of training: see `fms_fsdp.load_model`."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import torch

from fms_fsdp.checkpoint.folders import Checkpoint, read_checkpoint
from fms_fsdp.checkpoint.io import load_checkpoint
from fms_fsdp.data.tokenizer import Tokenizer
from fms_fsdp.errors import UserError
from fms_fsdp.extras.hf_folder import fill, find_hf_tokenizer, is_hf_folder, open_folder
from fms_fsdp.extras.text_rules import TextRules, begin_token, rules_of_folder
from fms_fsdp.models.llama import Llama, build_model
from fms_fsdp.models.variants import LlamaConfig
from fms_fsdp.run.resume import checkpoint_data
from fms_fsdp.tools.trained_run import find_checkpoint, kept_originals, recorded_tokenizer


class TextModel(NamedTuple):
    """A model, its tokenizer where there is one, and what stands around its texts."""

    model: Llama
    tokenizer: Tokenizer | None
    rules: TextRules


def load(path: str, step: int | None, device: str | torch.device) -> TextModel:
    """See `fms_fsdp.load_model`."""
    folder = Path(path).expanduser()
    if is_hf_folder(folder):
        if step is not None:
            raise UserError(f"step ({step}) must be left out: {path} is a folder of Hugging Face")
        found = open_folder(folder)
        tokenizer = find_hf_tokenizer(folder)
        rules = rules_of_folder(folder, tokenizer)
        model = _empty(found.shape, device)
        fill(model, found)
        return TextModel(model.eval(), tokenizer, rules)

    def load_model(checkpoint: Checkpoint) -> tuple[Checkpoint, Llama]:
        model = _empty(checkpoint.metadata.run.model, device)
        load_checkpoint(checkpoint.folder, model, None, is_alone=True)
        return checkpoint, model

    checkpoint, model = read_checkpoint(lambda: find_checkpoint(path, step), load_model)
    tokenizer = recorded_tokenizer(checkpoint)
    return TextModel(model.eval(), tokenizer, rules_of_checkpoint(checkpoint, tokenizer))


def rules_of_checkpoint(checkpoint: Checkpoint, tokenizer: Tokenizer | None) -> TextRules:
    """What stands around the texts that a checkpoint was trained on, or of the folder that it came from."""
    if (originals := kept_originals(checkpoint)) is not None:
        return rules_of_folder(originals, tokenizer)
    begin = begin_token(checkpoint_data(checkpoint), tokenizer) if tokenizer is not None else None
    return TextRules(() if begin is None else (begin,))


def _empty(config: LlamaConfig, device: str | torch.device) -> Llama:
    with torch.device("meta"):
        model = build_model(config)
    return model.to_empty(device=device)
