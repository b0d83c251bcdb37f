"""The stages of a launch before its first step, in their order. `main` (main_training.py) calls them.

plan_launch     flags, machine, data, checkpoint → Launch; creates nothing
open_run        acquires the run directory
begin_records   config.json, log
build           mesh, model, optimizers, weights, progress
components      what the training loop calls between its steps
"""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path

from fms_fsdp.checkpoint.folders import CompleteCheckpoints, checkpoint_steps
from fms_fsdp.checkpoint.io import load_checkpoint
from fms_fsdp.checkpoint.retention import KeepPolicy
from fms_fsdp.config import TrainConfig
from fms_fsdp.config.parse import Parsed, describe_changes, describe_flags
from fms_fsdp.config.values import counted
from fms_fsdp.distributed import runtime
from fms_fsdp.distributed.mesh import Mesh
from fms_fsdp.distributed.runtime import run_long_on_rank0, run_on_rank0
from fms_fsdp.distributed.world import World
from fms_fsdp.logs import close_log_files, log, log_for_files, log_note, log_to_file, set_up_log
from fms_fsdp.metrics.profiling import StepProfiler
from fms_fsdp.metrics.timer import LaunchPhases, PhaseTimer
from fms_fsdp.optim.optimizers import build_optimizers
from fms_fsdp.parallel.compile import allow_shapes, compiles_optimizer
from fms_fsdp.parallel.parallelize import parallelize
from fms_fsdp.plan import plan_here, resolve
from fms_fsdp.run import setup, startup_log
from fms_fsdp.run.checkpoints import CheckpointManager, delete_old
from fms_fsdp.run.checks import machine_notes
from fms_fsdp.run.data_stream import check_failed_step, check_length, open_stream
from fms_fsdp.run.health import NonFiniteGuard, Watchdog
from fms_fsdp.run.logger import MetricLogger
from fms_fsdp.run.machine import Machine
from fms_fsdp.run.memory_budget import MemoryBudget
from fms_fsdp.run.resume import find_resume_point
from fms_fsdp.run.run_dir import RunDir, check_shared
from fms_fsdp.run.setup import Launch
from fms_fsdp.run.status import RunStatus
from fms_fsdp.run.stop import StopControl, StopSignals
from fms_fsdp.state import TrainState
from fms_fsdp.train import Components


def plan_launch(
    parsed: Parsed[TrainConfig], phases: LaunchPhases, at_end: ExitStack, *, notes: list[str]
) -> Launch:
    """Returns the plan of the launch, and opens its inputs; creates nothing (collective).

    Raises:
        UserError: the launch is rejected.
    """
    # Flags and this machine. A flag that is wrong in itself ends the launch before ranks connect.
    cfg = parsed.config
    world = World.from_env()
    set_up_log(world.rank, has_time=not parsed.dry_run)
    device = runtime.pick_device(world)
    machine = Machine.here(world, device)
    settings = resolve(cfg, machine)
    notes = [*notes, *machine_notes(cfg, machine, settings.dims)]
    phases.done("checks")

    # Ranks. Measuring is the first collective: none ends with an error while another still connects.
    runtime.init_distributed(cfg.parallel, cfg.training, world, device)
    phases.done("group")
    machine = machine.measured(device)

    # Data, whose vocabulary completes the model, and the inputs that must fit the model.
    corpus = setup.find_corpus(cfg)
    settings = settings.with_vocabulary(cfg, None if corpus is None else corpus.vocab_size)
    found = setup.find_inputs(cfg, corpus, settings.model, settings.dims)

    # Checkpoint. Rank 0 locks the folders that exist, so that no other launch changes them.
    run_dir = RunDir(cfg)
    at_end.callback(run_dir.close)
    if not parsed.dry_run:
        run_long_on_rank0(run_dir.lock)  # it may wait for a machine that died
    resume = find_resume_point(cfg, world, corpus, verify=not parsed.dry_run)
    found = replace(found, resume=resume)

    run = plan_here(cfg, machine, found, settings)

    # Files of the data are opened last, because the stream depends on the batch.
    stream, data_changes = open_stream(
        cfg,
        run.batch,
        run.model.vocab_size,
        corpus,
        resume,
        dp_rank=run.dims.axis_rank(world.rank, "dp"),
        pin_memory=device.type == "cuda",
    )
    at_end.callback(stream.close)
    check_length(run, stream)
    held_out = setup.open_evaluations(run, found, at_end)
    phases.done("data")

    budget = MemoryBudget(machine, found.teacher)
    return Launch(
        parsed=parsed,
        phases=phases,
        device=device,
        found=found,
        run=run,
        budget=budget,
        run_dir=run_dir,
        stream=stream,
        data_changes=data_changes,
        held_out=held_out,
        notes=tuple(notes),
    )


