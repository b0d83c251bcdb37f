"""What a run reads: its corpus, the model that fits it, held-out data, and room for what the run writes."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import torch

from fms_fsdp import runtime
from fms_fsdp.config import BatchPlan, TrainConfig
from fms_fsdp.config.rule import judge
from fms_fsdp.data.held_out import HeldOutListing, scan_held_out
from fms_fsdp.data.shards.manifest import Corpus, scan_corpus
from fms_fsdp.data.stream import Stream, build_stream
from fms_fsdp.errors import UserError
from fms_fsdp.models.variants import LlamaConfig, resolve_model
from fms_fsdp.optim.optimizers import checkpoint_bytes, state_bytes
from fms_fsdp.parallel.compile import compiles
from fms_fsdp.parts import load_part
from fms_fsdp.predict.memory import MemoryEstimate, estimate_memory
from fms_fsdp.predict.room import available_memory, check_memory
from fms_fsdp.spec.machine import Machine
from fms_fsdp.spec.origin import Origin
from fms_fsdp.spec.rules import FOLDERS, Folders

if TYPE_CHECKING:
    from fms_fsdp.extras.prompts import Prompts
    from fms_fsdp.extras.teacher import Teacher


@dataclass(frozen=True)
class Inputs:
    """What the checks of data found, alike on every rank.

    `corpus`: None for synthetic data and streams of the user's own. `optimizer_bytes`: of the state of the
    whole model. `prompts`: of samples during training. `available`: bytes that any rank may use, by the type
    of the device. `teacher`: of `--teacher_path`.
    """

    corpus: Corpus | None
    model: LlamaConfig
    optimizer_bytes: int
    held_out: tuple[HeldOutListing, ...]
    prompts: Prompts | None
    available: Mapping[str, int]
    teacher: Teacher | None = None


def find_inputs(cfg: TrainConfig, machine: Machine) -> Inputs:
    """Lists the data, and checks model, memory and folders (collective: every rank; rank 0 lists for all).

    Raises:
        UserError, OSError: the first check that fails, as one line.
    """
    devices = {device.type: device for device in (machine.device, torch.device("cpu"))}
    ranks = machine.world.local_world_size
    # the first thing that all do together: no rank refuses and ends while another one still connects
    least = runtime.least_of_ranks([available_memory(device, ranks) for device in devices.values()])
    corpus, precision = _open_corpus(cfg), machine.precision
    vocab_size = corpus.vocab_size if corpus is not None else None
    model = resolve_model(cfg.model, seq_length=cfg.data.seq_length, data_vocab_size=vocab_size)
    if machine.dims.divides_model:
        batch = _least_batch(cfg, model, machine)
        load_part("rules", folder="parallel").check_layout(cfg, model, machine, batch)
    if precision.float8:
        load_part("float8").check_float8(model, precision, machine.device, machine.dims.tp)
    if cfg.checkpoint.export_interval:
        load_part("hf").find_family(model)
    held_out = runtime.agreed(partial(scan_held_out, cfg.eval, cfg.data, corpus, vocab_size=model.vocab_size))
    prompts = None
    if cfg.eval.sample_interval:
        prompts = runtime.agreed(partial(load_part("prompts:scan_prompts"), cfg.eval, cfg.data, model))
    teacher = None
    if cfg.training.teacher_path:
        teacher = runtime.agreed(partial(load_part("teacher:find_teacher"), cfg, model, corpus))
    available, state = dict(zip(devices, least, strict=True)), state_bytes(cfg.optim, model, precision)
    inputs = Inputs(corpus, model, state, held_out, prompts, available, teacher)
    _check_room(cfg, with_room(cfg, machine, inputs), inputs)
    return inputs


def with_room(cfg: TrainConfig, machine: Machine, inputs: Inputs) -> Machine:
    """The machine, under fsdp where hsdp is but the default and does not fit, and fsdp does. It is decided
    anew in each launch, before the checkpoint is known: checkpoints go on under any strategy."""
    if machine.dims.strategy != "hsdp" or cfg.parallel.sharding_strategy or cfg.parallel.hsdp_shard_size:
        return machine
    batch = _least_batch(cfg, inputs.model, machine)
    need = memory_of(cfg, machine, inputs, batch)
    parts = need.by_holder(machine.device, cfg.parallel)
    if all(part.total <= inputs.available[holder.type] for holder, part in parts.items()):
        return machine
    found: Machine = load_part("auto", folder="planner").try_fsdp(cfg, machine, inputs, batch)
    return found


def _least_batch(cfg: TrainConfig, model: LlamaConfig, machine: Machine) -> BatchPlan:
    """The batch; where memory will choose its rows, the one with the fewest."""
    if cfg.training.batch_size != "auto":
        return machine.batch
    found: BatchPlan = load_part("auto", folder="planner").plans(cfg, model, machine, machine.batch)[0]
    return found


def _open_corpus(cfg: TrainConfig) -> Corpus | None:
    if cfg.data.dataset_builder:
        load_part("custom").load_builder(cfg.data)
        return None
    return None if cfg.data.use_dummy_dataset else runtime.agreed(partial(scan_corpus, cfg.data))


def _check_room(cfg: TrainConfig, machine: Machine, inputs: Inputs) -> None:
    """Raises UserError where memory or disk is too small, or a folder cannot be written."""
    need = memory_of(cfg, machine, inputs, _least_batch(cfg, inputs.model, machine))
    for holder, part in need.by_holder(machine.device, cfg.parallel).items():
        check_memory(part, holder, machine.world.local_world_size, cfg.model.name_and_sizes)
    judge(FOLDERS, Folders(cfg, _saved_bytes(cfg, machine, inputs)), {})


def _saved_bytes(cfg: TrainConfig, machine: Machine, inputs: Inputs) -> int:
    """About the bytes of a checkpoint; 0 where the run writes none."""
    section = cfg.checkpoint
    if not (section.save_last or section.checkpoint_interval or section.checkpoint_schedule):
        return 0
    return checkpoint_bytes(cfg.optim, inputs.model, machine.precision)


def memory_of(cfg: TrainConfig, machine: Machine, inputs: Inputs, batch: BatchPlan) -> MemoryEstimate:
    """What a rank needs for a step of this batch."""
    need = estimate_memory(
        inputs.model,
        machine.dims,
        cfg.parallel,
        precision=machine.precision,
        batch=batch,
        seq_length=cfg.data.seq_length,
        optimizer_bytes=inputs.optimizer_bytes,
        compiled=compiles(cfg.parallel, machine.device),
        device_type=machine.device.type,
        saved_bytes=_saved_bytes(cfg, machine, inputs) if cfg.checkpoint.async_checkpoint else 0,
    )
    tokens = batch.batch_size * cfg.data.seq_length
    return need if inputs.teacher is None else inputs.teacher.added_to(need, cfg, machine.precision, tokens)


def begin_stream(
    cfg: TrainConfig, machine: Machine, inputs: Inputs, batch: BatchPlan, origin: Origin
) -> tuple[Stream, list[str]]:
    """This rank's rows from the step after the checkpoint's, and what the flags change in them, in words.

    Raises:
        UserError, OSError: the checkpoint's data state is of other data, or the batch does not fit the data.
    """
    build: Callable[..., Stream] = partial(build_stream, corpus=inputs.corpus, rampup=batch.rampup)
    if cfg.data.dataset_builder:
        build = load_part("custom").load_builder(cfg.data)
    stream = build(
        cfg.data,
        seed=cfg.training.seed,
        vocab_size=inputs.model.vocab_size,
        global_batch_size=batch.global_batch_size,
        dp_rank=machine.dims.place(machine.world.rank, "dp"),
        dp_size=machine.dims.size("dp"),
        pin_memory=machine.device.type == "cuda",
    )
    if origin.fresh_data:
        stream.begin_after(origin.saved.step)
    elif origin.continues:
        try:
            return stream, stream.load_state_dict(origin.saved.data, origin.saved.step)
        except UserError as error:
            stream.close()
            raise UserError(f"{error}; for other data choose another --run_name") from error
    return stream, []
