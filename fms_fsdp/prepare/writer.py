"""The output of `prepare` and `convert`: shards, their journal, and how a folder becomes complete.

    OUT/SOURCE/shard-00000.arrow …    OUT/tokenizer.model
    OUT/meta/                         counts.csv, summary.json, tokenizer.json
    OUT/validation/, OUT/test/        data folders of their own with the same sources
    OUT/.partial/SOURCE/SPLIT/…       shards of a source in progress
    OUT/meta/prepare/SOURCE/          its journal: plan.json, slice-N.json; replaced.json for a while

A source folder appears complete or not at all, a journal entry is written after its shards, and the
counts file is written last: so a command that was killed resumes when it is run again.
"""

from __future__ import annotations

import csv
import functools
import hashlib
import io
import json
import os
import shutil
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, TypedDict

import numpy as np
import pyarrow as pa

from fms_fsdp.config.values import counted
from fms_fsdp.console import table
from fms_fsdp.data.kept_tokenizer import parse_description, unk_warning
from fms_fsdp.data.shards import NO_LOSS
from fms_fsdp.errors import FULL_DISK, UserError
from fms_fsdp.files import (
    exists,
    replace_file,
    safe_name,
    sync_to_disk,
    write_atomically,
    write_json,
)
from fms_fsdp.hf.chat import ChatSettings, save_chat_settings
from fms_fsdp.prepare.documents import Document, Problem
from fms_fsdp.prepare.input_files import InputFile, Slice
from fms_fsdp.run.run_dir import lock_folder
from fms_fsdp.tokenizers.tokenizer import Tokenizer, Tokens

SPLITS = ("train", "validation", "test")
MAX_BATCH_DOCUMENTS = 65_536
MAX_BATCH_TOKENS = 1 << 22
_REPLACED = "replaced.json"  # in a journal: the splits that its source had before --overwrite
_SHOWN_BAD = 5
_NOUNS = ("binary file", "blank line", "duplicate", "empty document")  # reasons to count


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


# Shards


@dataclass(frozen=True)
class ShardInfo:
    """The metadata of a shard.

    Attributes:
        sep_token: ends each document; stored (`has_eos`) or added by the loader.
        has_masks: tokens of prompts carry the bit NO_LOSS.
        bos_id: the token that may begin documents; None for none, -1 if unknown.
    """

    vocab_size: int
    sep_token: int
    tokenizer_digest: str
    has_eos: bool = False
    has_masks: bool = False
    bos_id: int | None = None

    @property
    def dtype(self) -> np.dtype[Any]:
        fits_in_16_bits = self.vocab_size <= 1 << 16 and not self.has_masks
        return np.dtype(np.uint16 if fits_in_16_bits else np.uint32)


