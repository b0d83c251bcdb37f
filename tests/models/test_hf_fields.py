"""Fields of config.json, each as the class of its model_type reads it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

import fms_fsdp
from fms_fsdp.errors import UserError, note_once
from fms_fsdp.hf.config import FAMILIES as TYPES
from fms_fsdp.hf.config import config_from_hf, config_to_hf
from tests.hf_folders import FAMILIES, write_folder

HARMLESS: dict[str, Any] = {
    "is_llama_config": True,
    "_attn_implementation_autoset": True,
    "predict_special_tokens": True,
    "pruned_heads": {},
    "auto_map": {"AutoConfig": "x.Y"},
    "num_logits_to_keep": 1,
    "unsloth_version": "2025.1",
    "max_length": 20,
    "num_beams": 4,
    "_name_or_path": "a",
    "chunk_size_feed_forward": 0,
    "is_encoder_decoder": False,
}


def content_of(kind: str, **changes: Any) -> dict[str, Any]:
    content = config_to_hf(FAMILIES[kind]) | {"model_type": kind} | changes
    return {name: value for name, value in content.items() if value is not ...}


def difference(folder: Path) -> float:
    from transformers import AutoConfig, AutoModelForCausalLM, MistralConfig, MistralForCausalLM

    ours, _ = fms_fsdp.load_model(str(folder))
    is_mistral = json.loads((folder / "config.json").read_text())["model_type"] == "mistral"
    config: Any = (MistralConfig if is_mistral else AutoConfig).from_pretrained(folder)
    opener: Any = MistralForCausalLM if is_mistral else AutoModelForCausalLM
    theirs = opener.from_pretrained(folder, config=config).eval()
    tokens = torch.randint(0, 300, (2, 40), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        return float((theirs(tokens).logits - ours(tokens)).abs().max())


@pytest.mark.parametrize("kind", FAMILIES)
def test_harmless_fields_are_passed_over_in_every_type(kind: str) -> None:
    assert config_from_hf(content_of(kind, **HARMLESS)) == config_from_hf(content_of(kind))
    with pytest.raises(UserError, match="resid_multiplier=0.5 is not supported"):
        config_from_hf(content_of(kind, resid_multiplier=0.5))
    with pytest.raises(UserError, match="pruned_heads"):
        config_from_hf(content_of(kind, pruned_heads={"0": [1]}))


@pytest.mark.parametrize(
    ("kind", "changes", "note"),
    [
        ("mistral", {"layer_types": ["sliding_attention"] * 2}, ""),
        ("qwen3", {"sliding_window": 5, "use_sliding_window": False, "max_window_layers": 0}, ""),
        ("llama", {"rope_theta": ..., "rope_parameters": {"rope_type": "default"}}, ""),
        (
            "llama",
            {
                "rope_theta": ...,
                "rope_parameters": ...,
                "rope_scaling": {
                    "rope_type": "llama3",
                    "factor": 2.6666667,
                    "low_freq_factor": 1,
                    "high_freq_factor": 4,
                },
            },
            "",
        ),
        ("gpt_neox", {"rotary_pct": 0.5, "rope_parameters": ..., "hidden_act": "gelu_fast"}, ""),
    ],
)
def test_a_field_means_what_it_means_to_the_class_of_its_type(
    kind: str,
    changes: dict[str, Any],
    note: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    note_once.cache_clear()
    folder = write_folder(tmp_path / "hf", kind, **changes)
    assert difference(folder) <= 1e-5
    told = [
        line
        for line in capsys.readouterr().err.splitlines()
        if line.startswith("note: ") and "_" in line
    ]
    assert any(note in line for line in told) if note else not told


@pytest.mark.parametrize(
    ("kind", "changes", "text"),
    [
        (
            "qwen3",
            {"use_sliding_window": True, "max_window_layers": 1},
            "use_sliding_window=True is not supported",
        ),
        ("qwen3", {"use_sliding_window": True, "max_window_layers": 2}, "use_sliding_window=True"),
        ("llama", {"sliding_window": 5}, "sliding_window=5 is not supported for llama"),
        ("gpt_neox", {"sliding_window": 5}, "sliding_window=5 is not supported"),
        (
            "mistral",
            {"layer_types": ["full_attention"] * 2},
            "all layers must be sliding_attention",
        ),
        ("llama", {"is_causal": False}, "is_causal=False is not supported"),
        ("gpt2", {"embd_pdrop": 0.2, "resid_pdrop": 0.1}, "embd_pdrop=0.2 must equal resid_pdrop"),
        ("gpt2", {"scale_attn_weights": False}, "scale_attn_weights=False is not supported"),
        ("qwen2", {"tie_word_embeddings": 1}, "tie_word_embeddings=1 must be true or false"),
        (
            "llama",
            {"rope_parameters": {"rope_type": "default", "factor": 8.0}},
            "factor=8.0 is not supported",
        ),
        (
            "qwen3",
            {"layer_types": ["full_attention", "sliding_attention"]},
            "layer_types=.* all layers must be full_attention",
        ),
        (
            "qwen3",
            {"layer_types": ["full_attention"]},
            "layer_types=.* all layers must be full_attention",
        ),
        (
            "llama",
            {"attention_bias": True},
            "^attention_bias=True and mlp_bias=False must be equal",
        ),
        ("qwen3", {"attention_bias": True}, "^attention_bias=True is not supported"),
        ("mistral", {"attention_bias": True}, "^attention_bias=True is not supported"),
        (
            "gpt_neox",
            {"rope_theta": 5e5, "rope_parameters": ...},
            "rope_theta=500000.0 contradicts",
        ),
        (
            "gpt_neox",
            {"rotary_emb_base": 5e5},
            "rotary_emb_base=500000.0 contradicts",
        ),
        ("gpt_neox", {"attention_bias": False}, "attention_bias=False is not supported"),
        (
            "gpt2",
            {"hidden_act": "gelu"},
            "hidden_act=gelu is not supported",
        ),
        ("gpt2", {"hidden_size": 64}, "hidden_size=64 is not supported for gpt2"),
        ("gpt2", {"scale_attn_by_inverse_layer_idx": True}, "scale_attn_by_inverse_layer_idx"),
        ("llama", {"rope_theta": 0}, "rope_theta=0 contradicts"),
        (
            "llama",
            {"rope_parameters": {"rope_theta": 0}},
            "rope_theta=10000.0 contradicts rope_theta=0",
        ),
        (
            "llama",
            {"rope_parameters": {"rope_type": "linear"}},
            "factor is missing for rope_type=linear",
        ),
        (
            "llama",
            {"rope_parameters": ..., "rope_scaling": {"factor": "2"}},
            "factor=2 .*",
        ),
        ("llama", {"hidden_act": "gelu"}, "hidden_act=gelu is not supported"),
        ("llama", {"num_attention_heads": 5, "head_dim": ...}, "hidden_size must be divisible"),
        ("llama", {"num_key_value_heads": 3}, "num_attention_heads must be divisible"),
        ("llama", {"head_dim": 7}, r"head_dim=7 \(7\) must be even"),
    ],
)
def test_what_disagrees_or_our_models_do_not_do_is_refused_by_its_name(
    kind: str, changes: dict[str, Any], text: str
) -> None:
    with pytest.raises(UserError, match=text):
        config_from_hf(content_of(kind, **changes))


@pytest.mark.parametrize("kind", FAMILIES)
def test_malformed_field_is_rejected(kind: str) -> None:
    family = TYPES[kind]
    names = [*family.fields, *family.only, *family.also.split(), "rope_scaling", "rope_parameters"]
    for name in names:
        for value in (-64, "false", [1], {"a": 1}, float("nan"), 10**300, None):
            try:
                config_from_hf(content_of(kind, **{name: value}))
            except UserError as error:
                assert "\n" not in str(error)
            else:  # max_window_layers and sliding_window have no effect in a Qwen without windows
                assert value is None or name in ("max_window_layers", "sliding_window"), (
                    name,
                    value,
                )


def test_defaults_are_those_of_transformers() -> None:
    from transformers import CONFIG_MAPPING

    for kind, family in TYPES.items():
        theirs = CONFIG_MAPPING[kind]()
        for name, default in family.defaults.items():
            if default is not None and hasattr(theirs, name):
                assert getattr(theirs, name) == default, (kind, name)
