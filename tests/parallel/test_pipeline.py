"""Pipelines: stages, evaluation and generation between steps, and out of memory.

test_pairs.py and test_features.py train with them.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from fms_fsdp.config import (
    FP32,
    DataConfig,
    EvalConfig,
    OptimConfig,
    ParallelConfig,
)
from fms_fsdp.data.batch import Batch
from fms_fsdp.data.validation import open_held_out, scan_held_out
from fms_fsdp.distributed.mesh import Mesh
from fms_fsdp.evaluate import evaluate
from fms_fsdp.generate import Sampling, generate
from fms_fsdp.metrics.interval import count_zero_gradients
from fms_fsdp.metrics.timer import PhaseTimer
from fms_fsdp.models.config import TransformerConfig
from fms_fsdp.optim.optimizers import build_optimizers
from fms_fsdp.parallel.fsdp import evaluating
from fms_fsdp.parallel.layout import layers_of_stages, stages_of_rank
from fms_fsdp.parallel.parallelize import parallelize
from fms_fsdp.state import TrainState
from fms_fsdp.train import StepSettings, train_step
from tests.cli import run, status
from tests.distributed.launch import run_ranks
from tests.parallel.layouts import (
    CPU,
    ROWS,
    SEQ,
    SHAPE,
    VOCAB,
    mesh_of,
    rows_of,
)

PP = {"pp_size": 2, "sharding_strategy": "fsdp"}
LOOP, VSHAPE = PP | {"pp_schedule": "interleaved"}, PP | {"pp_schedule": "zbv"}


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


def state_and_recipe(
    flags: Mapping[str, Any], documents: bool
) -> tuple[TrainState, StepSettings, Mesh]:
    section = ParallelConfig(**flags)
    mesh = mesh_of(section)
    model = parallelize(SHAPE, section, mesh, device=CPU, precision=FP32, seed=5)
    optimizers, nothing = build_optimizers(OptimConfig(), model), Any
    rows = ROWS // mesh.size("dp") // 2
    settings = StepSettings(mesh, CPU, lambda step, tokens, base: 1e-3, rows, 1.0, documents)
    return TrainState(model, optimizers, nothing, 9), settings, mesh  # type: ignore[arg-type]


def step_of(state: TrainState, settings: StepSettings, step: int) -> list[float]:
    """The gradient norm and the number of zeros in the gradient."""
    rows, zeros = ROWS // settings.mesh.size("dp"), list[float]()
    parameters = list(state.model.parameters())
    state.optimizers.optimizers[0].register_step_pre_hook(
        lambda *_: zeros.append(float(count_zero_gradients(parameters, settings.mesh)))
    )
    first = settings.mesh.axis_rank("dp") * rows
    batch = Batch(*(column[first : first + rows] for column in rows_of(step, SHAPE)))
    return [float(train_step(settings, state, batch, PhaseTimer(CPU)).grad_norm), zeros[0]]


def passes_between_steps(
    flags: Mapping[str, Any], documents: bool
) -> tuple[list[float], list[Any]]:
    """What training gives, and what evaluations and texts before each step give."""
    state, settings, mesh = state_and_recipe(flags, documents)
    data, section = (
        DataConfig(use_dummy_dataset=True, seq_length=SEQ),
        EvalConfig(eval_interval=1, eval_steps=5),
    )
    trained, seen = list[float](), list[Any]()
    for step in range(2):
        sources = open_held_out(section, scan_held_out(section, data, None, vocab_size=VOCAB), 1)
        seen.append(
            evaluate(
                state.model,
                sources,
                batch_size=3,
                document_mask=documents,
                device=CPU,
                mesh=mesh,
            )
        )
        with evaluating(state.model):
            prompts = [[1, 2, 3], [4, 5, 6, 7, 8], [9]]
            model: Any = state.model
            seen.append(list(generate(model, prompts, Sampling(temperature=0.8), max_new_tokens=6)))
        assert state.model.training
        trained += step_of(state, settings, step)
    return trained, seen


def has_documents(flags: Mapping[str, Any]) -> bool:
    return flags.get("pp_schedule") != "zbv"


def each_pass(flags: list[dict[str, Any]]) -> list[tuple[list[float], list[Any]]]:
    return [passes_between_steps(each, has_documents(each)) for each in flags]


LAYOUTS: dict[int, list[dict[str, Any]]] = {
    2: [LOOP, VSHAPE],
    4: [PP | {"tp_size": 2}, PP | {"cp_size": 2}, {"tp_size": 2, "cp_size": 2}],
}


@pytest.mark.slow
@pytest.mark.parametrize("world", [2, 4])
def test_evaluation_and_generation_equal_one_process(world: int) -> None:
    alone = {documents: passes_between_steps({}, documents) for documents in (False, True)}
    for found in run_ranks(each_pass, world, LAYOUTS[world]):
        for flags, (trained, seen) in zip(LAYOUTS[world], found, strict=True):
            wanted, wanted_seen = alone[has_documents(flags)]
            assert trained == pytest.approx(wanted, rel=1e-4)
            for some, others in zip(seen, wanted_seen, strict=True):
                is_loss = isinstance(others, dict)
                assert some == (pytest.approx(others, rel=1e-5) if is_loss else others), flags


def test_pipeline_out_of_memory_is_explained(tmp_path: Path) -> None:
    """torch wraps each error of a schedule in a RuntimeError; its cause keeps its type."""
    flags = ["--model_variant=tiny", "--seq_length=64", "--num_steps=2", "--trackers=none"]
    flags += ["--pp_size=2", "--batch_size=2", "--precision=fp32"]
    flags += ["--dataset_builder=tests.parallel.exhausted:build", f"--output_dir={tmp_path}"]
    ended = run(*flags, nproc=2)
    assert ended.returncode == 1 and "failed: out of memory (CUDA out of memory." in ended.stderr
    reason = status(tmp_path)["reason"]
    assert reason.startswith("out of memory (CUDA out of memory.") and "what would help" in reason
