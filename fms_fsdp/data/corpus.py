"""The corpus: the sources in --data_path, their shards, and the counts that all addresses rest on.

    data_path/                        data_path/meta/counts.csv
      web/shard-00000.arrow             dataset/filename,documents,tokens
      code/lang=py/shard-00000.arrow    web/shard-00000.arrow,31250,20480000

Invariant: opening a corpus reads names, counts and the metadata of a few shards, never the tokens;
whatever is visibly wrong is an error of one line. A source is named by its folder, and its shards
are sorted by path.
"""

from __future__ import annotations

import csv
import fnmatch
import hashlib
import posixpath
from bisect import bisect_left
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial

import numpy as np

from fms_fsdp.config import DataConfig
from fms_fsdp.config.values import counted, did_you_mean
from fms_fsdp.data.mixture import NUM_SLOTS
from fms_fsdp.data.open_storage import open_storage
from fms_fsdp.data.permute import I64
from fms_fsdp.data.shards import CONVERT, Files, Shard, ShardError, TokenError
from fms_fsdp.data.storage import in_threads, reporting_progress
from fms_fsdp.errors import MissingInput, UserError, note_once
from fms_fsdp.files import has_control_character, safe_name, shown_name

TABLES = "meta/*counts*.csv"
SUFFIX = ".arrow"
HELD_OUT = ("validation/", "test/")  # folders that `prepare --split` writes
TEXT_SUFFIXES = (".parquet", ".jsonl", ".json", ".txt", ".gz", ".zst")
OPENED_AT_START = 256  # shards; a larger corpus is checked while it is read
MAX_TOKENS = 1 << 49  # per source: as far as its order counts exactly
SAMPLED_DOCUMENTS = 16
SAMPLED_SHARDS = 16
SAMPLED_BYTES = 4096
Counts = dict[str, tuple[int, int]]  # (documents, tokens) by path


@dataclass(frozen=True, eq=False)
class Source:
    """A weighted dataset: its shards in order and their counts.

    delimiter     1 if the stream adds the separator to each document, 0 if it is stored
    fingerprint   of the content of some shards, see `content_fingerprint`
    """

    name: str
    paths: Sequence[str]
    docs: I64
    tokens: I64
    delimiter: int
    weight: float
    fingerprint: str = ""

    @cached_property
    def starts(self) -> I64:
        """Returns the first token of each shard in the source; the last element is `num_tokens`."""
        return np.concatenate([[0], np.cumsum(self.tokens + self.delimiter * self.docs)])

    @property
    def num_tokens(self) -> int:
        """Returns the tokens of an epoch, with separators."""
        return int(self.starts[-1])

    @cached_property
    def digest(self) -> str:
        """Returns 16 hex digits of the names, order and counts of the shards; their folder may
        move."""
        names = "\n".join(path.removeprefix(self.name + "/") for path in self.paths)
        counts = np.stack([self.docs, self.tokens]).astype("<i8").tobytes()
        data = names.encode() + counts + bytes([self.delimiter])
        return hashlib.blake2b(data, digest_size=8).hexdigest()


@dataclass(frozen=True, eq=False)
class Corpus:
    """The sources of a run, sorted by name. One rank opens it and sends it to the others, pickled.

    vocab_size   of the shards' tokenizer, None if unknown
    tokenizer    its digest, "" if unknown
    """

    storage: Files
    sources: tuple[Source, ...]
    vocab_size: int | None
    tokenizer: str
    sep_token: int

    def source(self, name: str) -> Source | None:
        """Returns the source of that name, or None."""
        return next((source for source in self.sources if source.name == name), None)


class ShortSource(UserError):
    """A source has fewer tokens than one sequence."""


