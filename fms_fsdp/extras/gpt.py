"""The parts of GPT and its relatives that a Llama does not have: norms, a plain feed-forward, positions,
ALiBi.

B batch, S sequence or query positions, T key positions, D model, F ffn, H query heads.

Source: Nguyen and Salazar 2019 (ScaleNorm); So et al. 2021 (squared ReLU); Vaswani et al. 2017, section 3.5
(waves); Press et al. 2022, https://arxiv.org/abs/2108.12409 (ALiBi).
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F
from torch import nn

from fms_fsdp.models.llama import Embed, build_dropout, build_linear
from fms_fsdp.models.variants import LlamaConfig


class ScaleNorm(nn.Module):
    """g x / |x| with one number g, here x / rms(x) times a weight: 1 is the paper's first g, sqrt(D)."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.size, self.eps = (size,), eps
        self.weight = nn.Parameter(torch.ones(1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weight = self.weight.expand(self.size).to(
            x.dtype
        )  # within, so that the product is rounded once
        return F.rms_norm(x, self.size, weight, self.eps)


NORMS: dict[str, Callable[..., nn.Module]] = {"layernorm": nn.LayerNorm, "scalenorm": ScaleNorm}
_ACTIVATIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "gelu": F.gelu,
    "gelu_tanh": partial(F.gelu, approximate="tanh"),
    "relu2": lambda x: F.relu(x).square(),
}


class PlainFeedForward(nn.Module):
    """Two matrices: down(activation(up(x)))."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.activation = _ACTIVATIONS[config.activation]
        self.up_proj = build_linear(config, config.hidden_size, config.ffn_hidden_size)
        self.down_proj = build_linear(config, config.ffn_hidden_size, config.hidden_size)
        self.dropout = build_dropout(config.ffn_dropout, place=2)

    def forward(self, x_BSD: torch.Tensor, keys_B: torch.Tensor | None = None) -> torch.Tensor:
        inner_BSF = self.activation(self.up_proj(x_BSD))
        out_BSD: torch.Tensor = self.down_proj(self.dropout(inner_BSF, keys_B))
        return out_BSD


class PositionEmbed(Embed):
    """Token embedding plus learned positions, or waves."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__(config)
        self.positions: nn.Parameter | None = None
        if config.pos_emb == "learned":
            self.positions = nn.Parameter(torch.zeros(config.max_seq_len, config.hidden_size))

    def forward(  # type: ignore[override]
        self,
        tokens_BS: torch.Tensor,
        positions: slice | torch.Tensor,
        keys_B: torch.Tensor | None = None,
    ) -> torch.Tensor:
        x_BSD = self.look_up(tokens_BS, self.weight)
        if self.positions is not None:
            return self.dropout(x_BSD + self.positions[positions], keys_B)
        if isinstance(positions, slice):
            positions = torch.arange(positions.start, positions.stop, device=x_BSD.device)
        return self.dropout(x_BSD + waves(positions, x_BSD.shape[-1]).to(x_BSD.dtype), keys_B)


def waves(positions: torch.Tensor, size: int) -> torch.Tensor:
    """fp32 sines and cosines, in turns, of each position at size/2 frequencies from 1 to nearly 1/10,000:
    (… size)."""
    freqs = 10_000.0 ** (
        -torch.arange(0, size, 2, dtype=torch.float32, device=positions.device) / size
    )
    angles = positions.unsqueeze(-1) * freqs
    return torch.stack((angles.sin(), angles.cos()), dim=-1).flatten(-2)


def added_mask(
    config: LlamaConfig,
    window: int,
    ids_BS: torch.Tensor | None,
    positions: slice,
    device: torch.device,
    num_keys: int,
) -> torch.Tensor:
    """Returns the mask that is added to the scores: fp32 (B|1, H|1, S, T). The arguments are those of
    `attention_mask`."""
    query_S1 = torch.arange(positions.start, positions.stop, device=device).unsqueeze(1)
    distance_ST = query_S1 - torch.arange(num_keys or positions.stop, device=device)
    seen = ((distance_ST >= 0) & (distance_ST < (window or positions.stop)))[None, None]
    if ids_BS is not None:
        seen = seen & (ids_BS.unsqueeze(2) == ids_BS.unsqueeze(1)).unsqueeze(1)
    bias = torch.zeros(1, 1, 1, 1, device=device)
    if config.pos_emb == "alibi":
        heads = torch.arange(config.num_attention_heads, device=device).view(1, -1, 1, 1)
        bias = -distance_ST * alibi_slopes(heads, config.num_attention_heads)
    return bias.masked_fill(~seen, -torch.inf)


def alibi_slopes(head: torch.Tensor, num_heads: int) -> torch.Tensor:
    """Returns the number that a head takes off a score for each position of distance, fp32: 2^(-8 (head + 1)
    / n), n the largest power of two in `num_heads`; heads beyond n take every second slope of 2n heads, as
    published."""
    power = 1 << (num_heads.bit_length() - 1)
    steps = torch.where(head < power, 2 * (head + 1), 2 * (head - power) + 1)
    return torch.exp2(-4.0 / power * steps)


@functools.cache
def alibi_score(num_heads: int) -> Callable[..., torch.Tensor]:
    """Returns the score of ALiBi for flex_attention; one function for all layers, which so share compiled
    code."""

    def score(
        score: torch.Tensor, b: torch.Tensor, h: torch.Tensor, q: torch.Tensor, k: torch.Tensor
    ) -> torch.Tensor:
        return score - alibi_slopes(h, num_heads) * (q - k)

    return score
