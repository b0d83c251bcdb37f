"""Tensor parallelism: each rank of `tp` has a part of every matrix of a block, and of the vocabulary.

    S/t ─ norm ─ gather ─ q k v: heads h ─ attention ─ o: columns h ─ sum, cut ─ + ─ S/t
    S/t ─ norm ─ gather ─ gate up: dims f ─ product ── down: columns f ─ sum, cut ─ + ─ S/t

    embed: rows v of the vocabulary ─ sum, cut ─ S/t      head: S/t ─ norm ─ gather ─ rows v ─ loss

A rank has the heads h, the dims f of the feed-forward and the rows v of the vocabulary. Between matrices a
rank has the part S/t of the sequence (`sequence_parallel`), or all of the sequence. The table says which
message goes with each of the two; the message of the backward pass is the other one of the same row.

                                   in front of matrices    behind matrices
    parts of the sequence          gather                  scatter: sum, and cut
    copies of the sequence         copy: no message        sum

Parameters are DTensors, so that FSDP, checkpoints and norms know which part a rank has. Computations see
local tensors only: where a module reads a parameter, a property of its class gives the local part. So every
module runs its own forward pass.

B batch, S sequence, D model, F ffn, V vocabulary, H query heads, G key/value heads.

Source: Shoeybi et al. 2019, https://arxiv.org/abs/1909.08053 (tensor parallel); Korthikanti et al. 2022,
https://arxiv.org/abs/2205.05198 (sequence parallel).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cache, partial
from typing import Any, NamedTuple, cast

import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from fms_fsdp.config import ParallelConfig
from fms_fsdp.distributed.collectives import Group, all_gather, collective
from fms_fsdp.distributed.dtensor import differentiable_shard, distribute, num_axes
from fms_fsdp.distributed.mesh import Mesh
from fms_fsdp.models.llama import Attention, Block, Embed, FeedForward, Head, Llama
from fms_fsdp.models.loss import VocabularyPart, linear_cross_entropy
from fms_fsdp.models.variants import LlamaConfig
from fms_fsdp.parallel.compile import compiles
from fms_fsdp.parallel.vocabulary import split_softmax_


def apply_tp(model: Llama, mesh: Mesh, section: ParallelConfig) -> None:
    """Splits the model, or a stage of the model, over the ranks of `tp`, in place, before FSDP. The heads and
    the vocabulary can be split so, as parallel/layout.py has checked."""
    tp = mesh.axis("tp")
    split = _TensorSplit(model.config, tp, mesh.dims.sequence_parallel)
    model.register_forward_pre_hook(split.choose, with_kwargs=True)
    if model.config.pos_emb == "alibi":
        model.mask = partial(_own_heads, model.mask, split)
    if model.distance_bias is not None:
        _hold(model.distance_bias, split, {"weight": _BY_COLUMNS})
    if model.embed is not None:
        _split_embed(model.embed, split)
    for block in model.blocks.values():
        _split_block(cast(Block, block), split)
    if model.head is not None:
        _split_head(model.head, split)
    if section.async_tp and compiles(section, torch.device(tp.device_type)):
        from torch._inductor import config as inductor_config

        inductor_config._micro_pipeline_tp = True  # messages overlap with the products beside them


def _own_rows(config: LlamaConfig, rank: int, size: int) -> tuple[int, int]:
    """The first token of a rank, and the number of its tokens that the vocabulary really has."""
    largest = -(-config.padded_vocab_size // size)
    first = min(rank * largest, config.vocab_size)
    return first, min(largest, config.vocab_size - first)


class _TensorSplit:
    """The place of this rank, and how the ranks hold the sequence between matrices.

    `is_cut`: whether ranks hold parts of the sequence in this pass. A pass with caches reads any number of
    tokens, and is not cut.
    """

    def __init__(self, config: LlamaConfig, tp: DeviceMesh, sequence_parallel: bool) -> None:
        self.config, self.mesh, self.sequence_parallel = config, tp, sequence_parallel
        self.rank, self.size = tp.get_local_rank(), tp.size()
        self.group = tp.get_group()
        self.ranks = Group(self.group.group_name, self.size)
        self.is_cut = sequence_parallel
        self.num_heads = config.num_attention_heads // self.size
        # the gradient of what all ranks have: summands, where ranks see different tokens
        self.shared = _Held(None, adds_up=sequence_parallel)

    def choose(self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Hook in front of the model."""
        self.is_cut = self.sequence_parallel and kwargs.get("caches") is None

    def whole(self, x_BSD: torch.Tensor) -> torch.Tensor:
        """In front of matrices: all of the sequence. The gradients of all ranks are added up."""
        kind = "all_gather" if self.is_cut else "copy"
        return collective(kind, x_BSD, self.ranks, 1)

    def added_up(self, x_BSD: torch.Tensor) -> torch.Tensor:
        """Behind matrices: the sum over ranks, of which this rank keeps the own part."""
        kind = "reduce_scatter" if self.is_cut else "all_reduce"
        return collective(kind, x_BSD, self.ranks, 1)

    def own_places(self, size: int, whole: int = 0) -> list[range]:
        """Where the own part, of this size, is along a dim: of equal parts, or of a `whole` of this size.

        All parts but the last ones are as large as the first one.
        """
        start = self.rank * (-(-whole // self.size) if whole else size)
        return [range(start, start + size)]


class _Held(NamedTuple):
    """How ranks hold a parameter: in parts along `dim`, or as copies (None); `adds_up`: the gradients of
    copies are summands.

    `rows`: the first row and the number of rows that this rank computes with, if not with all. `is_apart`:
    the module does not see the parameter, which a hook adds.
    """

    dim: int | None
    adds_up: bool = False
    rows: tuple[int, int] | None = None
    is_apart: bool = False


_BY_ROWS, _BY_COLUMNS = _Held(0), _Held(1)


def _hold(module: nn.Module, split: _TensorSplit, plan: Mapping[str, _Held]) -> None:
    """Makes the parameters of the module itself DTensors, and lets its code read local parts."""
    held = {
        name: plan[name] for name, parameter in module._parameters.items() if parameter is not None
    }
    if not held:
        return
    for name, how in held.items():
        parameter = module._parameters[name]
        assert parameter is not None
        placed = distribute(parameter.detach(), split.mesh, how.dim)
        module._parameters[name] = nn.Parameter(placed, requires_grad=parameter.requires_grad)
    kind: Any = type(module)
    module.__class__ = _with_local_parts(kind, tuple(held.items()))


@cache
def _with_local_parts(kind: Any, held: tuple[tuple[str, _Held], ...]) -> type[nn.Module]:
    """The class with a property for each parameter: one class for all layers, which so share compiled code.

    FSDP and the initialisation read and write `_parameters`, where the DTensors stay.
    """
    return type(kind.__name__, (kind,), {name: _local_part(name, how) for name, how in held})


def _local_part(name: str, held: _Held) -> property:
    def read(module: nn.Module) -> torch.Tensor | None:
        parameter: Any = module._parameters[name]
        if num_axes(parameter) > 1:  # FSDP asks for a shard
            return parameter  # type: ignore[no-any-return]
        if held.is_apart:
            return None
        local = differentiable_shard(parameter, is_partial=held.adds_up)
        return local if held.rows is None else local.narrow(0, *held.rows)

    return property(read)


def _split_block(block: Block, split: _TensorSplit) -> None:
    attention, feed_forward = block.attention, cast(FeedForward, block.feed_forward)
    for norm in (block.attention_norm, block.ffn_norm):
        _hold(norm, split, {"weight": split.shared, "bias": split.shared})
    _split_attention(attention, split)
    for name in ("gate_proj", "up_proj"):  # a GPT has no gate
        if (linear := getattr(feed_forward, name, None)) is not None:
            _hold(linear, split, {"weight": _BY_ROWS, "bias": _BY_ROWS})
    _split_by_columns(feed_forward.down_proj, split)
    for module in (attention, feed_forward):
        module.register_forward_pre_hook(lambda module, args: (split.whole(args[0]), *args[1:]))
    if split.sequence_parallel:
        for dropout in (block.attention_dropout, block.ffn_dropout):
            _drop_in_parts(dropout, 1, split.own_places)
    own_dims = partial(split.own_places, whole=split.config.ffn_hidden_size)
    _drop_in_parts(feed_forward.dropout, 2, own_dims)


def _split_attention(attention: Attention, split: _TensorSplit) -> None:
    """Each rank has H / t heads and the key/value heads of these; several ranks have the same one where
    there are fewer than ranks."""
    config, kv_rows = split.config, _BY_ROWS
    if config.num_kv_heads % split.size:
        first = split.rank * config.num_kv_heads // split.size * config.head_dim
        kv_rows = _Held(None, adds_up=True, rows=(first, config.head_dim))
    held = {"q_proj": _BY_ROWS, "k_proj": kv_rows, "v_proj": kv_rows}
    for name, how in held.items():
        _hold(getattr(attention, name), split, {"weight": how, "bias": how})
    _split_by_columns(attention.o_proj, split)
    for norm in (attention.q_norm, attention.k_norm):  # of other heads on each rank
        by_head = _Held(None, adds_up=True)
        _hold(norm, split, {"weight": by_head, "bias": by_head})
    _drop_in_parts(attention.dropout, 1, split.own_places)
    if (score := attention.attend.keywords["score"]) is not None:
        moved = _score_of_heads(score, split.rank * split.num_heads)
        attention.attend = partial(attention.attend, score=moved)


def _split_by_columns(linear: nn.Linear, split: _TensorSplit) -> None:
    """Products of columns are summands; the bias is added once, to their sum."""
    bias = split.shared._replace(is_apart=True)
    _hold(linear, split, {"weight": _BY_COLUMNS, "bias": bias})

    def add_up(module: nn.Module, args: tuple[Any, ...], summand_BSD: torch.Tensor) -> torch.Tensor:
        sum_BSD, parameter = split.added_up(summand_BSD), module._parameters["bias"]
        if parameter is None:
            return sum_BSD
        bias_D = differentiable_shard(parameter, is_partial=bias.adds_up)
        return sum_BSD + bias_D.to(sum_BSD.dtype)

    linear.register_forward_hook(add_up)


@cache
def _score_of_heads(score: Callable[..., torch.Tensor], first: int) -> Callable[..., torch.Tensor]:
    """The score of flex_attention for heads from `first` on; one function for all layers."""

    def moved(
        value: torch.Tensor, b: torch.Tensor, h: torch.Tensor, q: torch.Tensor, k: torch.Tensor
    ) -> torch.Tensor:
        return score(value, b, h + first, q, k)

    return moved


def _own_heads(mask: Callable[..., Any], split: _TensorSplit, *args: Any, **kwargs: Any) -> Any:
    """The mask for the heads of this rank: a bias (B|1, H, S, T) has a part for each head."""
    made = mask(*args, **kwargs)
    if isinstance(made, torch.Tensor) and made.ndim == 4:
        return made.narrow(1, split.rank * split.num_heads, split.num_heads)
    return made


def _drop_in_parts(dropout: Any, dim: int, places: Callable[[int], list[range]]) -> None:
    """Tells dropout, where there is one, which part of the dim it is given."""
    if isinstance(dropout, nn.Module):
        parts: Any = dropout.parts
        parts[dim] = places


def _split_embed(embed: Embed, split: _TensorSplit) -> None:
    """Each rank looks up the tokens of its rows; the sum over ranks has all tokens."""
    first, _ = _own_rows(split.config, split.rank, split.size)
    _hold(embed, split, {"weight": _BY_ROWS, "positions": split.shared})

    def look_up(tokens_BS: torch.Tensor, weight_VD: torch.Tensor) -> torch.Tensor:
        row_BS = tokens_BS - first
        is_other_BS = (row_BS < 0) | (row_BS >= len(weight_VD))
        summand_BSD = F.embedding(row_BS.masked_fill(is_other_BS, 0), weight_VD)
        return split.added_up(summand_BSD.masked_fill(is_other_BS.unsqueeze(-1), 0))

    def cut_positions(module: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
        tokens_BS, positions, *more = args
        if split.is_cut:
            (own,) = split.own_places(tokens_BS.shape[1] // split.size)
            if isinstance(positions, slice):
                positions = slice(positions.start + own.start, positions.start + own.stop)
            else:
                positions = positions[..., own.start : own.stop]
        return tokens_BS, positions, *more

    embed.look_up = look_up  # type: ignore[assignment]
    embed.register_forward_pre_hook(cut_positions)
    if split.sequence_parallel:
        _drop_in_parts(embed.dropout, 1, split.own_places)


def _split_head(head: Head, split: _TensorSplit) -> None:
    """The final norm sees a part of the sequence, the loss all of it and a part of the vocabulary."""
    _hold(head.norm, split, {"weight": split.shared, "bias": split.shared})
    _hold(head, split, {"weight": _BY_ROWS})
    head.norm.register_forward_hook(lambda module, args, out_BSD: split.whole(out_BSD))
    first, head.vocab_size = _own_rows(split.config, split.rank, split.size)
    _, largest = _own_rows(split.config, 0, split.size)
    softmax_ = partial(split_softmax_, group=split.group)
    head.loss = partial(linear_cross_entropy, vocabulary=VocabularyPart(softmax_, first, largest))
    head.product = partial(_whole_logits, split=split, largest=largest)


def _whole_logits(
    x_BSD: torch.Tensor, weight_VD: torch.Tensor, *, split: _TensorSplit, largest: int
) -> torch.Tensor:
    """The logits of all tokens of the vocabulary, which every rank gets; without gradients."""
    assert not torch.is_grad_enabled()
    own_BSV = F.pad(F.linear(x_BSD, weight_VD), (0, largest - len(weight_VD)))
    all_BSV = all_gather(own_BSV, split.ranks, 2)
    return all_BSV[..., : split.config.vocab_size]
