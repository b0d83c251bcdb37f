"""Every row of table.py trains as one process. The rows of one world size share their ranks."""

from __future__ import annotations

import functools
from collections import defaultdict
from collections.abc import Callable

import pytest
import torch

from tests.distributed.launch import run_ranks
from tests.parallel.features import FEATURES, MODEL_AXES
from tests.parallel.table import BOUNDS, QUICK, SLOW, Row, flags_of
from tests.parallel.train_rows import Trained, train_on_rank

NUM_STEPS = 3
ELSEWHERE = {  # launches of test_features.py, and of tests/distributed/test_training.py
    "bestfit packing",
    "samples",
    "exports",
    "import",
    "profiler",
    "norms and zeros",
}
# A softmax does not see a bias of all keys alike: its gradient is rounding alone.
WITHOUT_GRADIENT = ("k_norm.bias", "k_proj.bias")

OnRanks = Callable[[Row], list[Trained]]


@functools.cache
def alone(reference: Row) -> Trained:
    """Trains on one process."""
    (trained,) = train_on_rank([reference], NUM_STEPS)
    return trained


@pytest.fixture(scope="module")
def on_ranks(request: pytest.FixtureRequest) -> OnRanks:
    """Returns what each rank gives of a row: the first row of a world size trains all that were chosen."""
    chosen = defaultdict[int, list[Row]](list)
    for item in request.session.items:
        row = item.callspec.params.get("row") if hasattr(item, "callspec") else None
        if isinstance(row, Row):
            chosen[row.world].append(row)

    @functools.cache
    def train_world(world: int) -> list[list[Trained]]:
        return run_ranks(train_on_rank, world, chosen[world], NUM_STEPS)

    def trained(row: Row) -> list[Trained]:
        index = chosen[row.world].index(row)
        return [of_rank[index] for of_rank in train_world(row.world)]

    return trained


@pytest.mark.parametrize(
    "row",
    [
        *(pytest.param(row, id=row.name) for row in QUICK),
        *(pytest.param(row, id=row.name, marks=pytest.mark.slow) for row in SLOW),
    ],
)
def test_layout_trains_as_one_process(row: Row, on_ranks: OnRanks) -> None:
    wanted = alone(row.reference)
    trained = on_ranks(row)
    first = trained[0]
    assert all(of_rank.steps == first.steps for of_rank in trained)  # identical on every rank
    assert first.weights == wanted.weights
    assert first.state == wanted.state

    assert len(set(wanted.values("param_norm"))) == NUM_STEPS  # each step changes weights
    assert first.values("loss") == pytest.approx(wanted.values("loss"), rel=row.bounds.loss)
    for name in wanted.steps[0].keys() - {"loss", "grad_zeros", "loss_scale"}:
        expected = pytest.approx(wanted.values(name), rel=row.bounds.norm)
        assert first.values(name) == expected, name
    if "loss_scale" in wanted.steps[0]:
        assert first.values("loss_scale") == wanted.values("loss_scale")

    check_gradients(first, wanted, row)
    assert len(first.evaluations) == len(wanted.evaluations)
    for found, expected in zip(first.evaluations, wanted.evaluations, strict=True):
        assert found == pytest.approx(expected, rel=row.bounds.loss)
    assert first.texts == wanted.texts


def check_gradients(found: Trained, wanted: Trained, row: Row) -> None:
    """Asserts that the gradient of each parameter is near enough, and that there is one."""
    assert found.gradients.keys() == wanted.gradients.keys()
    norms = {name: gradient.norm() for name, gradient in wanted.gradients.items()}
    total = torch.stack([*norms.values()]).norm()
    for name, gradient in wanted.gradients.items():
        difference = (found.gradients[name] - gradient).norm()
        allowed = row.bounds.grad * (norms[name] + 0.01 * total)
        assert difference <= allowed, (name, difference, allowed)
    if row.bounds.grad > BOUNDS["muon"].grad:  # rounding decides whether a number is zero
        return
    for name, norm in norms.items():
        assert norm > 1e-5 * total or name.endswith(WITHOUT_GRADIENT), name
    # GELU makes a few numbers so small that rounding decides whether they are zero.
    rel = 5e-3 if "--activation=gelu" in row.flags else 1e-4
    zeros = pytest.approx(wanted.values("grad_zeros"), rel=rel, abs=4)
    assert found.values("grad_zeros") == zeros


def test_every_feature_trains_with_every_axis() -> None:
    for feature in FEATURES:
        flags = set(flags_of(feature.flags))
        axes = set[str]()
        for row in (*QUICK, *SLOW):
            if flags <= {*row.flags, *row.layout.flags}:
                axes |= {axis for axis, _ in row.layout.sizes}
        if feature.name not in ELSEWHERE:
            assert axes | feature.refused.keys() >= {*MODEL_AXES}, feature.name