def open_corpus(
    section: DataConfig, storage: Files | None = None, *, check_shards: bool = True
) -> Corpus:
    """Returns the corpus that the flags describe: the shards of each source and the token counts.

    Reads counts and the headers of a few shards, no tokens. Without `datasets`, every folder with
    shards is a source; without `weights`, sources are weighted by their tokens, at least by
    1/65,536. A shard that links give several names is read once. `check_shards` compares opened
    shards with their counts.

    Example:
        corpus = open_corpus(DataConfig(data_path="data/own", datasets=("docs", "code")))
        print({source.name: source.num_tokens for source in corpus.sources})

    Raises:
        UserError: a source or a shard is missing, not valid, or contradicts another one.
    """
    storage = storage or open_storage(section.data_path)
    paths = sorted(storage.sizes)
    may_miss = section.on_missing == "mask"
    names = _source_names(section, storage, paths)
    counts = _read_counts(storage, paths)
    every = sorted({*paths, *counts})
    others = (*HELD_OUT, "meta/", *_inner_corpora(paths))
    found = {name: _shards_of(name, every, others, storage, may_miss) for name in names}
    listed = _unlinked(found, storage, is_named=bool(section.datasets))
    opened = _open_some(storage, listed, counts, may_miss)
    sep_token = _find_sep_token(section, opened)
    weights = dict[str, float]()
    if section.weights:
        weights = dict(zip(names, section.weights, strict=True))
    listed = dict(sorted(listed.items()))
    fingerprint = partial(content_fingerprint, storage, may_miss=may_miss)
    fingerprints = in_threads(fingerprint, listed.values())
    sources = []
    for (name, shards), content in zip(listed.items(), fingerprints, strict=True):
        delimiter = 1
        for path in shards:
            if path in opened and counts[path][1]:  # an opened shard with tokens
                delimiter = delimiter_of(opened[path], sep_token)
                break
        docs, tokens = np.array([counts[path] for path in shards], np.int64).reshape(-1, 2).T
        weight = weights.get(name, 0.0)
        source = Source(name, shards, docs, tokens, delimiter, weight, content)
        # The sum of counts that are too large may wrap around to a small number.
        most = max(source.num_tokens, int(tokens.max(initial=0)))
        if most >= MAX_TOKENS:
            raise UserError(
                f"source {name} has {most} tokens, but must have fewer than {MAX_TOKENS:,}; split the "
                "source"
            )
        if source.num_tokens < section.seq_length:
            raise ShortSource(
                f"source {name} has {source.num_tokens:,} tokens, less than one sequence "
                f"(--seq_length={section.seq_length}); lower --seq_length, or remove the source"
            )
        for number, path in enumerate(shards):
            if check_shards and path in opened:
                check_shard(source, number, opened[path], sep_token)
        sources.append(source)
    storage.close()
    if not weights:
        least = sum(source.num_tokens for source in sources) / (NUM_SLOTS - len(sources))
        sources = [replace(source, weight=max(source.num_tokens, least)) for source in sources]
    vocab_sizes = [int(shard.metadata.get("vocab_size") or 0) for shard in opened.values()]
    tokenizer = _agreed(opened, "tokenizer_digest")
    vocab_size = max(vocab_sizes, default=0) or None
    return Corpus(storage, tuple(sources), vocab_size, tokenizer, sep_token)


def check_tokenizer(corpus: Corpus, shard: Shard) -> None:
    """Raises TokenError if a shard says that another tokenizer made its tokens."""
    digest = shard.metadata.get("tokenizer_digest")
    if digest and corpus.tokenizer and digest != corpus.tokenizer:
        raise TokenError(
            f"shard {shard.path} has tokenizer_digest {digest}, but other shards {corpus.tokenizer}; "
            "prepare all sources with one --tokenizer"
        )


def check_shard(
    source: Source, number: int, shard: Shard, sep_token: int, vocab_size: int | None = None
) -> None:
    """Compares an open shard with its counts and its source.

    Without `vocab_size` (at the start) the tokens of a shard with one record batch per document are
    not counted, because that reads them all, unless the counts say that there are none.

    Raises:
        ShardError: they differ.
        TokenError: a token is not below `vocab_size`.
    """
    expected = int(source.docs[number]), int(source.tokens[number])
    counted = shard.is_list or vocab_size is not None or expected[1] == 0
    if shard.num_docs != expected[0] or (counted and shard.num_tokens != expected[1]):
        raise ShardError(
            f"shard {shard.path} has {shard.num_docs} documents and {shard.num_tokens} tokens, but "
            f"the counts file says {expected[0]} and {expected[1]}; restore the shard or correct "
            f"{TABLES}"
        )
    if expected[1] and delimiter_of(shard, sep_token, trusted=True) != source.delimiter:
        raise ShardError(
            f"shard {shard.path} differs from other shards of source {source.name}: some have "
            f"documents with the separator ({sep_token}), some without; {CONVERT}"
        )
    largest = int(shard.metadata.get("max_token_id") or 0)
    if vocab_size is not None and largest >= vocab_size:
        raise TokenError(
            f"shard {shard.path} has token {largest}, which must be below --vocab_size={vocab_size}; "
            "raise --vocab_size to the size of its tokenizer"
        )


