"""Causal attention, its masks, and the cache of keys and values for generation.

B batch, S queries, T keys, H query heads, G key/value heads, K head size.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

BACKENDS = {
    "flash": SDPBackend.FLASH_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
    "cudnn": SDPBackend.CUDNN_ATTENTION,
    "math": SDPBackend.MATH,
}


def attention(
    q_BHSK: torch.Tensor,
    k_BGTK: torch.Tensor,
    v_BGTK: torch.Tensor,
    mask: Any = None,
    *,
    backend: str = "auto",
    dropout: float = 0.0,
) -> torch.Tensor:
    """Returns softmax(q k^T / sqrt(K) + mask) v, shape (B H S K).

    `mask` is one of `attention_mask`: None, a tensor (bool, or added to the scores), or a BlockMask
    of flex_attention, which has no dropout.
    """
    is_grouped = q_BHSK.shape[1] != k_BGTK.shape[1]
    if mask is not None and not isinstance(mask, torch.Tensor):
        from torch.nn.attention.flex_attention import flex_attention

        # Inside a compiled block flex_attention is compiled with it.
        flex: Any = flex_attention if torch.compiler.is_compiling() else compiled(flex_attention)
        out: torch.Tensor = flex(q_BHSK, k_BGTK, v_BGTK, block_mask=mask, enable_gqa=is_grouped)
        return out
    if backend == "auto" and mask is None and not dropout and _is_short(q_BHSK, k_BGTK):
        return _explicit_attention(q_BHSK, k_BGTK, v_BGTK)
    if backend == "flash" and mask is not None:
        backend = "auto"  # CUDA's flash kernel takes no mask
    if backend == "efficient" and is_grouped:  # the kernel has no grouped queries
        copies = q_BHSK.shape[1] // k_BGTK.shape[1]
        k_BGTK = k_BGTK.repeat_interleave(copies, dim=1)
        v_BGTK = v_BGTK.repeat_interleave(copies, dim=1)
        is_grouped = False
    kernel = nullcontext() if backend == "auto" else sdpa_kernel(BACKENDS[backend])
    with kernel:
        return F.scaled_dot_product_attention(
            q_BHSK,
            k_BGTK,
            v_BGTK,
            attn_mask=mask,
            dropout_p=dropout,
            is_causal=mask is None and q_BHSK.shape[2] > 1,
            enable_gqa=is_grouped,
        )


def _is_short(q_BHSK: torch.Tensor, k_BGTK: torch.Tensor) -> bool:
    """Returns whether explicit matmuls are faster than the flash kernel.

    They are in bf16 on a CPU, up to 128 tokens (torch 2.13).
    """
    num_queries = q_BHSK.shape[2]
    is_bf16_on_cpu = q_BHSK.device.type == "cpu" and q_BHSK.dtype == torch.bfloat16
    return is_bf16_on_cpu and 1 < num_queries <= 128 and num_queries == k_BGTK.shape[2]


def _explicit_attention(
    q_BHSK: torch.Tensor, k_BGSK: torch.Tensor, v_BGSK: torch.Tensor
) -> torch.Tensor:
    """Computes causal attention with the scores (B H S S) in fp32."""
    copies = q_BHSK.shape[1] // k_BGSK.shape[1]
    if copies > 1:
        k_BGSK = k_BGSK.repeat_interleave(copies, dim=1)
        v_BGSK = v_BGSK.repeat_interleave(copies, dim=1)
    scores_BHSS = (q_BHSK @ k_BGSK.transpose(2, 3)).float() * q_BHSK.shape[3] ** -0.5
    position_S = torch.arange(q_BHSK.shape[2], device=q_BHSK.device)
    # Added, not filled in: compiled code for CPUs is then vectorized.
    bias_SS = torch.where(position_S.unsqueeze(1) >= position_S, 0.0, -torch.inf)
    return (scores_BHSS + bias_SS).softmax(dim=-1).to(v_BGSK.dtype) @ v_BGSK


def attention_mask(
    window: int,
    document_ids_BS: torch.Tensor | None,
    queries: slice,
    device: torch.device,
    *,
    dense: bool = False,
) -> Any:
    """Returns the mask of `attention` for these query positions and all keys up to the last query.

    `window`: number of tokens that a query sees, itself included; 0 is unlimited. A query sees only
    keys with its own document id. Where the causal rule is enough, the mask is None; otherwise it
    is a BlockMask on a GPU and a bool tensor (B|1 1 S T) elsewhere, or if `dense`.
    """
    num_queries = queries.stop - queries.start
    if not window and document_ids_BS is None and (queries.start == 0 or num_queries == 1):
        return None
    if device.type == "cuda" and not dense:
        return block_mask(window, document_ids_BS, num_queries, device)
    return visible_keys(window, document_ids_BS, queries, device)


def visible_keys(
    window: int, document_ids_BS: torch.Tensor | None, queries: slice, device: torch.device
) -> torch.Tensor:
    """Returns whether each query sees each key, as a bool tensor (B|1 1 S T)."""
    distance_ST = distances(queries, device)
    visible = (distance_ST >= 0) & (distance_ST < (window or queries.stop))
    if document_ids_BS is None:
        return visible[None, None]
    query_ids_BS = document_ids_BS[:, queries]
    key_ids_BT = document_ids_BS[:, : queries.stop]
    is_same_document_BST = query_ids_BS.unsqueeze(2) == key_ids_BT.unsqueeze(1)
    return (visible & is_same_document_BST).unsqueeze(1)


def distances(queries: slice, device: torch.device) -> torch.Tensor:
    """Returns query position minus key position, shape (S T)."""
    query_S = torch.arange(queries.start, queries.stop, device=device)
    return query_S.unsqueeze(1) - torch.arange(queries.stop, device=device)


def block_mask(
    window: int, document_ids_BS: torch.Tensor | None, length: int, device: torch.device
) -> Any:
    """Returns the mask of full sequences as a BlockMask of flex_attention."""
    from torch.nn.attention.flex_attention import create_block_mask

    def visible(b: torch.Tensor, h: torch.Tensor, q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
        is_visible = q >= k
        if window:
            is_visible = is_visible & (q - k < window)
        if document_ids_BS is not None:
            is_visible = is_visible & (document_ids_BS[b, q] == document_ids_BS[b, k])
        return is_visible

    batch = None if document_ids_BS is None else document_ids_BS.shape[0]
    return compiled(create_block_mask)(visible, batch, None, length, length, device)


@functools.cache
def compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    """Returns the compiled function; eager flex_attention would build the S x T matrix."""
    return torch.compile(function, dynamic=False)


class KVCache:
    """The keys and values of one layer, (B G max_len K) each, for the positions seen so far."""

    keys: torch.Tensor
    values: torch.Tensor

    def __init__(self, max_len: int) -> None:
        self.max_len = max_len
        self.length = 0

    def append(
        self, k_BGSK: torch.Tensor, v_BGSK: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Adds positions and returns the keys and values of all positions (B G T K)."""
        start = self.length
        self.length = self.length + k_BGSK.shape[2]
        if start == 0:
            shape = (*k_BGSK.shape[:2], self.max_len, k_BGSK.shape[3])
            self.keys = k_BGSK.new_empty(shape)
            self.values = v_BGSK.new_empty(shape)
        self.keys[:, :, start : self.length] = k_BGSK
        self.values[:, :, start : self.length] = v_BGSK
        return self.keys[:, :, : self.length], self.values[:, :, : self.length]
