"""Trains a Llama: `main` is the whole flow, from flags to the last checkpoint.

torchrun --nproc_per_node=8 main_training.py --model_variant=7b --data_path=DIR

plan_launch   flags, machine, data, checkpoint → RunConfig; creates nothing
open_run      acquires the run directory and begins its records
build         model, optimizers, weights, progress
components    what the loop calls between its steps
train         the loop, in fms_fsdp/train.py; the others are in fms_fsdp/stages.py
"""

# ruff: noqa: E402 - streams, CPU and memory are set up before anything else is imported
from __future__ import annotations

import atexit
import gc
import os
import sys
import threading
from contextlib import ExitStack
from pathlib import Path

from fms_fsdp.console import set_up_streams
from fms_fsdp.packages import check_installed
from fms_fsdp.process import before_torch

set_up_streams()
check_installed()
before_torch()

from fms_fsdp.config import TrainConfig
from fms_fsdp.config.parse import parse
from fms_fsdp.config.values import counted
from fms_fsdp.models.listings import print_listing
from fms_fsdp.run.status import FINISHED, RESUME_ME, RunStatus
from fms_fsdp.run.stop import StopSignals

STOPPED_EXPORTS = "stopped before its last exports; run the same command to make them"


def main(argv: list[str]) -> int:
    """Runs one launch. Exit status: 0 finished, 1 failed, 2 bad input, 75 stopped early."""
    status = RunStatus()  # reports errors in one line, writes status.json
    signals = StopSignals(status)
    with ExitStack() as at_end, status:
        print_listing(argv)
        parsed = parse(TrainConfig, argv)
        # Imported only now, because a mistyped flag needs none of it, and torch takes seconds to load.
        from fms_fsdp.run.early_checks import check_before_torch

        check_before_torch(parsed.config)
        from fms_fsdp import stages
        from fms_fsdp.metrics.timer import LaunchPhases
        from fms_fsdp.train import StepSettings, train

        gc.freeze()  # exclude objects created by imports from every later collection
        gc.enable()
        at_end.callback(gc.unfreeze)
        at_end.callback(gc.enable)
        phases = LaunchPhases()
        phases.done("launch")

        notes = [*signals.notes, *parsed.notes]
        launch = stages.plan_launch(parsed, phases, at_end, notes=notes)
        if parsed.dry_run:
            stages.log_plan(launch)
            end(status, FINISHED, "dry run: nothing was written")
            return status.exit_status

        failed_step = stages.open_run(launch, status)
        if launch.is_finished:
            if stages.make_due_exports(launch, signals):
                fix = "raise --num_steps or choose another --run_name"
                end(status, FINISHED, f"already finished at step {launch.start_step}; {fix}")
            else:
                end(status, RESUME_ME, STOPPED_EXPORTS)
            return status.exit_status
        stages.begin_records(launch, failed_step, at_end)

        mesh, state = stages.build(launch)

        status.follow(state)
        with ExitStack() as closing:  # closes in reverse; reports an error before peers notice
            parts = stages.components(launch, mesh, state, status, signals, closing)
            closing.push(status.report_at_exit)
            closing.enter_context(launch.budget.explaining_out_of_memory(launch.run))
            closing.push(parts.profiler.dump_at_failure)
            if launch.is_compiled and not state.is_done:
                stages.log_compilation(launch)
            train(StepSettings.of(launch.run, mesh, launch.device), state, parts)

        folder = launch.run_dir.folder
        if not state.is_done or state.evaluation_pending:
            reason = f"{state.stop_reason}, at step {state.step}; run the same command to resume"
            end(status, RESUME_ME, reason, folder)
        elif parts.checkpoints.has_due_exports:
            end(status, RESUME_ME, STOPPED_EXPORTS, folder)
        else:
            end(status, FINISHED, f"finished {counted(state.step, 'step')}", folder)
    signals.wait_for_agent()
    return status.exit_status


def end(status: RunStatus, outcome: str, reason: str, folder: Path | None = None) -> None:
    """Records and logs how the launch has ended."""
    from fms_fsdp.distributed.runtime import shut_down
    from fms_fsdp.logs import log

    status.end(outcome, reason)
    if folder is not None:
        reason = f"{reason}: {folder}"
    log.info(reason)
    shut_down()


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
