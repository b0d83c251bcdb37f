"""The loop: batches in, optimizer steps out. Knows no flag, no file format and no backend.

    next_batch → micro-steps (forward, backward) → clip → lr → optimizer step → check | report | stop | checkpoint

The loss of a step is the sum over all unmasked labels of the global batch divided by their number. The number is known before the first
backward, so every micro-step's gradient has its final weight, however labels are spread over ranks and micro-steps. FSDP averages gradients over
ranks; the factor of their number undoes that. A step whose gradient is not finite changes no weight and no moment, which the device decides by itself: nothing
is read back from it except on report steps.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import nn
from torch.profiler import record_function

from fms_fsdp.config import BatchPlan
from fms_fsdp.data.batch import IGNORED_LABEL, Batch
from fms_fsdp.data.stream import Stream
from fms_fsdp.errors import BadInput
from fms_fsdp.mesh import Mesh
from fms_fsdp.optim.optimizers import Optimizers
from fms_fsdp.optim.schedules import Schedule
from fms_fsdp.parallel.fsdp import clip_grad_norm, set_gradient_sync


@dataclass(frozen=True)
class StepResult:
    """One step's outcome, still on the device: this rank's loss sum, all ranks' label count, the gradient norm before
    clipping, and the sums over ranks of what each asked for before the step."""

    loss_sum: torch.Tensor
    num_labels: torch.Tensor
    grad_norm: torch.Tensor
    requests: torch.Tensor


@dataclass(frozen=True)
class Recipe:
    """What a step needs beside the batch; `mark(part)` is told which part of the loop has just ended."""

    model: nn.Module
    optimizers: Optimizers
    device: torch.device
    mesh: Mesh
    batch: BatchPlan
    grad_clip: float
    document_mask: bool
    schedule: Schedule
    mark: Callable[[str], None] = lambda part: None


@dataclass(frozen=True)
class Hooks:
    """What happens around steps; every rank calls each at every step, `alive` and `requests` before it and the others
    after it, in this order; `evaluate` before the first step too."""

    alive: Callable[[], None]
    requests: Callable[[int], list[int]]
    check: Callable[[int, torch.Tensor], None]
    report: Callable[[int, Batch, StepResult], None]
    profiler_step: Callable[[], None]
    should_stop: Callable[[int, torch.Tensor], bool]
    evaluate: Callable[[int], None]
    save: Callable[[int, bool], None]


def train(recipe: Recipe, stream: Stream, hooks: Hooks, start: int, num_steps: int) -> int:
    """Runs steps start+1 … num_steps and returns the last one done: `num_steps`, or fewer if a stop was asked for.

    Raises:
        BadInput: the data could not be read; the last checkpoint stands.
    """
    recipe.mark("start")
    hooks.evaluate(start)
    for step in range(start + 1, num_steps + 1):
        hooks.alive()
        try:
            with record_function("data"):
                batch = stream.next_batch()
        except (ValueError, FileNotFoundError) as error:
            raise BadInput(str(error), on_one_rank=True, data_step=step) from error
        recipe.mark("data")
        result = train_step(recipe, batch, step, hooks.requests(step))
        hooks.check(step, result.grad_norm)
        hooks.report(step, batch, result)
        hooks.profiler_step()
        stop = hooks.should_stop(step, result.requests) and step < num_steps
        recipe.mark("hooks")
        hooks.evaluate(step)
        hooks.save(step, stop)
        recipe.mark("checkpoint")
        if stop:
            return step
    return num_steps


def train_step(recipe: Recipe, batch: Batch, step: int, requests: Sequence[int] = ()) -> StepResult:
    """One optimizer step over this rank's rows of the global batch (collective: every rank).

    `requests` are added up over ranks beside the number of labels, in one message.
    """
    accum = recipe.batch.grad_accum_steps
    parameters = [parameter for parameter in recipe.model.parameters() if parameter.requires_grad]
    own_labels = int((batch.labels_BS != IGNORED_LABEL).sum())
    own = torch.tensor([own_labels * recipe.mesh.counts_for("dp"), *requests])
    sums = recipe.mesh.sum(own.to(recipe.device, non_blocking=True), "world")
    num_labels = sums[0].clamp(min=1)
    loss_sum = torch.zeros((), dtype=torch.float32, device=recipe.device)
    for micro_step, micro in enumerate(micro_batches(recipe, batch)):
        set_gradient_sync(recipe.model, last_micro_step=micro_step == accum - 1, mesh=recipe.mesh)
        with record_function("forward"):
            micro_loss, _ = recipe.model(*micro)
        with record_function("backward"):
            (micro_loss * (recipe.mesh.size("loss") / num_labels)).backward()
        loss_sum += micro_loss.detach()
    recipe.mark("forward_backward")
    with record_function("optimizer"):
        grad_norm = clip_grad_norm(parameters, recipe.grad_clip, recipe.mesh)
        recipe.optimizers.step(partial(recipe.schedule, step), grad_norm)
        recipe.optimizers.zero_grad()
    recipe.mark("optimizer")
    return StepResult(loss_sum, num_labels, grad_norm, sums[1:])


def micro_batches(recipe: Recipe, batch: Batch) -> Iterator[tuple[torch.Tensor | None, ...]]:
    """The model's arguments for each micro-step: consecutive slices of the rank's rows, on the device."""
    positions, documents = (
        (batch.positions_BS, batch.document_ids_BS) if recipe.document_mask else (None, None)
    )
    columns = (batch.tokens_BS, batch.labels_BS, positions, documents)
    moved = [
        None
        if column is None
        else column.to(recipe.device, non_blocking=True).chunk(recipe.batch.grad_accum_steps)
        for column in columns
    ]
    for micro_step in range(recipe.batch.grad_accum_steps):
        yield tuple(None if column is None else column[micro_step] for column in moved)
