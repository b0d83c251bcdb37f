"""Llama: a decoder-only transformer, written to be read next to its paper.

    tokens_BS → Embed → Block × num_layers → Head → logits_BSV, or with labels (loss_sum, num_labels)
    Block: x + Attention(norm(x)), then x + FeedForward(norm(x))

B batch, S sequence, D model, F ffn, V vocabulary, H query heads, G key/value heads, K head dim.

Precision: the embedding's output is cast to `model.compute_dtype` and every module casts its own weight to the dtype of its input. A model with
fp32 weights thus computes in bf16 without autocast, and under FSDP, whose policy delivers bf16 weights, the casts do nothing. The rotary table
is fp32 always. Weights are uninitialised until `init.init_weights` fills them.

Source: Touvron et al. 2023 (Llama 2); Su et al. 2021 (rotary); Shazeer 2020 (SwiGLU); Zhang and Sennrich 2019 (RMSNorm); Ainslie et al. 2023 (GQA).
"""

from __future__ import annotations

import contextlib
import functools
import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.autograd import profiler as autograd_profiler
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.profiler import record_function

from fms_fsdp.models.loss import linear_cross_entropy
from fms_fsdp.models.variants import LlamaConfig

_BACKENDS = {
    "flash": SDPBackend.FLASH_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
    "math": SDPBackend.MATH,
}


class Linear(nn.Linear):
    """x W^T in the dtype of x."""

    def __init__(self, in_features: int, out_features: int) -> None:
        super().__init__(in_features, out_features, bias=False)

    def reset_parameters(self) -> None:
        pass  # init_weights fills them

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.linear(x, self.weight.to(x.dtype))


class RMSNorm(nn.Module):
    """x / rms(x) * weight, in the dtype of x with fp32 inside."""

    def __init__(self, dim: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(dim))
        self.eps = eps

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.rms_norm(x, self.weight.shape, self.weight.to(x.dtype), self.eps)


class LayerNorm(RMSNorm):
    """(x - mean(x)) / std(x) * weight + bias, in the dtype of x with fp32 inside."""

    def __init__(self, dim: int, eps: float) -> None:
        super().__init__(dim, eps)
        self.bias = nn.Parameter(torch.empty(dim))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.layer_norm(x, self.weight.shape, self.weight.to(x.dtype), self.bias.to(x.dtype), self.eps)


def build_norm(config: LlamaConfig) -> RMSNorm:
    """The norm the configuration names."""
    return (LayerNorm if config.norm == "layernorm" else RMSNorm)(config.hidden_size, config.norm_eps)


def rope_table(config: LlamaConfig) -> torch.Tensor:
    """fp32 table of shape (max_seq_len, 2, K): cosines, and sines whose first half is negated. On the CPU, so alike on every device.

    Frequencies are theta^(-2i/K), stretched by `rope_scaling` where the configuration has one.
    """
    dim = config.head_dim
    freqs = 1.0 / config.rope_theta ** (torch.arange(0, dim, 2, dtype=torch.float32, device="cpu") / dim)
    if (scaling := config.rope_scaling) is not None:
        turns = scaling.original_max_len * freqs / (2 * torch.pi)  # full turns within the original context
        keep = (turns - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor)
        keep = keep.clamp(0, 1)
        freqs = keep * freqs + (1 - keep) * freqs / scaling.factor
    angles = torch.outer(torch.arange(config.max_seq_len, dtype=torch.float32, device="cpu"), freqs)
    sin = angles.sin()
    return torch.stack((angles.cos().repeat(1, 2), torch.cat((-sin, sin), dim=-1)), dim=1)


def rotate(x_BSHK: torch.Tensor, rope: torch.Tensor) -> torch.Tensor:
    """x with the pairs (i, i + K/2) of each head turned by their position's angle; computed in fp32. `rope` has shape (S or B S, 2, K)."""
    # by halves, not by a roll of K, which compiled code for CPUs does element by element
    cos, sin = rope.reshape(*rope.shape[:-2], 1, 2, 2, -1).unbind(-3)
    halves = x_BSHK.reshape(*x_BSHK.shape[:-1], 2, -1)
    return (halves * cos + halves.flip(-2) * sin).flatten(-2).to(x_BSHK.dtype)


