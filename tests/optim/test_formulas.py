"""Every optimizer on one process against torch's own, or against its paper's formulas written out in fp64."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn

from fms_fsdp.config import OptimConfig
from fms_fsdp.config.optim import OPTIMIZERS
from fms_fsdp.optim.optimizers import build_optimizers
from fms_fsdp.optim.sharded_optimizers import Madgrad

STEPS, RATE, DECAY, EPS, BETAS = 12, 1e-2, 0.1, 1e-8, (0.9, 0.95)
Step = Callable[[int, float, torch.Tensor, torch.Tensor, dict[str, torch.Tensor]], torch.Tensor]


class Model(nn.Module):
    """A wide and a tall matrix and a vector; the vector has no decay."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        sizes = {"wide": (6, 9), "tall": (12, 4), "vector": (5,)}
        self.blocks = nn.ParameterDict(
            {name: nn.Parameter(torch.randn(size)) for name, size in sizes.items()}
        )


def gradients(model: nn.Module) -> Iterator[tuple[int, float, list[torch.Tensor]]]:
    """(number of the step, rate, gradient of each parameter); some entries are always 0."""
    generator = torch.Generator().manual_seed(2)
    for step in range(1, STEPS + 1):
        found = [torch.randn(p.shape, generator=generator) * step % 3 for p in model.parameters()]
        for gradient in found:
            gradient[0] = 0.0
        yield step, RATE / math.sqrt(step), found


def trained(name: str, *kwargs: str) -> list[torch.Tensor]:
    model = Model()
    section = OptimConfig(
        optimizer=name,
        optimizer_kwargs=kwargs,
        learning_rate=RATE,
        weight_decay=DECAY,
        adam_eps=EPS,
    )
    optimizers = build_optimizers(section, model)
    for _, rate, found in gradients(model):
        for parameter, gradient in zip(model.parameters(), found, strict=True):
            parameter.grad = gradient
        optimizers.step(lambda base, rate=rate: rate, torch.tensor(1.0))  # type: ignore[misc]
        optimizers.zero_grad()
    return list(model.parameters())


def trained_by(build: Callable[..., torch.optim.Optimizer], **settings: Any) -> list[torch.Tensor]:
    """By an optimizer of torch, which makes its state at its first step."""
    model = Model()
    matrices = [p for p in model.parameters() if p.ndim > 1]
    vectors = [p for p in model.parameters() if p.ndim == 1]
    groups: list[dict[str, Any]] = [{"params": matrices, "weight_decay": DECAY}]
    if build is not torch.optim.Muon:
        groups.append({"params": vectors, "weight_decay": 0.0})
    optimizer = build(groups, lr=RATE, **settings)
    for _, rate, found in gradients(model):
        for parameter, gradient in zip(model.parameters(), found, strict=True):
            parameter.grad = gradient
        for group in optimizer.param_groups:
            group["lr"] = rate
        optimizer.step()
    return list(model.parameters())


TORCH: dict[tuple[str, ...], tuple[Any, dict[str, Any]]] = {
    ("adamw", "amsgrad=yes"): (torch.optim.AdamW, {"betas": BETAS, "eps": EPS, "amsgrad": True}),
    ("adamw",): (torch.optim.AdamW, {"betas": BETAS, "eps": EPS}),
    ("adam",): (torch.optim.Adam, {"betas": BETAS, "eps": EPS}),
    ("sgd",): (torch.optim.SGD, {}),
    ("sgd", "momentum=0.9", "nesterov=true"): (
        torch.optim.SGD,
        {"momentum": 0.9, "nesterov": True},
    ),
    ("sgd", "momentum=0.9", "dampening=0.5"): (
        torch.optim.SGD,
        {"momentum": 0.9, "dampening": 0.5},
    ),
    ("sgd", "dampening=0.5"): (torch.optim.SGD, {"dampening": 0.5}),
    ("adagrad", "lr_decay=0.1"): (torch.optim.Adagrad, {"eps": EPS, "lr_decay": 0.1}),
    ("adagrad", "initial_accumulator_value=0.3"): (
        torch.optim.Adagrad,
        {"eps": EPS, "initial_accumulator_value": 0.3},
    ),
    ("adadelta", "rho=0.8"): (torch.optim.Adadelta, {"eps": EPS, "rho": 0.8}),
    ("adamax",): (torch.optim.Adamax, {"betas": BETAS, "eps": EPS}),
    ("rmsprop",): (torch.optim.RMSprop, {"eps": EPS}),
    ("rmsprop", "momentum=0.9", "centered=true"): (
        torch.optim.RMSprop,
        {"eps": EPS, "momentum": 0.9, "centered": True},
    ),
    ("rprop", "etas=0.4:1.3"): (torch.optim.Rprop, {"etas": (0.4, 1.3)}),
    ("adafactor", "d=2"): (torch.optim.Adafactor, {"d": 2.0}),
}


@pytest.mark.parametrize("given", TORCH, ids=" ".join)
def test_optimizers_equal_those_of_torch(given: tuple[str, ...]) -> None:
    """Also from the state that is made in advance."""
    build, settings = TORCH[given]
    for ours, theirs in zip(trained(*given), trained_by(build, **settings), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=2e-6, atol=2e-6)