class ShardWriter:
    """Collects documents in memory and writes them as one Arrow IPC file.

    The file has one column `tokens: large_list<uint16|uint32>`, not null and uncompressed. The
    metadata of its schema depends on all documents, so a shard is written when it is complete. The
    same documents give the same bytes.
    """

    def __init__(self, path: Path, info: ShardInfo) -> None:
        self.path = path
        self.info = info
        self.num_documents = 0
        self.num_tokens = 0
        self._max_token_id = 0
        self._has_bos = info.bos_id is not None
        self._documents = list[Tokens]()
        self._batch_tokens = 0
        self._batches: list[pa.Array] = []

    def add(self, tokens: Tokens) -> None:
        """Appends a document. Raises: UserError: an id is outside the vocabulary."""
        ids = tokens
        if self.info.has_masks and tokens.dtype.itemsize >= 4:  # 16 bits have no such bit
            ids = tokens & (NO_LOSS - 1)
        if len(ids):
            low = 0 if ids.dtype.kind == "u" else int(ids.min())
            high = int(ids.max())
            if low < 0 or high >= self.info.vocab_size:
                bad = low if low < 0 else high
                raise UserError(
                    f"token id {bad} is outside the vocabulary of {self.info.vocab_size:,}; set --vocab_size "
                    "(or --tokenizer) to that of the program that wrote the ids"
                )
            self._max_token_id = max(self._max_token_id, high)
        begins_with_bos = len(ids) > 0 and int(ids[0]) & (NO_LOSS - 1) == self.info.bos_id
        self._has_bos = self._has_bos and begins_with_bos
        self._documents.append(tokens.astype(self.info.dtype, copy=False))
        self._batch_tokens += len(tokens)
        self.num_documents += 1
        self.num_tokens += len(tokens)
        if len(self._documents) == MAX_BATCH_DOCUMENTS or self._batch_tokens >= MAX_BATCH_TOKENS:
            self._close_batch()

    def _close_batch(self) -> None:
        offsets = np.zeros(len(self._documents) + 1, dtype=np.int64)
        np.cumsum([len(document) for document in self._documents], out=offsets[1:])
        values = pa.array(np.concatenate(self._documents))
        self._batches.append(pa.LargeListArray.from_arrays(pa.array(offsets), values))
        self._documents = []
        self._batch_tokens = 0

    def finish(self) -> int:
        """Writes the shard atomically; returns its size in bytes."""
        if self._documents:
            self._close_batch()
        info = self.info
        metadata = {
            "n_docs": str(self.num_documents),
            "n_tokens": str(self.num_tokens),
            "max_token_id": str(self._max_token_id),
            "tokenizer_digest": info.tokenizer_digest,
            "vocab_size": str(info.vocab_size),
            "sep_token": str(info.sep_token),
            "dtype": info.dtype.name,
        }
        if info.bos_id != -1:
            metadata["has_bos"] = str(self._has_bos).lower()
        metadata["has_eos"] = str(info.has_eos).lower()
        if info.has_masks:
            metadata["has_masks"] = "true"
        column = pa.field("tokens", pa.large_list(pa.from_numpy_dtype(info.dtype)), nullable=False)
        schema = pa.schema([column], metadata=metadata)
        temporary = self.path.with_name(f".{self.path.name}.tmp")
        with open(temporary, "wb") as file:
            with pa.ipc.new_file(file, schema) as writer:
                for batch in self._batches:
                    writer.write_batch(pa.record_batch([batch], schema=schema))
            file.flush()
            sync_to_disk(file.fileno(), temporary)
        replace_file(temporary, self.path)
        self._batches = []
        return self.path.stat().st_size


# Statistics


@dataclass
class Stats:
    """Sums over records, as the journal stores them.

    `lengths[b]` counts documents of [2^(b-1), 2^b) tokens; b is a string because JSON keys are.
    """

    records: int = 0
    documents: int = 0
    tokens: int = 0
    chars: int = 0
    num_bytes: int = 0
    num_bad: int = 0
    bad: list[str] = field(default_factory=list)
    left_out: Counter[str] = field(default_factory=Counter)
    lengths: Counter[str] = field(default_factory=Counter)
    unk_tokens: int = 0
    eos_tokens: int = 0

    def skip(self, problem: Problem) -> None:
        """Counts a record that is not used."""
        self.records += 1
        self.left_out[problem.reason] += 1
        if problem.malformed:
            self.num_bad += 1
            self.bad = [*self.bad, f"{problem.where} {problem.reason}"][:_SHOWN_BAD]

    def add(
        self,
        num_tokens: int,
        document: Document | None,
        unk_tokens: int = 0,
        eos_tokens: int = 0,
    ) -> None:
        """Counts a document of `num_tokens` tokens, and its text if it was read as text."""
        self.records += 1
        self.documents += 1
        self.tokens += num_tokens
        self.unk_tokens += unk_tokens
        self.eos_tokens += eos_tokens
        self.lengths[str(num_tokens.bit_length())] += 1
        if document is not None:
            self.chars += len(document.text)
            self.num_bytes += len(document.data)

    @staticmethod
    def merge(contents: Iterable[Mapping[str, Any]]) -> Stats:
        """Returns the sums of several, each as `vars` or the journal gives it."""
        total = Stats()
        for content in contents:
            for name, value in content.items():
                summed = getattr(total, name)
                if isinstance(summed, Counter):
                    summed.update(value)
                elif name == "bad":
                    summed += value[: _SHOWN_BAD - len(summed)]
                else:
                    setattr(total, name, summed + value)
        return total

    @property
    def unk_fraction(self) -> float:
        """The fraction of tokens that stand for text outside the vocabulary."""
        return self.unk_tokens / max(1, self.tokens)

    def reasons(self) -> str:
        """Returns why records were skipped, the most frequent reason first."""
        parts = []
        for reason, count in self.left_out.most_common():
            if reason in _NOUNS:
                parts.append(counted(count, reason))
            else:
                parts.append(f"{count:,} {reason}")
        return ", ".join(parts)


