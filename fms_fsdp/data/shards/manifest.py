"""What there is to read: the sources under a folder, their shards and the counts that all addressing rests
on.

    data_path/                        data_path/meta/counts.csv
      web/shard-00000.arrow             dataset/filename,documents,tokens
      code/lang=py/shard-00000.arrow    web/shard-00000.arrow,31250,20480000

Invariant: opening a corpus reads names, counts and (for one shard of each source, or for all where they are
few) metadata, never the data; everything wrong that can be seen so is refused here, in one line. Shards that
the counts file does not list are counted from their own metadata. A source is named by its folder; its shards
are sorted by path.
"""

from __future__ import annotations

import difflib
import hashlib
import os
import posixpath
from bisect import bisect_left
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import chain

import numpy as np

from fms_fsdp.config import DataConfig
from fms_fsdp.data.order.mixture import NUM_SLOTS
from fms_fsdp.data.order.permute import I64
from fms_fsdp.data.order.tapes import MAX_ROWS, MAX_TOKENS
from fms_fsdp.data.shards.content_marks import content_marks
from fms_fsdp.data.shards.counts import META, TABLES, Counts, read_counts
from fms_fsdp.data.shards.files import Files, LocalFiles
from fms_fsdp.data.shards.ipc import CONVERT, ShardError, TokenError
from fms_fsdp.data.shards.separator import delimiter_of, find_sep_token
from fms_fsdp.data.shards.shard import Shard
from fms_fsdp.errors import MissingInput, UserError
from fms_fsdp.parts import load_part
from fms_fsdp.safe_names import has_control_character, shown_name

SUFFIX = ".arrow"
TEXT_SUFFIXES = (".parquet", ".jsonl", ".json", ".txt", ".gz", ".zst")
OPENED_AT_START = 256  # a corpus of at most so many shards has them all checked before training


@dataclass(frozen=True, eq=False)
class Source:
    """One weighted dataset: its shards in order, their counts, and whether the stream adds a delimiter to
    documents."""

    name: str
    paths: Sequence[str]
    docs: I64
    tokens: I64
    delimiter: int
    weight: float

    @cached_property
    def starts(self) -> I64:
        """Where each shard starts on the source's circle, delimiters counted; the last element is its
        length."""
        return np.concatenate([[0], np.cumsum(self.tokens + self.delimiter * self.docs)])

    @property
    def num_tokens(self) -> int:
        """Tokens in an epoch, delimiters counted."""
        return int(self.starts[-1])

    @cached_property
    def digest(self) -> str:
        """16 hex digits that identify the shards' names, order and counts; the folder's place is
        immaterial."""
        names = "\n".join(path.removeprefix(self.name + "/") for path in self.paths)
        counts = np.stack([self.docs, self.tokens]).astype("<i8").tobytes()
        digest = hashlib.blake2b(names.encode(), digest_size=8)
        digest.update(counts + bytes([self.delimiter]))
        return digest.hexdigest()


@dataclass(frozen=True, eq=False)
class Corpus:
    """The sources of a run, sorted by name, and their files. One rank finds it out and sends it to the
    others, pickled: they look at no file or folder.

    `vocab_size` is that of the shards' tokenizer, None where they do not say; `tokenizer`: its digest, ""
    where they do not say; `marks`: content marks by source.
    """

    files: Files
    sources: tuple[Source, ...]
    vocab_size: int | None
    tokenizer: str
    sep_token: int
    marks: Mapping[str, str] = field(default_factory=dict)

    def marks_of(self, source: Source) -> str:
        """Returns the source's content marks, read if they are not known."""
        known = self.marks.get(source.name)
        return content_marks(self.files, source.paths) if known is None else known

    def source(self, name: str) -> Source | None:
        """Returns the source of that name, or None."""
        return next((source for source in self.sources if source.name == name), None)


def scan_corpus(section: DataConfig) -> Corpus:
    """Returns the corpus with the marks that a stream looks up at the start: for one rank, which sends it to
    the others.

    Raises: UserError with one line.
    """
    corpus = open_corpus(section)
    return replace(corpus, marks={source.name: corpus.marks_of(source) for source in corpus.sources})


