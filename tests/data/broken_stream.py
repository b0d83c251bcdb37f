"""A stream of a user's own with a bug or with bad data: `--data_kwargs=kind=bug,step=2`."""

from __future__ import annotations

from typing import Any

import numpy as np

from fms_fsdp.config import DataConfig
from fms_fsdp.data.batch import Batch
from fms_fsdp.errors import UserError
from tests.data import custom_stream


class Broken(custom_stream.Counting):
    """Counts upward until its step comes."""

    breaks_at, kind = 0, ""

    def next_batch(self) -> Batch:
        if self.step + 1 == self.breaks_at:
            if self.kind == "bad_data":
                raise UserError("record (7) of a.bin is cut; restore it")
            np.ones(3) + np.ones(4)
        return super().next_batch()


def build(section: DataConfig, *, kind: str, step: str, **settings: Any) -> Broken:
    counting = custom_stream.build(section, **settings)
    broken = Broken(section.seq_length, counting.vocab_size, counting.rows, 1)
    broken.breaks_at, broken.kind = int(step), kind
    return broken
