"""Converts between Hugging Face's config.json and `TransformerConfig`.

    config_from_hf(content) -> TransformerConfig          config_to_hf(config) -> content

Each family lists the fields that its class in transformers reads. A field that is in no list is an
error, so that no option of a published model is ignored silently. Export needs no table of its own:
a config can be exported if config_from_hf reads its config.json back as the same config.

Source: transformers 5.23, models/{llama,mistral,qwen2,qwen3,gpt2,gpt_neox} (configuration and
modeling).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from fms_fsdp.config import ModelConfig
from fms_fsdp.config.values import shown
from fms_fsdp.errors import UserError
from fms_fsdp.files import read_json_object
from fms_fsdp.models.config import RopeScaling, TransformerConfig


@dataclass(frozen=True)
class Family:
    """A model class of transformers and the part of it that our models implement."""

    model_type: str
    architecture: str
    fields: Mapping[str, str]  # field of config.json -> our option with the same value
    # values of absent fields in transformers; other fields are required
    defaults: Mapping[str, Any]
    options: Mapping[str, Any] = field(default_factory=dict)  # our options that the class fixes
    only: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)  # the only supported values
    also: str = ""  # fields that the code below reads, or that have no effect in this class
    # RoPE base and rotated fraction: (the names of the field, which must agree), the default
    theta: tuple[tuple[str, ...], float] | None = (("rope_theta",), 10_000.0)
    fraction: tuple[tuple[str, ...], float] = (("partial_rotary_factor",), 1.0)


_TIED = {"tie_word_embeddings": "tie_embeddings", "initializer_range": "init_std"}
_DECODER = _TIED | {
    "vocab_size": "vocab_size",
    "hidden_size": "hidden_size",
    "intermediate_size": "ffn_hidden_size",
    "num_hidden_layers": "num_layers",
    "num_attention_heads": "num_attention_heads",
    "max_position_embeddings": "max_seq_len",
    "attention_dropout": "attn_dropout",
}
_LLAMA = _DECODER | {
    "num_key_value_heads": "num_kv_heads",
    "head_dim": "head_dim",
    "rms_norm_eps": "norm_eps",
}
_GPT2 = _TIED | {
    "vocab_size": "vocab_size",
    "n_embd": "hidden_size",
    "n_inner": "ffn_hidden_size",
    "n_layer": "num_layers",
    "n_head": "num_attention_heads",
    "n_positions": "max_seq_len",
    "layer_norm_epsilon": "norm_eps",
    "resid_pdrop": "dropout",
    "attn_pdrop": "attn_dropout",
}
_NEOX = _DECODER | {
    "layer_norm_eps": "norm_eps",
    "hidden_dropout": "dropout",
    "use_parallel_residual": "parallel_residual",
}
_USUAL = {"tie_word_embeddings": False, "initializer_range": 0.02, "attention_dropout": 0.0}
_SILU = {"hidden_act": ("silu", "swish")}
_NO_BIAS = {"attention_bias": (False, None), "mlp_bias": (False, None)}
_QWEN = "use_sliding_window sliding_window max_window_layers layer_types"
_LAYERNORM = {"norm": "layernorm", "bias": True}
FAMILIES = {
    family.model_type: family
    for family in (
        Family(
            "llama",
            "LlamaForCausalLM",
            _LLAMA,
            _USUAL | {"num_key_value_heads": None, "head_dim": None},
            only=_SILU,
            also="attention_bias mlp_bias layer_types",
        ),
        Family(
            "mistral",
            "MistralForCausalLM",
            _LLAMA,
            _USUAL | {"head_dim": None},
            only=_SILU | _NO_BIAS,
            also="sliding_window layer_types",
        ),
        Family(
            "qwen2",
            "Qwen2ForCausalLM",
            _LLAMA,
            _USUAL | {"head_dim": None},
            options={"qkv_bias": True},
            only=_SILU | _NO_BIAS,
            also=_QWEN,
        ),
        Family(
            "qwen3",
            "Qwen3ForCausalLM",
            _LLAMA,
            _USUAL,
            options={"qk_norm": True},
            only=_SILU | _NO_BIAS,
            also=_QWEN,
        ),
        Family(
            "gpt2",
            "GPT2LMHeadModel",
            _GPT2,
            {
                "tie_word_embeddings": True,
                "initializer_range": 0.02,
                "n_inner": None,
                "layer_norm_epsilon": 1e-5,
                "resid_pdrop": 0.1,
                "attn_pdrop": 0.1,
            },
            options=_LAYERNORM | {"pos_emb": "learned"},
            also="activation_function embd_pdrop",
            theta=None,
        ),
        Family(
            "gpt_neox",
            "GPTNeoXForCausalLM",
            _NEOX,
            _USUAL | {"layer_norm_eps": 1e-5, "hidden_dropout": 0.0, "use_parallel_residual": True},
            options=_LAYERNORM,
            only={"attention_bias": (True,)},
            also="hidden_act",
            theta=(("rotary_emb_base", "rope_theta"), 10_000.0),
            fraction=(("rotary_pct", "partial_rotary_factor"), 0.25),
        ),
    )
}
_GELUS = {
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "relu2": "relu2",
    "gelu_python": "gelu",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_python_tanh": "gelu_tanh",
    "gelu_fast": "gelu_tanh",
}
# fields that change no logits: names and versions, token ids and generation, other tasks and
# outputs, training
_HARMLESS = frozenset(
    "architectures model_type torch_dtype dtype transformers_version auto_map tokenizer_class name_or_path "
    "is_llama_config unsloth_version unsloth_fixed transformers.js_config torchscript use_bfloat16 "
    "tf_legacy_loss attn_implementation activation custom_pipelines normalize_attention_scores "
    "apply_query_key_layer_scaling "
    "bos_token_id eos_token_id pad_token_id sep_token_id unk_token_id decoder_start_token_id use_cache "
    "num_logits_to_keep predict_special_tokens max_length min_length do_sample early_stopping num_beams "
    "temperature top_k top_p typical_p repetition_penalty length_penalty no_repeat_ngram_size "
    "encoder_no_repeat_ngram_size bad_words_ids num_return_sequences output_scores return_dict_in_generate "
    "forced_bos_token_id forced_eos_token_id remove_invalid_values exponential_decay_length_penalty "
    "suppress_tokens begin_suppress_tokens num_beam_groups diversity_penalty "
    "id2label label2id num_labels problem_type finetuning_task task_specific_params prefix return_dict "
    "output_attentions output_hidden_states output_past n_special classifier_dropout is_decoder "
    "summary_activation summary_first_dropout summary_proj_to_labels summary_type summary_use_proj "
    "chunk_size_feed_forward gradient_checkpointing reorder_and_upcast_attn n_ctx max_sequence_length "
    "model_max_length hidden_dropout embd_pdrop attention_probs_dropout_prob hidden_dropout_prob "
    "_name_or_path _commit_hash _attn_implementation _attn_implementation_autoset _flash_attn_2_enabled "
    "_attn_implementation_internal _experts_implementation_internal _num_labels".split()
)
# fields of no family: harmless with these values alone
_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "pretraining_tp": (1,),
    "scale_attn_weights": (True,),
    "pruned_heads": ({}, []),
}
# Fields of weights that are stored in few bits, by GPTQ, AWQ, bitsandbytes, compressed-tensors,
# MLX.
_QUANTIZATION = frozenset(["quantization_config", "compression_config", "quantization"])
# fields of sliding windows, which classes of full attention do not read
_WINDOW_FIELDS = ("sliding_window", "max_window_layers")
# Fields that are on by default in a class: false changes its results.
_FALSE_MATTERS = frozenset(["is_causal", "scale_attn_weights"])
# options that no config.json has to express: they change training alone, or the layout in memory
_TRAINING_ONLY = frozenset(
    "init_std attn_impl z_loss residual_scaled_init vocab_multiple_of dropout attn_dropout ffn_dropout "
    "relative_buckets relative_max_distance".split()
)
_EXPORTED = [each.name for each in fields(TransformerConfig) if each.name not in _TRAINING_ONLY]
_LARGEST = {"vocab_size": 1 << 28, "max_seq_len": 1 << 22}  # others: 1 << 20


def read_config(path: Path) -> TransformerConfig:
    """Returns the model of a config.json.

    Raises:
        UserError: the file cannot be read, or describes a model that is not supported.
    """
    if not path.is_file():
        raise UserError(f"{path.parent} has no {path.name}; name a Hugging Face checkpoint folder")
    return config_from_hf(read_json_object(path))


def config_from_hf(content: Mapping[str, Any]) -> TransformerConfig:
    """Returns the model that the content of a config.json describes.

    Raises:
        UserError: unknown model_type, a missing or malformed field, or a field or value that our models do
            not implement; the message names the field.
    """
    kind = content.get("model_type")
    if not isinstance(kind, str) or kind not in FAMILIES:
        raise UserError(
            f"model_type={_text(kind)} is not supported; it must be one of {', '.join(FAMILIES)}"
        )
    family = FAMILIES[kind]
    _reject_unknown(family, content)
    values = dict[str, Any]()
    for name, option in family.fields.items():
        values[option] = _read(family, content, name, option)
    values |= family.options
    if not values["ffn_hidden_size"]:
        values["ffn_hidden_size"] = 4 * values["hidden_size"]
    if not values.get("num_kv_heads"):
        values["num_kv_heads"] = values["num_attention_heads"]
    if not values.get("head_dim"):
        values["head_dim"] = 0
    if not values["head_dim"] and values["hidden_size"] % values["num_attention_heads"]:
        raise UserError("hidden_size must be divisible by the number of attention heads")
    if values["num_attention_heads"] % values["num_kv_heads"]:
        raise UserError("num_attention_heads must be divisible by num_key_value_heads")
    if kind == "llama":
        biases = [content.get(name) or False for name in ("attention_bias", "mlp_bias")]
        if biases not in ([True, True], [False, False]):
            names = f"attention_bias={_text(biases[0])} and mlp_bias={_text(biases[1])}"
            raise UserError(f"{names} must be equal, true or false")
        values["bias"] = biases[0]
    values["attn_window"] = _sliding_window(family, content, values["num_layers"])
    if kind == "gpt_neox":
        values["activation"] = _activation(content, "hidden_act", default="gelu")
    if kind == "gpt2":
        values["activation"] = _activation(content, "activation_function", default="gelu_new")
        embedding_dropout = content.get("embd_pdrop", 0.1)
        if embedding_dropout != values["dropout"]:
            raise UserError(
                f"embd_pdrop={_text(embedding_dropout)} must equal resid_pdrop={values['dropout']}, "
                "because --dropout sets both; edit config.json"
            )
    values |= _rope(family, content, values["max_seq_len"])
    config = TransformerConfig(**values)
    if config.pos_emb == "rope" and (config.rotary_dim % 2 or not config.rotary_dim):
        raise UserError(
            f"the rotated part of head_dim={config.head_dim} ({config.rotary_dim}) must be even"
        )
    return config


def _text(value: Any) -> str:
    try:
        return shown(str(value)[:999])
    except RecursionError:
        return "(nested)"


def _same(value: Any, allowed: Any) -> bool:
    return type(value) is type(allowed) and bool(value == allowed)  # 1 is not True


def _reject_unknown(family: Family, content: Mapping[str, Any]) -> None:
    """Raises UserError for a field that the family does not list.

    Null means not set, and false means off, unless false changes the computation of the class.
    """
    names = [*family.fields, *family.also.split(), *_HARMLESS]
    if family.theta is not None:
        names += [*family.theta[0], *family.fraction[0], "rope_scaling", "rope_parameters"]
    if content.get("use_sliding_window") is False:
        names += _WINDOW_FIELDS
    allowed_values = {**_NEUTRAL, **family.only}
    for name, value in content.items():
        if name in _QUANTIZATION and value:
            raise UserError(
                f"quantized weights ({name} in config.json) are not supported; use a checkpoint of this "
                "model with fp32, bf16 or fp16 weights"
            )
        allowed = allowed_values.get(name, ())
        if name in names or any(_same(value, each) for each in allowed):
            continue
        is_off = value is None or (value is False and name not in _FALSE_MATTERS)
        if is_off and name not in family.only:
            continue
        rule = f"{_text(name)}={_text(value)} is not supported for {family.model_type}"
        if allowed:
            raise UserError(f"{rule}; it must be one of {', '.join(map(str, allowed))}")
        raise UserError(f"{rule}; remove it from config.json if the model does not use it")


def _read(family: Family, content: Mapping[str, Any], name: str, option: str) -> Any:
    """Returns the value of a field, checked against the type of our option."""
    if name not in content and name not in family.defaults:
        raise UserError(f"{name} is missing; add it to config.json")
    default = family.defaults.get(name, ...)
    value = content.get(name, default)
    if value is None and default is None:
        return None
    kind = str(TransformerConfig.__dataclass_fields__[option].type)
    largest = _LARGEST.get(option, 1 << 20)
    if kind == "bool" and not isinstance(value, bool):
        raise UserError(f"{name}={_text(value)} must be true or false")
    if kind == "int" and not (type(value) is int and 1 <= value <= largest):
        raise UserError(f"{name}={_text(value)} must be an integer from 1 to {largest:,}")
    if kind == "float" and not (type(value) in (int, float) and 0 <= value < 1):
        raise UserError(f"{name}={_text(value)} must be a number from 0 to below 1")
    return value


def _activation(content: Mapping[str, Any], name: str, default: str) -> str:
    value = content.get(name, default)
    if not isinstance(value, str) or value not in _GELUS:
        raise UserError(f"{name}={_text(value)} must be one of {', '.join(_GELUS)}")
    return _GELUS[value]


def _sliding_window(family: Family, content: Mapping[str, Any], num_layers: int) -> int:
    """Returns the attention window of all layers, 0 for none."""
    window = None
    if family.model_type == "mistral":
        window = content.get("sliding_window", 4096)
    if window is not None and not (type(window) is int and 1 <= window <= 1 << 31):
        raise UserError(f"sliding_window={_text(window)} must be a positive integer or null")
    if content.get("use_sliding_window") not in (None, False):
        raise UserError(
            f"use_sliding_window={_text(content['use_sliding_window'])} is not supported for this model "
            "type; set it to false in config.json to load the model with full attention"
        )
    types = content.get("layer_types")
    if types is not None:
        expected = "sliding_attention" if window else "full_attention"
        if types != [expected] * num_layers:
            raise UserError(
                f"layer_types={_text(types)} is not supported: all layers must be {expected}"
            )
    return window or 0


_ROPE_KEYS = {  # of each rope_type: the keys it needs
    "default": (),
    "linear": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor"),
}


def _rope(family: Family, content: Mapping[str, Any], max_seq_len: int) -> dict[str, Any]:
    """Returns rope_theta, rope_pct and rope_scaling.

    Transformers 4 and 5 spell them differently, and a file may hold both spellings, which must
    agree.
    """
    if family.theta is None:
        return {}
    found: dict[str, Any] = {}
    for table in ("rope_parameters", "rope_scaling"):
        values = content.get(table) or {}
        if not isinstance(values, dict):
            raise UserError(f"{table}={_text(values)} must be an object")
        for name, value in values.items():
            if name == "type":  # of older files
                name = "rope_type"
            if value is not None and found.setdefault(name, value) != value:
                raise UserError(
                    f"{table}.{_text(name)}={_text(value)} contradicts {_text(found[name])}; "
                    "remove one of the two"
                )
    for (names, default), key in (
        (family.theta, "rope_theta"),
        (family.fraction, "partial_rotary_factor"),
    ):
        first = content.get(names[0])
        found.setdefault(key, default if first is None else first)
        for name in names:
            if content.get(name) not in (None, found[key]):
                raise UserError(
                    f"{name}={_text(content[name])} contradicts {key}={_text(found[key])}; "
                    "remove one of the two"
                )
    kind = found.pop("rope_type", "default")
    if not isinstance(kind, str) or kind not in _ROPE_KEYS:
        raise UserError(
            f"rope_type={_text(kind)} is not supported; it must be one of {', '.join(_ROPE_KEYS)}"
        )
    known = {"rope_theta", "partial_rotary_factor", *_ROPE_KEYS[kind]}
    if kind == "llama3":
        known.add("original_max_position_embeddings")
    for name, value in found.items():
        if name not in known:
            raise UserError(
                f"{_text(name)}={_text(value)} is not supported with rope_type={kind}; remove it if "
                "the model does not use it"
            )
        if type(value) not in (int, float) or not 0 < value <= 1e30:
            raise UserError(f"{name}={_text(value)} must be a positive number")
    theta = float(found["rope_theta"])
    fraction = float(found["partial_rotary_factor"])
    if theta < 1:
        raise UserError(f"rope_theta={theta:g} must be at least 1")
    if fraction > 1:
        raise UserError(f"partial_rotary_factor={fraction:g} must be at most 1")
    if fraction < 1 and family.model_type != "gpt_neox":
        raise UserError(f"partial_rotary_factor={fraction:g} must be 1 for {family.model_type}")
    for name in _ROPE_KEYS[kind]:
        if name not in found:
            raise UserError(f"{name} is missing for rope_type={kind}; add it to config.json")
    factor = float(found.get("factor", 1.0))
    scaling = None
    if factor < 1:
        raise UserError(f"factor={factor:g} of rope_type={kind} must be at least 1")
    if kind != "default" and family.model_type == "gpt_neox":
        raise UserError(f"rope_type={kind} must be default for {family.model_type}")
    if kind == "linear" and factor > 1:
        scaling = RopeScaling(factor, kind="linear")
    elif kind == "llama3":
        low = float(found["low_freq_factor"])
        high = float(found["high_freq_factor"])
        if low >= high:
            raise UserError(f"low_freq_factor={low:g} must be below high_freq_factor={high:g}")
        original = int(found.get("original_max_position_embeddings", max_seq_len))
        scaling = RopeScaling(factor, low, high, original)
    return {"rope_theta": theta, "rope_pct": fraction, "rope_scaling": scaling}


def find_family(config: TransformerConfig) -> Family:
    """Returns the first family whose config.json expresses every option of the model.

    Raises:
        UserError: none does; the message names the options in the way.
    """
    nearest: tuple[Family, dict[str, Any]] | None = None
    reasons = []
    for family in FAMILIES.values():
        try:
            back = config_from_hf(_fields(config, family))
        except UserError as error:  # this family cannot express the sizes
            reasons.append(f"{family.model_type}: {error}")
            continue
        lost = dict[str, Any]()  # the options that the file cannot express, and what it would say
        for name in _EXPORTED:
            if getattr(back, name) != getattr(config, name):
                lost[name] = getattr(back, name)
        if not lost:
            return family
        if nearest is None or len(lost) < len(nearest[1]):
            nearest = family, lost
    if nearest is None:
        raise UserError(
            f"no Hugging Face family supports the sizes of this model ({reasons[0]}); to export a model, "
            "train a variant of --list_variants"
        )
    family, lost = nearest
    options = ", ".join(
        f"--{name}={getattr(config, name)} (not {value})" for name, value in lost.items()
    )
    raise UserError(
        f"{options} is not supported by {family.architecture}, the nearest class of transformers; to "
        "export a model, train it with the values in parentheses"
    )


def config_to_hf(
    config: TransformerConfig, dtype: str = "float32", eos_id: Any = None, bos_id: int | None = None
) -> dict[str, Any]:
    """Returns the content of config.json. Raises: UserError if no family has the model's options."""
    family = find_family(config)
    return {
        "architectures": [family.architecture],
        **_fields(config, family),
        "bos_token_id": bos_id,  # without it the class would take its own default
        "eos_token_id": eos_id,
        "torch_dtype": dtype,
        "dtype": dtype,
    }


