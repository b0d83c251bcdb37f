"""Prints how many seconds a GPU takes to copy what a checkpoint of the variant 1.4b holds into pinned memory.

The reference of a save in the background, during which the loop stands still for the copy alone; used by
gpu_session.sh. Nothing is written.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parent.parent))

from fms_fsdp.models.flops import num_params  # noqa: E402
from fms_fsdp.models.variants import VARIANTS  # noqa: E402

BLOCK = 1 << 30
left = 12 * num_params(VARIANTS["1.4b"])
device = torch.empty(BLOCK, dtype=torch.uint8, device="cuda")
host = torch.empty(BLOCK, dtype=torch.uint8, pin_memory=True)
host.copy_(device, non_blocking=True)
torch.cuda.synchronize()
begin = time.perf_counter()
while left > 0:
    size = min(left, BLOCK)
    host[:size].copy_(device[:size], non_blocking=True)
    left -= size
torch.cuda.synchronize()
print(f"{time.perf_counter() - begin:.3f}")