class Attention(nn.Module):
    """Causal grouped-query self-attention; each of the G key/value heads serves H / G query heads."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.head_dim = config.head_dim
        self.grouped = config.num_kv_heads != config.num_attention_heads
        self.backend = _BACKENDS.get(config.attn_impl)
        kv_size = config.num_kv_heads * config.head_dim
        self.q_proj = Linear(config.hidden_size, config.hidden_size)
        self.k_proj = Linear(config.hidden_size, kv_size)
        self.v_proj = Linear(config.hidden_size, kv_size)
        self.o_proj = Linear(config.hidden_size, config.hidden_size)

    def forward(self, x_BSD: torch.Tensor, rope: torch.Tensor | None, mask: Any) -> torch.Tensor:
        heads = (*x_BSD.shape[:-1], -1, self.head_dim)
        q_BSHK, k_BSGK = self.q_proj(x_BSD).view(heads), self.k_proj(x_BSD).view(heads)
        v_BGSK = self.v_proj(x_BSD).view(heads).transpose(1, 2)
        if rope is not None:
            q_BSHK, k_BSGK = rotate(q_BSHK, rope), rotate(k_BSGK, rope)
        out_BHSK = self.attend(q_BSHK.transpose(1, 2), k_BSGK.transpose(1, 2), v_BGSK, mask)
        projected_BSD: torch.Tensor = self.o_proj(out_BHSK.transpose(1, 2).reshape(x_BSD.shape))
        return projected_BSD

    def attend(
        self, q_BHSK: torch.Tensor, k_BGSK: torch.Tensor, v_BGSK: torch.Tensor, mask: Any
    ) -> torch.Tensor:
        """softmax(q k^T / sqrt(K)) v; `mask` is None (causal), the ids of documents (B S), or flex_attention's BlockMask."""
        if mask is not None and not isinstance(mask, torch.Tensor):
            return _flex_attention()(q_BHSK, k_BGSK, v_BGSK, block_mask=mask, enable_gqa=self.grouped)
        qkv, causal = (
            (q_BHSK, k_BGSK, v_BGSK),
            functools.partial(F.scaled_dot_product_attention, is_causal=True, enable_gqa=self.grouped),
        )
        with contextlib.nullcontext() if self.backend is None else sdpa_kernel(self.backend):
            if mask is None:
                return short_attention(*qkv) if self._is_short(q_BHSK) else causal(*qkv)
            if torch.compiler.is_compiling():  # lengths of documents would be new code for every batch
                same = (mask.unsqueeze(2) == mask.unsqueeze(1)).tril().unsqueeze(1)
                return F.scaled_dot_product_attention(*qkv, attn_mask=same, enable_gqa=self.grouped)
            rows = []
            for b, ids_S in enumerate(mask):
                lengths = torch.unique_consecutive(ids_S, return_counts=True)[1].tolist()
                documents = zip(*(torch.split(x[b : b + 1], lengths, dim=2) for x in qkv), strict=True)
                rows.append(torch.cat([causal(*document) for document in documents], dim=2))
            return torch.cat(rows)

    def _is_short(self, q_BHSK: torch.Tensor) -> bool:
        """Whether explicit products beat the flash kernel: bf16 rows of up to 256 tokens on a CPU (torch 2.13: about twice as fast at 128)."""
        cpu_bf16 = q_BHSK.device.type == "cpu" and q_BHSK.dtype == torch.bfloat16
        return bool(cpu_bf16 and self.backend is None and q_BHSK.shape[2] <= 256)


def short_attention(q_BHSK: torch.Tensor, k_BGSK: torch.Tensor, v_BGSK: torch.Tensor) -> torch.Tensor:
    """Causal attention by explicit products; scores and softmax in fp32, whole (B H S S)."""
    group = q_BHSK.shape[1] // k_BGSK.shape[1]
    k_BHSK, v_BHSK = (x if group == 1 else x.repeat_interleave(group, dim=1) for x in (k_BGSK, v_BGSK))
    scores_BHSS = (q_BHSK @ k_BHSK.transpose(2, 3)).float() * (1 / math.sqrt(q_BHSK.shape[3]))
    position_S = torch.arange(q_BHSK.shape[2], device=q_BHSK.device)
    # added, not filled in: compiled code for CPUs is then vectorised
    future_SS = torch.where(position_S.unsqueeze(1) >= position_S, 0.0, -torch.inf)
    return (scores_BHSS + future_SS).softmax(dim=-1).to(v_BHSK.dtype) @ v_BHSK


@functools.cache
def _flex_attention() -> Callable[..., torch.Tensor]:
    """flex_attention, compiled: without compilation it makes the full score matrix. Inside a compiled block it is inlined."""
    from torch.nn.attention.flex_attention import flex_attention

    compiled: Callable[..., torch.Tensor] = torch.compile(flex_attention, dynamic=False)
    return compiled


