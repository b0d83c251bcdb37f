"""Rows of logits that the loss makes at a time, as a function of the shape alone (loss.py uses them, and
predict/ the memory that they take)."""

from __future__ import annotations

# fp32 logits of a chunk: within the cache of a CPU, large enough products for a GPU
CHUNK_BYTES = {"cpu": 8 << 20, "cuda": 1 << 30}
# the same of a span, if a chunk is not more; on a GPU so many that the sum over spans is seldom needed
SPAN_BYTES = {"cpu": 64 << 20, "cuda": 4 << 30}
SLICE_BYTES = {"cpu": 4 << 20, "cuda": 256 << 20}  # fp32 rows of dW that are added up at a time


def chunk_rows(num_rows: int, vocab_size: int, device_type: str) -> int:
    """Rows per chunk: as many as their fp32 logits fit the device's budget, evened out over the chunks."""
    most = max(128, CHUNK_BYTES.get(device_type, 1 << 30) // (4 * vocab_size))
    num_chunks = -(-num_rows // most)
    return -(-num_rows // num_chunks)


def span_rows(rows: int, vocab_size: int, device_type: str) -> int:
    """Rows per span, for chunks of so many `rows`: a multiple of them."""
    return rows * max(1, SPAN_BYTES.get(device_type, 4 << 30) // (rows * vocab_size * 4))
