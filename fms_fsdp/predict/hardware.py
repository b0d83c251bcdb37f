"""What the hardware could do at best: the denominator of MFU."""

from __future__ import annotations

import torch

# Dense bf16 tensor-core peak in FLOP/s, without sparsity. Sources: NVIDIA's data sheets of each product
# (V100: fp16; GB200: of one of its two GPUs), AMD's of MI250X (one of two dies) and MI300X. The longest name
# that occurs in the device's name counts.
PEAK_BF16_FLOPS = {
    "V100": 125e12,
    "A10G": 70e12,
    "A100": 312e12,
    "L40S": 362e12,
    "H100 PCIe": 756e12,
    "H100 NVL": 835e12,
    "H100": 989e12,
    "H200 NVL": 835e12,
    "H200": 989e12,
    "GH200": 989e12,
    "B200": 2250e12,
    "GB200": 2500e12,
    "MI250X": 191.5e12,
    "MI300X": 1307e12,
}


def gpu_peak_flops(device: torch.device) -> float | None:
    """Peak FLOP/s of a GPU by the table; None if it does not name the GPU."""
    name = torch.cuda.get_device_name(device)
    known = [key for key in PEAK_BF16_FLOPS if key in name]
    return PEAK_BF16_FLOPS[max(known, key=len)] if known else None
