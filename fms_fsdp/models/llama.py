"""Llama: a decoder-only transformer, written to be read next to the paper of Llama; and relatives of
Llama.

    tokens_BS → Embed → Block × num_layers → Head → logits_BSV, or with labels (loss_sum, num_labels[, z_sum])
    Block: x + Attention(norm(x)), then x + FeedForward(norm(x))

B batch, S sequence, D model, F ffn, V vocabulary, H query heads, G key/value heads, K head dim.

The options of other models (docs/models.md) choose modules of extras/ where the model is built. All are plain
modules of torch: every module computes in the dtype of its weights, which is the business of
parallel/precision.py. The rotary table is fp32 always.

Source: Touvron et al. 2023 (Llama 2); Shazeer 2020 (SwiGLU); Zhang and Sennrich 2019 (RMSNorm); Gemma Team
2024 (capped logits).
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.autograd import profiler as autograd_profiler
from torch.profiler import record_function

from fms_fsdp.errors import import_function
from fms_fsdp.models.attention import attention
from fms_fsdp.models.loss import linear_cross_entropy
from fms_fsdp.models.masks import attention_mask
from fms_fsdp.models.positions import rope_table, rotate
from fms_fsdp.models.variants import LlamaConfig

if TYPE_CHECKING:
    from fms_fsdp.extras.decoding import KeyValueCache

Dropping = Callable[..., torch.Tensor]  # of x and keys_B: drops values of x by the keys of the rows
Call = tuple[
    str, nn.Module, tuple[Any, ...]
]  # a layer, its block, and what the block takes beside x_BSD
Losses = tuple[torch.Tensor, ...]  # loss_sum, num_labels and, in training with a z-loss, z_sum


def build_linear(
    config: LlamaConfig, in_features: int, out_features: int, *, bias: bool = False
) -> nn.Linear:
    """A linear layer of a block, without bias in a Llama."""
    return nn.Linear(in_features, out_features, bias=config.bias or bias)


def build_norm(config: LlamaConfig, size: int) -> nn.Module:
    """The norm the configuration names; all compute in fp32 inside."""
    if config.norm == "rmsnorm":
        return nn.RMSNorm(size, eps=config.norm_eps)
    from fms_fsdp.extras.gpt import NORMS

    return NORMS[config.norm](size, eps=config.norm_eps)


def build_head_norm(config: LlamaConfig, size: int) -> nn.Module:
    """The norm of queries or of keys, whose heads have `size` dims together; without one, the identity."""
    if not config.qk_norm:
        return nn.Identity()
    if not config.qk_norm_wide:
        return build_norm(config, config.head_dim)
    from fms_fsdp.extras.relatives import WideNorm

    return WideNorm(size, eps=config.norm_eps)


def build_dropout(rate: float, place: int, factor: float = 1.0) -> Dropping:
    """Dropout at this rate; at rate 0, a function that returns x. `place` tells the uses within a layer
    apart. `factor`: what x is multiplied by."""
    dropout: Dropping = _keep
    if rate:
        from fms_fsdp.extras.dropout import Dropout

        dropout = Dropout(rate, place)
    if factor == 1:
        return dropout
    from fms_fsdp.extras.relatives import Scaled

    return Scaled(factor, dropout)


def _keep(x: torch.Tensor, keys_B: torch.Tensor | None) -> torch.Tensor:
    return x


class Attention(nn.Module):
    """Causal grouped-query self-attention; each of the G key/value heads serves H / G query heads."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.head_dim = config.head_dim
        heads = config.num_attention_heads
        attend: Callable[..., torch.Tensor] = attention
        score: Callable[..., torch.Tensor] | None = None
        if config.pos_emb == "alibi":
            from fms_fsdp.extras.gpt import alibi_score

            score = alibi_score(heads)
        elif config.pos_emb == "relative":
            from fms_fsdp.extras import distance_bias

            attend = distance_bias.attend
        self.attend = partial(attend, backend=config.attn_impl, score=score)
        q_size, kv_size = heads * config.head_dim, config.num_kv_heads * config.head_dim
        self.q_proj = build_linear(config, config.hidden_size, q_size, bias=config.qkv_bias)
        self.k_proj = build_linear(config, config.hidden_size, kv_size, bias=config.qkv_bias)
        self.v_proj = build_linear(config, config.hidden_size, kv_size, bias=config.qkv_bias)
        self.o_proj = build_linear(config, q_size, config.hidden_size)
        self.q_norm, self.k_norm = (build_head_norm(config, size) for size in (q_size, kv_size))
        # the scores are q k^T / sqrt(K) times this
        self.q_factor = config.attention_multiplier * math.sqrt(config.head_dim) or 1.0
        self.drops, self.dropout = (
            config.attn_dropout > 0,
            build_dropout(config.attn_dropout, place=1),
        )

    def forward(
        self,
        x_BSD: torch.Tensor,
        rope: torch.Tensor | None,
        mask: Any,
        cache: KeyValueCache | None = None,
        keys_B: torch.Tensor | None = None,
    ) -> torch.Tensor:
        heads = (*x_BSD.shape[:-1], -1, self.head_dim)
        q_BSHK = self.q_norm(self.q_proj(x_BSD).view(heads))
        k_BSGK = self.k_norm(self.k_proj(x_BSD).view(heads))
        v_BGSK = self.v_proj(x_BSD).view(heads).transpose(1, 2)
        if self.q_factor != 1:
            q_BSHK = q_BSHK * self.q_factor
        if rope is not None:
            q_BSHK, k_BSGK = rotate(q_BSHK, rope), rotate(k_BSGK, rope)
        k_BGSK = k_BSGK.transpose(1, 2)
        if cache is not None:
            k_BGSK, v_BGSK = cache.append(k_BGSK, v_BGSK)
        drop = partial(self.dropout, keys_B=keys_B) if self.drops and keys_B is not None else None
        out_BHSK = self.attend(q_BSHK.transpose(1, 2), k_BGSK, v_BGSK, mask=mask, drop=drop)
        projected_BSD: torch.Tensor = self.o_proj(out_BHSK.transpose(1, 2).flatten(2))
        return projected_BSD


