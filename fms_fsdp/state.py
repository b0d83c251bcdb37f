"""The state of a run between two steps, and the hooks that are called around each step.

TrainState    model, optimizers, stream and progress: what a checkpoint holds
Progress      belongs to the loop; one hook writes here what other hooks need
Hook          called around every step on every rank, in the order of a list; no hook holds another
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import nn

from fms_fsdp.data.batch import Batch
from fms_fsdp.data.stream import Stream
from fms_fsdp.optim.optimizers import Optimizers

if TYPE_CHECKING:
    from fms_fsdp.extras.loss_scale import LossScale


@dataclass(frozen=True)
class StepResult:
    """One step's outcome, still on the device.

    `loss_sum`, `beside_sums` (z-loss, then the teacher's KL): of this rank; `num_labels`: of all ranks;
    `grad_norm`: before clipping, without the loss scale; `requests`: the sums over ranks of each entry of
    their `Requests` before the step; `loss_scale`: of fp16.
    """

    loss_sum: torch.Tensor
    num_labels: torch.Tensor
    grad_norm: torch.Tensor
    requests: torch.Tensor
    loss_scale: torch.Tensor | None = None
    beside_sums: tuple[torch.Tensor, ...] = ()


class Requests(NamedTuple):
    """The reasons, each 0 or 1, for which a rank asks that the launch ends after the next step; or sums over
    ranks.

    `signal`: a signal came. `file`: the stop file exists. `clock`: the time is nearly over. `records`:
    records cannot be written.
    """

    signal: int = 0
    file: int = 0
    clock: int = 0
    records: int = 0


@dataclass
class Progress:
    """Where a run is: `step` is the last step done, `start` the last one before this launch.

    rows_seen, tokens_seen    trained on by the end of `step`, over all launches of the run
    rows_at_end               of the whole run, as the flags of this launch plan it
    batch_rows, batch_tokens  of `step`

    What hooks tell the loop and one another; `Hook.tells` names the one writer of each:

    requests    what this rank asks for, sent to all ranks with the next step
    stop        why the launch ends after the step under way; empty while it goes on
    problem     why the records of this rank cannot be written; empty while they can
    validation  the last step that was evaluated, and its loss
    metrics     the finite numbers of the records of `step`, which the sinks take in
    expected_save_s  of a step: seconds that saving may take if the launch ends with it
    """

    start: int
    num_steps: int
    rows_seen: int = 0
    tokens_seen: int = 0
    rows_at_end: int = 0
    batch_rows: int = 0
    batch_tokens: int = 0
    step: int = -1
    batch: Batch | None = None
    requests: Requests = Requests()
    stop: str = ""
    problem: str = ""
    validation: tuple[int, float] | None = None
    metrics: dict[str, float] = field(default_factory=dict)
    expected_save_s: Callable[[int], float] = lambda step: 0.0

    def __post_init__(self) -> None:
        self.step = self.start
        self._before = self.rows_seen, self.tokens_seen

    def count(self, rows: int, tokens: int) -> None:
        """Takes in a step that was made of so many rows and tokens, of all ranks."""
        self.step += 1
        self.metrics = {}
        self.batch_rows, self.batch_tokens = rows, tokens
        self.rows_seen += rows
        self.tokens_seen += tokens

    @property
    def steps_of_launch(self) -> int:
        return self.step - self.start

    @property
    def seen_in_launch(self) -> tuple[int, int]:
        """Rows and tokens of this launch."""
        return self.rows_seen - self._before[0], self.tokens_seen - self._before[1]

    @property
    def is_done(self) -> bool:
        return self.step >= self.num_steps


@dataclass
class TrainState:
    """The objects that the loop changes and that a checkpoint holds.

    `rounding`: the context of the micro-steps of a step, in which weights may be rounded ones."""

    model: nn.Module
    optimizers: Optimizers
    stream: Stream
    progress: Progress
    loss_scale: LossScale | None = None
    rounding: Callable[[int], AbstractContextManager[object]] = nullcontext


class Hook:
    """Work around each step, on every rank. `part`: the part of the run that the time of a hook counts to.

    `tells`: the fields of `Progress` that this hook alone writes. `hears`: the fields that this hook reads
    after a step, as another hook wrote those fields after the same step."""

    part = "hooks"
    tells: tuple[str, ...] = ()
    hears: tuple[str, ...] = ()

    def before_step(self, progress: Progress) -> None:
        """Before step `progress.step + 1`."""

    def after_step(self, progress: Progress, result: StepResult) -> None:
        """After `progress.step`."""

    def after_training(self, progress: Progress) -> None:
        """After the last step of the launch, if none failed."""

    def close(self) -> None:
        """At the end, also when a step failed."""


def check_order(hooks: Sequence[Hook]) -> None:
    """Asserts that each field has one writer, which comes before the hooks that hear of it."""
    told: set[str] = set()
    for hook in hooks:
        assert not told & set(hook.tells), (
            f"{type(hook).__name__} tells what another hook tells: {hook.tells}"
        )
        assert told >= set(hook.hears), f"{type(hook).__name__} comes before the hooks that tell {hook.hears}"
        told |= set(hook.tells)
