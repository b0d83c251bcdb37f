"""Pipelines: layers are divided evenly, and every schedule trains as one process does."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from fms_fsdp.checkpoint.io import collect_tensors, load_checkpoint, write_checkpoint
from fms_fsdp.config import (
    BF16,
    FP32,
    DataConfig,
    EvalConfig,
    OptimConfig,
    ParallelConfig,
    Precision,
    TrainConfig,
)
from fms_fsdp.data.batch import Batch
from fms_fsdp.data.validation import open_held_out, scan_held_out
from fms_fsdp.distributed.dtensor import local_shard, shard_slices
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
from fms_fsdp.state import TrainMetadata, TrainState
from fms_fsdp.train import TrainStep, train_step
from tests.cli import run, status
from tests.distributed.launch import run_ranks
from tests.parallel.layouts import (
    CPU,
    ROWS,
    SEQ,
    SHAPE,
    VOCAB,
    Case,
    compare,
    mesh_of,
    rows_of,
    train_case,
)
from tests.specs import resolved

PP = {"pp_size": 2, "sharding_strategy": "fsdp"}
LOOP, VSHAPE = PP | {"pp_schedule": "interleaved"}, PP | {"pp_schedule": "zbv"}
PURE = Precision(compute="bf16", weights="bf16", state="bf16")


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


def test_the_most_expensive_stage_is_as_cheap_as_can_be() -> None:
    config = replace(SHAPE, num_layers=9, vocab_size=2000)
    for num_stages in range(2, 6):
        found = layers_of_stages(config, SEQ, num_stages)
        every = []
        for cuts in itertools.combinations(range(1, 9), num_stages - 1):
            stages = tuple(itertools.starmap(range, itertools.pairwise([0, *cuts, 9])))
            every.append(max(costs(config, stages)))
        assert max(costs(config, found)) == min(every)
        assert len(found[-1]) < len(found[0])  # the head is work


def test_layers_that_see_all_of_a_long_row_cost_more() -> None:
    """The first of four layers has no window."""
    config = replace(
        SHAPE, num_layers=4, attn_window=8, attn_window_pattern="GLLL", max_seq_len=4096
    )
    assert layers_of_stages(config, 4096, 2) == (range(1), range(1, 4))


def test_the_stages_of_all_ranks_are_all_stages() -> None:
    for size, virtual in itertools.product((1, 2, 3, 8), (1, 2, 4)):
        found = [stages_of_rank(rank, size, virtual, "interleaved") for rank in range(size)]
        assert sorted(itertools.chain(*found)) == list(range(size * virtual))
    v_shaped = [stages_of_rank(rank, 4, 2, "zbv") for rank in range(4)]
    assert v_shaped == [[0, 7], [1, 6], [2, 5], [3, 4]]


def test_two_ranks_train_as_one_process_does() -> None:
    bf16 = {"loss_abs": 1e-3, "norm_rel": 5e-3}
    dropout = {}
    half = {"recompute": "blocks", "selective_checkpointing": "1/2"}
    cases = {
        "1f1b": Case(PP, accum=2, documents=True),
        "gpipe": Case(
            PP | {"pp_schedule": "gpipe", "pp_micro_batch_size": 4}, {"recompute": "ops"}
        ),
        "interleaved": Case(LOOP, half, shape=dropout),
        "zbv": Case(VSHAPE | {"pp_micro_batch_size": 2}, {"recompute": "blocks"}, accum=2),
        "muon": Case(LOOP, {"cpu_offload": True}, optim={"optimizer": "muon"}),
        "bf16": Case(VSHAPE, precision=BF16, accum=2, **bf16),
        "bf16_pure": Case(LOOP, precision=PURE, accum=2, **bf16),
    }
    compare(2, cases)


def test_four_ranks_train_as_one_process_does() -> None:
    hsdp = {"sharding_strategy": "hsdp", "hsdp_shard_size": 1}
    cases = {
        "pp2 x ddp2": Case(PP | {"sharding_strategy": "ddp"}, accum=2),
        "pp2 x hsdp": Case(VSHAPE | hsdp),
        "pp4": Case(PP | {"pp_size": 4}, optim={"optimizer": "muon"}),
    }
    compare(4, cases)


def state_and_recipe(
    flags: Mapping[str, Any], documents: bool
) -> tuple[TrainState, TrainStep, Mesh]:
    section = ParallelConfig(**flags)
    mesh = mesh_of(section)
    model = parallelize(SHAPE, section, mesh, device=CPU, precision=FP32, seed=5)
    optimizers, nothing = build_optimizers(OptimConfig(), model), Any
    rows = ROWS // mesh.size("dp") // 2
    recipe = TrainStep(mesh, CPU, lambda step, tokens, base: 1e-3, rows, 1.0, documents)
    return TrainState(model, optimizers, nothing, 9), recipe, mesh  # type: ignore[arg-type]


def step_of(state: TrainState, recipe: TrainStep, step: int) -> list[float]:
    """The gradient norm and the number of zeros in the gradient."""
    rows, zeros = ROWS // recipe.mesh.size("dp"), list[float]()
    parameters = list(state.model.parameters())
    state.optimizers.optimizers[0].register_step_pre_hook(
        lambda *_: zeros.append(float(count_zero_gradients(parameters, recipe.mesh)))
    )
    first = recipe.mesh.place("dp") * rows
    batch = Batch(*(column[first : first + rows] for column in rows_of(step, SHAPE)))
    return [float(train_step(recipe, state, batch, PhaseTimer(CPU)).grad_norm), zeros[0]]


def passes_between_steps(
    flags: Mapping[str, Any], documents: bool
) -> tuple[list[float], list[Any]]:
    """What training gives, and what evaluations and texts before each step give."""
    state, recipe, mesh = state_and_recipe(flags, documents)
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
        trained += step_of(state, recipe, step)
    return trained, seen


def each_pass(flags: list[dict[str, Any]]) -> list[tuple[list[float], list[Any]]]:
    return [passes_between_steps(each, each["pp_schedule"] != "zbv") for each in flags]


def test_evaluations_and_texts_between_steps_are_those_of_one_process() -> None:
    flags = [LOOP, VSHAPE]
    for found in run_ranks(each_pass, 2, flags):
        for each, (trained, seen) in zip(flags, found, strict=True):
            wanted, wanted_seen = passes_between_steps({}, each["pp_schedule"] != "zbv")
            assert trained == pytest.approx(wanted, rel=1e-4)
            for some, others in zip(seen, wanted_seen, strict=True):
                assert some == (
                    pytest.approx(others, rel=1e-5) if isinstance(others, dict) else others
                )


PAIRS = {
    "tp x cp": {"tp_size": 2, "cp_size": 2},
    "cp x pp": {"cp_size": 2, "pp_size": 2, "sharding_strategy": "fsdp"},
    "tp x pp": {"tp_size": 2, "pp_size": 2, "sharding_strategy": "fsdp"},
}


@pytest.mark.parametrize("pair", PAIRS)
def test_pairs_of_axes_evaluate_and_generate(pair: str) -> None:
    wanted, wanted_seen = passes_between_steps({}, True)
    for trained, seen in run_ranks(passes_between_steps, 4, PAIRS[pair], True):
        assert trained == pytest.approx(wanted, rel=1e-4)
        for some, others in zip(seen, wanted_seen, strict=True):
            assert some == (pytest.approx(others, rel=1e-5) if isinstance(others, dict) else others)


def tensors_of(state: TrainState) -> dict[str, list[tuple[Any, torch.Tensor]]]:
    """Every tensor of a checkpoint, by name: the place of this rank's part, and its values."""
    tensors = collect_tensors(state.model, state.optimizers)
    return {
        name: [(shard_slices(each), local_shard(each).clone())] for name, each in tensors.items()
    }


