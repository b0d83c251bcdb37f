"""GPT: the shapes of GPT-2, GPT-3, GPT-NeoX, Pythia and tr1-13B, as variations of Llama.

    norm         rmsnorm, layernorm, scalenorm
    positions    rope (of a part of each head), learned, sinusoidal, alibi, relative (T5), none
    block        parallel residual, GELU or squared ReLU in place of SwiGLU, dropout

Shape suffixes: B batch, S queries, T keys, D hidden size, F ffn, H query heads, R rotated
dimensions of a head.

Source: Radford et al. 2019 (GPT-2); Black et al. 2022, https://arxiv.org/abs/2204.06745 (GPT-NeoX);
Nguyen and Salazar 2019 (ScaleNorm); So et al. 2021 (squared ReLU); Vaswani et al. 2017, section 3.5
(sinusoidal positions); Press et al. 2022, https://arxiv.org/abs/2108.12409 (ALiBi); Raffel et al.
2020, https://arxiv.org/abs/1910.10683, section 2.1 (T5's relative positions).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from fms_fsdp.models.attention import KVCache, attention, distances, visible_keys
from fms_fsdp.models.config import TransformerConfig
from fms_fsdp.models.llama import Attention, Embedding, Head, Llama, Positions, apply_rope
from fms_fsdp.models.token_sums import LayerNorm, look_up

ACTIVATIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "gelu": F.gelu,
    "gelu_tanh": partial(F.gelu, approximate="tanh"),
    "relu2": lambda x: F.relu(x).square(),
}


class ScaleNorm(nn.Module):
    """g x / |x| with one learned scalar g = weight * sqrt(D)."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.size = (size,)
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.rms_norm(x, self.size, self.weight.expand(self.size).to(x.dtype), self.eps)


NORMS = {"rmsnorm": nn.RMSNorm, "layernorm": LayerNorm, "scalenorm": ScaleNorm}


class GPTAttention(Attention):
    """Attention with rotation of a part of each head, or none, and with any norm of q and k."""

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__(config)
        if config.qk_norm:
            self.q_norm = NORMS[config.norm](config.head_dim, eps=config.norm_eps)
            self.k_norm = NORMS[config.norm](config.head_dim, eps=config.norm_eps)
        if config.pos_emb == "relative":
            self.attend = partial(attention_with_learned_bias, backend=config.attn_impl)

    @staticmethod
    def rotate(x_BSHK: torch.Tensor, rope: torch.Tensor) -> torch.Tensor:
        rotary_dim = 2 * rope.shape[-1]
        if rotary_dim == 0:
            return x_BSHK
        rotated = apply_rope(x_BSHK[..., :rotary_dim], rope)
        return torch.cat((rotated, x_BSHK[..., rotary_dim:]), dim=-1)


def attention_with_learned_bias(
    q_BHSK: torch.Tensor,
    k_BGTK: torch.Tensor,
    v_BGTK: torch.Tensor,
    mask: torch.Tensor,
    *,
    backend: str = "auto",
    dropout: float = 0.0,
) -> torch.Tensor:
    """Calls `attention` with a kernel that computes the gradient of the mask."""
    if backend == "auto" and mask.requires_grad:
        backend = "efficient" if q_BHSK.is_cuda else "math"
    return attention(q_BHSK, k_BGTK, v_BGTK, mask, backend=backend, dropout=dropout)


class MLP(nn.Module):
    """down(activation(up(x))), or SwiGLU, with dropout in front of the last projection."""

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__()
        hidden = config.hidden_size
        ffn = config.ffn_hidden_size
        is_gated = config.activation == "swiglu"
        self.activation = F.silu if is_gated else ACTIVATIONS[config.activation]
        self.gate_proj = nn.Linear(hidden, ffn, bias=config.bias) if is_gated else None
        self.up_proj = nn.Linear(hidden, ffn, bias=config.bias)
        self.down_proj = nn.Linear(ffn, hidden, bias=config.bias)
        self.dropout = nn.Dropout(config.ffn_dropout)

    def forward(self, x_BSD: torch.Tensor) -> torch.Tensor:
        if self.gate_proj is None:
            inner_BSF = self.activation(self.up_proj(x_BSD))
        else:
            inner_BSF = self.activation(self.gate_proj(x_BSD)) * self.up_proj(x_BSD)
        return self.down_proj(self.dropout(inner_BSF))


class GPTBlock(nn.Module):
    """One layer; with parallel residual, attention and feed-forward read the same input."""

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__()
        norm = partial(NORMS[config.norm], config.hidden_size, eps=config.norm_eps)
        self.attention_norm = norm()
        self.attention = GPTAttention(config)
        self.ffn_norm = norm()
        self.feed_forward = MLP(config)
        self.is_parallel = config.parallel_residual
        self.dropout = nn.Dropout(config.dropout)

    def forward(
        self, x_BSD: torch.Tensor, rope: torch.Tensor, mask: Any, cache: KVCache | None = None
    ) -> torch.Tensor:
        attended_BSD = self.attention(self.attention_norm(x_BSD), rope, mask, cache)
        sum_BSD = x_BSD + self.dropout(attended_BSD)
        input_BSD = x_BSD if self.is_parallel else sum_BSD
        fed_BSD = self.feed_forward(self.ffn_norm(input_BSD))
        return sum_BSD + self.dropout(fed_BSD)


