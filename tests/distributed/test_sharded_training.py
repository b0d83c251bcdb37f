"""FSDP's gradient against the sum over ranks, to the last bit. test_layouts.py trains with each strategy."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from fms_fsdp.config import FP32, ParallelConfig
from fms_fsdp.distributed.axes import ParallelDims
from fms_fsdp.distributed.mesh import Mesh
from fms_fsdp.models.config import TransformerConfig
from fms_fsdp.models.init import clean_name
from fms_fsdp.models.llama import LanguageModel
from fms_fsdp.parallel.fsdp import set_gradient_sync
from fms_fsdp.parallel.parallelize import parallelize
from tests.distributed.launch import run_ranks
from tests.parallel.layouts import CPU, mesh_of

ROWS = 12
SEQ = 16


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


def build(section: ParallelConfig, mesh: Mesh) -> LanguageModel:
    return parallelize(config(False), section, mesh, device=CPU, precision=FP32, seed=5)


def unequal_sums(strategies: list[str]) -> list[tuple[str, str]]:
    """Returns (strategy, parameter) where the gradient is not the sum of those of all ranks, to the last bit
    (collective)."""
    tokens, labels = batches()[0]
    rank = dist.get_rank()
    world_size = dist.get_world_size()
    mine = (tokens[rank::world_size], labels[rank::world_size])
    model = build(ParallelConfig(), Mesh(ParallelDims("none"), 0, "cpu"))
    model(*mine)[0].backward()
    sums = dict[str, torch.Tensor]()
    for name, parameter in model.named_parameters():
        of_ranks = [torch.empty_like(parameter) for _ in range(world_size)]
        dist.all_gather(of_ranks, parameter.grad)
        sums[name] = torch.stack(of_ranks).sum(0)

    found = []
    for strategy in strategies:
        section = ParallelConfig(sharding_strategy=strategy)
        mesh = mesh_of(section)
        sharded = build(section, mesh)
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
