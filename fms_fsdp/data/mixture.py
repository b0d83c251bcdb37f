"""Which source the u-th sequence comes from: a tree of two-way splits in the proportions of the
weights.

Sources are the leaves of a Huffman tree over their quotas (weights in units of 1/65,536). Of the
first i sequences that reach an inner node with child quotas a and b, floor((i * a + (a + b) // 2) /
(a + b)) go to the first child, the others to the second. So both "which source" and "how many of it
before" are closed forms in u, O(log sources), in integers alone.

Invariant: every source's own sequences are numbered 0, 1, 2, ... without a gap, and after any
number of sequences every source is within 1.68 sequences of its share: a split errs by at most a
half, and an error reaches a leaf shrunk by the leaf's share of the node. A node of a Huffman tree
weighs at least its child and that child's child together, so these shares are at most 1, 1, 1/2,
1/3, 1/5 and so on by Fibonacci's numbers, 3.36 in total. Weights are shares of tokens, exactly,
because all sequences have the same length. Names decide every tie, so the order of the flags is
immaterial.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from fms_fsdp.data.permute import I64
from fms_fsdp.errors import UserError

NUM_SLOTS = 1 << 16


def slot_quotas(weights: Mapping[str, float]) -> dict[str, int]:
    """Returns the number of slots of each source, summing to NUM_SLOTS: largest remainders, ties
    by name.

    Raises:
        UserError: a weight is not positive and finite, or is below 1/65,536 of the sum.
    """
    for name, weight in weights.items():
        if not (weight > 0 and math.isfinite(weight)):
            raise UserError(
                f"--weights={weight:g} for {name} must be above 0; remove the source from --datasets"
            )
    total = math.fsum(weights.values())  # exactly rounded, so independent of the order
    shares = {name: weights[name] / total * NUM_SLOTS for name in sorted(weights)}
    for name, share in shares.items():
        if share < 1:
            raise UserError(
                f"--weights={weights[name]:g} for {name} must be at least 1/{NUM_SLOTS} of the sum "
                f"({total:g}); set it to {total / NUM_SLOTS:.3g}, or remove the source"
            )
    quotas = {name: int(share) for name, share in shares.items()}
    by_remainder = sorted(shares, key=lambda name: (quotas[name] - shares[name], name))
    for name in by_remainder[: NUM_SLOTS - sum(quotas.values())]:
        quotas[name] += 1
    assert sum(quotas.values()) == NUM_SLOTS, quotas
    return quotas


@dataclass(frozen=True)
class _Split:
    """An inner node: the quotas of its two children, and the children (leaves are indices of
    `Mixture.names`)."""

    first_quota: int
    quota: int
    first: _Split | int
    second: _Split | int


class Mixture:
    """Maps u >= 0 to (source, number of this source's sequences before u), in closed form."""

    def __init__(self, quotas: Mapping[str, int]) -> None:
        self.names: tuple[str, ...] = tuple(sorted(quotas))
        # A Huffman tree: the two smallest quotas are joined again and again. Quota, the lowest
        # index of a source below, which decides between equal quotas, and the node: a source or a
        # split.
        heap: list[tuple[int, int, _Split | int]] = []
        for i, name in enumerate(self.names):
            heap.append((quotas[name], i, i))
        heapq.heapify(heap)
        while len(heap) > 1:
            quota_a, lowest_a, a = heapq.heappop(heap)
            quota_b, lowest_b, b = heapq.heappop(heap)
            quota = quota_a + quota_b
            split = _Split(quota_a, quota, a, b)
            heapq.heappush(heap, (quota, min(lowest_a, lowest_b), split))
        _, _, self._root = heap[0]

    def __call__(self, u: I64) -> tuple[I64, I64]:
        """Returns (index in `names`, sequences of that source before u) for each u >= 0."""
        source = np.empty_like(u)
        number = np.empty_like(u)
        waiting: list[tuple[_Split | int, I64, I64]] = [(self._root, np.arange(len(u)), u)]
        while waiting:
            node, positions, i = waiting.pop()
            if isinstance(node, int):
                source[positions] = node
                number[positions] = i
                continue
            before, remainder = np.divmod(i * node.first_quota + node.quota // 2, node.quota)
            in_first = (
                remainder >= node.quota - node.first_quota
            )  # the next sequence raises `before`
            first = np.flatnonzero(in_first)
            second = np.flatnonzero(~in_first)
            for child, chosen, index in (
                (node.first, first, before),
                (node.second, second, i - before),
            ):
                if len(chosen):
                    waiting.append((child, positions[chosen], index[chosen]))
        return source, number

    def counts(self, u: int) -> dict[str, int]:
        """Returns how many of the first u sequences each source supplies."""
        counts: dict[str, int] = {}
        waiting: list[tuple[_Split | int, int]] = [(self._root, u)]
        while waiting:
            node, i = waiting.pop()
            if isinstance(node, int):
                counts[self.names[node]] = i
            else:
                before = (i * node.first_quota + node.quota // 2) // node.quota
                waiting += [(node.first, before), (node.second, i - before)]
        return counts
