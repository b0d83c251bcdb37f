"""The variants of close relatives of Llama: layers, width and heads of what was published.

Source: the config.json of the models of Qwen2.5 (https://huggingface.co/Qwen), Granite 3.1
(https://huggingface.co/ibm-granite), SmolLM2 and SmolLM3 (https://huggingface.co/HuggingFaceTB) and OLMo 2
(https://huggingface.co/allenai).
"""

from __future__ import annotations

from typing import Any

from fms_fsdp.models.variants import LlamaConfig


def _qwen(
    layers: int, hidden: int, ffn: int, heads: int, kv_heads: int, **more: Any
) -> LlamaConfig:
    style: dict[str, Any] = dict(rope_theta=1e6, norm_eps=1e-6, qkv_bias=True, tie_embeddings=True)
    return LlamaConfig(
        layers, hidden, ffn, heads, kv_heads, **dict(vocab_size=151936) | style | more
    )


def _granite(hidden: int, ffn: int, head_dim: int, logits_scaling: float) -> LlamaConfig:
    factors: dict[str, Any] = dict(
        embedding_multiplier=12.0, residual_multiplier=0.22, logits_scaling=logits_scaling
    )
    style: dict[str, Any] = dict(
        attention_multiplier=1 / head_dim, rope_theta=5e6, tie_embeddings=True
    )
    return LlamaConfig(40, hidden, ffn, 32, 8, 49155, **style, **factors)


def _olmo(layers: int, hidden: int, ffn: int, heads: int, kv_heads: int) -> LlamaConfig:
    style: dict[str, Any] = dict(rope_theta=5e5, norm_eps=1e-6, norm_place="after", qk_norm=True)
    return LlamaConfig(layers, hidden, ffn, heads, kv_heads, 100352, qk_norm_wide=True, **style)


def _smol(
    layers: int, hidden: int, ffn: int, heads: int, kv_heads: int, theta: float = 1e5
) -> LlamaConfig:
    style: dict[str, Any] = dict(rope_theta=theta, tie_embeddings=True)
    return LlamaConfig(layers, hidden, ffn, heads, kv_heads, 49152, **style)


_UNTIED: dict[str, Any] = dict(tie_embeddings=False)
VARIANTS: dict[str, LlamaConfig] = {
    # layers, hidden, ffn, heads, kv heads
    "qwen2.5_0.5b": _qwen(24, 896, 4864, 14, 2),
    "qwen2.5_1.5b": _qwen(28, 1536, 8960, 12, 2),
    "qwen2.5_3b": _qwen(36, 2048, 11008, 16, 2),
    "qwen2.5_7b": _qwen(28, 3584, 18944, 28, 4, vocab_size=152064, **_UNTIED),
    "qwen2.5_14b": _qwen(48, 5120, 13824, 40, 8, vocab_size=152064, norm_eps=1e-5, **_UNTIED),
    "qwen2.5_32b": _qwen(64, 5120, 27648, 40, 8, vocab_size=152064, norm_eps=1e-5, **_UNTIED),
    "qwen2.5_72b": _qwen(80, 8192, 29568, 64, 8, vocab_size=152064, norm_eps=1e-5, **_UNTIED),
    "granite3_2b": _granite(2048, 8192, 64, 8.0),
    "granite3_8b": _granite(4096, 12800, 128, 16.0),
    "smollm2_135m": _smol(30, 576, 1536, 9, 3),
    "smollm2_360m": _smol(32, 960, 2560, 15, 5),
    "smollm2_1.7b": _smol(24, 2048, 8192, 32, 32, theta=130_000.0),
    "smollm3_3b": LlamaConfig(
        36,
        2048,
        11008,
        16,
        4,
        128256,
        rope_theta=5e6,
        norm_eps=1e-6,
        tie_embeddings=True,
        rope_pattern="RRRN",
    ),
    "olmo2_1b": _olmo(16, 2048, 8192, 16, 16),
    "olmo2_7b": _olmo(32, 4096, 11008, 32, 32),
    "olmo2_13b": _olmo(40, 5120, 13824, 40, 40),
    "olmo2_32b": _olmo(64, 5120, 27648, 40, 8),
}
