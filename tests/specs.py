"""Launches that are resolved without their machine and their data."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from fms_fsdp.config import FP32, BatchPlan, Precision, TrainConfig
from fms_fsdp.config.batch import last_step
from fms_fsdp.config.parse import parse
from fms_fsdp.data.validation import scan_held_out
from fms_fsdp.distill import find_teacher
from fms_fsdp.distributed.axes import ParallelDims
from fms_fsdp.distributed.mesh import plan_dims
from fms_fsdp.distributed.runtime import World, log, pick_device, versions
from fms_fsdp.models.config import TransformerConfig
from fms_fsdp.models.variants import VARIANTS, resolve_model
from fms_fsdp.optim.schedules import Milestones
from fms_fsdp.parallel.precision import resolve_precision
from fms_fsdp.run import setup
from fms_fsdp.run.checks import check_machine, machine_notes
from fms_fsdp.run.memory import MemoryBudget
from fms_fsdp.run.resume import ResumePoint, check_resume
from fms_fsdp.run.setup import plan_schedule
from fms_fsdp.samples import read_prompts
from fms_fsdp.state import RunConfig, working_folder

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
    run = RunConfig(
        config=cfg,
        world_size=world_size,
        device_type=device,
        dims=dims,
        batch=batch,
        model=model,
        precision=precision,
        num_steps=1,
        tokenizer="",
        milestones=Milestones(False, 0, 0, 0),
        versions=versions(),
        working_dir=working_folder(),
        chosen={},
    )
    start = resume.start
    seen = start.step, start.rows_seen, start.tokens_seen
    num_steps = last_step(cfg.training, batch, run.seq_length, *seen)
    run = replace(run, num_steps=num_steps)
    run = replace(run, milestones=plan_schedule(run, resume))
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
    resolve_model(cfg.model, seq_length=cfg.data.seq_length)
    dims = plan_dims(cfg.parallel, cfg.model.name, world)
    check_machine(cfg, device, dims)
    for note in [*parsed.notes, *machine_notes(cfg, device, dims)]:
        log.info("note: %s", note)
    precision = resolve_precision(cfg.precision, device)
    setup.check_optimizer(cfg, precision)
    memory, corpus = MemoryBudget.measure(world, device), setup.find_corpus(cfg)
    vocab_size = corpus.vocab_size if corpus is not None else None
    model = resolve_model(cfg.model, seq_length=cfg.data.seq_length, data_vocab_size=vocab_size)
    setup.check_components(cfg, model, precision, device, dims)
    scan_held_out(cfg.eval, cfg.data, corpus, vocab_size=model.vocab_size)
    if cfg.eval.sample_interval:
        read_prompts(cfg.eval, cfg.data, model)
    if cfg.training.teacher_path and not dims.divides_model:
        memory = replace(memory, teacher=find_teacher(cfg, model, corpus))
    run, _ = setup.plan_run(cfg, device, dims, precision, model, corpus, resume, memory)
    check_resume(run, resume)
    return run


def budget(world: World = ONE_PROCESS, **available: int) -> MemoryBudget:
    """Returns the bytes that a rank may use, by type of device."""
    return MemoryBudget(world, available)
