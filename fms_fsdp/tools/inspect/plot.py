"""The picture of `inspect plan`: the mixture over the steps, as it comes out, and how long the documents
are."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from fms_fsdp.data.order.permute import I64
from fms_fsdp.tools.inspect.step import Inspected

STEP_RANGES = 120
SAMPLED_SHARDS = 8  # of a source
SAMPLED_DOCUMENTS = 1 << 16  # of a shard


def mixture_over_time(
    data: Inspected, num_steps: int
) -> tuple[I64, dict[str, np.ndarray[Any, np.dtype[np.float64]]]]:
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
    """Writes the picture. Raises: ValueError where matplotlib is not installed, OSError where nothing can be
    written."""
    try:
        import matplotlib
        from matplotlib.figure import Figure
    except ImportError:
        raise ValueError(
            "--plot needs matplotlib, which is not installed; `pip install matplotlib`"
        ) from None
    edges, shares = mixture_over_time(data, num_steps)
    palette = matplotlib.colormaps["tab10" if len(shares) <= 10 else "tab20"]
    colors = {name: palette(i % palette.N) for i, name in enumerate(shares)}
    figure = Figure(figsize=(12, 4.5), layout="constrained")
    left, right = figure.subplots(1, 2)
    below = np.zeros(len(edges) - 1)
    for name, share in shares.items():
        left.stairs(below + share, edges, baseline=below, fill=True, color=colors[name], label=name)
        below = below + share
    if data.run.step and data.run.step <= num_steps:
        left.axvline(data.run.step, color="black", linewidth=0.8, linestyle="--", label="newest checkpoint")
    left.set(xlim=(0, num_steps), ylim=(0, 1), xlabel="step", ylabel="share of tokens", title="Mixture")
    left.legend(loc="upper right", fontsize="small")
    lengths = document_lengths(data)
    longest = max((int(found.max()) for found in lengths.values() if len(found)), default=1)
    bins = np.logspace(0, np.log10(longest + 1), 60)
    for name, found in lengths.items():
        if len(found):
            weights = np.full(len(found), 1 / len(found))
            style = {"histtype": "step", "color": colors.get(name), "label": name}
            right.hist(np.maximum(found, 1), bins=bins, weights=weights, **style)
    right.axvline(data.section.seq_length, color="black", linewidth=0.8, linestyle=":", label="seq_length")
    sampled = sum(map(len, lengths.values()))
    title = f"Document lengths ({sampled:,} documents)"
    right.set(xscale="log", xlabel="tokens", ylabel="share of documents", title=title)
    right.legend(fontsize="small")
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)
