"""The training loop: the operations of a step, in their order.

The loss of a step is the sum over all unmasked labels of the global batch, divided by their number.
The number is known before the first backward pass, so the gradient of every micro-batch has its
final weight, however labels are spread over ranks and micro-batches. FSDP averages gradients over
ranks; a factor undoes that. A step whose gradient is not finite changes nothing.

While a step runs, the host reads at most flags of the step before. It waits for the device on steps
that are reported, and in every step with SGD, Adagrad, Adadelta, Adamax, RMSprop, Rprop or a user's
own optimizer, for which it reads whether the gradient is finite (optim/optimizers.py).
"""

from __future__ import annotations

import gc
import itertools
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch.profiler import record_function

from fms_fsdp.data.batch import IGNORED_LABEL, Batch, check_batch
from fms_fsdp.data.stream import TokenStream
from fms_fsdp.distributed.mesh import Mesh
from fms_fsdp.distributed.runtime import HostCopy, gather_objects
from fms_fsdp.errors import ReadFailed, RunFailed, UserError, checking_input, raise_first
from fms_fsdp.metrics.profiling import StepProfiler
from fms_fsdp.metrics.timer import PhaseTimer
from fms_fsdp.optim.schedules import Schedule
from fms_fsdp.parallel.fsdp import await_optimizer, clip_factor, set_gradient_sync
from fms_fsdp.run.checkpoints import CheckpointManager
from fms_fsdp.run.health import NonFiniteGuard, Watchdog
from fms_fsdp.run.logger import MetricLogger
from fms_fsdp.run.status import RunStatus
from fms_fsdp.run.stop import StopControl
from fms_fsdp.state import RunConfig, StepResult, TrainState

if TYPE_CHECKING:
    from fms_fsdp.evaluate import Evaluator
    from fms_fsdp.samples import Sampler


@dataclass(frozen=True)
class StepSettings:
    """The settings that are constant over the training loop.

    micro_batch_at   sequences of a micro-batch, by the sequences of the step on this rank; None: batch_size
    dropout_seed     None, unless the model has dropout
    vocab_size       `train` checks that tokens and labels are below it; None checks nothing
    gc_interval      steps between collections of Python's garbage; 0 lets Python choose
    """

    mesh: Mesh
    device: torch.device
    schedule: Schedule
    batch_size: int  # sequences of a micro-batch
    grad_clip: float
    document_mask: bool
    dropout_seed: int | None = None
    vocab_size: int | None = None
    micro_batch_at: Callable[[int], int] | None = None
    gc_interval: int = 0

    @staticmethod
    def of(run: RunConfig, mesh: Mesh, device: torch.device) -> StepSettings:
        cfg = run.config
        return StepSettings(
            mesh=mesh,
            device=device,
            schedule=run.schedule,
            batch_size=run.batch.batch_size,
            grad_clip=cfg.optim.grad_clip,
            document_mask=cfg.data.document_mask,
            dropout_seed=cfg.training.seed if run.model.has_dropout else None,
            vocab_size=run.model.vocab_size,
            micro_batch_at=run.batch.micro_batch_at,
            gc_interval=cfg.training.gc_interval,
        )

    def micro_batch_of(self, batch: Batch) -> int:
        """Returns the number of sequences in each micro-batch of this rank's batch."""
        if self.micro_batch_at is None:
            return self.batch_size
        return self.micro_batch_at(len(batch.tokens_BS))


@dataclass(frozen=True)
class Components:
    """What the loop calls between its steps; None: a flag that is off. The methods time themselves."""

    timer: PhaseTimer
    watchdog: Watchdog
    stop: StopControl
    guard: NonFiniteGuard
    metrics: MetricLogger
    status: RunStatus
    profiler: StepProfiler
    checkpoints: CheckpointManager
    evaluator: Evaluator | None
    sampler: Sampler | None

    def request_stops(self, state: TrainState) -> None:
        """Notes what this rank asks of all others, which hear of it in the step's all-reduce."""
        save_s = self.checkpoints.expected_s(state.step + 1)
        self.stop.expect(state, self.timer.totals.get("eval", 0.0), save_s)
        state.current.requests = self.stop.requests(state)

    def report(self, state: TrainState, result: StepResult) -> None:
        """Writes the log line, metrics.jsonl and the step of status.json, if a report is due."""
        with self.timer.phase("logging"):
            if self.metrics.after_step(state, result):
                self.status.save_step()

    def evaluate(self, state: TrainState) -> None:
        """Evaluates and samples what is due after a step; a stop that is requested ends both."""
        try:
            if self.evaluator is not None:
                self.evaluator.run_if_due(state)
        except ReadFailed as error:  # on every rank
            state.current.read_error = error
            self.stop.end_for_reads(state)
            return
        if self.sampler is not None:
            self.sampler.run_if_due(state)

    def save(self, state: TrainState) -> None:
        """Saves a checkpoint if it is due; that of the last step says that its evaluation is to come."""
        if state.is_done:
            state.evaluation_pending = self.evaluator is not None and self.evaluator.is_due(state)
        # The copy waits for the steps on the GPU, which is not time of the save.
        with self.timer.phase("checkpoint", synchronize=self.checkpoints.is_due(state)):
            self.checkpoints.save_if_due(state)

    def evaluate_saved_step(self, state: TrainState) -> None:
        """Evaluates the last step, whose checkpoint is written, and adds the result to it."""
        self.evaluate(state)
        with self.timer.phase("checkpoint"):
            self.checkpoints.add_evaluation(state)

    def export(self, state: TrainState) -> None:
        """Begins the export of a checkpoint that is complete, if it is due."""
        with self.timer.phase("checkpoint"):
            self.checkpoints.export_if_due(state)