def _fields(config: TransformerConfig, family: Family) -> dict[str, Any]:
    """Returns the fields of config.json that say the model.

    RoPE is written in both spellings: transformers 4 would otherwise fall back to a theta of 10,000
    silently.
    """
    content: dict[str, Any] = {"model_type": family.model_type}
    content |= {name: getattr(config, option) for name, option in family.fields.items()}
    content |= {name: values[0] for name, values in family.only.items()}
    if family.model_type == "llama":
        content |= {"attention_bias": config.bias, "mlp_bias": config.bias}
    if family.model_type == "mistral":
        content["sliding_window"] = config.attn_window or None
    if family.model_type in ("qwen2", "qwen3"):
        content["use_sliding_window"] = False
    gelus = {ours: theirs for theirs, ours in reversed(_GELUS.items())}  # the first name of each
    if family.model_type == "gpt2":
        content["activation_function"] = gelus.get(config.activation, "gelu")
        content["embd_pdrop"] = config.dropout
    if family.model_type == "gpt_neox":
        gelus["gelu_tanh"] = "gelu_fast"  # as in NeoX-20B
        content["hidden_act"] = gelus.get(config.activation, "gelu")
    if family.theta is not None:
        content |= _rope_fields(config, family, theta_name=family.theta[0][0])
    return content


