"""A wait for the device behind each block, in the forward and in the backward pass: for the hunt of faults.

The error of a kernel then comes from the block that caused it, and a trace shows the time of each block.
"""

from __future__ import annotations

from typing import Any

import torch

from fms_fsdp.models.llama import Llama


def sync_blocks(model: Llama, device: torch.device) -> None:
    """Adds the waits to every block of the model, in place. The blocks must not be compiled."""

    def wait(*_: Any) -> None:
        torch.get_device_module(device).synchronize()

    for block in model.blocks.values():
        block.register_forward_hook(wait)
        block.register_full_backward_hook(wait)
