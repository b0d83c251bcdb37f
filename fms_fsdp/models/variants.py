"""The table of variants, and the shape of a run: variant, flags, vocabulary of the data → config.

The names are the values of `--model_variant`; `--list_variants` prints sizes and memory. Sources:
the config.json of each published model, and for the GPTs the papers named below. Works without
torch.
"""

from __future__ import annotations

from dataclasses import fields, replace
from pathlib import Path
from typing import Any

from fms_fsdp.config import ModelConfig
from fms_fsdp.config.batch_plan import divisors
from fms_fsdp.config.values import did_you_mean, joined, parse_number
from fms_fsdp.errors import UserError
from fms_fsdp.models.config import RopeScaling, TransformerConfig


def _llama(
    layers: int,
    hidden: int,
    ffn: int,
    heads: int,
    kv_heads: int = 8,
    scaling: float = 0,
    **more: Any,
) -> TransformerConfig:
    """Returns a shape of Llama 3, which sets `rope_scaling` from 3.1 on."""
    if scaling:
        more["rope_scaling"] = RopeScaling(scaling)
    return TransformerConfig(layers, hidden, ffn, heads, kv_heads, 128256, rope_theta=5e5, **more)


def _qwen(
    layers: int, hidden: int, ffn: int, heads: int, kv_heads: int, **more: Any
) -> TransformerConfig:
    """Returns a shape of Qwen2.5."""
    style = dict(
        vocab_size=151936, rope_theta=1e6, norm_eps=1e-6, qkv_bias=True, tie_embeddings=True
    )
    return TransformerConfig(layers, hidden, ffn, heads, kv_heads, **style | more)


def _qwen_large(
    layers: int, hidden: int, ffn: int, heads: int, kv_heads: int = 8
) -> TransformerConfig:
    more = dict(vocab_size=152064, norm_eps=1e-5, tie_embeddings=False)
    return _qwen(layers, hidden, ffn, heads, kv_heads, **more)


def _smol(
    layers: int, hidden: int, ffn: int, heads: int, kv_heads: int, theta: float = 1e5
) -> TransformerConfig:
    """Returns a shape of SmolLM2."""
    return TransformerConfig(
        layers, hidden, ffn, heads, kv_heads, 49152, rope_theta=theta, tie_embeddings=True
    )


def _gpt(layers: int, hidden: int, heads: int, **more: Any) -> TransformerConfig:
    """Returns GPT-2's blocks (Radford et al. 2019) with GPT-3's context of 2048."""
    style: dict[str, Any] = dict(
        norm="layernorm", activation="gelu_tanh", bias=True, pos_emb="learned"
    )
    style |= dict(vocab_size=50257, vocab_multiple_of=128, tie_embeddings=True, max_seq_len=2048)
    return TransformerConfig(layers, hidden, 4 * hidden, heads, heads, **style | more)


def _neox(
    layers: int, hidden: int, heads: int, multiple: int = 128, **more: Any
) -> TransformerConfig:
    """Returns GPT-NeoX's blocks (Black et al. 2022): parallel residual, a quarter of each head rotated."""
    style: dict[str, Any] = dict(
        pos_emb="rope", rope_pct=0.25, parallel_residual=True, activation="gelu"
    )
    style |= dict(vocab_size=50277, vocab_multiple_of=multiple, tie_embeddings=False)
    return _gpt(layers, hidden, heads, **style | more)


