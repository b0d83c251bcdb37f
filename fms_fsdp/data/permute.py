"""Integer mixing, keys and permutations: the only randomness of the data stream.

Invariant: everything here is arithmetic on 64-bit unsigned integers that wrap around, so the same inputs give the same
outputs on every machine, library version and world size. The formulas in this module, together with those in the
docstrings of `mixture`, `tapes`, `packing` and `history`, define ``ORDER_VERSION = 1``; a change of any of them is a new
version, because it would silently change which tokens a resumed run sees.
"""

from __future__ import annotations

import hashlib

import numpy as np
import numpy.typing as npt

U64 = npt.NDArray[np.uint64]
I64 = npt.NDArray[np.int64]

ORDER_VERSION = 1
MASK = (1 << 64) - 1
GOLDEN = 0x9E3779B97F4A7C15
_MULTIPLIER_1 = 0xBF58476D1CE4E5B9
_MULTIPLIER_2 = 0x94D049BB133111EB
_FEISTEL_ROUNDS = 6


def mix64(values: U64) -> U64:
    """Returns splitmix64 of every element: a bijection of 64-bit integers with good avalanche.

    Source: Steele, Lea, Flood, "Fast splittable pseudorandom number generators" (OOPSLA 2014), the finaliser.
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


def hash64(text: str) -> int:
    """Returns 64 bits that identify a text: BLAKE2b-64 of its UTF-8 bytes, read little-endian."""
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little")


def derive_key(*parts: int) -> int:
    """Returns a 64-bit key that depends on every part and on their order: h = mix64(h ^ part), from h = 0."""
    key = 0
    for part in parts:
        key = mix64_int(key ^ (part & MASK))
    return key


def permute(index: I64, n: int, key: int) -> I64:
    """Returns pi(index): a keyed pseudo-random permutation of [0, n), evaluated at each index without a table.

    A Feistel network on max(2, bit_length(n - 1)) bits (low half: the floor), six rounds of `mix64`; round r updates the
    high half if r is even, else the low half, with the key mix64(key + r * GOLDEN). Values >= n walk the cycle on, fewer
    than two walks on average (n >= 3).
    """
    if n <= 1:
        return np.zeros_like(index)
    low_bits = max(2, (n - 1).bit_length()) // 2
    high_bits = max(2, (n - 1).bit_length()) - low_bits
    keys = [np.uint64(mix64_int(key + r * GOLDEN)) for r in range(_FEISTEL_ROUNDS)]
    shift, low_mask, high_mask = np.uint64(low_bits), np.uint64((1 << low_bits) - 1), np.uint64((1 << high_bits) - 1)
    out = index.astype(np.uint64)
    walking = np.arange(len(out))
    while len(walking):
        x = out[walking]
        high, low = x >> shift, x & low_mask
        for r in range(0, _FEISTEL_ROUNDS, 2):
            high = (high ^ mix64(low ^ keys[r])) & high_mask
            low = (low ^ mix64(high ^ keys[r + 1])) & low_mask
        x = (high << shift) | low
        out[walking] = x
        walking = walking[x >= np.uint64(n)]
    return out.astype(np.int64)


def bit_reverse(values: I64, bits: int) -> I64:
    """Returns each value (< 2^bits) with its `bits` lowest bits in reverse order."""
    out = np.zeros_like(values)
    for bit in range(bits):
        out = (out << 1) | ((values >> bit) & 1)
    return out
