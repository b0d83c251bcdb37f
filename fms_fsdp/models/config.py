"""The shape of a model: one dataclass, whose fields have the names of the flags."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from fms_fsdp.config.train_config import check_removed
from fms_fsdp.errors import UserError


@dataclass(frozen=True)
class RopeScaling:
    """RoPE scaling for contexts longer than the pretraining context.

    "linear" divides all frequencies by `factor`. "llama3" divides frequencies whose wavelength
    exceeds `original_max_len / low_freq_factor`, keeps those whose wavelength is below
    `original_max_len / high_freq_factor`, and interpolates in between.
    Source: Chen et al. 2023, https://arxiv.org/abs/2306.15595 (linear); Llama 3.1,
    https://github.com/meta-llama/llama-models.
    """

    factor: float
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_len: int = 8192
    kind: str = "llama3"


@dataclass(frozen=True)
class TransformerConfig:
    """The shape of a model. Each default is Llama's; docs/reference/models.md explains the options.

    `max_seq_len` is the longest sequence the model accepts. A `head_dim` of 0 becomes
    `hidden_size / num_attention_heads`.
    """

    num_layers: int
    hidden_size: int
    ffn_hidden_size: int
    num_attention_heads: int
    num_kv_heads: int
    vocab_size: int = 32000
    rope_theta: float = 10_000.0
    rope_scaling: RopeScaling | None = None
    norm_eps: float = 1e-5
    tie_embeddings: bool = False
    init_std: float = 0.02
    norm: str = "rmsnorm"
    pos_emb: str = "rope"
    attn_impl: str = "auto"
    max_seq_len: int = 4096
    head_dim: int = 0
    activation: str = "swiglu"
    bias: bool = False
    rope_pct: float = 1.0
    qk_norm: bool = False
    parallel_residual: bool = False
    attn_window: int = 0
    attn_window_pattern: str = "L"
    z_loss: float = 0.0
    residual_scaled_init: bool = True
    vocab_multiple_of: int = 1
    dropout: float = 0.0
    attn_dropout: float = 0.0
    ffn_dropout: float = 0.0
    model_builder: str = ""
    qkv_bias: bool = False
    relative_buckets: int = 32
    relative_max_distance: int = 128

    def __post_init__(self) -> None:
        if not self.head_dim:
            object.__setattr__(self, "head_dim", self.hidden_size // self.num_attention_heads)

    @property
    def is_llama(self) -> bool:
        """Whether models/llama.py implements this shape; models/gpt.py implements the others."""
        if self.parallel_residual or self.dropout or self.ffn_dropout:
            return False
        options = (self.norm, self.activation, self.pos_emb, self.rope_pct)
        return options == ("rmsnorm", "swiglu", "rope", 1.0)

    @property
    def has_dropout(self) -> bool:
        return bool(self.dropout or self.attn_dropout or self.ffn_dropout)

    @property
    def padded_vocab_size(self) -> int:
        """Rows of the embedding and of the head; rows beyond `vocab_size` are never used."""
        num_multiples = -(-self.vocab_size // self.vocab_multiple_of)  # rounded up
        return num_multiples * self.vocab_multiple_of

    @property
    def rotary_dim(self) -> int:
        """Rotated dimensions of each head."""
        if self.pos_emb != "rope":
            return 0
        return int(self.head_dim * self.rope_pct)

    @property
    def windows(self) -> tuple[int, ...]:
        """The attention window of each layer in tokens; 0 is full attention.

        Example: the pattern "LLG" and a window of 512 give 512, 512, 0, 512, 512, 0, …
        """
        kinds = itertools.islice(itertools.cycle(self.attn_window_pattern), self.num_layers)
        return tuple(self.attn_window if kind == "L" else 0 for kind in kinds)


def count_params(config: TransformerConfig) -> dict[str, tuple[int, int]]:
    """Counts the parameters of the units that FSDP gathers: the embedding, one block and the head.

    The second number of each is the parameters in matrices of matmuls. A tied head has only its
    norm.
    """
    if config.model_builder:
        return _count_built(config)
    hidden = config.hidden_size
    heads = config.num_attention_heads
    q_size = heads * config.head_dim
    kv_size = config.num_kv_heads * config.head_dim
    num_inner = 2 if config.activation == "swiglu" else 1  # matmuls into the feed-forward layer

    def norm(size: int) -> int:
        return {"rmsnorm": size, "layernorm": 2 * size, "scalenorm": 1}[config.norm]

    matrices = 2 * hidden * (q_size + kv_size)  # q and o, k and v
    matrices += (num_inner + 1) * hidden * config.ffn_hidden_size
    vectors = 2 * norm(hidden)
    if config.bias:
        vectors += num_inner * config.ffn_hidden_size + 2 * hidden
    if config.bias or config.qkv_bias:
        vectors += q_size + 2 * kv_size
    if config.qk_norm:
        vectors += 2 * norm(config.head_dim)
    position_table = 0
    if config.pos_emb == "learned":
        position_table = config.max_seq_len * hidden
    elif config.pos_emb == "relative":
        position_table = config.relative_buckets * heads
    embed = config.padded_vocab_size * hidden
    head = 0 if config.tie_embeddings else embed
    return {
        "embed": (embed + position_table, 0),
        "block": (matrices + vectors, matrices),
        "head": (head + norm(hidden), head),
    }


def _count_built(config: TransformerConfig) -> dict[str, tuple[int, int]]:
    """Counts the parameters of a user's model, which it builds without memory."""
    import torch

    from fms_fsdp.models.build import build_model

    with torch.device("meta"):
        model = build_model(config)
    counts = {}
    for name, unit in (("embed", model.embed), ("block", model.blocks["0"]), ("head", model.head)):
        total = 0
        in_matrices = 0
        for parameter in [] if unit is None else unit.parameters():
            total += parameter.numel()
            if parameter.ndim == 2 and name != "embed":  # the lookup is no matmul
                in_matrices += parameter.numel()
        counts[name] = (total, in_matrices)
    return counts


def model_from_dict(content: Mapping[str, Any]) -> TransformerConfig:
    """Restores a shape from config.json or from a checkpoint, where `asdict` wrote it.

    Raises:
        UserError: the model uses an option that this version does not have.
    """
    known = {field.name for field in fields(TransformerConfig)}
    for name in content.keys() - known:
        if not check_removed(name, content[name]):
            raise UserError(
                f"the model has the option {name}={content[name]}, which this version does not "
                "know; update the program"
            )
    values = {name: content[name] for name in content.keys() & known}
    if values.get("rope_scaling"):
        values["rope_scaling"] = RopeScaling(**values["rope_scaling"])
    return TransformerConfig(**values)
