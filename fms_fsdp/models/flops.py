"""Counts of parameters and floating-point operations, as formulas of the configuration. Nothing is built.

    num_params = embed + num_layers × block + head        flops_per_token = 6 · num_params + 12 · H K · Σ T

The second is the convention of the published training reports: every parameter counts, attention counts as if
it were not causal: T is the length of a row, or of a layer's window where that is less, summed over the
layers. Beside it stand what of that is matrix products (`matmul_flops_per_token`), and what activation
checkpointing adds (`recomputed_flops_per_token`). Only a `--model_builder`'s model is built, to be counted.
"""

from __future__ import annotations

from collections.abc import Collection

from fms_fsdp.models.variants import LlamaConfig


def num_params_by_unit(config: LlamaConfig) -> dict[str, int]:
    """Parameters of one embedding, one block and the head: the units FSDP gathers. The part "head" of a tied
    head is the norm alone."""
    if config.model_builder:
        return _counted(config)
    hidden, ffn = config.hidden_size, config.ffn_hidden_size
    q_size, kv_size = _attention_sizes(config)
    inner = 2 * ffn if config.activation == "swiglu" else ffn  # outputs of the first products
    vocab = config.padded_vocab_size * hidden
    block = 2 * hidden * (q_size + kv_size) + hidden * (inner + ffn)
    return {
        "embed": vocab + _tables(config),
        "block": block + _vectors(config),
        "head": _norm(config, hidden) + (0 if config.tie_embeddings else vocab),
    }


def _vectors(config: LlamaConfig) -> int:
    """Parameters of a block that multiply no matrix: norms and biases."""
    hidden, ffn = config.hidden_size, config.ffn_hidden_size
    q_size, kv_size = _attention_sizes(config)
    count = 2 * _norm(config, hidden)
    if config.bias:
        count += (2 if config.activation == "swiglu" else 1) * ffn + 2 * hidden
    if config.bias or config.qkv_bias:
        count += q_size + 2 * kv_size
    if config.qk_norm:
        sizes = (q_size, kv_size) if config.qk_norm_wide else (config.head_dim, config.head_dim)
        count += sum(_norm(config, size) for size in sizes)
    return count


def _norm(config: LlamaConfig, size: int) -> int:
    return {"rmsnorm": size, "layernorm": 2 * size, "scalenorm": 1}[config.norm]


def _tables(config: LlamaConfig) -> int:
    learned, relative = config.max_seq_len * config.hidden_size, config.relative_buckets
    return {"learned": learned, "relative": relative * config.num_attention_heads}.get(
        config.pos_emb, 0
    )


def _attention_sizes(config: LlamaConfig) -> tuple[int, int]:
    """The widths of all query heads and of all key heads."""
    return config.num_attention_heads * config.head_dim, config.num_kv_heads * config.head_dim


def _attended(config: LlamaConfig, seq_length: int) -> int:
    """Keys that a token sees, summed over the layers, as if attention were not causal."""
    return sum(min(window or seq_length, seq_length) for window in config.windows)


def _counted(config: LlamaConfig) -> dict[str, int]:
    """The counts of a user's own model, from the model."""
    import torch

    from fms_fsdp.models.llama import build_model

    with torch.device("meta"):
        model = build_model(config)
    units = {"embed": model.embed, "block": model.blocks["0"], "head": model.head}
    return {
        key: sum(map(torch.numel, part.parameters()))
        for key, part in units.items()
        if part is not None
    }


def num_params(config: LlamaConfig) -> int:
    """Parameters of the model; a shared embedding counts once."""
    units = num_params_by_unit(config)
    return units["embed"] + config.num_layers * units["block"] + units["head"]


def flops_per_token(config: LlamaConfig, seq_length: int) -> int:
    """FLOPs of forward and backward for one token, recomputation excluded: 6N + 12·L·D·S, for windows less.

    Source: Chowdhery et al. 2022 (PaLM), appendix B; N counts all parameters.
    """
    return 6 * num_params(config) + 12 * _attention_sizes(config)[0] * _attended(config, seq_length)


def matmul_flops_per_token(config: LlamaConfig, seq_length: int) -> int:
    """`flops_per_token` without what multiplies no matrix: the embedding lookup, norms and biases, and the
    rows that fill up the head; a tied embedding counts once, as the head."""
    rows = config.padded_vocab_size - config.vocab_size
    rows += 0 if config.tie_embeddings else config.padded_vocab_size
    others = (
        config.num_layers * _vectors(config) + _norm(config, config.hidden_size) + _tables(config)
    )
    return flops_per_token(config, seq_length) - 6 * (rows * config.hidden_size + others)


def keeps_product(kept: Collection[str], place: int) -> bool:
    """Whether a block that keeps these results (`ParallelConfig.kept_ops`) keeps that of its product at this
    place: queries, keys, values, attention's output, and the feed-forward's two or three."""
    second = "every_second_product" in kept or ("attention_products" in kept and place < 4)
    return "products" in kept or (second and place % 2 == 1)


def recomputed_flops_per_token(
    config: LlamaConfig,
    seq_length: int,
    num_blocks: int,
    kept: Collection[str] = (),
    num_segments: int = 0,
) -> int:
    """FLOPs that the backward pass repeats for one token where `num_blocks` blocks, in `num_segments` (by
    default each alone), compute again all but `kept` (names of `--recompute_ops`).

    A segment's recomputation stops at the input of its last product, whose result nothing in the backward
    pass needs.
    """
    hidden, ffn = config.hidden_size, config.ffn_hidden_size
    q_size, kv_size = _attention_sizes(config)
    weights = num_params_by_unit(config)["block"] - _vectors(config) - hidden * ffn
    if "every_second_product" in kept:
        weights = hidden * (q_size + kv_size + ffn)  # of queries, values and the gate or up
    elif "attention_products" in kept:
        weights -= hidden * (q_size + kv_size)
    if "products" in kept:
        weights = 0
    attended = 0 if "attention" in kept else _attended(config, seq_length) // config.num_layers
    inner = num_blocks - (num_segments or num_blocks)  # blocks whose last product is repeated too
    return num_blocks * (2 * weights + 4 * q_size * attended) + 2 * inner * hidden * ffn
