"""The one value of a launch: everything that is known before step 1, alike on every rank. Nothing is written.

    flags (done by parsing) → `find_machine`: devices, axes, batch → process group
                            → `find_inputs`: data, model, room → mesh → `find_origin`: the checkpoint
                            → `resolve`: all of these → Spec

The first failure is raised, alike on every rank.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, cast

import torch

from fms_fsdp.config import BatchPlan, OptimConfig, ParallelConfig, TrainConfig, keep_global_batch
from fms_fsdp.config.ramp import BatchIntervals
from fms_fsdp.config.rule import judge
from fms_fsdp.data.held_out import HeldOut, open_held_out
from fms_fsdp.data.rows import CorpusRows
from fms_fsdp.data.stream import Stream, TokenStream
from fms_fsdp.errors import UserError
from fms_fsdp.optim.schedules import Corners, Length, Schedule, find_corners
from fms_fsdp.parts import load_part
from fms_fsdp.predict.memory import MemoryEstimate
from fms_fsdp.record import Record, working_folder
from fms_fsdp.runtime import World, log, versions
from fms_fsdp.spec.data import Inputs, begin_stream, memory_of
from fms_fsdp.spec.machine import Machine
from fms_fsdp.spec.origin import Origin
from fms_fsdp.spec.rules import CHECKPOINT, LENGTH, Continued

if TYPE_CHECKING:
    from fms_fsdp.extras.prompts import Prompts


@dataclass(frozen=True)
class Timeline:
    """Where steps and tokens of the run lie: up to `start` as the checkpoint says, later ones by the batch of
    this launch."""

    start: int  # the last step already done
    rows_at_start: int
    tokens_at_start: int
    seq_length: int
    batch: BatchPlan

    @cached_property
    def batches(self) -> BatchIntervals:
        """The batches of the steps from `start` on."""
        return BatchIntervals(self.batch.ramp, self.rows_at_start)

    def tokens_at(self, step: int) -> int:
        """Tokens of the run by the end of a step; those before `start` are shared out evenly."""
        if step < self.start:
            return self.tokens_at_start * step // self.start
        return self.tokens_at_start + self.batches.rows_of(step - self.start) * self.seq_length

    def length(self, num_steps: int) -> Length:
        """The length of a run of so many steps."""
        return Length(num_steps, self.seq_length, self.tokens_at)

    def step_at(self, tokens: int) -> int:
        """The first step by whose end so many tokens are read: the inverse of `tokens_at`."""
        if tokens < self.tokens_at_start:
            return -(-tokens * self.start // self.tokens_at_start)
        return self.start + self.batches.steps_for(-(-(tokens - self.tokens_at_start) // self.seq_length))


@dataclass(frozen=True)
class Spec(Record):
    """A launch as it will be: what is recorded of it, and what it stands on in this process.

    `epochs`: the length of the run in words, where epochs are its length.

    What was chosen by memory stands where it is read, and `chosen` names its flag. In `config` the kind of
    recomputation takes the place of `auto`, so whoever reads the flags sees what runs. The chosen rows stand
    in `batch`, and the chosen strategy in `dims`: `config` keeps their flags as the user gave them, because
    `batch_size` is part of the run's name. A resume with the same flags finds all three, and no change.
    """

    origin: Origin
    timeline: Timeline
    machine: Machine
    inputs: Inputs
    held_out: tuple[HeldOut, ...]
    epochs: str

    @property
    def world(self) -> World:
        return self.machine.world

    @property
    def device(self) -> torch.device:
        return self.machine.device

    @property
    def prompts(self) -> Prompts | None:
        return self.inputs.prompts

    @property
    def start(self) -> int:
        """The last step already done."""
        return self.timeline.start

    @property
    def seq_length(self) -> int:
        return self.timeline.seq_length

    @property
    def schedule(self) -> Schedule:
        return Schedule(self.config.optim, self.corners)

    def memory(self, section: ParallelConfig) -> MemoryEstimate:
        """What a rank of this run would need with these flags."""
        return memory_of(replace(self.config, parallel=section), self.machine, self.inputs, self.batch)


def resolve(cfg: TrainConfig, machine: Machine, inputs: Inputs, origin: Origin) -> Spec:
    """Everything that follows from the flags, the machine, the data and the checkpoint.

    Raises:
        UserError: the checkpoint is of another model, optimizer or batch, or already past the end.
    """
    batch, saved = machine.batch, origin.saved
    if origin.checkpoint is not None:
        judge(CHECKPOINT, Continued(cfg, inputs.model, origin.checkpoint, origin.continues), {})
    if origin.continues:
        batch = _kept_batch(cfg, machine, saved.record.batch)
    chosen = {"sharding_strategy": machine.why_strategy} if machine.why_strategy else {}
    if "auto" in (cfg.parallel.recompute, cfg.training.batch_size):
        before = saved.record if origin.continues else None
        cfg, batch, more = load_part("auto", folder="planner").choose_settings(
            cfg, machine, inputs, batch, before
        )
        chosen |= more
    if machine.dims.divides_model and batch != machine.batch:  # a pipeline may not be able to use this batch
        load_part("rules", folder="parallel").check_layout(cfg, inputs.model, machine, batch)
    timeline = Timeline(saved.step, saved.rows_seen, saved.tokens_seen, cfg.data.seq_length, batch)
    num_steps, epochs = _find_length(cfg, machine, inputs, origin, timeline)
    spec = Spec(
        config=cfg,
        world_size=machine.world.world_size,
        device_type=machine.device.type,
        dims=machine.dims,
        batch=batch,
        model=inputs.model,
        precision=machine.precision,
        num_steps=num_steps,
        tokenizer=inputs.corpus.tokenizer if inputs.corpus is not None else "",
        corners=kept_corners(cfg.optim, timeline.length(num_steps), origin, has_ramp=bool(batch.rampup)),
        versions=versions(),
        working_dir=working_folder(),
        chosen=chosen,
        origin=origin,
        timeline=timeline,
        machine=machine,
        inputs=inputs,
        held_out=open_held_out(cfg.eval, inputs.held_out, batch.global_batch_size),
        epochs=epochs,
    )
    judge(LENGTH, spec, {})
    return spec


def _kept_batch(cfg: TrainConfig, machine: Machine, saved: BatchPlan) -> BatchPlan:
    """The batch of a run that goes on: the checkpoint's global batch, on this number of ranks."""
    total, rows = saved.global_batch_size, saved.batch_size
    dp_size = machine.dims.size("dp")
    return keep_global_batch(cfg.training, dp_size, total=total, usual_rows=rows, keep_name=cfg.keep_name)


