"""One slice of input → its token shards: the work of one process of `prepare` and `convert`.

    reader: files ── Encoded | Problem …  ──▶  split by hash ── ShardWriter per split ── journal entry

The result of a slice depends on the slice and its job alone. Its shards are renamed when whole; its journal
entry is written after them, so an entry vouches for its shards.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, TypedDict

import numpy as np
import numpy.typing as npt

from fms_fsdp.atomic import write_json
from fms_fsdp.data.order.permute import hash64
from fms_fsdp.data.shards.shard import NO_LOSS
from fms_fsdp.data.tokenizer import Tokenizer, Tokens, load_tokenizer
from fms_fsdp.errors import UserError
from fms_fsdp.tools.prepare.documents import Document, Part, Problem, Slice, TextFormat, read_part
from fms_fsdp.tools.prepare.shard_writer import ShardInfo, ShardWriter
from fms_fsdp.tools.prepare.stats import Stats
from fms_fsdp.tools.prepare.token_files import read_token_file

Marks = npt.NDArray[np.bool_]
SPLITS = ("train", "validation", "test")
_BATCH_BYTES, _BATCH_RECORDS = 1 << 20, 4096


class Encoded(NamedTuple):
    """A document as token ids, and its text where it was read as text."""

    tokens: Tokens
    document: Document | None = None


@dataclass(frozen=True)
class TextReader:
    """Reads text and encodes it, batch by batch. A reader is a value for other processes."""

    form: TextFormat
    tokenizer: str
    eos_token: str
    append_eos: bool
    min_tokens: int
    max_tokens: int | None
    bos_id: int | None = None

    def read(self, parts: Sequence[Part], copies: Marks | None) -> Iterator[Encoded | Problem]:
        """Every record; `copies` marks the documents that equal an earlier one.

        Of a batch the problems come first, then copies and empty documents, then the encoded ones.

        Raises:
            UserError: a file cannot be read.
        """
        tokenizer = load_tokenizer(self.tokenizer, self.eos_token)
        eos = np.array([tokenizer.vocabulary.eos_id], dtype=np.uint32)
        first = 0
        for batch in _read_batches(parts, self.form):
            yield from (record for record in batch if isinstance(record, Problem))
            documents = [record for record in batch if isinstance(record, Document)]
            kept = []
            for ordinal, document in enumerate(documents, first):
                if copies is not None and copies[ordinal]:
                    yield Problem("duplicate")
                elif not document.text:
                    yield Problem("empty document")
                else:
                    kept.append(document)
            first += len(documents)
            rows = _encode(tokenizer, kept, [] if self.bos_id is None else [self.bos_id])
            for document, tokens in zip(kept, rows, strict=True):
                if len(tokens) < self.min_tokens:
                    yield Problem(f"shorter than {self.min_tokens} tokens")
                elif self.max_tokens is not None and len(tokens) > self.max_tokens:
                    yield Problem(f"longer than {self.max_tokens} tokens")
                else:
                    yield Encoded(np.concatenate([tokens, eos]) if self.append_eos else tokens, document)


def _encode(tokenizer: Tokenizer, documents: Sequence[Document], begin: Sequence[int]) -> Sequence[Tokens]:
    """The ids of each document, behind those of `begin`. A prompt is encoded by itself, as where a model is
    asked, and all ids up to its end are marked."""
    rows = tokenizer.encode([document.text[document.prompt :] for document in documents])
    has_prompts = any(document.prompt for document in documents)
    if not has_prompts and not begin:
        return rows
    prompts = tokenizer.encode([document.text[: document.prompt] for document in documents])
    joined = list[Tokens]()
    for prompt, row in zip(prompts, rows, strict=True):
        before = np.array([*begin, *prompt.tolist()], np.uint32)
        before = before | np.uint32(NO_LOSS) if has_prompts else before
        joined.append(np.concatenate([before, row.astype(np.uint32)]))
    return joined


@dataclass(frozen=True)
class TokenReader:
    """Reads token ids; an id `eos_id` at the end of a document is dropped, because the loader adds it. An id
    `bos_id` at the beginning is kept, stripped or, where there is none, added."""

    column: str
    eos_id: int
    bos: str = "keep"
    bos_id: int = -1

    def read(self, parts: Sequence[Part], copies: Marks | None) -> Iterator[Encoded | Problem]:
        """Every record. Raises: UserError: a file cannot be read."""
        for part in parts:
            number = 0
            try:
                for tokens in read_token_file(part.path, self.column):
                    number += 1
                    tokens = tokens[:-1] if len(tokens) and tokens[-1] == self.eos_id else tokens
                    if self.bos != "keep" and len(tokens):
                        rest = tokens[1:] if int(tokens[0]) & (NO_LOSS - 1) == self.bos_id else tokens
                        added = np.uint32(self.bos_id | int(rest[0]) & NO_LOSS if len(rest) else self.bos_id)
                        tokens = rest if self.bos == "strip" else np.append(added, rest)
                    yield Encoded(tokens) if len(tokens) else Problem("empty document")
            except (OSError, ValueError, IndexError) as error:  # pa.ArrowInvalid is a ValueError
                raise UserError(f"--input ({part.path}): {error}; document {number + 1}") from error


Reader = TextReader | TokenReader


def _read_batches(parts: Sequence[Part], form: TextFormat) -> Iterator[list[Document | Problem]]:
    """The records of the parts in batches of about a megabyte."""
    batch: list[Document | Problem] = []
    size = 0
    for record in (record for part in parts for record in read_part(part, form)):
        batch.append(record)
        size += len(record.data) if isinstance(record, Document) else 0
        if size >= _BATCH_BYTES or len(batch) >= _BATCH_RECORDS:
            yield batch
            batch, size = [], 0
    yield batch


@dataclass(frozen=True)
class ShardRecipe:
    """How records become shards: alike for all sources of a call."""

    reader: Reader
    info: ShardInfo
    split: tuple[float, ...]
    shard_tokens: int
    max_bad_lines: int
    dedup: bool


@dataclass(frozen=True)
class SliceJob:
    """All that a process must know to encode a slice."""

    source: str
    slice: Slice
    recipe: ShardRecipe
    folder: Path
    journal: Path

    def in_journal(self, name: str) -> Path:
        """The slice's entry "slice.json", and with --dedup its "hashes.npy" and "duplicates.npy"."""
        stem, suffix = name.split(".")
        return self.journal / f"{stem}-{self.slice.index:05d}.{suffix}"


