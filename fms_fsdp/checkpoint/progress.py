"""Whether a save moves, as all ranks see it: a rank that waits for the save of another rank does not hang.

    write, fsync, delete ─▶ SaveProgress of that rank ─▶ one counter in the launch's store
                         ─▶ SaveProgress of every rank that waits ─▶ its watchdog

So a save may take as long as it needs; when it moves on no rank, the watchdogs hear nothing and end the
launch.
"""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, wait
from contextlib import contextmanager
from pathlib import Path

import torch.distributed as dist

OPERATION_LIMIT_S = 1800.0  # that one fsync or one deletion may take


class SaveProgress:
    """The saves of one rank. `on_alive()` is called while this rank waits and a save moves somewhere, about
    every `interval_s`."""

    def __init__(self, on_alive: Callable[[], None] = lambda: None, interval_s: float = 5.0) -> None:
        self._on_alive, self._interval_s = on_alive, interval_s
        self._moves = self._told = self._seen = 0
        self._operation_began: float | None = None
        self._store: dist.Store | None = None
        if dist.is_initialized():
            self._store = dist.PrefixStore("saves", dist.distributed_c10d._get_default_store())

    def alive(self) -> None:
        """Counts one more sign that this rank's save moves."""
        self._moves += 1

    @contextmanager
    def operation(self) -> Iterator[None]:
        """Marks one call that shows no progress while it lasts, such as an fsync."""
        self._operation_began = time.monotonic()
        try:
            yield
        finally:
            self._operation_began = None
            self.alive()

    def wait(self, future: Future[None]) -> None:
        """Returns when this rank's save is done; raises what it raised."""
        while not wait([future], self._interval_s).done:
            if self._moved_anywhere():
                self._on_alive()
        self._on_alive()
        future.result()

    def _moved_anywhere(self) -> bool:
        """Whether a save has moved on this rank, or by the store on another, since the last call."""
        moves, began = self._moves, self._operation_began
        moved = moves != self._told or (began is not None and time.monotonic() - began < OPERATION_LIMIT_S)
        self._told = moves
        if self._store is None:
            return moved
        try:
            count = self._store.add("moves", int(moved))
        except RuntimeError:  # the store went with the agent that held it: this rank's own save counts
            self._store = None
            return moved
        moved, self._seen = count != self._seen, count
        return moved


def estimate_save_s(root: Path, num_bytes: int) -> float:
    """Seconds that a save of `num_bytes` into `root` takes by a write of at most 64 MiB; 0 where nothing can
    be written.

    A save waits for six fsyncs one after another: of its tensors, three small files and two folders.
    """
    sample = os.urandom(1 << 20)
    num_samples = min(64, num_bytes // len(sample) + 1)
    try:
        with tempfile.TemporaryFile(dir=root, buffering=0) as file:
            times = [time.perf_counter()]
            for count in (1, num_samples):
                for _ in range(count):
                    file.write(sample)
                os.fsync(file.fileno())
                times.append(time.perf_counter())
    except OSError:
        return 0.0
    first_s, rest_s = times[1] - times[0], times[2] - times[1]
    return 6 * first_s + rest_s * num_bytes / (num_samples * len(sample))
