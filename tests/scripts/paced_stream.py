"""Synthetic tokens that come slowly in the first job of a chain of SLURM jobs, or while a file is there.

For `--dataset_builder=tests.scripts.paced_stream:build`.
"""

from __future__ import annotations

import os
import time
from typing import Any

from fms_fsdp.config import DataConfig
from fms_fsdp.data.batch import Batch
from fms_fsdp.data.stream import TokenStream, build_stream


def build(section: DataConfig, **settings: Any) -> TokenStream:
    """The stream of --use_dummy_dataset; in the first job of a chain it waits a second before each batch, and
    half of it while there is the file PACE_FILE."""
    stream = build_stream(section, corpus=None, **settings)
    first = (
        os.environ.get("SLURM_RESTART_COUNT", "0") == "0"
        and os.environ.get("SLURM_ARRAY_TASK_ID", "1") == "1"
    )
    pause_s = 1.0 if first and "SLURM_JOB_ID" in os.environ else 0.0
    quick, file = stream.next_batch, os.environ.get("PACE_FILE", "")

    def next_batch() -> Batch:
        time.sleep(0.5 if file and os.path.exists(file) else pause_s)
        return quick()

    stream.next_batch = next_batch  # type: ignore[method-assign]
    return stream
