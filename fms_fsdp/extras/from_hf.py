"""A config.json of Hugging Face → the shape of our model: the inverse of hf.py.

    config.json ── each field by the table of its model_type (hf_fields.py) ──> TransformerConfig

Fields mean what they mean to the class of transformers. What a config.json says and our models do not do is
refused by its name.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any

from fms_fsdp.config import ModelConfig, flag_table
from fms_fsdp.errors import UserError, note_once
from fms_fsdp.extras.hf import find_family
from fms_fsdp.extras.hf_fields import GELUS, HARMLESS, NEUTRAL, NOT_READ, SHARE, THETA, TYPES
from fms_fsdp.extras.typed_json import TEXT, number, or_none, quoted, read_table, whole
from fms_fsdp.models.config import RopeScaling, TransformerConfig

_SHAPES: dict[str, dict[str, Any]] = {
    "qwen2": {"qkv_bias": True},
    "qwen3": {"qk_norm": True},
    "gpt2": {"norm": "layernorm", "pos_emb": "learned", "bias": True},
    "gpt_neox": {"norm": "layernorm", "bias": True},
}
_STRETCH = number(1, 1e6)
# of rope_scaling and rope_parameters
_ROPE_KINDS = {
    "rope_type": TEXT,
    "factor": _STRETCH,
    "low_freq_factor": _STRETCH,
    "high_freq_factor": _STRETCH,
    "original_max_position_embeddings": whole(1, 1 << 31),
    "rope_theta": THETA,
    "partial_rotary_factor": SHARE,
}


def read_shape(path: Path) -> TransformerConfig:
    """The shape that the file, a config.json, describes.

    Raises:
        UserError: it cannot be read, or as `config_from_hf`.
    """
    if not path.is_file():
        raise UserError(f"{path.parent} must hold {path.name}; name a folder of Hugging Face")
    content = read_table(path)
    try:
        return config_from_hf(content)
    except UserError as error:
        raise UserError(f"{path} describes no model of this package: {error}") from None


def config_from_hf(content: Mapping[str, Any]) -> TransformerConfig:
    """The shape that a config.json describes. A line tells what the class does not look at.

    Raises:
        UserError: a class that is not in the table, a field that is missing, of another type, or one that
            says what our models do not do; the text names the field.
    """
    kind = content.get("model_type")
    if not isinstance(kind, str) or kind not in TYPES:
        raise UserError(f"model_type ({quoted(kind)}) must be one of {', '.join(TYPES)}")
    said = _read_fields(kind, content)
    _refuse_others(kind, content)
    shape = {field.ours: said[name] for name, field in TYPES[kind].items() if field.ours}
    shape |= _SHAPES.get(kind, {})
    shape["ffn_hidden_size"] = shape["ffn_hidden_size"] or 4 * shape["hidden_size"]
    shape["num_kv_heads"] = shape.get("num_kv_heads") or shape["num_attention_heads"]
    shape["head_dim"] = shape.get("head_dim") or 0
    shape["attn_dropout"] = shape["attn_dropout"] or 0.0
    _check_heads(shape)
    if "mlp_bias" in TYPES[kind]:
        shape |= {"activation": "swiglu", "bias": _biases(said)}
    else:
        shape["activation"] = GELUS[said["activation_function" if kind == "gpt2" else "hidden_act"]]
    shape["attn_window"] = _window(kind, said)
    if kind == "gpt2":
        _check_gpt2(said)
    else:
        shape |= _rope(kind, said)
    config = TransformerConfig(**shape)
    if config.pos_emb == "rope" and (config.rotary_dim % 2 or not config.rotary_dim):
        dim = f"{config.rotary_dim} = {config.rope_pct:g} x {config.head_dim}"
        raise UserError(
            f"head_dim ({config.head_dim}) must leave an even part of a head to rotate, not {dim}"
        )
    find_family(config)
    return config


def _read_fields(kind: str, content: Mapping[str, Any]) -> dict[str, Any]:
    """Every field of the type: as said, or the class's usual value."""
    said: dict[str, Any] = {}
    for name, field in TYPES[kind].items():
        names = [each for each in (name, field.other) if each in content]
        values = [field.kind.check(each, content[each]) for each in names]
        if not values and field.usual is ...:
            raise UserError(f"{name} is missing")
        if any(value != values[0] for value in values):
            raise UserError(f"{names[0]} ({values[0]}) and {names[1]} ({values[1]}) must agree")
        said[name] = values[0] if values else field.usual
    return said


