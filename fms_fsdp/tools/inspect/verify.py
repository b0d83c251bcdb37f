"""Every shard of a corpus, read to its last token: `python -m fms_fsdp inspect verify`.

    shards -> threads: footer and counts -> documents -> all token ids -> problems, a line each

Invariant: memory is bounded by the number of threads, each with the document offsets of one shard and one
slice of tokens. It finds what training would find at its first read of a shard, and what it never reads.
"""

from __future__ import annotations

import dataclasses
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from fms_fsdp.config import flag
from fms_fsdp.data.corpus import Corpus, Source, check_shard, open_corpus
from fms_fsdp.data.permute import I64
from fms_fsdp.data.shards import Shard, ShardError
from fms_fsdp.data.tokenizer import unk_warnings
from fms_fsdp.errors import UserError
from fms_fsdp.tools.inspect.step import InspectConfig, data_section, inspected, read_run

SLICE_TOKENS = 1 << 20
SHOWN_PROBLEMS = 5  # of one shard
_PROGRESS_INTERVAL_S = 5.0

Tokens = npt.NDArray[np.unsignedinteger[npt.NBitBase]]


@dataclass(frozen=True)
class VerifyConfig(InspectConfig):
    """Which shards to read, and how many at a time."""

    vocab_size: int | None = flag(
        None, "number of ids (default: the run's, else the shards')", min=1
    )
    num_threads: int = flag(4, "shards read at a time", min=1)


def verify_corpus(
    corpus: Corpus, vocab_size: int | None, num_threads: int = 4
) -> Iterator[tuple[str, list[str]]]:
    """Yields (path, problems) of every shard as it is done: [] for a good one."""
    with ThreadPoolExecutor(num_threads, thread_name_prefix="verify") as pool:
        jobs = {
            pool.submit(_verify_shard, corpus, source, file, vocab_size): source.paths[file]
            for source in corpus.sources
            for file in range(len(source.paths))
        }
        try:
            for job in as_completed(jobs):
                yield jobs[job], job.result()
        finally:
            for job in jobs:
                job.cancel()


def _verify_shard(corpus: Corpus, source: Source, file: int, vocab_size: int | None) -> list[str]:
    """Returns what is wrong with a shard, a line each."""
    problems, path = list[str](), source.paths[file]
    try:
        shard = corpus.storage.open_shard(path, source.delimiter)
        try:
            check_shard(source, file, shard, corpus.sep_token, vocab_size)
        except ShardError as error:
            problems.append(str(error))
        starts, addresses = shard.documents
        stops = addresses + (np.diff(starts) - source.delimiter) * shard.width
        for address, tokens in _slices(shard, addresses, stops):
            problems += _too_large(shard, address, tokens, vocab_size)
            if source.delimiter == 0 and not problems:
                ends = stops[stops > addresses]
                problems += _without_end(shard, address, tokens, ends, corpus.sep_token)
    except ShardError as error:
        problems.append(str(error))
    except OSError as error:
        problems.append(f"shard {path} cannot be read: {error}; check the storage")
    if len(problems) > SHOWN_PROBLEMS:
        more = len(problems) - SHOWN_PROBLEMS
        problems[SHOWN_PROBLEMS:] = [f"shard {path} has {more} more problems of this kind"]
    return problems


def _too_large(shard: Shard, address: int, tokens: Tokens, vocab_size: int | None) -> Iterator[str]:
    """Yields a line if a token is beyond the vocabulary, or above the largest that the shard's metadata
    names."""
    largest, said = int(tokens.max()), shard.metadata.get("max_token_id", "")
    if vocab_size is not None and largest >= vocab_size:
        limit, rule = vocab_size, f"beyond vocab_size ({vocab_size})"
    elif said and largest > int(said):
        limit, rule = int(said) + 1, f"above its metadata's max_token_id ({said})"
    else:
        return
    first = int(np.argmax(tokens >= limit))
    document = _document_at(shard, address + first * shard.width)
    remedy = "restore the shard, or raise --vocab_size to that of its tokenizer"
    yield f"shard {shard.path} has token {tokens[first]} in document {document}, {rule}; {remedy}"


def _without_end(
    shard: Shard, address: int, tokens: Tokens, ends: I64, sep_token: int
) -> Iterator[str]:
    """Yields a line if a document of a shard with stored separators ends with another token."""
    width = shard.width
    last = np.searchsorted(ends, [address, address + len(tokens) * width], side="right")
    at = (ends[last[0] : last[1]] - address) // width - 1
    for i in at[tokens[at] != sep_token].tolist()[:1]:
        document = _document_at(shard, address + i * width)
        rule = f"ends document {document} with {tokens[i]}, not with the separator ({sep_token}) as others"
        yield f"shard {shard.path} {rule}; rewrite the shard with `python -m fms_fsdp convert`"


def _document_at(shard: Shard, address: int) -> int:
    """Returns the number of the document at a file offset."""
    return int(shard.documents[1].searchsorted(address, side="right")) - 1


def _slices(shard: Shard, starts: I64, stops: I64) -> Iterator[tuple[int, Tokens]]:
    """Yields (byte position, tokens) of documents that lie at [starts, stops): of neighbours in one run of
    slices."""
    width = shard.width
    gaps = np.flatnonzero(starts[1:] != stops[:-1])
    runs = np.append(starts[:1], starts[gaps + 1]), np.append(stops[gaps], stops[-1:])
    for address, end in zip(*(edges.tolist() for edges in runs), strict=True):
        while address < end:
            size = min(SLICE_TOKENS * width, end - address)
            yield address, shard.ids(shard.read(size, address))
            address += size


def main(config: VerifyConfig) -> None:
    """The command `inspect verify`. Raises: UserError with the number of problems, after a line for each."""
    run = read_run(config.run)
    section = data_section(config, run.data)
    corpus = open_corpus(
        dataclasses.replace(section, seq_length=1, on_missing="mask"), check_shards=False
    )
    vocab_size = config.vocab_size or run.vocab_size or corpus.vocab_size
    num_shards, num_bad, num_problems = sum(len(source.paths) for source in corpus.sources), 0, 0
    start = shown = time.monotonic()
    for done, (_, problems) in enumerate(verify_corpus(corpus, vocab_size, config.num_threads), 1):
        for problem in problems:
            print(problem, flush=True)
        num_bad, num_problems = num_bad + bool(problems), num_problems + len(problems)
        if time.monotonic() - shown >= _PROGRESS_INTERVAL_S:
            shown = time.monotonic()
            left = (shown - start) / done * (num_shards - done)
            told = f"{done} of {num_shards} shards, {num_bad} with problems, {left:.0f} s left"
            print(told, file=sys.stderr)
    if num_bad:
        raise UserError(
            f"{num_problems} problems in {num_bad} of {num_shards} shards; each is named above"
        )
    documents, tokens = 0, 0
    for source in corpus.sources:
        documents, tokens = documents + int(source.docs.sum()), tokens + int(source.tokens.sum())
    bound = (
        f"ids below {vocab_size}" if vocab_size else "ids not checked, as no --vocab_size is known"
    )
    held = f"{documents:,} documents, {tokens:,} tokens, {bound} ({time.monotonic() - start:.1f} s)"
    print(f"{num_shards} shards of {len(corpus.sources)} sources are whole: {held}")
    for warning in unk_warnings(corpus.storage, [source.name for source in corpus.sources]):
        print(f"warning: {warning}")
    if run.checkpoint:
        with inspected(config):
            print(f"these shards are the data of the run's checkpoint of step {run.step}")
