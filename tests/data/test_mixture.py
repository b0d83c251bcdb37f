import numpy as np
import pytest

from fms_fsdp.data.mixture import NUM_SLOTS, Mixture, slot_quotas

MAX_DRIFT = 1.68  # sequences, see the module


def random_weights(rng: np.random.Generator, count: int, spread: float = 1.5) -> dict[str, float]:
    return {
        f"source{i}": float(w) for i, w in enumerate(rng.lognormal(0, spread, size=count) + 0.03)
    }


def fibonacci_weights(count: int) -> dict[str, float]:
    """Returns the weights of the deepest tree, in which most errors add up."""
    weights = [1.0, 1.0]
    while len(weights) < count:
        weights.append(weights[-1] + weights[-2])
    return {f"source{i}": weight for i, weight in enumerate(weights)}


@pytest.mark.parametrize(
    "weights",
    [
        {"only": 1.0},
        random_weights(np.random.default_rng(2), 2, 0.5),
        random_weights(np.random.default_rng(3), 3, 2.5),
        random_weights(np.random.default_rng(10), 10, 0.0),
        random_weights(np.random.default_rng(50), 50),
        dict(zip("abcdef", (6912, 13028, 6079, 33684, 5444, 389), strict=True)),
        fibonacci_weights(15),
    ],
    ids=["one", "two", "three", "equal", "many", "unlucky", "deep"],
)
def test_prefixes_and_batches_follow_the_weights(weights: dict[str, float]) -> None:
    quotas = slot_quotas(weights)
    mixture = Mixture(quotas)
    u = np.arange(NUM_SLOTS + 3000)
    source, _ = mixture(u)
    for i, name in enumerate(mixture.names):
        drift = np.cumsum(source == i) - (u + 1) * quotas[name] / NUM_SLOTS
        assert np.abs(drift).max() <= MAX_DRIFT
        for batch in (8, 64, 480):
            in_batch = drift[batch:] - drift[:-batch]  # wherever the batch begins
            assert np.abs(in_batch).max() <= 2 * MAX_DRIFT


def test_two_equal_sources_alternate() -> None:
    source, number = Mixture(slot_quotas({"a": 1, "b": 1}))(np.arange(6))
    assert sorted(source[:2]) == [0, 1] and (source[:2] == source[2:4]).all()
    assert number.tolist() == [0, 0, 1, 1, 2, 2]


def test_sources_are_numbered_without_gaps() -> None:
    mixture = Mixture(slot_quotas({"a": 3, "b": 1, "c": 0.01}))
    source, number = mixture(np.arange(3 * NUM_SLOTS // 2))
    for i in range(3):
        assert (number[source == i] == np.arange((source == i).sum())).all()
    for u in (0, 1, 777, NUM_SLOTS, NUM_SLOTS + 5):
        counts = {name: int((source[:u] == i).sum()) for i, name in enumerate(mixture.names)}
        assert mixture.counts(u) == counts


def test_numbers_are_exact_far_into_a_run() -> None:
    quotas = slot_quotas({"a": 3, "b": 1, "c": 0.01})
    far = 10**9 * NUM_SLOTS
    source, number = Mixture(quotas)(np.arange(far, far + 1000))
    near_source, near_number = Mixture(quotas)(np.arange(1000))
    shift = np.array([10**9 * quotas[name] for name in sorted(quotas)])
    assert (source == near_source).all() and (number - shift[source] == near_number).all()


def test_quotas_do_not_depend_on_order() -> None:
    weights = random_weights(np.random.default_rng(3), 20)
    quotas, total = slot_quotas(weights), sum(weights.values())
    assert sum(quotas.values()) == NUM_SLOTS
    assert quotas == slot_quotas(dict(reversed(weights.items())))
    for name, weight in weights.items():
        assert abs(quotas[name] - weight / total * NUM_SLOTS) < 1


@pytest.mark.parametrize("weight", [0.0, -1.0, float("nan"), float("inf"), 1e-9])
def test_impossible_weight_is_rejected(weight: float) -> None:
    with pytest.raises(ValueError, match="--weights=.* for b must be"):
        slot_quotas({"a": 1.0, "b": weight})