def log_plan(launch: Launch) -> None:
    """Logs the run before step 1, on ranks whose log is read: the memory takes time to predict."""
    run = launch.run
    budget = launch.budget
    if launch.world.rank > 0 and not run.config.log.log_all_ranks:
        return
    start = launch.found.resume.start
    lines = [
        startup_log.describe_versions(run),
        describe_changes(launch.parsed),
        startup_log.describe(run, budget, launch.stream, launch.held_out, start),
    ]
    if launch.parsed.dry_run:
        lines += startup_log.describe_prediction(run, budget)
        lines.append(startup_log.describe_steps(run, launch.start_step))
    log.info("\n".join(lines))
    startup_log.warn_of_slow_precision(run.config.precision, budget.machine)
    for note in [*launch.notes, *startup_log.advise(run, launch.stream, start)]:
        log_note(note)
    if launch.world.rank == 0 and not launch.parsed.dry_run:  # a dry run reads no tokens
        startup_log.warn_of_missing_labels(launch.stream)
    found = launch.found
    startup_log.log_startup(
        run, found.resume, launch.data_changes, budget, found.corpus, launch.held_out
    )


def open_run(launch: Launch, status: RunStatus) -> int | None:
    """Creates the run directory. Nothing was created before; from here on it is ours (collective).

    Returns the step whose data ended the last attempt.

    Raises:
        UserError: a folder cannot be written, or not all nodes see it.
    """
    run_dir = launch.run_dir
    opened = run_on_rank0(partial(run_dir.open, launch.found.resume.corrupt))
    run_dir.attempt, failed_step = opened
    check_shared(run_dir.folder, launch.world)
    if not run_dir.checkpoints.is_relative_to(run_dir.folder):
        check_shared(run_dir.checkpoints, launch.world)
    status.open(run_dir.folder, launch.start_step)  # on rank 0 before any rank continues
    return failed_step


def begin_records(launch: Launch, failed_step: int | None, at_end: ExitStack) -> None:
    """Writes config.json, and the start of the run to its log (collective).

    Raises:
        UserError: the data that ended the last attempt is still wrong.
    """
    run_dir = launch.run_dir
    rank = launch.world.rank
    run_on_rank0(partial(run_dir.write_config, launch.run))
    at_end.callback(close_log_files)
    if rank == 0:
        log_to_file(run_dir.log_file)
        log.info("run directory %s (attempt %d)", run_dir.folder, run_dir.attempt)
    elif launch.run.config.log.log_all_ranks:
        log_to_file(run_dir.folder / f"log.rank{rank}.txt")
    check_failed_step(launch.stream, failed_step, launch.start_step)
    log_plan(launch)
    log_for_files(describe_flags(launch.parsed, launch.run.used_flags))
    launch.phases.done("data")


def make_due_exports(launch: Launch, signals: StopSignals) -> bool:
    """Makes the exports that an earlier launch of a finished run has left (collective).

    Returns whether all are made: the launch may be asked to stop.
    """
    cfg = launch.run.config
    start = launch.found.resume.start
    is_main = launch.world.rank == 0
    if not cfg.checkpoint.export_interval:
        return True
    from fms_fsdp.hf.exporter import Exporter

    root = launch.run_dir.checkpoints
    exports = launch.run_dir.folder / "exports"
    exporter = Exporter(cfg.checkpoint.export_interval, root, exports, start.step, is_main=is_main)
    if not run_on_rank0(exporter.due_steps):
        return True
    signals.can_save = True  # nothing is lost: a signal ends the wait
    stop = StopControl(cfg, launch.run_dir.stop_file, signals, is_main=is_main)
    exporter.finish(lambda: None, stop.is_asked)
    exporter.close()
    policy = KeepPolicy.from_config(cfg.checkpoint)
    if is_main and policy.last and not start.non_finite_steps:
        own = [step for step in checkpoint_steps(root) if step <= start.step]
        delete_old(root, own, policy, exporter, CompleteCheckpoints())
    return not run_on_rank0(exporter.due_steps)


