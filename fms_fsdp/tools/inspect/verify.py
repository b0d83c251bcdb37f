"""Every shard of a corpus, read to its last token: `python -m fms_fsdp inspect verify`.

    shards -> threads: footer and counts -> offsets of each chunk -> all token ids, a few MiB at a time -> problems, a line each

Invariant: memory is bounded by the threads, each with one chunk's offsets and one slice of tokens. What training would find
at its first read of a shard, and what it would never look at, is found here beforehand.
"""

from __future__ import annotations

import dataclasses
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from fms_fsdp.config import flag
from fms_fsdp.data.shards.files import Files
from fms_fsdp.data.shards.manifest import Corpus, Source, check_shard, open_corpus
from fms_fsdp.data.shards.shard import Documents, Shard, ShardError
from fms_fsdp.tools.inspect.step import InspectConfig, data_section, inspected, read_run

SLICE_TOKENS = 1 << 20
SHOWN_PROBLEMS = 5  # of one shard
_PROGRESS_INTERVAL_S = 5.0

Tokens = npt.NDArray[np.unsignedinteger[npt.NBitBase]]


@dataclass(frozen=True)
class VerifyConfig(InspectConfig):
    """Which corpus to read, and how."""

    vocab_size: int | None = flag(
        None, "token ids lie below it (default: the run's, else the shards')", minimum=1
    )
    num_threads: int = flag(4, "shards read at a time", minimum=1)


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
    files, problems = corpus.files.clone(), list[str]()
    try:
        shard = Shard(files, source.paths[file], source.delimiter)
        problems += _check_counts(corpus, source, file, shard, vocab_size)
        largest = _Largest(shard, shard.metadata.get("max_token_id", ""), vocab_size)
        for number in range(len(shard.chunk_starts) - 1):
            found = shard.chunk(number)
            lengths = np.diff(found.starts) - source.delimiter
            for address, tokens in _slices(files, shard, found, lengths):
                problems += largest.check(address, tokens)
            if source.delimiter == 0 and not problems:
                problems += _check_ends(files, shard, found, lengths, corpus.sep_token)
    except ShardError as error:
        problems.append(str(error))
    except OSError as error:
        problems.append(f"shard ({source.paths[file]}) cannot be read: {error}; check the storage")
    finally:
        files.close()
    if len(problems) > SHOWN_PROBLEMS:
        more = len(problems) - SHOWN_PROBLEMS
        problems[SHOWN_PROBLEMS:] = [f"shard ({source.paths[file]}) has {more} more problems of this kind"]
    return problems


def _check_counts(
    corpus: Corpus, source: Source, file: int, shard: Shard, vocab_size: int | None
) -> list[str]:
    """Returns how the shard's own counts differ from the counts file's."""
    try:
        check_shard(source, file, shard, sep_token=corpus.sep_token, vocab_size=vocab_size)
    except ShardError as error:
        return [str(error)]
    return []


@dataclass
class _Largest:
    """Looks for token ids beyond the vocabulary, or beyond the largest that the shard's metadata names."""

    shard: Shard
    said: str
    vocab_size: int | None

    def check(self, address: int, tokens: Tokens) -> list[str]:
        """Returns a line if a token of this slice, which lies at `address` in the file, is too large."""
        largest = int(tokens.max())
        if self.vocab_size is not None and largest >= self.vocab_size:
            limit, rule = self.vocab_size, f"beyond vocab_size ({self.vocab_size})"
        elif self.said.isdigit() and largest > int(self.said):
            limit, rule = int(self.said) + 1, f"above its metadata's max_token_id ({self.said})"
        else:
            return []
        first = int(np.argmax(tokens >= limit))
        document = self.shard.document_at(address + first * self.shard.dtype.itemsize)
        return [
            f"shard ({self.shard.path}) holds token {tokens[first]} in document {document}, {rule}; "
            "restore it or raise --vocab_size to that of its tokenizer"
        ]


