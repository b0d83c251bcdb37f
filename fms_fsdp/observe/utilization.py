"""The share of the hardware that a run uses: FLOPs of a token against the peak of the devices."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from fms_fsdp.models.flops import (
    flops_per_token,
    matmul_flops_per_token,
    recomputed_flops_per_token,
)
from fms_fsdp.parallel.activation_checkpointing import select_blocks
from fms_fsdp.state import RunConfig

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


@dataclass(frozen=True)
class Utilization:
    """FLOPs of one token by three conventions, and the peak FLOP/s of the device; without a peak there is no
    MFU."""

    model: int
    matmul: int
    hardware: int
    peak_flops: float | None

    def of(self, tokens_per_sec: float) -> dict[str, float]:
        """The metrics at a rate of tokens of one device."""
        metrics = {"tflops_per_device": tokens_per_sec * self.model / 1e12}
        if self.peak_flops is not None:
            parts = {"mfu": self.model, "mfu_matmul": self.matmul, "hfu": self.hardware}
            metrics |= {
                name: tokens_per_sec * flops / self.peak_flops for name, flops in parts.items()
            }
        return metrics


def find_utilization(run: RunConfig, device: torch.device) -> Utilization:
    """The FLOPs of a token of a run. The peak is `--peak_tflops`, else the peak of the GPU in the table; a
    CPU has no peak."""
    cfg, model, seq_length, section = run.config, run.model, run.seq_length, run.config.parallel
    flops, share = flops_per_token(model, seq_length), section.recomputed_share
    chosen = select_blocks(model.num_layers, share, section.segment) if share else []
    segments = len({layer // section.segment for layer, one in enumerate(chosen) if one})
    kept = section.kept_ops(seq_length)
    peak_flops = None
    if cfg.log.peak_tflops is not None:
        peak_flops = cfg.log.peak_tflops * 1e12
    elif device.type == "cuda":
        name = torch.cuda.get_device_name(device)
        known = (key for key in PEAK_BF16_FLOPS if key in name)
        peak_flops = PEAK_BF16_FLOPS.get(max(known, key=len, default=""))
    return Utilization(
        model=flops,
        matmul=matmul_flops_per_token(model, seq_length),
        hardware=flops + recomputed_flops_per_token(model, seq_length, sum(chosen), kept, segments),
        peak_flops=peak_flops,
    )
