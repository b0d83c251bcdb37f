"""The sharding choices send and keep the bytes that are predicted."""

from __future__ import annotations

import gc
import time
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

from fms_fsdp.config import BF16, FP32, NUM_BYTES, ParallelConfig, Precision
from fms_fsdp.distributed.axes import ParallelDims
from fms_fsdp.distributed.dims import plan_dims
from fms_fsdp.distributed.mesh import Mesh
from fms_fsdp.distributed.world import World
from fms_fsdp.models.config import TransformerConfig
from fms_fsdp.models.flops import num_params
from fms_fsdp.models.llama import Llama
from fms_fsdp.parallel.fsdp import set_gradient_sync
from fms_fsdp.parallel.parallelize import parallelize
from fms_fsdp.predict.memory import Step, minimum_memory
from fms_fsdp.predict.meter import ModelSetup
from fms_fsdp.predict.speed import sent
from tests.distributed.launch import run_ranks
from tests.parallel.layouts import CPU, mesh_of

SEQ, ACCUM = 8, 3
CONFIG = TransformerConfig(
    3, 64, 160, 4, 2, 128, max_seq_len=SEQ
)  # rows that every world here divides
TIED = TransformerConfig(3, 64, 160, 4, 2, 128, max_seq_len=SEQ, tie_embeddings=True)
FSDP, DDP, ZERO1, ZERO2 = (
    {"sharding_strategy": name} for name in ("fsdp", "ddp", "zero1", "zero2")
)
HSDP: dict[str, Any] = {"sharding_strategy": "hsdp", "hsdp_shard_size": 2}
CASES: dict[int, dict[str, tuple[dict[str, Any], TransformerConfig, Precision]]] = {
    2: {
        "fsdp tied bf16": (FSDP, TIED, BF16),
        "fsdp groups": (FSDP | {"fsdp_blocks_per_group": 2}, CONFIG, FP32),
        "fsdp once bf16": (FSDP | {"sync_each_micro_step": False}, CONFIG, BF16),
        "zero1 bf16": (ZERO1, CONFIG, replace(BF16, reduce="bf16")),
        "zero1 tied": (ZERO1, TIED, FP32),
        "zero2": (ZERO2, CONFIG, FP32),
        "ddp": (DDP, CONFIG, FP32),
        "ddp bf16": (DDP, CONFIG, BF16),
    },
    4: {
        "hsdp": (HSDP, CONFIG, FP32),
        "hsdp keeps, once": (
            HSDP | {"reshard_after_forward": False, "sync_each_micro_step": False},
            CONFIG,
            BF16,
        ),
        "zero1": (ZERO1 | {"fsdp_blocks_per_group": 3}, CONFIG, FP32),
    },
}


class SentBytes(TorchDispatchMode):
    """Counts what collectives send, each at the least that any algorithm needs."""

    def __init__(self, dims: ParallelDims) -> None:
        super().__init__()
        self._dims, self.sent = dims, {"dp_shard": 0, "dp_replicate": 0}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name, shards, replicas = func.name(), self._dims.dp_shard, self._dims.dp_replicate
        if name in ("c10d::_allgather_base_", "c10d::_reduce_scatter_base_"):
            whole = args[0 if "allgather" in name else 1]
            self.sent["dp_shard"] += whole.nbytes * (shards - 1) // shards
        elif name == "c10d::allreduce_":
            self.sent["dp_replicate"] += 2 * args[0][0].nbytes * (replicas - 1) // replicas
        else:
            assert not name.startswith("c10d::"), name
        return func(*args, **(kwargs or {}))


def live_bytes() -> int:
    """Bytes of the tensors that Python holds; what autograd alone holds is not among them.

    The least of four looks: gloo's thread lets go of a buffer a moment after its collective has ended.
    """
    looks = []
    for _ in range(4):
        gc.collect()
        storages = {}
        for thing in gc.get_objects():
            if type(thing) in (torch.Tensor, torch.nn.Parameter) and thing.device.type == "cpu":
                storages[thing.untyped_storage().data_ptr()] = thing.untyped_storage().nbytes()
        looks.append(sum(storages.values()))
        del thing  # or the last one looked at stays alive
        time.sleep(0.05)
    return min(looks)


def build(
    flags: dict[str, Any], config: TransformerConfig, precision: Precision
) -> tuple[Llama, Mesh]:
    section = ParallelConfig(**flags)
    mesh = mesh_of(section)
    return parallelize(config, section, mesh, device=CPU, precision=precision, seed=5), mesh


def measured(
    flags: dict[str, Any], config: TransformerConfig, precision: Precision
) -> dict[str, int]:
    """Bytes sent in a step, and bytes that the first micro-step leaves behind: weights and gradients."""
    model, mesh = build(flags, config, precision)
    before, held = live_bytes(), 0
    with SentBytes(mesh.dims) as counted:
        for micro_step in range(ACCUM):
            set_gradient_sync(model, micro_step == ACCUM - 1, mesh)
            tokens = torch.zeros(1, SEQ, dtype=torch.long)
            model(tokens, tokens)[0].backward()
            held = held or live_bytes() - before
    assert all(isinstance(parameter, DTensor) for parameter in model.parameters()), (
        "a weight stays whole"
    )
    return counted.sent | {"held": held}


def on_rank(world: int) -> dict[str, dict[str, int]]:
    return {name: measured(*case) for name, case in CASES[world].items()}


@pytest.mark.slow
@pytest.mark.parametrize("world", [2, 4])
def test_bytes_sent_and_held_are_those_predicted(world: int) -> None:
    results = run_ranks(on_rank, world, world)
    for name, (flags, config, precision) in CASES[world].items():
        section, n = ParallelConfig(**flags), num_params(config)
        dims = plan_dims(section, "tiny", World(0, 0, world, world))
        step = Step(ModelSetup(config, section, precision, dims, SEQ, False, "cpu"), 1, ACCUM)
        need, size = minimum_memory(step), NUM_BYTES[precision.gradients]
        kept = need.gathered if dims.keeps_weights else 0
        unsharded = need.gradients - size * n // dims.dp_shard
        for found in (measures[name] for measures in results):
            held = found.pop("held")
            assert {axis: size for axis, size in found.items() if size} == sent(step), name
            expected = kept + 4 * n // dims.dp_shard + unsharded
            assert held == pytest.approx(expected, abs=100), name
