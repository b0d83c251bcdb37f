"""T5's relative positions: a number for each distance and head, learned, is added to the scores.

    score = q k^T / sqrt(K) + table[bucket(distance), head]

One table for all layers. T5 leaves out the 1 / sqrt(K); here, as in GPT-NeoX, scores are scaled.

B batch, S query positions, T key positions, H query heads, J distances.

Source: Raffel et al. 2020, https://arxiv.org/abs/1910.10683, section 2.1.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import nn

from fms_fsdp.models.variants import LlamaConfig


class DistanceBias(nn.Module):
    """The table (buckets H), and the mask with what is added to the scores."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.num_buckets, self.max_distance = config.relative_buckets, config.relative_max_distance
        self.weight = nn.Parameter(torch.zeros(self.num_buckets, config.num_attention_heads))

    def forward(self, mask: torch.Tensor, end: int, dtype: torch.dtype) -> torch.Tensor:
        """`mask` (B|1, 1, S, T) with the biases, (B|1, H, S, T) in this dtype, for queries up to position
        `end` - 1 and keys from 0 on.

        Diagonals are windows of one row, so that their gradients are summed first, and in fp32.
        """
        num_queries, num_keys = mask.shape[2:]
        distance_J = end - 1 - torch.arange(num_queries + num_keys - 1, device=mask.device)
        table = self.weight.to(torch.promote_types(self.weight.dtype, torch.float32))
        row_JH = F.embedding(buckets(distance_J, self.num_buckets, self.max_distance), table)
        return (mask + row_JH.T.unfold(1, num_keys, 1).flip(1)).to(dtype)


def buckets(distance: torch.Tensor, number: int, max_distance: int) -> torch.Tensor:
    """The bucket of each distance, int64: one for each distance in the first half of the buckets, then wider
    ones by the logarithm; the last has all from `max_distance` on. Keys behind the query are in bucket 0."""
    exact = number // 2
    turn = (distance.clamp(min=1).float() / exact).log() / math.log(max_distance / exact)
    far = exact + (turn * (number - exact)).long()
    return torch.where(distance < exact, distance.clamp(min=0), far.clamp(max=number - 1))