def document_mask(document_ids_BS: torch.Tensor) -> Any:
    """What `Attention.attend` takes so that a token sees only earlier tokens of its own document: blocks for flex_attention on a
    GPU, else the ids themselves, by which it goes through the documents one by one (faster than a mask of S x S)."""
    if document_ids_BS.is_cuda:
        from torch.nn.attention.flex_attention import create_block_mask

        def same_document(b: torch.Tensor, h: torch.Tensor, q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
            return (q >= k) & (document_ids_BS[b, q] == document_ids_BS[b, k])

        batch, seq = document_ids_BS.shape
        return create_block_mask(same_document, batch, None, seq, seq, device="cuda", _compile=True)
    return document_ids_BS


class FeedForward(nn.Module):
    """SwiGLU: down(silu(gate(x)) * up(x))."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.gate_proj = Linear(config.hidden_size, config.ffn_hidden_size)
        self.up_proj = Linear(config.hidden_size, config.ffn_hidden_size)
        self.down_proj = Linear(config.ffn_hidden_size, config.hidden_size)

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

    def forward(self, x_BSD: torch.Tensor, rope: torch.Tensor | None, mask: Any) -> torch.Tensor:
        x_BSD = x_BSD + self.attention(self.attention_norm(x_BSD), rope, mask)
        out_BSD: torch.Tensor = x_BSD + self.feed_forward(self.ffn_norm(x_BSD))
        return out_BSD


class Embed(nn.Module):
    """Token embedding, plus a learned position embedding where the configuration asks for one."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(config.vocab_size, config.hidden_size))
        self.positions: nn.Parameter | None = None
        if config.pos_emb == "learned":
            self.positions = nn.Parameter(torch.empty(config.max_seq_len, config.hidden_size))

    def forward(self, tokens_BS: torch.Tensor, positions_BS: torch.Tensor | None) -> torch.Tensor:
        x_BSD = F.embedding(tokens_BS, self.weight)
        if self.positions is not None:
            learned = (
                self.positions[: tokens_BS.shape[1]] if positions_BS is None else self.positions[positions_BS]
            )
            x_BSD = x_BSD + learned
        return x_BSD


class Head(nn.Module):
    """Final norm and output projection, fused with the loss when labels are given. A tied head has no weight and is handed the embedding's."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.compiled_loss = False  # set by parallel.compile
        self.norm = build_norm(config)
        self.weight: nn.Parameter | None = None
        if not config.tie_embeddings:
            self.weight = nn.Parameter(torch.empty(config.vocab_size, config.hidden_size))

    def forward(
        self, x_BSD: torch.Tensor, labels_BS: torch.Tensor | None, tied_weight_VD: torch.Tensor | None
    ) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
        weight_VD = self.weight if tied_weight_VD is None else tied_weight_VD
        assert weight_VD is not None
        x_BSD = self.norm(x_BSD)
        if labels_BS is None:
            return F.linear(x_BSD, weight_VD.to(x_BSD.dtype))
        return linear_cross_entropy(x_BSD, weight_VD, labels_BS, compiled=self.compiled_loss)


class Llama(nn.Module):
    """The model. Parameters are fp32 and hold no values until `init_weights`; `compute_dtype` is the dtype of activations."""

    rope: torch.Tensor

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.config = config
        self.compute_dtype = torch.float32
        self.embed = Embed(config)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.num_layers))
        self.head = Head(config)
        rows = config.max_seq_len if config.pos_emb == "rope" else 0
        self.register_buffer("rope", torch.empty(rows, 2, config.head_dim), persistent=False)

    def forward(
        self,
        tokens_BS: torch.Tensor,
        labels_BS: torch.Tensor | None = None,
        positions_BS: torch.Tensor | None = None,
        document_ids_BS: torch.Tensor | None = None,
    ) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
        """logits_BSV in the compute dtype, or with labels (summed loss, fp32; number of unmasked labels, int64), both of this batch alone.

        Positions default to 0..S-1; with document ids attention stays within a document. Neither given is the fast path.
        """
        seq_length = tokens_BS.shape[1]
        assert seq_length <= self.config.max_seq_len, (seq_length, self.config.max_seq_len)
        rope = None
        if self.config.pos_emb == "rope":
            rope = self.rope[:seq_length] if positions_BS is None else self.rope[positions_BS]
        mask = None if document_ids_BS is None else document_mask(document_ids_BS)
        x_BSD = self.embed(tokens_BS, positions_BS).to(self.compute_dtype)
        traced = autograd_profiler._is_profiler_enabled  # names of blocks in traces, at no cost without one
        for i, block in enumerate(self.blocks):
            with record_function(f"block {i}") if traced else contextlib.nullcontext():
                x_BSD = block(x_BSD, rope, mask)
        output: torch.Tensor | tuple[torch.Tensor, torch.Tensor] = self.head(
            x_BSD, labels_BS, self.embed.weight if self.config.tie_embeddings else None
        )
        return output
