"""State that a package keeps in 8 bits: torchao's tensors, which are several plain ones behind one."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from fms_fsdp.errors import UserError
from fms_fsdp.sharded import local_part, part_sizes, sharded_like


def make_state(part: Any, settings: Mapping[str, Any]) -> None:
    """Makes what an optimizer of torchao would make at its first step, which compiles."""
    names = ["exp_avg", "exp_avg_sq", *(["max_exp_avg_sq"] if settings.get("amsgrad") else [])]
    for parameter in (each for group in part.param_groups for each in group["params"]):
        check_even(parameter)
        part.state[parameter]["step"] = torch.zeros((), dtype=torch.float32)
        for name in names:
            part.state[parameter][name] = part._new_buffer(parameter, signed=name == "exp_avg")


def dequantized(tensor: torch.Tensor) -> torch.Tensor:
    """An fp32 copy of a quantized tensor, sharded alike."""
    local: Any = local_part(tensor)
    return sharded_like(local.dequantize(), tensor)


def num_bytes(tensor: torch.Tensor) -> int:
    """Bytes that this rank's part of a quantized tensor takes in memory."""
    local: Any = local_part(tensor)
    return sum(getattr(local, name).nbytes for name in local.tensor_attrs)


def check_even(parameter: torch.Tensor) -> None:
    """Raises UserError where ranks hold unequal parts.

    torchao steps by torch.compile, whose cache takes the code of one rank for that of all (torch 2.13).
    """
    sizes = part_sizes(parameter)
    if len(set(sizes)) > 1:
        raise UserError(
            f"--optimizer (adamw8bit) needs equal shards, and {parameter.shape[0]} rows do not divide over "
            f"{len(sizes)} ranks; change --vocab_size or the size at fault, or use another optimizer"
        )
