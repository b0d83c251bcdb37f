"""The variants table, parameter counts and FLOPs."""

from __future__ import annotations

import json
from dataclasses import replace
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from fms_fsdp.config import ModelConfig, ParallelConfig, TrainConfig
from fms_fsdp.config.parse import parse_flags
from fms_fsdp.errors import UserError
from fms_fsdp.models.build import build_model
from fms_fsdp.models.config import TransformerConfig
from fms_fsdp.models.flops import (
    flops_per_token,
    matmul_flops_per_token,
    num_params,
    num_params_by_unit,
    recomputed_flops_per_token,
)
from fms_fsdp.models.llama import Llama
from fms_fsdp.models.variants import VARIANTS, register_variant, resolve_model
from fms_fsdp.parallel.activation_checkpointing import apply_activation_checkpointing, select_blocks

PUBLISHED = {
    "7b": 6_738_415_616,
    "13b": 13_015_864_320,
    "34b": 33_743_970_304,
    "70b": 68_976_648_192,
    "llama3_8b": 8_030_261_248,
    "llama3_70b": 70_553_706_496,
    "llama3.2_1b": 1_235_814_400,
    "llama3.2_3b": 3_212_749_824,
    "1.4b": 1_288_800_256,
    "194m": 194_008_064,
    "llama3.1_8b": 8_030_261_248,
    "llama3.1_70b": 70_553_706_496,
    "llama3.1_405b": 405_853_388_800,
    # https://huggingface.co/Qwen, HuggingFaceTB: the sizes of the weights
    "qwen2.5_0.5b": 494_032_768,
    "qwen2.5_1.5b": 1_543_714_304,
    "qwen2.5_3b": 3_085_938_688,
    "qwen2.5_7b": 7_615_616_512,
    "qwen2.5_14b": 14_770_033_664,
    "qwen2.5_32b": 32_763_876_352,
    "qwen2.5_72b": 72_706_203_648,
    "smollm2_135m": 134_515_008,
    "smollm2_360m": 361_821_120,
    "smollm2_1.7b": 1_711_376_384,
    # Biderman et al. 2023, https://github.com/EleutherAI/pythia; Black et al. 2022, table 1
    "pythia_14m": 14_067_712,
    "pythia_31m": 30_494_720,
    "pythia_70m": 70_426_624,
    "pythia_160m": 162_322_944,
    "pythia_410m": 405_334_016,
    "pythia_1b": 1_011_781_632,
    "pythia_1.4b": 1_414_647_808,
    "pythia_2.8b": 2_775_208_960,
    "pythia_6.9b": 6_857_302_016,
    "pythia_12b": 11_846_072_320,
    "neox_20b": 20_554_567_680,
}
# Brown et al. 2020, table 2.1, and others that are published as rounded numbers only, in millions
ROUNDED = {
    "gpt3_125m": 125,
    "gpt3_350m": 350,
    "gpt3_760m": 760,
    "gpt3_1.3b": 1300,
    "gpt3_2.7b": 2700,
    "gpt3_6.7b": 6700,
    "gpt3_13b": 13000,
    "gpt3_175b": 175000,
    "tr1_13b": 13000,
    "gpt_160m": 160,
}
EXTRA = {
    "biases of queries": TransformerConfig(2, 64, 96, 4, 2, 100, qkv_bias=True),
    "norms of queries": TransformerConfig(2, 64, 96, 4, 2, 100, qk_norm=True),
    "learned layernorm": TransformerConfig(
        2, 64, 96, 4, 2, 100, pos_emb="learned", norm="layernorm", max_seq_len=33
    ),
    "tied layernorm": TransformerConfig(
        2, 64, 96, 4, 1, 100, norm="layernorm", tie_embeddings=True
    ),
}
WINDOWS = TransformerConfig(3, 64, 96, 4, 2, 100, head_dim=24, attn_window=9, vocab_multiple_of=64)
WINDOWS = replace(WINDOWS, attn_window_pattern="LG", qk_norm=True, bias=True)
WINDOWS = replace(WINDOWS, norm="scalenorm", activation="relu2")
EXTRA["windows, wide heads, padded"] = WINDOWS
# a variant of each family and of each size of heads and vocabulary
FAMILIES = ["70b", "llama3.2_1b", "tiny", "qwen2.5_7b", "gpt_160m", "gpt3_125m", "pythia_70m"]