def delimiter_of(shard: Shard, sep_token: int, trusted: bool = False) -> int:
    """Returns 1 if the stream must add the separator to the shard's documents, 0 if it is stored.

    `has_eos` decides, unless the first documents contradict it; without `has_eos` these decide. No
    document of a `trusted` shard with `has_eos` is read.

    Raises:
        ShardError: documents with and without the separator, or `has_eos` is wrong.
    """
    recorded = shard.metadata.get("has_eos")
    if trusted and recorded:
        return int(recorded != "true")
    ends = {token == sep_token for token in shard.last_tokens(SAMPLED_DOCUMENTS)}
    if recorded == "true":
        is_wrong = False in ends
    elif recorded == "false":  # a text may happen to end with the separator
        is_wrong = ends == {True}
    else:
        is_wrong = len(ends) == 2
    if is_wrong:
        if len(ends) == 2:
            kinds = "with and without"
        else:
            kinds = "with" if True in ends else "without"
        also = ""
        if recorded is not None:
            also = f", but says has_eos={recorded}"
        raise ShardError(
            f"shard {shard.path} has documents {kinds} a trailing separator ({sep_token}){also}; "
            f"{CONVERT}"
        )
    return int(recorded == "false" or (recorded is None and ends != {True}))


def _source_names(section: DataConfig, storage: Files, paths: list[str]) -> list[str]:
    """Returns --datasets, or else all folders with shards.

    Held-out data (validation/, test/) and folders of another corpus inside this one are sources
    only if --datasets names them.
    """
    inner = tuple(_inner_corpora(paths))
    folders = {path.rpartition("/")[0] or "." for path in paths if path.endswith(SUFFIX)}
    folders = {folder for folder in folders if not f"{folder}/".startswith("meta/")}
    skipped = {folder for folder in folders if f"{folder}/".startswith((*HELD_OUT, *inner))}
    folders -= skipped
    names = list(map(posixpath.normpath, section.datasets)) or sorted(folders)
    if not section.datasets:
        _note_skipped(skipped, inner)
    if not names and skipped:
        raise MissingInput(
            f"--data_path={storage.root} has sources only in other corpora or held-out data, e.g. "
            f"{min(skipped)}; set --data_path to its folder, or name it in --datasets"
        )
    if not names:
        raise MissingInput(
            f"--data_path={storage.root} must contain {SUFFIX} shards; {_how_to_prepare(paths)}"
        )
    for name in names:
        if not _below(name, paths):
            found = ", ".join(sorted(folders)[:8])
            if len(folders) > 8:
                found += ", …"
            hint = did_you_mean(sorted(folders), name, cutoff=0.5) or f"; found: {found or 'none'}"
            raise MissingInput(
                f"--datasets={name} is not a folder with files in {storage.root}{hint}"
            )
        if names.count(name) > 1:
            raise UserError(f"--datasets={name} must be named once; raise its weight instead")
        for other in names:
            if name.startswith(f"{other}/") or other == "." != name:
                raise UserError(
                    f"--datasets={name} is inside {other}, which is a source too; name one of them"
                )
    return names


def _inner_corpora(paths: list[str]) -> Iterator[str]:
    """Yields the folders, with a "/", that have their own meta/ of `prepare`."""
    for path in paths:
        folder, _, file = path.rpartition("/meta/")
        if folder and (fnmatch.fnmatch(file, "*counts*.csv") or file == "tokenizer.json"):
            yield f"{folder}/"


def _note_skipped(skipped: Iterable[str], inner: tuple[str, ...]) -> None:
    """Logs the folders that are not sources, except the held-out data that `prepare` wrote."""
    shown = []
    for folder in sorted(skipped):
        is_usual = f"{folder}/".startswith(HELD_OUT) and f"{folder.partition('/')[0]}/" in inner
        if not is_usual:
            shown.append(folder)
    if shown:
        more = ", …" if len(shown) > 8 else ""
        note_once(
            f"not sources, because they are held-out data or have their own meta/: "
            f"{', '.join(shown[:8])}{more}; name them to use them"
        )


def _how_to_prepare(paths: list[str]) -> str:
    if any(path.startswith("meta/prepare/") for path in paths):
        return "it holds an unfinished `prepare`: run that command again, it resumes"
    command = "`python -m fms_fsdp prepare --input=FILES --output=FOLDER`"
    for path in paths:
        if path.endswith(TEXT_SUFFIXES):
            return f"{path} is text: make shards of it with {command}"
    return f"make some with {command}"


def _below(name: str, paths: list[str]) -> list[str]:
    """Returns the sorted paths in a folder."""
    if name == ".":
        return paths
    return paths[bisect_left(paths, f"{name}/") : bisect_left(paths, f"{name}0")]


