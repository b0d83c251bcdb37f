"""A least-recently-used cache bounded by the total cost of its entries."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable
from typing import Generic, TypeVar

Key = TypeVar("Key", bound=Hashable)
Value = TypeVar("Value")


class Lru(Generic[Key, Value]):
    """Keeps the most recently used values whose costs add up to at most `capacity` (and always the newest
    one).

    Not thread-safe: the stream serialises its producers.
    """

    def __init__(self, capacity: int, on_evict: Callable[[Value], None] | None = None) -> None:
        self.capacity = capacity
        self.total_cost = 0
        self._on_evict = on_evict
        self._entries: OrderedDict[Key, tuple[Value, int]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._entries)

    def get(self, key: Key) -> Value | None:
        """Returns the value under `key` and marks it as used, or None."""
        entry = self._entries.get(key)
        if entry is None:
            return None
        self._entries.move_to_end(key)
        return entry[0]

    def put(self, key: Key, value: Value, cost: int = 1) -> Value:
        """Stores and returns `value` under a key that is not in the cache, evicting what was used longest ago
        while the total cost is above capacity."""
        assert key not in self._entries, key
        self._entries[key] = (value, cost)
        self.total_cost += cost
        while self.total_cost > self.capacity and len(self._entries) > 1:
            self._evict()
        return value

    def clear(self) -> None:
        """Evicts everything."""
        while self._entries:
            self._evict()

    def _evict(self) -> None:
        _, (value, cost) = self._entries.popitem(last=False)
        self.total_cost -= cost
        if self._on_evict is not None:
            self._on_evict(value)
