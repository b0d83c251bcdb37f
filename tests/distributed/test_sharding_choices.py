"""What the sharding choices cost is what was predicted: bytes sent, weights and gradients held; and reducing
gradients once a step gives the bits of a sum by hand.

The processes of one world size are spawned once and run all its cases.
"""

from __future__ import annotations

import functools
import gc
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

from fms_fsdp.config import BF16, FP32, NUM_BYTES, ParallelConfig, Precision
from fms_fsdp.distributed.axes import ParallelDims
from fms_fsdp.distributed.mesh import Mesh, plan_dims
from fms_fsdp.distributed.runtime import World
from fms_fsdp.models.config import TransformerConfig
from fms_fsdp.models.flops import num_params
from fms_fsdp.models.llama import Llama
from fms_fsdp.parallel.fsdp import set_gradient_sync
from fms_fsdp.parallel.parallelize import parallelize
from fms_fsdp.predict.memory import Step, minimum_memory
from fms_fsdp.predict.meter import Shape
from fms_fsdp.predict.speed import sent
from tests.distributed.launch import run_ranks

SEQ, ACCUM = 8, 3
CONFIG = TransformerConfig(
    3, 64, 160, 4, 2, 128, max_seq_len=SEQ
)  # rows that every world here divides
TIED = TransformerConfig(3, 64, 160, 4, 2, 128, max_seq_len=SEQ, tie_embeddings=True)
CASES: dict[int, dict[str, tuple[dict[str, Any], TransformerConfig, Precision]]] = {
    2: {
        "fsdp": (dict(sharding_strategy="fsdp"), CONFIG, FP32),
        "fsdp tied bf16": (dict(sharding_strategy="fsdp"), TIED, BF16),
        "fsdp groups": (dict(sharding_strategy="fsdp", fsdp_blocks_per_group=2), CONFIG, FP32),
        "fsdp once bf16": (
            dict(sharding_strategy="fsdp", sync_each_micro_step=False),
            CONFIG,
            BF16,
        ),
        "zero1": (dict(sharding_strategy="zero1"), CONFIG, FP32),
        "zero1 bf16": (dict(sharding_strategy="zero1"), CONFIG, replace(BF16, reduce="bf16")),
        "zero1 tied": (dict(sharding_strategy="zero1"), TIED, FP32),
        "zero2": (dict(sharding_strategy="zero2"), CONFIG, FP32),
        "ddp": (dict(sharding_strategy="ddp"), CONFIG, FP32),
        "ddp bf16": (dict(sharding_strategy="ddp"), CONFIG, BF16),
    },
    4: {
        "hsdp": (dict(sharding_strategy="hsdp", hsdp_shard_size=2), CONFIG, FP32),
        "hsdp keeps, once": (
            dict(sharding_strategy="hsdp", hsdp_shard_size=2)
            | dict(reshard_after_forward=False, sync_each_micro_step=False),
            CONFIG,
            BF16,
        ),
        "zero1": (dict(sharding_strategy="zero1", fsdp_blocks_per_group=3), CONFIG, FP32),
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
    import torch.distributed as dist

    section, world = ParallelConfig(**flags), dist.get_world_size()
    dims = plan_dims(section, "tiny", World(0, 0, world, world))
    mesh, cpu = Mesh(dims, dist.get_rank(), "cpu"), torch.device("cpu")
    return parallelize(config, section, mesh, device=cpu, precision=precision, seed=5), mesh


def rows(rank: int, micro_step: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(10 * rank + micro_step)
    return torch.randint(0, 128, (1, SEQ), generator=generator)


def measured(
    flags: dict[str, Any], config: TransformerConfig, precision: Precision
) -> dict[str, int]:
    """Bytes sent in a step, and bytes that the first micro-step leaves behind: weights and gradients."""
    model, mesh = build(flags, config, precision)
    before, held = live_bytes(), 0
    with SentBytes(mesh.dims) as counted:
        for micro_step in range(ACCUM):
            set_gradient_sync(model, micro_step == ACCUM - 1, mesh)
            tokens = rows(mesh.place("dp"), micro_step)
            model(tokens, tokens)[0].backward()
            held = held or live_bytes() - before
    assert all(isinstance(parameter, DTensor) for parameter in model.parameters()), (
        "a weight stays whole"
    )
    return counted.sent | {"held": held}


def gradients(
    model: Llama, mesh: Mesh, ranks: Sequence[int], micro_steps: Sequence[int]
) -> list[torch.Tensor]:
    """The sums over micro-steps, on this rank, of the gradients of the rows of some ranks."""
    for micro_step in micro_steps:
        set_gradient_sync(model, micro_step == micro_steps[-1], mesh)
        for rank in ranks:
            model(rows(rank, micro_step), rows(rank, micro_step))[0].backward()
    found = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
    model.zero_grad()
    return [whole.full_tensor() if isinstance(whole, DTensor) else whole for whole in found]


def sums_of_two() -> dict[str, bool]:
    """Whether the mean gradient of two ranks with two micro-steps has the bits of one process's sums."""
    nobody = Mesh(ParallelDims("none"), 0, "cpu")
    alone = parallelize(
        CONFIG, ParallelConfig(), nobody, device=torch.device("cpu"), precision=FP32, seed=5
    )
    by_rank = [gradients(alone, nobody, [rank], [0, 1]) for rank in (0, 1)]
    by_step = [
        [gradients(alone, nobody, [rank], [micro_step]) for rank in (0, 1)] for micro_step in (0, 1)
    ]
    once = [(first + second) / 2 for first, second in zip(*by_rank, strict=True)]
    means = [
        [(first + second) / 2 for first, second in zip(*pair, strict=True)] for pair in by_step
    ]
    each = [first + second for first, second in zip(*means, strict=True)]
    same = {}
    for strategy, expected in (("zero1", once), ("zero2", each), ("fsdp", each), ("ddp", once)):
        model, mesh = build({"sharding_strategy": strategy}, CONFIG, FP32)
        found = gradients(model, mesh, [mesh.place("dp")], [0, 1])
        same[strategy] = all(map(torch.equal, found, expected))
    assert not all(map(torch.equal, once, each)), "the two ways round alike: nothing is tested"
    return same


def on_rank(world: int) -> tuple[dict[str, dict[str, int]], dict[str, bool]]:
    return {
        name: measured(*case) for name, case in CASES[world].items()
    }, sums_of_two() if world == 2 else {}


@functools.cache
def results(world: int) -> list[tuple[dict[str, dict[str, int]], dict[str, bool]]]:
    return run_ranks(on_rank, world, world)


@pytest.mark.parametrize(
    ("world", "name"),
    [
        pytest.param(world, name, marks=[pytest.mark.slow] if world == 4 else [])
        for world in CASES
        for name in CASES[world]
    ],
)
def test_bytes_sent_and_held_are_those_predicted(world: int, name: str) -> None:
    flags, config, precision = CASES[world][name]
    section, n = ParallelConfig(**flags), num_params(config)
    dims = plan_dims(section, "tiny", World(0, 0, world, world))
    step = Step(Shape(config, section, precision, dims, SEQ, False, "cpu"), 1, ACCUM)
    need, size = minimum_memory(step, 8), NUM_BYTES[precision.gradients]
    kept = need.gathered if dims.keeps_weights else 0
    unsharded = need.gradients - size * n // dims.dp_shard
    for found in (measures[name] for measures, _ in results(world)):
        assert {axis: size for axis, size in found.items() if size and axis != "held"} == sent(step)
        assert found["held"] == pytest.approx(kept + 4 * n // dims.dp_shard + unsharded, abs=100)


def test_reducing_gradients_once_gives_the_bits_of_sums_of_two() -> None:
    expected = dict.fromkeys(("zero1", "zero2", "fsdp", "ddp"), True)
    assert [same for _, same in results(2)] == [expected, expected]
