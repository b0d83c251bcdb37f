"""The parts of close relatives of Llama: norms behind a branch, norms over all heads, and factors.

    OLMo2     x + norm(attention(x)), then x + norm(feed_forward(x)); queries and keys are normed whole
    Granite   embeddings and branches times a factor

B batch, S sequence, D model, H heads, K head dim.

Source: OLMo Team 2024, https://arxiv.org/abs/2501.00656 (norms); IBM 2024, Granite 3.0 language models, and
transformers' class Granite (factors).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from fms_fsdp.models.llama import Block


class PostNormBlock(Block):
    """A block whose norms stand behind attention and feed-forward."""

    def forward(
        self,
        x_BSD: torch.Tensor,
        rope: torch.Tensor | None,
        mask: Any,
        cache: Any = None,
        keys_B: torch.Tensor | None = None,
    ) -> torch.Tensor:
        attended_BSD = self.attention_norm(self.attention(x_BSD, rope, mask, cache, keys_B))
        sum_BSD = x_BSD + self.attention_dropout(attended_BSD, keys_B)
        fed_BSD = self.ffn_norm(self.feed_forward(x_BSD if self.is_parallel else sum_BSD, keys_B))
        out_BSD: torch.Tensor = sum_BSD + self.ffn_dropout(fed_BSD, keys_B)
        return out_BSD


class WideNorm(nn.RMSNorm):
    """A norm over all heads together, of x_BSHK."""

    def forward(self, x_BSHK: torch.Tensor) -> torch.Tensor:
        return super().forward(x_BSHK.flatten(-2)).view_as(x_BSHK)


class Scaled(nn.Module):
    """A factor in front of dropout, of which it takes the place. `parts`: those of the dropout."""

    def __init__(self, factor: float, drop: Callable[..., torch.Tensor]) -> None:
        super().__init__()
        self.factor, self.drop = factor, drop
        self.parts: Any = getattr(drop, "parts", {})

    def forward(self, x_BSD: torch.Tensor, keys_B: torch.Tensor | None) -> torch.Tensor:
        return self.drop(x_BSD * self.factor, keys_B)
