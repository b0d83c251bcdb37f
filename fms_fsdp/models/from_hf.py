"""What a config.json of Hugging Face says of a model → our shape: the inverse of hf.py.

    config.json ── fields by the table below ──> LlamaConfig ── hf_config ──> must say again what was read

What a config.json says and the shape does not repeat is refused by its name, unless it changes no
mathematics.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fms_fsdp.errors import UserError
from fms_fsdp.models.hf import ACTIVATIONS, NAMES, hf_config
from fms_fsdp.models.variants import LlamaConfig, RopeScaling

# what a family's class takes for a field that its config.json leaves out, and what its shape always is
_GROUPED: dict[str, Any] = dict(
    hidden_act="silu", tie_word_embeddings=False, rms_norm_eps=1e-6, attention_bias=False,
    max_position_embeddings=2048,
)  # fmt: skip
_USUAL: dict[str, dict[str, Any]] = {
    "llama": _GROUPED,
    "mistral": _GROUPED | {"num_key_value_heads": 8, "sliding_window": 4096},
    "qwen3": _GROUPED | {"num_key_value_heads": 32, "head_dim": 128},
    "gpt2": dict(
        n_inner=None, activation_function="gelu_new", layer_norm_epsilon=1e-5, tie_word_embeddings=True,
        resid_pdrop=0.1, attn_pdrop=0.1, n_positions=1024,
    ),
    "gpt_neox": dict(
        hidden_act="gelu", rotary_pct=0.25, use_parallel_residual=True, attention_bias=True,
        tie_word_embeddings=False, layer_norm_eps=1e-5, hidden_dropout=0.0, max_position_embeddings=2048,
    ),
}  # fmt: skip
_SHAPES: dict[str, dict[str, Any]] = {
    "qwen3": {"qk_norm": True},
    "gpt2": {"norm": "layernorm", "pos_emb": "learned", "bias": True},
    "gpt_neox": {"norm": "layernorm"},
}
# fields that change no mathematics of training, or that stand under another name too
_HARMLESS = set(
    "architectures model_type torch_dtype dtype transformers_version use_cache bos_token_id eos_token_id "
    "pad_token_id _name_or_path id2label label2id return_dict output_attentions output_hidden_states "
    "n_ctx embd_pdrop hidden_dropout summary_activation summary_first_dropout summary_proj_to_labels "
    "summary_type summary_use_proj task_specific_params rotary_emb_base classifier_dropout "
    "reorder_and_upcast_attn max_window_layers tokenizer_class".split()
)
_READ = {"rope_scaling", "rope_parameters", "rope_theta", "hidden_act", "activation_function"}  # and checked
_NEUTRAL = {"pretraining_tp": 1, "scale_attn_weights": True}  # harmless with this value alone


def read_shape(path: Path) -> LlamaConfig:
    """The shape that the file, a config.json, describes.

    Raises:
        ValueError: it cannot be read, or as `config_from_hf`.
    """
    try:
        return config_from_hf(json.loads(path.read_text()))
    except OSError as error:
        rule = f"{path.parent} must hold {path.name} ({error.strerror})"
        raise UserError(f"{rule}; name a folder of Hugging Face") from None
    except (ValueError, TypeError, AttributeError, ArithmeticError, RecursionError) as error:
        raise UserError(f"{path} describes no model that there is here: {error}") from None


def config_from_hf(content: Mapping[str, Any]) -> LlamaConfig:
    """The shape that a config.json describes.

    Raises:
        ValueError: a class that is not in the table, a field that is missing, or one that says what our
            models do not do; the text names the field.
    """
    kind = str(content.get("model_type"))
    if kind not in _USUAL:
        raise UserError(f"model_type ({kind}) must be one of {', '.join(_USUAL)}")
    said = _USUAL[kind] | dict(content)
    shape: dict[str, Any] = dict(_SHAPES.get(kind, {}))
    for ours, theirs in NAMES.items():
        if (name := next((name for name in theirs.split() if name in said), None)) is not None:
            shape[ours] = said[name]
    missing = [name for name in ("hidden_size", "num_layers", "num_attention_heads") if name not in shape]
    if missing:
        raise UserError(f"{NAMES[missing[0]].split()[0]} is missing")
    shape["attn_window"] = shape.get("attn_window") or 0
    shape["ffn_hidden_size"] = shape.get("ffn_hidden_size") or 4 * shape["hidden_size"]
    shape["num_kv_heads"] = shape.get("num_kv_heads") or shape["num_attention_heads"]
    shape["head_dim"] = shape.get("head_dim") or 0
    activation = said.get("hidden_act", said.get("activation_function"))
    of_theirs = {name: "gelu_tanh" for name in ("gelu_pytorch_tanh", "gelu_fast")}
    of_theirs |= {theirs: ours for ours, theirs in ACTIVATIONS.items()}
    if activation not in of_theirs:
        raise UserError(f"hidden_act ({activation}) must be one of {', '.join(of_theirs)}")
    shape["activation"] = of_theirs[activation]
    if kind != "gpt2":
        shape |= _rope(content)
    config = LlamaConfig(**shape)
    _check_repeated(config, content)
    return config


def _rope(content: Mapping[str, Any]) -> dict[str, Any]:
    """Theta, scaling and share, from the spelling of transformers 5, of 4, or both."""
    spelled = []
    if (new := content.get("rope_parameters")) is not None:
        spelled.append(_read_rope(new))
    theta = content.get("rope_theta", content.get("rotary_emb_base"))
    if theta is not None or content.get("rope_scaling"):
        spelled.append(_read_rope({"rope_theta": theta} | dict(content.get("rope_scaling") or {})))
    if len(spelled) == 2 and any(spelled[0].get(key, value) != value for key, value in spelled[1].items()):
        raise UserError(f"rope_parameters ({new}) and rope_theta with rope_scaling disagree")
    return spelled[0] if spelled else {}


def _read_rope(entry: Mapping[str, Any]) -> dict[str, Any]:
    kind = entry.get("rope_type", entry.get("type", "default"))
    found: dict[str, Any] = {"rope_theta": float(entry.get("rope_theta") or 10_000.0), "rope_scaling": None}
    if "partial_rotary_factor" in entry:
        found["rope_pct"] = float(entry["partial_rotary_factor"])
    if kind == "linear":
        found["rope_scaling"] = RopeScaling(float(entry["factor"]), kind=kind)
    elif kind == "llama3":
        low, high = float(entry["low_freq_factor"]), float(entry["high_freq_factor"])
        length = int(entry["original_max_position_embeddings"])
        found["rope_scaling"] = RopeScaling(float(entry["factor"]), low, high, length)
    elif kind != "default":
        raise UserError(f"rope_scaling of type {kind} must be linear or llama3")
    return found


def _check_repeated(config: LlamaConfig, content: Mapping[str, Any]) -> None:
    """Raises ValueError for a field that our shape would not write again. One that is not known and says
    None or False is a switch that is off."""
    again = hf_config(config, "", None)
    for name, value in content.items():
        usual = again.get(name, ...)
        if name in _HARMLESS | _READ:
            continue
        if usual is not ...:
            right = value == usual or value is None or (not value and not usual)
        elif name == "layer_types" and value is not None:
            right = set(value) == {"full_attention"}
        elif name == "partial_rotary_factor":  # what transformers 4 write beside rotary_pct
            right = value == config.rope_pct
        elif name in _NEUTRAL:
            right = value == _NEUTRAL[name]
        else:
            right = value is None or value is False
        if not right:
            raise UserError(f"{name} ({value}) must be {'left out' if usual is ... else usual}")