def test_window_counts_below_the_sequence_length() -> None:
    more = flops_per_token(WINDOWS, 32) - flops_per_token(WINDOWS, 9)
    assert more == 12 * 4 * 24 * (32 - 9)  # one layer of three
    assert WINDOWS.windows == (9, 0, 9)


def on_meta(config: TransformerConfig) -> Llama:
    with torch.device("meta"):
        return build_model(config)


def test_parameter_counts_are_the_published_ones() -> None:
    assert {name: num_params(VARIANTS[name]) for name in PUBLISHED} == PUBLISHED
    for name, millions in ROUNDED.items():
        assert num_params(VARIANTS[name]) == pytest.approx(millions * 1e6, rel=0.03), name


def test_parameter_formulas_equal_the_model() -> None:
    for config in (*VARIANTS.values(), *EXTRA.values()):
        config = replace(config, num_layers=min(3, config.num_layers))
        model, units = on_meta(config), num_params_by_unit(config)
        assert sum(p.numel() for p in model.parameters()) == num_params(config), config
        modules = {"embed": model.embed, "block": model.blocks["0"], "head": model.head}
        for unit, module in modules.items():
            assert sum(p.numel() for p in module.parameters()) == units[unit], config


def test_distance_bias_counts_as_an_embedding() -> None:
    tiny = replace(VARIANTS["tiny"], relative_buckets=9)
    plain, more = (replace(tiny, pos_emb=kind) for kind in ("none", "relative"))
    count = sum(parameter.numel() for parameter in on_meta(more).parameters())
    assert num_params(more) == count == num_params(plain) + 9 * 4
    assert num_params_by_unit(more)["embed"] == num_params_by_unit(plain)["embed"] + 9 * 4
    assert matmul_flops_per_token(more, 32) == matmul_flops_per_token(plain, 32)


def counted_flops(model: Llama, seq: int) -> float:
    """Returns the FLOPs per token of a forward and a backward pass, by the counter of torch."""
    with FlopCounterMode(display=False) as counter:
        model(torch.zeros(2, seq, dtype=torch.long, device="meta")).sum().backward()
    return counter.get_total_flops() / (2 * seq)


@pytest.mark.parametrize("name", FAMILIES)
def test_flops_equal_the_counter_of_torch(name: str) -> None:
    """The counter sees no embedding lookup, but full attention, whose scores are computed twice."""
    config, seq = replace(VARIANTS[name], num_layers=2), 128
    attention = 12 * config.num_layers * config.hidden_size * seq
    expected, counted = matmul_flops_per_token(config, seq), counted_flops(on_meta(config), seq)
    assert expected <= counted <= expected + attention / 6  # flash recomputes q k^T: 2 of 12


@pytest.mark.parametrize("config", EXTRA.values(), ids=EXTRA)
def test_matmul_flops_exclude_lookups(config: TransformerConfig) -> None:
    tables = on_meta(config).embed.named_parameters()
    other = sum(p.numel() for _, p in tables if not (config.tie_embeddings and p.shape[0] == 100))
    other += (config.padded_vocab_size - 100) * config.hidden_size  # of the head
    other += sum(p.numel() for p in on_meta(config).parameters() if p.ndim == 1)
    assert flops_per_token(config, 32) - matmul_flops_per_token(config, 32) == 6 * other


@pytest.mark.parametrize(
    ("name", "fraction"),
    [("70b", "1"), ("tiny", "1/2"), ("gpt3_350m", "1/2"), ("pythia_410m", "1")],
)
def test_recomputed_flops_equal_the_counter(name: str, fraction: str) -> None:
    config, seq = replace(VARIANTS[name], num_layers=4), 128
    plain, checkpointed = on_meta(config), on_meta(config)
    section = ParallelConfig(recompute="blocks", selective_checkpointing=fraction)
    apply_activation_checkpointing(checkpointed, section, compiled=False)
    num_blocks = sum(select_blocks(config.num_layers, Fraction(fraction)))
    expected = recomputed_flops_per_token(config, seq, num_blocks)
    assert counted_flops(checkpointed, seq) - counted_flops(plain, seq) == expected


