"""The data stream: this rank's sequences of each step, prepared ahead by a thread.

    step ── Order.addresses ──> addresses ── SourceReader.window ──> documents ── read_sequence ──> Batch

Invariant: the global batch t is a function of (names and counts of the shards, seed, phases, t).
The only state is the last consumed step and the phases, identical on every rank; ranks do not
communicate.
"""

from __future__ import annotations

import itertools
import logging
import threading
from collections import deque
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import KW_ONLY, dataclass, replace
from typing import Any, Protocol

import numpy as np

from fms_fsdp.config import DataConfig
from fms_fsdp.config.formats import parse_skips
from fms_fsdp.data.batch import IGNORED_LABEL, Batch, empty_batch, sequences_of_rank
from fms_fsdp.data.corpus import (
    Corpus,
    Source,
    changed_shard,
    check_shard,
    check_tokenizer,
    known_fingerprint,
)
from fms_fsdp.data.mixture import NUM_SLOTS, slot_quotas
from fms_fsdp.data.order import Address, History, Order, Phase, SourceOrder, fit_logical_shards
from fms_fsdp.data.permute import ORDER_VERSION
from fms_fsdp.data.sequences import Columns, Lru, Segments, SourceReader
from fms_fsdp.data.shards import Shard, ShardError, TokenError
from fms_fsdp.errors import MissingInput, ReadFailed, UserError

# Prepared before they are requested: two that the loop waits for on a GPU (`read_error_ahead`), and three more, so
# that no step waits for one slow read.
STEPS_AHEAD = 5
SHARD_BYTES, WINDOW_BYTES = 16 << 20, 64 << 20  # of cached open shards and windows
WEIGHTS_ONLY = (
    "to take only the weights into a new run, set --ckpt_load_path=CHECKPOINT "
    "--load_model_only=True and another --run_name"
)

logger = logging.getLogger(__name__)
Consumption = dict[str, dict[str, float | int]]


class Stream(Protocol):
    """The data of this rank, step after step: the methods that the loop, checkpoints and reports use."""

    @property
    def last_step(self) -> int | None:
        """Returns the last step that the data allow; None without an end."""

    @property
    def num_masked_rows(self) -> int:
        """Returns how many sequences of this rank were unreadable and masked in this launch, up to
        the last consumed step. The name is that of users' streams."""

    def next_batch(self) -> Batch:
        """Returns the sequences of the next step and counts the step as consumed.

        Raises:
            UserError: the data of the step cannot be used.
            ReadFailed: the storage does not answer.
        """

    def batch_at(self, step: int) -> Batch | None:
        """Returns this rank's sequences of any step, from 1, without consuming the step; None if the
        stream cannot."""

    def documents(self, step: int, limit: int = 8) -> list[str]:
        """Returns file, document and token range of the first segments of the step's global batch;
        [] if unknown."""

    def consumption(self) -> Consumption:
        """Returns the consumption of every source of the run up to the last consumed step, also of
        those that have supplied nothing yet; {} if unknown."""

    def state_dict(self) -> dict[str, Any]:
        """Returns the values that, with the step, resume the stream: JSON of a few KB, identical on
        every rank."""

    def load_state_dict(self, state: dict[str, Any], step: int) -> list[str]:
        """Continues after `step` with the flags of this run; returns log lines on the changes.

        Raises:
            UserError: the state is of other data.
        """

    def begin_after(self, step: int, sequences_seen: int = 0) -> None:
        """Makes step + 1 the first step of the data, none of which has been seen. A batch ramp
        continues after the `sequences_seen` sequences of the steps before."""

    def close(self) -> None:
        """Ends threads and closes files."""


