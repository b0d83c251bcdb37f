"""Fields of config.json, each as the class of its model_type reads it."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import fms_fsdp
from fms_fsdp.errors import UserError, note_once
from fms_fsdp.hf.families import FAMILIES as TYPES
from fms_fsdp.hf.families import config_from_hf, config_to_hf
from fms_fsdp.models.flops import num_params
from fms_fsdp.models.variants import VARIANTS
from tests.hf_folders import FAMILIES, weights_of, write_folder, write_weights

CONFIGS = json.loads(Path(__file__).with_name("real_configs.json").read_text())
PARAMETERS = {
    "llama2_7b": 6_738_415_616,
    "llama3_8b": 8_030_261_248,
    "llama31_8b": 8_030_261_248,
    "llama32_1b": 1_235_814_400,
    "tinyllama": 1_100_048_384,
    "smollm2_135m": 134_515_008,
    "deepseek_coder_1b": 1_346_471_936,
    "mistral_v01": 7_241_732_096,
    "qwen2_05b": 494_032_768,
    "qwen25_05b": 494_032_768,
    "r1_distill_qwen_15b": 1_777_088_000,
    "qwen3_06b": 596_049_920,
    "gpt2": 124_439_808,
    "pythia_70m": 70_426_624,
    "neox_20b": 20_554_567_680,
}
HARMLESS: dict[str, Any] = {
    "activation": "swiglu",  # Falcon3, beside hidden_act
    "custom_pipelines": {"text-generation": {"impl": "x.Y", "pt": "AutoModelForCausalLM"}},
    "normalize_attention_scores": True,  # GPT-SW3
    "apply_query_key_layer_scaling": True,
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
    "use_new_trick": False,
}


def content_of(kind: str, **changes: Any) -> dict[str, Any]:
    content = config_to_hf(FAMILIES[kind]) | {"model_type": kind} | changes
    return {name: value for name, value in content.items() if value is not ...}


@pytest.mark.parametrize("name", CONFIGS)
def test_published_config_is_read(name: str) -> None:
    assert num_params(config_from_hf(CONFIGS[name])) == PARAMETERS[name]


def test_gelu_fast_of_neox_is_tanh_gelu() -> None:
    config = config_from_hf(CONFIGS["neox_20b"])
    assert config == replace(VARIANTS["neox_20b"], vocab_size=50432, vocab_multiple_of=1)
    assert config_to_hf(config)["hidden_act"] == "gelu_fast"


@pytest.mark.parametrize(
    "name", "7b llama3.1_8b llama3.2_1b qwen2.5_7b pythia_70m gpt3_125m".split()
)
def test_written_config_is_read_as_same_shape(name: str) -> None:
    variant = VARIANTS[name]
    content = config_to_hf(variant, "bfloat16", 2)
    assert content["torch_dtype"] == content["dtype"] == "bfloat16"  # transformers 4 and 5
    if variant.pos_emb == "rope":
        assert content["rope_parameters"]["rope_theta"] == content["rope_theta"]
        assert (content["rope_scaling"] is None) == (variant.rope_scaling is None)
    found = config_from_hf(json.loads(json.dumps(content)))
    assert replace(found, vocab_multiple_of=variant.vocab_multiple_of) == variant


@pytest.mark.parametrize("kind", FAMILIES)
def test_harmless_fields_are_ignored(kind: str) -> None:
    assert config_from_hf(content_of(kind, **HARMLESS)) == config_from_hf(content_of(kind))
    for field in ({"resid_multiplier": 0.5}, {"pruned_heads": {"0": [1]}}, {"use_new_trick": True}):
        with pytest.raises(UserError, match=f"{[*field][0]}=.* is not supported"):
            config_from_hf(content_of(kind, **field))


def test_both_spellings_of_rope_are_read() -> None:
    bare = content_of("llama", rope_theta=..., rope_scaling=..., rope_parameters=...)
    assert config_from_hf(bare).rope_theta == 10_000
    linear = {"rope_theta": 5e5, "rope_scaling": {"type": "linear", "factor": 4.0}}
    old = config_from_hf(bare | linear)
    assert old.rope_scaling is not None
    assert (old.rope_theta, old.rope_scaling.kind) == (5e5, "linear")
    new = {"rope_type": "linear", "factor": 4.0, "rope_theta": 5e5}
    assert config_from_hf(bare | {"rope_parameters": new}) == old
    both = {"rope_parameters": new, "rope_theta": 5e5, "rope_scaling": new}
    assert config_from_hf(bare | both) == old


LLAMA3_ROPE = {"rope_type": "llama3", "factor": 2.6666667}
LLAMA3_ROPE |= {"low_freq_factor": 1, "high_freq_factor": 4}


@pytest.mark.parametrize(
    ("kind", "changes"),
    [
        ("mistral", {"layer_types": ["sliding_attention"] * 2}),
        ("qwen3", {"sliding_window": 5, "use_sliding_window": False, "max_window_layers": 0}),
        ("llama", {"rope_theta": ..., "rope_parameters": {"rope_type": "default"}}),
        ("llama", {"rope_theta": ..., "rope_parameters": ..., "rope_scaling": LLAMA3_ROPE}),
        ("llama", {"sliding_window": 5, "use_sliding_window": False, "max_window_layers": 1}),
        ("gpt_neox", {"rotary_pct": 0.5, "rope_parameters": ..., "hidden_act": "gelu_fast"}),
    ],
)
def test_field_means_what_transformers_reads(
    kind: str, changes: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from transformers import AutoConfig, AutoModelForCausalLM

    note_once.cache_clear()
    folder = write_folder(tmp_path / "hf", kind, **changes)
    ours, _ = fms_fsdp.load_model(str(folder))
    assert not [line for line in capsys.readouterr().err.splitlines() if "note: " in line]
    config: Any = AutoConfig.from_pretrained(folder)
    theirs: Any = AutoModelForCausalLM.from_pretrained(folder, config=config).eval()
    tokens = torch.randint(0, 300, (2, 40), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        torch.testing.assert_close(ours(tokens), theirs(tokens).logits, rtol=0, atol=1e-5)


@pytest.mark.parametrize(
    ("kind", "changes", "text"),
    [
        (
            "llama",
            {"model_type": "bloom"},
            "model_type=bloom is not supported; it must be one of llama",
        ),
        ("llama", {"hidden_size": ...}, "hidden_size is missing"),
        ("llama", {"new_trick": 0}, "^new_trick=0 is not supported for "),
        ("llama", {"is_causal": False}, "is_causal=False is not supported"),
        ("llama", {"attention_multiplier": 0}, "attention_multiplier=0 is not supported"),
        ("llama", {"pretraining_tp": 2}, "pretraining_tp=2 is not supported"),
        (
            "llama",
            {"quantization_config": {"bits": 4}},
            r"^quantized weights \(quantization_config .*; use a checkpoint of this model with fp32",
        ),
        ("llama", {"use_sliding_window": True}, "use_sliding_window=True is not supported"),
        ("llama", {"sliding_window": 5}, "sliding_window=5 is not supported for llama"),
        (
            "qwen3",
            {"use_sliding_window": True, "max_window_layers": 2},
            "use_sliding_window=True is not supported",
        ),
        (
            "qwen3",
            {"layer_types": ["full_attention", "sliding_attention"]},
            "must be full_attention",
        ),
        ("qwen3", {"layer_types": ["full_attention"]}, "layer_types=.* must be full_attention"),
        ("mistral", {"layer_types": ["full_attention"] * 2}, "must be sliding_attention"),
        ("gpt2", {"embd_pdrop": 0.2, "resid_pdrop": 0.1}, "embd_pdrop=0.2 must equal resid_pdrop"),
        ("gpt2", {"scale_attn_weights": False}, "scale_attn_weights=False is not supported"),
        ("gpt2", {"scale_attn_by_inverse_layer_idx": True}, "scale_attn_by_inverse_layer_idx"),
        ("gpt2", {"hidden_act": "gelu"}, "hidden_act=gelu is not supported"),
        ("gpt2", {"hidden_size": 64}, "hidden_size=64 is not supported for gpt2"),
        ("qwen2", {"tie_word_embeddings": 1}, "tie_word_embeddings=1 must be true or false"),
        (
            "llama",
            {"attention_bias": True},
            "^attention_bias=True and mlp_bias=False must be equal",
        ),
        ("qwen3", {"attention_bias": True}, "^attention_bias=True is not supported"),
        ("gpt_neox", {"attention_bias": False}, "attention_bias=False is not supported"),
        (
            "gpt_neox",
            {"rope_theta": 5e5, "rope_parameters": ...},
            "rope_theta=500000.0 contradicts",
        ),
        ("gpt_neox", {"rotary_emb_base": 5e5}, "rotary_emb_base=500000.0 contradicts"),
        ("gpt_neox", {"partial_rotary_factor": 0.5}, "partial_rotary_factor=0.5 contradicts"),
        ("llama", {"partial_rotary_factor": 0.5}, "partial_rotary_factor=0.5 must be 1 for llama"),
        ("llama", {"rope_theta": 0}, "rope_theta=0 contradicts"),
        ("llama", {"rope_parameters": {"rope_theta": 0}}, "rope_theta=10000.0 contradicts"),
        ("llama", {"rope_parameters": {"factor": 8.0}}, "factor=8.0 is not supported"),
        ("llama", {"rope_parameters": {"rope_type": "yarn"}}, "rope_type=yarn is not supported"),
        ("llama", {"rope_parameters": {"rope_type": "linear"}}, "factor is missing for .*=linear"),
        ("llama", {"rope_parameters": ..., "rope_scaling": {"factor": "2"}}, "factor=2 .*"),
        ("llama", {"num_attention_heads": 5, "head_dim": ...}, "hidden_size must be divisible"),
        ("llama", {"num_key_value_heads": 3}, "num_attention_heads must be divisible"),
        ("llama", {"head_dim": 7}, r"head_dim=7 \(7\) must be even"),
    ],
)
def test_unsupported_field_is_rejected(kind: str, changes: dict[str, Any], text: str) -> None:
    with pytest.raises(UserError, match=text):
        config_from_hf(content_of(kind, **changes))


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.int32])
def test_quantized_weights_are_not_supported(dtype: torch.dtype, tmp_path: Path) -> None:
    folder = write_folder(tmp_path, "llama")
    weights = weights_of("llama")
    name = "model.layers.0.mlp.up_proj"
    weights[f"{name}.qweight"] = weights.pop(f"{name}.weight").to(dtype)
    write_weights(folder, weights)
    with pytest.raises(UserError, match=rf"quantized weights \({name}.qweight is .*; use a check"):
        fms_fsdp.load_model(str(folder))


@pytest.mark.parametrize("kind", FAMILIES)
def test_malformed_field_is_rejected(kind: str) -> None:
    family = TYPES[kind]
    names = [*family.fields, *family.only, *family.also.split(), "rope_scaling", "rope_parameters"]
    unused = ("max_window_layers", "sliding_window")  # by a Qwen without windows
    for name in names:
        for value in (-64, "false", [1], {"a": 1}, float("nan"), 10**300, None):
            try:
                config_from_hf(content_of(kind, **{name: value}))
            except UserError as error:
                assert "\n" not in str(error)
            else:
                assert value is None or name in unused, (name, value)


def test_defaults_are_those_of_transformers() -> None:
    from transformers import CONFIG_MAPPING

    for kind, family in TYPES.items():
        theirs = CONFIG_MAPPING[kind]()
        for name, default in family.defaults.items():
            if default is not None and hasattr(theirs, name):
                assert getattr(theirs, name) == default, (kind, name)