def saved_and_loaded(
    flags: Mapping[str, Any], load: str, save: str
) -> tuple[dict[str, list[tuple[Any, torch.Tensor]]], list[float]]:
    """Loads a checkpoint, or trains a step; saves another; trains a further step. The tensors that were
    saved, and what that step gives."""
    state, recipe, mesh = state_and_recipe(flags, documents=True)
    if load:
        folder, is_alone = Path(load) / "step_1", mesh.size("world") == 1
        load_checkpoint(folder, state.model, state.optimizers, is_alone=is_alone)
    else:
        step_of(state, recipe, 0)
    tensors = tensors_of(state)
    content = TrainMetadata(
        1, tokens_seen=ROWS * SEQ, **resolved(TrainConfig(), model=SHAPE).saved_with
    )
    group = None if mesh.size("world") == 1 else dist.new_group(backend="gloo")
    write_checkpoint(
        collect_tensors(state.model, state.optimizers), Path(save), content, group=group
    )
    return tensors, step_of(state, recipe, 1)


def test_checkpoints_go_from_a_pipeline_to_one_process_and_back(tmp_path: Path) -> None:
    for name in ("first", "second", "third"):
        (tmp_path / name).mkdir()
    first, second, third = (str(tmp_path / name) for name in ("first", "second", "third"))
    by_rank = run_ranks(saved_and_loaded, 2, LOOP, "", first)
    whole, wanted = saved_and_loaded({}, first, second)
    again = run_ranks(saved_and_loaded, 2, VSHAPE, second, third)
    for found in (by_rank, again):
        names = [name for tensors, _ in found for name in tensors]
        assert sorted(names) == sorted(whole)  # each on one rank alone
        for tensors, trained in found:
            assert trained == pytest.approx(wanted, rel=1e-4)
            for name, parts in tensors.items():
                (place, part), (_, everything) = parts[0], whole[name][0]
                assert torch.equal(part, everything[place]), name


def compiled_case(case: Case) -> Any:
    torch.compile = partial(torch.compile, backend="aot_eager")  # type: ignore[assignment]
    return train_case(case)


def test_compiled_blocks_train_in_a_pipeline() -> None:
    case = Case(LOOP | {"use_torch_compile": True}, {"recompute": "blocks"}, documents=True)
    wanted = train_case(case, alone=True)
    for found in run_ranks(compiled_case, 2, case):
        assert found.weights == wanted.weights
        assert found.losses == pytest.approx(wanted.losses, abs=1e-5)
        assert found.norms == pytest.approx(wanted.norms, rel=1e-4)


def test_pipeline_out_of_memory_is_explained(tmp_path: Path) -> None:
    """torch wraps each error of a schedule in a RuntimeError; its cause keeps its type."""
    flags = ["--model_variant=tiny", "--seq_length=64", "--num_steps=2", "--trackers=none"]
    flags += ["--pp_size=2", "--batch_size=2", "--precision=fp32"]
    flags += ["--dataset_builder=tests.parallel.exhausted:build", f"--output_dir={tmp_path}"]
    ended = run(*flags, nproc=2)
    assert ended.returncode == 1 and "failed: out of memory (CUDA out of memory." in ended.stderr
    reason = status(tmp_path)["reason"]
    assert reason.startswith("out of memory (CUDA out of memory.") and "what would help" in reason
