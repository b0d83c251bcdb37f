"""The rows of any step of a run on token shards: the addresses of `order`, read from `shards`.

    step -> Order: addresses of my rows -> spans of windows -> Window (packed, cached) -> read_row -> Batch

Invariant: the global batch t is a function of (manifest, seed, history, t). No rank knows of another.
"""

from __future__ import annotations

import logging
from collections import Counter
from dataclasses import KW_ONLY, dataclass, field
from functools import lru_cache, partial
from typing import Any, NamedTuple

import numpy as np

from fms_fsdp.config import DataConfig
from fms_fsdp.data.batch import IGNORED_LABEL, Batch, empty_batch, rows_of_rank
from fms_fsdp.data.order.history import History, Segment, check_same
from fms_fsdp.data.order.mixture import NUM_SLOTS, slot_quotas
from fms_fsdp.data.order.order import Consumption, Fit, Order
from fms_fsdp.data.order.packing import Cuts, pack_concat
from fms_fsdp.data.order.permute import ORDER_VERSION
from fms_fsdp.data.order.source_order import Rest, RowAddress, Span
from fms_fsdp.data.order.tapes import TAIL, fit_geometry
from fms_fsdp.data.pieces import Pieces, Row, ShardCache, SourceReader, Window
from fms_fsdp.data.shards.content_marks import changed_shard
from fms_fsdp.data.shards.ipc import ShardError, TokenError
from fms_fsdp.data.shards.lru import Lru
from fms_fsdp.data.shards.manifest import Corpus
from fms_fsdp.errors import MissingInput, UserError
from fms_fsdp.parts import load_part

STATE_VERSION = 2  # of the form of `state`; the order of the data has its own
SHARD_CACHE_BYTES = 24 << 20
WINDOW_CACHE_BYTES = 32 << 20
WINDOW_CACHE_BYTES_PER_TAPE = 128 << 10
WEIGHTS_ALONE = "take the checkpoint's weights alone with --load_model_only"

logger = logging.getLogger(__name__)


class KnownSource(NamedTuple):
    """What a checkpoint keeps of a source; a resume compares the values, and so notices changed shards."""

    digest: str  # of names, order and counts
    num_shards: int
    num_tokens: int
    marks: str  # of the content