def log_compilation(launch: Launch) -> None:
    blocks = counted(launch.run.model.num_layers, "block")
    fact = "it may take a minute; later launches use the compiler's cache"
    log.info("compiling %s for the first step: %s", blocks, fact)


def build(launch: Launch) -> tuple[Mesh, TrainState]:
    """Returns the mesh, and the state of the run before its first step: model, optimizers, weights,
    progress (collective)."""
    run = launch.run
    cfg = run.config
    device = launch.device
    timeout = runtime.collective_timeout(cfg.parallel)
    mesh = Mesh(run.dims, launch.world.rank, device.type, timeout)
    launch.phases.done("group")

    resume = launch.found.resume
    # A model of the user may have weights that a Hugging Face checkpoint lacks.
    is_from_hf = bool(resume.hf_weights) and not run.model.model_builder
    is_loaded = is_from_hf or resume.checkpoint is not None
    model = parallelize(
        run.model,
        cfg.parallel.for_seq_length(run.seq_length),
        mesh,
        device=device,
        precision=run.precision,
        seed=None if is_loaded else cfg.training.seed,
    )
    if run.batch.ramps_micro_batch:  # a ramp of the batch has micro-batches of several sizes
        allow_shapes(run.batch.batch_size)
    optimizers = build_optimizers(
        cfg.optim,
        model,
        run.precision,
        cfg.training.seed,
        compiled=compiles_optimizer(cfg.parallel, model, device),
    )
    launch.phases.done("model")

    if resume.hf_weights:
        from fms_fsdp.hf.weights import load_weights

        load_weights(Path(resume.hf_weights), model, mesh)
    if resume.checkpoint is not None:
        load_checkpoint(
            resume.checkpoint.folder,
            model,
            None if resume.weights_only else optimizers,
            is_alone=launch.world.size == 1,
            verify=False,  # `find_resume_point` has verified it
        )
    # Only now, because until here the later checkpoints could still be needed.
    run_on_rank0(partial(launch.run_dir.rename_own, resume.superseded, "superseded"))
    run_on_rank0(partial(launch.run_dir.rename_exports, launch.start_step))
    state = setup.initial_state(run, resume, model, optimizers, launch.stream, device)
    if not launch.held_out:
        state.evaluation_pending = False  # of a launch that evaluated
    if launch.found.teacher is not None:
        from fms_fsdp.distill import attach_teacher

        attach_teacher(launch.found.teacher, run, device, model, mesh)
    launch.phases.done("load")
    return mesh, state


def components(
    launch: Launch,
    mesh: Mesh,
    state: TrainState,
    status: RunStatus,
    signals: StopSignals,
    closing: ExitStack,
) -> Components:
    """Returns what the loop calls between its steps; `closing` closes it (collective)."""
    run, run_dir, rank = launch.run, launch.run_dir, launch.world.rank
    timer = PhaseTimer(launch.device)
    metrics = MetricLogger(launch, mesh, state, timer)
    closing.callback(metrics.close)
    stacks = run_dir.folder / "stacks" / f"rank{rank}.txt"
    watchdog = Watchdog(run.config.parallel.collective_timeout_s, stacks, status)
    closing.callback(watchdog.close)
    profiler = StepProfiler(run.config.profiler, run_dir.folder, launch.device, rank)
    closing.callback(profiler.close)
    stop = StopControl(run.config, run_dir.stop_file, signals, mesh.is_main)
    guard = NonFiniteGuard(run.config, run_dir.checkpoints, mesh, state)
    estimates = startup_log.save_estimates(run, launch.found.resume, launch.budget)
    checkpoints = CheckpointManager(run, run_dir, mesh, state, guard, watchdog, metrics, *estimates)
    closing.callback(checkpoints.close)
    signals.checkpoints = checkpoints  # a second SIGINT does not interrupt a save that is written
    evaluator = sampler = None
    shared = (launch, mesh, state, metrics, watchdog, stop, timer)
    if launch.held_out:
        from fms_fsdp.evaluate import Evaluator

        evaluator = Evaluator(*shared)
    if launch.found.prompts is not None:
        from fms_fsdp.samples import Sampler

        sampler = Sampler(*shared)
    return Components(
        timer, watchdog, stop, guard, metrics, status, profiler, checkpoints, evaluator, sampler
    )
