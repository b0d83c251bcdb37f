"""Synthetic tokens, of which the second data-parallel rank reads a wrong one in step 4.

For `--dataset_builder=tests.gpu.bad_stream:build`.
"""

from __future__ import annotations

from typing import Any

from fms_fsdp.config import DataConfig
from fms_fsdp.data.batch import Batch
from fms_fsdp.data.stream import TokenStream, build_stream

BAD_STEP = 4


def build(section: DataConfig, *, dp_rank: int, vocab_size: int, **settings: Any) -> TokenStream:
    """Returns the stream of --use_dummy_dataset; rank 1 reads a token outside of the vocabulary."""
    stream = build_stream(section, corpus=None, dp_rank=dp_rank, vocab_size=vocab_size, **settings)
    next_batch = stream.next_batch
    num_batches = 0

    def bad_batch() -> Batch:
        nonlocal num_batches
        batch = next_batch()
        num_batches += 1
        if dp_rank == 1 and num_batches == BAD_STEP:
            batch.tokens_BS[0, 0] = vocab_size
        return batch

    stream.next_batch = bad_batch  # type: ignore[method-assign]
    return stream