def _slices(
    files: Files, shard: Shard, found: Documents, lengths: npt.NDArray[np.int64]
) -> Iterator[tuple[int, Tokens]]:
    """Yields (byte position, tokens) of all the documents' tokens: in one run of slices where they lie side by side."""
    width = shard.dtype.itemsize
    ends = found.addresses + lengths * width
    breaks = np.flatnonzero(found.addresses[1:] != ends[:-1]) + 1
    starts = np.concatenate([[0], breaks]) if len(ends) else np.empty(0, dtype=np.int64)
    stops = np.append(breaks, len(ends))
    for first, last in zip(starts.tolist(), stops.tolist(), strict=False):
        address, end = int(found.addresses[first]), int(ends[last - 1])
        while address < end:
            size = min(SLICE_TOKENS * width, end - address)
            data = files.pread(shard.path, size, address)
            if len(data) < size:
                document = shard.document_at(address + len(data))
                raise ShardError(
                    f"shard ({shard.path}) ends {end - address - len(data)} bytes early, in document {document}; "
                    "it is truncated: restore it"
                )
            yield address, np.frombuffer(data, shard.dtype)
            address += size


def _check_ends(
    files: Files, shard: Shard, found: Documents, lengths: npt.NDArray[np.int64], sep_token: int
) -> list[str]:
    """Returns a line for the documents of a shard with stored separators that do not end with one."""
    width = shard.dtype.itemsize
    filled = np.flatnonzero(lengths)
    last = found.addresses[filled] + (lengths[filled] - 1) * width
    for index, address in zip(filled.tolist(), last.tolist(), strict=True):
        token = int(np.frombuffer(files.pread(shard.path, width, address), shard.dtype)[0])
        if token != sep_token:
            document = found.first + index
            return [
                f"shard ({shard.path}) has document {document} end with {token}, not with the separator ({sep_token}) "
                "as others do; write it anew with `python -m fms_fsdp convert`"
            ]
    return []


def main(config: VerifyConfig) -> None:
    """The command `inspect verify`. Raises: ValueError with the number of problems, after a line for each."""
    run = read_run(Path(config.run)) if config.run else None
    section = data_section(config, run.data if run else None)
    corpus = open_corpus(dataclasses.replace(section, seq_length=1, on_missing="mask"), check_shards=False)
    vocab_size = config.vocab_size or (run.vocab_size if run else None) or corpus.vocab_size
    num_shards, num_bad, num_problems = sum(len(source.paths) for source in corpus.sources), 0, 0
    start = shown = time.monotonic()
    for done, (_, problems) in enumerate(verify_corpus(corpus, vocab_size, config.num_threads), 1):
        for problem in problems:
            print(problem, flush=True)
        num_bad, num_problems = num_bad + bool(problems), num_problems + len(problems)
        if time.monotonic() - shown >= _PROGRESS_INTERVAL_S:
            shown = time.monotonic()
            left = (shown - start) / done * (num_shards - done)
            print(
                f"{done} of {num_shards} shards, {num_bad} with problems, {left:.0f} s left", file=sys.stderr
            )
    if num_bad:
        raise ValueError(f"{num_problems} problems in {num_bad} of {num_shards} shards; each is named above")
    tokens, documents = (
        sum(int(getattr(s, name).sum()) for s in corpus.sources) for name in ("tokens", "docs")
    )
    bound = f"ids below {vocab_size}" if vocab_size else "ids not checked, as no --vocab_size is known"
    print(
        f"{num_shards} shards of {len(corpus.sources)} sources are whole: {documents:,} documents, {tokens:,} tokens, "
        f"{bound} ({time.monotonic() - start:.1f} s)"
    )
    if corpus.files.counters is not None:
        print(f"storage: {corpus.files.counters}")
    if run and run.checkpoint:
        with inspected(config):
            print(f"they are those of the run's checkpoint of step {run.step}")
