"""The rows of any step of a run on token shards: the sum of `history`, `course`, `tapes`, `packing` and `pieces`.

    step -> History: (source, n) of every row -> Course: (epoch, tape, window, start) -> sort by tape -> my rows
         -> Window (cached) -> read_row

Invariant: the global batch t is a function of (manifest, seed, history, t). No rank knows of another.
"""

from __future__ import annotations

import logging
from collections import Counter
from typing import Any, NamedTuple

import numpy as np

from fms_fsdp.config import DataConfig
from fms_fsdp.data.batch import IGNORED_LABEL, Batch, empty_batch, rows_of_rank
from fms_fsdp.data.order.course import Course
from fms_fsdp.data.order.history import History, Segment
from fms_fsdp.data.order.mixture import NUM_SLOTS, slot_quotas
from fms_fsdp.data.order.packing import Cuts, pack_bestfit, pack_concat
from fms_fsdp.data.order.permute import F64, I64, ORDER_VERSION, permute
from fms_fsdp.data.order.tapes import TAIL, Geometry, fit_geometry, locate
from fms_fsdp.data.pieces import Pieces, Row, ShardCache, SourceReader, Window
from fms_fsdp.data.shards.content_marks import changed_shard
from fms_fsdp.data.shards.lru import Lru
from fms_fsdp.data.shards.manifest import Corpus
from fms_fsdp.data.shards.shard import ShardError, TokenError

STATE_VERSION = 2  # of the form of `state`; the order of the data has its own
SHARD_CACHE_BYTES = 24 << 20
WINDOW_CACHE_BYTES = 32 << 20
PLANNED_ROWS = 512
WINDOW_CACHE_BYTES_PER_TAPE = 128 << 10

logger = logging.getLogger(__name__)


class Place(NamedTuple):
    """Where one row of a global batch comes from: it begins at token `start` of a window. Tail rows have tape TAIL, and the
    tail row's number as `window`. Rows of a length that the epoch did not begin with may run on in the tape's next window."""

    source: str
    n: int
    epoch: int
    tape: int
    window: int
    start: int


