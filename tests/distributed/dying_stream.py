"""Synthetic tokens of a source that kills its rank, once in a launch by torchrun.

For `--dataset_builder=tests.distributed.dying_stream:build`.
"""

from __future__ import annotations

import os
import signal
from typing import Any

from fms_fsdp.config import DataConfig
from fms_fsdp.data.batch import Batch
from fms_fsdp.data.stream import TokenStream, build_stream

LAST_STEP = 5


def build(section: DataConfig, **settings: Any) -> TokenStream:
    """Returns the stream of --use_dummy_dataset; in torchrun's first attempt, the last rank dies
    before the batch after `LAST_STEP`."""
    stream = build_stream(section, corpus=None, **settings)
    is_last_rank = int(os.environ["RANK"]) == int(os.environ["WORLD_SIZE"]) - 1
    is_first_attempt = os.environ["TORCHELASTIC_RESTART_COUNT"] == "0"
    next_batch = stream.next_batch
    num_batches = 0

    def dying_batch() -> Batch:
        nonlocal num_batches
        num_batches += 1
        if is_last_rank and is_first_attempt and num_batches > LAST_STEP:
            os.kill(os.getpid(), signal.SIGKILL)
        return next_batch()

    stream.next_batch = dying_batch  # type: ignore[method-assign]
    return stream