def _read_counts(storage: Files, paths: list[str]) -> Counts:
    """Returns the counts of shards by path in this folder.

    An absolute path, of the folder that the counts were made in, is matched from its end; if no
    shard here matches, its row is ignored.
    """
    counts: Counts = {}
    for table in fnmatch.filter(paths, TABLES):
        try:
            data = storage.read(table, storage.size(table), 0)
        except OSError as error:
            raise UserError(
                f"counts file {table} cannot be read: {error}; restore or remove the file"
            ) from error
        try:
            text = data.decode()
            rows = csv.reader(text.splitlines()[1:])
            counts |= {row[0]: (int(row[1]), int(row[2])) for row in rows if row}
        except (ValueError, LookupError, csv.Error) as error:
            raise UserError(
                f"counts file {table} must have rows of `dataset/filename,documents,tokens`: "
                f"{error}; correct or remove the file"
            ) from None
    found: Counts = {}
    for path, count in counts.items():
        if min(count) < 0:
            raise UserError(f"{TABLES} has a count below 0 for shard {path}; correct it")
        if max(count) >= 1 << 63:  # numpy cannot hold it
            raise UserError(f"{TABLES} has a count of {max(count)} for shard {path}; correct it")
        if path.startswith("/"):
            while path and path not in storage.sizes:
                path = path.partition("/")[2]
        if path:
            found[posixpath.normpath(safe_name(path, TABLES, folders=True))] = count
    return found


def _shards_of(
    name: str, every: list[str], others: Sequence[str], storage: Files, may_miss: bool
) -> list[str]:
    """Returns the shards of a source, including those that only the counts files list, without
    those in folders of other data (`others`) that the source is not itself in."""
    others = tuple(other for other in others if not f"{name}/".startswith(other))
    shards = [path for path in _below(name, every) if path.endswith(SUFFIX)]
    shards = [path for path in shards if not path.startswith(others)]
    absent = [path for path in shards if path not in storage.sizes]
    if not shards:
        raise MissingInput(
            f"--datasets={name} must contain {SUFFIX} shards; {_how_to_prepare(_below(name, every))}"
        )
    if absent and not may_miss:
        raise MissingInput(
            f"shard {absent[0]} is listed in {TABLES} but does not exist in {storage.root} "
            f"({len(absent)} missing); restore the shard or set --on_missing=mask"
        )
    for path in filter(has_control_character, shards):
        raise UserError(
            f"shard {shown_name(path)} has a control character in its name; rename the file"
        )
    return shards


def _unlinked(
    listed: Mapping[str, list[str]], storage: Files, *, is_named: bool
) -> dict[str, list[str]]:
    """Drops the shards that are links to shards of these sources, and logs the links.

    A source that consists of such links is left out, unless `is_named`.

    Raises:
        UserError: --datasets names a source that is a link.
    """
    real_paths = storage.real_paths(path for paths in listed.values() for path in paths)
    chosen = dict[str, str]()  # real path -> name that counts
    for path, real in sorted(real_paths.items()):
        known = chosen.setdefault(real, path)
        if not real.endswith(f"/{known}") and real.endswith(f"/{path}"):
            chosen[real] = path  # this name leads over no link
    found = dict[str, list[str]]()
    for name, paths in listed.items():
        found[name] = [path for path in paths if chosen[real_paths[path]] == path]
        linked = [path for path in paths if chosen[real_paths[path]] != path]
        if not linked:
            continue
        other = chosen[real_paths[linked[0]]]
        if found[name]:
            note_once(
                f"source {name}: {counted(len(linked), 'shard')} skipped, because links give a "
                f"shard a second name: {linked[0]} is {other}"
            )
        elif is_named:
            raise UserError(
                f"--datasets={name} must not consist of links to shards of other sources: "
                f"{linked[0]} is {other}; remove it, or raise the weight of the other source"
            )
        else:
            note_once(f"source {name} skipped, because it is a link: {linked[0]} is {other}")
            del found[name]
    return found


def _open_some(
    storage: Files, listed: Mapping[str, list[str]], counts: Counts, may_miss: bool
) -> dict[str, Shard]:
    """Opens all shards of a small corpus, else the first of each source and those without tokens in
    `counts`.

    Adds the missing counts to `counts`.
    """
    every = [path for paths in listed.values() for path in paths]
    if len(every) > OPENED_AT_START:
        wanted = {_first_usable(storage, paths, counts, may_miss) for paths in listed.values()}
        # No step opens a shard that is counted as empty, so only the start can find a wrong 0.
        wanted |= {path for path in every if counts.get(path, (0, 0))[1] == 0}
        every = [path for path in every if path in wanted]
    opened = dict[str, Shard]()
    for path in every:
        storage.prefetch_ends(path)
    with reporting_progress(lambda: f"opening shards: {len(opened):,} of {len(every):,}"):
        for path in every:
            try:
                opened[path] = shard = storage.open_shard(path)
                if path not in counts:
                    counts[path] = shard.num_docs, shard.num_tokens
            except ShardError:
                if not (may_miss and path in counts):
                    raise
    return opened


