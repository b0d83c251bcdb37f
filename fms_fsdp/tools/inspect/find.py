"""When a document was, or will be, seen: `python -m fms_fsdp inspect find`, by inverting the arithmetic of
the stream.

    document -> its stretch of the circle -> windows (unpermute) -> tokens of tapes -> n, g, step (bisection)

Invariant: the work is proportional to the document's pieces (a window is packed for each), never to the steps
of the run. Every token of the document is accounted for in every epoch: in a row of a step, in a row that
--skip_steps passed over, or in the rest of the epoch that no row holds (a change of seq_length adds to it).
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass

import numpy as np

from fms_fsdp.config import flag
from fms_fsdp.data.order.source_order import RowAddress, Span
from fms_fsdp.data.shards.manifest import Source, nearest
from fms_fsdp.errors import UserError
from fms_fsdp.tools.inspect.step import InspectConfig, Inspected, inspected


@dataclass(frozen=True)
class FindConfig(InspectConfig):
    """Which document to look for, and up to which step."""

    source: str = flag("", "the source that holds the document")
    file: str = flag("", "the shard of the document: a name such as shard-00000.arrow, or its number by name")
    document: int | None = flag(None, "number of the document in the shard, from 0 on", minimum=0)
    num_steps: int | None = flag(None, "list places up to this step (default: the run's last)", minimum=1)
    epochs: int | None = flag(None, "epochs to list (default: 1, if no step is named)", minimum=1)
    json: bool = flag(False, "print one JSON object for each time and place")


@dataclass(frozen=True)
class Seen:
    """Tokens [start, stop) of the document, in one row of one epoch.

    `fate` is "seen"; "skipped" (passed over by --skip_steps before `step`; `row` and `at` None), "rest" (in
    no row of this epoch) or "dropped" (the source leaves the mixture first): then `step` is None.
    """

    epoch: int
    step: int | None
    row: int | None
    at: int | None
    start: int
    stop: int
    fate: str


def find_document(
    data: Inspected, source: Source, file: int, document: int, num_epochs: int
) -> Iterator[Seen]:
    """Yields where every token of a document goes in the first `num_epochs` epochs, epoch by epoch, in no
    order inside one.

    Raises: ShardError; IndexError for a document that is not there.
    """
    begin, end = data.rows.reader(source.name).shard(file).span(document)
    first, order = int(source.starts[file]) + begin, data.order.source(source.name)
    for epoch in range(num_epochs):
        found: list[Seen] = []
        for tape, window in sorted(order.tapes(epoch).windows_of(epoch, first, end - begin)):
            found += _in_window(data, Span(source.name, epoch, tape, window, 0, 0), (file, document))
        yield from found
        held = 0
        for start, stop in [*sorted((seen.start, seen.stop) for seen in found), (end - begin, end - begin)]:
            if held < start:
                yield Seen(epoch, None, None, None, held, start, "rest")
            held = stop


def _in_window(data: Inspected, window: Span, document: tuple[int, int]) -> Iterator[Seen]:
    """Yields the document's pieces in a window, each cut at the edges of its rows."""
    order, pieces = data.order.source(window.source), data.rows.packed(window)
    ends = window.window * order.tapes(window.epoch).window_tokens(window.tape) + np.cumsum(pieces.length)
    for i in np.flatnonzero((pieces.file == document[0]) & (pieces.document == document[1])).tolist():
        token, stop, start = int(ends[i] - pieces.length[i]), int(ends[i]), int(pieces.start[i])
        while token < stop:
            row = data.order.address(window.source, order.row_at(window.epoch, window.tape, token))
            at = token - row.token
            size = order.lap(row.n).seq_length
            if (row.epoch, row.tape) != (window.epoch, window.tape) or not 0 <= at < size:
                break  # a change of the row length left out the rest of the tape
            length = min(stop - token, size - at)
            yield _seen(data, row, at, start, start + length)
            token, start = token + length, start + length


def _seen(data: Inspected, address: RowAddress, at: int, start: int, stop: int) -> Seen:
    found = data.order.history.find(address.source, address.n)
    if found is None:
        return Seen(address.epoch, None, None, None, start, stop, "dropped")
    step, skipped = found
    if skipped:
        return Seen(address.epoch, step, None, None, start, stop, "skipped")
    return Seen(address.epoch, step, data.order.addresses(step).index(address), at, start, stop, "seen")


def find_file(source: Source, text: str) -> int:
    """Returns the place of a shard in its source, from its number, its path or the end of its path. Raises:
    UserError."""
    if text.isdigit() and int(text) < len(source.paths):
        return int(text)
    fitting = [i for i, path in enumerate(source.paths) if f"/{path}".endswith(f"/{text}")]
    if len(fitting) == 1:
        return fitting[0]
    hint = f"the name fits {len(fitting)} shards"
    hint = hint if fitting else nearest(f"{source.name}/{text}", source.paths)
    raise UserError(
        f"--file ({text}) must name one of the {len(source.paths)} shards of {source.name}; {hint}"
    )


def main(config: FindConfig) -> None:
    """The command `inspect find`."""
    begin = time.perf_counter()
    if not config.source or not config.file or config.document is None:
        raise UserError("--source, --file and --document must be given, all three; they name the document")
    with inspected(config) as data:
        source = data.sources.get(config.source)
        if source is None:
            near = nearest(config.source, data.sources)
            raise UserError(f"--source ({config.source}) is not one of this data; {near}")
        file = find_file(source, config.file)
        if config.document >= source.docs[file]:
            rule = f"must be below {source.docs[file]}, the documents of {source.paths[file]}"
            raise UserError(f"--document ({config.document}) {rule}")
        last = config.num_steps or (data.run.num_steps if config.epochs is None else None)
        epochs = config.epochs or 1
        if last and not config.epochs:
            epochs = math.ceil(data.rows.consumption(last)[source.name]["epoch"])
        found = list(find_document(data, source, file, config.document, epochs))
        if last is not None:
            found = [seen for seen in found if (seen.step or 0) <= last]
        found.sort(key=lambda seen: (seen.epoch, seen.step or 0, seen.row or 0, seen.at or 0))
        start, stop = data.rows.reader(source.name).shard(file).span(config.document)
        title = f"{source.paths[file]} document {config.document}, {stop - start} tokens with its separator"
        _print(data, config, title, found, f"step {last}" if last else f"{epochs} epochs")
    if not config.json:
        print(f"({time.perf_counter() - begin:.2f} s)")


def _print(data: Inspected, config: FindConfig, title: str, found: list[Seen], horizon: str) -> None:
    if config.json:
        print("".join(json.dumps(asdict(seen)) + "\n" for seen in found), end="")
        return
    print(title)
    for seen in found:
        tokens = f"tokens [{seen.start}, {seen.stop})"
        if seen.fate == "seen":
            planned = "" if not data.run.step or (seen.step or 0) <= data.run.step else "  planned"
            print(f"  epoch {seen.epoch}  step {seen.step}  row {seen.row}  at {seen.at}  {tokens}{planned}")
        elif seen.fate == "skipped":
            print(f"  epoch {seen.epoch}  passed over by --skip_steps before step {seen.step}  {tokens}")
        elif seen.fate == "rest":
            print(f"  epoch {seen.epoch}  in the rest of the epoch that no row holds  {tokens}")
        else:
            print(f"  epoch {seen.epoch}  never: the source is dropped before  {tokens}")
    steps = {seen.step for seen in found if seen.fate == "seen"}
    print(f"seen in {len(steps)} step{'s' * (len(steps) != 1)} up to {horizon}")
