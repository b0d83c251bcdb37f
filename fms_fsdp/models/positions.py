"""Where a token stands, as the model is told: rotations of queries and keys.

B batch, S sequence, H heads, K head dim, R rotated dims of a head.

Source: Su et al. 2021 (rotary).
"""

from __future__ import annotations

import torch

from fms_fsdp.models.variants import LlamaConfig


def rope_table(config: LlamaConfig) -> torch.Tensor:
    """fp32 table of shape (max_seq_len, 2, R): cosines, and sines whose first half is negated. R may be 0.

    Frequencies are theta^(-2i/R), stretched by `rope_scaling` where the configuration has one. Computed on
    the CPU, so alike on every device.
    """
    dim = config.rotary_dim
    freqs = 1.0 / config.rope_theta ** (
        torch.arange(0, dim, 2, dtype=torch.float32, device="cpu") / dim
    )
    if (scaling := config.rope_scaling) is not None:
        turns = (
            scaling.original_max_len * freqs / (2 * torch.pi)
        )  # full turns within the original context
        keep = (turns - scaling.low_freq_factor) / (
            scaling.high_freq_factor - scaling.low_freq_factor
        )
        keep = keep.clamp(0, 1) if scaling.kind == "llama3" else torch.zeros_like(freqs)
        freqs = keep * freqs + (1 - keep) * freqs / scaling.factor
    angles = torch.outer(torch.arange(config.max_seq_len, dtype=torch.float32, device="cpu"), freqs)
    sin = angles.sin()
    return torch.stack((angles.cos().repeat(1, 2), torch.cat((-sin, sin), dim=-1)), dim=1)


def rotate(x_BSHK: torch.Tensor, rope: torch.Tensor) -> torch.Tensor:
    """x with the pairs (i, i + R/2) of each head turned by their position's angle; computed in fp32.

    `rope` has shape (S or B S, 2, R); the dims of a head behind the first R stay as they are.
    """
    if rope.shape[-1] < x_BSHK.shape[-1]:
        turned, kept = x_BSHK.tensor_split((rope.shape[-1],), dim=-1)
        return torch.cat((rotate(turned, rope), kept), dim=-1)
    # by halves, not by a roll of K, which compiled code for CPUs does element by element
    cos, sin = rope.reshape(*rope.shape[:-2], 1, 2, 2, -1).unbind(-3)
    halves = x_BSHK.reshape(*x_BSHK.shape[:-1], 2, -1)
    return (halves * cos + halves.flip(-2) * sin).flatten(-2).to(x_BSHK.dtype)
