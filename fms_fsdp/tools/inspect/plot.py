"""The charts of `inspect plan`: the mixture over the steps, as it comes out, and how long documents are."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from fms_fsdp.data.order.permute import I64
from fms_fsdp.tools.inspect.step import Inspected
from fms_fsdp.tools.report.history import Floats
from fms_fsdp.tools.report.page import write_charts
from fms_fsdp.tools.report.panels import Panel, Series

STEP_RANGES = 120
SAMPLED_SHARDS = 8  # of a source
SAMPLED_DOCUMENTS = 1 << 16  # of a shard


def mixture_over_time(data: Inspected, num_steps: int) -> tuple[I64, dict[str, Floats]]:
    """Returns the edges of step ranges (R + 1 steps, range i is the steps after edge i up to edge i + 1), and
    each source's share of the tokens in each range. Edges meet every change of the mixture."""
    history, shares = data.order.history, dict[str, Floats]()
    changes = [segment.after for segment in history.segments if segment.after < num_steps]
    even = np.linspace(0, num_steps, min(num_steps, STEP_RANGES) + 1).astype(np.int64)
    edges: I64 = np.unique([*even.tolist(), *changes])
    consumed = list(map(history.consumed_tokens, edges.tolist()))
    total = np.diff([tokens.total() for tokens in consumed])
    for name in sorted(consumed[-1]):
        shares[name] = np.diff([tokens[name] for tokens in consumed]) / total
    return edges, shares


def document_lengths(data: Inspected) -> dict[str, I64]:
    """Returns the lengths of documents of each source, separators counted, from a few of its shards."""
    lengths: dict[str, I64] = {}
    for name, source in data.sources.items():
        filled = np.flatnonzero(source.tokens)
        chosen = filled[np.linspace(0, len(filled) - 1, min(SAMPLED_SHARDS, len(filled))).astype(np.int64)]
        found = [np.empty(0, dtype=np.int64)]
        for file in chosen.tolist():
            shard, count = data.rows.reader(name).shard(file), 0
            for number in range(len(shard.chunk_starts) - 1):
                found.append(np.diff(shard.chunk(number).starts))
                count += len(found[-1])
                if count >= SAMPLED_DOCUMENTS:
                    break
        lengths[name] = np.concatenate(found)
    return lengths


def draw(data: Inspected, num_steps: int, path: Path) -> None:
    """Writes the page, and prints its path. Raises: OSError where nothing can be written."""
    edges, shares = mixture_over_time(data, num_steps)
    lengths = {name: found for name, found in document_lengths(data).items() if len(found)}
    sampled = np.concatenate([[1], *lengths.values()])
    bins = np.logspace(0, np.log10(sampled.max() + 1), 60)
    mixture = Panel("mixture", "Mixture", "share of tokens", is_stack=True, mark="newest checkpoint")
    title = f"Lengths of {len(sampled) - 1:,} documents"
    histogram = Panel("lengths", title, "share of documents", x="tokens", log_x=True, mark="seq_length")
    for color, (name, share) in enumerate(shares.items()):
        mixture.series.append(_stairs(name, edges, share, color))
        if name in lengths:
            counts, _ = np.histogram(np.maximum(lengths[name], 1), bins)
            histogram.series.append(_stairs(name, bins, counts / len(lengths[name]), color))
    if 0 < data.run.step <= num_steps:
        mixture.marks.append(data.run.step)
    histogram.marks.append(data.section.seq_length)
    write_charts(path, f"The data by step {num_steps:,}", [mixture, histogram])


def _stairs(name: str, edges: np.ndarray[Any, Any], heights: Floats, color: int) -> Series:
    """A curve that has each height between two edges."""
    return Series(name, np.repeat(edges, 2)[1:-1].astype(float), np.repeat(heights, 2), color)
