"""The fields of config.json that each `model_type` of transformers reads: type, usual value, our name.

A field that is in no table here is refused unless it is off (null or false): see from_hf.py.

Source: transformers 5.23 (models/*/configuration_*.py and modeling_*.py; configuration_utils.py).
"""

from __future__ import annotations

from typing import Any, NamedTuple

from fms_fsdp.extras.typed_json import (
    ANYTHING,
    FLAG,
    TABLE,
    TEXT,
    Kind,
    list_of,
    number,
    one_of,
    or_none,
    whole,
)


class Field(NamedTuple):
    """A field of a type. `usual`: what the class takes where it is left out; `...`: it must be there.
    `ours`: our field that takes its value as it is. `other`: a second name, which must agree."""

    kind: Kind
    usual: Any = None
    ours: str = ""
    other: str = ""


WIDTH, LAYERS, VOCABULARY = whole(1, 1 << 20), whole(1, 10_000), whole(2, 1 << 28)
POSITIONS, WINDOW = whole(1, 1 << 24), or_none(whole(1, 1 << 31))
THETA, SHARE, DROPPED, EPS = number(1, 1e30), number(0.01, 1), number(0, 0.999), number(0, 1)
FACTOR = number(1e-6, 1e6)
SILU, OFF = ("silu", "swish"), or_none(one_of(False))
# theirs → ours; those of a pair are the same function
GELUS = {
    "gelu": "gelu",
    "gelu_python": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
}
GELUS |= {"gelu_python_tanh": "gelu_tanh", "gelu_fast": "gelu_tanh", "relu2": "relu2"}

_OF_ALL = {
    "initializer_range": Field(number(0, 10), 0.02, "init_std"),
    "tie_word_embeddings": Field(FLAG, False, "tie_embeddings"),
}
_ROTARY = {
    "rope_theta": Field(or_none(THETA)),
    "rope_scaling": Field(or_none(TABLE)),
    "rope_parameters": Field(or_none(TABLE)),
    "partial_rotary_factor": Field(or_none(SHARE)),
}
_SIZES = {
    "hidden_size": Field(WIDTH, ..., "hidden_size"),
    "num_hidden_layers": Field(LAYERS, ..., "num_layers"),
    "num_attention_heads": Field(WIDTH, ..., "num_attention_heads"),
}
_GROUPED = (
    _OF_ALL
    | _ROTARY
    | _SIZES
    | {
        "num_key_value_heads": Field(or_none(WIDTH), None, "num_kv_heads"),
        "head_dim": Field(or_none(whole(1, 65536)), None, "head_dim"),
        "hidden_act": Field(one_of(*SILU), "silu"),
        "rms_norm_eps": Field(EPS, 1e-6, "norm_eps"),
        "attention_dropout": Field(or_none(DROPPED), 0.0, "attn_dropout"),
        "attention_bias": Field(or_none(FLAG), False),
        "mlp_bias": Field(or_none(FLAG), False),
    }
)


def _grouped(vocabulary: int, inner: int, positions: int, **more: Field) -> dict[str, Field]:
    sizes = {
        "vocab_size": Field(VOCABULARY, vocabulary, "vocab_size"),
        "intermediate_size": Field(WIDTH, inner, "ffn_hidden_size"),
        "max_position_embeddings": Field(POSITIONS, positions, "max_seq_len"),
    }
    return _GROUPED | sizes | more