class GPTEmbedding(Embedding):
    """Token embedding, plus learned or sinusoidal positions, with dropout."""

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__(config)
        self.is_sinusoidal = config.pos_emb == "sinusoidal"
        self.positions: nn.Parameter | None = None
        if config.pos_emb == "learned":
            self.positions = nn.Parameter(torch.zeros(config.max_seq_len, config.hidden_size))
        self.dropout = nn.Dropout(config.dropout)

    def forward(  # type: ignore[override]
        self, tokens_BS: torch.Tensor, positions: Positions
    ) -> torch.Tensor:
        x_BSD = self.look_up(tokens_BS)
        if self.positions is not None:
            if isinstance(positions, slice):
                x_BSD = x_BSD + self.positions[positions]
            else:
                x_BSD = x_BSD + look_up(positions, self.positions)
        elif self.is_sinusoidal:
            if isinstance(positions, slice):
                positions = torch.arange(positions.start, positions.stop, device=x_BSD.device)
            x_BSD = x_BSD + sinusoids(positions, x_BSD.shape[-1]).to(x_BSD.dtype)
        return self.dropout(x_BSD)


def sinusoids(positions: torch.Tensor, size: int) -> torch.Tensor:
    """Returns interleaved sines and cosines of each position: fp32, (… size)."""
    even = torch.arange(0, size, 2, dtype=torch.float32, device=positions.device)
    freqs = 10_000.0 ** (-even / size)
    angles = positions.unsqueeze(-1) * freqs
    return torch.stack((angles.sin(), angles.cos()), dim=-1).flatten(-2)


class GPTHead(Head):
    def __init__(self, config: TransformerConfig) -> None:
        super().__init__(config)
        self.norm = NORMS[config.norm](config.hidden_size, eps=config.norm_eps)


class DistanceBias(nn.Module):
    """T5's relative positions: a learned bias per head and bucket of distances, for all layers.

    Unlike in T5, the scores are scaled by 1 / sqrt(K), as in GPT-NeoX.
    """

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__()
        self.num_buckets = config.relative_buckets
        self.max_distance = config.relative_max_distance
        self.weight = nn.Parameter(torch.zeros(self.num_buckets, config.num_attention_heads))

    def forward(self, distance_ST: torch.Tensor) -> torch.Tensor:
        """Returns the bias of each distance, (H S T)."""
        bucket_ST = distance_buckets(distance_ST, self.num_buckets, self.max_distance)
        return look_up(bucket_ST, self.weight).permute(2, 0, 1)


def distance_buckets(distance: torch.Tensor, num_buckets: int, max_distance: int) -> torch.Tensor:
    """Returns the bucket of each distance, int64.

    The first half of the buckets holds one distance each, the others grow logarithmically up to
    `max_distance`. Keys after the query are in bucket 0.

    Example of 32 buckets up to 128: distances 0 to 15 have their own, 16 to 18 share bucket 16,
    19 and 20 bucket 17, and from 113 on all share bucket 31.
    """
    num_exact = num_buckets // 2
    near = distance.clamp(min=0)
    ratio = (distance.clamp(min=1).float() / num_exact).log() / math.log(max_distance / num_exact)
    far = num_exact + (ratio * (num_buckets - num_exact)).long()
    return torch.where(distance < num_exact, near, far.clamp(max=num_buckets - 1))


def alibi_slopes(num_heads: int, device: torch.device) -> torch.Tensor:
    """Returns the penalty of each head per position of distance, fp32 (H).

    It is 2^(-8 (head + 1) / n) for the first n heads, n the largest power of two; heads beyond n
    take every second slope of 2n heads, as published.

    Example of 6 heads (n = 4): 1/4, 1/16, 1/64, 1/256, then of 8 heads 1/2 and 1/8.
    """
    power = 1 << (num_heads.bit_length() - 1)
    head = torch.arange(num_heads, device=device)
    # In units of the exponents of 2n heads, which are half as far apart.
    exponents = torch.where(head < power, 2 * (head + 1), 2 * (head - power) + 1)
    return torch.exp2(-4.0 / power * exponents)


class GPT(Llama):
    """A Llama with the embedding, blocks, head and positions of its shape."""

    embedding_type = GPTEmbedding
    block_type = GPTBlock
    head_type = GPTHead

    def __init__(self, config: TransformerConfig, layers: range | None = None) -> None:
        super().__init__(config, layers)
        self.distance_bias = DistanceBias(config) if config.pos_emb == "relative" else None

    def mask(
        self,
        window: int,
        document_ids_BS: torch.Tensor | None,
        queries: slice,
        x_BSD: torch.Tensor,
        *,
        cached: bool = False,
    ) -> Any:
        """Adds the bias of ALiBi or of T5's positions: (B|1 H S T) in the dtype of x."""
        if self.config.pos_emb not in ("alibi", "relative"):
            return super().mask(window, document_ids_BS, queries, x_BSD, cached=cached)
        distance_ST = distances(queries, x_BSD.device)
        if self.distance_bias is not None:
            bias_HST = self.distance_bias(distance_ST)
        else:
            slopes_H = alibi_slopes(self.config.num_attention_heads, x_BSD.device)
            bias_HST = -distance_ST * slopes_H.view(-1, 1, 1)
        visible = visible_keys(window, document_ids_BS, queries, x_BSD.device)
        return bias_HST.masked_fill(~visible, -torch.inf).to(x_BSD.dtype).contiguous()