@pytest.mark.parametrize(
    ("scale", "theirs"), [("original", "original"), ("rms", "match_rms_adamw")]
)
def test_muon_is_bit_equal_to_torch(scale: str, theirs: str) -> None:
    settings = {"adjust_lr_fn": theirs, "momentum": 0.9, "ns_steps": 4}
    expected = trained_by(torch.optim.Muon, **settings)
    found = trained("muon", f"scale={scale}", "momentum=0.9", "ns_steps=4")
    matrices = [pair for pair in zip(found, expected, strict=True) if pair[0].ndim == 2]
    assert len(matrices) == 2 and all(torch.equal(*pair) for pair in matrices)


def lamb(
    step: int, rate: float, w: torch.Tensor, g: torch.Tensor, kept: dict[str, torch.Tensor]
) -> torch.Tensor:
    kept["m"] = 0.9 * kept.get("m", 0.0 * g) + 0.1 * g
    kept["v"] = 0.95 * kept.get("v", 0.0 * g) + 0.05 * g**2
    u = kept["m"] / (1 - 0.9**step) / ((kept["v"] / (1 - 0.95**step)).sqrt() + EPS)
    u = u + (DECAY * w if w.ndim > 1 else 0.0)
    return w - rate * w.norm() / u.norm() * u


def novograd(
    step: int, rate: float, w: torch.Tensor, g: torch.Tensor, kept: dict[str, torch.Tensor]
) -> torch.Tensor:
    square = (g**2).sum()
    kept["v"] = square if step == 1 else 0.95 * kept["v"] + 0.05 * square
    decay = DECAY * w if w.ndim > 1 else 0.0
    kept["m"] = 0.9 * kept.get("m", 0.0 * g) + g / (kept["v"].sqrt() + EPS) + decay
    return w - rate * kept["m"]


def madgrad(
    step: int, rate: float, w: torch.Tensor, g: torch.Tensor, kept: dict[str, torch.Tensor]
) -> torch.Tensor:
    first = kept.setdefault("w0", w)
    kept["s"] = kept.get("s", 0.0 * g) + rate * math.sqrt(step) * g
    kept["nu"] = kept.get("nu", 0.0 * g) + rate * math.sqrt(step) * g**2
    z = first - kept["s"] / (kept["nu"] ** (1 / 3) + EPS)
    return 0.9 * w + 0.1 * z - (rate * DECAY * w if w.ndim > 1 else 0.0)


def sm3(
    step: int, rate: float, w: torch.Tensor, g: torch.Tensor, kept: dict[str, torch.Tensor]
) -> torch.Tensor:
    """Entry by entry, as the paper has it."""
    matrix = g if g.ndim > 1 else g[:, None]
    rows, columns = matrix.shape
    row = kept.get("row", torch.zeros(rows, dtype=g.dtype))
    column = kept.get(
        "column", torch.full((columns,), 0.0 if g.ndim > 1 else math.inf, dtype=g.dtype)
    )
    nu = torch.zeros(rows, columns, dtype=g.dtype)
    for i in range(rows):
        for j in range(columns):
            nu[i, j] = min(row[i], column[j]) + matrix[i, j] ** 2
    kept["row"] = torch.stack([nu[i].max() for i in range(rows)])
    if g.ndim > 1:
        kept["column"] = torch.stack([nu[:, j].max() for j in range(columns)])
    scaled = torch.where(nu > 0, matrix / nu.sqrt(), 0.0).view_as(g)
    kept["m"] = 0.9 * kept.get("m", 0.0 * g) + 0.1 * scaled
    return w * (1 - rate * DECAY if w.ndim > 1 else 1.0) - rate * kept["m"]


@pytest.mark.parametrize(
    "reference", [lamb, novograd, madgrad, sm3], ids=lambda step: step.__name__
)
def test_optimizers_equal_their_papers_formulas(reference: Step) -> None:
    weights = [parameter.detach().double() for parameter in Model().parameters()]
    kept: list[dict[str, torch.Tensor]] = [{} for _ in weights]
    for step, rate, found in gradients(Model()):
        for i, gradient in enumerate(found):
            weights[i] = reference(step, rate, weights[i], gradient.double(), kept[i])
    for ours, expected in zip(trained(reference.__name__), weights, strict=True):
        torch.testing.assert_close(ours.double(), expected, rtol=3e-6, atol=3e-6)


def test_references_cover_every_optimizer() -> None:
    covered = {given[0] for given in TORCH} | {"muon", "lamb", "novograd", "madgrad", "sm3"}
    assert covered == set(OPTIMIZERS)


@pytest.mark.parametrize(("momentum", "expected"), [(0.0, 0.99**100), (0.9, 0.9091)])
def test_madgrad_decay_does_not_depend_on_gradient(momentum: float, expected: float) -> None:
    """As with decouple_decay=True of the authors; weights had stayed 1 without momentum."""
    weight = torch.nn.Parameter(torch.ones(2, 2))
    optimizer = Madgrad([weight], lr=0.1, eps=1e-6, weight_decay=0.1, momentum=momentum)
    for _ in range(100):
        weight.grad = torch.zeros_like(weight)
        optimizer.step()
    torch.testing.assert_close(weight.data, torch.full((2, 2), expected), rtol=1e-4, atol=0)
