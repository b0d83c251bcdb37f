"""Slices of input -> token shards, in a pool of processes.

    slices -> [hash, mark copies] -> encode_slice in each process -> journal entries -> publish

The shards are a function of the inputs and options, not of the number of processes or of
interruptions: slices in the journal are not encoded again.
"""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import signal
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple, Protocol, TypeVar

import numpy as np
import numpy.typing as npt

from fms_fsdp.data.permute import hash64
from fms_fsdp.data.shards import NO_LOSS
from fms_fsdp.errors import UserError
from fms_fsdp.files import replace_file, sync_to_disk, write_json
from fms_fsdp.prepare.documents import Document, Part, Problem, TextFormat, read_part
from fms_fsdp.prepare.input_files import Slice
from fms_fsdp.prepare.prepare_flags import ShardsConfig
from fms_fsdp.prepare.writer import (
    SPLITS,
    PreparedSource,
    ShardEntry,
    ShardInfo,
    ShardWriter,
    SliceResult,
    Stats,
    publish,
)
from fms_fsdp.process import available_cores
from fms_fsdp.tokenizers.load import load_tokenizer
from fms_fsdp.tokenizers.tokenizer import Tokenizer, Tokens, adds_space, encode_continuations

Job = TypeVar("Job")
Result = TypeVar("Result")
_BATCH_BYTES = 1 << 20
_BATCH_RECORDS = 4096
_PROGRESS_S = 5.0
DEDUP_BYTES = 24  # peak memory of `mark_copies` per document, measured by benchmarks/bench_scale.py
DEDUP_NOTE_DOCUMENTS = 10**9  # from here on the memory is a reason to choose the machine
_PR_SET_PDEATHSIG = 1  # prctl(2): the signal that a process gets when its parent dies


class Encoded(NamedTuple):
    """A document as token ids, and its text if it was read as text."""

    tokens: Tokens
    document: Document | None = None
    unk_tokens: int = 0
    eos_tokens: int = 0  # that the text spells


class Reader(Protocol):
    """Reads the records of a slice as token ids; a value that can be pickled."""

    def read(
        self, parts: Sequence[Part], copies: npt.NDArray[np.bool_] | None
    ) -> Iterator[Encoded | Problem]:
        """Yields every record; `copies` marks documents that equal an earlier one."""


@dataclass(frozen=True)
class TextReader:
    """Reads text and encodes it in batches.

    In each batch problems come first, then copies and empty documents, then encoded documents.
    """

    form: TextFormat
    tokenizer: str
    eos_token: str
    append_eos: bool
    min_tokens: int
    max_tokens: int | None
    bos_id: int | None = None

    def read(
        self, parts: Sequence[Part], copies: npt.NDArray[np.bool_] | None
    ) -> Iterator[Encoded | Problem]:
        tokenizer = load_tokenizer(self.tokenizer, self.eos_token)
        unk_id = tokenizer.unk_id()
        eos = np.array([tokenizer.vocabulary.eos_id], dtype=np.uint32)
        first = 0
        for batch in _batches(parts, self.form):
            yield from (record for record in batch if isinstance(record, Problem))
            documents = [r for r in batch if isinstance(r, Document)]
            kept = list[Document]()
            for number, document in enumerate(documents, first):
                if copies is not None and copies[number]:
                    yield Problem("duplicate")
                elif not document.text:
                    yield Problem("empty document")
                else:
                    kept.append(document)
            first += len(documents)
            rows = self._encode(tokenizer, kept, unk_id)
            for document, tokens in zip(kept, rows, strict=True):
                if len(tokens) < self.min_tokens:
                    yield Problem(f"shorter than {self.min_tokens} tokens")
                elif self.max_tokens is not None and len(tokens) > self.max_tokens:
                    yield Problem(f"longer than {self.max_tokens} tokens")
                else:
                    unk_tokens = _count(tokens, unk_id)
                    # The stored BOS token may be the EOS token, as GPT-2's.
                    text = tokens if self.bos_id is None else tokens[1:]
                    eos_tokens = _count(text, tokenizer.vocabulary.eos_id)
                    if self.append_eos:
                        tokens = np.concatenate([tokens, eos])
                    yield Encoded(tokens, document, unk_tokens, eos_tokens)

    def _encode(
        self, tokenizer: Tokenizer, documents: Sequence[Document], unk_id: int | None
    ) -> Sequence[Tokens]:
        """Returns the ids of each document.

        A prompt is encoded separately, as in generation, and its ids and the BOS token are masked.
        The response continues it. Without a response there is no document to learn from: no ids.
        """
        texts = [document.text[document.prompt :] for document in documents]
        responses = tokenizer.encode(texts)
        after_prompt = [number for number, document in enumerate(documents) if document.prompt]
        if after_prompt and adds_space(tokenizer):
            after_texts = [texts[number] for number in after_prompt]
            continued = encode_continuations(tokenizer, after_texts, unk_id)
            for number, row in zip(after_prompt, continued, strict=True):
                responses[number] = row
        bos = [] if self.bos_id is None else [self.bos_id]
        has_prompts = bool(self.form.prompt_key)
        if not has_prompts and not bos:
            return responses
        prompts = tokenizer.encode([document.text[: document.prompt] for document in documents])
        rows = []
        for prompt, response in zip(prompts, responses, strict=True):
            if not len(response):  # of a text that the tokenizer drops, such as spaces
                rows.append(response)
                continue
            before = np.array([*bos, *prompt.tolist()], np.uint32)
            if has_prompts:
                before |= np.uint32(NO_LOSS)
            rows.append(np.concatenate([before, response.astype(np.uint32)]))
        return rows


