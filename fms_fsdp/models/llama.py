"""Llama: a decoder-only transformer, written to be read next to its paper.

    tokens_BS → Embed → Block × num_layers → Head → logits_BSV, or with labels (loss_sum, num_labels)
    Block: x + Attention(norm(x)), then x + FeedForward(norm(x))

B batch, S sequence, D model, F ffn, V vocabulary, H query heads, G key/value heads, K head dim.

Plain modules of torch: every module computes in the dtype of its weights, which is the business of
parallel/precision.py. The rotary table is fp32 always.

Source: Touvron et al. 2023 (Llama 2); Shazeer 2020 (SwiGLU); Zhang and Sennrich 2019 (RMSNorm).
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.autograd import profiler as autograd_profiler
from torch.profiler import record_function

from fms_fsdp.models.attention import KeyValueCache, attention, document_mask, rope_table, rotate
from fms_fsdp.models.loss import linear_cross_entropy
from fms_fsdp.models.variants import LlamaConfig

LossAndCount = tuple[torch.Tensor, torch.Tensor]


def build_linear(in_features: int, out_features: int) -> nn.Linear:
    """A linear layer without bias, as all of a Llama are."""
    return nn.Linear(in_features, out_features, bias=False)


def build_norm(config: LlamaConfig) -> nn.RMSNorm | nn.LayerNorm:
    """The norm the configuration names; both compute in fp32 inside."""
    norm = nn.LayerNorm if config.norm == "layernorm" else nn.RMSNorm
    return norm(config.hidden_size, eps=config.norm_eps)


class Attention(nn.Module):
    """Causal grouped-query self-attention; each of the G key/value heads serves H / G query heads."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.head_dim, self.backend = config.head_dim, config.attn_impl
        kv_size = config.num_kv_heads * config.head_dim
        self.q_proj = build_linear(config.hidden_size, config.hidden_size)
        self.k_proj = build_linear(config.hidden_size, kv_size)
        self.v_proj = build_linear(config.hidden_size, kv_size)
        self.o_proj = build_linear(config.hidden_size, config.hidden_size)

    def forward(
        self, x_BSD: torch.Tensor, rope: torch.Tensor | None, mask: Any, cache: KeyValueCache | None = None
    ) -> torch.Tensor:
        heads = (*x_BSD.shape[:-1], -1, self.head_dim)
        q_BSHK, k_BSGK = self.q_proj(x_BSD).view(heads), self.k_proj(x_BSD).view(heads)
        v_BGSK = self.v_proj(x_BSD).view(heads).transpose(1, 2)
        if rope is not None:
            q_BSHK, k_BSGK = rotate(q_BSHK, rope), rotate(k_BSGK, rope)
        k_BGSK = k_BSGK.transpose(1, 2)
        if cache is not None:
            k_BGSK, v_BGSK = cache.append(k_BGSK, v_BGSK)
        out_BHSK = attention(q_BSHK.transpose(1, 2), k_BGSK, v_BGSK, mask=mask, backend=self.backend)
        projected_BSD: torch.Tensor = self.o_proj(out_BHSK.transpose(1, 2).flatten(2))
        return projected_BSD


class FeedForward(nn.Module):
    """SwiGLU: down(silu(gate(x)) * up(x))."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.gate_proj = build_linear(config.hidden_size, config.ffn_hidden_size)
        self.up_proj = build_linear(config.hidden_size, config.ffn_hidden_size)
        self.down_proj = build_linear(config.ffn_hidden_size, config.hidden_size)

    def forward(self, x_BSD: torch.Tensor) -> torch.Tensor:
        out_BSD: torch.Tensor = self.down_proj(F.silu(self.gate_proj(x_BSD)) * self.up_proj(x_BSD))
        return out_BSD


class Block(nn.Module):
    """One transformer layer. Alike for all layers, so compiled code is shared among them."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.attention_norm = build_norm(config)
        self.attention = Attention(config)
        self.ffn_norm = build_norm(config)
        self.feed_forward = FeedForward(config)

    def forward(
        self, x_BSD: torch.Tensor, rope: torch.Tensor | None, mask: Any, cache: KeyValueCache | None = None
    ) -> torch.Tensor:
        x_BSD = x_BSD + self.attention(self.attention_norm(x_BSD), rope, mask, cache)
        out_BSD: torch.Tensor = x_BSD + self.feed_forward(self.ffn_norm(x_BSD))
        return out_BSD


