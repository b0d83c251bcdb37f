"""Trains a Llama: the whole flow, once.

parse    flags → config                                               (fms_fsdp/flags.py)
resolve  machine (devices, axes, batch) → process group → inputs (data, model, room) → mesh
claim    rank 0 locks the folders and chooses the checkpoint → Spec, the one value of this launch
build    data stream → model (meta → precision → AC → compile → FSDP → init) → optimizers → load
train    train(step, hooks)                                           (fms_fsdp/train.py, hooks.py)

torchrun --nproc_per_node=8 main_training.py --model_variant=7b --sharding_strategy=hsdp --data_path=DIR
"""

# ruff: noqa: E402 - a mistyped flag is answered, and CPU and memory are set, before torch is imported
from __future__ import annotations

import atexit
import gc
import os
import sys
import threading
from pathlib import Path

from fms_fsdp.cpu_tuning import before_torch
from fms_fsdp.errors import check_installed, checking_input

check_installed()
before_torch()

from fms_fsdp.config import TrainConfig
from fms_fsdp.flags import Parsed, describe_changes, describe_flags, parse_with_origins
from fms_fsdp.run.listings import print_listing
from fms_fsdp.run.status import FINISHED, RESUME_ME, Launch
from fms_fsdp.run.stop_signal import StopSignal


def begin(argv: list[str]) -> tuple[Launch, StopSignal, Parsed[TrainConfig] | None]:
    """Listens to signals and parses the flags; None where they are refused, which `launch` has printed."""
    launch = Launch()
    signals = StopSignal(launch)
    with launch, checking_input():
        print_listing(argv)
        return launch, signals, parse_with_origins(TrainConfig, argv)
    return launch, signals, None


if __name__ == "__main__":
    begun = begin(sys.argv[1:])
    if begun[2] is None:
        sys.exit(begun[0].exit_status)

from fms_fsdp import runtime
from fms_fsdp.hooks import open_hooks
from fms_fsdp.mesh import Mesh
from fms_fsdp.observe.metrics import Clock
from fms_fsdp.optim.optimizers import build_optimizers
from fms_fsdp.parallel.compile import allow_shapes, compiles_optimizer
from fms_fsdp.parallel.parallelize import parallelize
from fms_fsdp.parts import load_part
from fms_fsdp.run.claim import claim, look_at_suspect, record_launch, restore
from fms_fsdp.run.lock import unlock_folders
from fms_fsdp.spec.data import find_inputs, with_room
from fms_fsdp.spec.machine import find_machine
from fms_fsdp.spec.resolve import Spec, open_stream
from fms_fsdp.spec.words import announce, describe
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
        signals.wait_for_agent()
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
    phases.done("group")
    with checking_input():
        inputs = find_inputs(cfg, machine)
        machine = with_room(cfg, machine, inputs)
        if parsed.dry_run:
            load_part("dry_run", folder="planner").tell_launch(parsed, machine, inputs, launch)
            return
    phases.done("data")
    mesh = Mesh(machine.dims, world.rank, machine.device.type, runtime.group_timeout(cfg.parallel))
    mesh.gather(None)  # no rank refuses and ends while another one still connects
    phases.done("group")
    with checking_input():
        spec, taken = claim(cfg, machine, inputs, mesh)
        stream = open_stream(spec)
    cfg = spec.config
    launch.steps_done = lambda: spec.start
    if spec.start == spec.num_steps:
        launch.claim(Path(cfg.output_dir))
        remedy = "raise --num_steps or choose another --run_name"
        launch.end(FINISHED, f"already finished at step {spec.start}; {remedy}")
        return runtime.log.info(launch.reason)
    with checking_input():
        facts = describe(spec)
        record_launch(launch, spec, taken)
    look_at_suspect(stream, spec, taken.suspect_step)
    runtime.log_for_files(describe_flags(parsed))
    runtime.log.info("%s\n%s", describe_changes(parsed), facts)
    announce(spec)
    phases.done("data")
    device, precision, seed = spec.device, spec.precision, cfg.training.seed
    section = cfg.parallel.for_rows(spec.seq_length)
    model = parallelize(spec.model, section, mesh, device=device, precision=precision, seed=seed)
    if spec.batch.cuts_micro_steps:
        allow_shapes(spec.batch.batch_size)
    with checking_input():
        compiled = compiles_optimizer(cfg.parallel, model, device)
        optimizers = build_optimizers(cfg.optim, model, precision, seed, compiled=compiled)
    phases.done("model")
    spec, state = restore(spec, stream, model, optimizers, mesh)
    if spec.inputs.teacher is not None:
        with checking_input():
            load_part("teacher").attach(spec.inputs.teacher, spec, model, mesh)
    phases.done("load")
    launch.steps_done = lambda: state.progress.step
    clock = Clock(device)
    with open_hooks(spec, taken.attempt, mesh, state, launch, signals, phases, clock) as hooks:
        train(recipe_of(spec, mesh), state, hooks, clock)
    tell_end(launch, state, cfg.output_dir)


def recipe_of(spec: Spec, mesh: Mesh) -> TrainStep:
    """What each step needs of the launch."""
    cfg = spec.config
    return TrainStep(
        mesh,
        spec.device,
        spec.schedule,
        spec.batch.batch_size,
        cfg.optim.grad_clip,
        cfg.data.document_mask,
        dropout_seed=cfg.training.seed if spec.model.has_dropout else None,
        vocab_size=spec.model.vocab_size,
        rows_at_once=spec.batch.rows_at_once,
    )


def tell_end(launch: Launch, state: TrainState, folder: str) -> None:
    """Says how far the run got, and whether it is finished."""
    step, stop = state.progress.step, state.progress.stop
    if state.progress.is_done:
        launch.end(FINISHED, f"finished {step} steps")
    else:
        launch.end(RESUME_ME, f"{stop}, at step {step}; start it again to go on")
    runtime.log.info("%s: %s", launch.reason, folder)


if __name__ == "__main__":
    status = run(*begun)
    if status in (1, 2) or any(thread.name.startswith("tracker ") for thread in threading.enumerate()):
        # peers may hang in a collective, or a tracker in its client: clean-up would wait for them
        os._exit(status)
    atexit.register(os._exit, status)  # what was loaded is not taken apart: that takes half a second
    atexit.register(sys.stdout.flush)
    sys.exit(status)
