"""Trains a Llama: the whole flow, once.

flags → config → machine (devices, mesh, batch) → process group → checks of data, model, memory; nothing written yet
      → claim (rank 0 locks the folders and chooses the checkpoint) → data stream → model (meta → AC → compile → FSDP → init)
      → optimizer → load → loop → reports, checkpoints, traces

torchrun --nproc_per_node=8 main_training.py --model_variant=7b --sharding_strategy=hsdp --data_path=DIR
"""

from __future__ import annotations

import os
import sys
import threading
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from fms_fsdp.config import TrainConfig
from fms_fsdp.cpu_threads import set_thread_waiting
from fms_fsdp.errors import RunFailed, checking_input
from fms_fsdp.flags import Parsed, describe, parse_with_origins
from fms_fsdp.run.status import FINISHED, RESUME_ME, Launch
from fms_fsdp.run.stop_signal import StopSignal

if TYPE_CHECKING:
    from fms_fsdp.data.stream import Stream
    from fms_fsdp.mesh import Mesh
    from fms_fsdp.models.llama import Llama
    from fms_fsdp.observe.report import Reporter
    from fms_fsdp.optim.optimizers import Optimizers
    from fms_fsdp.optim.schedules import Schedule
    from fms_fsdp.run.limits import Limits
    from fms_fsdp.run.plan import Machine, Preflight
    from fms_fsdp.runtime import Phases
    from fms_fsdp.saving import Saver


def main(argv: list[str]) -> int:
    """One launch; returns its exit status: 0 finished, 1 failed, 2 bad input, 75 stopped early."""
    set_thread_waiting()  # before torch is imported
    with Launch() as launch:
        signals = StopSignal(launch)
        with checking_input():
            parsed = parse_with_origins(TrainConfig, argv)
            from fms_fsdp import runtime  # torch: not before the flags are known to be good
            from fms_fsdp.run.plan import find_machine

            phases = runtime.Phases()
            phases.done("launch")
            world = runtime.World.from_env()
            runtime.set_up_log(world)
            machine = find_machine(parsed, world)
            phases.done("checks")
        run(parsed, machine, launch, signals, phases)
        runtime.stop()
    return launch.exit_status


def run(
    parsed: Parsed[TrainConfig], machine: Machine, launch: Launch, signals: StopSignal, phases: Phases
) -> None:
    """Claims the run folder, builds everything and trains (collective: every rank); `launch` knows how it ended."""
    from fms_fsdp import runtime
    from fms_fsdp.mesh import Mesh
    from fms_fsdp.observe.report import build_reporter
    from fms_fsdp.optim.schedules import build_schedule
    from fms_fsdp.run.claim import claim, look_at_suspect, record_launch
    from fms_fsdp.run.plan import announce, check_data, open_stream

    cfg, folder = parsed.config, Path(parsed.config.output_dir)
    grouped = machine.dims.strategy != "none"
    runtime.start(cfg.parallel, cfg.training, machine.world, machine.device, group=grouped)
    mesh = Mesh(machine.dims, machine.world.rank, machine.device.type)
    phases.done("group")
    with checking_input():
        taken = claim(parsed, check_data(parsed, machine), mesh)
        found = taken.found
        stream = open_stream(cfg, found)
    launch.step = found.start
    if found.start == found.num_steps:
        launch.claim(folder)
        launch.reason = (
            f"already finished at step {found.start}; raise --num_steps or choose another --run_name"
        )
        launch.outcome = FINISHED
        runtime.log.info(launch.reason)
        return
    with checking_input():
        record_launch(launch, cfg, taken)
    look_at_suspect(stream, taken)
    runtime.log.info("%s\n%s", describe(parsed), found.summary())
    announce(cfg, found)
    phases.done("data")
    model, optimizers = build(cfg, found, mesh)
    phases.done("model")
    found, stream = restore(parsed, found, stream, model, optimizers, mesh)
    phases.done("load")
    schedule = build_schedule(cfg.optim, found.num_steps)
    reporter = build_reporter(
        cfg,
        found,
        mesh,
        model,
        optimizers,
        attempt=taken.attempt,
        phases=phases,
        learning_rate=lambda step: schedule(step, cfg.optim.learning_rate),
        stream=stream,
    )
    limits = loop(
        cfg, found, mesh, launch, signals, model, optimizers, stream, reporter, schedule, taken.attempt
    )
    done = launch.step == found.num_steps
    launch.outcome = FINISHED if done else RESUME_ME
    launch.reason = (
        f"finished {launch.step} steps"
        if done
        else f"{limits.reason}, at step {launch.step}; start it again to go on"
    )
    runtime.log.info("%s: %s", launch.reason, folder)


