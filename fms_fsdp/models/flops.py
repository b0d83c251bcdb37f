"""Counts of parameters and floating-point operations, as formulas of the configuration. Nothing is built.

    num_params = embed + num_layers × block + head        flops_per_token = 6 · num_params + 12 · L · D · S

The second is the convention of the published training reports: every parameter counts, attention counts as if
it were not causal. Beside it stand what of that is matrix products (`matmul_flops_per_token`), and what
activation checkpointing adds (`recomputed_flops_per_token`).
"""

from __future__ import annotations

from fms_fsdp.models.variants import LlamaConfig


def num_params_by_unit(config: LlamaConfig) -> dict[str, int]:
    """Parameters of one embedding, one block and the head: the units FSDP gathers. A tied head has only its
    norm."""
    hidden, vocab = config.hidden_size, config.vocab_size
    norm = hidden if config.norm == "rmsnorm" else 2 * hidden
    attention = 2 * hidden * hidden + 2 * hidden * config.num_kv_heads * config.head_dim
    positions = config.max_seq_len * hidden if config.pos_emb == "learned" else 0
    return {
        "embed": vocab * hidden + positions,
        "block": attention + 3 * hidden * config.ffn_hidden_size + 2 * norm,
        "head": norm + (0 if config.tie_embeddings else vocab * hidden),
    }


def num_params(config: LlamaConfig) -> int:
    """Parameters of the model; a shared embedding counts once."""
    units = num_params_by_unit(config)
    return units["embed"] + config.num_layers * units["block"] + units["head"]


def flops_per_token(config: LlamaConfig, seq_length: int) -> int:
    """FLOPs of forward and backward for one token, recomputation excluded: 6N + 12·L·D·S.

    Source: Chowdhery et al. 2022 (PaLM), appendix B; N counts all parameters.
    """
    return 6 * num_params(config) + 12 * config.num_layers * config.hidden_size * seq_length


def matmul_flops_per_token(config: LlamaConfig, seq_length: int) -> int:
    """`flops_per_token` without the embedding lookup, which multiplies nothing; a tied embedding counts once,
    as the head."""
    positions = config.max_seq_len if config.pos_emb == "learned" else 0
    rows = positions + (0 if config.tie_embeddings else config.vocab_size)
    return flops_per_token(config, seq_length) - 6 * rows * config.hidden_size


def recomputed_flops_per_token(config: LlamaConfig, seq_length: int, num_blocks: int) -> int:
    """FLOPs that the backward pass repeats for one token where `num_blocks` blocks are checkpointed.

    A block's recomputation stops at the input of its last product, whose result nothing in the backward pass
    needs.
    """
    hidden, ffn = config.hidden_size, config.ffn_hidden_size
    return num_blocks * (2 * (num_params_by_unit(config)["block"] - hidden * ffn) + 4 * hidden * seq_length)
