"""The Llama variants as one table, and the shape of one run's model: variant + overrides → `LlamaConfig`.

    VARIANTS["7b"] ─ ModelConfig overrides ─ data's vocabulary ─ seq_length ─▶ resolve_model ─▶ LlamaConfig

A `LlamaConfig` that came out of `resolve_model` is consistent: heads divide the width, key/value heads divide
the query heads.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Any

from fms_fsdp.config import ModelConfig
from fms_fsdp.config.batch import divisors


@dataclass(frozen=True)
class RopeScaling:
    """Stretch of the rotary frequencies for contexts longer than the pretraining one.

    Frequencies whose wavelength exceeds `original_max_len / low_freq_factor` are divided by `factor`, those
    below `original_max_len / high_freq_factor` are kept, and those between are blended.
    Source: Llama 3.1, https://github.com/meta-llama/llama-models.
    """

    factor: float
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_len: int = 8192


@dataclass(frozen=True)
class LlamaConfig:
    """The shape of a Llama. `max_seq_len` is the longest row the model will see: the length of its position
    tables."""

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

    @property
    def head_dim(self) -> int:
        return self.hidden_size // self.num_attention_heads


def _llama3(layers: int, hidden: int, ffn: int, heads: int, *, tied_and_scaled: bool = False) -> LlamaConfig:
    scaling = RopeScaling(factor=32.0) if tied_and_scaled else None
    return LlamaConfig(
        layers,
        hidden,
        ffn,
        heads,
        8,
        128256,
        rope_theta=5e5,
        rope_scaling=scaling,
        tie_embeddings=tied_and_scaled,
    )


VARIANTS: dict[str, LlamaConfig] = {
    # layers, hidden, ffn, heads, kv heads; vocabulary 32000 and theta 1e4 unless given
    "7b": LlamaConfig(32, 4096, 11008, 32, 32),
    "13b": LlamaConfig(40, 5120, 13824, 40, 40),
    "34b": LlamaConfig(48, 8192, 22016, 64, 8, rope_theta=1e6),
    "70b": LlamaConfig(80, 8192, 28672, 64, 8),
    "llama3_8b": _llama3(32, 4096, 14336, 32),
    "llama3_70b": _llama3(80, 8192, 28672, 64),
    "llama3_1.8b": _llama3(24, 2048, 7168, 16),
    "llama3_3.2b": _llama3(24, 3072, 8192, 24),
    "llama3_194m": LlamaConfig(10, 1024, 2816, 8, 8, 128256, rope_theta=5e5),
    "llama3.2_1b": _llama3(16, 2048, 8192, 32, tied_and_scaled=True),
    "llama3.2_3b": _llama3(28, 3072, 8192, 24, tied_and_scaled=True),
    "1.4b": LlamaConfig(24, 2048, 6144, 16, 4),
    "194m": LlamaConfig(10, 1024, 2816, 8, 8),
    "quickstart": LlamaConfig(6, 256, 704, 4, 4, 8192, tie_embeddings=True, init_std=0.05),
    "tiny": LlamaConfig(2, 128, 352, 4, 2, 512),
}

ALIASES: dict[str, str] = {f"llama2_{name}": name for name in ("7b", "13b", "34b", "70b", "1.4b", "194m")}
# fms-fsdp's names with the length of a row, which is --seq_length here
ALIASES |= {f"{name}_4k": name for name in VARIANTS if name.startswith("llama3_")}


def model_from_dict(content: Mapping[str, Any]) -> LlamaConfig:
    """The model that `dataclasses.asdict` described in a checkpoint or config.json; other entries are passed
    over."""
    known = {spec.name: content[spec.name] for spec in fields(LlamaConfig) if spec.name in content}
    scaling = known.get("rope_scaling")
    return LlamaConfig(**known | {"rope_scaling": RopeScaling(**scaling) if scaling else None})


def register_variant(name: str, config: LlamaConfig) -> None:
    """Adds a variant, so that `--model_variant=name` finds it.

    Raises:
        ValueError: the name is taken.
    """
    if name in VARIANTS or name in ALIASES:
        raise ValueError(f"model variant ({name}) is already defined; choose another name")
    VARIANTS[name] = config


def canonical_variant(name: str) -> str:
    """The table's name of a variant, aliases and case resolved.

    Raises:
        ValueError: no such variant; names the nearest and lists all.
    """
    lowered = name.lower()
    found = ALIASES.get(lowered, lowered)
    if found in VARIANTS:
        return found
    if lowered.startswith("mamba"):
        raise ValueError(f"--model_variant ({name}) is no Llama; this project trains Llamas: --list_variants")
    near = difflib.get_close_matches(lowered, [*VARIANTS, *ALIASES], n=1, cutoff=0.5)
    hint = f"did you mean {near[0]}? " if near else ""
    raise ValueError(f"--model_variant ({name}) is not known; {hint}choose one of: {', '.join(VARIANTS)}")


def resolve_model(
    section: ModelConfig, *, seq_length: int, data_vocab_size: int | None = None
) -> LlamaConfig:
    """The model of a run: the variant, its overrides, the data's vocabulary where none is given, `seq_length`
    positions.

    Raises:
        ValueError: unknown variant, a shape that does not divide, or a vocabulary smaller than the data's.
    """
    variant = VARIANTS[canonical_variant(section.model_variant)]
    if (
        section.vocab_size is not None
        and data_vocab_size is not None
        and section.vocab_size < data_vocab_size
    ):
        raise ValueError(
            f"--vocab_size ({section.vocab_size}) must not be below the data's vocabulary "
            f"({data_vocab_size}); leave it out or raise it to {data_vocab_size}"
        )
    names = "num_layers hidden_size ffn_hidden_size num_attention_heads num_kv_heads"
    names += " rope_theta norm_eps tie_embeddings init_std"
    given = {name: value for name in names.split() if (value := getattr(section, name)) is not None}
    if "num_attention_heads" in given and variant.num_kv_heads == variant.num_attention_heads:
        # a multi-head variant stays multi-head
        given.setdefault("num_kv_heads", given["num_attention_heads"])
    config = replace(
        variant,
        **given,
        vocab_size=section.vocab_size or data_vocab_size or variant.vocab_size,
        norm=section.norm,
        pos_emb=section.pos_emb,
        attn_impl=section.attn_impl,
        max_seq_len=seq_length,
    )
    _check_shape(config)
    return config


def _check_shape(config: LlamaConfig) -> None:
    hidden, heads, kv_heads = config.hidden_size, config.num_attention_heads, config.num_kv_heads
    if hidden % heads:
        valid = ", ".join(map(str, divisors(hidden, 1024)))
        raise ValueError(
            f"--num_attention_heads ({heads}) must divide hidden_size ({hidden}); valid: {valid}"
        )
    if heads % kv_heads:
        valid = ", ".join(map(str, divisors(heads, 1024)))
        raise ValueError(
            f"--num_kv_heads ({kv_heads}) must divide num_attention_heads ({heads}); valid: {valid}"
        )
    if config.pos_emb == "rope" and config.head_dim % 2:
        raise ValueError(
            f"--num_attention_heads ({heads}) must leave an even head size of hidden_size ({hidden}) for "
            "rotary embeddings, "
            f"not {config.head_dim} = {hidden} / {heads}; change it or use --pos_emb=learned"
        )
