"""Trains a Llama: the whole flow, once.

flags → config → machine (devices, axes, batch) → process group, mesh → plan (data, model, memory)
      → claim (rank 0 locks the folders and chooses the checkpoint) → data stream
      → model (meta → precision → AC → compile → FSDP → init) → optimizers → load → train(step, hooks)

torchrun --nproc_per_node=8 main_training.py --model_variant=7b --sharding_strategy=hsdp --data_path=DIR
"""

# ruff: noqa: E402 - a mistyped flag is answered, and CPU and memory are set, before torch is imported
from __future__ import annotations

import atexit
import gc
import os
import sys
import threading
from contextlib import ExitStack
from functools import partial
from pathlib import Path

from fms_fsdp.cpu_tuning import before_torch
from fms_fsdp.errors import check_installed, checking_input

check_installed()
before_torch()

from fms_fsdp.config import TrainConfig
from fms_fsdp.flags import Parsed, describe_changes, describe_flags, parse_with_origins
from fms_fsdp.run.questions import answer
from fms_fsdp.run.status import FINISHED, RESUME_ME, Launch
from fms_fsdp.run.stop_signal import StopSignal


def begin(argv: list[str]) -> tuple[Launch, StopSignal, Parsed[TrainConfig] | None]:
    """Listens to signals and parses the flags; None where they are refused, which `launch` has printed."""
    launch = Launch()
    signals = StopSignal(launch)
    with launch, checking_input():
        answer(argv)
        return launch, signals, parse_with_origins(TrainConfig, argv)
    return launch, signals, None


if __name__ == "__main__":
    begun = begin(sys.argv[1:])
    if begun[2] is None:
        sys.exit(begun[0].exit_status)

from fms_fsdp import runtime
from fms_fsdp.checkpoint.checkpoints import Checkpoints
from fms_fsdp.evaluate import Evaluator, Forward
from fms_fsdp.mesh import Mesh
from fms_fsdp.observe.meter import Meter
from fms_fsdp.observe.metrics import Clock
from fms_fsdp.observe.profiler import StepProfiler
from fms_fsdp.observe.sinks import open_sinks
from fms_fsdp.observe.step_data import describe_data
from fms_fsdp.optim.optimizers import build_optimizers
from fms_fsdp.parallel.compile import compiles_optimizer
from fms_fsdp.parallel.parallelize import parallelize
from fms_fsdp.parts import load_part
from fms_fsdp.run.claim import claim, look_at_suspect, record_launch, restore
from fms_fsdp.run.describe import announce, describe, plan_saves
from fms_fsdp.run.garbage import GarbageCollector
from fms_fsdp.run.health import BadSteps, Watchdog
from fms_fsdp.run.limits import Limits
from fms_fsdp.run.lock import unlock_folders
from fms_fsdp.run.out_of_memory import explaining_out_of_memory
from fms_fsdp.run.plan import Plan, check_data, find_machine, open_stream, start_loss_scale, start_progress
from fms_fsdp.state import TrainState
from fms_fsdp.train import TrainStep, train

gc.freeze()  # what was loaded is never looked through
gc.enable()


def main(argv: list[str]) -> int:
    """One launch; returns its exit status: 0 finished, 1 failed, 2 bad input, 75 stopped early."""
    return run(*begin(argv))


def run(launch: Launch, signals: StopSignal, parsed: Parsed[TrainConfig] | None) -> int:
    """Trains with what `begin` returned; returns the exit status."""
    if parsed is not None:
        with launch:
            pretrain(parsed, launch, signals)
            runtime.stop()
        unlock_folders()
    return launch.exit_status


