"""Held-out sources: sequences that are evaluated and never trained on.

    eval_data_path | data_path/validation | data_path ─ open_held_out ─ HeldOut per source ─ sequences

Invariant: sequence i of a source is a function of (its shards, seq_length, packing, i) alone: the
same in every evaluation, at every world size, batch and training seed. They are the first sequences
of an epoch in shuffled order, so a sample of the whole source without repetition.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
import torch

from fms_fsdp.config import DataConfig, EvalConfig
from fms_fsdp.data.batch import IGNORED_LABEL, Batch, empty_batch
from fms_fsdp.data.corpus import Corpus, ShortSource, open_corpus
from fms_fsdp.data.kept_tokenizer import UnusableTokenizer, find_tokenizer, folder_tokenizer
from fms_fsdp.data.open_storage import open_storage
from fms_fsdp.data.permute import I64
from fms_fsdp.data.shards import Files
from fms_fsdp.data.storage import Storage
from fms_fsdp.data.stream import TokenStream, build_stream
from fms_fsdp.errors import MissingInput, UserError
from fms_fsdp.tokenizers.tokenizer import (
    Tokenizer,
    UsedTokenizer,
    check_same_tokenizer,
    counts_bytes,
)

# of the order; not the run's, so that runs of different seeds are evaluated on the same sequences
SEED = 0x6576616C

LOGICAL_SHARDS = 1024  # of the order, too: --logical_shards is for training

logger = logging.getLogger(__name__)


@dataclass(frozen=True, eq=False)
class HeldOut:
    """`num_sequences` sequences of one source; `group` is "eval" or "test"; `token_bytes[id]` is the number of bytes
    that a token stands for, None if not known."""

    group: str
    name: str
    num_sequences: int
    stream: TokenStream
    token_bytes: I64 | None

    @property
    def num_available(self) -> int:
        """The number of sequences of the source."""
        (source,) = self.stream.corpus.sources
        return source.num_tokens // self.stream.section.seq_length

    def sequences(self, start: int, stop: int) -> Batch:
        """Returns the sequences [start, stop); those past the end are masked."""
        parts = [
            self.stream.batch_at(min(number, self.num_sequences - 1) + 1)
            for number in range(start, stop)
        ]
        batch = Batch(*(torch.cat(column) for column in zip(*parts, strict=True)))
        batch.labels_BS[max(0, self.num_sequences - start) :] = IGNORED_LABEL
        return batch

    def no_sequences(self, count: int) -> Batch:
        """Returns sequences without labels, in place of some that cannot be read."""
        batch = empty_batch(count, self.stream.section.seq_length)
        for column in batch:
            column.zero_()
        batch.labels_BS.fill_(IGNORED_LABEL)
        return batch


@dataclass(frozen=True, eq=False)
class HeldOutListing:
    """The held-out sources of a group, as one rank has found them for the other ranks. Can be pickled.

    `corpus` is None for synthetic tokens.
    """

    group: str
    data: DataConfig
    vocab_size: int
    corpus: Corpus | None = None
    token_bytes: I64 | None = None


def scan_held_out(
    section: EvalConfig,
    data: DataConfig,
    trained: Corpus | None,
    *,
    vocab_size: int,
    used: UsedTokenizer | None = None,
) -> tuple[HeldOutListing, ...]:
    """Returns the held-out corpora that the flags name, () if nothing is to be evaluated: for one rank, which
    sends the corpora to the other ranks. `used`: the tokenizer of the model, where `trained` has another one.

    Raises: UserError if there are none, or they are trained on, or of another tokenizer
    or a larger vocabulary.
    """
    if trained is not None:
        used = folder_tokenizer(
            f"--data_path ({data.data_path})", trained.tokenizer, data.data_path
        )
    found = []
    for group, flag, root, names in _evaluated_folders(section, data, trained):
        listing = HeldOutListing(group, data, vocab_size)
        if root:
            held_out = replace(data, data_path=root.data_path, datasets=names, weights=())
            listing = replace(listing, data=held_out)
            listing = _scan(listing, flag, root.files, data.data_path, trained, used)
        found.append(listing)
    return tuple(found)


def open_held_out(
    section: EvalConfig, scanned: Iterable[HeldOutListing], global_batch_size: int
) -> tuple[HeldOut, ...]:
    """Returns the sources that `scan_held_out` has found, with as many sequences as the flags ask for."""
    steps = {"eval": section.eval_steps, "test": section.test_steps or section.eval_steps}
    sizes = {group: count * global_batch_size for group, count in steps.items()}
    return tuple(source for each in scanned for source in _open(each, sizes[each.group]))


def close_held_out(sources: Iterable[HeldOut]) -> None:
    """Closes the files of the sources."""
    for source in sources:
        source.stream.close()


class _Root(NamedTuple):
    """A folder of held-out data, and its files if they are listed already."""

    data_path: str
    files: Files | None = None


def _evaluated_folders(
    section: EvalConfig, data: DataConfig, trained: Corpus | None
) -> Iterator[tuple[str, str, _Root | None, tuple[str, ...]]]:
    """Yields group, flag, folder and sources of each evaluation.

    Without a folder it is of synthetic tokens, without sources of all sources of the folder.
    """
    is_synthetic = data.use_dummy_dataset and not section.eval_data_path
    if section.is_on and is_synthetic:
        yield "eval", "--eval_data_path", None, ()
    elif section.is_on:
        root = _eval_root(section, data, trained)
        yield "eval", "--eval_data_path", root, section.eval_datasets
    if section.test_data_path:
        yield "test", "--test_data_path", _Root(section.test_data_path), ()
    elif section.eval_test and is_synthetic:
        yield "test", "--eval_test", None, ()
    elif section.eval_test:
        if not data.data_path:  # of --dataset_builder: it would be /test
            raise UserError(
                "--eval_test=True requires --data_path, in which the folder test is; set --test_data_path"
            )
        yield "test", "--eval_test", _subfolder(data.data_path, "test", trained), ()


def _eval_root(section: EvalConfig, data: DataConfig, trained: Corpus | None) -> _Root:
    if section.eval_data_path:
        return _Root(section.eval_data_path)
    validation = _subfolder(data.data_path, "validation", trained)
    if validation.files is not None:
        return validation
    if not section.eval_datasets:
        raise UserError(
            "evaluation requires held-out data, but --data_path has no folder validation; prepare with "
            "--split=98,2, name sources in --eval_datasets, or set --eval_data_path"
        )
    return _Root(data.data_path, None if trained is None else trained.storage)


def _subfolder(data_path: str, folder: str, trained: Corpus | None) -> _Root:
    """Returns a subfolder of the data, with its files if there are any.

    The listing of the data that is trained on contains them.
    """
    path = _join(data_path, folder)
    if trained is not None and isinstance(trained.storage, Storage):
        listing = trained.storage.listing.below(folder)
        return _Root(path, open_storage(path, listing) if listing.sizes else None)
    if not data_path:
        return _Root(path)
    open_storage(data_path)  # an error names the folder that the user named
    with suppress(MissingInput):
        files = open_storage(path)
        if files.sizes:
            return _Root(path, files)
    return _Root(path)


def _join(data_path: str, folder: str) -> str:
    """Appends a folder to a path, or to an address before its options (s3://a/b?region=…)."""
    if "://" not in data_path:
        return f"{data_path.rstrip('/')}/{folder}"
    path, mark, options = data_path.partition("?")
    return f"{path.rstrip('/')}/{folder}{mark}{options}"


def _folder_above(data_path: str) -> str:
    """Returns the folder that `prepare` made, where `data_path` is its validation/ or test/: its
    tokenizer is there."""
    path, mark, options = data_path, "", ""
    if "://" in data_path:
        path, mark, options = data_path.partition("?")
    above, _, name = path.rstrip("/").rpartition("/")
    if name not in ("validation", "test"):
        return data_path
    if not above:
        above = "/" if path.startswith("/") else "."
    return f"{above}{mark}{options}"


def _scan(
    found: HeldOutListing,
    flag: str,
    files: Files | None,
    data_path: str,
    trained: Corpus | None,
    used: UsedTokenizer | None,
) -> HeldOutListing:
    data = replace(
        found.data,
        use_dummy_dataset=False,
        dataset_builder="",
        skip_steps="",
        max_epochs=None,
        logical_shards=LOGICAL_SHARDS,
    )
    try:
        corpus = open_corpus(data, files)
    except ShortSource as error:
        problem, _, _ = str(error).rpartition("; ")  # its fix is for sources of the training
        raise UserError(_about_short_source(found.group, flag, problem)) from error
    except UserError as error:
        text = str(error).replace("--datasets", "--eval_datasets").replace("--data_path", flag)
        raise type(error)(text) from error
    if trained is not None:
        name = "--eval_datasets" if found.group == "eval" else f"{flag}, source"
        _check_not_trained_on(corpus, trained, name)
    folders = (data.data_path, _folder_above(data.data_path), data_path)
    if used is not None:
        name = f"{flag} ({corpus.storage.root})"
        ours = UsedTokenizer(name, corpus.tokenizer, lambda: _find_tokenizer(corpus, folders))
        check_same_tokenizer(ours, used, "prepare both with one tokenizer")
    if (corpus.vocab_size or 0) > found.vocab_size:
        raise UserError(
            f"{flag} ({corpus.storage.root}) has a vocabulary of {corpus.vocab_size}, the model one "
            f"of {found.vocab_size}; prepare both with one tokenizer"
        )
    table = _token_bytes(corpus, folders, found.vocab_size)
    return replace(found, data=data, corpus=corpus, token_bytes=table)


def _check_not_trained_on(corpus: Corpus, trained: Corpus, name: str) -> None:
    """Raises UserError if a held-out shard is trained on, whatever path leads to it."""
    trained_paths = [path for source in trained.sources for path in source.paths]
    trained_on = set(trained.storage.real_paths(trained_paths).values())
    for source in corpus.sources:
        for path, real in corpus.storage.real_paths(source.paths).items():
            if real in trained_on:
                raise UserError(
                    f"{name} ({source.name}) must not be trained on, but its shard {path} is; set "
                    "--datasets to the sources to train on, or name others here"
                )


def _about_short_source(group: str, flag: str, problem: str) -> str:
    """Returns the error for a source of held-out data that is shorter than one sequence."""
    if group == "test":
        return f"{flag}: test {problem}; lower --seq_length, or remove the source"
    return f"{flag}: validation {problem}; name longer sources in --eval_datasets, or lower --seq_length"


def _open(scanned: HeldOutListing, max_sequences: int) -> Iterator[HeldOut]:
    if scanned.corpus is None:
        stream = _stream(scanned.data, None, SEED + (scanned.group == "test"), scanned.vocab_size)
        yield HeldOut(scanned.group, "synthetic", max_sequences, stream, None)
        return
    for source in scanned.corpus.sources:
        num_sequences = min(max_sequences, source.num_tokens // scanned.data.seq_length)
        corpus = replace(scanned.corpus, sources=(source,))
        stream = _stream(scanned.data, corpus, SEED, scanned.vocab_size)
        yield HeldOut(scanned.group, source.name, num_sequences, stream, scanned.token_bytes)


def _stream(data: DataConfig, corpus: Corpus | None, seed: int, vocab_size: int) -> TokenStream:
    """Returns a stream whose step i + 1 is sequence i."""
    return build_stream(
        data, corpus, seed=seed, vocab_size=vocab_size, global_batch_size=1, dp_rank=0, dp_size=1
    )


def _find_tokenizer(corpus: Corpus, folders: tuple[str, ...]) -> Tokenizer | None:
    """Returns the tokenizer of the shards, which `prepare` put into one of the folders; None without one.

    Raises:
        UnusableTokenizer: it cannot be loaded.
    """
    for folder in dict.fromkeys(folders):
        tokenizer = find_tokenizer(folder)
        if tokenizer is not None and tokenizer.vocabulary.digest == corpus.tokenizer:
            return tokenizer
    return None


def _token_bytes(corpus: Corpus, folders: tuple[str, ...], vocab_size: int) -> I64 | None:
    """Returns the bytes by token id; None if the tokenizer of the shards is in none of the folders,
    or the bytes of its tokens are unknown."""
    try:
        tokenizer = _find_tokenizer(corpus, folders)
    except UnusableTokenizer as error:  # training does not need it
        logger.info("bits per byte are not computed: %s", error)
        return None
    if tokenizer is None:
        root = corpus.storage.root
        logger.info("bits per byte are not computed: no tokenizer of these shards in %s", root)
        return None
    if not counts_bytes(tokenizer):
        logger.info("bits per byte are not computed: the tokens do not spell the text")
        return None
    table = tokenizer.token_bytes()
    return np.pad(table, (0, max(0, vocab_size - len(table))))