class ShardEntry(TypedDict):
    """A shard in the journal."""

    split: str
    file: str
    documents: int
    tokens: int
    bytes: int


class SliceResult(TypedDict):
    """A journal entry."""

    shards: list[ShardEntry]
    stats: dict[str, Any]


def encode_slice(job: SliceJob) -> SliceResult:
    """Writes the shards of the slice and its journal entry, which it returns.

    Raises:
        UserError: an unreadable file, an id outside the vocabulary, or more malformed records than allowed.
    """
    recipe, parts = job.recipe, job.slice.parts
    writers = SplitWriters(job)
    stats = Stats()
    copies = np.load(job.in_journal("duplicates.npy")) if recipe.dedup else None
    for record in recipe.reader.read(parts, copies):
        if isinstance(record, Problem):
            stats.leave_out(record)
            check_bad_lines(recipe.max_bad_lines, job.source, stats.num_bad, stats.bad)
            continue
        try:
            writers.add(record)
        except UserError as error:
            raise UserError(f"--input ({parts[0].path}): {error}; document {stats.records + 1}") from error
        stats.keep(len(record.tokens), record.document)
    result = SliceResult(shards=writers.finish(), stats=vars(stats))
    write_json(job.in_journal("slice.json"), result)
    return result


def check_bad_lines(limit: int, source: str, num_bad: int, shown: Sequence[str]) -> None:
    """Raises UserError where a source has more malformed records than --max_bad_lines allows."""
    if num_bad > limit:
        rule = f"exceeded in source {source}: {'; '.join(shown)}; repair the input or raise the limit"
        raise UserError(f"--max_bad_lines ({limit}) {rule}")


class SplitWriters:
    """Writes the shards of one slice: one per split, and the next one where `shard_tokens` is reached."""

    def __init__(self, job: SliceJob) -> None:
        self._job = job
        self._edges = np.cumsum(job.recipe.split)[:-1] / sum(job.recipe.split) * 2.0**64
        self._open: dict[str, ShardWriter] = {}
        self._full: Counter[str] = Counter()
        self._finished: list[ShardEntry] = []

    def add(self, record: Encoded) -> None:
        """Appends a document; the hash of its text, or of its ids, chooses the split: the same for equal
        ones."""
        tokens, split = record.tokens, SPLITS[0]
        if len(self._edges):
            data = record.document.data if record.document else tokens.astype("<u4").tobytes()
            split = SPLITS[int(np.searchsorted(self._edges, hash64(data), side="right"))]
        writer = self._open.get(split)
        if writer and writer.num_tokens and writer.num_tokens + len(tokens) > self._job.recipe.shard_tokens:
            self._close(split)
            writer = None
        if writer is None:
            full = f"_{self._full[split]:03d}" if self._full[split] else ""  # "_" sorts after "."
            path = self._job.folder / split / f"shard-{self._job.slice.index:05d}{full}.arrow"
            path.parent.mkdir(parents=True, exist_ok=True)
            writer = self._open[split] = ShardWriter(path, self._job.recipe.info)
        writer.add(tokens)

    def _close(self, split: str) -> None:
        writer = self._open.pop(split)
        size = writer.finish()
        self._full[split] += 1
        documents, tokens = writer.num_documents, writer.num_tokens
        entry = ShardEntry(split=split, file=writer.path.name, documents=documents, tokens=tokens, bytes=size)
        self._finished.append(entry)

    def finish(self) -> list[ShardEntry]:
        """Closes all shards and returns what the journal says of them."""
        for split in list(self._open):
            self._close(split)
        return self._finished
