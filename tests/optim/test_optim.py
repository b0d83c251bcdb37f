"""The optimizer's groups, its ready state, and clipping within its step."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from fms_fsdp.config import FP32, OptimConfig, Precision
from fms_fsdp.config.optim import OPTIMIZERS
from fms_fsdp.distributed.axes import ParallelDims
from fms_fsdp.distributed.mesh import Mesh
from fms_fsdp.errors import UserError
from fms_fsdp.optim.optimizers import Optimizers, build_optimizers, example_state

ALONE = Mesh(ParallelDims("none"), 0, "cpu")


def build_named(name: str, model: nn.Module) -> Optimizers:
    """The optimizer of that name; one of the user's own makes its state at its first step."""
    name, *more = name.split()
    kwargs = ("momentum=0.9", *more) if name == "sgd" else ()
    section = OptimConfig(optimizer=name, optimizer_kwargs=kwargs, learning_rate=1e-2)
    return build_optimizers(section, model)


class Blocks(nn.Module):
    """A linear layer whose weight is a matrix of the blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.blocks(x)
        return out


def everything(model: nn.Module, optimizers: Optimizers) -> list[torch.Tensor]:
    for part in optimizers.optimizers:
        part.state_dict()  # corrects the count of a step that was skipped on the device
    states = [kept for part in optimizers.optimizers for kept in part.state.values()]
    values = [value for kept in states for value in kept.values()]
    return [tensor.detach().clone() for tensor in [*model.parameters(), *values]]


NAMES = [*OPTIMIZERS, "torch.optim:NAdam", "torch.optim:Adafactor", "sgd dampening=0.5"]


@pytest.mark.parametrize("kind", NAMES)
def test_non_finite_step_changes_no_bit(kind: str) -> None:
    """Weights, moments and step counts stay, even if the gradient of this rank is finite."""
    torch.manual_seed(0)
    model = Blocks()
    optimizers = build_named(kind, model)

    def step(norm: float) -> None:
        (model(torch.ones(2, 4)) * torch.arange(4)).sum().backward()
        if not math.isfinite(norm):
            model.blocks.weight.grad[0, 0] = norm
        optimizers.step(lambda base: base, torch.tensor(norm))
        optimizers.zero_grad()

    step(1.0)
    before = everything(model, optimizers)
    for bad in (math.nan, math.inf, -math.inf):
        step(bad)
    assert all(map(torch.equal, before, everything(model, optimizers)))
    step(0.0)  # finite, and no reason to skip
    after = everything(model, optimizers)
    assert not torch.equal(before[0], after[0]) and not torch.equal(before[1], after[1])
    states = [state for part in optimizers.optimizers for state in part.state.values()]
    steps = {state["step"].item() for state in states if "step" in state}
    assert steps == (set() if "sgd" in kind else {2})


def test_skipped_step_of_unused_weight_is_not_counted() -> None:
    """Its count became -1."""
    model = nn.ModuleDict({"blocks": nn.Linear(4, 4), "unused": nn.Linear(4, 4)})
    optimizers = build_named("lamb", model)
    for norm in (1.0, math.nan, 1.0):
        for parameter in model["blocks"].parameters():
            parameter.grad = torch.ones_like(parameter)
        optimizers.step(lambda base: base, torch.tensor(norm))
        optimizers.zero_grad()
    state = optimizers.state_dict()
    assert state["blocks.weight.step"] == 2 and state["unused.weight.step"] == 0


BF16_MOMENTS = Precision("bf16", state="bf16")


@pytest.mark.parametrize(
    ("name", "precision"), [*((name, FP32) for name in OPTIMIZERS), ("adamw", BF16_MOMENTS)]
)
def test_weight_counts_its_own_steps(name: str, precision: Precision) -> None:
    """One whose first gradient came later had the count of the others: madgrad moved it to 0."""
    section = OptimConfig(optimizer=name, learning_rate=1e-2)

    def late_weight(*others: str) -> torch.Tensor:
        layers = {key: nn.Linear(4, 4, bias=False) for key in (*others, "late")}
        model = nn.ModuleDict({"blocks": nn.ModuleDict(layers)})
        nn.init.eye_(layers["late"].weight)
        optimizers = build_optimizers(section, model, precision)
        for number in range(1, 5):
            present = layers if number > 2 else others
            for key in present:
                generator = torch.Generator().manual_seed(number)
                layers[key].weight.grad = torch.randn(4, 4, generator=generator)
            if present:
                optimizers.step(lambda base: base, torch.tensor(1.0))
            optimizers.zero_grad()
        return layers["late"].weight

    torch.testing.assert_close(late_weight("early"), late_weight(), rtol=1e-6, atol=1e-7)


class CountsInGroup(torch.optim.SGD):
    """Has its count of steps in its groups, where torch's optimizers have none."""

    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(params, lr, momentum=0.9)
        for group in self.param_groups:
            group["num_steps"] = 0

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        super().step(closure)
        for group in self.param_groups:
            group["num_steps"] += 1


def test_values_that_no_checkpoint_stores_are_rejected() -> None:
    """A resumed run counted from 0 again, without a word."""
    section = OptimConfig(optimizer=f"{__name__}:CountsInGroup")
    with pytest.raises(UserError, match="a step changes 'num_steps' of its groups, which a check"):
        example_state(section)


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


def test_skip_flag_is_with_weights_before_step() -> None:
    """Under CPU offload the norm is on the GPU: a copy on its way would decide by stale memory."""
    weight = nn.Parameter(torch.zeros(2, device="meta"))
    part = Skipping([weight], lr=1.0)
    with NonBlocking() as copies:
        Optimizers(nn.Module(), [part]).step(lambda base: base, torch.tensor(1.0))
    assert (
        part.seen.device == weight.device and part.seen.dtype == torch.float32 and copies.count == 0
    )


@pytest.mark.parametrize("kwargs", [("momentum=0.9",), ("momentum=0.9", "dampening=0.5")])
def test_first_save_has_no_momentum(kwargs: tuple[str, ...]) -> None:
    """torch creates the state by a step, in which coupled decay would become momentum."""
    name = "sgd" if len(kwargs) > 1 else "torch.optim:SGD"
    config = OptimConfig(optimizer=name, optimizer_kwargs=kwargs, weight_decay=0.1)
    optimizers = build_optimizers(config, Blocks())
    state = optimizers.state_dict()
    assert state and all(not value.any() for value in state.values())
    groups = [group for each in optimizers.optimizers for group in each.param_groups]
    assert not optimizers.optimizers[0].state and max(g["weight_decay"] for g in groups) == 0.1
