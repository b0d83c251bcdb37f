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
from functools import partial
from importlib.util import find_spec
from pathlib import Path

import torch

from fms_fsdp import runtime
from fms_fsdp.checkpoint.folders import Checkpoint
from fms_fsdp.checkpoint.retention import check_keep_best, parse_schedule
from fms_fsdp.config import BatchPlan, TrainConfig, keep_global_batch, resolve_batch
from fms_fsdp.data.custom import load_builder
from fms_fsdp.data.held_out import HeldOut, HeldOutListing, close_held_out, open_held_out, scan_held_out
from fms_fsdp.data.shards.manifest import Corpus, open_corpus, scan_corpus
from fms_fsdp.data.stream import Stream, build_stream
from fms_fsdp.flags import Parsed
from fms_fsdp.mesh import ParallelDims, resolve_dims
from fms_fsdp.models.flops import num_params
from fms_fsdp.models.variants import LlamaConfig, resolve_model
from fms_fsdp.parallel.compile import check_compile
from fms_fsdp.predict.memory import check_memory, estimate_memory
from fms_fsdp.run.machine import check_machine
from fms_fsdp.run.resume import Start, check_model
from fms_fsdp.state import Progress

_TRACKER_PACKAGES = {"wandb", "mlflow", "aim", "codecarbon"}  # each tracker needs the package of its name


@dataclass(frozen=True)
class Machine:
    """Devices, axes and batch: what follows from the flags and the hardware."""

    world: runtime.World
    device: torch.device
    dims: ParallelDims
    batch: BatchPlan
    mixed_precision: bool


@dataclass(frozen=True)
class Plan:
    """What the checks found, alike on every rank. `corpus` is None for synthetic data and streams of the
    user's own."""

    world: runtime.World
    device: torch.device
    dims: ParallelDims
    batch: BatchPlan
    corpus: Corpus | None
    model: LlamaConfig
    mixed_precision: bool
    begin: Start
    num_steps: int
    held_out: tuple[HeldOut, ...] = ()
    held_out_listings: tuple[HeldOutListing, ...] = ()

    @property
    def checkpoint(self) -> Checkpoint | None:
        return self.begin.checkpoint

    @property
    def continues(self) -> bool:
        """Whether step, optimizer and data go on from the checkpoint."""
        return self.checkpoint is not None and self.begin.continues

    @property
    def start(self) -> int:
        """The last step already done."""
        return self.checkpoint.step if self.checkpoint is not None and self.continues else 0

    @property
    def tokens_at_start(self) -> int:
        return (
            int(self.checkpoint.state["tokens_seen"]) if self.checkpoint is not None and self.continues else 0
        )


def make_plan(parsed: Parsed[TrainConfig], world: runtime.World) -> Plan:
    """All checks at once, for a process on its own.

    Raises:
        ValueError, OSError: the first check that fails, as one line.
    """
    return check_data(parsed, find_machine(parsed, world))


def find_machine(parsed: Parsed[TrainConfig], world: runtime.World) -> Machine:
    """Devices, mesh and batch; reads no data.

    Raises:
        ValueError: the first check that fails, as one line.
    """
    cfg = parsed.config
    resolve_model(cfg.model, seq_length=cfg.data.seq_length)
    schedule = parse_schedule(cfg.checkpoint.checkpoint_schedule, cfg.checkpoint.checkpoint_interval)
    check_keep_best(cfg.checkpoint.keep_best, schedule, cfg.eval.eval_interval)
    _check_trackers(cfg.log.trackers)
    device = runtime.pick_device(world)
    dims = resolve_dims(
        cfg.parallel,
        variant=cfg.model.model_variant,
        world_size=world.world_size,
        local_world_size=world.local_world_size,
    )
    if cfg.parallel.use_torch_compile:
        check_compile(device)
    check_machine(parsed, device, dims)
    batch = resolve_batch(cfg.training, dims.size("dp"))
    mixed_precision = runtime.resolve_mixed_precision(cfg.parallel, device, cfg.keep_name)
    return Machine(world, device, dims, batch, mixed_precision)


def check_data(parsed: Parsed[TrainConfig], machine: Machine) -> Plan:
    """Data, model, memory and folders (collective: every rank; rank 0 lists the data for all).

    Raises:
        ValueError, OSError: the first check that fails, as one line.
    """
    cfg, world, device, dims, batch = (
        parsed.config,
        machine.world,
        machine.device,
        machine.dims,
        machine.batch,
    )
    corpus = _open_data(cfg)
    vocab_size = corpus.vocab_size if corpus is not None else None
    model = resolve_model(cfg.model, seq_length=cfg.data.seq_length, data_vocab_size=vocab_size)
    scan = partial(scan_held_out, cfg.eval, cfg.data, corpus, vocab_size=model.vocab_size)
    fresh, mixed_precision = Start(None, False, ""), machine.mixed_precision
    found = Plan(world, device, dims, batch, corpus, model, mixed_precision, fresh, 0)
    found = replace(found, held_out_listings=runtime.agreed(scan))
    found = start_from(parsed, replace(found, held_out=_open_held_out(cfg, found)), fresh)
    holder = torch.device("cpu") if cfg.parallel.cpu_offload else device
    estimate = estimate_memory(model, dims, mixed_precision=mixed_precision, batch=batch)
    check_memory(estimate, holder, world.local_world_size, cfg.model.model_variant)
    given = {"profiler_dir": cfg.profiler.profiler_dir, "tensorboard_dir": cfg.log.tensorboard_dir}
    for flag, folder in {"output_dir": cfg.output_dir, **given}.items():
        if folder:
            _check_writable(f"--{flag}", Path(folder))
    _check_writable("--ckpt_save_path", Path(cfg.ckpt_save_path))
    if cfg.checkpoint.save_last or cfg.checkpoint.checkpoint_interval or cfg.checkpoint.checkpoint_schedule:
        _check_disk(Path(cfg.ckpt_save_path), 12 * num_params(model))
    return found


