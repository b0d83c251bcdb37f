"""Whether a checkpoint can be loaded, tensor by tensor."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch
from torch import nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from fms_fsdp.checkpoint.checkpointer import collect_tensors, first_failure, load_tensor
from fms_fsdp.checkpoint.folders import read_state
from fms_fsdp.checkpoint.storage import CheckpointReader
from fms_fsdp.errors import UserError
from fms_fsdp.models.llama import build_model
from fms_fsdp.optim.optimizers import Optimizers


def content_problems(folder: Path, optimizers_of: Callable[[nn.Module], Optimizers]) -> list[str]:
    """Why a checkpoint whose files are what was written cannot be loaded all the same; [] if it can. Reads it
    a tensor at a time.

    `optimizers_of`: builds those of a model, which is one without memory here; of weights alone none are
    needed.

    Raises:
        OSError: a file cannot be read.
    """
    try:
        reader = CheckpointReader(folder)
        saved = reader.metadata.state_dict_metadata
        state = read_state(folder)
        config = state.record.model
        if config.num_layers > len(saved):
            raise UserError(f"{config.num_layers} layers in {len(saved)} tensors")
        with torch.device("meta"):
            model = build_model(config)
        optimizers = None if state.weights_only else optimizers_of(model)
        for name, tensor in collect_tensors(model, optimizers).items():
            entry = saved.get(name)
            if not isinstance(entry, TensorStorageMetadata) or entry.size != tensor.size():
                raise UserError(f"no {name} of {tuple(tensor.size())}")
            load_tensor(reader, name)
    except CheckpointException as error:
        _, inner = first_failure(error)
        if isinstance(inner, OSError):
            raise inner from error
        return [f"{name} cannot be loaded ({type(inner).__name__})"]
    except (ValueError, TypeError, RuntimeError, ArithmeticError) as error:
        return [f"the checkpoint cannot be loaded: {error}"]
    return []