def train(settings: StepSettings, state: TrainState, parts: Components) -> None:
    """Trains to the last step, or until `state.stop_reason` is set (collective: every rank).

    Raises:
        UserError: the data cannot be used; the last checkpoint is kept.
        RunFailed: gradients stay non-finite, or the last checkpoint or the records cannot be written,
            or the storage of the data fails; then the last step is saved.
    """
    begin(settings, state, parts)
    while not state.is_done and not state.stop_reason:
        parts.watchdog.alive()
        parts.request_stops(state)
        with parts.timer.phase("data"):
            state.current.batch = batch = next_batch(settings, state)
            state.current.read_error = read_error_ahead(settings, state)

        result = train_step(settings, state, batch, parts.timer)
        state.count(*_size(batch, settings.mesh))

        parts.guard.check(state.step, result.grad_norm, result.num_labels)
        parts.report(state, result)
        parts.profiler.step()
        # Before the evaluation, which a stop prevents, and the save, which it requires.
        parts.stop.update(state, HostCopy(result.requests))
        if not state.is_done:
            parts.evaluate(state)
        parts.save(state)
        if state.is_done:  # only after the save: a kill meanwhile loses no step
            parts.evaluate_saved_step(state)
        parts.export(state)
        if settings.gc_interval and state.step % settings.gc_interval == 0:
            gc.collect()
    end(settings, state, parts)


def begin(settings: StepSettings, state: TrainState, parts: Components) -> None:
    """Evaluates before the first step what is due then, or what the launch before left undone."""
    parts.timer.mark("start")
    parts.stop.check_start(state)
    if state.is_done:  # the launch before ended between its last save and the evaluation
        parts.evaluate_saved_step(state)
        parts.export(state)
    elif not state.stop_reason:
        if parts.evaluator is not None:
            parts.evaluator.run_if_due(state)
        parts.checkpoints.add_evaluation(state)
    if settings.gc_interval:  # a rank that collects lets all others wait: collect on the same steps
        gc.collect()
        gc.freeze()
        gc.disable()


def end(settings: StepSettings, state: TrainState, parts: Components) -> None:
    """Completes the counts and the records, and at the end of the run the exports; raises if one failed."""
    parts.guard.settle()
    parts.metrics.finish()
    if parts.stop.reads_fail:
        raise_read_error(settings, state, parts.checkpoints)
    if state.is_done and not state.evaluation_pending:
        parts.checkpoints.finish(state)
        parts.guard.finish()
        parts.stop.signals.can_save = True  # also without a step, a signal ends the wait
        parts.checkpoints.finish_exports(state, parts.stop.is_asked)


def raise_read_error(
    settings: StepSettings, state: TrainState, checkpoints: CheckpointManager
) -> None:
    """Saves the last step, and raises why a rank cannot read the data (collective: every rank)."""
    checkpoints.save_last_step(state)
    try:
        raise_first(gather_objects(state.current.read_error))
    except ReadFailed as error:
        raise RunFailed(f"{error}: the run resumes from step {checkpoints.newest}") from error


def read_error_ahead(settings: StepSettings, state: TrainState) -> ReadFailed | None:
    """Waits for this rank's batches of the steps after the next one; returns why one cannot be read.

    So a step begins only if its batch is known to be there: a rank without one could not take part,
    and the others would wait for it in a collective for ever. The ranks hear of the error by the
    requests of the step, one step later on a GPU (`StopControl.update`), hence one step more there.
    """
    if not isinstance(state.stream, TokenStream):  # a user's own reads no step ahead
        return None
    num_steps = 2 if settings.device.type == "cuda" else 1
    num_left = state.num_steps - state.step - 1
    return state.stream.read_error_ahead(min(num_steps, num_left))


def next_batch(settings: StepSettings, state: TrainState) -> Batch:
    """Returns this rank's batch of the next step.

    Raises:
        UserError: the data cannot be used, or does not fit the model.
        ReadFailed: the storage fails, in the first step of a launch.
    """
    with checking_input(on_one_rank=True, data_step=state.step + 1), record_function("data"):
        batch = state.stream.next_batch()
        num_sequences = len(batch.tokens_BS)
        micro_batch = settings.micro_batch_of(batch)
        if num_sequences % micro_batch:
            raise UserError(
                f"the stream returned {num_sequences} sequences; return a multiple of {micro_batch}"
            )
        if settings.vocab_size is not None:  # while on the host, where nothing waits for the check
            first = settings.mesh.axis_rank("dp") * num_sequences
            check_batch(batch, settings.vocab_size, state.step + 1, first)
    return batch


