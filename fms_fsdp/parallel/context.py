"""Context parallel: each rank of cp holds a part of every row. Attention alone needs the other parts.

    ulysses   rank 0 │ rank 1 │ rank 2 │ rank 3   an all-to-all trades parts of the row for heads: attention
                                                  has whole rows of H/c heads; another one trades them back

    gather    0 │ 1 │ 2 │ 3 │ 3 │ 2 │ 1 │ 0       2c chunks; a rank has an early and a late chunk, so that
                                                  all ranks have the same work; keys and values of the whole
                                                  row are gathered, queries stay

Callers hand whole rows to the model. A hook in front of the model cuts tokens, labels and positions; ids of
documents stay whole. Losses are those of the own part.

Gathered keys need neither a mask of this rank's queries and all keys nor a copy of one: flex_attention on a
GPU has blocks, and a CPU reads the keys tile by tile (tiles.py).

B batch, S sequence, s this rank's part, H query heads, G key/value heads, K head dim, c ranks.

Source: Jacobs et al. 2023, https://arxiv.org/abs/2309.14509 (ulysses); Llama Team 2024, section 3.3.2,
https://arxiv.org/abs/2407.21783 (gathered keys, an early and a late chunk).
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import nn

from fms_fsdp.config import ParallelConfig
from fms_fsdp.distributed.axes import cp_method
from fms_fsdp.distributed.collectives import Group, collective
from fms_fsdp.distributed.mesh import Mesh
from fms_fsdp.models.attention import explicit_attention
from fms_fsdp.models.llama import Llama
from fms_fsdp.models.masks import compiled
from fms_fsdp.models.variants import LlamaConfig
from fms_fsdp.parallel.tiles import KeyRule, tiled_attention

_FIELDS = tuple(inspect.signature(Llama.forward).parameters)[1:]
Ids = torch.Tensor | None
Function = Callable[..., torch.Tensor]
Places = Callable[
    [int], list[range]
]  # from the size of a part to the indices of the part in the whole


def apply_cp(model: Llama, mesh: Mesh, section: ParallelConfig) -> None:
    """Lets every rank of cp compute a part of each row, in place; on meta too.

    The caller gives rows whose length `row_multiple` divides. A pass with caches is not cut: every rank reads
    whole rows then.
    """
    config, tp = model.config, mesh.size("tp")
    method = cp_method(section.cp_method, config.num_attention_heads, tp, mesh.size("cp"))
    split = (_Ulysses if method == "ulysses" else _Gather)(config, mesh)
    model.register_forward_pre_hook(split.cut, with_kwargs=True)
    model.mask = partial(split.mask, model.mask)
    for block in model.blocks.values():
        attention: Any = block.attention
        attention.attend = partial(
            split.attend, attention.attend, attention.attend.keywords["score"]
        )
    if config.has_dropout:
        _drop_by_place(model, split, tp if mesh.dims.sequence_parallel else 1)


class _WholeRow(NamedTuple):
    """A mask for a pass with caches."""

    mask: Any


class _Cut:
    """The place of this rank, and what both methods share."""

    def __init__(self, config: LlamaConfig, mesh: Mesh) -> None:
        axis = mesh.axis("cp")
        self.config, self.rank, self.size = config, axis.get_local_rank(), axis.size()
        self.group = Group(axis.get_group().group_name, axis.size())
        heads, place = config.num_attention_heads // mesh.size("tp"), mesh.place("tp")
        self.heads = range(place * heads, (place + 1) * heads)  # of this rank of tp

    def places(self, size: int) -> list[range]:
        """The indices in the whole row of this rank's part, which has this size."""
        raise NotImplementedError

    def cut(
        self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        """Hook in front of the model: takes the own part of tokens, labels and positions.

        A later stage of a pipeline is given x that is cut already, and whole positions.
        """
        given = dict(zip(_FIELDS, args, strict=False)) | kwargs
        if given.get("caches") is not None:
            return None
        first, positions_BS = given.pop(_FIELDS[0]), given.get("positions_BS")
        has_tokens = getattr(model, "embed", None) is not None
        assert has_tokens or positions_BS is not None
        length = first.shape[1] if positions_BS is None else positions_BS.shape[1]
        parts = self.places(length // self.size)

        def own(x_BS: torch.Tensor) -> torch.Tensor:
            return torch.cat([x_BS[:, part.start : part.stop] for part in parts], 1)

        if positions_BS is None:
            positions_BS = torch.arange(length, device=first.device).unsqueeze(0)
        given["positions_BS"] = own(positions_BS)
        if given.get("labels_BS") is not None:
            given["labels_BS"] = own(given["labels_BS"])
        return (own(first) if has_tokens else first,), given

    def mask(
        self,
        inner: Callable[..., Any],
        config: LlamaConfig,
        window: int,
        ids_BS: Ids,
        part: slice,
        device: torch.device,
        **cached: Any,
    ) -> Any:
        """What `attend` takes as mask; the arguments are those of `attention_mask`, for the own part."""
        if cached["cached"]:
            return _WholeRow(inner(config, window, ids_BS, part, device, **cached))
        return self.own_mask(partial(inner, config), window, ids_BS, part.stop, device)

    def own_mask(
        self, inner: Callable[..., Any], window: int, ids_BS: Ids, size: int, device: Any
    ) -> Any:
        """The mask where the own part of a row has this size."""
        raise NotImplementedError

    def attend(
        self,
        inner: Function,
        score: Function | None,
        *qkv: torch.Tensor,
        mask: Any,
        drop: Function | None,
    ) -> torch.Tensor:
        """Attention of this rank's queries to the whole row; the arguments are those of `attention`."""
        if isinstance(mask, _WholeRow):
            return inner(*qkv, mask=mask.mask, drop=drop)
        if score is not None:
            inner = partial(inner, score=self.own_score(score, qkv[0].shape[2]))
        return self.own_attention(inner, qkv, mask, drop)

    def own_score(self, score: Function, size: int) -> Function:
        """flex_attention's score, by the indices that this rank has in attention."""
        raise NotImplementedError

    def own_attention(
        self, inner: Function, qkv: Sequence[torch.Tensor], mask: Any, drop: Function | None
    ) -> torch.Tensor:
        """Attention where rows are cut."""
        raise NotImplementedError


class _Ulysses(_Cut):
    """Consecutive parts; attention has whole rows of some heads."""

    def places(self, size: int) -> list[range]:
        """One range; of the heads of a rank of tp, attention has the part at the same place."""
        return [range(self.rank * size, (self.rank + 1) * size)]

    def own_mask(
        self, inner: Callable[..., Any], window: int, ids_BS: Ids, size: int, device: Any
    ) -> Any:
        """The mask of the whole row, for the heads of this rank."""
        made = inner(window, ids_BS, slice(0, size * self.size), device)
        by_head = isinstance(made, torch.Tensor) and made.ndim == 4 and made.shape[1] > 1
        return made.chunk(self.size, 1)[self.rank] if by_head else made

    def own_score(self, score: Function, size: int) -> Function:
        """Heads count from the first one of this rank."""
        first = self.rank * (len(self.heads) // self.size)
        return lambda value, b, h, q, k: score(value, b, h + first, q, k)

    def own_attention(
        self, inner: Function, qkv: Sequence[torch.Tensor], mask: Any, drop: Function | None
    ) -> torch.Tensor:
        """Key/value heads that cannot be dealt out are repeated, no more often than necessary."""
        copies = self.size // math.gcd(self.size, qkv[1].shape[1])
        by_rank = []
        for x_BHsK, times in zip(qkv, (1, copies, copies), strict=True):
            x_BHsK = x_BHsK if times == 1 else x_BHsK.repeat_interleave(times, 1)
            batch, _, *rest = x_BHsK.shape
            by_rank.append(x_BHsK.view(batch, self.size, -1, *rest).transpose(0, 1))
        traded = collective("all_to_all", torch.cat(by_rank, 2), self.group)
        heads = [x.shape[2] for x in by_rank]
        out_BHSK = inner(
            *torch.split(traded.movedim(0, 2).flatten(2, 3), heads, 1), mask=mask, drop=drop
        )
        parts = torch.stack(out_BHSK.chunk(self.size, 2))
        return collective("all_to_all", parts, self.group).transpose(0, 1).flatten(1, 2)


class _Gather(_Cut):
    """An early and a late chunk; attention has the own queries and all keys."""

    def places(self, size: int) -> list[range]:
        """Two ranges of the same length."""
        half = size // 2
        return [
            range(at * half, (at + 1) * half) for at in (self.rank, 2 * self.size - 1 - self.rank)
        ]

    def own_mask(
        self, inner: Callable[..., Any], window: int, ids_BS: Ids, size: int, device: Any
    ) -> Any:
        """On a GPU blocks for flex_attention, unless weights are dropped; else a rule."""
        config, slopes_H = self.config, None
        if device.type == "cuda" and not config.attn_dropout:
            return self.block_mask(window, ids_BS, size, device)
        if config.pos_emb == "alibi":
            head_H = torch.arange(self.heads.start, self.heads.stop, device=device)
            from fms_fsdp.extras.gpt import alibi_slopes

            slopes_H = alibi_slopes(head_H, config.num_attention_heads)
        return KeyRule(window, ids_BS, slopes_H)

    def block_mask(self, window: int, ids_BS: Ids, size: int, device: torch.device) -> Any:
        """The blocks of the own queries and all keys."""
        from torch.nn.attention.flex_attention import create_block_mask

        def seen(
            b: torch.Tensor, h: torch.Tensor, q: torch.Tensor, k: torch.Tensor
        ) -> torch.Tensor:
            place = self.place(q, size)
            near = (place >= k) & (place - k < window) if window else place >= k
            return near if ids_BS is None else near & (ids_BS[b, place] == ids_BS[b, k])

        batch = None if ids_BS is None else ids_BS.shape[0]
        return compiled(create_block_mask)(seen, batch, None, size, size * self.size, device)

    def place(self, query: torch.Tensor, size: int) -> torch.Tensor:
        """The index in the row of each query, an index in the own part, which has this size."""
        early, late = self.places(size)
        return query + torch.where(query < len(early), early.start, late.start - len(early))

    def own_score(self, score: Function, size: int) -> Function:
        """Queries count as in the row."""
        return lambda value, b, h, q, k: score(value, b, h, self.place(q, size), k)

    def own_attention(
        self, inner: Function, qkv: Sequence[torch.Tensor], mask: Any, drop: Function | None
    ) -> torch.Tensor:
        """The keys and values of all ranks come in one message."""
        q_BHsK, *own = qkv
        parts = collective("all_gather", torch.cat(own, 1).unsqueeze(0), self.group)
        early, late = parts.chunk(2, 3)
        k_BGSK, v_BGSK = torch.cat((*early.unbind(), *reversed(late.unbind())), 2).chunk(2, 1)
        if not isinstance(mask, KeyRule):
            return inner(q_BHsK, k_BGSK, v_BGSK, mask=mask, drop=drop)
        places = self.places(q_BHsK.shape[2])
        if (
            drop is not None or q_BHsK.device.type != "cpu"
        ):  # the weights of the own queries exist as a whole
            bias = mask.bias(places, range(k_BGSK.shape[2]), q_BHsK.device)
            return explicit_attention(
                q_BHsK, k_BGSK, v_BGSK, bias, *([] if drop is None else [drop])
            )
        return tiled_attention(q_BHsK, k_BGSK, v_BGSK, mask, [part.start for part in places])


def _drop_by_place(model: Llama, split: _Cut, pieces: int) -> None:
    """Tells every dropout which part of the row, or of the heads, this rank has.

    tp may have told before which heads a rank has, and which of the `pieces` of the own part of the row.
    """
    from fms_fsdp.extras.dropout import Dropout

    for name, module in model.named_modules():
        if not isinstance(module, Dropout):
            continue
        parts: Any = module.parts
        if not name.endswith("attention.dropout"):
            known = parts.get(1, _whole)
            parts[1] = partial(_places_in_row, split, known, 1 if known is _whole else pieces)
        elif isinstance(split, _Ulysses):
            parts[1] = partial(_places_of_heads, split, parts.get(1, _whole))
        else:
            parts[2] = split.places


def _whole(size: int) -> list[range]:
    return [range(size)]


def _places_in_row(split: _Cut, piece: Places, pieces: int, size: int) -> list[range]:
    return _at(split.places(size * pieces), piece(size))


def _places_of_heads(split: _Cut, heads: Places, size: int) -> list[range]:
    return _at(heads(size * split.size), split.places(size))


def _at(places: list[range], indices: list[range]) -> list[range]:
    """The numbers at these indices of the ranges, one range behind the other."""
    found = []
    for index in indices:
        start = 0
        for place in places:
            first, last = max(index.start - start, 0), min(index.stop - start, len(place))
            found += [place[first:last]] if first < last else []
            start += len(place)
    return found