def pretrain(parsed: Parsed[TrainConfig], launch: Launch, signals: StopSignal) -> None:
    """Checks, claims, builds, loads and trains (collective: every rank); `launch` gets to know how it
    ended."""
    cfg, phases = parsed.config, runtime.Phases()
    phases.done("launch")
    with checking_input():
        world = runtime.World.from_env()
        runtime.set_up_log(world)
        machine = find_machine(parsed, world)
    phases.done("checks")
    runtime.start(cfg.parallel, cfg.training, world, machine.device, group=machine.dims.strategy != "none")
    mesh = Mesh(machine.dims, world.rank, machine.device.type, runtime.group_timeout(cfg.parallel))
    phases.done("group")
    with checking_input():
        taken = claim(parsed, check_data(parsed, machine), mesh)
        plan = taken.plan
        stream = open_stream(cfg, plan)
    launch.steps_done = lambda: plan.start
    if plan.start == plan.num_steps:
        launch.claim(Path(cfg.output_dir))
        remedy = "raise --num_steps or choose another --run_name"
        launch.end(FINISHED, f"already finished at step {plan.start}; {remedy}")
        return runtime.log.info(launch.reason)
    with checking_input():
        facts = describe(cfg, plan)
        record_launch(launch, cfg, taken)
    look_at_suspect(stream, taken)
    runtime.log_for_files(describe_flags(parsed))
    runtime.log.info("%s\n%s", describe_changes(parsed), facts)
    announce(cfg, plan)
    phases.done("data")
    device, precision, seed = plan.device, plan.precision, cfg.training.seed
    model = parallelize(plan.model, cfg.parallel, mesh, device=device, precision=precision, seed=seed)
    with checking_input():
        compiled = compiles_optimizer(cfg.parallel, model, device)
        optimizers = build_optimizers(cfg.optim, model, precision, seed, compiled=compiled)
    phases.done("model")
    plan, stream = restore(parsed, plan, stream, model, optimizers, mesh)
    phases.done("load")
    state = TrainState(model, optimizers, stream, start_progress(plan), start_loss_scale(cfg, plan))
    launch.steps_done = lambda: state.progress.step
    run_loop(cfg, plan, taken.attempt, mesh, state, launch, signals, phases)
    done, step = state.progress.is_done, state.progress.step
    why = f"{state.progress.stop}, at step {step}; start it again to go on"
    launch.end(FINISHED if done else RESUME_ME, f"finished {step} steps" if done else why)
    runtime.log.info("%s: %s", launch.reason, cfg.output_dir)


def run_loop(
    cfg: TrainConfig,
    plan: Plan,
    attempt: int,
    mesh: Mesh,
    state: TrainState,
    launch: Launch,
    signals: StopSignal,
    phases: runtime.Phases,
) -> None:
    """Trains to the end, or until a limit, with everything that watches over it (collective: every rank)."""
    folder, device, mask = Path(cfg.output_dir), plan.device, cfg.data.document_mask
    clock = Clock(device)
    seed = cfg.training.seed if plan.model.has_dropout else None
    size, clip, vocab_size = plan.batch.batch_size, cfg.optim.grad_clip, plan.model.vocab_size
    recipe = TrainStep(mesh, device, plan.schedule, size, clip, mask, seed, vocab_size)
    with ExitStack() as house:  # closes from the last to the first, all of them, also when a step fails
        sinks = open_sinks(cfg, mesh, attempt, clock.totals)
        house.callback(sinks.close)
        house.callback(state.stream.close)
        watchdog = Watchdog(
            cfg.parallel.collective_timeout_s, folder / "stacks", plan.world.rank, launch.fail
        )
        forward = Forward(state.model, plan.batch.batch_size, mask, device, mesh, watchdog.feed)
        profiler = StepProfiler(cfg.profiler, folder, device, plan.world.rank)
        saves, describe_step = plan_saves(cfg, plan, attempt), partial(describe_data, state.stream, mesh)
        exports = (cfg.checkpoint.export_interval, saves.root, folder / "exports", mesh)
        samples = (cfg, plan.prompts, state.model, mesh, sinks, watchdog.feed, clock.mark)
        hooks = [
            watchdog,
            BadSteps(cfg.training.max_bad_steps, describe_step, cfg.keep_name, state.loss_scale),
            Meter(cfg, plan, mesh, state, sinks, clock, phases),
            profiler,
            Limits(cfg.training, folder, mesh.is_main, signals, clock.totals, cfg.eval.eval_interval),
            Evaluator(cfg.eval, forward, plan.held_out, sinks, clock.mark),
            *([load_part("samples:Sampler")(*samples)] if plan.prompts else []),
            Checkpoints(cfg.checkpoint, saves, state, mesh, watchdog.feed, sinks.event, clock.mark),
            *([load_part("exports:Exporter")(*exports)] if cfg.checkpoint.export_interval else []),
            GarbageCollector(cfg.training.gc_interval),
        ]
        for hook in hooks:
            house.callback(hook.close)
        house.push(lambda kind, error, trace: launch.tell(error))
        house.enter_context(explaining_out_of_memory(cfg, plan))
        house.push(profiler.dump_at_failure)
        train(recipe, state, hooks, clock)


if __name__ == "__main__":
    status = run(*begun)
    if status in (1, 2) or any(thread.name.startswith("tracker ") for thread in threading.enumerate()):
        # peers may hang in a collective, or a tracker in its client: clean-up would wait for them
        os._exit(status)
    atexit.register(os._exit, status)  # what was loaded is not taken apart: that takes half a second
    atexit.register(sys.stdout.flush)
    sys.exit(status)