def _find_length(
    cfg: TrainConfig, machine: Machine, inputs: Inputs, origin: Origin, timeline: Timeline
) -> tuple[int, str]:
    """The last step of the run; and where epochs are its length, how often each source is read, in words.

    Raises:
        UserError: `--num_epochs` names no source of the mixture.
    """
    section, start = cfg.training, timeline.start
    if (epochs := section.epochs()) is None:
        args = timeline.batches, timeline.seq_length, start, timeline.tokens_at_start
        return section.steps_at(*args), ""
    stream, _ = begin_stream(cfg, machine, inputs, timeline.batch, origin)
    try:
        return cast(CorpusRows, cast(TokenStream, stream).rows).end_of_epochs(*epochs, start)
    finally:
        stream.close()


def kept_corners(section: OptimConfig, run: Length, origin: Origin, *, has_ramp: bool) -> Corners:
    """Those of the checkpoint, unless a flag of the schedule has changed: another length of the run moves
    nothing but a last phase of wsd that has not begun. A new run with a ramp of the batch counts tokens, and
    a run that goes on counts what it has counted.

    Raises:
        UserError: the decay ends before it begins.
    """
    if not origin.continues:
        return find_corners(section, run, in_tokens=has_ramp)
    saved, old = origin.saved, origin.saved.record.corners
    found = find_corners(section, run, in_tokens=old.in_tokens)
    if _shape(saved.record.config.optim) != _shape(section):
        return found
    place = saved.tokens_seen if old.in_tokens else saved.step
    if section.lr_schedule == "wsd" and place < old.decay_start:
        return replace(found, warmup=old.warmup)
    return old


def _shape(section: OptimConfig) -> tuple[object, ...]:
    return section.lr_schedule, section.spans(), section.constant_steps


def open_stream(spec: Spec) -> Stream:
    """This rank's rows, from the step after the checkpoint's; logs what the flags change in a resumed run.

    Raises:
        UserError, OSError: the checkpoint's data state is of other data, or the batch or the length do not
        fit the data.
    """
    stream, changes = begin_stream(spec.config, spec.machine, spec.inputs, spec.batch, spec.origin)
    for change in changes:
        log.info("from step %d on, %s", spec.start + 1, change)
    if stream.last_step is not None and spec.num_steps > stream.last_step:
        raise UserError(
            f"--num_steps ({spec.num_steps}) must not exceed {stream.last_step}, the last step that "
            f"--max_epochs ({spec.config.data.max_epochs:g}) "
            f"leaves the shortest source; lower the number or raise --max_epochs"
        )
    return stream