def _count(tokens: Tokens, number: int | None) -> int:
    """Returns how often an id occurs, also in prompts."""
    if number is None:
        return 0
    return int(np.count_nonzero(tokens & np.uint32(NO_LOSS - 1) == number))


def _batches(parts: Sequence[Part], form: TextFormat) -> Iterator[list[Document | Problem]]:
    """Yields the records of the parts in batches of about 1 MB."""
    batch = list[Document | Problem]()
    size = 0
    for part in parts:
        for record in read_part(part, form):
            batch.append(record)
            if isinstance(record, Document):
                size += len(record.data)
            if size >= _BATCH_BYTES or len(batch) >= _BATCH_RECORDS:
                yield batch
                batch = []
                size = 0
    yield batch


@dataclass(frozen=True)
class ShardSettings:
    """How records become shards, for all sources of a call."""

    reader: Reader
    info: ShardInfo
    split: tuple[float, ...]
    shard_tokens: int
    max_bad_lines: int = 0
    dedup: bool = False


@dataclass(frozen=True)
class SliceJob:
    """One slice to encode."""

    source: str
    slice: Slice
    settings: ShardSettings
    folder: Path
    journal: Path

    def file(self, name: str) -> Path:
        """Returns the path of slice.json, hashes.npy or duplicates.npy of this slice in the journal."""
        stem, suffix = name.split(".")
        return self.journal / f"{stem}-{self.slice.index:05d}.{suffix}"


def make_shards(
    config: ShardsConfig, sources: Sequence[PreparedSource], settings: ShardSettings
) -> dict[str, Stats]:
    """Encodes the slices that are not in the journals, and publishes the sources; returns statistics.

    Raises:
        UserError: an unreadable input, too many malformed records, or a source without documents.
    """
    results = {source.name: source.finished() for source in sources}
    num_bad = dict[str, int]()
    for name, finished in results.items():
        # The call that exceeded the limit may have encoded every slice, so that none is pending.
        stats = Stats.merge(result["stats"] for result in finished.values())
        _check_bad_lines(name, settings, stats.num_bad, stats.bad)
        num_bad[name] = stats.num_bad
    jobs = [
        SliceJob(source.name, part, settings, source.partial, source.journal)
        for source in sources
        for part in source.slices
    ]
    pending = [job for job in jobs if job.slice.index not in results[job.source]]
    for job in pending:
        job.folder.mkdir(parents=True, exist_ok=True)
    if len(pending) < len(jobs):
        note(f"{len(jobs) - len(pending)} of {len(jobs)} slices are already done")
    workers = config.num_workers or available_cores()
    if settings.dedup and pending:
        for _ in run_jobs(
            hash_slice, [j for j in jobs if not j.file("hashes.npy").is_file()], workers, "hash"
        ):
            pass
        mark_copies(jobs)
    for job, result in run_jobs(encode_slice, pending, workers, "encode"):
        results[job.source][job.slice.index] = result
        num_bad[job.source] += result["stats"]["num_bad"]
        _check_bad_lines(job.source, settings, num_bad[job.source], result["stats"]["bad"])
    return publish(config.folder, sources, results)


