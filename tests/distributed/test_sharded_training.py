"""Sharded training against one process: initial weights to the last bit, losses and norms of 20 steps.

The processes of one world size are spawned once and run all its cases.
"""

from __future__ import annotations

import functools
import hashlib
from dataclasses import dataclass
from typing import Any

import pytest
import torch

from fms_fsdp.config import BF16, FP32, ParallelConfig, Precision
from fms_fsdp.distributed.mesh import Mesh, plan_dims
from fms_fsdp.distributed.runtime import World
from fms_fsdp.models.config import TransformerConfig
from fms_fsdp.models.init import clean_name
from fms_fsdp.parallel.fsdp import clip_grad_norm, set_gradient_sync
from fms_fsdp.parallel.parallelize import parallelize
from tests.distributed.launch import run_ranks

ROWS, SEQ, STEPS = 12, 16, 20


@dataclass(frozen=True)
class Case:
    """One training run: parallel flags, micro-steps per step, tied embedding, precision."""

    flags: tuple[tuple[str, Any], ...] = ()
    accum: int = 1
    tied: bool = False
    precision: Precision = FP32

    @property
    def section(self) -> ParallelConfig:
        return ParallelConfig(**dict(self.flags))


def case(accum: int = 1, tied: bool = False, precision: Precision = FP32, **flags: Any) -> Case:
    return Case(tuple(flags.items()), accum, tied, precision)


AC = dict(fsdp_activation_checkpointing=True, selective_checkpointing="1/2")
QUICK = {
    2: {
        "fsdp": case(sharding_strategy="fsdp"),
        "fsdp accum ac": case(accum=3, sharding_strategy="fsdp", **AC),
        "fsdp tied eager-init": case(tied=True, sharding_strategy="fsdp", low_cpu_fsdp=False),
        "fsdp offload": case(sharding_strategy="fsdp", cpu_offload=True, fsdp_prefetch=2),
        "ddp accum": case(accum=2, sharding_strategy="ddp"),
        "fsdp bf16": case(precision=BF16, sharding_strategy="fsdp"),
        "zero1 accum": case(accum=3, sharding_strategy="zero1"),
        "zero1 tied bf16 accum ac": case(3, True, BF16, sharding_strategy="zero1", **AC),
        "zero1 offload": case(accum=2, sharding_strategy="zero1", cpu_offload=True),
        "zero2 accum offload": case(accum=2, sharding_strategy="zero2", cpu_offload=True),
        "fsdp sync once, groups": case(
            2, sharding_strategy="fsdp", sync_each_micro_step=False, fsdp_blocks_per_group=2, **AC
        ),
        "fsdp segments": case(2, sharding_strategy="fsdp", recompute="blocks", recompute_segment=2),
        "ddp groups offload": case(
            2,
            sharding_strategy="ddp",
            fsdp_blocks_per_group=2,
            cpu_offload=True,
            low_cpu_fsdp=False,
        ),
    },
    4: {
        "fsdp zero2": case(sharding_strategy="fsdp", reshard_after_forward=False),
        "zero1 tied groups": case(3, True, sharding_strategy="zero1", fsdp_blocks_per_group=2),
        "hsdp sync once": case(
            3,
            sharding_strategy="hsdp",
            hsdp_shard_size=2,
            sync_each_micro_step=False,
            fsdp_prefetch=1,
        ),
        "hsdp keeps, groups, offload": case(
            3,
            sharding_strategy="hsdp",
            hsdp_shard_size=2,
            reshard_after_forward=False,
            fsdp_blocks_per_group=2,
            fsdp_prefetch=1,
            cpu_offload=True,
        ),
        "hsdp accum": case(accum=3, sharding_strategy="hsdp", hsdp_shard_size=2),
        "hsdp tied": case(tied=True, sharding_strategy="hsdp", hsdp_shard_size=2, **AC),
    },
}
COMPILED = {
    "fsdp compile": case(sharding_strategy="fsdp", use_torch_compile=True),
    "fsdp compile ac accum": case(accum=2, sharding_strategy="fsdp", use_torch_compile=True, **AC),
    "fsdp compile segments": case(
        2, sharding_strategy="fsdp", use_torch_compile=True, recompute="blocks", recompute_segment=2
    ),
    "ddp compile": case(sharding_strategy="ddp", use_torch_compile=True),
    "zero1 compile groups ac": case(
        2, sharding_strategy="zero1", use_torch_compile=True, fsdp_blocks_per_group=2, **AC
    ),
}


def config(tied: bool) -> TransformerConfig:
    return TransformerConfig(
        3, 64, 160, 4, 2, 131, tie_embeddings=tied, max_seq_len=SEQ
    )  # 131 rows divide over no world


def batches() -> list[tuple[torch.Tensor, torch.Tensor]]:
    """(tokens, labels) of each step, labels masked unevenly over the rows."""
    generator = torch.Generator().manual_seed(7)
    result = []
    for _ in range(STEPS):
        tokens = torch.randint(
            0, 20, (ROWS, SEQ), generator=generator
        )  # few of the ids: something to learn
        labels = tokens.roll(-1, 1)
        labels[0, 3:] = -100
        labels[torch.rand(ROWS, SEQ, generator=generator) < 0.1] = -100
        result.append((tokens, labels))
    return result


