"""The variants as one table, and the shape of the model of a run: variant + overrides → `LlamaConfig`.

    VARIANTS["7b"] ─ ModelConfig overrides ─ data's vocabulary ─ seq_length ─▶ resolve_model ─▶ LlamaConfig

A `LlamaConfig` that came out of `resolve_model` is consistent: heads divide the width, key/value heads divide
the query heads. Its fields have the names of the flags.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

from fms_fsdp.config import ModelConfig
from fms_fsdp.config.batch import divisors
from fms_fsdp.config.values import joined, must_be_one_of
from fms_fsdp.errors import UserError


@dataclass(frozen=True)
class RopeScaling:
    """Stretch of the rotary frequencies for contexts longer than the pretraining one.

    "linear" divides all frequencies by `factor`. "llama3" divides those whose wavelength exceeds
    `original_max_len / low_freq_factor`, keeps those below `original_max_len / high_freq_factor`, and blends
    those between.
    Source: Chen et al. 2023, https://arxiv.org/abs/2306.15595 (linear); Llama 3.1,
    https://github.com/meta-llama/llama-models.
    """

    factor: float
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_len: int = 8192
    kind: str = "llama3"


@dataclass(frozen=True)
class LlamaConfig:
    """The shape of a model; the default of each option is Llama's. docs/models.md explains the options.

    `max_seq_len` is the longest row the model will see: the length of its position tables. A `head_dim` of 0
    becomes hidden_size / num_attention_heads.
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
    logit_softcap: float = 0.0
    z_loss: float = 0.0
    residual_scaled_init: bool = True
    vocab_multiple_of: int = 1
    dropout: float = 0.0
    attn_dropout: float = 0.0
    ffn_dropout: float = 0.0
    model_builder: str = ""
    qkv_bias: bool = False
    qk_norm_wide: bool = False
    norm_place: str = "before"
    rope_pattern: str = "R"
    embedding_multiplier: float = 1.0
    attention_multiplier: float = 0.0
    residual_multiplier: float = 1.0
    logits_scaling: float = 1.0
    relative_buckets: int = 32
    relative_max_distance: int = 128

    def __post_init__(self) -> None:
        if not self.head_dim:
            object.__setattr__(self, "head_dim", self.hidden_size // self.num_attention_heads)

    @property
    def padded_vocab_size(self) -> int:
        """Rows of the embedding and of the head; rows beyond the vocabulary are never used."""
        return -(-self.vocab_size // self.vocab_multiple_of) * self.vocab_multiple_of

    @property
    def rotary_dim(self) -> int:
        """How many dims of each head are rotated."""
        return int(self.head_dim * self.rope_pct) if self.pos_emb == "rope" else 0

    @property
    def windows(self) -> tuple[int, ...]:
        """The window of attention of each layer; 0 is the whole row."""
        kinds = itertools.islice(itertools.cycle(self.attn_window_pattern), self.num_layers)
        return tuple(self.attn_window if kind == "L" else 0 for kind in kinds)

    @property
    def rotates(self) -> tuple[bool, ...]:
        """Whether each layer rotates queries and keys, where the positions are rotary."""
        kinds = itertools.islice(itertools.cycle(self.rope_pattern), self.num_layers)
        return tuple(kind == "R" for kind in kinds)

    @property
    def has_dropout(self) -> bool:
        return bool(self.dropout or self.attn_dropout or self.ffn_dropout)


def _llama3(
    layers: int, hidden: int, ffn: int, heads: int, factor: float = 0, **more: Any
) -> LlamaConfig:
    scaling = RopeScaling(factor) if factor else None
    return LlamaConfig(
        layers, hidden, ffn, heads, 8, 128256, rope_theta=5e5, rope_scaling=scaling, **more
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
    "llama3.1_8b": _llama3(32, 4096, 14336, 32, 8.0),
    "llama3.1_70b": _llama3(80, 8192, 28672, 64, 8.0),
    "llama3.1_405b": _llama3(126, 16384, 53248, 128, 8.0),
    "llama3.2_1b": _llama3(16, 2048, 8192, 32, 32.0, tie_embeddings=True),
    "llama3.2_3b": _llama3(28, 3072, 8192, 24, 32.0, tie_embeddings=True),
    "1.4b": LlamaConfig(24, 2048, 6144, 16, 4),
    "194m": LlamaConfig(10, 1024, 2816, 8, 8),
    "quickstart": LlamaConfig(6, 256, 704, 4, 4, 8192, tie_embeddings=True, init_std=0.05),
    "tiny": LlamaConfig(2, 128, 352, 4, 2, 512),
}

ALIASES: dict[str, str] = {
    f"llama2_{name}": name for name in ("7b", "13b", "34b", "70b", "1.4b", "194m")
}
# fms-fsdp's names with the length of a row, which is --seq_length here
ALIASES |= {f"{name}_4k": name for name in VARIANTS if name.startswith("llama3_")}


def all_variants() -> dict[str, LlamaConfig]:
    """Every variant by its name: the Llamas of `VARIANTS`, then GPT and its relatives."""
    from fms_fsdp.extras import gpt_variants, relatives_variants

    return VARIANTS | relatives_variants.VARIANTS | gpt_variants.VARIANTS


def model_from_dict(content: Mapping[str, Any]) -> LlamaConfig:
    """The model that `dataclasses.asdict` described in a checkpoint or config.json; other entries are passed
    over."""
    known = {spec.name: content[spec.name] for spec in fields(LlamaConfig) if spec.name in content}
    scaling = known.get("rope_scaling")
    return LlamaConfig(**known | {"rope_scaling": RopeScaling(**scaling) if scaling else None})


def register_variant(name: str, config: LlamaConfig) -> None:
    """Adds a variant, so that `--model_variant=name` finds it.

    Raises:
        UserError: the name is taken.
    """
    if name in all_variants() or name in ALIASES:
        raise UserError(f"model variant ({name}) is already defined; choose another name")
    VARIANTS[name] = config


def canonical_variant(name: str) -> str:
    """The table's name of a variant, aliases and case resolved.

    Raises:
        UserError: no such variant; the error lists all and names the nearest one.
    """
    lowered = name.lower()
    found = ALIASES.get(lowered, lowered)
    if found in VARIANTS or found in (known := all_variants()):
        return found
    if lowered.startswith("mamba"):
        raise UserError(
            f"--model_variant ({name}) is no Llama; this project trains Llamas: --list_variants"
        )
    raise UserError(f"--model_variant ({name}) {must_be_one_of(list(known), lowered, cutoff=0.5)}")


_POSITION_FLAGS = {  # --pos_emb = the flags that have an effect only with it
    "rope": ("rope_theta", "rope_scaling", "rope_pct", "rope_pattern"),
    "relative": ("relative_buckets", "relative_max_distance"),
}


def _check_sizes(
    model: LlamaConfig, seq_length: int, data_vocab_size: int | None, *, derives_heads: bool
) -> None:
    """Raises UserError if sizes of the model do not fit each other, or the data.

    `derives_heads`: the size of a head is hidden_size / num_attention_heads.
    """
    hidden, heads, head_dim = model.hidden_size, model.num_attention_heads, model.head_dim
    if model.vocab_size < (data_vocab_size or 0):
        raise UserError(
            f"--vocab_size={model.vocab_size} must be at least the data's vocabulary "
            f"({data_vocab_size}); remove it, or set --vocab_size={data_vocab_size}"
        )
    if model.max_seq_len < seq_length:
        raise UserError(
            f"--max_seq_len={model.max_seq_len} must be at least --seq_length={seq_length}; "
            f"set --max_seq_len={seq_length}, or remove it"
        )
    if derives_heads and hidden % heads:
        raise UserError(
            f"--num_attention_heads={heads} must divide hidden_size={hidden}; use one of "
            f"{_listed(hidden)}, or set --head_dim"
        )
    if heads % model.num_kv_heads:
        raise UserError(
            f"--num_kv_heads={model.num_kv_heads} must divide num_attention_heads={heads}; use one "
            f"of {_listed(heads)}"
        )
    if model.pos_emb == "rope" and (model.rotary_dim <= 0 or model.rotary_dim % 2):
        raise UserError(
            f"--num_attention_heads={heads} must leave an even number of rotary dims per head of "
            f"hidden_size={hidden}, not {model.rotary_dim} = {model.rope_pct:g} x {head_dim}; "
            "change it, --head_dim or --rope_pct, or set --pos_emb=learned"
        )
    if model.pos_emb == "sinusoidal" and hidden % 2:
        raise UserError(
            f"--hidden_size={hidden} must be even for --pos_emb=sinusoidal; "
            f"set --hidden_size={hidden + 1}"
        )


def _check_options(model: LlamaConfig, section: ModelConfig) -> None:
    """Raises UserError if options of the model exclude each other."""
    pattern = model.attn_window_pattern
    if not pattern or pattern.strip("LG"):
        raise UserError(
            f"--attn_window_pattern={pattern} must consist of the letters L and G; use e.g. LLG"
        )
    if model.attn_dropout and model.attn_impl not in ("auto", "math"):
        raise UserError(
            f"--attn_impl={model.attn_impl} is not supported with "
            f"--attn_dropout={model.attn_dropout:g}: its dropout depends on the number of devices; "
            "set --attn_impl=auto, or --attn_dropout=0"
        )
    if not model.rope_pattern or model.rope_pattern.strip("RN"):
        raise UserError(
            f"--rope_pattern={model.rope_pattern} must consist of the letters R and N; "
            "use e.g. RRRN"
        )
    if model.norm_place != "before" and model.norm != "rmsnorm":
        raise UserError(
            f"--norm_place={model.norm_place} is not supported with --norm={model.norm}; "
            "set --norm=rmsnorm, or --norm_place=before"
        )
    if model.qk_norm_wide and not (model.qk_norm and model.norm == "rmsnorm"):
        raise UserError(
            f"--qk_norm_wide=True requires --qk_norm and --norm=rmsnorm, but "
            f"--qk_norm={model.qk_norm} and --norm={model.norm}; "
            "set --qk_norm=True --norm=rmsnorm, or --qk_norm_wide=False"
        )
    if model.embedding_multiplier != 1 and model.pos_emb in ("learned", "sinusoidal"):
        raise UserError(
            f"--embedding_multiplier={model.embedding_multiplier:g} is not supported with "
            f"--pos_emb={model.pos_emb}: positions would be multiplied too; set --pos_emb=rope, "
            "or --embedding_multiplier=1"
        )
    for kind, names in _POSITION_FLAGS.items():
        for name in names if model.pos_emb != kind else ():
            if (value := getattr(section, name)) is not None:
                raise UserError(
                    f"--{name}={joined(value)} has no effect without --pos_emb={kind}; "
                    f"remove it, or set --pos_emb={kind}"
                )
    distance, buckets = model.relative_max_distance, model.relative_buckets
    if distance <= buckets // 2:
        raise UserError(
            f"--relative_max_distance={distance} must be above half of "
            f"--relative_buckets={buckets}; set --relative_max_distance={2 * buckets}"
        )
    if model.pos_emb == "relative" and model.attn_impl in ("flash", "cudnn"):
        raise UserError(
            f"--attn_impl={model.attn_impl} is not supported with --pos_emb=relative: it has no "
            "gradient for the bias; use --attn_impl=auto, efficient or math"
        )


def _listed(number: int) -> str:
    """Returns the divisors of a number up to 1024, as messages list them."""
    return ", ".join(map(str, divisors(number, 1024)))


def resolve_model(
    section: ModelConfig, *, seq_length: int, data_vocab_size: int | None = None
) -> LlamaConfig:
    """The model of a run: the variant or what a config.json says, its overrides, the data's vocabulary where
    none is given, `seq_length` positions.

    Raises:
        UserError: unknown variant, a shape that does not divide, a vocabulary smaller than the data's, or
            another shape than that of the weights to begin with.
    """
    variant, is_theirs = _base_shape(section), bool(section.init_from_hf or section.hf_config)
    derived = {"vocab_size", "max_seq_len", "rope_scaling"}
    names = {spec.name for spec in fields(LlamaConfig)} - derived
    given = {name: value for name in names if (value := getattr(section, name)) is not None}
    if not is_theirs or given.keys() & {"hidden_size", "num_attention_heads"}:
        given.setdefault("head_dim", 0)
    if "num_attention_heads" in given and variant.num_kv_heads == variant.num_attention_heads:
        # a multi-head variant stays multi-head
        given.setdefault("num_kv_heads", given["num_attention_heads"])
    if (hidden := given.get("hidden_size", variant.hidden_size)) != variant.hidden_size:
        share = variant.ffn_hidden_size / variant.hidden_size
        given.setdefault("ffn_hidden_size", max(1, round(share * hidden / 128)) * 128)
    if section.rope_scaling is not None:
        from fms_fsdp.extras.rope_scaling import parse_scaling

        given["rope_scaling"] = parse_scaling(section.rope_scaling)
    least = variant.vocab_size if section.init_from_hf else 0
    config = replace(
        variant,
        **given,
        vocab_size=section.vocab_size or max(data_vocab_size or variant.vocab_size, least),
        max_seq_len=section.max_seq_len or max(seq_length, variant.max_seq_len if is_theirs else 0),
    )
    if section.init_from_hf:
        from fms_fsdp.extras.from_hf import check_same

        check_same(config, variant, section)
    derives_heads = given.get("head_dim") == 0
    _check_sizes(config, seq_length, data_vocab_size, derives_heads=derives_heads)
    _check_options(config, section)
    return config


def _base_shape(section: ModelConfig) -> LlamaConfig:
    """The shape whose values flags replace."""
    flag = "init_from_hf" if section.init_from_hf else "hf_config"
    path = Path(getattr(section, flag))
    if not getattr(section, flag):
        name = canonical_variant(section.model_variant)
        return VARIANTS.get(name) or all_variants()[name]
    from fms_fsdp.extras.from_hf import read_shape

    try:
        return read_shape(path if path.is_file() else path / "config.json")
    except UserError as error:
        raise UserError(f"--{flag} ({path}) cannot be taken: {error}") from None
