"""Pipelines: their stages, and running out of memory. test_layouts.py trains with them."""

from __future__ import annotations

import itertools
from dataclasses import replace
from pathlib import Path

from fms_fsdp.models.config import TransformerConfig
from fms_fsdp.parallel.layout import layers_of_stages, stages_of_rank
from tests.cli import run, status
from tests.parallel.layouts import SEQ, SHAPE


def costs(config: TransformerConfig, stages: tuple[range, ...]) -> list[float]:
    """Products for one token: of a block, and of the head in the last stage."""
    hidden, ffn, kv = (
        config.hidden_size,
        config.ffn_hidden_size,
        config.num_kv_heads * config.head_dim,
    )
    attention = 2 * config.num_attention_heads * config.head_dim * config.max_seq_len
    block = 2 * hidden * hidden + 2 * hidden * kv + 3 * hidden * ffn + attention
    found = [float(len(layers) * block) for layers in stages]
    found[-1] += config.vocab_size * hidden
    return found


def test_every_layer_is_in_one_stage() -> None:
    for num_layers in range(1, 20):
        config = replace(SHAPE, num_layers=num_layers)
        for num_stages in range(1, num_layers + 1):
            stages = layers_of_stages(config, SEQ, num_stages)
            assert all(stages) and len(stages) == num_stages
            assert list(itertools.chain(*stages)) == list(range(num_layers))


def test_stages_minimize_the_most_expensive() -> None:
    config = replace(SHAPE, num_layers=9, vocab_size=2000)
    for num_stages in range(2, 6):
        found = layers_of_stages(config, SEQ, num_stages)
        every = []
        for cuts in itertools.combinations(range(1, 9), num_stages - 1):
            stages = tuple(itertools.starmap(range, itertools.pairwise([0, *cuts, 9])))
            every.append(max(costs(config, stages)))
        assert max(costs(config, found)) == min(every)
        assert len(found[-1]) < len(found[0])  # the head is work


def test_layers_without_window_cost_more() -> None:
    """The first of four layers has no window."""
    config = replace(
        SHAPE, num_layers=4, attn_window=8, attn_window_pattern="GLLL", max_seq_len=4096
    )
    assert layers_of_stages(config, 4096, 2) == (range(1), range(1, 4))


def test_ranks_share_all_stages() -> None:
    for size, virtual in itertools.product((1, 2, 3, 8), (1, 2, 4)):
        found = [stages_of_rank(rank, size, virtual, "interleaved") for rank in range(size)]
        assert sorted(itertools.chain(*found)) == list(range(size * virtual))
    v_shaped = [stages_of_rank(rank, 4, 2, "zbv") for rank in range(4)]
    assert v_shaped == [[0, 7], [1, 6], [2, 5], [3, 4]]


def test_pipeline_out_of_memory_is_explained(tmp_path: Path) -> None:
    """torch wraps each error of a schedule in a RuntimeError; its cause keeps its type."""
    flags = ["--model_variant=tiny", "--seq_length=64", "--num_steps=2", "--trackers=none"]
    flags += ["--pp_size=2", "--batch_size=2", "--precision=fp32"]
    flags += ["--dataset_builder=tests.parallel.exhausted:build", f"--output_dir={tmp_path}"]
    ended = run(*flags, nproc=2)
    assert ended.returncode == 1 and "failed: out of memory (CUDA out of memory." in ended.stderr
    reason = status(tmp_path)["reason"]
    assert reason.startswith("out of memory (CUDA out of memory.") and "what would help" in reason
