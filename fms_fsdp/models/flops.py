"""Parameters and floating-point operations of a model, as formulas of its shape.

FLOPs per token follow the published training reports: 6 N + 12 H K Σ T, where N is the number of
parameters and T the sequence length, or the window of a layer if shorter, summed over the layers,
as if attention were not causal. Source: Chowdhery et al. 2022 (PaLM), appendix B.
"""

from __future__ import annotations

from collections.abc import Collection

from fms_fsdp.models.config import TransformerConfig, count_params


def num_params_by_unit(config: TransformerConfig) -> dict[str, int]:
    """Returns the parameters of the embedding, of one block and of the head (`count_params`)."""
    return {name: total for name, (total, _) in count_params(config).items()}


def num_params(config: TransformerConfig) -> int:
    """Returns the parameters of the model; tied embeddings count once."""
    units = num_params_by_unit(config)
    return units["embed"] + config.num_layers * units["block"] + units["head"]


def _attention_flops(config: TransformerConfig, seq_length: int) -> int:
    """Returns the FLOPs of q k^T and of the weighted sum of v in a forward pass, for one token."""
    keys = sum(min(window or seq_length, seq_length) for window in config.windows)
    return 4 * config.num_attention_heads * config.head_dim * keys


def flops_per_token(config: TransformerConfig, seq_length: int) -> int:
    """Returns the FLOPs of forward and backward for one token, without recomputation."""
    return 6 * num_params(config) + 3 * _attention_flops(config, seq_length)


def matmul_flops_per_token(config: TransformerConfig, seq_length: int) -> int:
    """Returns `flops_per_token` of matmuls alone: no embedding lookup, norms, biases or padding."""
    _, matrices = count_params(config)["block"]
    weights = config.num_layers * matrices + config.vocab_size * config.hidden_size
    return 6 * weights + 3 * _attention_flops(config, seq_length)


def keeps_matmul(kept: Collection[str], index: int) -> bool:
    """Returns whether a block that keeps the results `kept` keeps the result of a matmul.

    `kept` is `ParallelConfig.kept_ops`; `index` counts q, k, v, o and the two or three matmuls of
    the feed-forward layer.
    """
    if "matmuls" in kept:
        return True
    if "every_second_matmul" in kept:
        return index % 2 == 1
    if "attention_matmuls" in kept:  # every second one of attention
        return index in (1, 3)
    return False


def recomputed_flops_per_token(
    config: TransformerConfig,
    seq_length: int,
    num_blocks: int,
    kept: Collection[str] = (),
    num_segments: int = 0,
) -> int:
    """Returns the FLOPs that the backward pass repeats for one token.

    `num_blocks` blocks, in `num_segments` segments (default: one each), recompute everything but
    `kept`. The recomputation of a segment stops at the input of its last matmul.
    """
    hidden = config.hidden_size
    ffn = config.ffn_hidden_size
    q_size = config.num_attention_heads * config.head_dim
    kv_size = config.num_kv_heads * config.head_dim
    inner_sizes = [ffn, ffn] if config.activation == "swiglu" else [ffn]

    # The other side of each matmul of a block but the last is the hidden size.
    sizes = [q_size, kv_size, kv_size, q_size, *inner_sizes]
    weights = sum(hidden * size for i, size in enumerate(sizes) if not keeps_matmul(kept, i))
    attention = 0
    if "attention" not in kept:
        attention = _attention_flops(config, seq_length) // config.num_layers
    flops = num_blocks * (2 * weights + attention)

    # Within a segment, the next block needs the result of the last matmul.
    num_inner_blocks = num_blocks - (num_segments or num_blocks)
    return flops + 2 * num_inner_blocks * hidden * ffn
