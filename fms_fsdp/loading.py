"""A trained model outside of training: see `fms_fsdp.load_model`."""

from __future__ import annotations

import torch

from fms_fsdp.checkpoint.checkpointer import DamagedCheckpoint, load_checkpoint
from fms_fsdp.data.held_out import find_tokenizer
from fms_fsdp.data.tokenizer import Tokenizer
from fms_fsdp.mesh import Mesh, ParallelDims
from fms_fsdp.models.llama import Llama
from fms_fsdp.models.variants import model_from_dict
from fms_fsdp.run.recorded import find_checkpoint, recorded_config


def load(path: str, step: int | None, device: str | torch.device) -> tuple[Llama, Tokenizer | None]:
    """See `fms_fsdp.load_model`."""
    checkpoint = find_checkpoint(path, step)
    resolved = checkpoint.state["resolved"]
    with torch.device("meta"):
        model = Llama(model_from_dict(resolved["model"]))
    model.to_empty(device=device)
    try:
        load_checkpoint(checkpoint, model, None, Mesh(ParallelDims("none"), 0, torch.device(device).type))
    except DamagedCheckpoint as error:
        raise ValueError(str(error)) from error
    data = recorded_config(checkpoint.state["config"], resolved).data
    return model.eval(), find_tokenizer(data.data_path) if data.data_path else None
