"""The checks before any work: what the flags mean on this machine, in this world, with this data. Nothing is
written.

    flags (done by parsing) → `find_machine`: devices, axes, batch → process group
                            → `check_data`: data, model, memory, folders

The first failure is raised, alike on every rank. Only rank 0 lists the folders of data, once, and sends
the list to all. What depends on the checkpoint is checked by `start_from`, after rank 0 has the lock and has
chosen the checkpoint (claim.py).
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING, cast

import torch

from fms_fsdp import runtime
from fms_fsdp.checkpoint.folders import Checkpoint
from fms_fsdp.config import (
    BatchPlan,
    OptimConfig,
    ParallelConfig,
    Precision,
    TrainConfig,
    keep_global_batch,
    resolve_batch,
)
from fms_fsdp.config.ramp import BatchIntervals
from fms_fsdp.data.held_out import HeldOut, HeldOutListing, close_held_out, open_held_out, scan_held_out
from fms_fsdp.data.rows import CorpusRows
from fms_fsdp.data.shards.manifest import Corpus, scan_corpus
from fms_fsdp.data.stream import Stream, TokenStream, build_stream
from fms_fsdp.errors import UserError
from fms_fsdp.flags import Parsed
from fms_fsdp.mesh import ParallelDims, resolve_dims
from fms_fsdp.models.variants import LlamaConfig, resolve_model
from fms_fsdp.optim.optimizers import checkpoint_bytes, state_bytes, state_of_stand_in
from fms_fsdp.optim.schedules import Corners, Length, Schedule
from fms_fsdp.parts import load_part
from fms_fsdp.predict.memory import MemoryEstimate, check_memory, estimate_memory
from fms_fsdp.run.machine import check_machine
from fms_fsdp.run.resume import Start, check_model, check_same_optimizer, kept_corners
from fms_fsdp.state import Progress

if TYPE_CHECKING:
    from fms_fsdp.extras.loss_scale import LossScale
    from fms_fsdp.extras.prompts import Prompts


@dataclass(frozen=True)
class Machine:
    """Devices, axes and batch: what follows from the flags and the hardware."""

    world: runtime.World
    device: torch.device
    dims: ParallelDims
    batch: BatchPlan
    precision: Precision


@dataclass(frozen=True)
class Plan(Machine):
    """What the checks found, alike on every rank. `corpus` is None for synthetic data and streams of the
    user's own."""

    corpus: Corpus | None
    model: LlamaConfig
    begin: Start
    num_steps: int
    seq_length: int
    optimizer_bytes: int = 0  # of the state of the whole model
    schedule: Schedule = Schedule(OptimConfig(), Corners(False, 0, 0, 0))  # until the start is known
    epochs: str = ""  # in words, where they are the length of the run
    held_out: tuple[HeldOut, ...] = ()
    held_out_listings: tuple[HeldOutListing, ...] = ()
    prompts: Prompts | None = None  # of samples during training

    @property
    def checkpoint(self) -> Checkpoint | None:
        return self.begin.checkpoint

    @property
    def continues(self) -> bool:
        """Whether step, optimizer and data go on from the checkpoint."""
        return self.begin.continues

    @property
    def start(self) -> int:
        """The last step already done."""
        return int(self.begin.state.get("step", 0))

    @property
    def tokens_at_start(self) -> int:
        return int(self.begin.state.get("tokens_seen", 0))

    @property
    def rows_at_start(self) -> int:
        return int(self.begin.state.get("rows_seen", 0))

    @cached_property
    def batches(self) -> BatchIntervals:
        """The batches of the steps from `start` on."""
        return BatchIntervals(self.batch.ramp, self.rows_at_start)

    def tokens_at(self, step: int) -> int:
        """Tokens of the run by the end of a step; those before `start` are shared out evenly."""
        if step < self.start:
            return self.tokens_at_start * step // self.start
        return self.tokens_at_start + self.batches.rows_of(step - self.start) * self.seq_length

    def memory(self, section: ParallelConfig) -> MemoryEstimate:
        """What a rank of this run would need with these flags."""
        return estimate_memory(
            self.model,
            self.dims,
            section,
            precision=self.precision,
            batch=self.batch,
            seq_length=self.seq_length,
            optimizer_bytes=self.optimizer_bytes,
        )

    def step_at(self, tokens: int) -> int:
        """The first step by whose end so many tokens are read: the inverse of `tokens_at`."""
        if tokens < self.tokens_at_start:
            return -(-tokens * self.start // self.tokens_at_start)
        return self.start + self.batches.steps_for(-(-(tokens - self.tokens_at_start) // self.seq_length))


def find_machine(parsed: Parsed[TrainConfig], world: runtime.World) -> Machine:
    """Devices, mesh and batch; reads no data.

    Raises:
        UserError: the first check that fails, as one line.
    """
    cfg = parsed.config
    resolve_model(cfg.model, seq_length=cfg.data.seq_length)
    device = runtime.pick_device(world)
    dims = resolve_dims(cfg.parallel, cfg.model.name, world)
    check_machine(parsed, device, dims)
    batch = resolve_batch(cfg.training, dims.size("dp"))
    precision = runtime.resolve_precision(cfg.precision, device, cfg.keep_name)
    state_of_stand_in(cfg.optim, precision)
    return Machine(world, device, dims, batch, precision)


def check_data(parsed: Parsed[TrainConfig], machine: Machine) -> Plan:
    """Data, model, memory and folders (collective: every rank; rank 0 lists the data for all).

    Raises:
        UserError, OSError: the first check that fails, as one line.
    """
    cfg, precision, batch = parsed.config, machine.precision, machine.batch
    corpus, seq_length = _open_data(cfg), cfg.data.seq_length
    vocab_size = corpus.vocab_size if corpus is not None else None
    model = resolve_model(cfg.model, seq_length=seq_length, data_vocab_size=vocab_size)
    if precision.float8:
        load_part("float8").check_float8(model, precision, machine.device)
    if cfg.checkpoint.export_interval:
        load_part("hf").find_family(model)
    state = state_bytes(cfg.optim, model, precision)
    listings = runtime.agreed(partial(scan_held_out, cfg.eval, cfg.data, corpus, vocab_size=model.vocab_size))
    found = Plan(
        **vars(machine),
        corpus=corpus,
        model=model,
        begin=Start(None, False, ""),
        num_steps=0,
        seq_length=seq_length,
        optimizer_bytes=state,
        held_out=open_held_out(cfg.eval, listings, batch.global_batch_size),
        held_out_listings=listings,
        prompts=_find_prompts(cfg, model),
    )
    found = start_from(parsed, found, found.begin)
    for holder, part in found.memory(cfg.parallel).by_holder(machine.device, cfg.parallel).items():
        check_memory(part, holder, machine.world.local_world_size, cfg.model.name_and_sizes)
    folders = {
        "output_dir": cfg.output_dir,
        "profiler_dir": cfg.profiler.profiler_dir,
        "tensorboard_dir": cfg.log.tensorboard_dir,
        "ckpt_save_path": cfg.ckpt_save_path,
    }
    for flag, folder in folders.items():
        if folder:
            _check_writable(f"--{flag}", Path(folder))
    if cfg.checkpoint.save_last or cfg.checkpoint.checkpoint_interval or cfg.checkpoint.checkpoint_schedule:
        _check_disk(Path(cfg.ckpt_save_path), checkpoint_bytes(cfg.optim, model, precision))
    return found


def _find_prompts(cfg: TrainConfig, model: LlamaConfig) -> Prompts | None:
    """The prompts of samples during training, if there are to be any (collective: every rank)."""
    if not cfg.eval.sample_interval:
        return None
    scan: Callable[..., Prompts] = load_part("prompts:scan_prompts")
    return runtime.agreed(partial(scan, cfg.eval, cfg.data, model))


def start_from(parsed: Parsed[TrainConfig], found: Plan, begin: Start) -> Plan:
    """`found` with `start`, and the batch and the number of steps that follow from it.

    Raises:
        UserError: the checkpoint is of another model or batch, or already past the end.
    """
    cfg, checkpoint = parsed.config, begin.checkpoint
    found = replace(found, begin=begin)
    if checkpoint is not None:
        check_model(found.model, checkpoint)
    if checkpoint is not None and begin.continues:
        check_same_optimizer(cfg.optim, checkpoint)
        saved, dp_size = checkpoint.state["resolved"]["batch"], found.dims.size("dp")
        total, rows = saved["global_batch_size"], saved["batch_size"]
        batch = keep_global_batch(
            cfg.training, dp_size, total=total, usual_rows=rows, keep_name=cfg.keep_name
        )
        if batch.global_batch_size != found.batch.global_batch_size and found.held_out:
            close_held_out(found.held_out)
            held_out = open_held_out(cfg.eval, found.held_out_listings, batch.global_batch_size)
            found = replace(found, held_out=held_out)
        found = replace(found, batch=batch)
    size, epochs = found.seq_length, cfg.training.epochs()
    num_steps = cfg.training.steps_at(found.batches, size, found.start, found.tokens_at_start)
    if epochs is not None:
        num_steps, text = _end_of_epochs(cfg, found, *epochs)
        found = replace(found, epochs=text)
    if num_steps < found.start:
        assert checkpoint is not None
        raise UserError(
            f"--num_steps ({num_steps}) must not lie below the newest checkpoint (step {found.start} in "
            f"{checkpoint.folder.parent}); raise it or choose another --run_name"
        )
    length = Length(num_steps, size, found.tokens_at)
    schedule = Schedule(cfg.optim, kept_corners(cfg.optim, length, begin))
    return replace(found, num_steps=num_steps, schedule=schedule)


def start_progress(plan: Plan) -> Progress:
    """The progress of the run before the first step of this launch."""
    rows = plan.rows_at_start
    rows_at_end = rows + plan.batches.rows_of(plan.num_steps - plan.start)
    return Progress(plan.start, plan.num_steps, rows, plan.tokens_at_start, rows_at_end)


def start_loss_scale(cfg: TrainConfig, plan: Plan) -> LossScale | None:
    """The loss scale of fp16 before the first step of this launch; a run that goes on has that of its
    checkpoint."""
    if plan.precision.compute != "fp16":
        return None
    scale: LossScale = load_part("loss_scale:LossScale")(cfg.precision, plan.device)
    if saved := plan.begin.state.get("loss_scale"):
        scale.load_state_dict(saved)
    return scale


def _check_disk(folder: Path, needed: int) -> None:
    free = shutil.disk_usage(_nearest(folder)).free
    if free < needed:
        raise UserError(
            f"--ckpt_save_path ({folder}) must have room for one checkpoint: {needed / 2**30:.1f} GiB, and "
            f"{free / 2**30:.1f} GiB are free; free some or choose another folder"
        )


def _check_writable(flag: str, folder: Path) -> None:
    """Raises UserError where this process may not make the folder, or write in it."""
    nearest = _nearest(folder)
    if not nearest.is_dir():
        raise UserError(
            f"{flag} ({folder}) must be a folder that can be made: {nearest} is no folder; choose another"
        )
    if not os.access(nearest, os.W_OK | os.X_OK) or os.statvfs(nearest).f_blocks == 0:  # as in /proc
        raise UserError(f"{flag} ({folder}) must be writable; choose another or change its permissions")


def _nearest(folder: Path) -> Path:
    """The folder, or its nearest parent that exists."""
    nearest = folder.absolute()
    while not os.path.lexists(nearest):
        nearest = nearest.parent
    return nearest


def _open_data(cfg: TrainConfig) -> Corpus | None:
    if cfg.data.dataset_builder:
        load_part("custom").load_builder(cfg.data)
        return None
    if cfg.data.use_dummy_dataset:
        return None
    return runtime.agreed(partial(scan_corpus, cfg.data))


def open_stream(cfg: TrainConfig, found: Plan) -> Stream:
    """This rank's rows, from the step after the checkpoint's; logs what the flags change in a resumed run.

    Raises:
        UserError, OSError: the checkpoint's data state is of other data, or the batch or the length do not
        fit the data.
    """
    stream, changes = _begun_stream(cfg, found)
    for change in changes:
        runtime.log.info("from step %d on, %s", found.start + 1, change)
    if stream.last_step is not None and found.num_steps > stream.last_step:
        raise UserError(
            f"--num_steps ({found.num_steps}) must not exceed {stream.last_step}, the last step that "
            f"--max_epochs ({cfg.data.max_epochs:g}) "
            f"leaves the shortest source; lower it or raise --max_epochs"
        )
    return stream


def _begun_stream(cfg: TrainConfig, found: Plan) -> tuple[Stream, list[str]]:
    """This rank's rows from the step after the checkpoint's, and what the flags change in them, in words."""
    build: Callable[..., Stream] = partial(build_stream, corpus=found.corpus, rampup=found.batch.rampup)
    if cfg.data.dataset_builder:
        build = load_part("custom").load_builder(cfg.data)
    stream = build(
        cfg.data,
        seed=cfg.training.seed,
        vocab_size=found.model.vocab_size,
        global_batch_size=found.batch.global_batch_size,
        dp_rank=found.dims.place(found.world.rank, "dp"),
        dp_size=found.dims.size("dp"),
        pin_memory=found.device.type == "cuda",
    )
    if found.begin.fresh_data:
        stream.begin_after(found.start)
    elif found.continues:
        try:
            return stream, stream.load_state_dict(found.begin.state["data"], found.start)
        except UserError as error:
            stream.close()
            raise UserError(f"{error}; for other data choose another --run_name") from error
    return stream, []


def _end_of_epochs(cfg: TrainConfig, found: Plan, source: str, epochs: float) -> tuple[int, str]:
    """The first step by whose end the source, or with "" the rows of all, are gone through `epochs` times;
    and in words what every source is gone through by then.

    Raises:
        UserError: there is no such source in the mixture.
    """
    stream, _ = _begun_stream(cfg, found)
    try:
        return cast(CorpusRows, cast(TokenStream, stream).rows).end_of_epochs(source, epochs, found.start)
    finally:
        stream.close()
