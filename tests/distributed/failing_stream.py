"""A stream of a user's own that runs out of memory on one rank: `--data_kwargs=rank=1,step=3`."""

from __future__ import annotations

from typing import Any

from fms_fsdp.config import DataConfig
from fms_fsdp.data.batch import Batch
from tests.data import custom_stream


class Failing(custom_stream.Counting):
    """Counts upward until its step comes."""

    fails_at = 0

    def next_batch(self) -> Batch:
        if self.step + 1 == self.fails_at:
            raise MemoryError("CUDA out of memory. Tried to allocate 20.00 GiB")
        return super().next_batch()


def build(section: DataConfig, *, dp_rank: int, rank: str, step: str, **settings: Any) -> Failing:
    counting = custom_stream.build(section, dp_rank=dp_rank, **settings)
    failing = Failing(section.seq_length, counting.vocab_size, counting.rows, 1)
    failing.fails_at = int(step) if dp_rank == int(rank) else 0
    return failing
