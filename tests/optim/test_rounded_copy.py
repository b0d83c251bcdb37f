"""Weights rounded stochastically for the matmuls of a step: unbiased, with the same bits again."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor

from fms_fsdp.config import BF16, ParallelConfig
from fms_fsdp.distributed.axes import ParallelDims
from fms_fsdp.models.flops import num_params
from fms_fsdp.optim.stochastic_rounding import RoundedWeights
from fms_fsdp.parallel.parallelize import parallelize
from fms_fsdp.predict.memory import Step, minimum_memory
from fms_fsdp.predict.meter import ModelSetup
from tests.distributed.launch import run_ranks
from tests.parallel.layouts import CPU, SHAPE, mesh_of

CHANCE = replace(BF16, rounded_copy=True)


class Some(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(1)
        # more than is drawn at a time
        self.matrix = nn.Parameter(torch.randn(600, 500, generator=generator))
        values = [0.0, -0.0, 1e-45, -1e-40, 1.0, 3.38e38, -1.999999]
        self.vector = nn.Parameter(torch.tensor(values))


def copies(copy: RoundedWeights, model: nn.Module, step: int) -> list[torch.Tensor]:
    with copy.rounded(step):
        return [parameter.detach().clone() for parameter in model.parameters()]


def test_weights_are_restored_to_the_bit() -> None:
    model = Some()
    before = [parameter.detach().clone().view(torch.int32) for parameter in model.parameters()]
    copy = RoundedWeights(model, 3)

    def is_restored() -> bool:
        after = (parameter.detach().view(torch.int32) for parameter in model.parameters())
        return all(map(torch.equal, before, after))

    for step in range(1, 6):
        for rounded in copies(copy, model, step):
            assert torch.equal(rounded, rounded.bfloat16().float())
        assert is_restored()
    with pytest.raises(InterruptedError), copy.rounded(6):
        raise InterruptedError
    assert is_restored()


def test_rounded_copies_are_unbiased_and_repeatable() -> None:
    model, steps = Some(), 100
    copy, matrix = RoundedWeights(model, 3), model.matrix.detach().double()
    found = torch.stack([copies(copy, model, step)[0] for step in range(steps)])
    gap = torch.exp2(matrix.abs().log2().floor() - 7)  # between neighbours in bf16
    error = (found.double().mean(0) - matrix) / gap
    assert abs(error.mean().item()) < 1e-3 and error.abs().max() < 0.25
    assert error.std().item() < 0.5 / steps**0.5
    nearest = (matrix.float().bfloat16().double() - matrix) / gap
    assert nearest.std().item() > 0.25
    assert torch.equal(copies(copy, model, 7)[0], found[7])
    assert torch.equal(
        copies(RoundedWeights(Some(), 3), model, 7)[0], matrix.float()
    )  # of another model
    assert not torch.equal(found[7], found[8])
    assert not torch.equal(copies(RoundedWeights(model, 4), model, 7)[0], found[7])


def rounded_weights(strategy: str) -> dict[str, torch.Tensor]:
    """Returns the full rounded weights (collective)."""
    section = ParallelConfig(sharding_strategy=strategy)
    mesh = mesh_of(section)
    model = parallelize(SHAPE, section, mesh, device=CPU, precision=CHANCE, seed=5)
    with RoundedWeights(model, 5).rounded(3):
        return {
            name: (p.full_tensor() if isinstance(p, DTensor) else p).detach().clone()
            for name, p in model.named_parameters()
        }


def test_ranks_draw_like_one_process() -> None:
    alone = rounded_weights("none")
    for found in run_ranks(rounded_weights, 2, "fsdp"):
        assert all(torch.equal(alone[name], value) for name, value in found.items())


def test_memory_of_rounded_copy_is_predicted() -> None:
    model = Some()
    lower = [bits for _, _, bits in RoundedWeights(model, 3)._weights]
    assert sum(bits.nbytes for bits in lower) == 2 * sum(p.numel() for p in model.parameters())
    dims = ParallelDims("fsdp", 1, 4)
    shapes = (
        ModelSetup(SHAPE, ParallelConfig(), each, dims, SHAPE.max_seq_len)
        for each in (CHANCE, BF16)
    )
    with_copy, without = (minimum_memory(Step(shape, 1, 1)).state for shape in shapes)
    assert with_copy - without == pytest.approx(2 * num_params(SHAPE) / 4, abs=1)
