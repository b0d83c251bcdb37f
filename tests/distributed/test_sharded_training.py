"""Sharded training against one process: initial weights to the last bit, losses and gradient norms.

The processes of one world size are started once and run all its cases.
"""

from __future__ import annotations

import functools
import hashlib
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from fms_fsdp.config import BF16, FP32, ParallelConfig, Precision
from fms_fsdp.distributed.axes import ParallelDims
from fms_fsdp.distributed.mesh import Mesh
from fms_fsdp.models.config import TransformerConfig
from fms_fsdp.models.init import clean_name
from fms_fsdp.models.llama import Llama
from fms_fsdp.optim.optimizers import scale_gradients
from fms_fsdp.parallel.fsdp import clip_factor, set_gradient_sync
from fms_fsdp.parallel.parallelize import parallelize
from tests.distributed.launch import run_ranks
from tests.parallel.layouts import mesh_of

ROWS = 12
SEQ = 16
STEPS = 5


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
FSDP, DDP, HSDP, ZERO1, ZERO2 = (
    {"sharding_strategy": name} for name in ("fsdp", "ddp", "hsdp", "zero1", "zero2")
)
QUICK = {
    2: {
        "fsdp accum ac": case(accum=3, **FSDP, **AC),
        "fsdp tied eager-init": case(tied=True, **FSDP, low_cpu_fsdp=False),
        "fsdp offload": case(**FSDP, cpu_offload=True, fsdp_prefetch=2),
        "fsdp bf16": case(precision=BF16, **FSDP),
        "fsdp sync once, groups": case(
            2, **FSDP, sync_each_micro_step=False, fsdp_blocks_per_group=2, **AC
        ),
        "fsdp segments": case(2, **FSDP, recompute="blocks", recompute_segment=2),
        "zero1 tied bf16 accum ac": case(3, True, BF16, **ZERO1, **AC),
        "zero1 offload": case(2, **ZERO1, cpu_offload=True),
        "zero2 accum offload": case(2, **ZERO2, cpu_offload=True),
        "ddp groups offload": case(
            2, **DDP, fsdp_blocks_per_group=2, cpu_offload=True, low_cpu_fsdp=False
        ),
    },
    4: {
        "zero1 tied groups": case(3, True, **ZERO1, fsdp_blocks_per_group=2),
        "hsdp tied ac": case(3, True, **HSDP, hsdp_shard_size=2, **AC),
        "hsdp sync once": case(
            3, **HSDP, hsdp_shard_size=2, sync_each_micro_step=False, fsdp_prefetch=1
        ),
        "hsdp keeps, groups, offload": case(
            3,
            **HSDP,
            hsdp_shard_size=2,
            reshard_after_forward=False,
            fsdp_blocks_per_group=2,
            fsdp_prefetch=1,
            cpu_offload=True,
        ),
    },
}
COMPILED = {
    "fsdp compile": case(**FSDP, use_torch_compile=True),
    "fsdp compile segments": case(
        2, **FSDP, use_torch_compile=True, recompute="blocks", recompute_segment=2
    ),
    "ddp compile": case(**DDP, use_torch_compile=True),
    "zero1 compile groups ac": case(
        2, **ZERO1, use_torch_compile=True, fsdp_blocks_per_group=2, **AC
    ),
}


def config(tied: bool) -> TransformerConfig:
    return TransformerConfig(
        3, 64, 160, 4, 2, 131, tie_embeddings=tied, max_seq_len=SEQ
    )  # 131 rows divide over no world


def batches() -> list[tuple[torch.Tensor, torch.Tensor]]:
    """(tokens, labels) of ten steps, labels masked unevenly over the rows."""
    generator = torch.Generator().manual_seed(7)
    result = []
    for _ in range(10):
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


def build(one: Case) -> tuple[Llama, Mesh]:
    section = one.section
    mesh = mesh_of(section)
    model = parallelize(
        config(one.tied),
        section,
        mesh,
        device=torch.device("cpu"),
        precision=one.precision,
        seed=5,
    )
    return model, mesh


