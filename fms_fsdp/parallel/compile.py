"""torch.compile, block by block: one compilation serves all blocks. Beside blocks only the softmax of the
loss is compiled."""

from __future__ import annotations

import os
import shutil
from functools import partial

import torch
import torch._functorch.config as functorch_config

from fms_fsdp.config import ParallelConfig
from fms_fsdp.models.llama import Llama


def compiles(section: ParallelConfig, device: torch.device) -> bool:
    """The value of `--use_torch_compile`; without that flag, whether the device is a GPU with a compiler."""
    if section.use_torch_compile is not None:
        return section.use_torch_compile
    return device.type == "cuda" and not missing_compiler(device)


def compiles_optimizer(
    section: ParallelConfig, model: torch.nn.Module, device: torch.device
) -> bool:
    """Whether the step of an optimizer is compiled if that optimizer can be: with the blocks, if the device
    of the weights has a compiler."""
    return compiles(section, device) and not missing_compiler(next(model.parameters()).device)


def apply_compile(model: Llama, *, recompute: bool) -> None:
    """Compiles every block and the loss in place, at their first call. A new shape compiles anew: shapes are
    static within a run.

    With `recompute` the backward pass computes again all but matrix products and attention. That setting is
    the process's: torch reads it when a block is compiled.
    """
    functorch_config.aggressive_recomputation = recompute
    for block in model.blocks.values():
        block.compile(fullgraph=True, dynamic=False)
    if model.head is not None:
        model.head.loss = partial(model.head.loss, compiled=True)


def allow_shapes(number: int) -> None:
    """Lets a block be compiled for so many shapes, each as often as torch allows; else the run ends."""
    torch._dynamo.config.recompile_limit *= number
    torch._dynamo.config.accumulated_recompile_limit *= number


def missing_compiler(device: torch.device) -> str:
    """The compiler that compiled code for this device needs, if it is not on the PATH; else nothing."""
    variable, usual = ("CXX", "g++") if device.type == "cpu" else ("CC", "gcc")
    name = os.environ.get(variable, usual)
    return (
        ""
        if shutil.which(name)
        else f"{name} is not on the PATH; install a compiler, or set {variable}"
    )