def describe(stats: Mapping[str, Stats]) -> str:
    """Returns a table of the sources, examples of malformed records, and warnings."""
    total = Stats.merge(map(vars, stats.values()))
    rows = list[Sequence[str]]()
    for name, part in [*stats.items(), ("total", total)]:
        per_token = f"{part.chars / part.tokens:.2f}" if part.chars else "–"
        unk = f"{part.unk_fraction:.3%}" if part.chars else "–"
        per_document = f"{part.tokens / max(1, part.documents):,.0f}"
        counts = f"{part.documents:,}", f"{part.tokens:,}", per_token, per_document, unk
        rows.append((name, *counts, part.reasons() or "nothing"))
    head = ("source", "documents", "tokens", "chars/token", "tokens/doc", "<unk>", "skipped")
    lines = [table(head, rows, (0, 6))]
    for name, part in stats.items():
        lines += [f"malformed: {record}" for record in part.bad]
        warning = unk_warning(name, part.unk_fraction)
        if warning:
            lines.append(f"warning: {warning}")
        if part.eos_tokens:
            lines.append(
                f"warning: texts of source {name} spell the EOS token, which then ends a document in "
                f"its middle: {counted(part.eos_tokens, 'time')}; remove it from the text, or set "
                "another --eos_token"
            )
    return "\n".join(lines)


# The output folder


@dataclass(frozen=True)
class PreparedSource:
    """A source of this call and its folders in the output."""

    name: str
    files: tuple[InputFile, ...]
    slices: tuple[Slice, ...]
    output: Path

    @property
    def journal(self) -> Path:
        return self.output / "meta" / "prepare" / self.name

    @property
    def partial(self) -> Path:
        return self.output / ".partial" / self.name

    def final(self, split: str) -> Path:
        """The folder of a split of the source in the output."""
        if split == SPLITS[0]:
            return self.output / self.name
        return self.output / split / self.name

    @functools.cached_property
    def inputs_digest(self) -> str:
        listing = [(file.name, file.size, file.mtime_ns) for file in self.files]
        return hashlib.sha256(json.dumps(listing).encode()).hexdigest()[:16]

    def own_splits(self) -> set[str]:
        """Returns the splits whose folder in the output is this source's, also of replaced plans."""
        entries = map(_read_entry, sorted(self.journal.glob("slice-*.json")))
        return splits_of(entries) | self._replaced_splits()

    def _replaced_splits(self) -> set[str]:
        path = self.journal / _REPLACED
        return set(json.loads(path.read_text(encoding="utf-8"))) if path.is_file() else set()

    def start_over(self, plan: dict[str, Any]) -> None:
        """Begins a journal with this plan; the shards of the old one stay until `publish`."""
        own = self.own_splits()
        if own:
            write_json(self.journal / _REPLACED, sorted(own))
        for path in self.journal.glob("*"):
            if path.name != _REPLACED:
                path.unlink()
        if exists(self.partial):  # what stayed there would be published with the new shards
            shutil.rmtree(self.partial)
        write_json(self.journal / "plan.json", plan)

    def finished(self) -> dict[int, SliceResult]:
        """Returns the journal entries whose shards exist; none if a published part lost a shard."""
        results = {}
        for part in self.slices:
            path = self.journal / f"slice-{part.index:05d}.json"
            if path.is_file():
                result = _read_entry(path)
                if all(map(self._exists, result["shards"])):
                    results[part.index] = result
        splits = splits_of(results.values())
        is_unpublished = all((self.partial / split).is_dir() for split in splits)
        if is_unpublished or len(results) == len(self.slices):
            return results
        return {}

    def _exists(self, shard: ShardEntry) -> bool:
        folder = self.partial / shard["split"]
        if not folder.is_dir():
            folder = self.final(shard["split"])
        path = folder / shard["file"]
        return path.is_file() and path.stat().st_size == shard["bytes"]

    def publish(self, splits: set[str]) -> None:
        """Moves the finished folders of `splits` to their places, or continues an interrupted call."""
        for pattern in ("hashes-*.npy", "duplicates-*.npy", ".*.tmp"):
            for path in self.journal.glob(pattern):
                path.unlink()
        if self.partial.is_dir():
            for split in self._replaced_splits() - splits:
                _remove_folder(self.final(split))
            for split in SPLITS:
                made = self.partial / split
                if split not in splits or not made.is_dir():
                    continue  # not made, or published before the interruption
                final = self.final(split)
                _remove_folder(final)  # of an overwritten source
                final.parent.mkdir(parents=True, exist_ok=True)
                made.rename(final)
            shutil.rmtree(self.partial)
        (self.journal / _REPLACED).unlink(missing_ok=True)


