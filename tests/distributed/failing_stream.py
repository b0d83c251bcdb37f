"""A stream of a user's own that fails on one rank: `--data_kwargs=rank=1,step=3,kind=disk`, or memory."""

from __future__ import annotations

import errno
from typing import Any

from fms_fsdp.config import DataConfig
from fms_fsdp.data.batch import Batch
from tests.data import custom_stream


class Failing(custom_stream.Counting):
    """Counts upward until its step comes."""

    fails_at = 0
    kind = "memory"

    def next_batch(self) -> Batch:
        if self.step + 1 == self.fails_at and self.kind == "disk":
            raise OSError(errno.EIO, "Input/output error", "/data/a.bin")
        if self.step + 1 == self.fails_at:
            raise MemoryError("CUDA out of memory. Tried to allocate 20.00 GiB")
        return super().next_batch()


def build(
    section: DataConfig,
    *,
    dp_rank: int,
    rank: str,
    step: str,
    kind: str = "memory",
    **settings: Any,
) -> Failing:
    counting = custom_stream.build(section, dp_rank=dp_rank, **settings)
    failing = Failing(section.seq_length, counting.vocab_size, counting.rows, 1)
    failing.fails_at = int(step) if dp_rank == int(rank) else 0
    failing.kind = kind
    return failing
