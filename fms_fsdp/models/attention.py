"""Attention as one function of queries, keys, values and a mask.

B batch, S query positions, T key positions, H query heads, G key/value heads, K head dim.

Source: Vaswani et al. 2017 (attention); Ainslie et al. 2023 (grouped queries).
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

from fms_fsdp.errors import UserError
from fms_fsdp.models.masks import compiled
from fms_fsdp.models.variants import LlamaConfig

_BACKENDS = {
    "flash": SDPBackend.FLASH_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
    "cudnn": SDPBackend.CUDNN_ATTENTION,
    "math": SDPBackend.MATH,
}


def attention(
    q_BHSK: torch.Tensor,
    k_BGTK: torch.Tensor,
    v_BGTK: torch.Tensor,
    *,
    mask: Any = None,
    backend: str = "auto",
    score: Callable[..., torch.Tensor] | None = None,
    drop: Callable[[torch.Tensor], torch.Tensor] | None = None,
) -> torch.Tensor:
    """softmax(q k^T / sqrt(K)) v, causal: the last query sees all keys, each query before it one key less.

    `mask`: one of masks.py; beside a BlockMask `score` is what flex_attention does to the scores. With more
    keys than queries (T > S, those of a cache) None and a bias are allowed. `drop` changes the weights
    (B H S T) between softmax and v; then they exist as a whole.
    """
    if drop is not None:
        return explicit_attention(q_BHSK, k_BGTK, v_BGTK, mask, drop)
    grouped = q_BHSK.shape[1] != k_BGTK.shape[1]
    if mask is not None and not isinstance(mask, torch.Tensor):
        from torch.nn.attention.flex_attention import flex_attention

        # within a compiled block it is compiled with it
        flex: Any = flex_attention if torch.compiler.is_compiling() else compiled(flex_attention)
        out: torch.Tensor = flex(q_BHSK, k_BGTK, v_BGTK, score, block_mask=mask, enable_gqa=grouped)
        return out
    product = functools.partial(F.scaled_dot_product_attention, enable_gqa=grouped)
    with _kernel(backend):
        if mask is not None and mask.ndim == 4:
            return product(q_BHSK, k_BGTK, v_BGTK, attn_mask=mask.to(q_BHSK.dtype))
        if k_BGTK.shape[2] > q_BHSK.shape[2]:
            seen = None if q_BHSK.shape[2] == 1 else _seen_from_the_end(q_BHSK, k_BGTK)
            return product(q_BHSK, k_BGTK, v_BGTK, attn_mask=seen)
        if mask is not None:
            return _by_document(product, q_BHSK, k_BGTK, v_BGTK, mask)
        if backend == "auto" and _is_short(q_BHSK):
            return explicit_attention(q_BHSK, k_BGTK, v_BGTK)
        return product(q_BHSK, k_BGTK, v_BGTK, is_causal=True)


def chosen_backend(config: LlamaConfig, dtype: torch.dtype, device: torch.device) -> str:
    """The kernel that torch takes for causal attention of this shape, such as "flash" or "cudnn".

    Raises:
        UserError: there is none for it.
    """
    size = (config.max_seq_len, config.head_dim)
    q, kv = (
        torch.empty(1, heads, *size, dtype=dtype, device=device, requires_grad=True)
        for heads in (config.num_attention_heads, config.num_kv_heads)
    )
    grouped = config.num_attention_heads != config.num_kv_heads
    choice = SDPBackend.ERROR.value
    with _kernel(config.attn_impl), contextlib.suppress(RuntimeError):  # torch's answer on a CPU
        choice = torch._fused_sdp_choice(q, kv, kv, is_causal=True, enable_gqa=grouped)
    found = [name for name, backend in _BACKENDS.items() if backend.value == choice]
    if not found:
        rule = f"cannot attend in {dtype} with heads of {config.head_dim} on {device.type}"
        raise UserError(f"--attn_impl ({config.attn_impl}) {rule}; take auto, or another precision")
    return found[0]


def _kernel(backend: str) -> contextlib.AbstractContextManager[None]:
    return contextlib.nullcontext() if backend == "auto" else sdpa_kernel(_BACKENDS[backend])


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


def explicit_attention(
    q_BHSK: torch.Tensor,
    k_BGSK: torch.Tensor,
    v_BGSK: torch.Tensor,
    bias: torch.Tensor | None = None,
    drop: Callable[[torch.Tensor], torch.Tensor] = lambda weights_BHSS: weights_BHSS,
) -> torch.Tensor:
    """Attention by explicit products; scores and softmax in fp32, whole (B H S S). `bias` is added to the
    scores; without one it is causal."""
    group = q_BHSK.shape[1] // k_BGSK.shape[1]
    k_BHSK, v_BHSK = (
        x if group == 1 else x.repeat_interleave(group, dim=1) for x in (k_BGSK, v_BGSK)
    )
    scores_BHSS = (q_BHSK @ k_BHSK.transpose(2, 3)).float() * (1 / math.sqrt(q_BHSK.shape[3]))
    if bias is None:
        position_S = torch.arange(q_BHSK.shape[2], device=q_BHSK.device)
        # added, not filled in: compiled code for CPUs is then vectorised
        bias = torch.where(position_S.unsqueeze(1) >= position_S, 0.0, -torch.inf)
    return drop((scores_BHSS + bias).softmax(dim=-1)).to(v_BHSK.dtype) @ v_BHSK
