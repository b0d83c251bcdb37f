"""The schedule as arithmetic; the optimizer's groups and its ready state."""

from __future__ import annotations

import copy
import math

import pytest
import torch
from torch import nn

from fms_fsdp.config import OptimConfig
from fms_fsdp.optim.optimizers import Optimizers, build_optimizers
from fms_fsdp.optim.schedules import cosine_with_warmup


def rate(step: int, warmup: int = 10, steps: int = 110) -> float:
    return cosine_with_warmup(step, 2.0, warmup_steps=warmup, num_steps=steps, min_ratio=0.1)


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
    (optimizer,) = build_optimizers(OptimConfig(weight_decay=0.3), model).parts
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
    (mine,) = build_optimizers(section, ours).parts
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
            for group in optimizer.param_groups:
                group["lr"] = 1e-2
            optimizer.step()
    assert torch.equal(ours.weight, theirs.weight) and torch.equal(ours.bias, theirs.bias)
    kept = {key: value.dtype for key, value in mine.state[ours.weight].items()}
    assert kept == {key: value.dtype for key, value in reference.state[theirs.weight].items()}


def build_each(model: nn.Linear) -> dict[str, list[torch.optim.Optimizer]]:
    """Optimizers of every kind: with a fused kernel, without, for matrices alone, several in one run."""
    weights = list(model.parameters())
    adamw = build_optimizers(OptimConfig(), model).parts
    plain = (torch.optim.NAdam, torch.optim.Adafactor, torch.optim.RMSprop, torch.optim.Adagrad)
    found = {kind.__name__: [kind(weights, lr=1e-2)] for kind in plain}
    muon = [torch.optim.Muon([model.weight], lr=1e-2), torch.optim.AdamW([model.bias], lr=1e-2, fused=True)]
    slow = [torch.optim.AdamW(weights, lr=1e-2, foreach=False)]
    return found | {"adamw": list(adamw), "adamw, not fused": slow, "muon and adamw": muon}


def everything(model: nn.Module, optimizers: Optimizers) -> list[torch.Tensor]:
    state = [value for part in optimizers.parts for kept in part.state.values() for value in kept.values()]
    return [tensor.detach().clone() for tensor in [*model.parameters(), *state]]


KINDS = list(build_each(nn.Linear(4, 4)))


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("kind", KINDS)
def test_a_step_that_is_not_finite_changes_no_bit_and_the_next_one_does(kind: str, bad: float) -> None:
    """Weights, moments and step counts stay, even if the gradient of this rank is finite."""
    torch.manual_seed(0)
    model = nn.Linear(4, 4)
    optimizers = Optimizers(model, build_each(model)[kind])

    def step(norm: float) -> None:
        (model(torch.ones(2, 4)) * torch.arange(4)).sum().backward()
        if not math.isfinite(norm):
            model.weight.grad[0, 0] = norm
        optimizers.step(lambda base: base, torch.tensor(norm))
        optimizers.zero_grad()

    step(1.0)
    before = everything(model, optimizers)
    for _ in range(2):
        step(bad)
    assert all(torch.equal(a, b) for a, b in zip(before, everything(model, optimizers), strict=True))
    step(0.0)  # finite, and no reason to skip
    after = everything(model, optimizers)
    assert not torch.equal(before[0], after[0]) and not torch.equal(before[1], after[1])
    steps = {
        state["step"].item() for part in optimizers.parts for state in part.state.values() if "step" in state
    }
    assert steps == {2}


@pytest.mark.parametrize("kind", KINDS)
def test_a_saved_state_goes_on_as_if_it_had_never_been_saved(kind: str) -> None:
    torch.manual_seed(0)
    models = [nn.Linear(4, 4), nn.Linear(4, 4)]
    runs = [Optimizers(model, build_each(model)[kind]) for model in models]

    def step(model: nn.Module, optimizers: Optimizers, value: float) -> None:
        model(torch.full((2, 4), value)).square().sum().backward()
        optimizers.step(lambda base: base / 2, torch.tensor(1.0))
        optimizers.zero_grad()

    for value in (1.0, 2.0):
        step(models[0], runs[0], value)
    models[1].load_state_dict(models[0].state_dict())
    runs[1].load_state_dict({name: copy.deepcopy(value) for name, value in runs[0].state_dict().items()})
    for model, optimizers in zip(models, runs, strict=True):
        step(model, optimizers, 3.0)
    both = (everything(model, optimizers) for model, optimizers in zip(models, runs, strict=True))
    assert all(torch.equal(a, b) for a, b in zip(*both, strict=True))
