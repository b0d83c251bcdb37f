"""Trains a Llama: `main` is the whole flow, from flags to the last checkpoint.

torchrun --nproc_per_node=8 main_training.py --model_variant=7b --data_path=DIR

plan_launch   flags, machine, data, checkpoint → RunConfig; creates nothing
open_run      acquires the run directory and begins its records
build         model, optimizers, weights, progress
wire          the components that the loop calls
train         the loop, in fms_fsdp/train.py
"""

# ruff: noqa: E402 - streams, CPU and memory are set up before anything else is imported
from __future__ import annotations

import atexit
import gc
import os
import sys
import threading
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from fms_fsdp.console import set_up_streams
from fms_fsdp.cpu_tuning import before_torch
from fms_fsdp.errors import check_installed

set_up_streams()
check_installed()
before_torch()

from fms_fsdp.config import TrainConfig
from fms_fsdp.config.parse import Parsed, describe_changes, describe_flags, parse
from fms_fsdp.config.values import counted
from fms_fsdp.models.listings import print_listing
from fms_fsdp.run.status import FINISHED, RESUME_ME, RunStatus
from fms_fsdp.run.stop import StopControl, StopSignals

# Each stage imports its modules, because torch must not be imported before `parse`.
if TYPE_CHECKING:
    import torch

    from fms_fsdp.data.stream import Stream
    from fms_fsdp.data.validation import HeldOut
    from fms_fsdp.distributed.mesh import Mesh
    from fms_fsdp.distributed.runtime import World
    from fms_fsdp.metrics.timer import LaunchPhases, PhaseTimer
    from fms_fsdp.run.memory import MemoryBudget
    from fms_fsdp.run.run_dir import RunDir
    from fms_fsdp.run.setup import Found
    from fms_fsdp.state import RunConfig, TrainState
    from fms_fsdp.train import Observers, StepSettings


STOPPED_EXPORTS = "stopped before its last exports; run the same command to make them"


@dataclass(frozen=True)
class Launch:
    """A planned launch: its settings, its inputs, and its place on disk.

    data_changes   changes of the data since the checkpoint, for the log
    notes          flags without effect, and settings of the environment that are ignored
    """

    parsed: Parsed[TrainConfig]
    phases: LaunchPhases
    device: torch.device
    found: Found
    run: RunConfig
    budget: MemoryBudget
    run_dir: RunDir
    stream: Stream
    data_changes: list[str]
    held_out: tuple[HeldOut, ...]
    notes: tuple[str, ...] = ()

    @property
    def world(self) -> World:
        return self.budget.machine.world

    @property
    def is_compiled(self) -> bool:
        return self.budget.machine.compiles(self.run.config.parallel)

    @property
    def start_step(self) -> int:
        """The last step before this launch."""
        return self.found.resume.start.step


def main(argv: list[str]) -> int:
    """Runs one launch. Exit status: 0 finished, 1 failed, 2 bad input, 75 stopped early."""
    status = RunStatus()  # reports errors in one line, writes status.json
    signals = StopSignals(status)
    with ExitStack() as at_end, status:
        # torch is not imported yet: a mistyped flag is reported at once.
        print_listing(argv)
        parsed = parse(TrainConfig, argv)

        from fms_fsdp.distributed.runtime import log
        from fms_fsdp.metrics.timer import LaunchPhases, PhaseTimer
        from fms_fsdp.train import train

        gc.freeze()  # exclude objects created by imports from every later collection
        gc.enable()
        at_end.callback(gc.unfreeze)
        at_end.callback(gc.enable)
        phases = LaunchPhases()
        phases.done("launch")

        notes = [*signals.notes, *parsed.notes]
        launch = plan_launch(parsed, phases, at_end, notes=notes)
        if parsed.dry_run:
            log_plan(launch)
            end(status, FINISHED, "dry run: nothing was written")
            return status.exit_status

        attempt, failed_step = open_run(launch, status)
        start = launch.found.resume.start
        if start.step == launch.run.num_steps and not start.evaluation_pending:
            if make_due_exports(launch, signals):
                fix = "raise --num_steps or choose another --run_name"
                end(status, FINISHED, f"already finished at step {start.step}; {fix}")
            else:
                end(status, RESUME_ME, STOPPED_EXPORTS)
            return status.exit_status
        begin_records(launch, attempt, failed_step, at_end)

        mesh, state = build(launch)

        status.current_step = lambda: state.step
        status.is_training = True
        timer = PhaseTimer(launch.device)
        with ExitStack() as closing:  # closes in reverse; reports an error before peers notice
            observers = wire(
                launch,
                mesh,
                state,
                attempt=attempt,
                timer=timer,
                status=status,
                signals=signals,
                closing=closing,
            )
            closing.push(status.report_at_exit)
            closing.enter_context(launch.budget.explaining_out_of_memory(launch.run))
            closing.push(observers.profiler.dump_at_failure)
            if launch.is_compiled and not state.is_done:
                blocks = counted(launch.run.model.num_layers, "block")
                fact = "it may take a minute; later launches use the compiler's cache"
                log.info("compiling %s for the first step: %s", blocks, fact)
            train(step_settings(launch, mesh), state, timer, observers)

        folder = launch.run_dir.folder
        exporter = observers.exporter
        if not state.is_done or state.evaluation_pending:
            reason = f"{state.stop_reason}, at step {state.step}; run the same command to resume"
            end(status, RESUME_ME, reason, folder)
        elif exporter is not None and exporter.due_steps():
            end(status, RESUME_ME, STOPPED_EXPORTS, folder)
        else:
            end(status, FINISHED, f"finished {counted(state.step, 'step')}", folder)
    signals.wait_for_agent()
    return status.exit_status