def train(one: Case) -> tuple[str, list[float], list[float]]:
    """Returns a digest of the initial weights, losses and gradient norms (collective)."""
    model, mesh = build(one)
    assert model.rope.dtype == torch.float32
    digest = weights_digest(model)
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=3e-3, betas=(0.9, 0.95), weight_decay=0.1, fused=True
    )
    losses, norms = [], []
    rows = ROWS // mesh.size("dp")
    mine = slice(mesh.axis_rank("dp") * rows, (mesh.axis_rank("dp") + 1) * rows)
    for tokens, labels in batches()[:STEPS]:
        num_labels = (labels != -100).sum()
        total = torch.zeros(())
        micros = zip(tokens[mine].chunk(one.accum), labels[mine].chunk(one.accum), strict=True)
        for i, (micro_tokens, micro_labels) in enumerate(micros):
            set_gradient_sync(model, i == one.accum - 1, mesh)
            loss_sum, _ = model(micro_tokens, micro_labels)
            (loss_sum * mesh.size("dp_cp") / num_labels).backward()
            total += loss_sum.detach()
        norm, factor = clip_factor(model.parameters(), 1.0, mesh)
        assert factor is not None
        scale_gradients(list(model.parameters()), factor)
        norms.append(norm.item())
        losses.append((mesh.sum(total, "world") / num_labels).item())
        optimizer.step()
        optimizer.zero_grad()
    return digest, losses, norms


def train_on_rank(cases: dict[str, Case]) -> dict[str, tuple[str, list[float], list[float]]]:
    return {name: train(one) for name, one in cases.items()}


@functools.cache
def single(tied: bool, precision: Precision = FP32) -> tuple[str, list[float], list[float]]:
    return train(case(tied=tied, precision=precision))


def check(world_size: int, cases: dict[str, Case]) -> None:
    """Asserts that each case on so many ranks equals one process."""
    by_rank = run_ranks(train_on_rank, world_size, cases)
    for name, one in cases.items():
        digest, losses, norms = single(one.tied, one.precision)
        rtol = 2e-2 if one.precision == BF16 else 1e-5
        assert losses[-1] < losses[0]
        for rank_digest, rank_losses, rank_norms in (results[name] for results in by_rank):
            assert rank_digest == digest, name
            assert rank_losses == pytest.approx(losses, rel=rtol), name
            assert rank_norms == pytest.approx(norms, rel=10 * rtol), name
            assert (rank_losses, rank_norms) == by_rank[0][name][1:]  # identical on every rank


@pytest.mark.parametrize("world_size", QUICK)
def test_sharded_equals_single(world_size: int) -> None:
    check(world_size, QUICK[world_size])


def init_digests(cases: list[Case]) -> list[str]:
    return [weights_digest(build(one)[0]) for one in cases]


def test_initial_weights_are_equal_on_uneven_world() -> None:
    cases = [case(**FSDP), case(tied=True, **FSDP, low_cpu_fsdp=False)]
    expected = [single(False)[0], single(True)[0]]
    assert run_ranks(init_digests, 3, cases) == [expected] * 3


def unequal_sums(strategies: list[str]) -> list[tuple[str, str]]:
    """Returns (strategy, parameter) where the gradient is not the sum of those of all ranks, to the last bit
    (collective)."""
    tokens, labels = batches()[0]
    rank = dist.get_rank()
    world_size = dist.get_world_size()
    mine = (tokens[rank::world_size], labels[rank::world_size])
    model = parallelize(
        config(False),
        ParallelConfig(),
        Mesh(ParallelDims("none"), 0, "cpu"),
        device=torch.device("cpu"),
        precision=FP32,
        seed=5,
    )
    model(*mine)[0].backward()
    sums = dict[str, torch.Tensor]()
    for name, parameter in model.named_parameters():
        of_ranks = [torch.empty_like(parameter) for _ in range(world_size)]
        dist.all_gather(of_ranks, parameter.grad)
        sums[name] = torch.stack(of_ranks).sum(0)

    found = []
    for strategy in strategies:
        sharded, mesh = build(case(sharding_strategy=strategy))
        set_gradient_sync(sharded, True, mesh)
        sharded(*mine)[0].backward()
        for name, parameter in sharded.named_parameters():
            gradient = parameter.grad
            assert gradient is not None, name
            if isinstance(gradient, DTensor):
                gradient = gradient.full_tensor()
            # FSDP averages, which is exact for two ranks.
            if not torch.equal(gradient * mesh.size("dp_cp"), sums[clean_name(name)]):
                found.append((strategy, clean_name(name)))
    return found


def test_gradient_is_the_exact_sum_of_ranks() -> None:
    strategies = ["fsdp", "zero1", "zero2", "ddp"]
    assert run_ranks(unequal_sums, 2, strategies) == [[], []]


@pytest.mark.slow
def test_compiled_sharded_equals_single() -> None:
    check(2, COMPILED)
