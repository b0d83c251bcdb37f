import numpy as np

from fms_fsdp.data.permute import (
    derive_key,
    mix64,
    mix64_int,
    permute,
)


def test_permutation_is_a_bijection() -> None:
    for first in (*range(1, 1001, 100), 4901):  # n and key may differ within one call
        sizes = np.arange(first, first + 100)
        n = np.repeat(sizes, sizes)
        index = np.arange(len(n)) - np.repeat(np.cumsum(sizes) - sizes, sizes)
        image = permute(index, n, (n * 7919).astype(np.uint64))
        assert (image < n).all() and len(np.unique(n * 5001 + image)) == len(n)
    assert (permute(np.arange(5000), 5000, 5000 * 7919) == image[-5000:]).all()


def test_permutation_differs_by_key_and_looks_random() -> None:
    n = 4096
    a, b = (permute(np.arange(n), n, key) for key in (1, 2))
    assert (a == b).sum() < 12  # about 1 by chance
    # ranks of neighbours: the serial correlation of a random order has standard deviation 1 / sqrt(n)
    assert abs(np.corrcoef(a[:-1], a[1:])[0, 1]) < 5 / np.sqrt(n)


def test_mixing_equals_the_published_generator() -> None:
    values = [0, 1, 2**63, 2**64 - 1]
    mixed = mix64(np.array(values, dtype=np.uint64))
    assert mixed.tolist() == [mix64_int(value) for value in values]
    assert mix64_int(0) == 0xE220A8397B1DCDAF  # first output of splitmix64 seeded with 0
    assert mix64_int(0x9E3779B97F4A7C15) == 0x6E789E6AA1B965F4  # the second


def test_keys_depend_on_the_order_of_their_parts() -> None:
    assert derive_key(1, 2) != derive_key(2, 1) != derive_key(2, 1, 0)
    assert derive_key(-1) == derive_key(2**64 - 1)