def _refuse_others(kind: str, content: Mapping[str, Any]) -> None:
    """Raises UserError for a field that is in no table; one that says null or false is a switch that is
    off."""
    fields = TYPES[kind]
    known = HARMLESS | set(fields) | {field.other for field in fields.values()}
    for name, value in content.items():
        if name in known:
            continue
        if name in NOT_READ:
            if NOT_READ[name].check(name, value) is not None:
                note_once(f"{name} ({value}) has no effect in a {kind}, as in transformers")
        elif name == "layer_types" and value is not None:
            if not isinstance(value, list) or any(each != "full_attention" for each in value):
                raise UserError(
                    f"layer_types ({quoted(value)}) must be full_attention alone in a {kind}"
                )
        elif not any(
            value == right and type(value) is type(right)
            for right in NEUTRAL.get(name, (None, False))
        ):
            raise UserError(
                f"{quoted(name)} ({quoted(value)}) must be left out; our models have no such field"
            )


def _check_heads(shape: Mapping[str, Any]) -> None:
    hidden, heads, kv_heads = (
        shape[name] for name in ("hidden_size", "num_attention_heads", "num_kv_heads")
    )
    if hidden % heads and not shape["head_dim"]:
        raise UserError(f"num_attention_heads ({heads}) must divide hidden_size ({hidden})")
    if heads % kv_heads:
        raise UserError(
            f"num_key_value_heads ({kv_heads}) must divide num_attention_heads ({heads})"
        )


def _biases(said: Mapping[str, Any]) -> bool:
    """Whether the layers of a block have biases: all or none."""
    of_attention, of_mlp = bool(said["attention_bias"]), bool(said["mlp_bias"])
    if of_attention != of_mlp:
        names = ["attention_bias", "mlp_bias"]
        name, other = names if of_attention else names[::-1]
        raise UserError(
            f"{name} (True) must be False, as {other} is: here all linear layers have a bias, or none"
        )
    return of_attention


def _window(kind: str, said: Mapping[str, Any]) -> int:
    """The window of all layers; 0: none."""
    window, types = said.get("sliding_window"), said.get("layer_types")
    if kind == "mistral":
        read = "sliding_attention" if window else "full_attention"
        if types is not None and any(each != read for each in types):
            what = f"all layers have the window of {window}" if window else "no layer has a window"
            note_once(
                f"layer_types has no effect in a mistral, as in its class of transformers: {what}"
            )
        return window or 0
    if kind in ("qwen2", "qwen3"):
        layers, name = (
            said["num_hidden_layers"],
            "use_sliding_window" if types is None else "layer_types",
        )
        if types is None:
            is_on = said["use_sliding_window"] and window is not None
            types = ["sliding_attention" if is_on else "full_attention"] * max(
                0, layers - said.get("max_window_layers", 0)
            )
        elif len(types) != layers:
            raise UserError(
                f"layer_types ({len(types)} layers) must name each of num_hidden_layers ({layers})"
            )
        if any(each != "full_attention" for each in types):
            rule = f"must leave every layer without a window: a {kind} with one is not here"
            raise UserError(f"{name} ({quoted(said[name])}) {rule}")
    return 0


def _check_gpt2(said: Mapping[str, Any]) -> None:
    used, other = said["activation_function"], said["hidden_act"]
    if other is not None and GELUS[other] != GELUS[used]:
        raise UserError(
            f"hidden_act ({other}) must be the same function as activation_function ({used})"
        )
    if said["embd_pdrop"] != said["resid_pdrop"]:
        one = f"--dropout has one value for both, {said['resid_pdrop']:g}"
        note_once(f"embd_pdrop ({said['embd_pdrop']:g}) is not resid_pdrop; in training {one}")


