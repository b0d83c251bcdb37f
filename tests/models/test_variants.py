"""The variants table, parameter counts and FLOPs."""

from __future__ import annotations

from dataclasses import replace
from fractions import Fraction

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from fms_fsdp.config import ModelConfig
from fms_fsdp.models.flops import (
    flops_per_token,
    matmul_flops_per_token,
    num_params,
    num_params_by_unit,
    recomputed_flops_per_token,
)
from fms_fsdp.models.llama import Llama
from fms_fsdp.models.variants import VARIANTS, LlamaConfig, register_variant, resolve_model
from fms_fsdp.parallel.activation import apply_activation_checkpointing, select_blocks

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
}
EXTRA = {
    "learned layernorm": LlamaConfig(
        2, 64, 96, 4, 2, 100, pos_emb="learned", norm="layernorm", max_seq_len=33
    ),
    "tied layernorm": LlamaConfig(2, 64, 96, 4, 1, 100, norm="layernorm", tie_embeddings=True),
}


def on_meta(config: LlamaConfig) -> Llama:
    with torch.device("meta"):
        return Llama(config)


@pytest.mark.parametrize("name, count", PUBLISHED.items())
def test_parameter_count_is_the_published_one(name: str, count: int) -> None:
    assert num_params(VARIANTS[name]) == count


@pytest.mark.parametrize("config", [*VARIANTS.values(), *EXTRA.values()], ids=[*VARIANTS, *EXTRA])
def test_formulas_equal_the_model_on_the_meta_device(config: LlamaConfig) -> None:
    model = on_meta(config)
    units = num_params_by_unit(config)
    assert sum(p.numel() for p in model.parameters()) == num_params(config)
    for module, unit in ((model.embed, "embed"), (model.blocks["0"], "block"), (model.head, "head")):
        assert sum(p.numel() for p in module.parameters()) == units[unit]


@pytest.mark.parametrize("name", VARIANTS)
def test_flops_equal_torchs_counter(name: str) -> None:
    """The counter sees no embedding lookup, but full attention, whose scores are computed twice."""
    config, seq = VARIANTS[name], 128
    model = on_meta(config)
    tokens = torch.zeros(2, seq, dtype=torch.long, device="meta")
    with FlopCounterMode(display=False) as counter:
        model(tokens).sum().backward()
    norms = (2 * config.num_layers + 1) * config.hidden_size
    attention = 12 * config.num_layers * config.hidden_size * seq
    expected = matmul_flops_per_token(config, seq) - 6 * norms
    counted = counter.get_total_flops() / (2 * seq)
    assert expected <= counted <= expected + attention / 6  # flash recomputes q k^T: 2 of 12


@pytest.mark.parametrize("config", EXTRA.values(), ids=EXTRA)
def test_matmul_flops_leave_the_lookup_out(config: LlamaConfig) -> None:
    tables = [
        p
        for name, p in on_meta(config).embed.named_parameters()
        if not (config.tie_embeddings and p.shape[0] == 100)
    ]
    looked_up = sum(table.numel() for table in tables)
    assert flops_per_token(config, 32) - matmul_flops_per_token(config, 32) == 6 * looked_up


@pytest.mark.parametrize("share", ["1", "1/2"])
@pytest.mark.parametrize("name", VARIANTS)
def test_recomputed_flops_equal_torchs_counter(name: str, share: str) -> None:
    config, seq = replace(VARIANTS[name], num_layers=4), 128
    counts = []
    for checkpointed in (False, True):
        model = on_meta(config)
        if checkpointed:
            apply_activation_checkpointing(model, Fraction(share))
        with FlopCounterMode(display=False) as counter:
            model(torch.zeros(2, seq, dtype=torch.long, device="meta")).sum().backward()
        counts.append(counter.get_total_flops() / (2 * seq))
    num_blocks = sum(select_blocks(config.num_layers, Fraction(share)))
    expected = (
        recomputed_flops_per_token(config, seq, num_blocks) - num_blocks * 2 * 2 * config.hidden_size
    )  # norms
    assert counts[1] - counts[0] == expected


def test_overrides_and_data_vocabulary_shape_the_model() -> None:
    config = resolve_model(ModelConfig(model_variant="7b", num_layers=1), seq_length=128, data_vocab_size=777)
    assert (config.num_layers, config.vocab_size, config.max_seq_len) == (1, 777, 128)
    assert resolve_model(ModelConfig(vocab_size=1024), seq_length=8, data_vocab_size=777).vocab_size == 1024
    assert resolve_model(ModelConfig(), seq_length=8).vocab_size == 32000
    heads = resolve_model(ModelConfig(num_attention_heads=64), seq_length=8)
    assert heads.num_kv_heads == 64 and heads.head_dim == 64
    assert resolve_model(ModelConfig(model_variant="LLAMA2_7b"), seq_length=4096) == VARIANTS["7b"]
    assert (
        resolve_model(
            ModelConfig(model_variant="llama3.2_1b", tie_embeddings=False), seq_length=8
        ).tie_embeddings
        is False
    )


@pytest.mark.parametrize(
    "flags, message",
    [
        (
            dict(model_variant="7bb"),
            r"--model_variant \(7bb\) is not known; did you mean 7b\? choose one of: 7b, 13b",
        ),
        (dict(model_variant="mamba_9.8b"), r"--model_variant \(mamba_9.8b\) is no Llama"),
        (dict(model_variant="zzz"), r"--model_variant \(zzz\) is not known; choose one of"),
        (
            dict(num_attention_heads=33),
            r"--num_attention_heads \(33\) must divide hidden_size \(4096\); valid: 1, 2, 4",
        ),
        (
            dict(num_kv_heads=5),
            r"--num_kv_heads \(5\) must divide num_attention_heads \(32\); valid: 1, 2, 4",
        ),
        (
            dict(vocab_size=100),
            r"--vocab_size \(100\) must not be below the data's vocabulary \(512\); .* 512",
        ),
        (dict(hidden_size=32), r"must leave an even head size .* not 1 = 32 / 32"),
    ],
)
def test_a_wrong_shape_is_refused_in_one_line(flags: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message) as error:
        resolve_model(ModelConfig(**flags), seq_length=8, data_vocab_size=512)  # type: ignore[arg-type]
    assert "\n" not in str(error.value)


FMS_FSDP = "llama2_70b llama2_34b llama2_13b llama2_7b llama2_1.4b llama3_8b llama3_8b_4k llama3_1.8b"
FMS_FSDP += " llama3_1.8b_4k llama3_3.2b llama3_3.2b_4k llama3_70b llama3_70b_4k llama3_194m_4k"


@pytest.mark.parametrize("name", FMS_FSDP.split())
def test_every_llama_of_fms_fsdp_is_found_by_its_name(name: str) -> None:
    config = resolve_model(ModelConfig(model_variant=name), seq_length=8)
    size = name.split("_")[1]
    billions = float(size.rstrip("bm")) / (1000 if size.endswith("m") else 1)
    own = config.vocab_size * config.hidden_size * 2 / 1e9  # the names count with or without the embeddings
    assert 0.98 * billions - own - 0.1 < num_params(config) / 1e9 < 1.13 * billions + own


def test_a_registered_variant_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fms_fsdp.models.variants.VARIANTS", dict(VARIANTS))
    register_variant("mine", EXTRA["tied layernorm"])
    assert resolve_model(ModelConfig(model_variant="mine"), seq_length=8).num_layers == 2
    with pytest.raises(ValueError, match=r"model variant \(7b\) is already defined"):
        register_variant("7b", VARIANTS["7b"])
