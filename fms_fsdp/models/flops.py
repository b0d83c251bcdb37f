"""Parameters and floating-point operations of a model, as formulas of its shape.

FLOPs per token follow the published training reports: 6 N + 12 H K Σ T, where N is the number of
parameters and T the sequence length, or the window of a layer if shorter, summed over the layers,
as if attention were not causal. Source: Chowdhery et al. 2022 (PaLM), appendix B.
"""

from __future__ import annotations

from collections.abc import Collection

from fms_fsdp.models.config import TransformerConfig


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
    """Counts the parameters of a user's model, which it builds without memory.

    The blocks may differ: a block has their mean, rounded down.
    """
    import torch

    from fms_fsdp.models.build import build_model

    with torch.device("meta"):
        model = build_model(config)
    num_blocks = len(model.blocks)
    counts = {}
    for name, unit in (("embed", model.embed), ("block", model.blocks), ("head", model.head)):
        total = 0
        in_matrices = 0
        for parameter in [] if unit is None else unit.parameters():
            total += parameter.numel()
            if parameter.ndim == 2 and name != "embed":  # the lookup is no matmul
                in_matrices += parameter.numel()
        if name == "block":
            total //= num_blocks
            in_matrices //= num_blocks
        counts[name] = (total, in_matrices)
    return counts


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


def matmuls_of_block(config: TransformerConfig) -> tuple[str, ...]:
    """Returns the names of a block's matmuls in the order of the forward pass (a test compares them)."""
    if config.activation == "swiglu":
        return ("q", "k", "v", "o", "gate", "up", "down")
    return ("q", "k", "v", "o", "up", "down")


def kept_matmuls(kept: Collection[str], config: TransformerConfig) -> tuple[str, ...]:
    """Returns the matmuls whose results a block keeps that keeps the results `kept`.

    `kept` is `ParallelConfig.kept_ops`. The backward pass does not need the result of the last one.
    """
    names = matmuls_of_block(config)
    if "matmuls" in kept:
        return names[:-1]
    if "every_second_matmul" in kept:
        return ("k", "o", "up") if "gate" in names else ("k", "o")
    if "attention_matmuls" in kept:  # every second one of attention
        return ("k", "o")
    return ()


def keeps_attention(kept: Collection[str], config: TransformerConfig) -> bool:
    """Returns whether a block that keeps the results `kept` keeps the result of attention.

    Attention with dropout is recomputed: the recomputation draws random numbers in the order of the
    forward pass, and without those of attention every later dropout mask would differ.
    """
    return "attention" in kept and config.attn_dropout == 0


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
    # The other side of each matmul is the hidden size. The backward pass does not need the last result.
    sizes = {"q": q_size, "k": kv_size, "v": kv_size, "o": q_size, "gate": ffn, "up": ffn}
    kept_results = kept_matmuls(kept, config)
    weights = 0
    for name in matmuls_of_block(config)[:-1]:
        if name not in kept_results:
            weights += hidden * sizes[name]
    attention = 0
    if not keeps_attention(kept, config):
        attention = _attention_flops(config, seq_length) // config.num_layers
    flops = num_blocks * (2 * weights + attention)

    # Within a segment, the next block needs the result of the last matmul.
    num_inner_blocks = num_blocks - (num_segments or num_blocks)
    return flops + 2 * num_inner_blocks * hidden * ffn