def _check_bad_lines(
    source: str, settings: ShardSettings, num_bad: int, examples: Sequence[str]
) -> None:
    limit = settings.max_bad_lines
    if num_bad > limit:
        raise UserError(
            f"--max_bad_lines={limit} is exceeded in source {source}: {'; '.join(examples)}; repair "
            "or --exclude the files, or raise the limit"
        )


def encode_slice(job: SliceJob) -> SliceResult:
    """Writes the shards of the slice, then its journal entry, which it returns.

    The hash of a text (or of its ids) chooses its split, so equal texts are in the same split.

    Raises:
        UserError: an unreadable file, an id outside the vocabulary, or too many malformed records.
    """
    settings = job.settings
    stats = Stats()
    shards = list[ShardEntry]()
    edges = np.cumsum(settings.split)[:-1] / sum(settings.split) * 2.0**64
    writers = dict[str, ShardWriter]()
    num_full = Counter[str]()

    def close(split: str) -> None:
        writer = writers.pop(split)
        size = writer.finish()
        documents = writer.num_documents
        tokens = writer.num_tokens
        name = writer.path.name
        shards.append(
            ShardEntry(split=split, file=name, documents=documents, tokens=tokens, bytes=size)
        )
        num_full[split] += 1

    copies = np.load(job.file("duplicates.npy")) if settings.dedup else None
    for record in settings.reader.read(job.slice.parts, copies):
        if isinstance(record, Problem):
            stats.skip(record)
            _check_bad_lines(job.source, settings, stats.num_bad, stats.bad)
            continue
        tokens = record.tokens
        split = SPLITS[0]
        if len(edges):
            if record.document is not None:
                data = record.document.data
            else:
                data = tokens.astype("<u4").tobytes()
            split = SPLITS[int(np.searchsorted(edges, hash64(data), side="right"))]
        if split in writers:
            num_tokens = writers[split].num_tokens
            if num_tokens and num_tokens + len(tokens) > settings.shard_tokens:
                close(split)
        if split not in writers:
            name = f"shard-{job.slice.index:05d}"
            if num_full[split]:
                name += f"_{num_full[split]:03d}"  # "_" sorts after "."
            path = job.folder / split / f"{name}.arrow"
            path.parent.mkdir(parents=True, exist_ok=True)
            writers[split] = ShardWriter(path, settings.info)
        try:
            writers[split].add(tokens)
        except UserError as error:
            where = f"--input={job.slice.parts[0].path}, document {stats.records + 1}"
            raise UserError(f"{where}: {error}") from error
        stats.add(len(tokens), record.document, record.unk_tokens, record.eos_tokens)
    for split in list(writers):
        close(split)
    result = SliceResult(shards=shards, stats=vars(stats))
    write_json(job.file("slice.json"), result)
    return result


# Exact copies


def hash_slice(job: SliceJob) -> None:
    """Writes the hash of every document of the slice, in order."""
    assert isinstance(job.settings.reader, TextReader)
    records = (r for part in job.slice.parts for r in read_part(part, job.settings.reader.form))
    hashes = [hash64(record.data) for record in records if isinstance(record, Document)]
    _save(job.file("hashes.npy"), np.array(hashes, dtype=np.uint64))


def mark_copies(jobs: Sequence[SliceJob]) -> None:
    """Writes for every job which documents equal an earlier one, in the order of the jobs.

    Takes DEDUP_BYTES of memory per document, and logs the total for a large corpus.
    """
    sizes = [len(np.load(job.file("hashes.npy"), mmap_mode="r")) for job in jobs]
    num_documents = sum(sizes)
    if num_documents >= DEDUP_NOTE_DOCUMENTS:
        gb = num_documents * DEDUP_BYTES / 1e9
        note(f"--dedup needs {gb:,.1f} GB of memory for {num_documents:,} documents")
    ends = np.cumsum(sizes)
    hashes = np.empty(num_documents, dtype=np.uint64)
    for job, end, size in zip(jobs, ends, sizes, strict=True):
        hashes[end - size : end] = np.load(job.file("hashes.npy"))
    # A stable sort keeps equal hashes in the order of the jobs: all but the first are copies.
    order = np.argsort(hashes, kind="stable")
    hashes = hashes[order]
    is_repeated = hashes[1:] == hashes[:-1]
    del hashes
    is_copy = np.zeros(num_documents, dtype=bool)
    is_copy[order[1:]] = is_repeated
    for job, copies in zip(jobs, np.split(is_copy, ends[:-1]), strict=True):
        _save(job.file("duplicates.npy"), copies)


