"""torch.compile, block by block: one compilation serves all blocks. Beside them only the softmax of the loss
is compiled."""

from __future__ import annotations

import os
import shutil
from functools import partial

import torch

from fms_fsdp.models.llama import Llama
from fms_fsdp.models.loss import linear_cross_entropy


def apply_compile(model: Llama) -> None:
    """Compiles every block and the loss in place, at their first call. A new shape compiles anew: shapes are
    static within a run."""
    for block in model.blocks.values():
        block.compile(fullgraph=True, dynamic=False)
    if model.head is not None:
        model.head.loss = partial(linear_cross_entropy, compiled=True)


def check_compile(device: torch.device) -> None:
    """Raises ValueError where `--use_torch_compile` cannot work: on a CPU without a C++ compiler."""
    compiler = os.environ.get("CXX", "g++")
    if device.type == "cpu" and shutil.which(compiler) is None:
        raise ValueError(
            f"--use_torch_compile (True) needs a C++ compiler on the CPU, and {compiler} is not on the PATH; "
            "install g++, set CXX, or leave the flag out"
        )