def loop(
    cfg: TrainConfig,
    found: Preflight,
    mesh: Mesh,
    launch: Launch,
    signals: StopSignal,
    model: Llama,
    optimizers: Optimizers,
    stream: Stream,
    reporter: Reporter,
    schedule: Schedule,
    attempt: int,
) -> Limits:
    """Trains to the end, or to a limit, with everything that watches over it (collective: every rank); returns the limits, which know why."""
    from fms_fsdp.evaluate import Evaluator
    from fms_fsdp.observe.culprit import describe_data
    from fms_fsdp.observe.profiler import profiling
    from fms_fsdp.predict.memory import explaining_out_of_memory
    from fms_fsdp.run.health import BadSteps, Watchdog
    from fms_fsdp.saving import Saver
    from fms_fsdp.train import Hooks, Recipe, train

    folder, rank, device, batch = Path(cfg.output_dir), found.world.rank, found.device, found.batch
    mask, mark = cfg.data.document_mask, reporter.clock.mark
    recipe = Recipe(model, optimizers, device, mesh, batch, cfg.optim.grad_clip, mask, schedule, mark)
    advice = explaining_out_of_memory(
        cfg.parallel, found.model, found.dims, batch.batch_size, found.mixed_precision, cfg.keep_name
    )
    with (
        ExitStack() as closing
    ):  # from the last to the first; one that fails does not keep the others from closing
        closing.callback(reporter.close)
        closing.callback(stream.close)
        watchdog = Watchdog(cfg.parallel.collective_timeout_s, folder / "stacks", rank, launch.fail)
        closing.callback(watchdog.close)
        saver = Saver(cfg, found, model, optimizers, stream, reporter, launch, attempt, watchdog.feed)
        closing.callback(saver.close)
        limits = build_limits(cfg, found, signals, saver, reporter)
        bad_steps = BadSteps(
            cfg.training.max_bad_steps, partial(describe_data, stream, reporter), cfg.keep_name
        )
        evaluator = Evaluator(cfg.eval, mask, found, mesh, model, reporter, saver, watchdog.feed, mark)
        closing.callback(evaluator.close)
        closing.push(lambda kind, error, trace: launch.tell(error))
        closing.enter_context(advice)
        profiler = closing.enter_context(profiling(cfg.profiler, folder, device, rank))
        hooks = Hooks(
            alive=watchdog.feed,
            requests=limits.requests,
            check=bad_steps.check,
            report=reporter.report,
            profiler_step=profiler.step,
            should_stop=limits.stop_after,
            evaluate=evaluator.evaluate,
            save=saver.save,
        )
        launch.step = found.start
        if not limits.before_first_step():
            launch.step = train(recipe, stream, hooks, found.start, found.num_steps)
        bad_steps.flush()
        if problem := reporter.problem():
            raise RunFailed(f"{problem}; make room and start it again: it goes on from the newest checkpoint")
    return limits


def build_limits(
    cfg: TrainConfig, found: Preflight, signals: StopSignal, saver: Saver, reporter: Reporter
) -> Limits:
    """The limits of this launch."""
    from fms_fsdp.run.limits import Limits

    return Limits(
        cfg.training,
        Path(cfg.output_dir),
        found.world.rank,
        found.start,
        reporter.rows_per_step,
        reporter.tokens_per_step,
        signals,
        saver.expected_s,
        reporter.clock.totals,
        cfg.eval.eval_interval,
        reporter.problem,
    )


def build(cfg: TrainConfig, found: Preflight, mesh: Mesh) -> tuple[Llama, Optimizers]:
    """Model and optimizer, sharded, with fresh weights (collective: every rank)."""
    from fms_fsdp.optim.optimizers import build_optimizers
    from fms_fsdp.parallel.parallelize import parallelize

    model = parallelize(
        found.model,
        cfg.parallel,
        mesh,
        device=found.device,
        mixed_precision=found.mixed_precision,
        seed=cfg.training.seed,
    )
    return model, build_optimizers(cfg.optim, model)


def restore(
    parsed: Parsed[TrainConfig],
    found: Preflight,
    stream: Stream,
    model: Llama,
    optimizers: Optimizers,
    mesh: Mesh,
) -> tuple[Preflight, Stream]:
    """Loads the checkpoint that `found` names, or, where its files turn out to be damaged, the newest sound one before it (collective: every rank)."""
    from fms_fsdp.checkpoint.checkpointer import DamagedCheckpoint, load_checkpoint
    from fms_fsdp.run.claim import choose_again
    from fms_fsdp.run.plan import announce, open_stream
    from fms_fsdp.runtime import log

    damaged: list[Path] = []
    while found.checkpoint is not None:
        try:
            load_checkpoint(found.checkpoint, model, optimizers if found.continues else None, mesh)
            break
        except DamagedCheckpoint as error:
            log.error("%s; looking for an older one", error)
            damaged.append(error.folder)
        with checking_input():
            stream.close()
            found = choose_again(parsed, found, damaged)
            stream = open_stream(parsed.config, found)
        announce(parsed.config, found)
    return found, stream


if __name__ == "__main__":
    status = main(sys.argv[1:])
    if status in (1, 2) or any(thread.name.startswith("tracker ") for thread in threading.enumerate()):
        os._exit(
            status
        )  # peers may hang in a collective, or a tracker in its client: clean-up would wait for them
    sys.exit(status)