_QWEN = _grouped(
    151936,
    22016,
    32768,
    num_key_value_heads=Field(or_none(WIDTH), 32, "num_kv_heads"),
    use_sliding_window=Field(FLAG, False),
    sliding_window=Field(WINDOW, 4096),
    max_window_layers=Field(whole(0, 1 << 31), 28),
    layer_types=Field(or_none(list_of(TEXT))),
    attention_bias=Field(OFF),
    mlp_bias=Field(OFF),
)
TYPES: dict[str, dict[str, Field]] = {
    "llama": _grouped(32000, 11008, 2048),
    "mistral": _grouped(
        32000,
        14336,
        131072,
        num_key_value_heads=Field(or_none(WIDTH), 8, "num_kv_heads"),
        sliding_window=Field(WINDOW, 4096),
        layer_types=Field(or_none(list_of(TEXT))),
        attention_bias=Field(OFF),
        mlp_bias=Field(OFF),
    ),
    "qwen2": _QWEN,
    "qwen3": _QWEN | {"head_dim": Field(whole(1, 65536), 128, "head_dim")},
    "gpt2": _OF_ALL
    | {
        "tie_word_embeddings": Field(FLAG, True, "tie_embeddings"),
        "vocab_size": Field(VOCABULARY, 50257, "vocab_size"),
        "n_embd": Field(WIDTH, ..., "hidden_size", "hidden_size"),
        "n_layer": Field(LAYERS, ..., "num_layers", "num_hidden_layers"),
        "n_head": Field(WIDTH, ..., "num_attention_heads", "num_attention_heads"),
        "n_positions": Field(POSITIONS, 1024, "max_seq_len", "max_position_embeddings"),
        "n_inner": Field(or_none(WIDTH), None, "ffn_hidden_size"),
        "activation_function": Field(one_of(*GELUS), "gelu_new"),
        "hidden_act": Field(one_of(*GELUS)),
        "layer_norm_epsilon": Field(EPS, 1e-5, "norm_eps"),
        "resid_pdrop": Field(DROPPED, 0.1, "dropout"),
        "embd_pdrop": Field(DROPPED, 0.1),
        "attn_pdrop": Field(DROPPED, 0.1, "attn_dropout"),
    },
    "gpt_neox": _OF_ALL
    | _ROTARY
    | _SIZES
    | {
        "vocab_size": Field(VOCABULARY, 50432, "vocab_size"),
        "intermediate_size": Field(WIDTH, 24576, "ffn_hidden_size"),
        "max_position_embeddings": Field(POSITIONS, 2048, "max_seq_len"),
        "hidden_act": Field(one_of(*GELUS), "gelu"),
        "layer_norm_eps": Field(EPS, 1e-5, "norm_eps"),
        "attention_dropout": Field(DROPPED, 0.0, "attn_dropout"),
        "hidden_dropout": Field(DROPPED, 0.0, "dropout"),
        "use_parallel_residual": Field(FLAG, True, "parallel_residual"),
        "attention_bias": Field(one_of(True), True),
        "rotary_emb_base": Field(or_none(THETA)),
        "rotary_pct": Field(or_none(SHARE)),
    },
}
# fields that change no result of a model: any value will do
HARMLESS = set(
    # names, versions, classes and who made the file
    "architectures model_type torch_dtype dtype transformers_version auto_map tokenizer_class "
    "name_or_path _name_or_path _commit_hash is_llama_config unsloth_version unsloth_fixed "
    "transformers.js_config torchscript use_bfloat16 tf_legacy_loss "
    "_attn_implementation _attn_implementation_autoset attn_implementation _flash_attn_2_enabled "
    "_attn_implementation_internal _experts_implementation_internal "
    # tokens and generation
    "bos_token_id eos_token_id pad_token_id sep_token_id unk_token_id decoder_start_token_id use_cache "
    "num_logits_to_keep predict_special_tokens max_length min_length do_sample early_stopping num_beams "
    "temperature top_k top_p typical_p repetition_penalty length_penalty no_repeat_ngram_size "
    "encoder_no_repeat_ngram_size bad_words_ids num_return_sequences output_scores return_dict_in_generate "
    "forced_bos_token_id forced_eos_token_id remove_invalid_values exponential_decay_length_penalty "
    "suppress_tokens begin_suppress_tokens num_beam_groups diversity_penalty "
    # other tasks and outputs
    "id2label label2id num_labels problem_type finetuning_task task_specific_params prefix return_dict "
    "output_attentions output_hidden_states output_past _num_labels n_special classifier_dropout "
    "summary_activation summary_first_dropout summary_proj_to_labels "
    "summary_type summary_use_proj is_decoder chunk_size_feed_forward "
    # training alone, memory alone, or another name of the context
    "gradient_checkpointing reorder_and_upcast_attn n_ctx max_sequence_length model_max_length "
    "hidden_dropout embd_pdrop attention_probs_dropout_prob hidden_dropout_prob".split()
)
# harmless with these values alone
NEUTRAL: dict[str, tuple[Any, ...]] = {
    "pretraining_tp": (1, None),
    "scale_attn_weights": (True,),
    "pruned_heads": ({}, [], None),
}
# of other types: this type's class does not look at them, and a line says so
NOT_READ = {"sliding_window": WINDOW, "max_window_layers": ANYTHING}