def end(status: RunStatus, outcome: str, reason: str, folder: Path | None = None) -> None:
    """Records and logs how the launch has ended."""
    from fms_fsdp.distributed.runtime import log, shut_down

    status.end(outcome, reason)
    if folder is not None:
        reason = f"{reason}: {folder}"
    log.info(reason)
    shut_down()


def plan_launch(
    parsed: Parsed[TrainConfig], phases: LaunchPhases, at_end: ExitStack, *, notes: list[str]
) -> Launch:
    """Returns the plan of the launch, and opens its inputs; creates nothing (collective).

    Raises:
        UserError: the launch is rejected.
    """
    from fms_fsdp.distributed import runtime
    from fms_fsdp.plan import plan_here, resolve
    from fms_fsdp.run import setup
    from fms_fsdp.run.checks import machine_notes
    from fms_fsdp.run.machine import Machine
    from fms_fsdp.run.memory import MemoryBudget
    from fms_fsdp.run.resume import find_resume_point
    from fms_fsdp.run.run_dir import RunDir

    # Flags and this machine. A flag that is wrong in itself ends the launch before ranks connect.
    cfg = parsed.config
    world = runtime.World.from_env()
    runtime.set_up_log(world, has_time=not parsed.dry_run)
    device = runtime.pick_device(world)
    machine = Machine.here(world, device)
    settings = resolve(cfg, machine)
    notes = [*notes, *machine_notes(cfg, machine, settings.dims)]
    phases.done("checks")
    runtime.init_distributed(cfg.parallel, cfg.training, world, device)
    phases.done("group")

    # Measuring is the first collective: no rank ends with an error while another still connects.
    machine = machine.measured(device)

    # Data. The vocabulary of the corpus completes the model, which the other inputs must fit.
    corpus = setup.find_corpus(cfg)
    settings = resolve(cfg, machine, None if corpus is None else corpus.vocab_size)
    found = setup.find_inputs(cfg, corpus, settings.model, settings.dims)

    # Checkpoint. Rank 0 locks the folders that exist, so that no other launch changes them.
    run_dir = RunDir(cfg)
    at_end.callback(run_dir.close)
    if not parsed.dry_run:
        runtime.run_on_rank0(run_dir.lock)
    resume = find_resume_point(cfg, world, corpus, verify=not parsed.dry_run)
    found = replace(found, resume=resume)

    run = plan_here(cfg, machine, found)

    # Files of the data are opened last, because the stream depends on the batch.
    stream, data_changes = setup.open_stream(
        cfg,
        run.batch,
        run.model.vocab_size,
        corpus,
        resume,
        dp_rank=run.dims.axis_rank(world.rank, "dp"),
        pin_memory=device.type == "cuda",
    )
    at_end.callback(stream.close)
    setup.check_length(run, stream)
    held_out: tuple[HeldOut, ...] = ()
    if found.held_out:
        from fms_fsdp.data.validation import close_held_out, open_held_out

        held_out = open_held_out(cfg.eval, found.held_out, run.batch.global_batch_size)
        at_end.callback(close_held_out, held_out)
    phases.done("data")
    return Launch(
        parsed=parsed,
        phases=phases,
        device=device,
        found=found,
        run=run,
        budget=MemoryBudget(machine, found.teacher),
        run_dir=run_dir,
        stream=stream,
        data_changes=data_changes,
        held_out=held_out,
        notes=tuple(notes),
    )


def log_plan(launch: Launch) -> None:
    """Logs the run before step 1, on ranks whose log is read: the memory takes time to predict."""
    from fms_fsdp.distributed.runtime import log, log_note
    from fms_fsdp.run import startup_log

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