class FeedForward(nn.Module):
    """SwiGLU: down(silu(gate(x)) * up(x))."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.gate_proj = build_linear(config, config.hidden_size, config.ffn_hidden_size)
        self.up_proj = build_linear(config, config.hidden_size, config.ffn_hidden_size)
        self.down_proj = build_linear(config, config.ffn_hidden_size, config.hidden_size)
        self.dropout = build_dropout(config.ffn_dropout, place=2)

    def forward(self, x_BSD: torch.Tensor, keys_B: torch.Tensor | None = None) -> torch.Tensor:
        inner_BSF = F.silu(self.gate_proj(x_BSD)) * self.up_proj(x_BSD)
        out_BSD: torch.Tensor = self.down_proj(self.dropout(inner_BSF, keys_B))
        return out_BSD


class Block(nn.Module):
    """One transformer layer. Alike for all layers, so compiled code is shared among them."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.attention_norm = build_norm(config, config.hidden_size)
        self.attention = Attention(config)
        self.ffn_norm = build_norm(config, config.hidden_size)
        feed_forward: type[nn.Module] = FeedForward
        if config.activation != "swiglu":
            from fms_fsdp.extras.gpt import PlainFeedForward

            feed_forward = PlainFeedForward
        self.feed_forward = feed_forward(config)
        self.is_parallel = (
            config.parallel_residual
        )  # then the feed-forward reads x, as attention does
        self.attention_dropout, self.ffn_dropout = (
            build_dropout(config.dropout, place, config.residual_multiplier) for place in (3, 4)
        )

    def forward(
        self,
        x_BSD: torch.Tensor,
        rope: torch.Tensor | None,
        mask: Any,
        cache: KeyValueCache | None = None,
        keys_B: torch.Tensor | None = None,
    ) -> torch.Tensor:
        attended_BSD = self.attention(self.attention_norm(x_BSD), rope, mask, cache, keys_B)
        sum_BSD = x_BSD + self.attention_dropout(attended_BSD, keys_B)
        fed_BSD = self.feed_forward(self.ffn_norm(x_BSD if self.is_parallel else sum_BSD), keys_B)
        out_BSD: torch.Tensor = sum_BSD + self.ffn_dropout(fed_BSD, keys_B)
        return out_BSD


