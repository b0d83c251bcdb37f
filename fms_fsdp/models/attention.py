"""Attention as one function of queries, keys and values, with its mask and its cache; and rotary positions.

B batch, S query positions, T key positions, H query heads, G key/value heads, K head dim.

Source: Vaswani et al. 2017 (attention); Su et al. 2021 (rotary); Ainslie et al. 2023 (grouped queries).
"""

from __future__ import annotations

import contextlib
import functools
import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from fms_fsdp.models.variants import LlamaConfig

_BACKENDS = {
    "flash": SDPBackend.FLASH_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
    "math": SDPBackend.MATH,
}


class KeyValueCache:
    """The keys and values of the positions seen so far, of one layer: (B G max_len K) each."""

    def __init__(self, shape: tuple[int, int, int, int], dtype: torch.dtype, device: torch.device) -> None:
        self._keys, self._values = (torch.empty(shape, dtype=dtype, device=device) for _ in range(2))
        self.length = 0

    def append(self, k_BGSK: torch.Tensor, v_BGSK: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Takes in new positions; returns the keys and values of all."""
        start, self.length = self.length, self.length + k_BGSK.shape[2]
        self._keys[:, :, start : self.length] = k_BGSK
        self._values[:, :, start : self.length] = v_BGSK
        return self._keys[:, :, : self.length], self._values[:, :, : self.length]


def attention(
    q_BHSK: torch.Tensor,
    k_BGTK: torch.Tensor,
    v_BGTK: torch.Tensor,
    *,
    mask: Any = None,
    backend: str = "auto",
) -> torch.Tensor:
    """softmax(q k^T / sqrt(K)) v, causal: the last query sees all keys, each one before it a key less.

    `mask`: None; the ids of documents (B S), then a token sees its own document only; or flex_attention's
    BlockMask. With more keys than queries (T > S, those of a cache) there is no mask beside the causal one.
    """
    grouped = q_BHSK.shape[1] != k_BGTK.shape[1]
    if mask is not None and not isinstance(mask, torch.Tensor):
        return _flex_attention()(q_BHSK, k_BGTK, v_BGTK, block_mask=mask, enable_gqa=grouped)
    product = functools.partial(F.scaled_dot_product_attention, enable_gqa=grouped)
    kernel = contextlib.nullcontext() if backend == "auto" else sdpa_kernel(_BACKENDS[backend])
    with kernel:
        if k_BGTK.shape[2] > q_BHSK.shape[2]:
            return product(q_BHSK, k_BGTK, v_BGTK, attn_mask=_seen_from_the_end(q_BHSK, k_BGTK))
        if mask is not None:
            return _by_document(product, q_BHSK, k_BGTK, v_BGTK, mask)
        if backend == "auto" and _is_short(q_BHSK):
            return short_attention(q_BHSK, k_BGTK, v_BGTK)
        return product(q_BHSK, k_BGTK, v_BGTK, is_causal=True)


def _seen_from_the_end(q_BHSK: torch.Tensor, k_BGTK: torch.Tensor) -> torch.Tensor:
    num_queries, num_keys = q_BHSK.shape[2], k_BGTK.shape[2]
    every_ST = torch.ones(num_queries, num_keys, dtype=torch.bool, device=q_BHSK.device)
    return every_ST.tril(num_keys - num_queries)


def _by_document(
    product: Callable[..., torch.Tensor],
    q_BHSK: torch.Tensor,
    k_BGSK: torch.Tensor,
    v_BGSK: torch.Tensor,
    ids_BS: torch.Tensor,
) -> torch.Tensor:
    """Attention within documents, one after the other: faster than a mask of S x S."""
    if torch.compiler.is_compiling():  # lengths of documents would be new code for every batch
        same = (ids_BS.unsqueeze(2) == ids_BS.unsqueeze(1)).tril().unsqueeze(1)
        return product(q_BHSK, k_BGSK, v_BGSK, attn_mask=same)
    rows = []
    for b, ids_S in enumerate(ids_BS):
        lengths = torch.unique_consecutive(ids_S, return_counts=True)[1].tolist()
        columns = (torch.split(x[b : b + 1], lengths, dim=2) for x in (q_BHSK, k_BGSK, v_BGSK))
        parts = [product(*document, is_causal=True) for document in zip(*columns, strict=True)]
        rows.append(torch.cat(parts, dim=2))
    return torch.cat(rows)


def _is_short(q_BHSK: torch.Tensor) -> bool:
    """Whether explicit products beat the flash kernel: bf16 rows of up to 256 tokens on a CPU.

    Seen with torch 2.13: about twice as fast at 128.
    """
    return q_BHSK.device.type == "cpu" and q_BHSK.dtype == torch.bfloat16 and q_BHSK.shape[2] <= 256


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
    """flex_attention, compiled: without compilation it makes the whole score matrix. A compiled block inlines
    it."""
    from torch.nn.attention.flex_attention import flex_attention

    compiled: Callable[..., torch.Tensor] = torch.compile(flex_attention, dynamic=False)
    return compiled


def document_mask(document_ids_BS: torch.Tensor) -> Any:
    """What `attention` takes so that a token sees only earlier tokens of its own document.

    On a GPU the blocks for flex_attention, else the ids themselves.
    """
    if not document_ids_BS.is_cuda:
        return document_ids_BS
    from torch.nn.attention.flex_attention import create_block_mask

    def same_document(b: torch.Tensor, h: torch.Tensor, q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
        return (q >= k) & (document_ids_BS[b, q] == document_ids_BS[b, k])

    batch, seq = document_ids_BS.shape
    return create_block_mask(same_document, batch, None, seq, seq, device="cuda", _compile=True)


def rope_table(config: LlamaConfig) -> torch.Tensor:
    """fp32 table of shape (max_seq_len, 2, K): cosines, and sines whose first half is negated.

    Frequencies are theta^(-2i/K), stretched by `rope_scaling` where the configuration has one. Computed on
    the CPU, so alike on every device.
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
    """x with the pairs (i, i + K/2) of each head turned by their position's angle; computed in fp32.

    `rope` has shape (S or B S, 2, K).
    """
    # by halves, not by a roll of K, which compiled code for CPUs does element by element
    cos, sin = rope.reshape(*rope.shape[:-2], 1, 2, 2, -1).unbind(-3)
    halves = x_BSHK.reshape(*x_BSHK.shape[:-1], 2, -1)
    return (halves * cos + halves.flip(-2) * sin).flatten(-2).to(x_BSHK.dtype)
