"""The loop: batches in, optimizer steps out. Knows no flag, no file format and no backend.

    hooks │ next_batch → micro-steps (forward, backward) → clip → optimizer step │ hooks

The loss of a step is the sum over all unmasked labels of the global batch divided by their number. The number
is known before the first backward pass, so every micro-step's gradient has its final weight, however labels
are spread over ranks and micro-steps. FSDP averages gradients over ranks; the factor of their number undoes
that. A step whose gradient is not finite changes nothing. Nothing is read back from the device except where a
hook reports.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import repeat
from typing import Any, cast

import torch
from torch import nn
from torch.profiler import record_function

from fms_fsdp.data.batch import IGNORED_LABEL, Batch, check_batch
from fms_fsdp.errors import UserError, checking_input
from fms_fsdp.mesh import Mesh
from fms_fsdp.observe.metrics import Clock
from fms_fsdp.optim.schedules import Schedule
from fms_fsdp.parallel.fsdp import clip_grad_norm, set_gradient_sync
from fms_fsdp.parts import load_part
from fms_fsdp.state import Hook, StepResult, TrainState


@dataclass(frozen=True)
class TrainStep:
    """The settings of a step, beside the state and the batch.

    `rows_at_once`: the rows of a micro-step, by those of the step on this rank; None is always `batch_size`.
    `dropout_seed`: None, unless the model drops values. `vocab_size`: the limit of tokens and labels that
    `train` checks; None checks nothing.
    """

    mesh: Mesh
    device: torch.device
    schedule: Schedule
    batch_size: int  # rows of a micro-step
    grad_clip: float
    document_mask: bool
    dropout_seed: int | None = None
    vocab_size: int | None = None
    rows_at_once: Callable[[int], int] | None = None

    def micro_rows(self, batch: Batch) -> int:
        """The rows of each micro-step of the batch."""
        return self.batch_size if self.rows_at_once is None else self.rows_at_once(len(batch.tokens_BS))


def train(recipe: TrainStep, state: TrainState, hooks: Sequence[Hook], clock: Clock) -> None:
    """Trains to the last step, or until a hook stops the launch (collective: every rank).

    Raises:
        UserError: the data could not be read; the last checkpoint stands.
    """
    progress = state.progress
    clock.mark("start")
    while not progress.is_done and not progress.stop:
        for hook in hooks:
            hook.before_step(progress)
            clock.mark(hook.part)
            if progress.stop:
                return
        with checking_input(on_one_rank=True, data_step=progress.step + 1):
            with record_function("data"):
                progress.batch = batch = state.stream.next_batch()
            if (rows := len(batch.tokens_BS)) % (micro_rows := recipe.micro_rows(batch)):
                raise UserError(f"stream gave {rows} rows, and must give a multiple of {micro_rows}")
            if recipe.vocab_size is not None:  # on the host still, where nothing waits for it
                check_batch(batch, recipe.vocab_size, progress.step + 1, recipe.mesh.place("dp") * rows)
        clock.mark("data")
        result = train_step(recipe, state, batch, clock)
        progress.count(*_size(batch, recipe.mesh))
        for hook in hooks:
            hook.after_step(progress, result)
            clock.mark(hook.part)
    for hook in hooks:
        hook.after_training(progress)


def train_step(recipe: TrainStep, state: TrainState, batch: Batch, clock: Clock) -> StepResult:
    """One optimizer step over this rank's rows of the global batch (collective: every rank).

    The requests of all ranks are added up beside the number of labels, in one message.
    """
    mesh, model, accum = recipe.mesh, state.model, len(batch.tokens_BS) // recipe.micro_rows(batch)
    scale = 1.0 if state.loss_scale is None else state.loss_scale.scale
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    own_labels = int((batch.labels_BS != IGNORED_LABEL).sum()) * mesh.counts_for("dp")
    own = torch.tensor([own_labels, *state.progress.requests])
    sums = mesh.sum(own.to(recipe.device, non_blocking=True), "world")
    factor = mesh.size("loss") / sums[0].clamp(min=1) * scale
    known = {} if state.loss_scale is None else {"loss_scale": factor}  # fp16 cannot do without it
    loss_sum = torch.zeros((), dtype=torch.float32, device=recipe.device)
    beside: list[list[torch.Tensor]] = []
    step = state.progress.step + 1
    with state.rounding(step):
        for micro_step, micro in enumerate(micro_batches(recipe, batch, step)):
            is_last = micro_step == accum - 1
            micro_loss, *more = _forward_backward(model, micro, factor, known, is_last, mesh, clock)
            loss_sum += micro_loss
            beside.append(more)
    with record_function("optimizer"):
        if state.optimizers.clip_by_themselves:
            grad_norm = clip_grad_norm(parameters, 0.0, mesh) / scale
        else:
            grad_norm = clip_grad_norm(parameters, recipe.grad_clip, mesh, scale)
        clock.mark("clip")
        progress = state.progress
        tokens = progress.tokens_seen + _size(batch, mesh)[1]
        rate = partial(recipe.schedule, step, tokens)
        state.optimizers.step(rate, grad_norm, recipe.grad_clip, scale)
        state.optimizers.zero_grad()
        if state.loss_scale is not None:
            state.loss_scale.update(grad_norm)
    clock.mark("optimizer")
    made_with = None if state.loss_scale is None else state.loss_scale.before
    beside_sums = tuple(torch.stack(each).sum() for each in zip(*beside, strict=True))
    return StepResult(loss_sum, sums[0], grad_norm, sums[1:], made_with, beside_sums)


def _forward_backward(
    model: nn.Module,
    micro: tuple[torch.Tensor | None, ...],
    factor: torch.Tensor,
    known: Mapping[str, torch.Tensor],
    is_last: bool,
    mesh: Mesh,
    clock: Clock,
) -> tuple[torch.Tensor, ...]:
    """The passes of one micro-step, whichever layout: the summed loss, and summed losses beside it;
    in a pipeline 0 where the last stage is not."""
    if mesh.size("pp") > 1:
        losses: tuple[torch.Tensor, ...] = cast(Any, model).forward_backward(*micro, factor=factor, **known)
        clock.mark("forward_backward")
        return losses
    set_gradient_sync(model, last_micro_step=is_last, mesh=mesh)
    with record_function("forward"):
        loss, _, *beside = model(*micro, **known)
    clock.mark("forward")
    with record_function("backward"):
        (loss * factor).backward()
    clock.mark("backward")
    return loss.detach(), *beside


def _size(batch: Batch, mesh: Mesh) -> tuple[int, int]:
    """Rows and tokens of the global batch, of which `batch` is this rank's part."""
    return mesh.size("dp") * len(batch.tokens_BS), mesh.size("dp") * batch.tokens_BS.numel()


def micro_batches(recipe: TrainStep, batch: Batch, step: int) -> Iterator[tuple[torch.Tensor | None, ...]]:
    """The model's arguments for each micro-step: consecutive slices of the rank's rows, on the device."""
    mask = (batch.positions_BS, batch.document_ids_BS) if recipe.document_mask else (None, None)
    keys_B, num_rows = None, len(batch.tokens_BS)
    if recipe.dropout_seed is not None:
        first_row = recipe.mesh.place("dp") * num_rows
        keys_B = load_part("dropout").row_keys(recipe.dropout_seed, step, first_row, num_rows)
    columns: list[Iterable[torch.Tensor | None]] = []
    for column in (batch.tokens_BS, batch.labels_BS, *mask, keys_B):
        moved = None if column is None else column.to(recipe.device, non_blocking=True)
        columns.append(repeat(None) if moved is None else torch.split(moved, recipe.micro_rows(batch)))
    return zip(*columns, strict=False)
