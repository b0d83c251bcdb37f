"""A trained model outside of training: see `fms_fsdp.load_model`."""

from __future__ import annotations

from pathlib import Path

import torch

from fms_fsdp.checkpoint.checkpointer import DamagedCheckpoint, load_checkpoint
from fms_fsdp.checkpoint.hf_folder import fill, find_hf_tokenizer, is_hf_folder, open_folder
from fms_fsdp.data.tokenizer import Tokenizer
from fms_fsdp.errors import UserError
from fms_fsdp.mesh import Mesh, ParallelDims
from fms_fsdp.models.llama import Llama, build_model
from fms_fsdp.models.variants import LlamaConfig, model_from_dict
from fms_fsdp.run.recorded import find_checkpoint, recorded_tokenizer


def load(path: str, step: int | None, device: str | torch.device) -> tuple[Llama, Tokenizer | None]:
    """See `fms_fsdp.load_model`."""
    if is_hf_folder(Path(path)):
        if step is not None:
            raise UserError(f"step ({step}) must be left out: {path} is a folder of Hugging Face")
        found = open_folder(Path(path))
        model = _empty(found.shape, device)
        fill(model, found)
        return model.eval(), find_hf_tokenizer(Path(path))
    checkpoint = find_checkpoint(path, step)
    model = _empty(model_from_dict(checkpoint.state["resolved"]["model"]), device)
    try:
        load_checkpoint(checkpoint, model, None, Mesh(ParallelDims("none"), 0, torch.device(device).type))
    except DamagedCheckpoint as error:
        raise UserError(str(error)) from error
    return model.eval(), recorded_tokenizer(checkpoint)


def _empty(config: LlamaConfig, device: str | torch.device) -> Llama:
    with torch.device("meta"):
        model = build_model(config)
    return model.to_empty(device=device)
