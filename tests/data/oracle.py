"""What a row must hold, worked out from the documents in memory, one token at a time."""

from __future__ import annotations

import numpy as np

from fms_fsdp.data.batch import Batch
from fms_fsdp.data.order.source_order import RowAddress
from fms_fsdp.data.rows import CorpusRows
from fms_fsdp.data.stream import TokenStream
from tests.data.corpora import Files

Used = dict[
    tuple[str, int], np.ndarray
]  # how often each token of a source came in an epoch, by (source, epoch)


def rows_of(stream: TokenStream) -> CorpusRows:
    assert isinstance(stream.rows, CorpusRows)
    return stream.rows


def check_row(
    files: Files, stream: TokenStream, address: RowAddress, batch: Batch, row: int, used: Used | None = None
) -> None:
    """Asserts tokens, labels, positions and ids of a row against the documents, and counts its tokens in
    `used`."""
    documents = files.documents[address.source]
    tokens, labels, positions, ids = (tensor[row].numpy() for tensor in batch)
    pieces = rows_of(stream).pieces_of(address)
    assert pieces.length.sum() == len(tokens)
    at, seams = 0, np.cumsum([span.length for span in rows_of(stream).order.spans(address)]).tolist()
    columns = zip(pieces.file, pieces.document, pieces.start, pieces.length, strict=True)
    for number, (file, document, start, length) in enumerate(columns):
        text = documents[file][document]
        assert (tokens[at : at + length] == text[start : start + length]).all()
        assert (labels[at : at + length - 1] == text[start + 1 : start + length]).all()
        assert (positions[at : at + length] == np.arange(length)).all()
        assert (ids[at : at + length] == number).all()
        last = labels[at + length - 1]
        if start + length < len(text):
            assert last == text[start + length], "the label at a cut is the next token of the same document"
        elif number + 1 < len(pieces.length):
            begins = pieces.start[number + 1] == 0
            follower = documents[pieces.file[number + 1]][pieces.document[number + 1]]
            assert last == (follower[0] if begins and at + length not in seams else -100), (
                "after a separator: the next document's beginning, or nothing"
            )
        if used is not None:
            key = (address.source, address.epoch)
            counts = used.setdefault(key, np.zeros(files.num_tokens(address.source), dtype=np.int64))
            first = files.offset(address.source, int(file), int(document)) + start
            counts[first : first + length] += 1
        at += length


def check_step(files: Files, stream: TokenStream, step: int, used: Used | None = None) -> None:
    batch = stream.batch_at(step)
    for row, address in enumerate(rows_of(stream).order.addresses(step)):
        check_row(files, stream, address, batch, row, used)


def check_epoch(files: Files, used: Used, source: str, epoch: int, seq_length: int) -> None:
    """Asserts that the epoch used each token of the source once, but for a rest shorter than a row."""
    counts = used[source, epoch]
    assert counts.max() == 1, f"a token of {source} came {counts.max()} times in epoch {epoch}"
    assert counts.sum() == len(counts) // seq_length * seq_length
