"""The variants of GPT and its relatives: layers, width and heads of what was published."""

from __future__ import annotations

from typing import Any

from fms_fsdp.models.variants import LlamaConfig


def _gpt(layers: int, hidden: int, heads: int, **more: Any) -> LlamaConfig:
    """As GPT-2. Source: Radford et al. 2019."""
    style: dict[str, Any] = dict(
        norm="layernorm", activation="gelu_tanh", bias=True, pos_emb="learned"
    )
    style |= dict(vocab_size=50257, vocab_multiple_of=128, tie_embeddings=True, max_seq_len=2048)
    return LlamaConfig(layers, hidden, 4 * hidden, heads, heads, **style | more)


def _neox(layers: int, hidden: int, heads: int, multiple: int = 128, **more: Any) -> LlamaConfig:
    """As GPT-NeoX: attention and feed-forward side by side, a quarter of each head rotated.

    Source: Black et al. 2022, https://arxiv.org/abs/2204.06745.
    """
    style: dict[str, Any] = dict(
        pos_emb="rope", rope_pct=0.25, parallel_residual=True, activation="gelu"
    )
    style |= dict(vocab_size=50277, vocab_multiple_of=multiple, tie_embeddings=False)
    return _gpt(layers, hidden, heads, **style | more)


VARIANTS: dict[str, LlamaConfig] = {
    # layers, hidden, heads. GPT-3: Brown et al. 2020, table 2.1, with all layers dense
    "gpt_160m": _gpt(12, 768, 12, norm="rmsnorm", pos_emb="none", tie_embeddings=False),
    "gpt3_125m": _gpt(12, 768, 12),
    "gpt3_350m": _gpt(24, 1024, 16),
    "gpt3_760m": _gpt(24, 1536, 16),
    "gpt3_1.3b": _gpt(24, 2048, 16),  # the table's 24 heads of 128 do not fit a width of 2048
    "gpt3_2.7b": _gpt(32, 2560, 32),
    "gpt3_6.7b": _gpt(32, 4096, 32),
    "gpt3_13b": _gpt(40, 5120, 40),  # the table's 5140 is no multiple of 40
    "gpt3_175b": _gpt(96, 12288, 96),
    "tr1_13b": _gpt(
        40, 5120, 32
    ),  # https://github.com/bigscience-workshop/bigscience, tr1-13B-base
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
    # https://github.com/EleutherAI/gpt-neox/blob/main/configs/20B.yml; its bias-gelu-fusion is GELU by tanh
    "neox_20b": _neox(44, 6144, 64, multiple=256, activation="gelu_tanh"),
}
