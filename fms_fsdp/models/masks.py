"""Which keys a query sees.

    None                    the causal rule alone, which every kernel knows
    ids_BS                  documents, one after the other, on a CPU
    bias (B|1, H|1, S, T)   what is added to the scores, minus infinity where nothing is seen
    BlockMask               flex_attention's, on a GPU

B batch, S query positions, T key positions, H query heads.

Source: Beltagy et al. 2020 (windows).
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

from fms_fsdp.models.variants import LlamaConfig


def attention_mask(
    config: LlamaConfig,
    window: int,
    ids_BS: torch.Tensor | None,
    positions: slice,
    device: torch.device,
    *,
    cached: bool = False,
    num_keys: int = 0,
) -> Any:
    """The mask that `attention` takes for queries at `positions` and all keys up to the last of these
    positions, in a layer with this window (0: none). `ids_BS` number the documents. `cached`: the keys come
    from a cache, so that no mask is compiled. `num_keys`: the number of keys, of which the keys behind
    `positions` are hidden."""
    if not num_keys:
        if not window and config.pos_emb != "alibi" and (ids_BS is None or not config.attn_dropout):
            return None if ids_BS is None else document_mask(ids_BS)
        if device.type == "cuda" and not cached and not config.attn_dropout:
            return block_mask(ids_BS, window, positions.stop, device)
    from fms_fsdp.extras.gpt import added_mask

    return added_mask(config, window, ids_BS, positions, device, num_keys)


def document_mask(ids_BS: torch.Tensor) -> Any:
    """The mask that `attention` takes so that a token sees only earlier tokens of the same document.

    On a GPU the blocks for flex_attention, else the ids themselves.
    """
    return block_mask(ids_BS, 0, ids_BS.shape[1], ids_BS.device) if ids_BS.is_cuda else ids_BS


def block_mask(ids_BS: torch.Tensor | None, window: int, seq: int, device: torch.device) -> Any:
    """The mask as flex_attention's blocks. Ids of other values are no reason to compile anew."""
    from torch.nn.attention.flex_attention import create_block_mask

    def seen(b: torch.Tensor, h: torch.Tensor, q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
        near = (q >= k) & (q - k < window) if window else q >= k
        return near if ids_BS is None else near & (ids_BS[b, q] == ids_BS[b, k])

    batch = None if ids_BS is None else ids_BS.shape[0]
    return compiled(create_block_mask)(seen, batch, None, seq, seq, device)


@functools.cache
def compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function, compiled at the first call. Functions of torch's flex_attention that are not compiled
    make the whole matrix of S x S."""
    return torch.compile(function, dynamic=False)