def _rope(kind: str, said: Mapping[str, Any]) -> dict[str, Any]:
    """Theta, scaling and share, from the spelling of transformers 5, of 4, or both, which must agree."""
    is_neox, found = kind == "gpt_neox", dict[str, Any]()
    for table in ("rope_parameters", "rope_scaling"):
        for name, value in (said[table] or {}).items():
            name = "rope_type" if name == "type" else name
            if name not in _ROPE_KINDS:
                raise UserError(
                    f"{table}.{quoted(name)} ({quoted(value)}) must be left out: our models have none"
                )
            if or_none(_ROPE_KINDS[name]).check(f"{table}.{name}", value) is None:
                continue
            if name == "rope_type" and value not in ("default", "linear", "llama3"):
                raise UserError(f"{table} of type {quoted(value)} must be linear or llama3")
            if found.setdefault(name, value) != value:
                raise UserError(
                    f"{table}.{name} ({value}) and ({found[name]}) disagree; leave one out"
                )
    names = ("rotary_emb_base", "rope_theta") if is_neox else ("rope_theta",)
    theta = _agreed(found.get("rope_theta"), said, names, "rope_theta", 10_000.0)
    names = ("rotary_pct", "partial_rotary_factor") if is_neox else ("partial_rotary_factor",)
    share = _agreed(
        found.get("partial_rotary_factor"), said, names, "rotary_pct", 0.25 if is_neox else 1.0
    )
    if share != 1 and not is_neox:
        raise UserError(
            f"partial_rotary_factor ({share}) must be left out; a {kind} rotates whole heads"
        )
    scaling = _scaling(found, said["max_position_embeddings"])
    if scaling is not None and is_neox:
        raise UserError(f"rope_scaling of type {scaling.kind} must be left out of a {kind}")
    return {"rope_theta": float(theta), "rope_pct": float(share), "rope_scaling": scaling}


def _agreed(
    used: Any, said: Mapping[str, Any], names: tuple[str, ...], what: str, usual: float
) -> float:
    """Returns the value of the table of rope, else of the first of these fields, else `usual`; other fields
    must say the same."""
    first = "rope_parameters"
    if used is None:
        first = names[0]
        used = said[first] if said[first] is not None else usual
    for name in names:
        if said[name] is not None and said[name] != used:
            raise UserError(
                f"{name} ({said[name]}) and {first} ({what} {used}) disagree; leave one out"
            )
    return float(used)


def _scaling(found: Mapping[str, Any], positions: int) -> RopeScaling | None:
    kind = found.get("rope_type", "default")
    needed = {
        "linear": ["factor"],
        "llama3": ["factor", "low_freq_factor", "high_freq_factor"],
    }.get(kind, [])
    for name in needed:
        if name not in found:
            raise UserError(f"{name} of rope_scaling is missing; type {kind} needs {name}")
    if kind == "default" or (kind == "linear" and found["factor"] == 1):
        return None
    if kind == "linear":
        return RopeScaling(float(found["factor"]), kind=kind)
    factor, low, high = (float(found[name]) for name in needed)
    if low >= high:
        raise UserError(
            f"low_freq_factor ({low:g}) of rope_scaling must be below high_freq_factor ({high:g})"
        )
    return RopeScaling(factor, low, high, found.get("original_max_position_embeddings", positions))


def check_same(config: TransformerConfig, weights: TransformerConfig, section: ModelConfig) -> None:
    """Raises UserError where a run that begins with weights has another shape than the weights have."""
    table = flag_table(ModelConfig)
    names = {spec.name for spec in fields(TransformerConfig) if table[spec.name].resume == "fixed"}
    for name in sorted(names - {"z_loss", "vocab_multiple_of", "vocab_size"}):
        there, asked = getattr(weights, name), getattr(config, name)
        if there != asked:
            raise UserError(
                f"--{name} ({asked}) must be that of --init_from_hf ({there}); leave out the flag"
            )
    if config.pos_emb == "learned" and config.max_seq_len != weights.max_seq_len:
        flag = "max_seq_len" if section.max_seq_len else "seq_length"
        rule = f"must fit the {weights.max_seq_len} positions that --init_from_hf has learned"
        raise UserError(f"--{flag} ({config.max_seq_len}) {rule}; set the flag so")
    is_larger = config.vocab_size > weights.vocab_size and section.init_new_tokens == "mean"
    if config.vocab_size != weights.vocab_size and not is_larger:
        raise UserError(
            f"--init_from_hf ({section.init_from_hf}) has {weights.vocab_size} tokens and must have the "
            f"tokens of the data or of --vocab_size ({config.vocab_size}); prepare the data with its "
            "tokenizer, or give a larger vocabulary --init_new_tokens=mean"
        )