def _first_usable(storage: Files, paths: list[str], counts: Counts, may_miss: bool) -> str:
    """Returns the first shard of a source that has tokens and, with `may_miss`, can be opened."""
    for path in paths:
        if not counts.get(path, (1, 1))[1]:
            continue
        if not may_miss:
            return path
        try:
            storage.open_shard(path)
        except ShardError:
            continue
        return path
    return paths[0]


def _agreed(opened: Mapping[str, Shard], name: str) -> str:
    """Returns the value that shards have in their metadata, "" if none has one.

    Raises:
        UserError: they have different values.
    """
    recorded = dict[str, str]()  # value -> the last shard that has it
    for path, shard in opened.items():
        value = shard.metadata.get(name)
        if value:
            recorded[value] = path
    if len(recorded) > 1:
        (a, first), (b, second) = list(recorded.items())[:2]
        raise UserError(
            f"{name} is {a} in shard {first} but {b} in {second}; prepare all sources with one "
            "--tokenizer"
        )
    return next(iter(recorded), "")


def _find_sep_token(section: DataConfig, opened: Mapping[str, Shard]) -> int:
    """Returns the separator: the flag, else the one in the metadata of the opened shards.

    Raises:
        UserError: it is unknown, or the flag contradicts shards in which the separator is stored.
    """
    for path, shard in opened.items():
        recorded = shard.metadata.get("sep_token")
        is_stored = shard.metadata.get("has_eos") == "true"
        if is_stored and recorded and section.sep_token not in (None, int(recorded)):
            raise UserError(
                f"--sep_token={section.sep_token} does not match shard {path}, whose documents end "
                f"with {recorded}; remove --sep_token"
            )
    if section.sep_token is not None:
        return section.sep_token
    agreed = _agreed(opened, "sep_token")
    if agreed:
        return int(agreed)
    if not opened:
        raise MissingInput(f"--data_path={section.data_path} has no readable shard; restore one")
    path, shard = next(iter(opened.items()))
    ends = set(shard.last_tokens(SAMPLED_DOCUMENTS))
    hint = "end with different tokens"
    if len(ends) == 1:
        hint = f"all end with {min(ends)}"
    raise UserError(
        f"shard {path} does not name its separator; set --sep_token to the id of the token that ends "
        f"a document (its first documents {hint})"
    )


def content_fingerprint(storage: Files, paths: Sequence[str], may_miss: bool = False) -> str:
    """Returns four hex digits per sampled shard: a hash of size and 4 KiB from the middle.

    It changes if a shard is rewritten with other tokens but the same name and counts. Up to 16
    shards are sampled; "----" stands for a shard that cannot be read, or with `may_miss` opened.
    """
    digits = []
    sampled = _sampled(paths)
    if storage.is_remote:
        for path in storage.sizes.keys() & sampled:
            middle = storage.size(path) // 2
            storage.prefetch(path, [(middle, middle + min(middle, SAMPLED_BYTES))])
    for path in sampled:
        try:
            if may_miss:
                storage.open_shard(path)  # a corrupt one is masked, not another shard
            size = storage.size(path)
            data = size.to_bytes(8, "little") + storage.read(path, SAMPLED_BYTES, size // 2)
            digits.append(hashlib.blake2b(data, digest_size=2).hexdigest())
        except (OSError, ShardError):
            digits.append("----")
    return "".join(digits)


def changed_shard(paths: Sequence[str], before: str, now: str) -> str | None:
    """Returns the first shard whose fingerprint differs, None if none does."""
    for i, path in enumerate(_sampled(paths)):
        a, b = before[4 * i : 4 * i + 4], now[4 * i : 4 * i + 4]
        if a != b and "----" not in (a, b):
            return path
    return None


def known_fingerprint(before: str, now: str) -> str:
    """Returns the fingerprint of now, with the digits of before for shards that cannot be read."""
    if len(before) != len(now):
        return now
    digits = []
    for i in range(0, len(now), 4):
        is_unread = now[i : i + 4] == "----"
        digits.append(before[i : i + 4] if is_unread else now[i : i + 4])
    return "".join(digits)


def _sampled(paths: Sequence[str]) -> list[str]:
    last = len(paths) - 1
    return [
        paths[i] for i in sorted({i * last // (SAMPLED_SHARDS - 1) for i in range(SAMPLED_SHARDS)})
    ]