def weights_digest(model: torch.nn.Module) -> str:
    digest = hashlib.sha256()
    for name, parameter in model.named_parameters():
        full = parameter.full_tensor() if hasattr(parameter, "full_tensor") else parameter
        digest.update(clean_name(name).encode() + full.detach().numpy().tobytes())
    return digest.hexdigest()


def train(one: Case, rank: int, world_size: int) -> tuple[str, list[float], list[float]]:
    """(digest of the initial weights, losses, gradient norms) of a run on this rank."""
    import torch.distributed as dist

    section = one.section
    dims = plan_dims(section, "tiny", World(0, 0, world_size, world_size))
    mesh = Mesh(dims, rank, "cpu")
    model = parallelize(
        config(one.tied), section, mesh, device=torch.device("cpu"), precision=one.precision, seed=5
    )
    assert model.rope.dtype == torch.float32
    digest = weights_digest(model)
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=3e-3, betas=(0.9, 0.95), weight_decay=0.1, fused=True
    )
    losses, norms = [], []
    rows = ROWS // world_size
    for tokens, labels in batches():
        mine = slice(rank * rows, (rank + 1) * rows)
        num_labels = (labels != -100).sum()
        micros = list(
            zip(tokens[mine].chunk(one.accum), labels[mine].chunk(one.accum), strict=True)
        )
        total = torch.zeros(())
        for i, (micro_tokens, micro_labels) in enumerate(micros):
            set_gradient_sync(model, i == len(micros) - 1, mesh)
            loss_sum, _ = model(micro_tokens, micro_labels)
            (loss_sum * mesh.size("loss") / num_labels).backward()
            total += loss_sum.detach()
        if world_size > 1:
            dist.all_reduce(total)
        norms.append(clip_grad_norm(model.parameters(), 1.0, mesh).item())
        losses.append((total / num_labels).item())
        optimizer.step()
        optimizer.zero_grad()
    return digest, losses, norms


def train_on_rank(cases: dict[str, Case]) -> dict[str, tuple[str, list[float], list[float]]]:
    import torch.distributed as dist

    return {name: train(one, dist.get_rank(), dist.get_world_size()) for name, one in cases.items()}


@functools.cache
def single(tied: bool, precision: Precision = FP32) -> tuple[str, list[float], list[float]]:
    return train(case(tied=tied, precision=precision), 0, 1)


@functools.cache
def sharded(world_size: int) -> list[dict[str, tuple[str, list[float], list[float]]]]:
    return run_ranks(train_on_rank, world_size, QUICK[world_size])


def check(one: Case, ranks: list[tuple[str, list[float], list[float]]]) -> None:
    digest, losses, norms = single(one.tied, one.precision)
    rtol = 2e-2 if one.precision == BF16 else 1e-5
    assert losses[-1] < losses[0]
    for rank_digest, rank_losses, rank_norms in ranks:
        assert rank_digest == digest
        assert rank_losses == pytest.approx(losses, rel=rtol)
        assert rank_norms == pytest.approx(norms, rel=10 * rtol)
        assert (rank_losses, rank_norms) == ranks[0][1:]  # alike on all ranks


@pytest.mark.parametrize(
    "world_size, name", [(world, name) for world, cases in QUICK.items() for name in cases]
)
def test_sharded_equals_single(world_size: int, name: str) -> None:
    check(QUICK[world_size][name], [results[name] for results in sharded(world_size)])


def test_accumulation_and_checkpointing_change_nothing_on_one_process() -> None:
    _, losses, norms = train(case(accum=3, low_cpu_fsdp=False, **AC), 0, 1)
    assert losses == pytest.approx(single(False)[1], rel=1e-5)
    assert norms == pytest.approx(single(False)[2], rel=1e-4)


def init_digest(cases: dict[str, Case]) -> dict[str, str]:
    import torch.distributed as dist

    digests = {}
    for name, one in cases.items():
        world = dist.get_world_size()
        dims = plan_dims(one.section, "tiny", World(0, 0, world, world))
        cpu = torch.device("cpu")
        model = parallelize(
            config(one.tied),
            one.section,
            Mesh(dims, dist.get_rank(), "cpu"),
            device=cpu,
            precision=FP32,
            seed=5,
        )
        digests[name] = weights_digest(model)
    return digests


def test_initial_weights_are_bit_equal_on_an_uneven_world() -> None:
    cases = {
        "fsdp": case(sharding_strategy="fsdp"),
        "tied": case(tied=True, sharding_strategy="fsdp", low_cpu_fsdp=False),
    }
    for digests in run_ranks(init_digest, 3, cases):
        assert digests == {"fsdp": single(False)[0], "tied": single(True)[0]}


@pytest.mark.slow
def test_compiled_sharded_equals_single() -> None:
    ranks = run_ranks(train_on_rank, 2, COMPILED)
    for name, one in COMPILED.items():
        check(one, [results[name] for results in ranks])
