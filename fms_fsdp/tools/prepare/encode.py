"""One slice of input → its token shards: the work of one process of `prepare`.

    read_part ── batches of texts ── tokenizer ── length filter, duplicates, split by hash ── ShardWriter per split ── journal entry

A slice's result depends on the slice and its job alone. Its shards are renamed when whole; its journal entry is written after them, so an entry
vouches for its shards.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from fms_fsdp.atomic import write_json
from fms_fsdp.data.tokenizer import load_tokenizer
from fms_fsdp.tools.prepare.documents import Document, Problem, Slice, TextFormat, read_part
from fms_fsdp.tools.prepare.shard_writer import ShardInfo, ShardWriter
from fms_fsdp.tools.prepare.workers import count_progress

SPLITS = ("train", "validation", "test")
_BATCH_BYTES = 1 << 20
_SHOWN_BAD = 5
_HASHES_IN_MEMORY = 1 << 25  # 64-bit hashes compared at a time, about 1 GB of working memory


@dataclass
class Stats:
    """What was read, kept and left out. `lengths[b]` counts kept documents of [2^(b-1), 2^b) tokens."""

    records: int = 0
    documents: int = 0
    tokens: int = 0
    chars: int = 0
    num_bytes: int = 0
    num_bad: int = 0
    bad: list[str] = field(default_factory=list)
    left_out: Counter[str] = field(default_factory=Counter)
    lengths: Counter[int] = field(default_factory=Counter)

    def leave_out(self, reason: str) -> None:
        self.left_out[reason] += 1

    def keep(self, document: Document, num_tokens: int) -> None:
        self.documents += 1
        self.tokens += num_tokens
        self.chars += len(document.text)
        self.num_bytes += len(document.data)
        self.lengths[num_tokens.bit_length()] += 1

    @staticmethod
    def merge(parts: Iterable[Stats]) -> Stats:
        total = Stats()
        for part in parts:
            for name in ("records", "documents", "tokens", "chars", "num_bytes", "num_bad"):
                setattr(total, name, getattr(total, name) + getattr(part, name))
            total.bad = (total.bad + part.bad)[:_SHOWN_BAD]
            total.left_out += part.left_out
            total.lengths += part.lengths
        return total

    def to_json(self) -> dict[str, Any]:
        return {**vars(self), "left_out": dict(self.left_out), "lengths": dict(self.lengths)}

    @staticmethod
    def from_json(content: dict[str, Any]) -> Stats:
        lengths = Counter({int(bucket): count for bucket, count in content["lengths"].items()})
        return Stats(**{**content, "left_out": Counter(content["left_out"]), "lengths": lengths})

    def reasons(self) -> str:
        """Why records were left out, the most frequent first."""
        return ", ".join(
            f"{count:,} {reason}" for reason, count in sorted(self.left_out.items(), key=lambda r: -r[1])
        )


@dataclass(frozen=True)
class SliceJob:
    """All that a process must know to encode a slice."""

    source: str
    slice: Slice
    form: TextFormat
    tokenizer: str
    eos_token: str
    info: ShardInfo
    folder: Path
    journal: Path
    split: tuple[float, ...]
    min_tokens: int
    max_tokens: int | None
    dedup: bool
    shard_tokens: int
    max_bad_lines: int

    @property
    def entry(self) -> Path:
        return self.journal / f"slice-{self.slice.index:05d}.json"

    @property
    def hashes(self) -> Path:
        return self.journal / f"hashes-{self.slice.index:05d}.npy"

    @property
    def duplicates(self) -> Path:
        return self.journal / f"duplicates-{self.slice.index:05d}.npy"


def document_hash(data: bytes) -> int:
    """64 bits of the text alone: equal documents are duplicates of one another and fall into the same split."""
    return int.from_bytes(hashlib.blake2b(data, digest_size=8).digest(), "little")


def hash_slice(job: SliceJob) -> None:
    """Writes the hash of every document of the slice, in order."""
    hashes = []
    for documents, _ in _batches(job):
        hashes += [document_hash(document.data) for document in documents]
        count_progress(len(documents), sum(len(document.data) for document in documents), 0)
    _save(job.hashes, np.array(hashes, dtype=np.uint64))


def mark_duplicates(jobs: Sequence[SliceJob]) -> None:
    """Writes for every job which of its documents equal an earlier one, in the order of the jobs. Memory is bounded by buckets of hashes."""
    arrays = [np.load(job.hashes, mmap_mode="r") for job in jobs]
    starts = np.cumsum([0, *map(len, arrays)])
    marks = [np.zeros(len(array), dtype=bool) for array in arrays]
    buckets = -(-int(starts[-1]) // _HASHES_IN_MEMORY) or 1
    for bucket in range(buckets):
        low, high = (np.uint64((bucket + i) * (1 << 64) // buckets - (i and 1)) for i in (0, 1))
        found = [np.flatnonzero((array >= low) & (array <= high)) for array in arrays]
        where = np.concatenate([start + index for start, index in zip(starts, found, strict=False)])
        values = np.concatenate([array[index] for array, index in zip(arrays, found, strict=True)])
        order = np.argsort(values, kind="stable")
        ordered = values[order]
        later = where[order[1:][ordered[1:] == ordered[:-1]]]
        owners = np.searchsorted(starts, later, side="right") - 1
        for owner in np.unique(owners):
            marks[owner][later[owners == owner] - starts[owner]] = True
    for job, mark in zip(jobs, marks, strict=True):
        _save(job.duplicates, mark)


def encode_slice(job: SliceJob) -> dict[str, Any]:
    """Writes the shards of the slice and its journal entry, which it returns: `shards` and `stats`.

    Raises:
        ValueError: an unreadable file, or more malformed records than allowed.
    """
    tokenizer = load_tokenizer(job.tokenizer, job.eos_token)
    writers = SplitWriters(job.folder, job.slice.index, job.info, job.split, job.shard_tokens)
    stats = Stats()
    duplicate: npt.NDArray[np.bool_] | None = np.load(job.duplicates) if job.dedup else None
    eos = np.array([job.info.sep_token], dtype=np.uint32)
    ordinal = 0
    for documents, problems in _batches(job):
        _note_problems(problems, stats, job)
        stats.records += len(documents) + len(problems)
        kept = []
        for document in documents:
            if duplicate is not None and duplicate[ordinal]:
                stats.leave_out("duplicate")
            elif not document.text:
                stats.leave_out("empty document")
            else:
                kept.append(document)
            ordinal += 1
        num_tokens = 0
        for document, tokens in zip(
            kept, tokenizer.encode([document.text for document in kept]), strict=True
        ):
            if len(tokens) < job.min_tokens:
                stats.leave_out(f"shorter than {job.min_tokens} tokens")
            elif job.max_tokens is not None and len(tokens) > job.max_tokens:
                stats.leave_out(f"longer than {job.max_tokens} tokens")
            else:
                tokens = np.concatenate([tokens, eos]) if job.info.has_eos else tokens
                stats.keep(document, len(tokens))
                writers.add(tokens, document.data)
            num_tokens += len(tokens)
        count_progress(len(documents), sum(len(document.data) for document in documents), num_tokens)
    result = {"shards": writers.finish(), "stats": stats.to_json()}
    write_json(job.entry, result)
    return result


def _batches(job: SliceJob) -> Iterator[tuple[list[Document], list[Problem]]]:
    documents: list[Document] = []
    problems: list[Problem] = []
    size = 0
    for part in job.slice.parts:
        for record in read_part(part, job.form):
            if isinstance(record, Problem):
                problems.append(record)
            else:
                documents.append(record)
                size += len(record.data)
            if size >= _BATCH_BYTES or len(documents) + len(problems) >= 4096:
                yield documents, problems
                documents, problems, size = [], [], 0
    yield documents, problems


def _note_problems(problems: Sequence[Problem], stats: Stats, job: SliceJob) -> None:
    for problem in problems:
        stats.leave_out(problem.reason)
        if problem.malformed:
            stats.num_bad += 1
            stats.bad = [*stats.bad, f"{problem.where} {problem.reason}"][:_SHOWN_BAD]
    if stats.num_bad > job.max_bad_lines:
        raise ValueError(too_many_bad(job.max_bad_lines, job.source, stats.bad))


def too_many_bad(limit: int, source: str, bad: Sequence[str]) -> str:
    """The error line for more malformed records than --max_bad_lines allows."""
    return f"--max_bad_lines ({limit}) exceeded in source {source}: {'; '.join(bad)}; repair the input or raise the limit"


class SplitWriters:
    """Writes the shards of one slice: an open one per split, a further one where `shard_tokens` would be passed."""

    def __init__(
        self, folder: Path, index: int, info: ShardInfo, split: Sequence[float], shard_tokens: int
    ) -> None:
        self._folder, self._index, self._info, self._shard_tokens = folder, index, info, shard_tokens
        self._edges = np.cumsum(split)[:-1] / sum(split) * 2.0**64
        self._open: dict[str, ShardWriter] = {}
        self._rolled: Counter[str] = Counter()
        self._finished: list[dict[str, Any]] = []

    def add(self, tokens: npt.NDArray[Any], data: bytes) -> None:
        """Appends a document; the hash of `data` chooses its split."""
        one = len(self._edges) == 0
        split = SPLITS[0 if one else int(np.searchsorted(self._edges, document_hash(data), side="right"))]
        writer = self._open.get(split)
        if writer and writer.num_tokens and writer.num_tokens + len(tokens) > self._shard_tokens:
            self._close(split)
            writer = None
        if writer is None:
            rolled = f"_{self._rolled[split]:03d}" if self._rolled[split] else ""  # "_" sorts after "."
            path = self._folder / split / f"shard-{self._index:05d}{rolled}.arrow"
            path.parent.mkdir(parents=True, exist_ok=True)
            writer = self._open[split] = ShardWriter(path, self._info)
        writer.add(tokens)

    def _close(self, split: str) -> None:
        writer = self._open.pop(split)
        size = writer.finish()
        self._rolled[split] += 1
        counts = {"documents": writer.num_documents, "tokens": writer.num_tokens, "bytes": size}
        self._finished.append({"split": split, "file": writer.path.name, **counts})

    def finish(self) -> list[dict[str, Any]]:
        for split in list(self._open):
            self._close(split)
        return self._finished


def _save(path: Path, array: npt.NDArray[Any]) -> None:
    temporary = path.with_name(f".{path.name}.tmp")
    with open(temporary, "wb") as file:
        np.save(file, array)
    temporary.replace(path)