def open_corpus(section: DataConfig, files: Files | None = None, *, check_shards: bool = True) -> Corpus:
    """Returns the corpus that the flags describe, after all checks that need no reading of tokens.

    Without `datasets`, every folder that holds shards is a source; without `weights`, sources are weighted by
    their tokens (and by at least 1/65,536, so that a tiny one is not refused). `check_shards` compares the
    shards opened with their counts.

    Raises: UserError with one line.
    """
    files = files or open_root(section.data_path)
    may_miss, paths = section.on_missing == "mask", sorted(files.walk(""))
    names = _names_of_sources(section, files.root, paths)
    counts = read_counts(files, paths)
    missing = sorted(set(counts).difference(paths))
    listed = {name: _shards_of_source(files.root, name, paths, missing, may_miss) for name in names}
    opened = _open_some(files, listed, counts, may_miss)
    sep_token = find_sep_token(section, files.root, opened)
    weights = dict(zip(names, section.weights, strict=True)) if section.weights else {}
    sources = []
    for name in sorted(names):
        shard = next((opened[path] for path in listed[name] if path in opened and counts[path][1]), None)
        delimiter = delimiter_of(shard, sep_token) if shard is not None else 1
        table: I64 = np.array([counts[path] for path in listed[name]], dtype=np.int64).reshape(-1, 2)
        source = Source(name, listed[name], table[:, 0], table[:, 1], delimiter, weights.get(name, 0.0))
        _check_size(source, section.seq_length)
        sources.append(source)
        for file, path in enumerate(source.paths):
            if check_shards and path in opened:
                check_shard(source, file, opened[path], sep_token=sep_token, at_start=True)
    files.close()
    weighted = tuple(sources if weights else _weighted_by_tokens(sources))
    return Corpus(files, weighted, *_vocabulary(opened), sep_token)


def _check_size(source: Source, seq_length: int) -> None:
    """Checks that a source has a row, and no more rows than can be counted. Raises: UserError."""
    most = min(MAX_TOKENS, MAX_ROWS * seq_length) - 1
    if float(source.tokens.sum(dtype=float)) + float(source.docs.sum(dtype=float)) > most:
        raise UserError(
            f"source ({source.name}) must have at most {most:,} tokens; divide the source into several"
        )
    if source.num_tokens < seq_length:
        raise UserError(
            f"source ({source.name}) has {source.num_tokens} tokens, fewer than one sequence of seq_length "
            f"({seq_length}); lower --seq_length, add data or drop the source"
        )


def check_shard(
    source: Source,
    file: int,
    shard: Shard,
    *,
    sep_token: int,
    vocab_size: int | None = None,
    at_start: bool = False,
) -> None:
    """Checks an opened shard against the manifest: counts, separators, largest token.

    `at_start` leaves out the tokens of shards that hold a record batch per document: to count them takes a
    look at each.

    Raises: ShardError naming the shard and both values.
    """
    expected = int(source.docs[file]), int(source.tokens[file])
    if shard.num_docs != expected[0] or ((shard.is_list or not at_start) and shard.num_tokens != expected[1]):
        raise ShardError(
            f"shard ({shard.path}) holds {shard.num_docs} documents and {shard.num_tokens} tokens, but the "
            f"counts file says {expected[0]} and {expected[1]}; restore the shard or correct {TABLES}"
        )
    if expected[1] > 0 and delimiter_of(shard, sep_token, trusted=True) != source.delimiter:
        stored, others = ("without", "with") if source.delimiter == 0 else ("with", "without")
        raise ShardError(
            f"shard ({shard.path}) holds documents {stored} a trailing separator ({sep_token}), the others "
            f"of source {source.name} {others}; {CONVERT}"
        )
    largest = shard.metadata.get("max_token_id", "")
    if vocab_size is not None and largest.isdigit() and int(largest) >= vocab_size:
        raise TokenError(
            f"shard ({shard.path}) holds token {largest}, beyond vocab_size ({vocab_size}); "
            "raise --vocab_size to the size of its tokenizer"
        )


def nearest(name: str, names: Iterable[str]) -> str:
    """Returns "nearest: x" for the name most like `name`, or a list of what there is."""
    known = sorted(names)
    close = difflib.get_close_matches(name, known, n=1, cutoff=0.5)
    if close:
        return f"nearest: {close[0]}"
    return f"found: {', '.join(known[:8]) or 'none'}{', …' * (len(known) > 8)}"


def open_root(data_path: str) -> Files:
    """Returns access to the folder or object store that --data_path names. Raises: UserError,
    FileNotFoundError."""
    if not data_path:
        raise UserError(
            "--data_path () must name the folder of the token shards; set --data_path or --use_dummy_dataset"
        )
    if "://" in data_path:
        remote: Files = load_part("remote_files:RemoteFiles")(data_path)
        return remote
    root = os.path.abspath(os.path.expanduser(data_path))
    if not os.path.isdir(root):
        remedy = "make it with `python -m fms_fsdp prepare --input=... --output=...`, or --use_dummy_dataset"
        raise MissingInput(f"--data_path ({data_path}) is not a folder; {remedy}")
    return LocalFiles(root)


def _folders_of_shards(paths: list[str]) -> list[str]:
    """Returns all folders with shards, but for those of a data root within this one (`prepare --split` writes
    validation/ with its own meta/)."""
    tables = [path for path in paths if f"/{META}/" in path and path.endswith(".csv")]
    inner = tuple({path.rpartition(f"/{META}/")[0] + "/" for path in tables}) + (f"{META}/",)
    folders = {path.rpartition("/")[0] for path in paths if path.endswith(SUFFIX)}
    return sorted(folder or "." for folder in folders if not f"{folder}/".startswith(inner))


