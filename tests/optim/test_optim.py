"""The optimizer's groups, its ready state, and clipping within its step."""

from __future__ import annotations

import copy
import math
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from fms_fsdp.config import OptimConfig
from fms_fsdp.config.optim import OPTIMIZERS
from fms_fsdp.distributed.axes import ParallelDims
from fms_fsdp.distributed.mesh import Mesh
from fms_fsdp.optim.optimizers import Optimizers, build_optimizers

ALONE = Mesh(ParallelDims("none"), 0, "cpu")


def test_matrices_decay_and_norms_do_not() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4))
    (optimizer,) = build_optimizers(OptimConfig(weight_decay=0.3), model).optimizers
    decay = {
        id(p): group["weight_decay"] for group in optimizer.param_groups for p in group["params"]
    }
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
    (mine,) = build_optimizers(section, ours).optimizers
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


def build_named(name: str, model: nn.Module) -> Optimizers:
    """The optimizer of that name, also one of the user's own, which makes its state at its first step."""
    name, *more = name.split()
    kwargs = ("momentum=0.9", *more) if name == "sgd" else ()
    return build_optimizers(
        OptimConfig(optimizer=name, optimizer_kwargs=kwargs, learning_rate=1e-2), model
    )


class Blocks(nn.Module):
    """A linear layer whose weight is a matrix of the blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.Linear(4, 4)

    @property
    def weight(self) -> torch.Tensor:
        return self.blocks.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.blocks(x)
        return out


def everything(model: nn.Module, optimizers: Optimizers) -> list[torch.Tensor]:
    state = [
        value
        for part in optimizers.optimizers
        for kept in part.state.values()
        for value in kept.values()
    ]
    return [tensor.detach().clone() for tensor in [*model.parameters(), *state]]


NAMES = [*OPTIMIZERS] + [
    "torch.optim:NAdam",
    "torch.optim:Adafactor",
]
NAMES.append("sgd dampening=0.5")


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("kind", NAMES)
def test_a_step_that_is_not_finite_changes_no_bit_and_the_next_one_does(
    kind: str, bad: float
) -> None:
    """Weights, moments and step counts stay, even if the gradient of this rank is finite."""
    torch.manual_seed(0)
    model = Blocks()
    optimizers = build_named(kind, model)

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
    assert all(
        torch.equal(a, b) for a, b in zip(before, everything(model, optimizers), strict=True)
    )
    step(0.0)  # finite, and no reason to skip
    after = everything(model, optimizers)
    assert not torch.equal(before[0], after[0]) and not torch.equal(before[1], after[1])
    steps = {
        state["step"].item()
        for part in optimizers.optimizers
        for state in part.state.values()
        if "step" in state
    }
    assert steps == (set() if "sgd" in kind else {2})


class Skipping(torch.optim.SGD):
    """Looks, as torch's fused optimizers do, at `found_inf` when it steps."""

    _step_supports_amp_scaling = True
    seen: torch.Tensor

    def step(self, closure: object = None) -> None:  # type: ignore[override]
        self.seen = self.found_inf  # type: ignore[attr-defined]


class NonBlocking(TorchDispatchMode):
    """Counts copies that nobody waits for."""

    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += bool((kwargs or {}).get("non_blocking"))
        return func(*args, **(kwargs or {}))


def test_the_verdict_on_a_step_lies_with_the_weights_before_the_step() -> None:
    """Under CPU offload the norm is on the GPU: a copy on its way would decide by stale memory."""
    weight = nn.Parameter(torch.zeros(2, device="meta"))
    part = Skipping([weight], lr=1.0)
    with NonBlocking() as copies:
        Optimizers(nn.Module(), [part]).step(lambda base: base, torch.tensor(1.0))
    assert (
        part.seen.device == weight.device and part.seen.dtype == torch.float32 and copies.count == 0
    )


@pytest.mark.parametrize("kind", NAMES)
def test_a_saved_state_goes_on_as_if_it_had_never_been_saved(kind: str) -> None:
    torch.manual_seed(0)
    models = [Blocks(), Blocks()]
    runs = [build_named(kind, model) for model in models]

    def step(model: nn.Module, optimizers: Optimizers, value: float) -> None:
        model(torch.full((2, 4), value)).square().sum().backward()
        optimizers.step(lambda base: base / 2, torch.tensor(1.0))
        optimizers.zero_grad()

    for value in (1.0, 2.0):
        step(models[0], runs[0], value)
    models[1].load_state_dict(models[0].state_dict())
    runs[1].load_state_dict(
        {name: copy.deepcopy(value) for name, value in runs[0].state_dict().items()}
    )
    for model, optimizers in zip(models, runs, strict=True):
        step(model, optimizers, 3.0)
    both = (everything(model, optimizers) for model, optimizers in zip(models, runs, strict=True))
    assert all(torch.equal(a, b) for a, b in zip(*both, strict=True))


@pytest.mark.parametrize("kwargs", [("momentum=0.9",), ("momentum=0.9", "dampening=0.5")])
def test_first_save_of_lazy_state_holds_no_momentum(kwargs: tuple[str, ...]) -> None:
    """torch creates the state by a step, in which coupled decay would become momentum."""
    name = "sgd" if len(kwargs) > 1 else "torch.optim:SGD"
    config = OptimConfig(optimizer=name, optimizer_kwargs=kwargs, weight_decay=0.1)
    optimizers = build_optimizers(config, Blocks())
    state = optimizers.state_dict()
    assert state and all(not value.any() for value in state.values())
    groups = [group for each in optimizers.optimizers for group in each.param_groups]
    assert not optimizers.optimizers[0].state and max(g["weight_decay"] for g in groups) == 0.1