@dataclass(eq=False)
class TokenStream:
    """This rank's sequences of a corpus, as a `Stream`.

    rampup      start, increment, number of sequences and multiple of a ramp to the global batch
    step        the last consumed step, 0 at first
    last_step   the last step that --max_epochs allows, None without an end
    """

    section: DataConfig
    corpus: Corpus
    _: KW_ONLY
    seed: int
    vocab_size: int
    global_batch_size: int
    dp_rank: int
    dp_size: int
    rampup: tuple[int, ...] = ()
    pin_memory: bool = False

    def __post_init__(self) -> None:
        """Opens the stream before its first step.

        Raises:
            UserError: the batch does not divide over the ranks, or does not fit the corpus.
        """
        batch = self.global_batch_size
        sources = self.corpus.sources
        sequences_of_rank(batch, self.dp_rank, self.dp_size)
        if self.corpus.sep_token >= self.vocab_size:
            raise UserError(
                f"--sep_token={self.corpus.sep_token} must be below --vocab_size={self.vocab_size}; "
                "correct one of them"
            )
        total = sum(source.num_tokens // self.section.seq_length for source in sources)
        if total < batch:
            raise UserError(
                f"--global_batch_size={batch} must be at most {total}, the sequences of the corpus; "
                "lower the batch or --seq_length, or add data"
            )
        quotas = slot_quotas({source.name: source.weight for source in sources})
        self._wanted = Phase(0, batch, quotas, self.rampup)
        skips = "" if self.section.use_dummy_dataset else self.section.skip_steps
        self._skips = parse_skips("skip_steps", skips)
        self._shards = Lru(SHARD_BYTES, self._open_shard)
        self.readers: dict[str, SourceReader] = {}
        self.open_sources(self.corpus)
        self._masked = dict[int, int]()  # sequences of this rank by step that is not consumed
        self._num_masked_rows = 0
        self._lock = threading.Lock()
        self._pool = ThreadPoolExecutor(1, "data")
        self._ahead: deque[Future[Batch]] = deque()
        self.begin_after(0)

    @property
    def source_names(self) -> tuple[str, ...]:
        """The sources that the flags name."""
        return tuple(self._wanted.quotas)

    def open_sources(self, corpus: Corpus) -> None:
        """Makes sources readable; `inspect` also opens those that the flags no longer name."""
        section = self.section
        masks = section.document_mask, section.loss_on == "response"
        for source in corpus.sources:
            self.readers[source.name] = SourceReader(
                source, corpus.storage, self._shards, corpus.sep_token, self.vocab_size, *masks
            )

    def begin_after(self, step: int, sequences_seen: int = 0) -> None:
        """Makes step + 1 the first step of the data, none of which has been seen. A batch ramp
        continues after the `sequences_seen` sequences of the steps before."""
        first = replace(self._wanted, after=step, seen=sequences_seen)
        self._continue(History([first]), {}, step)

    def next_batch(self) -> Batch:
        """Returns the sequences of the next step and counts the step as consumed.

        Raises:
            UserError: the data of this step cannot be used, or --max_epochs ends before it.
        """
        if self.last_step is not None and self.step >= self.last_step:
            raise UserError(
                f"--max_epochs={self.section.max_epochs:g} ends with step {self.last_step} for source "
                f"{self._exhausted}; set --num_steps={self.last_step}, lower the weight of the source, "
                "or raise --max_epochs"
            )
        self._fill()
        batch = self._ahead[0].result()
        self._ahead.popleft()
        self.step += 1
        # The thread changes `_masked` meanwhile, so nothing may iterate over it.
        self._num_masked_rows += self._masked.pop(self.step, 0)
        self._fill()
        return batch

    def read_error_ahead(self, num_steps: int) -> ReadFailed | None:
        """Waits for the batches of the next steps; returns why the storage does not give one of them.

        Other errors are raised by `next_batch`, once the step comes.
        """
        self._fill()
        for future in itertools.islice(self._ahead, num_steps):
            error = future.exception()
            if isinstance(error, ReadFailed):
                return error
        return None

    def batch_at(self, step: int) -> Batch:
        """Returns this rank's sequences of any step, from 1, without consuming the step.

        Raises:
            ShardError: a shard cannot be read; the text names the step.
        """
        with self._lock:
            return self.batch(step, self.dp_rank, self.dp_size)

    def batch(self, step: int, dp_rank: int, dp_size: int) -> Batch:
        """Returns the sequences of a rank in the step's global batch.

        Raises:
            ShardError: a shard cannot be read; the text names the step.
        """
        size = self.order.history.phase(step).batch_at(step)
        start, stop = sequences_of_rank(size, dp_rank, dp_size)
        batch = empty_batch(stop - start, self.section.seq_length, pin_memory=self.pin_memory)
        self._read_step(step, start, Columns(*(tensor.numpy() for tensor in batch)))
        return batch

    def global_batch(self, step: int) -> Columns:
        """Returns the arrays (B S) of all sequences of a step, without torch.

        Raises:
            ShardError: a shard cannot be read; the text names the step.
        """
        size = self.order.history.phase(step).batch_at(step)
        columns = Columns.empty(size, self.section.seq_length)
        self._read_step(step, 0, columns)
        return columns

    def _read_step(self, step: int, start: int, columns: Columns) -> None:
        """Writes the sequences of a step, from sequence `start` of its global batch on, into arrays (B S)."""
        stop = start + len(columns.tokens)
        num_masked = 0
        for i, address in enumerate(self.order.addresses(step, start, stop)):
            out = Columns(*(column[i] for column in columns))
            try:
                self.read(address, out)
            except ShardError as error:
                self._mask(error, step, address, out)
                num_masked += 1
        if step > self.step and num_masked:  # a step that is read twice counts once
            self._masked[step] = num_masked

    def read(self, address: Address, out: Columns) -> None:
        """Writes one sequence into `out`.

        Raises:
            ShardError: a shard cannot be read.
        """
        name, _, epoch, window, position = address
        self.reader(name).read_sequence(self._windows(name, epoch, window), position, out)

    def segments(self, name: str, epoch: int, window: int) -> Segments:
        """Returns the segments of a window, in the order of its sequences."""
        order = self.order.sources[name]
        section = self.section
        bestfit_to = section.seq_length if section.packing == "bestfit" else 0
        key = order.document_key(epoch, window)
        return self.reader(name).window(*order.ranges(epoch, window), key, bestfit_to)

    def sequence_segments(self, address: Address) -> list[tuple[int, int, int, int]]:
        """Returns (shard, document, start, stop) of the segments of a sequence, in order; `start`
        and `stop` are tokens of the document.

        Raises:
            ShardError: a shard cannot be read.
        """
        window = self.segments(address.source, address.epoch, address.window)
        begin = address.position * self.section.seq_length
        end = begin + self.section.seq_length
        found = []
        for part in window[(window["end"] > begin) & (window["end"] - window["length"] < end)]:
            shift = int(part["start"] + part["length"] - part["end"])  # from window to document
            start = max(begin + shift, int(part["start"]))
            stop = min(end, int(part["end"])) + shift
            found.append((int(part["shard"]), int(part["document"]), start, stop))
        return found

    def documents(self, step: int, limit: int = 8) -> list[str]:
        """Returns file, document and token range of the first segments of the global batch.

        Synthetic tokens have none.
        """
        found: list[str] = []
        if self.section.use_dummy_dataset:
            return found
        with self._lock:
            for address in self.order.addresses(step):
                paths = self.reader(address.source).source.paths
                try:
                    for shard, document, start, stop in self.sequence_segments(address):
                        found.append(f"{paths[shard]} document {document} [{start}, {stop})")
                except (ShardError, ReadFailed):  # hidden by --on_missing=mask; a line of a log
                    found.append(f"{address.source} sequence {address.n} (cannot be read)")
                if len(found) >= limit:
                    break
        return found[:limit]

    def consumption(self, step: int | None = None) -> Consumption:
        """Returns epochs and trained tokens of every source that the run has named.

        Removed sources are included; a source that has supplied no sequence has 0 of both.
        """
        if step is None:
            step = self.step
        history = self.order.history
        sequences = history.consumed(step)
        positions = history.position(step)
        found = Consumption()
        # Not the names of `positions`: a counter has no entry for a source without a sequence.
        for name, source in sorted(self.order.sources.items()):
            epochs = positions[name] / source.num_sequences
            found[name] = {"epoch": epochs, "tokens": sequences[name] * self.section.seq_length}
        return found

    def first_beyond(self, names: list[str], epochs: float, step: int, less: int = 0) -> int:
        """Finds the first step after `step` that reads beyond `epochs` epochs of the sources together.

        The end is `less` sequences earlier than that of the epochs, but not before the first sequence.
        """
        total = sum(round(epochs * self.order.sources[name].num_sequences) for name in names)
        return self.order.history.first_step_beyond(names, max(total - less, 0), step)

    @property
    def num_masked_rows(self) -> int:
        """Returns how many sequences of this rank were unreadable and masked, up to the last
        consumed step."""
        return self._num_masked_rows

    def state_dict(self) -> dict[str, Any]:
        """Returns the values that, with step and shards, determine every step, as JSON."""
        return {
            "order_version": ORDER_VERSION,
            "seed": self.seed,
            "seq_length": self.section.seq_length,
            "packing": self.section.packing,
            "sep_token": self.corpus.sep_token,
            "sources": dict(sorted(self._known.items())),
            "phases": self.order.history.state(),
        }

    def load_state_dict(self, state: dict[str, Any], step: int) -> list[str]:
        """Continues after `step` with the flags of this run; returns log lines on the changes.

        Raises:
            UserError: the state is of other data, or of another version of the data order.
        """
        mine = self.state_dict()
        if "order_version" not in state:  # each version of this stream has it
            raise UserError(
                "the checkpoint has the data state of --dataset_builder, so the run cannot resume "
                f"without it; set --dataset_builder as before, or {WEIGHTS_ONLY}"
            )
        version = state["order_version"]
        if version != ORDER_VERSION:
            raise UserError(
                f"the checkpoint has version {version} of the data order, but this program reads "
                f"version {ORDER_VERSION}, so the run cannot resume; {WEIGHTS_ONLY}"
            )
        for name in ("seed", "seq_length", "packing", "sep_token"):
            if state.get(name) != mine[name]:
                raise UserError(
                    f"--{name}={mine[name]} does not match the checkpoint ({state.get(name)}); set "
                    f"--{name}={state.get(name)}, or {WEIGHTS_ONLY}"
                )
        self._check_sources(state["sources"], state["phases"][-1]["quotas"])
        history = History([Phase(**phase) for phase in state["phases"]])
        return self._continue(history, state["sources"], step)

    def close(self) -> None:
        """Ends the thread and closes files."""
        self._drop_ahead()
        self._pool.shutdown()
        self.corpus.storage.close()

    def __enter__(self) -> TokenStream:
        return self

    def __exit__(self, *raised: object) -> None:
        self.close()

    def _continue(self, history: History, known: Mapping[str, list[Any]], step: int) -> list[str]:
        """Applies the flags of this run after a step of a history; returns the changes.

        New sources get their number of logical shards here; sources in `known` keep it.
        """
        self._drop_ahead()
        self._masked.clear()
        # Windows of the same number differ if the sources now have another number of logical shards.
        self._windows = Lru(WINDOW_BYTES, self._make_window)
        history, changes = history.extend(step, self._wanted, self._skips)
        section = self.section
        quotas = self._wanted.quotas
        self._known = dict(known)
        size = section.seq_length
        for source in self.corpus.sources:
            content = source.fingerprint
            if source.name in known:
                shards = known[source.name][3]
                content = known_fingerprint(known[source.name][4], content)
            else:
                share = quotas[source.name] / NUM_SLOTS
                total = source.num_tokens // size
                shards = fit_logical_shards(total, share, section.logical_shards)
            num_files = len(source.paths)
            tokens = source.num_tokens
            self._known[source.name] = [source.digest, num_files, tokens, shards, content]
        orders = {}
        for name, (_, _, tokens, shards, _) in self._known.items():
            orders[name] = SourceOrder(name, tokens, size, shards, self.seed)
        self.order = Order(orders, history)
        self.step = step
        self.last_step = None
        self._exhausted = ""
        if section.max_epochs is not None:
            ends = [(self.first_beyond([name], section.max_epochs, step), name) for name in quotas]
            beyond, self._exhausted = min(ends)
            self.last_step = beyond - 1
        return changes

    def _check_sources(self, known: Mapping[str, list[Any]], last: Mapping[str, int]) -> None:
        """Raises UserError if a source of the checkpoint has changed or is missing."""
        for source in self.corpus.sources:
            if source.name not in known:
                self._check_not_renamed(source, known)
                continue
            digest, shards, tokens, _, content = known[source.name]
            if digest != source.digest:
                raise UserError(
                    f"source {source.name} has {len(source.paths)} shards with {source.num_tokens} "
                    f"tokens, but {shards} with {tokens} in the checkpoint, or other names; restore "
                    "its shards, make a source of new shards, or choose another --run_name"
                )
            path = changed_shard(source.paths, content, source.fingerprint)
            if path:
                raise UserError(
                    f"shard {path} has other content than in the checkpoint, with the same name and "
                    f"counts; restore the shard, or {WEIGHTS_ONLY}"
                )
        lost = sorted(set(last) - {source.name for source in self.corpus.sources})
        if lost and not self.section.datasets:
            raise MissingInput(
                f"source {lost[0]} of the checkpoint does not exist in {self.corpus.storage.root}; "
                "restore it, or name the sources to continue with in --datasets"
            )

    def _check_not_renamed(self, source: Source, known: Mapping[str, list[Any]]) -> None:
        """Raises UserError if a new source has the shards of one that the flags no longer name: it
        would begin again, because the name is part of the order."""
        for name in sorted(known.keys() - set(self.source_names)):
            digest, _, _, _, content = known[name]
            if digest == source.digest and content == source.fingerprint:
                raise UserError(
                    f"source {source.name} has the shards of source {name} of the checkpoint, whose "
                    f"tokens would be repeated; rename its folder to {name}"
                )

    def reader(self, name: str) -> SourceReader:
        """Returns the reader of a source.

        Raises:
            UserError: the source is not open.
        """
        if name not in self.readers:
            raise UserError(f"source {name} of this step is not open; add it to --datasets")
        return self.readers[name]

    def _open_shard(self, name: str, number: int) -> Shard:
        reader = self.readers[name]
        shard = reader.storage.open_shard(reader.source.paths[number], reader.source.delimiter)
        check_tokenizer(self.corpus, shard)
        check_shard(reader.source, number, shard, self.corpus.sep_token, self.vocab_size)
        return shard

    def _make_window(self, name: str, epoch: int, window: int) -> Segments:
        return self.readers[name].compact(self.segments(name, epoch, window))

    def _mask(self, error: ShardError, step: int, address: Address, out: Columns) -> None:
        """Excludes a sequence that cannot be read from the loss, or raises its error with the step."""
        where = f"{address.source} sequence {address.n}, step {step}"
        if self.section.on_missing != "mask" or isinstance(error, TokenError):
            raise type(error)(f"{error} [{where}]") from error
        logger.warning("sequence masked: %s [%s]", error, where)
        out.tokens.fill(self.corpus.sep_token)
        out.labels.fill(IGNORED_LABEL)
        out.positions[:] = np.arange(len(out.positions))
        out.document_ids.fill(0)

    def _fill(self) -> None:
        while len(self._ahead) < STEPS_AHEAD:
            step = self.step + len(self._ahead) + 1
            if self.last_step is not None and step > self.last_step:
                return
            self._ahead.append(self._pool.submit(self.batch_at, step))

    def _drop_ahead(self) -> None:
        for future in self._ahead:
            future.cancel()
        for future in self._ahead:
            if not future.cancelled():
                future.exception()  # waits; the step is not wanted any more
        self._ahead.clear()


def build_stream(
    section: DataConfig, corpus: Corpus | None, *, seed: int, vocab_size: int, **settings: Any
) -> TokenStream:
    """Returns the stream of this rank, on synthetic tokens if `corpus` is None.

    `settings` are fields of `TokenStream`: `global_batch_size` in sequences, `dp_rank`, `dp_size`,
    and optionally `rampup` and `pin_memory`. The batches have tensors (B S) with B =
    global_batch_size / dp_size and S = `section.seq_length`.

    Example:
        section = DataConfig(data_path="data/own", seq_length=128)
        ranks = dict(global_batch_size=8, dp_rank=0, dp_size=1)
        stream = build_stream(section, open_corpus(section), seed=42, vocab_size=512, **ranks)
        tokens = stream.next_batch().tokens_BS  # (8, 128), int64
        stream.close()

    Raises:
        UserError: the batch does not divide over the ranks, or does not fit the corpus.
    """
    if corpus is None:
        from fms_fsdp.data.synthetic import synthetic_corpus

        corpus = synthetic_corpus(vocab_size, seed)
    return TokenStream(section, corpus, seed=seed, vocab_size=vocab_size, **settings)