def _rope_fields(config: TransformerConfig, family: Family, theta_name: str) -> dict[str, Any]:
    scaling = config.rope_scaling
    rope: dict[str, Any] = {"rope_type": "default"}
    if scaling is not None:
        rope = {"rope_type": scaling.kind, "factor": scaling.factor}
        if scaling.kind == "llama3":
            rope["low_freq_factor"] = scaling.low_freq_factor
            rope["high_freq_factor"] = scaling.high_freq_factor
            rope["original_max_position_embeddings"] = scaling.original_max_len
    content: dict[str, Any] = {"rope_scaling": None if scaling is None else dict(rope)}
    content[theta_name] = config.rope_theta
    content["rope_theta"] = config.rope_theta
    rope["rope_theta"] = config.rope_theta
    if family.model_type == "gpt_neox":
        content["rotary_pct"] = config.rope_pct
        rope["partial_rotary_factor"] = config.rope_pct
    content["rope_parameters"] = rope
    return content


def check_matches_checkpoint(
    config: TransformerConfig, checkpoint: TransformerConfig, section: ModelConfig
) -> None:
    """Raises UserError if the model of a run is not the one of the checkpoint that initializes it."""
    for name in _EXPORTED:
        expected = getattr(checkpoint, name)
        value = getattr(config, name)
        if value != expected and name not in ("vocab_size", "max_seq_len"):
            rule = f"does not match --init_from_hf={section.init_from_hf} ({expected})"
            raise UserError(f"--{name}={value} {rule}; remove --{name}")
    if config.pos_emb == "learned" and config.max_seq_len != checkpoint.max_seq_len:
        name = "max_seq_len" if section.max_seq_len else "seq_length"
        rule = f"does not match the {checkpoint.max_seq_len} learned positions of --init_from_hf"
        raise UserError(
            f"--{name}={config.max_seq_len} {rule}; set --{name}={checkpoint.max_seq_len}"
        )
    grows = config.vocab_size > checkpoint.vocab_size and section.init_new_tokens == "mean"
    if config.vocab_size != checkpoint.vocab_size and not grows:
        raise UserError(
            f"--init_from_hf={section.init_from_hf} has {checkpoint.vocab_size} tokens, the data or "
            f"--vocab_size {config.vocab_size}; prepare the data with the tokenizer of the checkpoint, or set "
            "--init_new_tokens=mean for a larger vocabulary"
        )
