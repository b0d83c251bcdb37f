"""State that a package keeps in 8 bits: torchao's tensors, which are several plain ones behind one."""

from __future__ import annotations

import torch
from torch.distributed.tensor import DTensor

from fms_fsdp.errors import UserError
from fms_fsdp.optim.shards import as_shard, shard_of


def dequantized(tensor: torch.Tensor) -> torch.Tensor:
    """An fp32 copy of a quantized tensor, sharded alike; any other tensor itself."""
    local = shard_of(tensor)
    if not hasattr(local, "tensor_attrs"):
        return tensor
    plain = local.dequantize()
    return as_shard(plain, tensor, tensor.placements, tensor.shape) if isinstance(tensor, DTensor) else plain


def num_bytes(tensor: torch.Tensor) -> int:
    """Bytes that this rank's part takes in memory."""
    local = shard_of(tensor)
    return sum(getattr(local, name).nbytes for name in getattr(local, "tensor_attrs", ())) or local.nbytes


def check_even(parameter: torch.Tensor) -> None:
    """Raises UserError where ranks hold unequal parts.

    torchao steps by torch.compile, whose cache takes the code of one rank for that of all (torch 2.13).
    """
    shards = parameter.device_mesh.size(-1) if isinstance(parameter, DTensor) else 1
    if parameter.shape[0] % shards:
        raise UserError(
            f"--optimizer (adamw8bit) needs equal shards, and {parameter.shape[0]} rows do not divide over "
            f"{shards} ranks; change --vocab_size or the size at fault, or use another optimizer"
        )