class CorpusRows:
    """Produces the rows of a step from a corpus (see `stream.RowProducer`)."""

    def __init__(
        self,
        section: DataConfig,
        corpus: Corpus,
        *,
        seed: int,
        vocab_size: int,
        global_batch_size: int,
        pin_memory: bool,
    ) -> None:
        self._section, self._corpus, self._seed, self._pin_memory = section, corpus, seed, pin_memory
        self.global_batch_size = global_batch_size
        self._masked: Counter[int] = Counter()  # rows of this rank by step
        self._quotas = slot_quotas({source.name: source.weight for source in corpus.sources})
        self._files = corpus.files.clone()
        self.storage = getattr(
            self._files, "counters", None
        )  # of an object store: reads asked and waited for
        self._shards: ShardCache = Lru(SHARD_CACHE_BYTES)
        self._vocab_size = vocab_size
        self._readers: dict[str, SourceReader] = {}
        self.open_sources(corpus)
        self._known: dict[str, list[Any]] = {  # of the shards: digest, number, tokens, content
            s.name: [s.digest, len(s.paths), s.num_tokens, corpus.marks_of(s)] for s in corpus.sources
        }
        # by seq_length and source: tapes, blocks a window, tokens a block
        self._fit: dict[str, dict[str, list[int]]] = {}
        self._plan: tuple[int, tuple[str, ...], I64] | None = None
        self._listed: tuple[Place, Pieces] | None = None
        self.begin_after(0)

    def begin_after(self, step: int) -> None:
        """Makes step + 1 the first step: nothing has been seen."""
        first = Segment(step, self.global_batch_size, self._quotas, self._section.seq_length)
        self._history = History([first], [])
        self._history.skip(self._section.skip_steps, step)
        self._prepare(step)

    def open_sources(self, corpus: Corpus) -> None:
        """Makes the corpus's sources readable: for inspection, those of earlier steps that the flags no longer name too."""
        for source in corpus.sources:
            self._readers[source.name] = SourceReader(
                corpus,
                source,
                self._files,
                self._shards,
                vocab_size=self._vocab_size,
                document_mask=self._section.document_mask,
            )

    @property
    def history(self) -> History:
        return self._history

    def batch(self, step: int, dp_rank: int, dp_size: int) -> Batch:
        """Returns a rank's rows of the step's global batch, which may be of another size. Raises: ShardError with the step."""
        start, stop = rows_of_rank(self._history.batch(step)[0], dp_rank, dp_size)
        batch = empty_batch(stop - start, self._history.seq_length(step), pin_memory=self._pin_memory)
        columns = [tensor.numpy() for tensor in batch]
        self._masked.pop(step, None)  # a step that is read again counts once
        for i, place in enumerate(self.places(step, start, stop)):
            out = Row(*(column[i] for column in columns))
            try:
                self.read(place, out)
            except ShardError as error:
                self._fail(error, step, place, out)
        return batch

    def read(self, place: Place, out: Row) -> None:
        """Writes one row into `out`, arrays of as many elements as the row has tokens. Raises: ShardError."""
        done = 0
        for window, length in self.windows_of(place):
            part = out.part(done, done + length)
            self.reader(place.source).read_row(self._window(window), window.start, part)
            if done:
                part.document_ids[:] += out.document_ids[done - 1] + 1
            done += length

    def windows_of(self, place: Place) -> list[tuple[Place, int]]:
        """Returns where the row's tokens lie, window after window (nearly always in one), and how many in each."""
        course = self.course(place.source)
        tapes, left = course.tapes(place.epoch), course.era(place.n).tapes.geometry.seq_length
        found = [(place, min(left, tapes.chunk_tokens(place.tape) - place.start))]
        while (left := left - found[-1][1]) > 0:
            last, length = found[-1]
            at = tapes.at(place.epoch, place.tape, last.window, last.start) + length
            window, start = tapes.chunk(place.epoch, place.tape, at)
            found.append(
                (last._replace(window=window, start=start), min(left, tapes.chunk_tokens(place.tape)))
            )
        return found

    def place(self, source: str, n: int) -> Place:
        """Returns where the source's own sequence n lies, whichever step it comes in."""
        table, _ = self._locate((source,), np.array([0]), np.array([n]))
        return Place(source, *table[1:, 0].tolist())

    def places(self, step: int, start: int = 0, stop: int | None = None) -> list[Place]:
        """Returns the rows [start, stop) of the step's global batch.

        Rows are sorted by the tape's share of the way through its source's tapes (for tail rows: the row's through the tail),
        then source, then number, so that a tape stays with a rank from step to step and its window in that rank's memory.
        """
        batch, after = self._history.batch(step)
        num_steps = max(1, PLANNED_ROWS // batch)
        first = step - (step - 1 - after) % num_steps
        if self._plan is None or self._plan[0] != first:
            self._plan = self._planned(first, num_steps, batch)
        _, names, table = self._plan
        begin = (step - first) * batch
        mine = table[:, begin + start : begin + (batch if stop is None else stop)].T.tolist()
        return [Place(names[source], *values) for source, *values in mine]

    def _planned(self, first: int, num_steps: int, batch: int) -> tuple[int, tuple[str, ...], I64]:
        """Returns `first`, source names, and for each row of these steps of one mixture: source, n, epoch, tape, window, start."""
        rows = self._history.rows(first, num_steps)
        table, fraction = self._locate(rows.names, rows.source, rows.n)
        order = np.lexsort((rows.n, rows.source, fraction, np.arange(len(rows.n)) // batch))
        return first, rows.names, table[:, order]

    def _locate(self, names: tuple[str, ...], source: I64, n: I64) -> tuple[I64, F64]:
        """Returns source, n, epoch, tape, window, start of sequences (all of a source from one era), and how far through its
        tapes, or its tail, each one's lies."""
        least = np.full(len(names), np.iinfo(np.int64).max)
        np.minimum.at(least, source, n)
        eras = [self.course(name).era(number) for name, number in zip(names, least.tolist(), strict=True)]
        columns: I64 = np.array([era.tapes.geometry.columns for era in eras], dtype=np.int64)[source].T
        offsets = np.array([(e.first + e.num_begun, e.epoch, e.tapes.geometry.seq_length) for e in eras])[
            source
        ].T
        epoch, tape, window, row = locate(n - offsets[0], *columns)
        fraction = tape / columns[2]
        table = np.stack([source, n, epoch + offsets[1], tape, window, row * offsets[2]])
        tail = np.flatnonzero((tape == TAIL) & (n >= offsets[0]))
        if len(tail):
            where = zip(source[tail].tolist(), epoch[tail].tolist(), strict=True)
            keys = [eras[s].tapes.tail_key(eras[s].epoch + e) for s, e in where]
            table[4, tail] = permute(window[tail], columns[1, tail], np.array(keys, dtype=np.uint64))
            fraction[tail] = table[4, tail] / columns[1, tail]
        for i, era in enumerate(eras):
            if least[i] < era.first + era.num_begun:
                mine = np.flatnonzero((source == i) & (n < era.first + era.num_begun))
                table[2, mine], *table[3:, mine], fraction[mine] = era.locate(n[mine])
        return table, fraction

    def pieces_of(self, place: Place) -> Pieces:
        """Returns the pieces of documents that a row holds, in order: for inspection and tests, in O(1) windows."""
        parts = []
        for window, size in self.windows_of(place):
            key = window._replace(n=0, start=0)
            if (
                self._listed is None or self._listed[0] != key
            ):  # rows of a window are asked for one after the other
                self._listed = key, self.packed(window)
            pieces = self._listed[1]
            end = np.cumsum(pieces.length)
            begin = end - pieces.length
            start, stop = window.start, window.start + size
            inside = np.flatnonzero((end > start) & (begin < stop))
            skip = np.maximum(start - begin[inside], 0)
            length = np.minimum(end[inside], stop) - begin[inside] - skip
            parts.append(pieces.cut(Cuts(inside, skip, length), np.ones_like(end)))
        return Pieces(*map(np.concatenate, zip(*parts, strict=True)))

    def documents(self, step: int, limit: int) -> list[str]:
        """Returns the file, document and token range of the first `limit` pieces of the step's global batch."""
        found: list[str] = []
        for place in self.places(step):
            pieces, paths = self.pieces_of(place), self.reader(place.source).source.paths
            columns = (
                column.tolist() for column in (pieces.file, pieces.document, pieces.start, pieces.length)
            )
            for file, document, start, length in zip(*columns, strict=True):
                if len(found) == limit:
                    return found
                found.append(f"{paths[file]} document {document} [{start}, {start + length})")
        return found

    def packed(self, place: Place) -> Pieces:
        """Returns all pieces of the window (or tail row) in which a row begins, in the order of its tokens. Raises: ShardError."""
        tapes, reader = self.course(place.source).tapes(place.epoch), self.reader(place.source)
        size = tapes.geometry.seq_length
        if place.tape == TAIL:
            return reader.pack([tapes.tail_start(place.epoch, place.window)], size, None)
        key = tapes.piece_key(place.epoch, place.tape, place.window)

        def pack(lengths: I64) -> Cuts:
            if self._section.packing == "bestfit":
                return pack_bestfit(lengths, key, size)
            return pack_concat(lengths, key)

        starts = tapes.window_blocks(place.epoch, place.tape, place.window)
        return reader.pack(starts, tapes.geometry.block_tokens, pack)

    def _window(self, place: Place) -> Window:
        if place.tape == TAIL:
            return self.reader(place.source).window(self.packed(place))
        key = (place.source, place.epoch, place.tape, place.window)
        window = self._windows.get(key)
        if window is None:
            window = self.reader(place.source).window(self.packed(place))
            self._windows.put(key, window, window.cost)
        return window

    def _fail(self, error: ShardError, step: int, place: Place, out: Row) -> None:
        where = f"{place.source} row {place.n}, step {step}"
        if self._section.on_missing != "mask" or isinstance(error, TokenError):
            raise type(error)(f"{error} [{where}]") from error
        self._masked[step] += 1
        logger.warning("row masked: %s [%s]", error, where)
        out.tokens.fill(self._corpus.sep_token)
        out.labels.fill(IGNORED_LABEL)
        out.positions[:] = np.arange(len(out.positions))
        out.document_ids.fill(0)

    def num_masked_rows(self, step: int) -> int:
        """Returns how many rows of this rank were masked up to `step`."""
        return sum(count for masked, count in self._masked.items() if masked <= step)

    def reader(self, name: str) -> SourceReader:
        """Returns what reads a source. Raises: ValueError if it is not among those opened."""
        if name not in self._readers:
            raise ValueError(
                f"source ({name}) of this step is not among the sources opened; add it to --datasets"
            )
        return self._readers[name]

    def course(self, name: str) -> Course:
        """Returns the addressing of a source, one that is no longer used too."""
        if name not in self._courses:
            num_tokens, cuts = self._known[name][2], []
            for segment in self._history.lengths():
                size = segment.seq_length
                fit = self._fit.get(str(size), {}).get(name)
                if fit:  # else it is not used in that length
                    cuts.append((segment.base.get(name, 0), Geometry(size, num_tokens // size, *fit)))
            self._courses[name] = Course(name, num_tokens, self._seed, cuts)
        return self._courses[name]

    def _prepare(self, step: int) -> list[str]:
        """Fits sources used for the first time (in this length), checks the size of the corpus, finds the last step allowed.

        Returns what a change of the length leaves out, a line for each source in the middle of an epoch.
        """
        size, passed_over = self._section.seq_length, []
        fit = self._fit.setdefault(str(size), {})
        self._courses: dict[str, Course] = {}
        for name, quota in self._quotas.items():
            if name not in fit:
                rows = self._known[name][2] // size
                g = fit_geometry(rows, size, quota / NUM_SLOTS, self._section.logical_shards)
                fit[name] = [g.num_tapes, g.blocks_per_window, g.block_tokens]
                era = self.course(name).eras[-1]
                if era.num_begun or era.passed_over:
                    passed_over.append(
                        f"source {name}: {era.passed_over:,} tokens of the epoch under way are passed over, {era.num_begun:,} rows"
                    )
        num_rows = sum(self._known[name][2] // size for name in self._quotas)
        if num_rows < self.global_batch_size:
            raise ValueError(
                f"--global_batch_size ({self.global_batch_size}) must be at most the {num_rows} sequences of the corpus; "
                "lower the batch, lower --seq_length or add data"
            )
        self._plan = None
        self._listed = None
        tapes = sum(
            max(fits[name][0] for fits in self._fit.values() if name in fits) for name in self._quotas
        )
        room = WINDOW_CACHE_BYTES + WINDOW_CACHE_BYTES_PER_TAPE * tapes
        self._windows: Lru[tuple[str, int, int, int], Window] = Lru(room)
        self.last_step: int | None = None
        limit = self._section.max_epochs
        if limit is not None:
            beyond = {
                name: self._history.first_step_beyond(name, self.course(name).rows_until(limit), step)
                for name in self._quotas
            }
            self.first_exhausted = min(beyond, key=lambda name: (beyond[name], name))
            self.last_step = beyond[self.first_exhausted] - 1
        return passed_over

    def state(self) -> dict[str, Any]:
        """Returns what, with the manifest, determines every step so far and to come: JSON values, the same on every rank."""
        return {
            "state_version": STATE_VERSION,
            "order_version": ORDER_VERSION,
            "seed": self._seed,
            "packing": self._section.packing,
            "sep_token": self._corpus.sep_token,
            "fit": {size: dict(sorted(fit.items())) for size, fit in self._fit.items()},
            "manifest": dict(sorted(self._known.items())),
            **self._history.state(),
        }

    def load(self, state: dict[str, Any], step: int) -> list[str]:
        """Continues after `step`, with the flags of this run from step + 1 on; returns what they change, in words.

        Raises: ValueError if the state is of another corpus, seed, packing or separator; for another seq_length with bestfit.
        """
        self._check_same(state)
        history = History.from_state(state)
        if history.segments[-1].after > step:
            raise ValueError(
                f"step ({step}) lies before the last change of the data state; load the checkpoint's own step"
            )
        self._known = {**state["manifest"], **self._known}
        self._fit = {size: dict(fit) for size, fit in state["fit"].items()}
        changes = history.change(step, self.global_batch_size, self._quotas, self._section.seq_length)
        changes += history.skip(self._section.skip_steps, step)
        self._history = history
        return changes + self._prepare(step)

    def _check_same(self, state: dict[str, Any]) -> None:
        mine = self.state()
        for name in ("state_version", "order_version", "seed", "packing", "sep_token"):
            if state.get(name) != mine[name]:
                raise ValueError(
                    f"{name if name.endswith('version') else '--' + name} ({mine[name]}) is {state.get(name)} in the checkpoint's data state; resume with the same "
                    "value, or take its weights alone with --load_model_only"
                )
        size, before = self._section.seq_length, state["history"][-1]["seq_length"]
        if self._section.packing == "bestfit" and size != before:
            raise ValueError(
                f"--seq_length ({size}) must stay {before} with --packing=bestfit, whose rows are packed to that length; keep it, "
                "or take the weights alone with --load_model_only"
            )
        for name, (digest, num_files, num_tokens, marks) in mine["manifest"].items():
            before = state["manifest"].get(name)
            if before is not None and before[0] != digest:
                raise ValueError(
                    f"source ({name}) has changed since the checkpoint: {num_files} shards of {num_tokens} tokens, then "
                    f"{before[1]} of {before[2]}; restore its shards, and add new ones as a source of their own"
                )
            shard = changed_shard(self.reader(name).source, before[3], marks) if before is not None else None
            if shard is not None:
                raise ValueError(
                    f"shard ({shard}) has changed since the checkpoint, though its name and counts have not; restore it, or "
                    "take the checkpoint's weights alone with --load_model_only"
                )
        lost = sorted(set(state["history"][-1]["weights"]) - set(mine["manifest"]))
        if self._corpus.discovered and lost:
            raise FileNotFoundError(
                f"source ({lost[0]}) of the checkpoint is missing in {self._corpus.files.root}; restore it, or name the "
                "sources to go on with in --datasets"
            )

    def consumption(self, step: int) -> dict[str, dict[str, float | int]]:
        """Returns by source, dropped ones too, the epochs gone through and the tokens trained on by the end of `step`."""
        tokens: Counter[str] = Counter()
        known = self._history.lengths()
        lengths = [segment for segment in known if segment.after < step] or known[:1]
        for segment, end in zip(lengths, [*(s.after for s in lengths[1:]), step], strict=True):
            before = self._history.consumed(segment.after)
            for name, rows in self._history.consumed(end).items():
                tokens[name] += (rows - before.get(name, 0)) * segment.seq_length
        epochs = {
            name: self.course(name).era(n).epochs(n) for name, n in self._history.position(step).items()
        }
        return {name: {"epoch": epoch, "tokens": tokens[name]} for name, epoch in epochs.items()}

    def close(self) -> None:
        self._files.close()