def _remove_folder(folder: Path) -> None:
    """Removes a folder if it exists, or the link in its place; a part of it that stays would be
    trained on, or evaluated.
    """
    if folder.is_symlink():  # moved to another disk by hand
        folder.unlink()
    elif exists(folder):
        shutil.rmtree(folder)


def splits_of(results: Iterable[SliceResult]) -> set[str]:
    """Returns the splits that have shards."""
    return {shard["split"] for result in results for shard in result["shards"]}


@contextmanager
def lock_output(output: Path) -> Iterator[None]:
    """Creates the folder and locks it against a second command; removes it if it stays empty."""
    created = [folder for folder in (output, *output.parents) if not folder.exists()]
    try:
        output.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(
            f"--output={output} cannot be created: {error.strerror}; choose another"
        ) from error
    with lock_folder(output, patience_s=0.0, remedy="wait for its end, or choose another --output"):
        try:
            yield
        except OSError as error:
            if error.errno not in FULL_DISK or isinstance(error, UserError):
                raise
            raise UserError(
                f"--output={output} cannot be written: {os.strerror(error.errno)}; free disk space and run "
                "the command again to resume, or choose another folder"
            ) from error
        finally:
            if created and os.listdir(output) == [".lock"]:
                (output / ".lock").unlink()
                with suppress(OSError):  # another call may have made its output in one of them
                    for folder in created:
                        folder.rmdir()


def save_tokenizer(
    output: Path,
    tokenizer: Tokenizer,
    chat: ChatSettings | None,
    trained_on: Any = None,
) -> None:
    """Saves a copy of the tokenizer with the shards.

    It consists of its files, its description meta/tokenizer.json, and its chat settings (None keeps
    those of the output). `trained_on` stays if the tokenizer does. The files of a tokenizer of
    another kind that it replaces are removed.
    """
    path = output / "meta" / "tokenizer.json"
    replaced = None
    if path.is_file():
        replaced, replaced_trained_on = parse_description(path.read_bytes(), str(path))
        if trained_on is None and replaced.digest == tokenizer.vocabulary.digest:
            trained_on = replaced_trained_on  # the call that trained it may be run again
    tokenizer.save(output)
    if chat is not None:
        save_chat_settings(chat, output)
    description = {**asdict(tokenizer.vocabulary), "trained_on": trained_on}
    write_json(path, description)
    if replaced is not None and replaced.kind != tokenizer.vocabulary.kind:
        if replaced.file_name:
            (output / replaced.file_name).unlink(missing_ok=True)
        if replaced.kind == "huggingface":
            (output / "tokenizer_config.json").unlink(missing_ok=True)


def check_plans(
    output: Path,
    sources: Sequence[PreparedSource],
    plans: Sequence[dict[str, Any]],
    overwrite: bool,
) -> None:
    """Compares this call with the output, and writes the plans of its sources.

    A plan contains everything that the shards of a source depend on.

    Raises:
        UserError: a source was made differently, by another program, or with another tokenizer or
            EOS token.
    """
    known = dict[str, dict[str, Any]]()  # the plans of earlier calls, by source
    for path in _journals(output, "plan.json"):
        known[path.parent.name] = json.loads(path.read_text(encoding="utf-8"))
    digest = plans[0]["tokenizer_digest"]
    names = [source.name for source in sources]
    for name, plan in known.items():
        other = plan["tokenizer_digest"]
        if name not in names and other and digest and other != digest:
            raise UserError(
                f"--output={output} contains source {name} made with another tokenizer; remove --tokenizer "
                "and --train_tokenizer to use that one, or choose another folder"
            )
        if name not in names and plan["eos_id"] != plans[0]["eos_id"]:
            raise UserError(
                f"--output={output} contains source {name}, whose documents end with id "
                f"{plan['eos_id']}, not {plans[0]['eos_id']}; give all sources the same EOS token, or "
                "choose another folder"
            )
    for source, plan in zip(sources, plans, strict=True):
        old = known.get(source.name)
        own = source.own_splits()
        for split, ratio in zip(SPLITS, plan["split"], strict=False):
            folder = source.final(split)
            if split == SPLITS[0] or split in own or not ratio or not folder.exists():
                continue
            raise UserError(
                f"--output={output} has a folder {split}/{source.name} that this source did not "
                "make; remove it, or choose another name or folder"
            )
        # Not what a call left that was killed between two plans.
        if old is None and SPLITS[0] not in own and source.final(SPLITS[0]).exists():
            raise UserError(
                f"--output={output} has a folder {source.name} that prepare did not make; remove it, "
                "or choose another name or folder"
            )
        if overwrite or old == plan:
            continue
        if old is not None:
            keys = ", ".join(key for key in sorted({*plan, *old}) if old.get(key) != plan.get(key))
            rule = f"contains source {source.name} made with other {keys}"
            raise UserError(f"--output={output} {rule}; choose another folder, or --overwrite=True")
        if SPLITS[0] in own:
            raise UserError(
                f"--output={output} has shards of source {source.name} that an interrupted call was to "
                "replace; run that call again, or set --overwrite=True"
            )
    for source, plan in zip(sources, plans, strict=True):
        if known.get(source.name) != plan:
            source.start_over(plan)


