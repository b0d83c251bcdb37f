import numpy as np
import pytest

from fms_fsdp.data.order.permute import bit_reverse, derive_key, mix64, mix64_int, permute, unpermute


def test_permutation_is_a_bijection_for_every_n_up_to_5000() -> None:
    for first in range(1, 5001, 100):  # n and key may differ within one call
        sizes = np.arange(first, first + 100)
        n = np.repeat(sizes, sizes)
        index = np.arange(len(n)) - np.repeat(np.cumsum(sizes) - sizes, sizes)
        image = permute(index, n, (n * 7919).astype(np.uint64))
        assert (image < n).all() and len(np.unique(n * 5001 + image)) == len(n)
    assert (permute(np.arange(5000), 5000, 5000 * 7919) == image[-5000:]).all()


def test_unpermute_is_the_inverse_for_many_sizes_and_keys() -> None:
    for n in [*range(1, 200), 255, 256, 257, 4999, 65_537]:
        index = np.arange(n)
        assert (unpermute(permute(index, n, n * 31), n, n * 31) == index).all(), n
    rng = np.random.default_rng(0)
    n = rng.integers(1, 1 << 45, size=1000)
    index, key = rng.integers(0, n), rng.integers(0, 1 << 63, size=1000).astype(np.uint64)
    assert (unpermute(permute(index, n, key), n, key) == index).all()


def test_permutation_differs_by_key_and_looks_random() -> None:
    n = 4096
    a, b = (permute(np.arange(n), n, key) for key in (1, 2))
    assert (a == b).sum() < 12  # about 1 by chance
    # ranks of neighbours: the serial correlation of a random order has standard deviation 1 / sqrt(n)
    assert abs(np.corrcoef(a[:-1], a[1:])[0, 1]) < 5 / np.sqrt(n)


def test_mixing_agrees_between_arrays_and_integers_and_with_the_published_generator() -> None:
    values = [0, 1, 2**63, 2**64 - 1]
    assert [int(v) for v in mix64(np.array(values, dtype=np.uint64))] == [mix64_int(v) for v in values]
    assert mix64_int(0) == 0xE220A8397B1DCDAF  # first output of splitmix64 seeded with 0
    assert mix64_int(0x9E3779B97F4A7C15) == 0x6E789E6AA1B965F4  # the second


def test_keys_depend_on_the_order_of_their_parts() -> None:
    assert derive_key(1, 2) != derive_key(2, 1) != derive_key(2, 1, 0)
    assert derive_key(-1) == derive_key(2**64 - 1)


@pytest.mark.parametrize("bits", [0, 1, 5, 10])
def test_bit_reverse_is_its_own_inverse(bits: int) -> None:
    values = np.arange(1 << bits)
    assert (bit_reverse(bit_reverse(values, bits), bits) == values).all()
    assert bits < 2 or bit_reverse(np.array([1]), bits)[0] == 1 << (bits - 1)