def _names_of_sources(section: DataConfig, root: str, paths: list[str]) -> list[str]:
    """Returns --datasets, or else all folders with shards: folders, none of which lies in another. Raises:
    UserError."""
    folders = _folders_of_shards(paths)
    names = list(map(posixpath.normpath, section.datasets)) or folders
    if not names:
        raise MissingInput(f"--data_path ({root}) holds no {SUFFIX} shards; {_text_remedy(paths)}")
    for name in names:
        if not _paths_below(name, paths) and not os.path.isdir(os.path.join(root, name)):
            raise MissingInput(f"--datasets ({name}) is not a folder in {root}; {nearest(name, folders)}")
        if names.count(name) > 1:
            raise UserError(f"--datasets ({name}) must be named once; raise the weight of the source instead")
        for other in names:
            if name.startswith(f"{other}/") or other == "." != name:
                raise UserError(
                    f"--datasets ({name}) lies inside {other}, which is a source as well; name one of them"
                )
    return names


def _paths_below(name: str, paths: list[str]) -> list[str]:
    """Returns the sorted paths that lie in a source's folder."""
    return paths if name == "." else paths[bisect_left(paths, f"{name}/") : bisect_left(paths, f"{name}0")]


def _text_remedy(paths: list[str]) -> str:
    text = next((path for path in paths if path.endswith(TEXT_SUFFIXES)), None)
    made = "make some" if text is None else f"{text} is text: make shards of it"
    return f"{made} with `python -m fms_fsdp prepare --input=... --output=...`"


def _shards_of_source(
    root: str, name: str, paths: list[str], missing: list[str], may_miss: bool
) -> list[str]:
    """Returns the shards of a source, with those `missing` that only the counts files list. Raises:
    UserError."""
    listed = [path for path in _paths_below(name, paths) if path.endswith(SUFFIX)]
    absent = [path for path in _paths_below(name, missing) if path.endswith(SUFFIX)]
    if not listed and not absent:
        raise MissingInput(
            f"--datasets ({name}) holds no {SUFFIX} shards; {_text_remedy(_paths_below(name, paths))}"
        )
    if absent and not may_miss:
        more = f" with {len(absent) - 1} more" if len(absent) > 1 else ""
        raise MissingInput(
            f"shard ({absent[0]}) is listed in {TABLES} but missing in {root}{more}; "
            "restore the shard or set --on_missing=mask"
        )
    for path in filter(has_control_character, listed):
        raise UserError(
            f"shard ({shown_name(path)}) must have no control character in its name; rename the file"
        )
    return sorted(listed + absent)


def _open_some(
    files: Files, listed: dict[str, list[str]], counts: Counts, may_miss: bool
) -> dict[str, Shard]:
    """Returns the shards opened at start-up by path, and adds the counts of shards that had none to `counts`.

    Of a small corpus all shards are opened; else the first of each source and those without counts.
    """
    every = list(chain.from_iterable(listed.values()))
    if len(every) > OPENED_AT_START:
        first = {paths[0] for paths in listed.values()}
        every = [path for path in every if path in first or path not in counts]
    for path in every:
        files.prefetch(path, np.array([0, -1]), np.array([1, 1]))  # schema and footer

    def try_open(path: str) -> Shard | None:
        try:
            shard = Shard(files, path, delimiter=0)
            if path not in counts:
                counts[path] = shard.num_docs, shard.num_tokens
            return shard
        except ShardError:
            if may_miss and path in counts:
                return None
            raise

    with ThreadPoolExecutor(files.num_threads, thread_name_prefix="counts") as pool:
        tried = list((pool.map if files.num_threads > 1 else map)(try_open, every))
    return {path: shard for path, shard in zip(every, tried, strict=True) if shard is not None}


def _vocabulary(opened: dict[str, Shard]) -> tuple[int | None, str]:
    """Returns the largest vocabulary that the shards name, and the digest of their tokenizer.

    Raises: UserError if they are of several tokenizers."""
    largest, paths = 0, dict[str, str]()  # of a shard by the digest of its tokenizer
    for path, shard in opened.items():
        largest = max(largest, int(shard.metadata.get("vocab_size") or 0))
        if digest := shard.metadata.get("tokenizer_digest"):
            paths[digest] = path
    if len(paths) > 1:
        a, b = list(paths.values())[:2]
        raise UserError(
            f"shards {a} and {b} were made with two tokenizers; prepare all sources with one --tokenizer"
        )
    return largest or None, next(iter(paths), "")


def _weighted_by_tokens(sources: list[Source]) -> list[Source]:
    least = sum(source.num_tokens for source in sources) / (NUM_SLOTS - len(sources))
    return [replace(source, weight=max(float(source.num_tokens), least)) for source in sources]