def start_from(parsed: Parsed[TrainConfig], found: Plan, begin: Start) -> Plan:
    """`found` with `start`, and the batch and the number of steps that follow from it.

    Raises:
        ValueError: the checkpoint is of another model or batch, or already past the end.
    """
    cfg, checkpoint = parsed.config, begin.checkpoint
    found = replace(found, begin=begin)
    if checkpoint is not None:
        check_model(found.model, checkpoint)
    if checkpoint is not None and begin.continues:
        saved = checkpoint.state["resolved"]["batch"]
        batch = keep_global_batch(
            cfg.training,
            found.dims.size("dp"),
            total=saved["global_batch_size"],
            usual_rows=saved["batch_size"],
            keep_name=cfg.keep_name,
        )
        if batch.global_batch_size != found.batch.global_batch_size and found.held_out:
            close_held_out(found.held_out)
            found = replace(found, held_out=_open_held_out(cfg, replace(found, batch=batch)))
        found = replace(found, batch=batch)
    rows = found.batch.global_batch_size
    num_steps = cfg.training.steps_at(rows, found.model.max_seq_len, found.start, found.tokens_at_start)
    cfg.optim.warmup(num_steps)
    if num_steps < found.start:
        assert checkpoint is not None
        raise ValueError(
            f"--num_steps ({num_steps}) must not lie below the newest checkpoint (step {found.start} in "
            f"{checkpoint.folder.parent}); raise it or choose another --run_name"
        )
    return replace(found, num_steps=num_steps)


def start_progress(plan: Plan) -> Progress:
    """The progress of the run before the first step of this launch."""
    rows = plan.batch.global_batch_size
    tokens = rows * plan.model.max_seq_len
    return Progress(plan.start, plan.num_steps, rows, tokens, plan.tokens_at_start)


def _check_trackers(names: tuple[str, ...]) -> None:
    for name in set(names) & _TRACKER_PACKAGES:
        if find_spec(name) is None:
            raise ValueError(
                f"--trackers ({name}) needs the package {name}, which is not installed; pip install {name}"
            )


def _check_disk(folder: Path, needed: int) -> None:
    free = shutil.disk_usage(_nearest(folder)).free
    if free < needed:
        raise ValueError(
            f"--ckpt_save_path ({folder}) must have room for one checkpoint: {needed / 2**30:.1f} GiB, and "
            f"{free / 2**30:.1f} GiB are free; free some or choose another folder"
        )


def _check_writable(flag: str, folder: Path) -> None:
    """Raises ValueError where this process may not make the folder, or write in it."""
    nearest = _nearest(folder)
    if not nearest.is_dir():
        raise ValueError(
            f"{flag} ({folder}) must be a folder that can be made: {nearest} is no folder; choose another"
        )
    if not os.access(nearest, os.W_OK | os.X_OK) or os.statvfs(nearest).f_blocks == 0:  # as in /proc
        raise ValueError(f"{flag} ({folder}) must be writable; choose another or change its permissions")


def _nearest(folder: Path) -> Path:
    """The folder, or its nearest parent that exists."""
    nearest = folder.absolute()
    while not os.path.lexists(nearest):
        nearest = nearest.parent
    return nearest


def _open_held_out(cfg: TrainConfig, found: Plan) -> tuple[HeldOut, ...]:
    rows = cfg.eval.eval_steps * found.batch.global_batch_size
    return open_held_out(
        cfg.eval,
        cfg.data,
        found.corpus,
        vocab_size=found.model.vocab_size,
        max_rows=rows,
        scanned=found.held_out_listings,
    )


def _open_data(cfg: TrainConfig) -> Corpus | None:
    if cfg.data.dataset_builder:
        load_builder(cfg.data)
        return None
    if cfg.data.use_dummy_dataset:
        return None
    return open_corpus(cfg.data, listing=runtime.agreed(partial(scan_corpus, cfg.data)))


def open_stream(cfg: TrainConfig, found: Plan) -> Stream:
    """This rank's rows, from the step after the checkpoint's; logs what the flags change in a resumed run.

    Raises:
        ValueError, OSError: the checkpoint's data state is of other data, or the batch or the length do not
        fit the data.
    """
    build: Callable[..., Stream] = (
        load_builder(cfg.data) if cfg.data.dataset_builder else partial(build_stream, corpus=found.corpus)
    )
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
    elif found.checkpoint is not None and found.continues:
        try:
            changes = stream.load_state_dict(found.checkpoint.state["data"], found.start)
        except (ValueError, FileNotFoundError) as error:
            raise ValueError(f"{error}; for other data choose another --run_name") from error
        for change in changes:
            runtime.log.info("from step %d on, %s", found.start + 1, change)
    if stream.last_step is not None and found.num_steps > stream.last_step:
        raise ValueError(
            f"--num_steps ({found.num_steps}) must not exceed {stream.last_step}, the last step that "
            f"--max_epochs ({cfg.data.max_epochs:g}) "
            f"leaves the shortest source; lower it or raise --max_epochs"
        )
    return stream