VARIANTS: dict[str, TransformerConfig] = {
    # layers, hidden, ffn, heads, kv heads; vocabulary 32000 and theta 1e4 unless given
    "7b": TransformerConfig(32, 4096, 11008, 32, 32),
    "13b": TransformerConfig(40, 5120, 13824, 40, 40),
    "34b": TransformerConfig(48, 8192, 22016, 64, 8, rope_theta=1e6),
    "70b": TransformerConfig(80, 8192, 28672, 64, 8),
    "llama3_8b": _llama(32, 4096, 14336, 32),
    "llama3_70b": _llama(80, 8192, 28672, 64),
    "llama3_1.8b": _llama(24, 2048, 7168, 16),
    "llama3_3.2b": _llama(24, 3072, 8192, 24),
    "llama3_194m": _llama(10, 1024, 2816, 8),
    "llama3.1_8b": _llama(32, 4096, 14336, 32, scaling=8.0),
    "llama3.1_70b": _llama(80, 8192, 28672, 64, scaling=8.0),
    "llama3.1_405b": _llama(126, 16384, 53248, 128, scaling=8.0),
    "llama3.2_1b": _llama(16, 2048, 8192, 32, scaling=32.0, tie_embeddings=True),
    "llama3.2_3b": _llama(28, 3072, 8192, 24, scaling=32.0, tie_embeddings=True),
    "1.4b": TransformerConfig(24, 2048, 6144, 16, 4),
    "194m": TransformerConfig(10, 1024, 2816, 8, 8),
    "quickstart": TransformerConfig(6, 256, 704, 4, 4, 8192, tie_embeddings=True, init_std=0.05),
    "quickstart_2m": TransformerConfig(4, 192, 512, 3, 3, 8192, tie_embeddings=True, init_std=0.05),
    "tiny": TransformerConfig(2, 128, 352, 4, 2, 512),
    "qwen2.5_0.5b": _qwen(24, 896, 4864, 14, 2),
    "qwen2.5_1.5b": _qwen(28, 1536, 8960, 12, 2),
    "qwen2.5_3b": _qwen(36, 2048, 11008, 16, 2),
    "qwen2.5_7b": _qwen(28, 3584, 18944, 28, 4, vocab_size=152064, tie_embeddings=False),
    "qwen2.5_14b": _qwen_large(48, 5120, 13824, 40),
    "qwen2.5_32b": _qwen_large(64, 5120, 27648, 40),
    "qwen2.5_72b": _qwen_large(80, 8192, 29568, 64),
    "smollm2_135m": _smol(30, 576, 1536, 9, 3),
    "smollm2_360m": _smol(32, 960, 2560, 15, 5),
    "smollm2_1.7b": _smol(24, 2048, 8192, 32, 32, theta=130_000.0),
    # layers, hidden, heads. GPT-3: Brown et al. 2020, table 2.1, with all layers dense
    "gpt_160m": _gpt(12, 768, 12, norm="rmsnorm", pos_emb="none", tie_embeddings=False),
    "gpt3_125m": _gpt(12, 768, 12),
    "gpt3_350m": _gpt(24, 1024, 16),
    "gpt3_760m": _gpt(24, 1536, 16),
    "gpt3_1.3b": _gpt(24, 2048, 16),  # the paper's 24 heads of 128 do not fit a width of 2048
    "gpt3_2.7b": _gpt(32, 2560, 32),
    "gpt3_6.7b": _gpt(32, 4096, 32),
    "gpt3_13b": _gpt(40, 5120, 40),  # the paper's 5140 is not divisible by 40
    "gpt3_175b": _gpt(96, 12288, 96),
    # https://github.com/bigscience-workshop/bigscience, tr1-13B-base
    "tr1_13b": _gpt(40, 5120, 32),
    # https://github.com/EleutherAI/pythia
    "pythia_14m": _neox(6, 128, 4),
    "pythia_31m": _neox(6, 256, 8),
    "pythia_70m": _neox(6, 512, 8),
    "pythia_160m": _neox(12, 768, 12),
    "pythia_410m": _neox(24, 1024, 16),
    "pythia_1b": _neox(16, 2048, 8),
    "pythia_1.4b": _neox(24, 2048, 16),
    "pythia_2.8b": _neox(32, 2560, 32),
    "pythia_6.9b": _neox(32, 4096, 32, multiple=256),
    "pythia_12b": _neox(36, 5120, 40, multiple=512),
    # https://github.com/EleutherAI/gpt-neox/blob/main/configs/20B.yml
    "neox_20b": _neox(44, 6144, 64, multiple=256, activation="gelu_tanh"),
}
# Names of upstream fms-fsdp.
ALIASES = {f"llama2_{name}": name for name in ("7b", "13b", "34b", "70b", "1.4b", "194m")}
ALIASES |= {f"{name}_4k": name for name in VARIANTS if name.startswith("llama3_")}


def register_variant(name: str, config: TransformerConfig) -> None:
    """Adds a variant, so that `--model_variant=name` finds it.

    Raises:
        UserError: the name is taken.
    """
    if name in VARIANTS or name in ALIASES:
        raise UserError(f"model variant {name} is already defined; choose another name")
    VARIANTS[name] = config


def canonical_variant(name: str) -> str:
    """Returns the name of the table for a name or alias in any case.

    Raises:
        UserError: there is no such variant; the error names the nearest one.
    """
    lowered = name.lower()
    canonical = ALIASES.get(lowered, lowered)
    if canonical in VARIANTS:
        return canonical
    if lowered.startswith(("mamba", "granite", "olmo", "smollm3")):
        raise UserError(
            f"--model_variant={name} is not supported: this project trains Llama, Mistral, Qwen and "
            "GPT shapes; see --list_variants"
        )
    hint = did_you_mean(VARIANTS, lowered, cutoff=0.5)
    raise UserError(
        f"--model_variant={name} does not exist{hint or ';'} (--list_variants lists all {len(VARIANTS)})"
    )


_POSITION_FLAGS = {  # --pos_emb = the flags that have an effect only with it
    "rope": ("rope_theta", "rope_scaling", "rope_pct"),
    "relative": ("relative_buckets", "relative_max_distance"),
}


def _check_sizes(
    model: TransformerConfig, seq_length: int, data_vocab_size: int | None, *, derives_heads: bool
) -> None:
    """Raises UserError if sizes of the model do not fit each other, or the data.

    `derives_heads`: the size of a head is hidden_size / num_attention_heads.
    """
    hidden = model.hidden_size
    heads = model.num_attention_heads
    head_dim = model.head_dim
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