def open_run(launch: Launch, status: RunStatus) -> tuple[int, int | None]:
    """Creates the run directory. Nothing was created before; from here on it is ours (collective).

    Returns the attempt, from 1, and the step whose data ended the last attempt.

    Raises:
        UserError: a folder cannot be written, or not all nodes see it.
    """
    from fms_fsdp.distributed.runtime import run_on_rank0
    from fms_fsdp.run.run_dir import check_shared

    run_dir = launch.run_dir
    attempt, failed_step = run_on_rank0(partial(run_dir.open, launch.found.resume.corrupt))
    check_shared(run_dir.folder, launch.world)
    if not run_dir.checkpoints.is_relative_to(run_dir.folder):
        check_shared(run_dir.checkpoints, launch.world)
    status.current_step = lambda: launch.start_step
    status.open(run_dir.folder, launch.start_step)  # on rank 0 before any rank continues
    return attempt, failed_step


def begin_records(launch: Launch, attempt: int, failed_step: int | None, at_end: ExitStack) -> None:
    """Writes config.json, and the start of the run to its log (collective).

    Raises:
        UserError: the data that ended the last attempt is still wrong.
    """
    from fms_fsdp.distributed import runtime
    from fms_fsdp.run.setup import check_failed_step

    run_dir = launch.run_dir
    rank = launch.world.rank
    runtime.run_on_rank0(partial(run_dir.write_config, launch.run, attempt))
    at_end.callback(runtime.close_log_files)
    if rank == 0:
        runtime.log_to_file(run_dir.log_file)
        runtime.log.info("run directory %s (attempt %d)", run_dir.folder, attempt)
    elif launch.run.config.log.log_all_ranks:
        runtime.log_to_file(run_dir.folder / f"log.rank{rank}.txt")
    check_failed_step(launch.stream, failed_step, launch.start_step)
    log_plan(launch)
    runtime.log_for_files(describe_flags(launch.parsed, launch.run.used_flags))
    launch.phases.done("data")


def make_due_exports(launch: Launch, signals: StopSignals) -> bool:
    """Makes the exports that an earlier launch of a finished run has left, on rank 0.

    Returns whether all are made: the launch may be asked to stop.
    """
    cfg = launch.run.config
    start = launch.found.resume.start
    if launch.world.rank > 0 or not cfg.checkpoint.export_interval:
        return True
    from fms_fsdp.checkpoint.folders import CompleteCheckpoints, checkpoint_steps
    from fms_fsdp.checkpoint.manager import delete_old
    from fms_fsdp.checkpoint.retention import KeepPolicy
    from fms_fsdp.hf.exporter import Exporter

    root = launch.run_dir.checkpoints
    exports = launch.run_dir.folder / "exports"
    exporter = Exporter(cfg.checkpoint.export_interval, root, exports, start.step, is_main=True)
    if not exporter.due_steps():
        return True
    signals.can_save = True  # nothing is lost: a signal ends the wait
    stop = StopControl(cfg.training, launch.run_dir.stop_file, signals, is_main=True)
    exporter.finish(lambda: None, stop.is_asked)
    exporter.close()
    policy = KeepPolicy.from_config(cfg.checkpoint)
    if policy.last and not start.non_finite_steps:
        own = [step for step in checkpoint_steps(root) if step <= start.step]
        delete_old(root, own, policy, exporter.due_steps, CompleteCheckpoints())
    return not exporter.due_steps()


def build(launch: Launch) -> tuple[Mesh, TrainState]:
    """Returns the mesh, and the state of the run before its first step: model, optimizers, weights,
    progress (collective)."""
    from fms_fsdp.checkpoint.io import load_checkpoint
    from fms_fsdp.distributed.mesh import Mesh
    from fms_fsdp.distributed.runtime import collective_timeout, run_on_rank0
    from fms_fsdp.optim.optimizers import build_optimizers
    from fms_fsdp.parallel.compile import allow_shapes, compiles_optimizer
    from fms_fsdp.parallel.parallelize import parallelize
    from fms_fsdp.run.setup import initial_state

    run = launch.run
    cfg = run.config
    device = launch.device
    timeout = collective_timeout(cfg.parallel)
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
    state = initial_state(run, resume, model, optimizers, launch.stream, device)
    if launch.found.teacher is not None:
        from fms_fsdp.distill import attach_teacher

        attach_teacher(launch.found.teacher, run, device, model, mesh)
    launch.phases.done("load")
    return mesh, state


