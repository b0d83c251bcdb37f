"""Launches that are resolved without their machine and their data."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

from fms_fsdp.config import FP32, BatchPlan, Precision, TrainConfig
from fms_fsdp.config.parse import parse
from fms_fsdp.distributed.axes import ParallelDims
from fms_fsdp.distributed.runtime import pick_device
from fms_fsdp.distributed.world import World
from fms_fsdp.logs import log
from fms_fsdp.metrics.timer import LaunchPhases
from fms_fsdp.models.config import TransformerConfig
from fms_fsdp.models.variants import VARIANTS
from fms_fsdp.plan import keep, plan_here, plan_length, plan_schedule, resolve
from fms_fsdp.run import setup
from fms_fsdp.run.checks import machine_notes
from fms_fsdp.run.machine import Machine
from fms_fsdp.run.memory_budget import MemoryBudget
from fms_fsdp.run.resume import check_resume
from fms_fsdp.run.resume_point import ResumePoint
from fms_fsdp.run.run_dir import RunDir
from fms_fsdp.run.setup import Found, Launch
from fms_fsdp.run.startup_log import warn_of_slow_precision
from fms_fsdp.state import RunConfig, working_folder
from fms_fsdp.versions import versions

ALONE, ONE_ROW, ONE_PROCESS, FRESH = (
    ParallelDims("none"),
    BatchPlan(1, 1, 1),
    World(0, 0, 1, 1),
    ResumePoint(),
)


def resolved(
    cfg: TrainConfig,
    *,
    model: TransformerConfig = VARIANTS["tiny"],
    dims: ParallelDims = ALONE,
    batch: BatchPlan = ONE_ROW,
    world_size: int = 1,
    precision: Precision = FP32,
    device: str = "cpu",
    resume: ResumePoint = FRESH,
) -> RunConfig:
    """Returns the resolved config of a launch on synthetic data, with this batch.

    Raises:
        UserError: the checkpoint does not match.
    """
    num_steps = plan_length(cfg, batch, model.vocab_size, Found(resume=resume))
    run = RunConfig(
        config=cfg,
        world_size=world_size,
        device_type=device,
        dims=dims,
        batch=batch,
        model=model,
        precision=precision,
        num_steps=num_steps,
        tokenizer="",
        milestones=plan_schedule(cfg, batch, num_steps, resume.start, keep(cfg, resume)),
        versions=versions(),
        working_dir=working_folder(),
        chosen={},
    )
    check_resume(run, resume)
    return run


def planned(
    argv: Sequence[str], world: World = ONE_PROCESS, resume: ResumePoint = FRESH
) -> RunConfig:
    """Returns the resolved config of a launch up to its run directory, as `main` resolves it.

    Raises:
        UserError: the launch would be rejected.
    """
    parsed = parse(TrainConfig, argv)
    cfg, device = parsed.config, pick_device(world)
    machine = Machine.here(world, device)
    settings = resolve(cfg, machine)
    for note in [*parsed.notes, *machine_notes(cfg, machine, settings.dims)]:
        log.info("note: %s", note)
    warn_of_slow_precision(cfg.precision, machine)
    machine = machine.measured(device)
    corpus = setup.find_corpus(cfg)
    settings = settings.with_vocabulary(cfg, None if corpus is None else corpus.vocab_size)
    found = setup.find_inputs(cfg, corpus, settings.model, settings.dims)
    return plan_here(cfg, machine, replace(found, resume=resume), settings)


def launch_of(run: RunConfig) -> Launch:
    """Returns the first launch of a run on CPUs, without data."""
    nothing: Any = None
    return Launch(
        parsed=nothing,
        phases=LaunchPhases(),
        device=torch.device("cpu"),
        found=Found(),
        run=run,
        budget=budget(cpu=0),
        run_dir=RunDir(run.config),
        stream=nothing,
        data_changes=[],
        held_out=(),
    )


def machine(device_type: str = "cpu", world: World = ONE_PROCESS, **more: Any) -> Machine:
    """Returns a machine that supports every flag, except as `more` says."""
    return Machine(world, device_type, **more)


def budget(world: World = ONE_PROCESS, **available: int) -> MemoryBudget:
    """Returns the bytes that a rank may use, by type of device."""
    device_type = "cuda" if "cuda" in available else "cpu"
    return MemoryBudget(machine(device_type, world, memory=available))
