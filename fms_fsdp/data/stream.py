"""The data stream: step after step, this rank's rows of the global batch, prepared ahead by one thread.

    build_stream -> CorpusRows | SyntheticRows (pure: step -> rows) -> TokenStream (position, prefetch, state)

Invariant: the stream's only state is the step last consumed; what the thread has prepared ahead is never part
of it. All ranks hold the same state. Nothing here communicates: a rank computes its rows from (dp_rank,
dp_size) and the step.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol

from fms_fsdp.config import DataConfig
from fms_fsdp.data.batch import Batch, rows_of_rank
from fms_fsdp.data.order.order import Consumption
from fms_fsdp.data.rows import CorpusRows
from fms_fsdp.data.shards.manifest import Corpus
from fms_fsdp.errors import UserError
from fms_fsdp.parts import load_part

if TYPE_CHECKING:
    from fms_fsdp.extras.synthetic import SyntheticRows

STEPS_AHEAD = 2  # that are prepared before they are asked for


class Stream(Protocol):
    """What the loop, the checkpoint and the reports need of the data: this rank's rows, step after step."""

    @property
    def last_step(self) -> int | None:
        """The last step that the data allow; None: no end."""

    @property
    def num_masked_rows(self) -> int:
        """Rows of this rank that could not be read and were masked, in this launch, up to the step last
        consumed."""

    def next_batch(self) -> Batch:
        """Returns the rows of the next step and counts it as consumed. Raises: UserError for bad data, at
        its step."""

    def batch_at(self, step: int) -> Batch | None:
        """Returns this rank's rows of any step >= 1, whatever has been consumed; None if the stream
        cannot."""

    def documents(self, step: int, limit: int = 8) -> list[str]:
        """Returns where the first `limit` pieces of the step's global batch come from, in words; [] if
        nothing tells."""

    def consumption(self) -> Consumption:
        """Returns what each source has supplied up to the step last consumed; {} if the stream does not
        count."""

    def state_dict(self) -> dict[str, Any]:
        """Returns what, with the step, resumes the stream: JSON values of a few KB, the same on every
        rank."""

    def load_state_dict(self, state: dict[str, Any], step: int) -> list[str]:
        """Continues after `step` with the flags of this run; returns what they change, a line each, to be
        logged.

        Raises: UserError if the state is of other data.
        """

    def begin_after(self, step: int) -> None:
        """Makes step + 1 the first step of the data, none of which has been seen."""

    def close(self) -> None:
        """Ends threads and closes files."""


class TokenStream:
    """The `Stream` of rows that are pure functions of the step, and of the history that a checkpoint keeps.

    `step` is the last step consumed (0 at first).
    """

    def __init__(self, rows: CorpusRows | SyntheticRows, *, dp_rank: int, dp_size: int) -> None:
        self.rows = rows
        self.step = 0
        self._dp_rank, self._dp_size = dp_rank, dp_size
        self._lock = threading.Lock()
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="data")  # starts its thread when it is used
        self._ahead: deque[Future[Batch]] = deque()

    @property
    def last_step(self) -> int | None:
        return self.rows.last_step

    def next_batch(self) -> Batch:
        """Returns the rows of step `step` + 1 and counts it as consumed; errors of the thread appear here, at
        their step.

        Raises: ShardError naming file, document and step; UserError at the end that --max_epochs sets.
        """
        if self.last_step is not None and self.step >= self.last_step:
            raise UserError(
                f"max_epochs is reached after step {self.last_step} by source {self.rows.first_exhausted}; "
                "lower --num_steps to that step, lower the source's weight or raise --max_epochs"
            )
        self._fill()
        batch = self._ahead[0].result()
        self._ahead.popleft()
        self.step += 1
        self._fill()
        return batch

    def batch_at(self, step: int) -> Batch:
        with self._lock:
            return self.rows.batch(step, self._dp_rank, self._dp_size)

    def documents(self, step: int, limit: int = 8) -> list[str]:
        with self._lock:
            return self.rows.documents(step, limit)

    def consumption(self) -> Consumption:
        return self.rows.consumption(self.step)

    @property
    def num_masked_rows(self) -> int:
        return self.rows.num_masked_rows(self.step)

    def state_dict(self) -> dict[str, Any]:
        return self.rows.state()

    def load_state_dict(self, state: dict[str, Any], step: int) -> list[str]:
        self._drop_ahead()
        changes = self.rows.load(state, step)
        self.step = step
        return changes

    def begin_after(self, step: int) -> None:
        self._drop_ahead()
        self.rows.begin_after(step)
        self.step = step

    def close(self) -> None:
        self._drop_ahead()
        self._pool.shutdown()
        self.rows.close()

    def __enter__(self) -> TokenStream:
        return self

    def __exit__(self, *raised: object) -> None:
        self.close()

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
                future.exception()  # waits; what it says concerns steps that are not wanted any more
        self._ahead.clear()


def build_stream(
    section: DataConfig,
    corpus: Corpus | None,
    *,
    seed: int,
    vocab_size: int,
    global_batch_size: int,
    dp_rank: int,
    dp_size: int,
    rampup: tuple[int, ...] = (),
    pin_memory: bool = False,
) -> TokenStream:
    """Returns the stream of this rank: of synthetic tokens if `corpus` is None.

    `rampup`: start, increment and samples of a ramp to `global_batch_size`.

    Raises: UserError if the batch cannot be shared out or is larger than the corpus, or for weights too
    small.
    """
    rows_of_rank(global_batch_size, dp_rank, dp_size)
    if corpus is not None and corpus.sep_token >= vocab_size:
        raise UserError(
            f"sep_token ({corpus.sep_token}) must be below vocab_size ({vocab_size}); correct one of the "
            "two numbers"
        )
    make: Callable[..., CorpusRows | SyntheticRows] = (
        load_part("synthetic:SyntheticRows") if corpus is None else partial(CorpusRows, corpus=corpus)
    )
    rows = make(
        section,
        seed=seed,
        vocab_size=vocab_size,
        global_batch_size=global_batch_size,
        rampup=rampup,
        pin_memory=pin_memory,
    )
    return TokenStream(rows, dp_rank=dp_rank, dp_size=dp_size)