def wire(
    launch: Launch,
    mesh: Mesh,
    state: TrainState,
    *,
    attempt: int,
    timer: PhaseTimer,
    status: RunStatus,
    signals: StopSignals,
    closing: ExitStack,
) -> Observers:
    """Returns the components that the loop calls; `closing` closes them (collective)."""
    from fms_fsdp.checkpoint.manager import CheckpointManager
    from fms_fsdp.distributed.runtime import sum_over_ranks
    from fms_fsdp.metrics.interval import describe_data
    from fms_fsdp.metrics.logger import MetricLogger
    from fms_fsdp.metrics.profiling import StepProfiler
    from fms_fsdp.run.health import NonFiniteGuard, Watchdog
    from fms_fsdp.run.setup import tokens_between_evaluations
    from fms_fsdp.run.startup_log import save_estimates
    from fms_fsdp.train import Observers

    run = launch.run
    cfg = run.config
    run_dir = launch.run_dir
    rank = launch.world.rank
    metrics = MetricLogger(
        run,
        launch.device,
        mesh,
        state,
        attempt,
        timer,
        launch.phases,
        memory_bytes=launch.budget.machine.memory[launch.device.type],
        is_compiled=launch.is_compiled,
    )
    closing.callback(metrics.close)
    stacks = run_dir.folder / "stacks" / f"rank{rank}.txt"
    watchdog = Watchdog(cfg.parallel.collective_timeout_s, stacks, status.fail)
    closing.callback(watchdog.close)
    profiler = StepProfiler(cfg.profiler, run_dir.folder, launch.device, rank)
    closing.callback(profiler.close)
    stop = StopControl(
        cfg.training,
        run_dir.stop_file,
        signals,
        mesh.is_main,
        eval_interval=cfg.eval.eval_interval,
        sum_over_ranks=sum_over_ranks,
    )
    is_stopped = partial(stop.interrupts, state)
    guard = NonFiniteGuard(
        state,
        cfg.training.max_bad_steps,
        run_dir.checkpoints,
        advice=f", with {cfg.keep_name}",
        describe=partial(describe_data, launch.stream, mesh),
        loss_scale=state.loss_scale,
    )
    evaluator = None
    if launch.held_out:
        from fms_fsdp.evaluate import Evaluator

        evaluator = Evaluator(
            run,
            state.model,
            launch.held_out,
            metrics,
            device=launch.device,
            mesh=mesh,
            mark=timer.mark,
            keep_alive=watchdog.alive,
            is_stopped=is_stopped,
            every_tokens=tokens_between_evaluations(cfg, launch.found.corpus),
        )
    else:
        state.evaluation_pending = False  # of a launch that evaluated
    exporter = None
    interval = cfg.checkpoint.export_interval
    if interval:
        from fms_fsdp.hf.exporter import Exporter

        exports = run_dir.folder / "exports"
        exporter = Exporter(
            interval, run_dir.checkpoints, exports, state.step, is_main=mesh.is_main
        )
    save_s, host_bytes = save_estimates(run, launch.found.resume, launch.budget)
    checkpoints = CheckpointManager(
        run,
        run_dir.checkpoints,
        attempt,
        state,
        is_main=mesh.is_main,
        settle=guard.settle,
        alive=watchdog.alive,
        event=metrics.event,
        save_s=save_s,
        host_bytes=host_bytes,
        spared_steps=tuple if exporter is None else exporter.due_steps,
    )
    closing.callback(checkpoints.close)
    if exporter is not None:
        closing.callback(exporter.close)
    signals.is_committing = lambda: checkpoints.is_committing
    sampler = None
    if launch.found.prompts is not None:
        from fms_fsdp.samples import Sampler

        sampler = Sampler(
            cfg,
            launch.found.prompts,
            state.model,
            mesh,
            metrics,
            alive=watchdog.alive,
            mark=timer.mark,
            is_stopped=is_stopped,
        )
    return Observers(
        watchdog=watchdog,
        stop=stop,
        guard=guard,
        metrics=metrics,
        status=status,
        profiler=profiler,
        evaluator=evaluator,
        sampler=sampler,
        checkpoints=checkpoints,
        exporter=exporter,
    )


def step_settings(launch: Launch, mesh: Mesh) -> StepSettings:
    """Returns the settings of a step that are constant over the training loop."""
    from fms_fsdp.train import StepSettings

    run = launch.run
    cfg = run.config
    return StepSettings(
        mesh=mesh,
        device=launch.device,
        schedule=run.schedule,
        batch_size=run.batch.batch_size,
        grad_clip=cfg.optim.grad_clip,
        document_mask=cfg.data.document_mask,
        dropout_seed=cfg.training.seed if run.model.has_dropout else None,
        vocab_size=run.model.vocab_size,
        micro_batch_at=run.batch.micro_batch_at,
        gc_interval=cfg.training.gc_interval,
    )


if __name__ == "__main__":
    exit_status = main(sys.argv[1:])
    if "torch" not in sys.modules:  # a mistyped flag
        sys.exit(exit_status)
    trackers = [each for each in threading.enumerate() if each.name.startswith("tracker ")]
    if exit_status in (1, 2) or trackers:
        # Peers may hang in a collective, or a tracker in its client: clean-up would wait for them.
        os._exit(exit_status)
    atexit.register(os._exit, exit_status)  # tearing down all modules takes half a second
    atexit.register(sys.stdout.flush)
    sys.exit(exit_status)
