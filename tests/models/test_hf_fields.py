"""Fields of config.json, each as the class of its model_type reads it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

import fms_fsdp
from fms_fsdp.errors import UserError, note_once
from fms_fsdp.extras.from_hf import config_from_hf
from fms_fsdp.extras.hf import hf_config
from fms_fsdp.extras.hf_fields import TYPES
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
    content = hf_config(FAMILIES[kind], "float32", None) | {"model_type": kind} | changes
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
    with pytest.raises(UserError, match=r"resid_multiplier \(0.5\) must be left out"):
        config_from_hf(content_of(kind, resid_multiplier=0.5))
    with pytest.raises(UserError, match="pruned_heads"):
        config_from_hf(content_of(kind, pruned_heads={"0": [1]}))


@pytest.mark.parametrize(
    ("kind", "changes", "note"),
    [
        ("llama", {"sliding_window": 5}, "sliding_window (5) has no effect in a llama"),
        ("gpt_neox", {"sliding_window": 5}, "sliding_window (5) has no effect in a gpt_neox"),
        ("mistral", {"layer_types": ["full_attention"] * 2}, "all layers have the window of 7"),
        ("mistral", {"layer_types": ["sliding_attention"] * 2}, ""),
        ("qwen3", {"sliding_window": 5, "use_sliding_window": False, "max_window_layers": 0}, ""),
        ("qwen3", {"sliding_window": 5, "use_sliding_window": True, "max_window_layers": 2}, ""),
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
            r"use_sliding_window \(True\)",
        ),
        (
            "qwen3",
            {"layer_types": ["full_attention", "sliding_attention"]},
            "layer_types .* without a window",
        ),
        (
            "qwen3",
            {"layer_types": ["full_attention"]},
            r"layer_types \(1 layers\) .* num_hidden_layers \(2\)",
        ),
        ("llama", {"attention_bias": True}, r"^attention_bias \(True\) must be False, as mlp_bias"),
        ("qwen3", {"attention_bias": True}, r"^attention_bias \(True\)"),
        ("mistral", {"attention_bias": True}, r"^attention_bias \(True\)"),
        (
            "gpt_neox",
            {"rope_theta": 5e5, "rope_parameters": ...},
            r"rope_theta \(500000.0\) and rotary_emb_base",
        ),
        (
            "gpt_neox",
            {"rotary_emb_base": 5e5},
            r"rotary_emb_base \(500000.0\) and rope_parameters .* disagree",
        ),
        ("gpt_neox", {"attention_bias": False}, r"attention_bias \(False\) must be True"),
        (
            "gpt2",
            {"hidden_act": "gelu"},
            r"hidden_act \(gelu\) must be the same function as activation_function \(gelu_new\)",
        ),
        ("gpt2", {"hidden_size": 64}, r"n_embd \(32\) and hidden_size \(64\) must agree"),
        ("gpt2", {"scale_attn_by_inverse_layer_idx": True}, "scale_attn_by_inverse_layer_idx"),
        ("llama", {"rope_theta": 0}, r"rope_theta \(0\) must be a number from 1"),
        (
            "llama",
            {"rope_parameters": {"rope_theta": 0}},
            r"rope_parameters.rope_theta \(0\) must be a number",
        ),
        (
            "llama",
            {"rope_parameters": {"rope_type": "linear"}},
            "factor of rope_scaling is missing",
        ),
        (
            "llama",
            {"rope_parameters": ..., "rope_scaling": {"factor": "2"}},
            r"rope_scaling.factor \(2\) must be",
        ),
        ("llama", {"hidden_act": "gelu"}, r"hidden_act \(gelu\)"),
        (
            "llama",
            {"num_attention_heads": 5, "head_dim": ...},
            r"num_attention_heads \(5\) must divide",
        ),
        ("llama", {"num_key_value_heads": 3}, r"num_key_value_heads \(3\) must divide"),
        ("llama", {"head_dim": 7}, r"head_dim \(7\) must leave an even part"),
    ],
)
def test_what_disagrees_or_our_models_do_not_do_is_refused_by_its_name(
    kind: str, changes: dict[str, Any], text: str
) -> None:
    with pytest.raises(UserError, match=text):
        config_from_hf(content_of(kind, **changes))


@pytest.mark.parametrize("kind", FAMILIES)
def test_every_field_of_a_type_has_a_type(kind: str) -> None:
    for name in TYPES[kind]:
        for value in (-64, "false", [1], {"a": 1}, float("nan"), 10**300, None):
            try:
                config_from_hf(content_of(kind, **{name: value}))
            except UserError as error:
                assert "\n" not in str(error)
            else:
                assert value is None, (name, value)


TAKEN_OFF = {
    ("qwen2", "sliding_window"),
    ("qwen3", "sliding_window"),
}  # where use_sliding_window is off


def test_usual_values_are_those_of_transformers() -> None:
    from transformers import CONFIG_MAPPING

    for kind, fields in TYPES.items():
        theirs = CONFIG_MAPPING[kind]()
        for name, field in fields.items():
            is_said = field.usual not in (..., None) and hasattr(theirs, name)
            if is_said and (kind, name) not in TAKEN_OFF:
                assert getattr(theirs, name) == field.usual, (kind, name)
