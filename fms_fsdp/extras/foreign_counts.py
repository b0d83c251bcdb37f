"""Counts files whose rows name other paths than the shards have that are there.

Roots are what stands before the path of a shard that is there, and the root of most rows goes first. A row of
a shard that is not there loses the first such root that it begins with.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator

from fms_fsdp.data.shards.counts import Counts


def place_rows(rows: Counts, known: frozenset[str]) -> Counts:
    """Returns the rows by the paths that shards have, or would have, below this corpus's own root."""
    for start in _starts(next(iter(rows), "")):  # nearly always one root places all
        root = next(iter(rows), "")[:start]
        if all(path.startswith(root) and path[start:] in known for path in rows):
            return {path[start:]: row for path, row in rows.items()}
    votes = Counter(path[:start] for path in rows for start in _starts(path) if path[start:] in known)
    ranked = sorted(votes, key=lambda root: (-votes[root], len(root)))
    ranks = {root: rank for rank, root in enumerate(ranked)}
    counts: Counts = {}
    for path, row in rows.items():
        fitting = sorted(
            (start for start in _starts(path) if path[:start] in ranks), key=lambda i: ranks[path[:i]]
        )
        start = next((start for start in fitting if path[start:] in known), fitting[0] if fitting else 0)
        if path[start:][:1] != "/" and (start == 0 or path[start:] not in counts):
            counts[path[start:]] = row
        # else: written under a root of which no shard is here, or for a second time
    return counts


def _starts(path: str) -> Iterator[int]:
    """Yields where a path may start below a root: at 0, after a first "/", and at the folders in it."""
    yield 0
    for slash in re.finditer("/", path[: max(1, path.rfind("/"))]):
        yield slash.end()
