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

    def __str__(self) -> str:
        """Returns the value of --rope_scaling."""
        if self.kind == "linear":
            return f"linear:{self.factor:g}"
        low_and_high = f"{self.low_freq_factor:g}:{self.high_freq_factor:g}"
        return f"{self.kind}:{self.factor:g}:{low_and_high}:{self.original_max_len}"


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
        """Whether a step may draw masks. A user's own model may have dropout that no flag sets."""
        return bool(self.dropout or self.attn_dropout or self.ffn_dropout or self.model_builder)

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
