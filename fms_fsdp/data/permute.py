"""Integer mixing, keys and permutations: the only randomness of the data stream.

Invariant: everything here is arithmetic on 64-bit unsigned integers that wrap around, so the same
inputs give the same outputs on every machine, library version and world size. The formulas in this
module, together with those in the docstrings of `mixture`, `order` and `sequences`, define
``ORDER_VERSION = 2``; a change of any of them is a new version, because it would silently change
which tokens a resumed run sees.
"""

from __future__ import annotations

import hashlib

import numpy as np
import numpy.typing as npt

U64 = npt.NDArray[np.uint64]
I64 = npt.NDArray[np.int64]

ORDER_VERSION = 2
MASK = (1 << 64) - 1
GOLDEN = 0x9E3779B97F4A7C15
_MULTIPLIER_1 = 0xBF58476D1CE4E5B9
_MULTIPLIER_2 = 0x94D049BB133111EB
# Four rounds of random functions suffice (Luby and Rackoff 1988); two more, because ours are hashes and domains small.
_FEISTEL_ROUNDS = 6
_ROUND = [np.uint64((r * GOLDEN) & MASK) for r in range(_FEISTEL_ROUNDS)]


def mix64(values: U64) -> U64:
    """Returns splitmix64 of every element: a bijection of 64-bit integers with good avalanche.

    Source: Steele, Lea, Flood, "Fast splittable pseudorandom number generators" (OOPSLA 2014), the
    finaliser.
    """
    x = values + np.uint64(GOLDEN)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(_MULTIPLIER_1)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(_MULTIPLIER_2)
    return x ^ (x >> np.uint64(31))


def mix64_int(value: int) -> int:
    """Returns `mix64` of one Python integer (taken modulo 2^64)."""
    x = (value + GOLDEN) & MASK
    x = ((x ^ (x >> 30)) * _MULTIPLIER_1) & MASK
    x = ((x ^ (x >> 27)) * _MULTIPLIER_2) & MASK
    return x ^ (x >> 31)


def hash64(content: str | bytes) -> int:
    """Returns 64 bits that identify a text or bytes: BLAKE2b-64 (of UTF-8), read little-endian."""
    data = content.encode() if isinstance(content, str) else content
    return int.from_bytes(hashlib.blake2b(data, digest_size=8).digest(), "little")


def shuffled(count: int, key: int) -> I64:
    """Returns a permutation of [0, count): sorted by mix64(i ^ key), stable."""
    order: U64 = mix64(np.arange(count, dtype=np.uint64) ^ np.uint64(key))
    return np.argsort(order, kind="stable")


def derive_key(*parts: int) -> int:
    """Returns a 64-bit key that depends on every part and on their order: h = mix64(h ^ part), from
    h = 0."""
    key = 0
    for part in parts:
        key = mix64_int(key ^ (part & MASK))
    return key


def permute(index: I64, n: int | I64, key: int | U64) -> I64:
    """Returns pi(index): a keyed pseudo-random permutation of [0, n), evaluated at each index
    without a table.

    A Feistel network on max(2, bit_length(n - 1)) bits (low half: the floor), six rounds of
    `mix64`; round r updates the high half if r is even, else the low half, with the key mix64(key +
    r * GOLDEN). Values >= n walk the cycle on, fewer than two walks on average (n >= 3). `n` (<
    2^53) and `key` may differ from index to index.
    """
    n = np.broadcast_to(n, index.shape)
    key = np.broadcast_to(np.asarray(key, dtype=np.uint64), index.shape)
    # frexp's exponent of an integer is its bit length
    bits = np.maximum(2, np.frexp(n - 1.0)[1]).astype(np.uint64)
    out = index.astype(np.uint64)
    walking = np.arange(len(out))
    while len(walking):
        x = out[walking]
        k = key[walking]
        low_bits = bits[walking] // np.uint64(2)
        low_mask = (np.uint64(1) << low_bits) - np.uint64(1)
        high_mask = (np.uint64(1) << (bits[walking] - low_bits)) - np.uint64(1)
        high, low = x >> low_bits, x & low_mask
        for r in range(_FEISTEL_ROUNDS):
            if r % 2 == 0:
                high = (high ^ mix64(low ^ mix64(k + _ROUND[r]))) & high_mask
            else:
                low = (low ^ mix64(high ^ mix64(k + _ROUND[r]))) & low_mask
        x = (high << low_bits) | low
        out[walking] = x
        walking = walking[x >= n[walking].astype(np.uint64)]
    return out.astype(np.int64)