def train_step(
    settings: StepSettings, state: TrainState, batch: Batch, timer: PhaseTimer
) -> StepResult:
    """Does one optimizer step on this rank's part of the global batch (collective: every rank).

    One all-reduce sums the number of labels and the `state.current.requests` of all ranks.
    """
    mesh = settings.mesh
    model = state.model
    accum = len(batch.tokens_BS) // settings.micro_batch_of(batch)
    scale = 1.0 if state.loss_scale is None else state.loss_scale.scale
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]

    own_labels = int((batch.labels_BS != IGNORED_LABEL).sum()) * mesh.counts_for("dp")
    cannot_read = int(state.current.read_error is not None)
    own = torch.tensor([own_labels, *state.current.requests, cannot_read])
    sums = mesh.sum(own.to(settings.device, non_blocking=True), "world")
    num_labels = sums[0]
    # FSDP averages over the ranks; the loss of the step is a mean over its labels.
    factor = mesh.size("dp_cp") / num_labels.clamp(min=1) * scale
    loss_scale = None
    if state.loss_scale is not None:
        loss_scale = factor  # fp16 gradients of the logits need it, too

    loss_sum = torch.zeros((), dtype=torch.float32, device=settings.device)
    extra: list[list[torch.Tensor]] = []  # sums of other losses, by micro-batch
    step = state.step + 1
    with state.rounding(step):
        for index, micro in enumerate(micro_batches(settings, batch, step)):
            is_last = index == accum - 1
            set_gradient_sync(model, last_micro_step=is_last, mesh=mesh)
            micro_loss, *others = model.forward_backward(
                *micro, factor=factor, loss_scale=loss_scale, mark=timer.mark
            )
            loss_sum += micro_loss
            extra.append(others)

    with record_function("optimizer"):
        grad_norm, clip = clip_factor(parameters, settings.grad_clip, mesh, scale)
        timer.mark("clip")
        tokens = state.tokens_seen + _size(batch, mesh)[1]
        rate = partial(settings.schedule, step, tokens)
        # A step without labels changes nothing, not even by weight decay: skipped as a non-finite
        # one.
        norm_or_nan = grad_norm.where(num_labels > 0, torch.nan)
        state.optimizers.step(rate, norm_or_nan, clip)
        await_optimizer(model)
        state.optimizers.zero_grad()
        if state.loss_scale is not None:
            state.loss_scale.update(grad_norm)
    timer.mark("optimizer")

    last_scale = None if state.loss_scale is None else state.loss_scale.last_scale
    extra_sums = tuple(torch.stack(values).sum() for values in zip(*extra, strict=True))
    return StepResult(loss_sum, num_labels, grad_norm, sums[1:], last_scale, extra_sums)


def _size(batch: Batch, mesh: Mesh) -> tuple[int, int]:
    """Returns the sequences and tokens of the global batch, of which `batch` is this rank's part."""
    return mesh.size("dp") * len(batch.tokens_BS), mesh.size("dp") * batch.tokens_BS.numel()


def seed_dropout(seed: int, step: int, mesh: Mesh) -> None:
    """Seeds torch for the dropout of a step, so that a resumed run repeats the masks.

    Ranks of tp, which hold copies of the same hidden states, share the seed; under sequence
    parallelism they hold different tokens, and differ. Dropout of their shards, heads and columns
    of the feed-forward layer, requires sequence parallelism (`check_layout`).
    """
    axes = ["dp", "cp", "pp"]
    if mesh.dims.sequence_parallel:
        axes.append("tp")
    ranks = ":".join(str(mesh.axis_rank(axis)) for axis in axes)
    torch.manual_seed(zlib.crc32(f"{seed}:{step}:{ranks}".encode()))


class MicroBatch(NamedTuple):
    """The sequences of one forward and backward pass, on the device."""

    tokens_BS: torch.Tensor
    labels_BS: torch.Tensor
    positions_BS: torch.Tensor | None = None  # with --document_mask
    document_ids_BS: torch.Tensor | None = None


def micro_batches(settings: StepSettings, batch: Batch, step: int) -> Iterator[MicroBatch]:
    """Yields consecutive slices of this rank's batch."""
    if settings.dropout_seed is not None:
        seed_dropout(settings.dropout_seed, step, settings.mesh)
    columns = [batch.tokens_BS, batch.labels_BS]
    if settings.document_mask:
        columns += [batch.positions_BS, batch.document_ids_BS]
    size = settings.micro_batch_of(batch)
    slices = [column.to(settings.device, non_blocking=True).split(size) for column in columns]
    return itertools.starmap(MicroBatch, zip(*slices, strict=True))
