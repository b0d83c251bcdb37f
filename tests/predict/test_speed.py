"""The time of a step: its counts against the formulas of FLOPs, its links, and laws that must hold."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import pytest

from fms_fsdp.config import BF16, BatchPlan, ParallelConfig
from fms_fsdp.mesh import resolve_dims
from fms_fsdp.models.flops import matmul_flops_per_token, num_params_by_unit, recomputed_flops_per_token
from fms_fsdp.models.variants import VARIANTS, LlamaConfig, all_variants
from fms_fsdp.predict.curves import CURVES
from fms_fsdp.predict.hardware import find_hardware
from fms_fsdp.predict.shares import share_of
from fms_fsdp.predict.speed import Program, Work, block_matrices, messages, step_time
from fms_fsdp.runtime import World

PERFECT = replace(
    CURVES["hopper"],
    **dict.fromkeys(("products", "attention", "small_heads", "float8", "node", "net"), 1.0),
    **dict.fromkeys(("edges", "compiled", "logits", "kernels", "hop", "exposed"), 0.0),
)


def work_of(model: str | LlamaConfig = "7b", devices: int = 8, rows: int = 2, **flags: Any) -> Work:
    """bf16 rows of 4096 tokens on H100s in nodes of 8."""
    accum, seq_length = flags.pop("accum", 1), flags.pop("seq_length", 4096)
    config = all_variants()[model] if isinstance(model, str) else model
    section = ParallelConfig(**flags)
    dims = resolve_dims(section, "", World(0, 0, devices, min(8, devices)))
    batch = BatchPlan(rows, accum, dims.size("dp"))
    return Work(config, dims, section, BF16, batch, seq_length, find_hardware("h100_80gb"))


@pytest.mark.parametrize("name", ["7b", "llama3_8b", "llama3.2_1b", "gpt3_1.3b"])
def test_products_and_attention_are_the_flops_of_the_formulas(name: str) -> None:
    """At the full peak, products and causal attention take the FLOPs of `matmul_flops_per_token`, whose
    attention counts as if it was not causal and whose weights include norms and biases."""
    config = replace(all_variants()[name], attn_window=0, max_seq_len=4096)
    work = work_of(config, devices=1)
    tokens, peak = 2 * 4096, 989e12
    time = step_time(work, PERFECT)
    matrices = config.num_layers * sum(out * inner for out, inner in block_matrices(config))
    matrices += config.vocab_size * config.hidden_size
    assert time.products == pytest.approx(6 * matrices * tokens / peak)
    attended = 12 * config.num_attention_heads * config.head_dim * 4096 * config.num_layers
    assert time.attention == pytest.approx(attended * tokens / peak / 2 * 3.5 / 3)
    vectors = matmul_flops_per_token(config, 4096) - attended - 6 * matrices
    assert 0 <= vectors < 0.002 * 6 * matrices


LONG = {"recompute": "ops", "recompute_ops": ("attention", "attention_products")}


@pytest.mark.parametrize("flags", [{"recompute": "blocks"}, {"recompute": "ops"}, LONG])
def test_what_is_repeated_is_what_the_formula_says(flags: dict[str, Any]) -> None:
    config, tokens = VARIANTS["7b"], 2 * 4096
    plain, again = (step_time(work_of("7b", 1, **each), PERFECT) for each in ({}, flags))
    section = ParallelConfig(**flags)
    kept = section.kept_ops(4096)
    flops = recomputed_flops_per_token(config, 4096, config.num_layers, kept)
    norms = 4 * config.num_layers * config.hidden_size  # vectors, in no product
    causal = 0 if kept else 2 * config.hidden_size * 4096 * config.num_layers  # the half that is not seen
    expected = (flops - norms * (not kept) - causal) * tokens / 989e12
    extra = again.products + again.attention - plain.products - plain.attention
    assert extra == pytest.approx(expected, rel=1e-3)
    assert again.repeated == pytest.approx(extra, rel=1e-3)


def test_messages_take_the_way_that_their_axis_spans() -> None:
    """8 ranks of tp fill a node; their neighbours on the other axes are in other nodes."""
    work = work_of("70b", 64, tp_size=8)
    share = share_of(work.model, work.dims, work.section)
    sent = messages(work, PERFECT, share)
    assert not sent["tp"].leaves_node and sent["dp_shard"].leaves_node
    assert sent["tp"].seconds == pytest.approx(sent["tp"].num_bytes / 450e9)
    assert sent["dp_shard"].seconds == pytest.approx(sent["dp_shard"].num_bytes / 50e9)
    whole = work_of("7b", 64)  # a ring through 8 nodes, with 8 links from node to node
    sent = messages(whole, PERFECT, share_of(whole.model, whole.dims, whole.section))
    assert sent["dp_shard"].seconds == pytest.approx(sent["dp_shard"].num_bytes / (8 * 50e9))
    hsdp = work_of("7b", 64, sharding_strategy="hsdp")
    sent = messages(hsdp, PERFECT, share_of(hsdp.model, hsdp.dims, hsdp.section))
    assert not sent["dp_shard"].leaves_node and sent["dp_replicate"].leaves_node


@pytest.mark.parametrize(
    ("flags", "bubble"),  # micro-batches' worth of waiting on 4 ranks
    [
        ({}, 3),
        ({"pp_schedule": "gpipe"}, 3),
        ({"pp_schedule": "interleaved"}, 3 / 2),
        ({"pp_schedule": "interleaved", "pp_virtual_stages": 4}, 3 / 4),
        ({"pp_schedule": "zbv"}, 3 / 4),
    ],
)
def test_a_pipeline_waits_for_its_ends(flags: dict[str, Any], bubble: float) -> None:
    time = step_time(work_of("70b", 4, rows=16, pp_size=4, **flags))
    assert time.bubble / (time.computing / 16) == pytest.approx(bubble)


def test_parts_add_up_and_more_of_the_same_takes_longer() -> None:
    chance = random.Random(5)
    for _ in range(60):
        flags: dict[str, Any] = {
            "sharding_strategy": chance.choice(["fsdp", "hsdp", "zero1", "zero2", "ddp"])
        }
        flags |= {"recompute": chance.choice(["none", "cheap", "ops", "blocks"])}
        devices, rows = chance.choice([8, 32, 512]), chance.choice([1, 2, 8])
        name = chance.choice(["7b", "llama3_8b", "1.4b", "13b"])
        time = step_time(work_of(name, devices, rows, **flags))
        assert time.total == pytest.approx(sum(time.parts.values())) and min(time.parts.values()) >= 0
        assert step_time(work_of(name, devices, 2 * rows, **flags)).total > time.total
        assert step_time(work_of(name, devices, rows, accum=2, **flags)).total > time.total
        longer = step_time(work_of(name, devices, rows, seq_length=8192, **flags))
        assert longer.attention == pytest.approx(4 * time.attention)
        assert step_time(work_of(name, 2 * devices, rows, **flags)).total >= 0.999 * time.total


def test_recomputation_and_an_eager_program_cost_time() -> None:
    kinds = [step_time(work_of("7b", 8, recompute=kind)) for kind in ("none", "ops", "blocks")]
    totals = [time.total for time in kinds]
    assert totals == sorted(totals) and kinds[0].repeated == 0 < kinds[1].repeated < kinds[2].repeated
    half = step_time(work_of("7b", 8, recompute="blocks", selective_checkpointing="1/2"))
    assert half.repeated == pytest.approx(kinds[2].repeated / 2)
    work = work_of()
    eager = replace(work, program=Program(compiled=False))
    assert step_time(eager).total > step_time(work).total
    float8 = replace(work, precision=replace(BF16, float8="row"))
    assert step_time(float8).products < step_time(work).products


def test_less_power_leaves_a_lower_clock() -> None:
    full, less = find_hardware("h100_80gb"), find_hardware("h100_96gb_500w")
    assert full.clock == 1.0 and less.clock == pytest.approx((500 / 700) ** (1 / 3))
    work = work_of()
    slower = replace(work, hardware=less)
    assert step_time(slower).products > step_time(work).products


def test_matrices_are_the_parameters_of_a_block() -> None:
    for name, config in VARIANTS.items():
        block = num_params_by_unit(config)["block"]
        counted = sum(out * inner for out, inner in block_matrices(config))
        assert 0 < block - counted < 0.01 * block, name
        if config.num_kv_heads % 2 == 0:
            assert 2 * sum(out * inner for out, inner in block_matrices(config, 2)) == counted, name
