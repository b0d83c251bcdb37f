"""The picture of `inspect plan`: the mixture over the steps, as it comes out, and how long the documents
are."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from fms_fsdp.data.order.permute import I64
from fms_fsdp.tools.inspect.step import Inspected
from fms_fsdp.tools.report.history import Floats
from fms_fsdp.tools.report.panels import Panel, Series
from fms_fsdp.tools.report.png import write_png

STEP_RANGES = 120
SAMPLED_SHARDS = 8  # of a source
SAMPLED_DOCUMENTS = 1 << 16  # of a shard


def mixture_over_time(data: Inspected, num_steps: int) -> tuple[I64, dict[str, Floats]]:
    """Returns the edges of step ranges (R + 1 steps, range i is the steps after edge i up to edge i + 1), and
    each source's share of the tokens in each range. Edges meet every change of the mixture."""
    history = data.order.history
    changes = [segment.after for segment in history.segments if segment.after < num_steps]
    even = np.linspace(0, num_steps, min(num_steps, STEP_RANGES) + 1).astype(np.int64)
    edges: I64 = np.unique(np.concatenate([even, np.array(changes, dtype=np.int64)]))
    consumed = [history.consumed_tokens(step) for step in edges.tolist()]
    total = np.diff([tokens.total() for tokens in consumed])
    shares = {}
    for name in sorted(consumed[-1]):
        shares[name] = np.diff([tokens[name] for tokens in consumed]) / total
    return edges, shares


def document_lengths(data: Inspected) -> dict[str, I64]:
    """Returns the lengths of documents of each source, separators counted, from a few of its shards."""
    lengths: dict[str, I64] = {}
    for source in (source for corpus in data.corpora for source in corpus.sources):
        filled = np.flatnonzero(source.tokens)
        chosen = filled[np.linspace(0, len(filled) - 1, min(SAMPLED_SHARDS, len(filled))).astype(np.int64)]
        found = [np.empty(0, dtype=np.int64)]
        for file in chosen.tolist():
            shard, count = data.rows.reader(source.name).shard(file), 0
            for number in range(len(shard.chunk_starts) - 1):
                found.append(np.diff(shard.chunk(number).starts))
                count += len(found[-1])
                if count >= SAMPLED_DOCUMENTS:
                    break
        lengths[source.name] = np.concatenate(found)
    return lengths


def draw(data: Inspected, num_steps: int, path: str) -> None:
    """Writes the picture. Raises: UserError where matplotlib is not installed, OSError where nothing can be
    written."""
    edges, shares = mixture_over_time(data, num_steps)
    lengths = {name: found for name, found in document_lengths(data).items() if len(found)}
    longest = max((int(found.max()) for found in lengths.values()), default=1)
    bins = np.logspace(0, np.log10(longest + 1), 60)
    mixture = Panel("mixture", "Mixture; dotted: the newest checkpoint", "share of tokens", is_stack=True)
    sampled = sum(map(len, lengths.values()))
    title = f"Lengths of {sampled:,} documents; dotted: seq_length"
    histogram = Panel("lengths", title, "share of documents", x="tokens", log_x=True)
    for color, (name, share) in enumerate(shares.items()):
        mixture.series.append(_stairs(name, edges, share, color))
        if name in lengths:
            counts, _ = np.histogram(np.maximum(lengths[name], 1), bins)
            histogram.series.append(_stairs(name, bins, counts / len(lengths[name]), color))
    if 0 < data.run.step <= num_steps:
        mixture.restarts.append(data.run.step)
    histogram.restarts.append(data.section.seq_length)
    write_png([mixture, histogram], Path(path), "--plot")


def _stairs(name: str, edges: np.ndarray[Any, Any], heights: Floats, color: int) -> Series:
    """A curve that has each height between two edges."""
    return Series(name, np.repeat(edges, 2)[1:-1].astype(float), np.repeat(heights, 2), color)
