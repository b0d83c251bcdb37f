"""Llama: a decoder-only transformer.

    tokens (B S) → embed → num_layers x Block → head → logits (B S V), or the loss
    Block: x + attention(norm(x)), then x + feed_forward(norm(x))

With options of its shape it is also Mistral (attention window), Qwen2 (bias of q, k and v) and
Qwen3 (norm of q and k). models/gpt.py has the older shapes.

Shape suffixes: B batch, S sequence, D hidden size, F ffn, V vocabulary, H query heads,
G key/value heads, K head size, R rotated dimensions of a head.

Source: Touvron et al. 2023 (Llama 2); Su et al. 2021 (RoPE); Ainslie et al. 2023 (grouped queries);
Shazeer 2020 (SwiGLU); Zhang and Sennrich 2019 (RMSNorm).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.profiler import record_function

from fms_fsdp.models.attention import KVCache, attention, attention_mask
from fms_fsdp.models.config import TransformerConfig
from fms_fsdp.models.loss import Losses, linear_cross_entropy
from fms_fsdp.models.token_sums import look_up

Positions = slice | torch.Tensor  # a slice, or (B S)
Call = tuple[str, nn.Module, tuple[Any, ...]]  # layer, block, its arguments after x


def rope_table(config: TransformerConfig) -> torch.Tensor:
    """Returns the cosine and sine of each position's angles: fp32, (max_seq_len 2 R/2).

    The table is computed on the CPU, so that it is identical on every device.
    """
    dim = config.rotary_dim
    even = torch.arange(0, dim, 2, dtype=torch.float32, device="cpu")
    freqs = 1.0 / config.rope_theta ** (even / dim)
    scaling = config.rope_scaling
    if scaling is not None:
        keep = torch.zeros_like(freqs)  # 1 keeps a frequency, 0 divides it by the factor
        if scaling.kind == "llama3":
            turns = scaling.original_max_len * freqs / (2 * torch.pi)  # within the original context
            low = scaling.low_freq_factor
            high = scaling.high_freq_factor
            keep = ((turns - low) / (high - low)).clamp(0, 1)
        freqs = keep * freqs + (1 - keep) * freqs / scaling.factor
    angles = torch.outer(torch.arange(config.max_seq_len, dtype=torch.float32, device="cpu"), freqs)
    return torch.stack((angles.cos(), angles.sin()), dim=1)


def apply_rope(x_BSHK: torch.Tensor, rope: torch.Tensor) -> torch.Tensor:
    """Rotates the pairs (i, i + K/2) of each head by their position's angle, in fp32.

    `rope` has the rows of `rope_table` for these positions: (S 2 K/2) or (B S 2 K/2).
    """
    cos, sin = rope.unsqueeze(-2).unbind(-3)
    a, b = x_BSHK.chunk(2, dim=-1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1).to(x_BSHK.dtype)


class Attention(nn.Module):
    """Causal self-attention; each key/value head serves H / G query heads."""

    rotate = staticmethod(apply_rope)

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__()
        self.head_dim = config.head_dim
        self.dropout = config.attn_dropout
        hidden = config.hidden_size
        q_size = config.num_attention_heads * config.head_dim
        kv_size = config.num_kv_heads * config.head_dim
        qkv_bias = config.bias or config.qkv_bias
        self.q_proj = nn.Linear(hidden, q_size, bias=qkv_bias)
        self.k_proj = nn.Linear(hidden, kv_size, bias=qkv_bias)
        self.v_proj = nn.Linear(hidden, kv_size, bias=qkv_bias)
        self.o_proj = nn.Linear(q_size, hidden, bias=config.bias)
        self.q_norm: nn.Module = nn.Identity()
        self.k_norm: nn.Module = nn.Identity()
        if config.qk_norm:
            self.q_norm = nn.RMSNorm(config.head_dim, eps=config.norm_eps)
            self.k_norm = nn.RMSNorm(config.head_dim, eps=config.norm_eps)
        self.attend = partial(attention, backend=config.attn_impl)

    def forward(
        self, x_BSD: torch.Tensor, rope: torch.Tensor, mask: Any, cache: KVCache | None = None
    ) -> torch.Tensor:
        q_BSHK = self.q_proj(x_BSD).unflatten(-1, (-1, self.head_dim))
        k_BSGK = self.k_proj(x_BSD).unflatten(-1, (-1, self.head_dim))
        v_BSGK = self.v_proj(x_BSD).unflatten(-1, (-1, self.head_dim))
        q_BHSK = self.rotate(self.q_norm(q_BSHK), rope).transpose(1, 2)
        k_BGTK = self.rotate(self.k_norm(k_BSGK), rope).transpose(1, 2)
        v_BGTK = v_BSGK.transpose(1, 2)
        if cache is not None:
            k_BGTK, v_BGTK = cache.append(k_BGTK, v_BGTK)
        dropout = self.dropout if self.training else 0.0
        out_BHSK = self.attend(q_BHSK, k_BGTK, v_BGTK, mask, dropout=dropout)
        return self.o_proj(out_BHSK.transpose(1, 2).flatten(2))


class FeedForward(nn.Module):
    """SwiGLU: down(silu(gate(x)) * up(x))."""

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(config.hidden_size, config.ffn_hidden_size, bias=config.bias)
        self.up_proj = nn.Linear(config.hidden_size, config.ffn_hidden_size, bias=config.bias)
        self.down_proj = nn.Linear(config.ffn_hidden_size, config.hidden_size, bias=config.bias)

    def forward(self, x_BSD: torch.Tensor) -> torch.Tensor:
        return self.down_proj(F.silu(self.gate_proj(x_BSD)) * self.up_proj(x_BSD))


class Block(nn.Module):
    """One transformer layer. Blocks are identical, so compiled blocks share their code."""

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__()
        self.attention_norm = nn.RMSNorm(config.hidden_size, eps=config.norm_eps)
        self.attention = Attention(config)
        self.ffn_norm = nn.RMSNorm(config.hidden_size, eps=config.norm_eps)
        self.feed_forward = FeedForward(config)

    def forward(
        self, x_BSD: torch.Tensor, rope: torch.Tensor, mask: Any, cache: KVCache | None = None
    ) -> torch.Tensor:
        x_BSD = x_BSD + self.attention(self.attention_norm(x_BSD), rope, mask, cache)
        return x_BSD + self.feed_forward(self.ffn_norm(x_BSD))


class Embedding(nn.Embedding):
    """Token embedding. It ignores the positions, which subclasses with absolute positions need."""

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__(config.padded_vocab_size, config.hidden_size)

    def look_up(self, tokens_BS: torch.Tensor) -> torch.Tensor:
        return look_up(tokens_BS, self.weight)

    def forward(  # type: ignore[override]
        self, tokens_BS: torch.Tensor, positions: Positions
    ) -> torch.Tensor:
        return self.look_up(tokens_BS)


class Head(nn.Linear):
    """Final norm and output projection, fused with the loss when labels are given.

    A head with tied weights has no weight and receives the weight of the embedding.
    """

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__(config.hidden_size, config.padded_vocab_size, bias=False)
        self.vocab_size = config.vocab_size
        self.z_loss = config.z_loss
        self.norm = nn.RMSNorm(config.hidden_size, eps=config.norm_eps)
        self.project = F.linear
        self.loss = linear_cross_entropy
        self.compiles_loss = False  # whether the softmax is one compiled kernel
        if config.tie_embeddings:
            self.register_parameter("weight", None)

    def forward(  # type: ignore[override]
        self,
        x_BSD: torch.Tensor,
        labels_BS: torch.Tensor | None = None,
        tied_weight_VD: torch.Tensor | None = None,
        loss_scale: torch.Tensor | None = None,
    ) -> torch.Tensor | Losses:
        weight_VD = self.weight if tied_weight_VD is None else tied_weight_VD
        weight_VD = weight_VD[: self.vocab_size]
        x_BSD = self.norm(x_BSD)
        if labels_BS is None:
            return self.project(x_BSD, weight_VD.to(x_BSD.dtype))
        z_loss = self.z_loss if self.training else 0.0
        return self.loss(
            x_BSD,
            weight_VD,
            labels_BS,
            z_loss=z_loss,
            scale=loss_scale,
            compiled=self.compiles_loss,
        )


def run_blocks(x_BSD: torch.Tensor, calls: Iterable[Call]) -> torch.Tensor:
    """Calls the blocks one after the other."""
    for layer, block, args in calls:
        with record_function(f"block {layer}"):
            x_BSD = block(x_BSD, *args)
    return x_BSD


class LanguageModel(nn.Module):
    """The model of a rank: a `Llama`, or the `Pipeline` of the stages that the rank has of one.

    Its parameters have their names of the full model.
    """

    config: TransformerConfig
    embed: Embedding | None  # with the first layer
    blocks: nn.ModuleDict  # by layer of the full model
    head: Head | None  # with the last layer

    def forward_backward(
        self,
        tokens_BS: torch.Tensor,
        labels_BS: torch.Tensor,
        positions_BS: torch.Tensor | None = None,
        document_ids_BS: torch.Tensor | None = None,
        *,
        factor: torch.Tensor,
        loss_scale: torch.Tensor | None = None,
        mark: Callable[[str], None] = lambda phase: None,
    ) -> Losses:
        """Adds the gradients of the loss times `factor` (collective).

        Returns the summed loss, and the sums of further losses if there are any; they are 0 on
        ranks without the head. `mark` is called with the name of each phase at its end.
        """
        raise NotImplementedError


class Llama(LanguageModel):
    """The model, or the pipeline stage with the given `layers`.

    The first stage has the embedding, the last stage has the head. A block is named by its layer in
    the full model, whichever stage has it.
    """

    embedding_type: type[Embedding] = Embedding
    block_type: type[nn.Module] = Block
    head_type: type[Head] = Head

    def __init__(self, config: TransformerConfig, layers: range | None = None) -> None:
        super().__init__()
        if layers is None:
            layers = range(config.num_layers)
        self.config = config
        self.embed = self.embedding_type(config) if layers.start == 0 else None
        self.blocks = nn.ModuleDict({str(layer): self.block_type(config) for layer in layers})
        self.head = self.head_type(config) if layers.stop == config.num_layers else None
        # Not a buffer: it must stay fp32 and keep its values when the model is cast or allocated.
        self.rope = rope_table(config)
        self.run_blocks = run_blocks  # activation checkpointing of segments replaces it

    def mask(
        self,
        window: int,
        document_ids_BS: torch.Tensor | None,
        queries: slice,
        x_BSD: torch.Tensor,
        *,
        cached: bool = False,
    ) -> Any:
        """Returns the attention mask of the layers with this window; see `attention_mask`."""
        dense = cached or self.config.attn_dropout > 0  # flex_attention has neither
        return attention_mask(window, document_ids_BS, queries, x_BSD.device, dense=dense)

    def forward(
        self,
        tokens_BS: torch.Tensor,
        labels_BS: torch.Tensor | None = None,
        positions_BS: torch.Tensor | None = None,
        document_ids_BS: torch.Tensor | None = None,
        caches: Sequence[KVCache] | None = None,
        loss_scale: torch.Tensor | None = None,
    ) -> torch.Tensor | Losses:
        """Returns logits (B S V), or with labels the `Losses` of `linear_cross_entropy`.

        Positions default to 0 … S-1. With `caches`, one per layer, they continue the cached
        positions, and only the last position gets logits (B 1 V). With document ids, attention
        stays within a document. A stage without embedding takes hidden states (B S D) in place of
        tokens; a stage without head returns them.
        """
        start = caches[0].length if caches else 0
        if positions_BS is None:
            length = tokens_BS.shape[1]
        else:  # under cp or tp, a later stage gets a shard of the sequence as x
            length = positions_BS.shape[-1]
        queries = slice(start, start + length)
        assert queries.stop <= self.config.max_seq_len, (queries.stop, self.config.max_seq_len)
        positions = queries if positions_BS is None else positions_BS
        x_BSD = tokens_BS if self.embed is None else self.embed(tokens_BS, positions)
        if self.rope.device != x_BSD.device:
            self.rope = self.rope.to(x_BSD.device)
        rope = self.rope[positions]
        cached = caches is not None
        windows = self.config.windows
        masks = {
            window: self.mask(window, document_ids_BS, queries, x_BSD, cached=cached)
            for window in set(windows)
        }
        calls: list[Call] = []
        for i, (layer, block) in enumerate(self.blocks.items()):
            cache = caches[i] if caches else None
            calls.append((layer, block, (rope, masks[windows[int(layer)]], cache)))
        x_BSD = self.run_blocks(x_BSD, calls)
        if self.head is None:
            return x_BSD
        if caches:
            x_BSD = x_BSD[:, -1:]
        tied = None
        if self.config.tie_embeddings and self.embed is not None:
            tied = self.embed.weight
        return self.head(x_BSD, labels_BS, tied, loss_scale)

    def forward_backward(
        self,
        tokens_BS: torch.Tensor,
        labels_BS: torch.Tensor,
        positions_BS: torch.Tensor | None = None,
        document_ids_BS: torch.Tensor | None = None,
        *,
        factor: torch.Tensor,
        loss_scale: torch.Tensor | None = None,
        mark: Callable[[str], None] = lambda phase: None,
    ) -> Losses:
        with record_function("forward"):
            loss, _, *others = self(
                tokens_BS, labels_BS, positions_BS, document_ids_BS, loss_scale=loss_scale
            )
        mark("forward")
        with record_function("backward"):
            (loss * factor).backward()
        mark("backward")
        return loss.detach(), *others