def publish(
    output: Path,
    sources: Sequence[PreparedSource],
    results: Mapping[str, Mapping[int, SliceResult]],
) -> dict[str, Stats]:
    """Publishes the sources and writes the counts; returns the statistics of each.

    Raises:
        UserError: a source is empty.
    """
    stats = {}
    for source in sources:
        found = results[source.name]
        total = Stats.merge(found[index]["stats"] for index in sorted(found))
        if SPLITS[0] not in splits_of(found.values()):
            if total.documents:
                raise UserError(
                    f"--split sends {counted(total.documents, 'document')}, all of source "
                    f"{source.name}, to validation or test; raise the ratio of training, or add text"
                )
            reasons = total.reasons() or "no records"
            raise UserError(
                f"--input: source {source.name} has no documents to train on: {reasons}; check the "
                "input"
            )
        stats[source.name] = total
    for source in sources:
        source.publish(splits_of(results[source.name].values()))
    with suppress(OSError):
        (output / ".partial").rmdir()  # unless another source is in progress
    _write_counts(output)
    return stats


def _journals(output: Path, pattern: str = "") -> list[Path]:
    return sorted((output / "meta" / "prepare").glob(f"*/{pattern}"))


def _read_entry(path: Path) -> SliceResult:
    """Reads a journal entry. Raises: UserError: it names files other than shards of its source."""
    try:
        result: SliceResult = json.loads(path.read_text(encoding="utf-8"))
        named = [(shard["split"], shard["file"]) for shard in result["shards"]]
    except (ValueError, KeyError, TypeError, RecursionError):
        named = [("", "")]
    for split, file in named:
        if split not in SPLITS:
            raise UserError(f"{path} was not written by prepare; remove the file")
        safe_name(file, str(path))
    return result


def _write_counts(output: Path) -> None:
    """Writes counts and statistics of all published sources, also of earlier calls."""
    rows = defaultdict[str, list[tuple[str, int, int]]](list)
    summary = dict[str, Any]()
    for journal in _journals(output):
        if (output / ".partial" / journal.name).exists() or not (output / journal.name).is_dir():
            continue
        results = list(map(_read_entry, sorted(journal.glob("slice-*.json"))))
        for result in results:
            for shard in result["shards"]:
                name = f"{journal.name}/{shard['file']}"
                rows[shard["split"]].append((name, shard["documents"], shard["tokens"]))
        stats = Stats.merge(result["stats"] for result in results)
        summary[journal.name] = {**vars(stats), "unk_fraction": round(stats.unk_fraction, 6)}
    write_json(output / "meta" / "summary.json", summary)
    for split in reversed(SPLITS):
        folder = output if split == SPLITS[0] else output / split
        path = folder / "meta" / "counts.csv"
        if split != SPLITS[0] and (folder / "meta" / "prepare").is_dir():
            continue  # the output of another call, which wrote the counts of its sources
        if rows[split] or path.exists():
            text = io.StringIO()
            writer = csv.writer(text, lineterminator="\n")
            writer.writerow(("dataset/filename", "documents", "tokens"))
            writer.writerows(sorted(rows[split]))
            write_atomically(path, text.getvalue(), sync=True)