class Embed(nn.Embedding):
    """Token embedding, plus a learned position embedding where the configuration asks for one."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__(config.vocab_size, config.hidden_size)
        self.positions: nn.Parameter | None = None
        if config.pos_emb == "learned":
            self.positions = nn.Parameter(torch.zeros(config.max_seq_len, config.hidden_size))

    def forward(  # type: ignore[override]
        self, tokens_BS: torch.Tensor, positions: slice | torch.Tensor
    ) -> torch.Tensor:
        x_BSD = F.embedding(tokens_BS, self.weight)
        return x_BSD if self.positions is None else x_BSD + self.positions[positions]


class Head(nn.Linear):
    """Final norm and output projection, fused with the loss when labels are given.

    A tied head has no weight of its own and is handed the embedding's.
    """

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__(config.hidden_size, config.vocab_size, bias=False)
        self.norm = build_norm(config)
        self.loss = linear_cross_entropy
        if config.tie_embeddings:
            self.register_parameter("weight", None)

    def forward(  # type: ignore[override]
        self, x_BSD: torch.Tensor, labels_BS: torch.Tensor | None, tied_weight_VD: torch.Tensor | None
    ) -> torch.Tensor | LossAndCount:
        weight_VD = self.weight if tied_weight_VD is None else tied_weight_VD
        x_BSD = self.norm(x_BSD)
        if labels_BS is None:
            return F.linear(x_BSD, weight_VD.to(x_BSD.dtype))
        return self.loss(x_BSD, weight_VD, labels_BS)


class Llama(nn.Module):
    """The model, or the part of it that holds `layers`: the first has the embedding, the last the head.

    A layer is named by its global number, whichever part holds it.
    """

    rope: torch.Tensor

    def __init__(self, config: LlamaConfig, layers: range | None = None) -> None:
        super().__init__()
        layers = range(config.num_layers) if layers is None else layers
        self.config = config
        self.embed = Embed(config) if layers.start == 0 else None
        self.blocks = nn.ModuleDict({str(layer): Block(config) for layer in layers})
        self.head = Head(config) if layers.stop == config.num_layers else None
        table = rope_table(config) if config.pos_emb == "rope" else torch.empty(0)
        self.register_buffer("rope", table.to(torch.get_default_device()), persistent=False)

    def to_empty(self, *, device: torch.types.Device, recurse: bool = True) -> Llama:
        """As torch's, but the rotary table, which no checkpoint holds, keeps its values."""
        super().to_empty(device=device, recurse=recurse)
        if self.config.pos_emb == "rope":
            self.rope.copy_(rope_table(self.config))
        return self

    def forward(
        self,
        tokens_BS: torch.Tensor,
        labels_BS: torch.Tensor | None = None,
        positions_BS: torch.Tensor | None = None,
        document_ids_BS: torch.Tensor | None = None,
        caches: Sequence[KeyValueCache] | None = None,
    ) -> torch.Tensor | LossAndCount:
        """logits_BSV, or with labels (summed loss, fp32; number of unmasked labels, int64) of this batch
        alone.

        Positions default to 0..S-1, behind those of the `caches` (one for each layer); with document ids
        attention stays within a document. A part without embedding takes, and one without head gives, x_BSD.
        """
        start = caches[0].length if caches else 0
        stop = start + tokens_BS.shape[1]
        assert stop <= self.config.max_seq_len, (stop, self.config.max_seq_len)
        positions = slice(start, stop) if positions_BS is None else positions_BS
        rope = self.rope[positions] if self.config.pos_emb == "rope" else None
        mask = None if document_ids_BS is None else document_mask(document_ids_BS)
        x_BSD = tokens_BS if self.embed is None else self.embed(tokens_BS, positions)
        traced = autograd_profiler._is_profiler_enabled  # names of blocks in traces, at no cost without one
        for i, (layer, block) in enumerate(self.blocks.items()):
            cache = () if caches is None else (caches[i],)
            with record_function(f"block {layer}") if traced else contextlib.nullcontext():
                x_BSD = block(x_BSD, rope, mask, *cache)
        if self.head is None:
            return x_BSD
        tied = self.embed.weight if self.config.tie_embeddings and self.embed is not None else None
        output: torch.Tensor | LossAndCount = self.head(x_BSD, labels_BS, tied)
        return output
