"""The schedule as arithmetic; the optimizer's groups and its ready state."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from fms_fsdp.config import OptimConfig
from fms_fsdp.optim.optimizers import build_optimizer, set_learning_rate, step_if_finite
from fms_fsdp.optim.schedules import cosine_with_warmup


def rate(step: int, warmup: int = 10, steps: int = 110) -> float:
    return cosine_with_warmup(step, peak=2.0, warmup_steps=warmup, num_steps=steps, min_ratio=0.1)


def test_linear_warmup_then_half_cosine_then_flat() -> None:
    assert rate(1) == pytest.approx(0.2)
    assert rate(10) == pytest.approx(2.0)
    assert rate(60) == pytest.approx(2.0 * 0.55)
    assert rate(35) == pytest.approx(2.0 * (0.1 + 0.9 * 0.5 * (1 + math.cos(math.pi / 4))))
    assert rate(110) == pytest.approx(0.2) and rate(10_000) == pytest.approx(0.2)
    assert all(rate(step) >= rate(step + 1) for step in range(10, 120))


@pytest.mark.parametrize(("warmup", "steps"), [(0, 1), (1, 1), (0, 5), (5, 5)])
def test_short_runs_have_a_rate_at_every_step(warmup: int, steps: int) -> None:
    assert all(0 < rate(step, warmup, steps) <= 2.0 for step in range(1, steps + 2))


def test_default_warmup_is_5_percent_and_at_most_2000() -> None:
    assert OptimConfig().warmup(1000) == 50
    assert OptimConfig().warmup(10**6) == 2000
    assert OptimConfig().warmup(3) == 1


def test_matrices_decay_and_norms_do_not() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4))
    optimizer = build_optimizer(OptimConfig(weight_decay=0.3), model)
    decay = {id(p): group["weight_decay"] for group in optimizer.param_groups for p in group["params"]}
    assert {name: decay[id(p)] for name, p in model.named_parameters()} == {
        "0.weight": 0.3,
        "0.bias": 0.0,
        "1.weight": 0.0,
        "1.bias": 0.0,
    }


def test_ready_made_state_changes_no_step() -> None:
    """The allocated state must be exactly what AdamW would make itself at its first step."""
    torch.manual_seed(0)
    ours, theirs = nn.Linear(8, 8), nn.Linear(8, 8)
    theirs.load_state_dict(ours.state_dict())
    section = OptimConfig(weight_decay=0.1)
    mine = build_optimizer(section, ours)
    groups = [
        {"params": [theirs.weight], "weight_decay": 0.1},
        {"params": [theirs.bias], "weight_decay": 0.0},
    ]
    reference = torch.optim.AdamW(groups, lr=1.0, betas=(0.9, 0.95), eps=1e-8, fused=True)
    for _ in range(3):
        x = torch.randn(5, 8)
        for model, optimizer in ((ours, mine), (theirs, reference)):
            optimizer.zero_grad()
            model(x).square().sum().backward()
            set_learning_rate(optimizer, 1e-2)
            optimizer.step()
    assert torch.equal(ours.weight, theirs.weight) and torch.equal(ours.bias, theirs.bias)
    kept = {key: value.dtype for key, value in mine.state[ours.weight].items()}
    assert kept == {key: value.dtype for key, value in reference.state[theirs.weight].items()}


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_a_step_that_is_not_finite_changes_no_bit_and_the_next_one_does(bad: float) -> None:
    """Weights, moments and step counts; the gradient itself need not show it: another rank's may be the bad one."""
    torch.manual_seed(0)
    model = nn.Linear(4, 4)
    optimizer = build_optimizer(OptimConfig(), model)

    def everything() -> list[torch.Tensor]:
        moments = [value for state in optimizer.state.values() for value in state.values()]
        return [tensor.detach().clone() for tensor in [*model.parameters(), *moments]]

    def step(norm: float) -> None:
        model(torch.ones(2, 4)).sum().backward()
        step_if_finite(optimizer, torch.tensor(norm))
        optimizer.zero_grad()

    step(1.0)
    before = everything()
    for _ in range(2):
        step(bad)
    assert all(torch.equal(a, b) for a, b in zip(before, everything(), strict=True))
    step(0.0)  # finite, and no reason to skip
    assert not any(torch.equal(a, b) for a, b in zip(before, everything(), strict=True))
    assert {state["step"].item() for state in optimizer.state.values()} == {2}
