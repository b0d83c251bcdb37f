"""Attention on a CPU to gathered keys, tile by tile: some queries of this rank and some keys.

    keys      ├───── before the chunk ─────┼─── the chunk ───┤
    queries               all              │ ◣ causal        │    two tiles, merged by their log-sum-exp

With a bias (windows, documents, ALiBi) a tile has a few queries and all keys that these see. The bias exists
for one tile at a time, and the backward pass makes the bias again.

B batch, S sequence, s this rank's part, R queries of a tile, T keys of a tile, H query heads, G key/value
heads, K head dim.

Source: Dao et al. 2022, https://arxiv.org/abs/2205.14135 (tiles, and the backward pass from the log-sum-exp).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch

_FORWARD = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_BACKWARD = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
_BIAS_BYTES = 32 << 20  # of a tile, in fp32
_MOST_QUERIES = 512  # of a tile with a bias: more would look at more keys in vain
Result = tuple[
    torch.Tensor, torch.Tensor
]  # of attention to some keys, and the log-sum-exp of the scores


class KeyRule(NamedTuple):
    """Which keys a query sees, and what is added to the scores, where no mask is made before."""

    window: int  # 0: none
    ids_BS: torch.Tensor | None  # of documents, whole rows
    slopes_H: torch.Tensor | None  # of ALiBi

    @property
    def is_plain(self) -> bool:
        """Whether the causal rule is all."""
        return not self.window and self.ids_BS is None and self.slopes_H is None

    def bias(self, queries: Sequence[range], keys: range, device: torch.device) -> torch.Tensor:
        """fp32 (B|1, H|1, R, T), minus infinity where nothing is seen."""
        query_R = torch.cat(
            [torch.arange(part.start, part.stop, device=device) for part in queries]
        )
        distance_RT = query_R.unsqueeze(1) - torch.arange(keys.start, keys.stop, device=device)
        seen = ((distance_RT >= 0) & (distance_RT < (self.window or keys.stop)))[None, None]
        if self.ids_BS is not None:
            own_BR1, all_B1T = (
                self.ids_BS[:, query_R, None],
                self.ids_BS[:, None, keys.start : keys.stop],
            )
            seen = seen & (own_BR1 == all_B1T).unsqueeze(1)
        bias = torch.zeros(1, 1, 1, 1, device=device)
        if self.slopes_H is not None:
            bias = -distance_RT * self.slopes_H.view(1, -1, 1, 1)
        return bias.masked_fill(~seen, -torch.inf)

    def tiles(self, chunk: range) -> Iterator[tuple[range, list[range]]]:
        """Queries of a chunk that are computed together, with the keys that they see.

        By the causal rule alone these are the keys before the chunk, and the chunk itself.
        """
        if self.is_plain:
            yield chunk, [*([range(chunk.start)] if chunk.start else []), chunk]
            return
        copies = math.prod([len(x) for x in self[1:] if x is not None])
        step = min(max(_BIAS_BYTES // (4 * copies * chunk.stop), 1), _MOST_QUERIES)
        for first in range(chunk.start, chunk.stop, step):
            last = min(first + step, chunk.stop)
            yield range(first, last), [range(self.first_key(first), last)]

    def first_key(self, query: int) -> int:
        """No query from this one on sees a key before."""
        first = max(query - self.window + 1, 0) if self.window else 0
        if self.ids_BS is None or torch.compiler.is_compiling():  # else new code for every batch
            return first
        return max(
            first, int((self.ids_BS == self.ids_BS[:, query : query + 1]).int().argmax(1).min())
        )


class _Tiled(torch.autograd.Function):
    """The backward pass of a tile has the result and the log-sum-exp of all tiles."""

    @staticmethod
    def forward(
        ctx: Any,
        q_BHsK: torch.Tensor,
        k_BGSK: torch.Tensor,
        v_BGSK: torch.Tensor,
        window: int,
        ids_BS: torch.Tensor | None,
        slopes_H: torch.Tensor | None,
        *starts: int,
    ) -> torch.Tensor:
        done: list[Result] = []
        rule = KeyRule(window, ids_BS, slopes_H)
        for own, parts in _tiles(rule, starts, q_BHsK):
            results = [
                _FORWARD(q_BHsK[:, :, own], k_BGSK[:, :, at], v_BGSK[:, :, at], **how)
                for at, how in parts
            ]
            done.append(results[0] if len(results) == 1 else _merged(*results))
        out_BHsK, lse_BHs = (torch.cat(column, 2) for column in zip(*done, strict=True))
        ctx.save_for_backward(q_BHsK, k_BGSK, v_BGSK, out_BHsK, lse_BHs, ids_BS, slopes_H)
        ctx.window, ctx.starts = window, starts
        return out_BHsK

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        q_BHsK, k_BGSK, v_BGSK, out_BHsK, lse_BHs, ids_BS, slopes_H = ctx.saved_tensors
        inputs = (q_BHsK, k_BGSK, v_BGSK)
        sums = [torch.zeros(x.shape, dtype=torch.float32, device=x.device) for x in inputs]
        for own, parts in _tiles(KeyRule(ctx.window, ids_BS, slopes_H), ctx.starts, q_BHsK):
            grad, q, out, lse = (x[:, :, own] for x in (grads[0], q_BHsK, out_BHsK, lse_BHs))
            for at, how in parts:
                found = _BACKWARD(grad, q, k_BGSK[:, :, at], v_BGSK[:, :, at], out, lse, **how)
                for total, place, more in zip(sums, (own, at, at), found, strict=True):
                    total[:, :, place] += more
        made = (total.to(x.dtype) for total, x in zip(sums, inputs, strict=True))
        return *made, *[None] * (3 + len(ctx.starts))


_tiled: Callable[..., torch.Tensor] = _Tiled.apply


def tiled_attention(
    q_BHsK: torch.Tensor,
    k_BGSK: torch.Tensor,
    v_BGSK: torch.Tensor,
    rule: KeyRule,
    starts: Sequence[int],
) -> torch.Tensor:
    """softmax(q k^T / sqrt(K)) v of the keys that the rule names: (B H s K). The queries are chunks of equal
    size that begin at `starts` in the row."""
    return _tiled(q_BHsK, k_BGSK, v_BGSK, *rule, *starts)


def _tiles(
    rule: KeyRule, starts: Sequence[int], q_BHsK: torch.Tensor
) -> Iterator[tuple[slice, list[tuple[slice, dict[str, Any]]]]]:
    """The own queries that are computed together, and for each tile the keys and what the kernel is told."""
    size = q_BHsK.shape[2] // len(starts)
    for number, start in enumerate(starts):
        before = start - number * size  # in the row and not in the own part
        for queries, tiles in rule.tiles(range(start, start + size)):
            parts = []
            for keys in tiles:
                how: dict[str, Any] = {
                    "dropout_p": 0.0,
                    "is_causal": rule.is_plain and keys == queries,
                }
                if not rule.is_plain:
                    how["attn_mask"] = rule.bias([queries], keys, q_BHsK.device).to(q_BHsK.dtype)
                parts.append((slice(keys.start, keys.stop), how))
            yield slice(queries.start - before, queries.stop - before), parts


def _merged(one: Result, other: Result) -> Result:
    """Attention to the keys of two tiles, from attention to each and its log-sum-exp."""
    total = torch.logaddexp(one[1], other[1])
    summands = [out * (lse - total).exp().unsqueeze(-1) for out, lse in (one, other)]
    return (summands[0] + summands[1]).to(one[0].dtype), total
