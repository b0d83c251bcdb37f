"""Our models as classes of Hugging Face name and describe them: a table of families.

    Family    which shapes its class holds │ its names of our weights │ what its config.json says

Source: https://huggingface.co/docs/transformers (model_doc/llama, mistral, qwen2, qwen3,
gpt2, gpt_neox).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch

from fms_fsdp.errors import UserError
from fms_fsdp.extras.hf_fields import TYPES
from fms_fsdp.models.build import build_model
from fms_fsdp.models.config import TransformerConfig


class HFWeight(NamedTuple):
    """A weight of Hugging Face: the names of our weights that make it, how they do, and its shape."""

    ours: tuple[str, ...]
    make: Callable[[Sequence[torch.Tensor]], torch.Tensor]
    shape: torch.Size = torch.Size()

    def made_of(self, read: Callable[[str], torch.Tensor]) -> torch.Tensor:
        """The weight of Hugging Face, made of our weights, which `read` gives by name."""
        return self.make(list(map(read, self.ours)))


class Packing(NamedTuple):
    """How several of our weights stand in one weight of Hugging Face: `join` packs our weights, `split` takes
    them out again, each with so many rows."""

    join: Callable[[TransformerConfig, Sequence[torch.Tensor]], torch.Tensor]
    split: Callable[[TransformerConfig, torch.Tensor, Sequence[int]], Sequence[torch.Tensor]]


@dataclass(frozen=True)
class Family:
    """A class of transformers.

    `holds`: values that fields of a shape must have, where they are not Llama's. `layer`: what begins the
    names within a layer. `inside` and `outside`: a module of transformers → our modules, of which several may
    stand in one. `packing`: how our weights of a layer become one weight there.
    """

    name: str
    model_type: str
    holds: Callable[[TransformerConfig], dict[str, tuple[Any, ...]]]
    layer: str
    inside: Mapping[str, str]
    outside: Mapping[str, str]
    packing: Packing


def _join_heads(config: TransformerConfig, weights: Sequence[torch.Tensor]) -> torch.Tensor:
    if len(weights) == 1:
        return weights[0]
    heads = [weight.view(config.num_attention_heads, -1, *weight.shape[1:]) for weight in weights]
    return torch.stack(heads, dim=1).flatten(0, 2)


def _split_heads(
    config: TransformerConfig, whole: torch.Tensor, rows: Sequence[int]
) -> Sequence[torch.Tensor]:
    if len(rows) == 1:
        return [whole]
    heads = whole.view(config.num_attention_heads, len(rows), -1, *whole.shape[1:])
    return [part.flatten(0, 1) for part in heads.unbind(1)]


AS_THEY_ARE = Packing(lambda config, weights: weights[0], lambda config, whole, rows: [whole])
# one behind the other, then as GPT-2 keeps its matrices; vectors stay vectors
_INPUT_BY_OUTPUT = Packing(
    lambda config, weights: torch.cat(tuple(weights)).t(),
    lambda config, whole, rows: torch.split(whole.t(), list(rows)),
)
# queries, keys and values of the first head, then of the second
_HEAD_BY_HEAD = Packing(_join_heads, _split_heads)


_LLAMA_INSIDE = {
    "input_layernorm": "attention_norm",
    "self_attn.q_proj": "attention.q_proj",
    "self_attn.k_proj": "attention.k_proj",
    "self_attn.v_proj": "attention.v_proj",
    "self_attn.o_proj": "attention.o_proj",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "feed_forward.gate_proj",
    "mlp.up_proj": "feed_forward.up_proj",
    "mlp.down_proj": "feed_forward.down_proj",
}
_LLAMA_OUTSIDE = {"model.embed_tokens": "embed", "model.norm": "head.norm", "lm_head": "head"}
_GPT2_INSIDE = {
    "ln_1": "attention_norm",
    "attn.c_attn": "attention.q_proj attention.k_proj attention.v_proj",
    "attn.c_proj": "attention.o_proj",
    "ln_2": "ffn_norm",
    "mlp.c_fc": "feed_forward.up_proj",
    "mlp.c_proj": "feed_forward.down_proj",
}
_GPT2_OUTSIDE = {
    "transformer.wte": "embed",
    "transformer.wpe": "embed.positions",
    "transformer.ln_f": "head.norm",
    "lm_head": "head",
}
_NEOX_INSIDE = {
    "input_layernorm": "attention_norm",
    "attention.query_key_value": "attention.q_proj attention.k_proj attention.v_proj",
    "attention.dense": "attention.o_proj",
    "post_attention_layernorm": "ffn_norm",
    "mlp.dense_h_to_4h": "feed_forward.up_proj",
    "mlp.dense_4h_to_h": "feed_forward.down_proj",
}
_NEOX_OUTSIDE = {
    "gpt_neox.embed_in": "embed",
    "gpt_neox.final_layer_norm": "head.norm",
    "embed_out": "head",
}
ACTIVATIONS = {"swiglu": "silu", "gelu": "gelu", "gelu_tanh": "gelu_new", "relu2": "relu2"}


def _plain(config: TransformerConfig) -> dict[str, tuple[Any, ...]]:
    """Returns the values that the two older classes hold."""
    heads = config.num_attention_heads
    return {
        "norm": ("layernorm",),
        "activation": ("gelu", "gelu_tanh", "relu2"),
        "bias": (True,),
        "num_kv_heads": (heads,),
        "head_dim": (config.hidden_size // heads,),
    }


_QWEN3_INSIDE = _LLAMA_INSIDE | {
    "self_attn.q_norm": "attention.q_norm",
    "self_attn.k_norm": "attention.k_norm",
}
FAMILIES = (
    Family(
        "Llama",
        "llama",
        lambda config: {"bias": (False, True)},
        "model.layers",
        _LLAMA_INSIDE,
        _LLAMA_OUTSIDE,
        AS_THEY_ARE,
    ),
    Family(
        "Mistral",
        "mistral",
        lambda config: {"attn_window": (config.attn_window,)},
        "model.layers",
        _LLAMA_INSIDE,
        _LLAMA_OUTSIDE,
        AS_THEY_ARE,
    ),
    Family(
        "Qwen3",
        "qwen3",
        lambda config: {"qk_norm": (True,)},
        "model.layers",
        _QWEN3_INSIDE,
        _LLAMA_OUTSIDE,
        AS_THEY_ARE,
    ),
    Family(
        "Qwen2",
        "qwen2",
        lambda config: {"qkv_bias": (True,)},
        "model.layers",
        _LLAMA_INSIDE,
        _LLAMA_OUTSIDE,
        AS_THEY_ARE,
    ),
    Family(
        "GPT2",
        "gpt2",
        lambda config: _plain(config) | {"pos_emb": ("learned",)},
        "transformer.h",
        _GPT2_INSIDE,
        _GPT2_OUTSIDE,
        _INPUT_BY_OUTPUT,
    ),
    Family(
        "GPTNeoX",
        "gpt_neox",
        lambda config: (
            _plain(config)
            | {
                "rope_pct": (config.rope_pct,),
                "parallel_residual": (False, True),
                "rope_scaling": (None,),
            }
        ),
        "gpt_neox.layers",
        _NEOX_INSIDE,
        _NEOX_OUTSIDE,
        _HEAD_BY_HEAD,
    ),
)
_OPTIONS = "norm pos_emb activation bias qk_norm attn_window attn_window_pattern parallel_residual rope_pct"
_OPTIONS += " model_builder qkv_bias"


def find_family(config: TransformerConfig) -> Family:
    """The first class that holds the shape.

    Raises:
        UserError: none does; it names what keeps the shape from the nearest.
    """
    obstacles = [(_differences(family, config), family) for family in FAMILIES]
    found, family = min(obstacles, key=lambda entry: len(entry[0]))
    if not found:
        return family
    parts = [
        f"--{name} ({getattr(config, name)}) must be {wanted}" for name, wanted in found.items()
    ]
    raise UserError(
        f"the model's {', '.join(parts)}: Hugging Face's {family.name}, the nearest class, has no other; "
        "the model cannot be exported"
    )


def _differences(family: Family, config: TransformerConfig) -> dict[str, str]:
    """Returns the fields that the class cannot hold, and the values that it would hold."""
    needed = {
        name: (TransformerConfig.__dataclass_fields__[name].default,) for name in _OPTIONS.split()
    }
    needed |= family.holds(config)
    wrong: dict[str, str] = {}
    for name, values in needed.items():
        if getattr(config, name) not in values:
            wrong[name] = " or ".join(str(value) or "empty" for value in values)
    return wrong


def hf_weights(config: TransformerConfig) -> dict[str, HFWeight]:
    """Returns by its name in Hugging Face how each weight is made of ours, in the order of the layers. Rows
    that fill up the vocabulary are left out."""
    family = find_family(config)
    positions = 1 if config.pos_emb == "rope" else config.max_seq_len  # no rotary table is computed
    with torch.device("meta"):
        ours = build_model(replace(config, max_seq_len=positions)).state_dict()
    outside: dict[str, HFWeight] = {}
    for their_module, module in family.outside.items():
        for kind in ("weight", "bias"):
            name = module if module in ours and kind == "weight" else f"{module}.{kind}"
            if name in ours:
                outside[f"{their_module}.{kind}"] = HFWeight((name,), _first_rows(config, name))
    inside: dict[str, HFWeight] = {}
    for layer in range(config.num_layers):
        for their_module, modules in family.inside.items():
            for kind in ("weight", "bias"):
                names = tuple(f"blocks.{layer}.{module}.{kind}" for module in modules.split())
                if names[0] in ours:
                    weight = HFWeight(names, lambda weights: family.packing.join(config, weights))
                    inside[f"{family.layer}.{layer}.{their_module}.{kind}"] = weight
    first, *last = outside.items()
    in_order = [first, *inside.items(), *last]
    return {
        name: each._replace(shape=each.made_of(ours.__getitem__).shape) for name, each in in_order
    }


def _first_rows(
    config: TransformerConfig, name: str
) -> Callable[[Sequence[torch.Tensor]], torch.Tensor]:
    rows = config.vocab_size if name in ("embed.weight", "head.weight") else None
    return lambda weights: weights[0][:rows]


def hf_config(
    config: TransformerConfig, dtype: str, eos_id: Any, bos_id: int | None = None
) -> dict[str, Any]:
    """The content of config.json; its end token may be several."""
    family = find_family(config)
    head = "ForCausalLM" if family.name != "GPT2" else "LMHeadModel"
    others, fields = _other_fields(config, family), dict[str, Any]()
    for name, field in TYPES[family.model_type].items():
        if field.ours:
            fields[name] = getattr(config, field.ours)
        elif name in others:
            fields[name] = others[name]
    return {
        "architectures": [family.name + head],
        "model_type": family.model_type,
        **fields,
        "bos_token_id": bos_id,  # the class's own default would be 1
        "eos_token_id": eos_id,
        "torch_dtype": dtype,
        "dtype": dtype,
    }


def _other_fields(config: TransformerConfig, family: Family) -> dict[str, Any]:
    """Returns the fields of config.json whose value is no field of our shape as it stands.

    What transformers 5 renamed stands there under both names: older readers would fall back to a theta of
    10,000 in silence.
    """
    rope: dict[str, Any] = {"rope_type": "default"}
    if (scaling := config.rope_scaling) is not None:
        rope = {"rope_type": scaling.kind, "factor": scaling.factor}
        if scaling.kind == "llama3":
            rope["low_freq_factor"] = scaling.low_freq_factor
            rope["high_freq_factor"] = scaling.high_freq_factor
            rope["original_max_position_embeddings"] = scaling.original_max_len
    fields: dict[str, Any] = {
        "attention_bias": config.bias,
        "mlp_bias": config.bias,
        "embd_pdrop": config.dropout,
    }
    fields["activation_function" if family.name == "GPT2" else "hidden_act"] = ACTIVATIONS[
        config.activation
    ]
    fields["rope_scaling"] = None if scaling is None else rope
    fields["rope_parameters"] = {**rope, "rope_theta": config.rope_theta}
    fields["rope_theta"] = fields["rotary_emb_base"] = config.rope_theta
    if family.name == "GPTNeoX":
        fields["rotary_pct"] = config.rope_pct
        fields["rope_parameters"]["partial_rotary_factor"] = config.rope_pct
    if config.attn_window:
        fields["sliding_window"] = config.attn_window
    return fields