def _save(path: Path, array: npt.NDArray[Any]) -> None:
    temporary = path.with_name(f".{path.name}.tmp")
    with open(temporary, "wb") as file:
        # Not np.save, which ignores the errors of a full disk in the last block.
        header = np.lib.format.header_data_from_array_1_0(array)
        np.lib.format.write_array_header_1_0(file, header)
        file.write(np.ascontiguousarray(array).data)
        file.flush()
        sync_to_disk(file.fileno(), temporary)  # an existing file counts as complete
    replace_file(temporary, path)


# Processes


def note(text: str) -> None:
    """Prints a progress line to stderr."""
    print(text, file=sys.stderr, flush=True)


def run_jobs(
    work: Callable[[SliceJob], Result], jobs: Sequence[SliceJob], workers: int, label: str
) -> Iterator[tuple[SliceJob, Result]]:
    """Yields (job, result) as jobs finish, the largest started first; logs progress.

    With one worker the jobs run in this process, in their order.

    Raises:
        UserError: a process was killed. Errors of a job are raised as they are; other jobs end.
    """
    workers = min(workers, len(jobs))
    sizes = [job.slice.num_bytes for job in jobs]
    results: Iterator[tuple[int, Result]]
    if workers > 1:
        results = _run_in_processes(work, jobs, sizes, workers)
    else:
        results = enumerate(map(work, jobs))
    total_mb = max(1e-6, sum(sizes) / 1e6)
    done_mb = 0.0
    start = time.monotonic()
    logged = start
    for count, (i, result) in enumerate(results, start=1):
        done_mb += sizes[i] / 1e6
        now = time.monotonic()
        if count == len(jobs) or now - logged >= _PROGRESS_S:
            logged = now
            seconds = max(1e-3, now - start)
            left = timedelta(seconds=round(seconds * (total_mb - done_mb) / max(1e-6, done_mb)))
            rate = done_mb / seconds
            speed = f"{rate:,.0f}" if rate >= 10 else f"{rate:.2g}"
            done = f"{done_mb:,.1f} of {total_mb:,.1f} MB ({speed} MB/s)"
            note(f"{label}: {count} of {len(jobs)} slices, {done}, {left} left")
        yield jobs[i], result


def _run_in_processes(
    work: Callable[[Job], Result], jobs: Sequence[Job], sizes: Sequence[int], workers: int
) -> Iterator[tuple[int, Result]]:
    before = set(multiprocessing.active_children())
    try:
        pool = ProcessPoolExecutor(
            workers, multiprocessing.get_context("spawn"), initializer=_start_worker
        )
    except (OSError, ImportError, NotImplementedError) as error:  # of its semaphores
        reason = os.strerror(error.errno) if isinstance(error, OSError) and error.errno else error
        raise UserError(
            f"--num_workers={workers} requires semaphores in /dev/shm, which fail here ({reason}); "
            "mount /dev/shm, or set --num_workers=1"
        ) from error
    try:
        largest_first = sorted(range(len(jobs)), key=lambda i: -sizes[i])
        futures = {pool.submit(work, jobs[i]): i for i in largest_first}
        for future in as_completed(futures):
            yield futures.pop(future), future.result()
        pool.shutdown()
    except BrokenProcessPool:
        raise UserError(
            "--num_workers: a process was killed, perhaps because memory ran out; run the command again "
            "to resume, with fewer workers or a lower --shard_tokens"
        ) from None
    finally:
        pool.shutdown(wait=False, cancel_futures=True)
        for process in set(multiprocessing.active_children()) - before:
            process.terminate()


def _start_worker() -> None:
    """Lets the parent handle Ctrl-C, and ends this process with its parent, even if that is killed."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    libc = ctypes.CDLL(None)
    if hasattr(libc, "prctl"):  # at once, before the command can be run again
        libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    threading.Thread(target=_end_with_parent, daemon=True).start()


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)
