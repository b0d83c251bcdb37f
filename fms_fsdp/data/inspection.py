"""Questions about a stream that the plan of a run and its log ask."""

from __future__ import annotations

import numpy as np

from fms_fsdp.data.batch import IGNORED_LABEL
from fms_fsdp.data.sequences import Columns
from fms_fsdp.data.shards import ShardError, TokenError
from fms_fsdp.data.stream import TokenStream
from fms_fsdp.errors import UserError


def end_of_epochs(stream: TokenStream, source: str, epochs: float, step: int) -> int:
    """Finds the step, from `step` on, that completes `epochs` epochs of a source, or of all if "".

    Raises:
        UserError: there is no such source.
    """
    names = sorted(stream.source_names)
    if source not in ("", *names):
        raise UserError(
            f"--num_epochs={source}:{epochs:g} must name a source; use {', '.join(names)}"
        )
    return stream.first_beyond([source] if source else names, epochs, step - 1, less=1)


def sources_without_labels(stream: TokenStream) -> list[tuple[str, float]]:
    """Returns the sources of which fewer than a hundredth of the tokens in four sequences are
    labels, with that fraction: because of loss masks, or of shards that are masked."""
    found = []
    size = stream.section.seq_length
    out = Columns.empty(size)
    for name in stream.source_names:
        try:
            is_suspect = stream.reader(name).shard(0).has_masks
        except ShardError:
            is_suspect = True
        if not is_suspect:
            continue
        total = stream.order.sources[name].num_sequences
        labels = 0
        numbers = sorted({(2 * i + 1) * total // 8 for i in range(4)})
        for n in numbers:
            try:
                stream.read(stream.order.address(name, n), out)
                labels += int(np.count_nonzero(out.labels != IGNORED_LABEL))
            except ShardError as error:
                if stream.section.on_missing != "mask" or isinstance(error, TokenError):
                    raise
        if (fraction := labels / (len(numbers) * size)) < 0.01:
            found.append((name, fraction))
    return found