@dataclass(eq=False)
class CorpusRows:
    """Produces the rows of any step from a corpus: a pure function of the step and of the history that a
    checkpoint keeps.

    `global_batch_size` is that at the end of a ramp; `last_step`, by --max_epochs, None for no end, is where
    the source `first_exhausted` ends.
    """

    section: DataConfig
    corpus: Corpus
    _: KW_ONLY
    seed: int
    vocab_size: int
    global_batch_size: int
    rampup: tuple[int, ...] = ()
    pin_memory: bool
    last_step: int | None = field(default=None, init=False)
    first_exhausted: str = field(default="", init=False)

    def __post_init__(self) -> None:
        section, corpus, batch = self.section, self.corpus, self.global_batch_size
        self._quotas = slot_quotas({source.name: source.weight for source in corpus.sources})
        self.files = corpus.files.clone()
        self._shards: ShardCache = Lru(SHARD_CACHE_BYTES)
        self._readers: dict[str, SourceReader] = {}
        self.open_sources(corpus)
        self._known = dict[str, KnownSource]()  # by source, those of earlier steps too
        for source in corpus.sources:
            sizes = len(source.paths), source.num_tokens
            self._known[source.name] = KnownSource(source.digest, *sizes, corpus.marks_of(source))
        num_rows = sum(source.num_tokens // section.seq_length for source in corpus.sources)
        if num_rows < batch:
            raise UserError(
                f"--global_batch_size ({batch}) must be at most the {num_rows} sequences of the "
                "corpus; lower the batch, lower --seq_length or add data"
            )
        self._masked: Counter[int] = Counter()  # rows of this rank by step
        self._windows: Lru[Span, Window] = Lru(WINDOW_CACHE_BYTES)
        self._listed = lru_cache(maxsize=1)(self.packed)  # rows of a window are listed one after the other
        self.begin_after(0)

    def begin_after(self, step: int) -> None:
        """Makes step + 1 the first step: nothing has been seen."""
        size = self.section.seq_length
        history = History([Segment(step, self.global_batch_size, self._quotas, size, self.rampup)], [])
        history.skip(self.section.skip_steps, step)
        self.order = self._order_of(history, {})
        self._limit_epochs(step)

    def open_sources(self, corpus: Corpus) -> None:
        """Makes the sources of a corpus readable: for inspection, also sources of earlier steps that the
        flags no longer name."""
        masks = self.section.document_mask, self.section.loss_on == "response"
        shared = corpus.sep_token, self.files, self._shards, self.vocab_size, *masks
        for source in corpus.sources:
            self._readers[source.name] = SourceReader(source, *shared)

    def batch(self, step: int, dp_rank: int, dp_size: int) -> Batch:
        """Returns the rows [B * dp_rank / dp_size, B * (dp_rank + 1) / dp_size) of the step's global batch,
        whose size B may be another one. Raises: ShardError with the step."""
        segment = self.order.history.segment(step)
        start, stop = rows_of_rank(segment.batch_at(step), dp_rank, dp_size)
        batch = empty_batch(stop - start, segment.seq_length, pin_memory=self.pin_memory)
        columns = [tensor.numpy() for tensor in batch]
        self._masked.pop(step, None)  # a step that is read again counts once
        for i, address in enumerate(self.order.addresses(step, start, stop)):
            out = Row(*(column[i] for column in columns))
            try:
                self.read(address, out)
            except ShardError as error:
                self._mask_row(error, step, address, out)
        return batch

    def read(self, address: RowAddress, out: Row) -> None:
        """Writes one row into `out`, arrays of as many elements as the row has tokens. Raises: ShardError."""
        done, reader = 0, self.reader(address.source)
        for span in self.order.spans(address):
            part = out.part(done, done + span.length)
            reader.read_row(self._window(span), span.start, part)
            if done:
                part.document_ids[:] += out.document_ids[done - 1] + 1
            done += span.length

    def pieces_of(self, address: RowAddress) -> Pieces:
        """Returns the pieces of documents that a row holds, in order: for inspection and tests, in O(1)
        windows."""
        parts = []
        for span in self.order.spans(address):
            pieces = self._listed(span._replace(start=0, length=0))
            end = np.cumsum(pieces.length)
            begin, stop = end - pieces.length, span.start + span.length
            inside = np.flatnonzero((end > span.start) & (begin < stop))
            skip = np.maximum(span.start - begin[inside], 0)
            length = np.minimum(end[inside], stop) - begin[inside] - skip
            parts.append(pieces.cut(Cuts(inside, skip, length), np.ones_like(end)))
        return Pieces.joined(parts)

    def documents(self, step: int, limit: int) -> list[str]:
        """Returns the file, document and token range of the first `limit` pieces of the step's global
        batch."""
        found: list[str] = []
        for address in self.order.addresses(step):
            paths = self.reader(address.source).source.paths
            for file, document, start, stop in self.pieces_of(address).ranges():
                if len(found) == limit:
                    return found
                found.append(f"{paths[file]} document {document} [{start}, {stop})")
        return found

    def packed(self, span: Span) -> Pieces:
        """Returns all pieces of the window of a span, in the order of its tokens. Raises: ShardError."""
        tapes = self.order.source(span.source).tapes(span.epoch)
        key = tapes.piece_key(span.epoch, span.tape, span.window)
        if self.section.packing == "bestfit":
            pack = partial(load_part("bestfit:pack_bestfit"), key=key, seq_length=tapes.geometry.seq_length)
        else:
            pack = partial(pack_concat, key=key)
        starts = tapes.window_blocks(span.epoch, span.tape, span.window)
        length = tapes.window_tokens(span.tape) // len(starts)
        return self.reader(span.source).pack(starts, length, None if span.tape == TAIL else pack)

    def num_masked_rows(self, step: int) -> int:
        """Returns how many rows of this rank were masked up to `step`."""
        return sum(count for masked, count in self._masked.items() if masked <= step)

    def reader(self, name: str) -> SourceReader:
        """Returns what reads a source. Raises: UserError if it is not among those opened."""
        if name not in self._readers:
            raise UserError(
                f"source ({name}) of this step is not among the sources opened; add the source to --datasets"
            )
        return self._readers[name]

    def state(self) -> dict[str, Any]:
        """Returns what, with the manifest, determines every step so far and to come: JSON values, the same on
        every rank."""
        return {
            "state_version": STATE_VERSION,
            "order_version": ORDER_VERSION,
            "seed": self.seed,
            "packing": self.section.packing,
            "sep_token": self.corpus.sep_token,
            "fit": {size: dict(sorted(fit.items())) for size, fit in self.order.fit.items()},
            "manifest": {name: list(known) for name, known in sorted(self._known.items())},
            **self.order.history.state(),
        }

    def load(self, state: dict[str, Any], step: int) -> list[str]:
        """Continues after `step`, with the flags of this run from step + 1 on; returns what they change, in
        words.

        Raises: UserError if the state is damaged, of another corpus, seed, packing or separator, or of a row
        length that does not fit.
        """
        self._check_same(state)
        history, size = History.from_state(state), self.section.seq_length
        before = history.segments[-1].seq_length
        changes = history.change(step, self.global_batch_size, self._quotas, size, self.rampup)
        if history.has_unfit_lengths():
            lengths = sorted({segment.seq_length for segment in history.segments} - {size})
            raise UserError(
                f"--seq_length ({size}) must divide {before} or be a multiple of {before}, and all lengths "
                f"of a run must divide the longest (so far: {', '.join(map(str, lengths))}); choose such "
                f"a length, or {WEIGHTS_ALONE}"
            )
        changes += history.skip(self.section.skip_steps, step)
        self._known = {name: KnownSource(*known) for name, known in state["manifest"].items()} | self._known
        self.order = self._order_of(history, state["fit"])
        if size != before and history.segments[-1].after == step:
            changes += self._left_out()
        self._limit_epochs(step)
        return changes

    def consumption(self, step: int) -> Consumption:
        """Returns by source, dropped ones too, what it has supplied by the end of `step`."""
        return self.order.consumption(step)

    def end_of_epochs(self, source: str, epochs: float, step: int) -> tuple[int, str]:
        """Returns the first step, not before `step`, by whose end the source is gone through `epochs` times;
        with "" for it, the rows of all sources together, in the shares of the mixture. And the epochs of each
        by then, in words.

        Raises: UserError if the mixture has no such source.
        """
        history, order = self.order.history, self.order
        if source and source not in self._quotas:
            raise UserError(
                f"--num_epochs ({source}:{epochs:g}) must name a source of the mixture, which has "
                f"{', '.join(sorted(self._quotas))}"
            )
        names = [source] if source else list(self._quotas)
        rows = sum(order.source(name).num_rows_until(epochs) for name in names)
        last = history.first_step_beyond(names, rows - 1, step - 1)
        used = order.consumption(last)
        passes = ", ".join(f"{name} {used[name]['epoch']:.2f} times" for name in sorted(self._quotas))
        whole = f"source {source}" if source else "as many rows as all sources have together"
        return last, f"{epochs:g} x {whole} are read by step {last:,}; by then: {passes}"

    def close(self) -> None:
        self.files.close()

    def _order_of(self, history: History, fit: Fit) -> Order:
        """Returns the order that a history makes, after fitting the sources used for the first time in this
        length."""
        size, fit = self.section.seq_length, {length: dict(fits) for length, fits in fit.items()}
        fits = fit.setdefault(str(size), {})
        for name, quota in self._quotas.items():
            if name not in fits:
                num_rows = self._known[name].num_tokens // size
                g = fit_geometry(num_rows, size, quota / NUM_SLOTS, self.section.logical_shards)
                fits[name] = [g.num_tapes, g.blocks_per_window, g.block_tokens]
        num_tapes = Counter[str]()  # the most that a source has in any length
        for fits in fit.values():
            num_tapes |= Counter({name: fits[name][0] for name in self._quotas if name in fits})
        self._windows.clear()
        self._windows.capacity = WINDOW_CACHE_BYTES + WINDOW_CACHE_BYTES_PER_TAPE * num_tapes.total()
        self._listed.cache_clear()
        num_tokens = {name: known.num_tokens for name, known in self._known.items()}
        return Order(self.seed, num_tokens, fit, history)

    def _left_out(self) -> list[str]:
        """Returns what the last change of the row length leaves out, a line for each source in the middle of
        an epoch."""
        first, lines = self.order.history.segments[-1].base, []
        for name in sorted(self._quotas):
            rest = self.order.source(name).laps[-2:][0]
            if isinstance(rest, Rest) and rest.first == first.get(name, 0):
                lines.append(
                    f"source {name}: {rest.left_out:,} tokens of the epoch under way are left out; "
                    f"{rest.num_rows:,} rows of it follow"
                )
        return lines

    def _limit_epochs(self, step: int) -> None:
        """Finds the last step that --max_epochs allows."""
        limit = self.section.max_epochs
        if limit is not None:
            beyond = []
            for name in self._quotas:
                rows = self.order.source(name).num_rows_until(limit)
                beyond.append((self.order.history.first_step_beyond([name], rows, step), name))
            first, self.first_exhausted = min(beyond)
            self.last_step = first - 1

    def _window(self, span: Span) -> Window:
        key = span._replace(start=0, length=0)
        window = self._windows.get(key)
        if window is None:
            window = self.reader(span.source).window(self.packed(span))
            if span.tape != TAIL:  # no other row needs it
                self._windows.put(key, window, window.cost)
        return window

    def _mask_row(self, error: ShardError, step: int, address: RowAddress, out: Row) -> None:
        where = f"{address.source} row {address.n}, step {step}"
        if self.section.on_missing != "mask" or isinstance(error, TokenError):
            raise type(error)(f"{error} [{where}]") from error
        self._masked[step] += 1
        logger.warning("row masked: %s [%s]", error, where)
        out.tokens.fill(self.corpus.sep_token)
        out.labels.fill(IGNORED_LABEL)
        out.positions[:] = np.arange(len(out.positions))
        out.document_ids.fill(0)

    def _check_same(self, state: dict[str, Any]) -> None:
        mine = self.state()
        same = ("state_version", "order_version", "--seed", "--packing", "--sep_token")
        check_same(state, mine, same, "the same value")
        size, old_size = self.section.seq_length, state["history"][-1]["seq_length"]
        if self.section.packing == "bestfit" and size != old_size:
            raise UserError(
                f"--seq_length ({size}) must stay {old_size} with --packing=bestfit, whose rows are packed "
                f"to that length; keep the length, or {WEIGHTS_ALONE}"
            )
        before = {name: KnownSource(*known) for name, known in state["manifest"].items()}
        for name in sorted(self._readers.keys() & before):
            old, now = before[name], self._known[name]
            if old[:3] != now[:3]:
                raise UserError(
                    f"source ({name}) has changed since the checkpoint: {now.num_shards} shards of "
                    f"{now.num_tokens} tokens, then {old.num_shards} of {old.num_tokens}; restore its "
                    "shards, and add new ones as a source of their own"
                )
            shard = changed_shard(self.reader(name).source.paths, old.marks, now.marks)
            if shard is not None:
                raise UserError(
                    f"shard ({shard}) has changed since the checkpoint, though its name and counts have not; "
                    f"restore the shard, or {WEIGHTS_ALONE}"
                )
        lost = sorted(set(state["history"][-1]["weights"]) - set(mine["manifest"]))
        if lost and not self.section.datasets:
            raise MissingInput(
                f"source ({lost[0]}) of the checkpoint is missing in {self.corpus.files.root}; restore the "
                "source, or name the sources to go on with in --datasets"
            )