def _check_options(model: TransformerConfig, section: ModelConfig) -> None:
    """Raises UserError if options of the model exclude each other."""
    pattern = model.attn_window_pattern
    if not pattern or pattern.strip("LG"):
        raise UserError(
            f"--attn_window_pattern={pattern} must consist of the letters L and G; use e.g. LLG"
        )
    if section.attn_window_pattern is not None and not model.attn_window:
        raise UserError(
            f"--attn_window_pattern={pattern} has no effect without --attn_window; "
            "remove --attn_window_pattern or set --attn_window"
        )
    if model.attn_dropout and model.attn_impl == "cudnn":
        raise UserError(
            f"--attn_impl=cudnn is not supported with --attn_dropout={model.attn_dropout:g}; "
            "set --attn_impl=auto, or --attn_dropout=0"
        )
    for kind, names in _POSITION_FLAGS.items():
        for name in names:
            value = getattr(section, name)
            if model.pos_emb != kind and value is not None:
                raise UserError(
                    f"--{name}={joined(value)} has no effect without --pos_emb={kind}; "
                    f"remove it, or set --pos_emb={kind}"
                )
    distance = model.relative_max_distance
    buckets = model.relative_buckets
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
) -> TransformerConfig:
    """Returns the model shape of a run: the variant or a config.json, with the flags that are set.

    By default it has the vocabulary of the data, and `seq_length` positions.

    Raises:
        UserError: unknown variant, a shape that does not divide, a vocabulary smaller than the data's, or
            a shape that differs from the initial weights.
    """
    variant = _base_shape(section)
    is_huggingface = bool(section.init_from_hf or section.hf_config)
    given = dict[str, Any]()
    for spec in fields(TransformerConfig):
        if spec.name not in ("vocab_size", "max_seq_len", "rope_scaling"):  # derived below
            value = getattr(section, spec.name)
            if value is not None:
                given[spec.name] = value
    if not is_huggingface or given.keys() & {"hidden_size", "num_attention_heads"}:
        given.setdefault("head_dim", 0)
    if "num_attention_heads" in given and variant.num_kv_heads == variant.num_attention_heads:
        # a multi-head variant stays multi-head
        given.setdefault("num_kv_heads", given["num_attention_heads"])
    hidden = given.get("hidden_size", variant.hidden_size)
    if hidden != variant.hidden_size:
        ratio = variant.ffn_hidden_size / variant.hidden_size
        given.setdefault("ffn_hidden_size", max(1, round(ratio * hidden / 128)) * 128)
    if section.rope_scaling is not None:
        given["rope_scaling"] = parse_rope_scaling(section.rope_scaling)

    vocab_size = section.vocab_size
    if not vocab_size:
        vocab_size = data_vocab_size or variant.vocab_size
        if section.init_from_hf:  # the checkpoint's rows are kept
            vocab_size = max(vocab_size, variant.vocab_size)
    max_seq_len = section.max_seq_len
    if not max_seq_len:
        max_seq_len = seq_length
        if is_huggingface:
            max_seq_len = max(seq_length, variant.max_seq_len)

    config = replace(variant, **given, vocab_size=vocab_size, max_seq_len=max_seq_len)
    if section.init_from_hf:
        from fms_fsdp.hf.families import check_matches_checkpoint

        check_matches_checkpoint(config, variant, section)
    derives_heads = given.get("head_dim") == 0
    _check_sizes(config, seq_length, data_vocab_size, derives_heads=derives_heads)
    _check_options(config, section)
    return config


def _base_shape(section: ModelConfig) -> TransformerConfig:
    """Returns the shape whose values flags replace."""
    flag = "init_from_hf" if section.init_from_hf else "hf_config"
    if not getattr(section, flag):
        return VARIANTS[canonical_variant(section.model_variant)]
    from fms_fsdp.hf.families import read_config

    path = Path(getattr(section, flag))
    try:
        return read_config(path if path.is_file() else path / "config.json")
    except UserError as error:
        raise UserError(f"--{flag}={path} is not supported: {error}") from None


def parse_rope_scaling(text: str) -> RopeScaling | None:
    """Parses `linear:4`, `llama3:8` or `llama3:8:1:4:8192`; `linear:1` is None."""
    kind, *numbers = text.split(":")
    values = [float(parse_number(number) or 0) for number in numbers]
    counts = {"linear": (1,), "llama3": (1, 4)}.get(kind, ())
    is_valid = len(values) in counts and min(values) >= 1
    if is_valid and len(values) == 4:
        is_valid = values[1] < values[2]
    if not is_valid:
        raise UserError(
            f"--rope_scaling={text} must be linear:FACTOR or llama3:FACTOR[:LOW:HIGH:LENGTH], with "
            "numbers of at least 1 and LOW below HIGH; use e.g. llama3:8:1:4:8192"
        )
    if kind == "linear":
        return RopeScaling(values[0], kind="linear") if values[0] > 1 else None
    if len(values) == 1:
        return RopeScaling(values[0])
    factor, low, high, length = values
    return RopeScaling(factor, low, high, int(length))
