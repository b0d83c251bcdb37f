"""Which data a step was made of: a fingerprint, and a sentence for messages about steps that went wrong."""

from __future__ import annotations

import numpy as np
import torch

from fms_fsdp.data.batch import Batch, fingerprint
from fms_fsdp.data.stream import Stream
from fms_fsdp.distributed.mesh import Mesh


def global_fingerprint(batch: Batch, mesh: Mesh) -> str:
    """The fingerprint of the global batch, of which `batch` is this rank's part (collective: every rank)."""
    own = fingerprint(batch, first_row=mesh.place("dp") * len(batch.tokens_BS))
    # the same bits: sums wrap around alike
    as_int64 = np.array([own % 2**64], dtype=np.uint64).view(np.int64)
    total = mesh.sum(torch.from_numpy(as_int64), "dp")
    return f"{int(total.item()) % 2**64:016x}"


def describe_data(stream: Stream, mesh: Mesh, step: int) -> str:
    """Fingerprint and first documents of the global batch of `step`, as a sentence (collective: every rank).

    Reads the batch once more.
    """
    batch = stream.batch_at(step)
    if batch is None:
        return "The data come from a stream of your own."
    text = f"Data fingerprint {global_fingerprint(batch, mesh)}"
    documents = stream.documents(step)
    return (
        f"{text}; documents: {', '.join(documents)}, …"
        if documents
        else f"{text}; synthetic tokens."
    )
