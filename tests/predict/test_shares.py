"""What a rank of tp and pp holds and keeps, against models that are built and arithmetic done by hand."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from fms_fsdp.__main__ import main
from fms_fsdp.config import FP32, BatchPlan, ParallelConfig
from fms_fsdp.config.axes import ParallelDims
from fms_fsdp.mesh import resolve_dims
from fms_fsdp.models.flops import num_params
from fms_fsdp.models.variants import VARIANTS, LlamaConfig
from fms_fsdp.parallel.parallelize import parallelize
from fms_fsdp.predict.memory import estimate_memory
from fms_fsdp.predict.shares import kept_activations, share_of
from fms_fsdp.runtime import World
from fms_fsdp.sharded import local_part
from tests.distributed.launch import run_ranks
from tests.parallel.layouts import CPU, SHAPE, mesh_of

BOTH = dict(tp_size=2, pp_size=2)
BUILT: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {  # flags, and changes of the model
    "llama": (BOTH, {}),
    "copied heads": (BOTH, dict(num_kv_heads=1, qk_norm=True)),
    "loop": (BOTH | dict(pp_schedule="interleaved"), dict(vocab_multiple_of=16, num_layers=6)),
    "v": (BOTH | dict(pp_schedule="zbv"), dict(num_layers=7, head_dim=6)),
    "gpt": (BOTH, dict(norm="layernorm", bias=True, activation="gelu", pos_emb="learned")),
    "bias of copied heads": (BOTH, dict(num_kv_heads=1, bias=True, norm="scalenorm")),
    "tied": (dict(tp_size=2), dict(tie_embeddings=True)),
    "four": (dict(tp_size=4), dict(num_kv_heads=2)),
}


def held_and_predicted() -> dict[str, tuple[int, int, bool]]:
    """Parameters of this rank before FSDP, those predicted, and whether it is the first of tp."""
    found = {}
    for name, (flags, shape) in BUILT.items():
        section, config = ParallelConfig(**flags), replace(SHAPE, **shape)
        mesh = mesh_of(section)
        model = parallelize(config, section, mesh, device=CPU, precision=FP32, seed=5)
        held = torch.tensor(sum(local_part(parameter).numel() for parameter in model.parameters()))
        predicted = share_of(config, mesh.dims, section, mesh.place("pp")).params
        found[name] = int(mesh.sum(held, "shard")), predicted, mesh.place("tp") == 0
    return found


def test_a_rank_holds_the_parameters_of_its_share() -> None:
    for found in run_ranks(held_and_predicted, 4):
        for name, (held, predicted, is_first) in found.items():
            if is_first:
                assert held == predicted, name
            else:  # its part of the vocabulary may be smaller, by less than a row for each rank, twice
                assert predicted - 2 * 4 * SHAPE.hidden_size < held <= predicted, name


def dims_of(world: int, **flags: Any) -> tuple[ParallelDims, ParallelConfig]:
    section = ParallelConfig(**flags)
    return resolve_dims(section, "7b", World(0, 0, world, world)), section


def test_without_axes_a_share_is_the_model() -> None:
    config = VARIANTS["7b"]
    assert share_of(config, *dims_of(8)).params == num_params(config)
    first, last = (share_of(config, *dims_of(8, pp_size=2), place) for place in (0, 1))
    assert first.params + last.params == num_params(config) and not first.units["head"]


@pytest.mark.parametrize(
    ("flags", "under_way"),  # micro-batches whose activations the layers of a rank hold at once, of eight
    [
        (dict(pp_schedule="gpipe"), 8),
        (dict(pp_schedule="1f1b"), 4),
        (dict(pp_schedule="interleaved"), 4 + 3 / 2),
        (dict(pp_schedule="interleaved", pp_virtual_stages=4), 4 + 3 / 4),
        (dict(pp_schedule="zbv"), 4),
    ],
)
def test_a_pipeline_keeps_what_is_under_way(flags: dict[str, Any], under_way: float) -> None:
    config = LlamaConfig(32, 64, 96, 8, 4, 2, max_seq_len=64)
    dims, section = dims_of(4, pp_size=4, **flags)
    kept = kept_activations(config, dims, section, BatchPlan(8, 2, 1))
    assert kept == pytest.approx(8 / 32 * under_way / 8)
    assert kept_activations(config, dims, section, BatchPlan(1, 2, 1)) == pytest.approx(8 / 32)
    halves = replace(section, pp_micro_batch_size=2)
    assert kept_activations(config, dims, halves, BatchPlan(16, 2, 1)) == pytest.approx(kept)


def test_tp_and_cp_divide_what_is_kept() -> None:
    config, batch = VARIANTS["7b"], BatchPlan(1, 1, 1)
    assert kept_activations(config, *dims_of(8, tp_size=4, cp_size=2), batch) == 1 / 8
    stream, inner = 4 * 4096, 2 * 2 * 4096 + 3 * config.ffn_hidden_size
    copies = kept_activations(config, *dims_of(4, tp_size=4, sequence_parallel=False), batch)
    assert copies == pytest.approx((stream + inner / 4) / (stream + inner))


@pytest.mark.parametrize(
    "flags",
    [
        dict(tp_size=8),
        dict(tp_size=8, sequence_parallel=False),
        dict(cp_size=8),
        dict(pp_size=8),
        dict(pp_size=4, tp_size=2, pp_schedule="interleaved"),
        dict(pp_size=2, cp_size=2, tp_size=2, pp_schedule="zbv"),
    ],
)
def test_axes_need_less_of_a_device_than_the_whole_model(flags: dict[str, Any]) -> None:
    config, how = VARIANTS["7b"], dict(batch=BatchPlan(8, 1, 1), seq_length=4096)
    whole = estimate_memory(config, *dims_of(1), **how)  # type: ignore[arg-type]
    divided = estimate_memory(config, *dims_of(8, **flags), **how)  # type: ignore[arg-type]
    assert divided.total < whole.total / 2 and divided.state <= whole.state / 5
    assert divided.activations < whole.activations * (0.6 if "sequence_parallel" in flags else 0.3)


def test_the_command_knows_the_axes(capsys: pytest.CaptureFixture[str]) -> None:
    known = ["estimate", "--tflops=400", "--num_devices=16"]
    assert main([*known, "--tp_size=2", "--pp_size=2"]) == 0
    held, sent = capsys.readouterr().out.splitlines()[1:3]
    assert held.startswith("GiB a rank: weights ")
    assert sent.startswith("GiB sent by a rank in a step: ") and " tp " in sent and " pp " in sent
    assert main([*known, "--tp_size=3", "--pp_size=2"]) == 2
    said = capsys.readouterr().err
    assert said.count("\n") == 1 and "--pp_size (2) x --tp_size (3)" in said
