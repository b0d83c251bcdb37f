"""What the hardware could do at best: the denominator of MFU."""

from __future__ import annotations

import time

import torch

# Dense bf16 tensor-core peak in FLOP/s, without sparsity. Sources: NVIDIA's data sheets of each product
# (A100, H100, H200, B200, L40S, A10G, V100:
# fp16), AMD's of MI250X (one of two dies) and MI300X. The longest name that occurs in the device's name
# counts.
PEAK_BF16_FLOPS = {
    "V100": 125e12,
    "A10G": 70e12,
    "A100": 312e12,
    "L40S": 362e12,
    "H100 PCIe": 756e12,
    "H100 NVL": 835e12,
    "H100": 989e12,
    "H200": 989e12,
    "GH200": 989e12,
    "B200": 2250e12,
    "MI250X": 191.5e12,
    "MI300X": 1307e12,
}


def gpu_peak_flops(device: torch.device) -> float | None:
    """Peak FLOP/s of a GPU by the table; None if it does not name the GPU."""
    name = torch.cuda.get_device_name(device)
    known = [key for key in PEAK_BF16_FLOPS if key in name]
    return PEAK_BF16_FLOPS[max(known, key=len)] if known else None


def measure_matmul_flops(dtype: torch.dtype, size: int = 1024, seconds: float = 0.15) -> float:
    """The best rate of square matrix products on this process's CPU threads, in FLOP/s. It looks `seconds`,
    and five times at least: a neighbour that holds a core for a moment must not make the peak look low. Where
    one takes longer than `seconds`, as in fp16 on most CPUs, it is all."""
    a, b = torch.randn(size, size).to(dtype), torch.randn(size, size).to(dtype)
    rates, until = list[float](), time.perf_counter() + seconds
    while (begin := time.perf_counter()) < until or len(rates) < 5:
        torch.mm(a, b)
        rates.append(2 * size**3 / (time.perf_counter() - begin))
        if time.perf_counter() - begin > seconds:
            break
    return max(rates)
