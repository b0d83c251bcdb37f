"""T5's relative positions: a number for each distance and head, learned, is added to the scores.

    score = q k^T / sqrt(K) + table[bucket(distance), head]

One table for all layers. T5 leaves out the 1 / sqrt(K); here, as in GPT-NeoX, scores are scaled.

B batch, S query positions, T key positions, H query heads, J distances.

Source: Raffel et al. 2020, https://arxiv.org/abs/1910.10683, section 2.1.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import nn

from fms_fsdp.extras.gpt import added_mask
from fms_fsdp.models.attention import attention, explicit_attention
from fms_fsdp.models.variants import LlamaConfig


class DistanceBias(nn.Module):
    """The table (buckets H), and the masks made with it. `bias_dtype`: of masks, if not that of the table."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(config.relative_buckets, config.num_attention_heads))
        self.bias_dtype: torch.dtype | None = None

    def mask(
        self,
        config: LlamaConfig,
        window: int,
        ids_BS: torch.Tensor | None,
        positions: slice,
        device: torch.device,
        *,
        cached: bool = False,
        num_keys: int = 0,
    ) -> torch.Tensor:
        """What is added to the scores, (B|1, H, S, T): minus infinity where nothing is seen. The arguments
        are those of `attention_mask`.

        Diagonals are windows of one row, so that their gradients are summed first, and in fp32.
        """
        seen = added_mask(config, window, ids_BS, positions, device, num_keys)
        num_queries, num_keys = seen.shape[2:]
        distance_J = positions.stop - 1 - torch.arange(num_queries + num_keys - 1, device=device)
        bucket_J = buckets(distance_J, config.relative_buckets, config.relative_max_distance)
        table = self.weight.to(torch.promote_types(self.weight.dtype, torch.float32))
        row_HJ = F.embedding(bucket_J, table).T
        bias = seen + row_HJ.unfold(1, num_keys, 1).flip(1)
        return bias.to(
            self.bias_dtype or self.weight.dtype
        ).contiguous()  # kernels want keys side by side


def attend(
    q_BHSK: torch.Tensor,
    k_BGTK: torch.Tensor,
    v_BGTK: torch.Tensor,
    *,
    mask: torch.Tensor,
    backend: str = "auto",
    score: None = None,
    drop: Callable[[torch.Tensor], torch.Tensor] | None = None,
) -> torch.Tensor:
    """`attention` with such a mask. One fused kernel gives its gradient, which has no groups of heads, and
    none on a CPU."""
    if backend == "auto" and drop is None and mask.requires_grad:
        if not q_BHSK.is_cuda:
            return explicit_attention(q_BHSK, k_BGTK, v_BGTK, mask)
        backend = "efficient"
    if q_BHSK.is_cuda and q_BHSK.shape[2] > 1:
        group = q_BHSK.shape[1] // k_BGTK.shape[1]
        k_BGTK, v_BGTK = (x.repeat_interleave(group, dim=1) for x in (k_BGTK, v_BGTK))
    return attention(q_BHSK, k_BGTK, v_BGTK, mask=mask, backend=backend, drop=drop)


def bias_bytes(config: LlamaConfig, num_tokens: int, seq_length: int, number: int) -> int:
    """Of masks in a micro-step, one for each window: the mask, its gradient, and what a layer adds to that
    for each row. A document mask makes one for each row, which is left out. `number`: bytes of a number."""
    copies = 2 * len(set(config.windows)) + num_tokens // seq_length
    return copies * number * config.num_attention_heads * seq_length**2


def buckets(distance: torch.Tensor, number: int, max_distance: int) -> torch.Tensor:
    """The bucket of each distance, int64: one for each distance in the first half of the buckets, then wider
    ones by the logarithm; the last has all from `max_distance` on. Keys behind the query are in bucket 0."""
    exact = number // 2
    turn = (distance.clamp(min=1).float() / exact).log() / math.log(max_distance / exact)
    far = exact + (turn * (number - exact)).long()
    return torch.where(distance < exact, distance.clamp(min=0), far.clamp(max=number - 1))