class Embed(nn.Embedding):
    """Token embedding."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__(config.padded_vocab_size, config.hidden_size)
        self.dropout = build_dropout(config.dropout, place=0, factor=config.embedding_multiplier)
        self.look_up = F.embedding

    def forward(  # type: ignore[override]
        self,
        tokens_BS: torch.Tensor,
        positions: slice | torch.Tensor,
        keys_B: torch.Tensor | None = None,
    ) -> torch.Tensor:
        return self.dropout(self.look_up(tokens_BS, self.weight), keys_B)


class Head(nn.Linear):
    """Final norm and output projection, fused with the loss when labels are given.

    A tied head has no weight of its own and is handed the embedding's.
    """

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__(config.hidden_size, config.padded_vocab_size, bias=False)
        self.vocab_size, self.softcap, self.z_loss = (
            config.vocab_size,
            config.logit_softcap,
            config.z_loss,
        )
        self.divisor = config.logits_scaling
        self.norm = build_norm(config, config.hidden_size)
        self.loss, self.product = linear_cross_entropy, F.linear
        if config.tie_embeddings:
            self.register_parameter("weight", None)

    def forward(  # type: ignore[override]
        self,
        x_BSD: torch.Tensor,
        labels_BS: torch.Tensor | None,
        tied_weight_VD: torch.Tensor | None,
        loss_scale: torch.Tensor | None = None,
    ) -> torch.Tensor | Losses:
        weight_VD = self.weight if tied_weight_VD is None else tied_weight_VD
        if len(weight_VD) > self.vocab_size:  # the rows that fill up are in no product
            weight_VD = weight_VD[: self.vocab_size]
        x_BSD = self.norm(x_BSD)
        if self.divisor != 1:
            x_BSD = x_BSD / self.divisor
        if labels_BS is not None:
            how = partial(
                self.loss, z_loss=self.z_loss if self.training else 0.0, softcap=self.softcap
            )
            return how(x_BSD, weight_VD, labels_BS, scale=loss_scale)
        logits_BSV: torch.Tensor = self.product(x_BSD, weight_VD.to(x_BSD.dtype))
        return self.softcap * torch.tanh(logits_BSV / self.softcap) if self.softcap else logits_BSV


def in_turn(x_BSD: torch.Tensor, calls: Iterable[Call]) -> torch.Tensor:
    """x_BSD behind these blocks."""
    traced = (
        autograd_profiler._is_profiler_enabled
    )  # names of blocks in traces, at no cost without one
    for layer, block, arguments in calls:
        with record_function(f"block {layer}") if traced else contextlib.nullcontext():
            x_BSD = block(x_BSD, *arguments)
    return x_BSD


class Llama(nn.Module):
    """The model, or the part of the model that holds `layers`: the first has the embedding, the last the
    head.

    A layer is named by its global number, whichever part holds it.
    """

    rope: torch.Tensor

    def __init__(self, config: LlamaConfig, layers: range | None = None) -> None:
        super().__init__()
        layers = range(config.num_layers) if layers is None else layers
        self.config = config
        embed, block = Embed, Block
        if config.pos_emb in ("learned", "sinusoidal"):
            from fms_fsdp.extras.gpt import PositionEmbed

            embed = PositionEmbed
        if config.norm_place != "before":
            from fms_fsdp.extras.relatives import PostNormBlock

            block = PostNormBlock
        self.embed = embed(config) if layers.start == 0 else None
        self.blocks = nn.ModuleDict({str(layer): block(config) for layer in layers})
        self.head = Head(config) if layers.stop == config.num_layers else None
        self.distance_bias: Any = None
        if config.pos_emb == "relative":  # learned biases, a matter of the mask
            from fms_fsdp.extras.distance_bias import DistanceBias

            self.distance_bias = DistanceBias(config)
        self.mask = attention_mask if self.distance_bias is None else self.distance_bias.mask
        self.pass_blocks: Callable[[torch.Tensor, Sequence[Call]], torch.Tensor] = in_turn
        self.register_buffer(
            "rope", rope_table(config).to(torch.get_default_device()), persistent=False
        )

    def to_empty(self, *, device: torch.types.Device, recurse: bool = True) -> Llama:
        """Allocates the parameters on a device; the rotary table, which no checkpoint holds, keeps its
        values."""
        super().to_empty(device=device, recurse=recurse)
        self.rope.copy_(rope_table(self.config))
        return self

    def forward(
        self,
        tokens_BS: torch.Tensor,
        labels_BS: torch.Tensor | None = None,
        positions_BS: torch.Tensor | None = None,
        document_ids_BS: torch.Tensor | None = None,
        keys_B: torch.Tensor | None = None,
        caches: Sequence[KeyValueCache] | None = None,
        loss_scale: torch.Tensor | None = None,
    ) -> torch.Tensor | Losses:
        """logits_BSV, or with labels (summed loss, fp32; number of unmasked labels, int64) of this batch
        alone, and in training with a z-loss its sum; `linear_cross_entropy` says what `loss_scale` is.

        Positions default to 0..S-1, behind those of the `caches` (one for each layer), with which only the
        last position has logits (S = 1); with document ids attention stays within a document. Only with
        `keys_B` (row_keys) is there dropout. A part without embedding takes, and one without head
        gives, x_BSD.
        """
        start = caches[0].length if caches else 0
        # a part without embedding may take in another length
        length = tokens_BS.shape[1] if positions_BS is None else positions_BS.shape[-1]
        seen = slice(start, start + length)
        assert seen.stop <= self.config.max_seq_len, (seen.stop, self.config.max_seq_len)
        positions = seen if positions_BS is None else positions_BS
        rope = self.rope[positions] if self.config.pos_emb == "rope" else None
        windows, rotates, cached = self.config.windows, self.config.rotates, caches is not None
        num_keys = caches[0].max_len if caches and caches[0].place is not None else 0
        masks = {
            window: self.mask(
                self.config,
                window,
                document_ids_BS,
                seen,
                tokens_BS.device,
                cached=cached,
                num_keys=num_keys,
            )
            for window in set(windows)
        }
        x_BSD = tokens_BS if self.embed is None else self.embed(tokens_BS, positions, keys_B)
        if keys_B is not None:
            from fms_fsdp.extras.dropout import layer_keys
        calls: list[Call] = []
        for i, (layer, block) in enumerate(self.blocks.items()):
            cache = caches[i] if caches else None
            keys = None if keys_B is None else layer_keys(keys_B, int(layer))
            rotation = rope if rotates[int(layer)] else None
            calls.append((layer, block, (rotation, masks[windows[int(layer)]], cache, keys)))
        x_BSD = self.pass_blocks(x_BSD, calls)
        if self.head is None:
            return x_BSD
        if cached:
            x_BSD = x_BSD[:, -1:]
        tied = self.embed.weight if self.config.tie_embeddings and self.embed is not None else None
        output: torch.Tensor | Losses = self.head(x_BSD, labels_BS, tied, loss_scale)
        return output


def build_model(config: LlamaConfig, layers: range | None = None) -> Llama:
    """A Llama of this shape, or its part with these layers, or the model that the user's `--model_builder`
    makes of the shape.

    Raises:
        UserError: there is no such function.
    """
    if not config.model_builder:
        return Llama(config, layers)
    model: Llama = import_function(config.model_builder, "--model_builder")(config)
    return model