def resolve(seq_length: int = 8, vocab: int | None = None, **flags: Any) -> TransformerConfig:
    return resolve_model(ModelConfig(**flags), seq_length=seq_length, data_vocab_size=vocab)


def test_flags_and_data_vocabulary_shape_the_model() -> None:
    config = resolve(128, 777, model_variant="7b", num_layers=1)
    assert (config.num_layers, config.vocab_size, config.max_seq_len) == (1, 777, 128)
    assert resolve(vocab=777, vocab_size=1024).vocab_size == 1024
    assert resolve().vocab_size == 32000
    wide = resolve(model_variant="7b", hidden_size=2048)
    assert wide.ffn_hidden_size == 5504 and wide.head_dim == 64  # 43 * 128
    assert resolve(hidden_size=4096, ffn_hidden_size=99).ffn_hidden_size == 99
    assert resolve(max_seq_len=32, head_dim=96).max_seq_len == 32
    scaled = resolve(rope_scaling="llama3:8")
    assert scaled.rope_scaling == VARIANTS["llama3.1_8b"].rope_scaling
    unscaled = resolve(model_variant="llama3.1_8b", rope_scaling="linear:1")
    assert unscaled == replace(VARIANTS["llama3_8b"], max_seq_len=8)
    heads = resolve(num_attention_heads=64)
    assert heads.num_kv_heads == 64 and heads.head_dim == 64
    assert resolve(4096, model_variant="LLAMA2_7b") == VARIANTS["7b"]
    assert not resolve(model_variant="llama3.2_1b", tie_embeddings=False).tie_embeddings


FMS_FSDP = (
    "llama2_70b llama2_34b llama2_13b llama2_7b llama2_1.4b llama3_8b llama3_8b_4k llama3_1.8b"
)
FMS_FSDP += " llama3_1.8b_4k llama3_3.2b llama3_3.2b_4k llama3_70b llama3_70b_4k llama3_194m_4k"


def test_names_of_upstream_fms_fsdp_are_found() -> None:
    for name in FMS_FSDP.split():
        config, size = resolve(model_variant=name), name.split("_")[1]
        billions = float(size.rstrip("bm")) / (1000 if size.endswith("m") else 1)
        tables = config.vocab_size * config.hidden_size * 2 / 1e9  # names count them or not
        assert 0.98 * billions - tables - 0.1 < num_params(config) / 1e9 < 1.13 * billions + tables


@pytest.mark.parametrize("window", [9, None])
def test_pattern_applies_to_the_window_of_a_file(tmp_path: Path, window: int | None) -> None:
    """It was rejected as a flag without effect."""
    content = {"model_type": "mistral", "hidden_size": 64, "intermediate_size": 96}
    content |= {"num_hidden_layers": 3, "num_attention_heads": 4, "vocab_size": 100}
    content |= {"max_position_embeddings": 64, "num_key_value_heads": 2, "rms_norm_eps": 1e-5}
    (tmp_path / "config.json").write_text(json.dumps(content | {"sliding_window": window}))
    argv = [f"--hf_config={tmp_path}", "--attn_window_pattern=GGL"]
    section = parse_flags(TrainConfig, argv).model
    if window:
        assert resolve_model(section, seq_length=32).windows == (0, 0, 9)
        return
    with pytest.raises(UserError, match=r"GGL has no effect without --attn_window"):
        resolve_model(section, seq_length=32)


def test_registered_variant_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fms_fsdp.models.variants.VARIANTS", dict(VARIANTS))
    register_variant("mine", EXTRA["tied layernorm"])
    assert resolve(model_variant="mine").num_layers == 2
    with pytest.raises(ValueError, match=r"model variant 7b is already defined"):
        register_variant("7b", VARIANTS["7b"])
