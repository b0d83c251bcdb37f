"""Trains a Llama: `main` is the whole flow, from flags to the last checkpoint.

torchrun --nproc_per_node=8 main_training.py --model_variant=7b --sharding_strategy=hsdp --data_path=DIR
"""

# ruff: noqa: E402 - streams, CPU and memory are set up before anything else is imported
from __future__ import annotations

import atexit
import gc
import os
import sys
import threading
from contextlib import ExitStack
from dataclasses import replace
from functools import partial

from fms_fsdp.console import open_closed_streams
from fms_fsdp.cpu_tuning import before_torch
from fms_fsdp.errors import check_installed

open_closed_streams()
check_installed()
before_torch()

from fms_fsdp.config import TrainConfig
from fms_fsdp.config.parse import describe_changes, describe_flags, parse
from fms_fsdp.config.values import counted
from fms_fsdp.run.listings import print_listing
from fms_fsdp.run.status import FINISHED, RESUME_ME, RunStatus
from fms_fsdp.run.stop import StopControl, StopSignals


def main(argv: list[str]) -> int:
    """Runs one launch. Exit status: 0 finished, 1 failed, 2 bad input, 75 stopped early."""
    status = RunStatus()  # reports errors in one line, writes status.json
    signals = StopSignals(status)
    with ExitStack() as at_end, status:
        # 1. Flags. torch is not imported yet: a mistyped flag is reported at once.
        print_listing(argv)
        parsed = parse(TrainConfig, argv)
        cfg = parsed.config

        from fms_fsdp.checkpoint.io import load_checkpoint
        from fms_fsdp.checkpoint.manager import CheckpointManager
        from fms_fsdp.data.validation import close_held_out, open_held_out, scan_held_out
        from fms_fsdp.distributed import runtime
        from fms_fsdp.distributed.mesh import Mesh, plan_dims
        from fms_fsdp.distributed.runtime import log, run_on_rank0
        from fms_fsdp.evaluate import Evaluator, evaluate
        from fms_fsdp.metrics.interval import describe_data
        from fms_fsdp.metrics.logger import MetricLogger
        from fms_fsdp.metrics.profiling import StepProfiler
        from fms_fsdp.metrics.timer import LaunchPhases, PhaseTimer
        from fms_fsdp.models.variants import resolve_model
        from fms_fsdp.optim.optimizers import build_optimizers
        from fms_fsdp.parallel.compile import allow_shapes, compiles_optimizer
        from fms_fsdp.parallel.parallelize import parallelize
        from fms_fsdp.parallel.precision import resolve_precision
        from fms_fsdp.run import setup, startup_log
        from fms_fsdp.run.checks import check_machine, machine_notes
        from fms_fsdp.run.health import NonFiniteGuard, Watchdog
        from fms_fsdp.run.memory import MemoryBudget
        from fms_fsdp.run.resume import check_resume, find_checkpoint
        from fms_fsdp.run.run_dir import RunDir, check_shared
        from fms_fsdp.train import TrainStep, train

        gc.freeze()  # exclude objects created by imports from every later collection
        gc.enable()
        at_end.callback(gc.unfreeze)
        at_end.callback(gc.enable)
        phases = LaunchPhases()
        phases.done("launch")

        # 2. Machine and data. Checks that need no checkpoint.
        world = runtime.World.from_env()
        runtime.set_up_log(world)
        device = runtime.pick_device(world)
        resolve_model(cfg.model, seq_length=cfg.data.seq_length)
        dims = plan_dims(cfg.parallel, cfg.model.name, world)
        check_machine(cfg, device, dims)
        for note in [*parsed.notes, *machine_notes(cfg, device, dims)]:
            log.info("note: %s", note)
        precision = resolve_precision(cfg.precision, device)
        setup.check_optimizer(cfg, precision)
        phases.done("checks")
        runtime.init_distributed(cfg.parallel, cfg.training, world, device)
        phases.done("group")
        # The first collective: no rank ends with an error while another one still connects.
        budget = MemoryBudget.measure(world, device)
        corpus = setup.find_corpus(cfg)
        vocab_size = corpus.vocab_size if corpus is not None else None
        model_config = resolve_model(
            cfg.model, seq_length=cfg.data.seq_length, data_vocab_size=vocab_size
        )
        setup.check_components(cfg, model_config, precision, device, dims)
        listings = run_on_rank0(
            partial(scan_held_out, cfg.eval, cfg.data, corpus, vocab_size=model_config.vocab_size)
        )
        prompts = teacher = None
        if cfg.eval.sample_interval:
            from fms_fsdp.samples import Sampler, read_prompts

            prompts = run_on_rank0(partial(read_prompts, cfg.eval, cfg.data, model_config))
        if cfg.training.teacher_path and not dims.divides_model:  # `check_layout` rejects both
            from fms_fsdp.distill import attach_teacher, find_teacher

            teacher = run_on_rank0(partial(find_teacher, cfg, model_config, corpus))
            budget = replace(budget, teacher=teacher)

        # 3. Start. Rank 0 locks the folders that exist and chooses the checkpoint; the batch, the
        # length and the schedule follow from it, once.
        run_dir = RunDir(cfg)
        at_end.callback(run_dir.close)
        if not parsed.dry_run:
            run_on_rank0(run_dir.lock)
        resume = find_checkpoint(cfg, world, corpus, verify=not parsed.dry_run)
        start = resume.start
        run, epochs = setup.plan_run(
            cfg, device, dims, precision, model_config, corpus, resume, budget
        )
        changes = check_resume(run, resume)
        stream, more = setup.open_stream(run, corpus, resume, world.rank)
        at_end.callback(stream.close)
        held_out = open_held_out(cfg.eval, listings, run.batch.global_batch_size)
        at_end.callback(close_held_out, held_out)
        cfg = run.config
        # Where nobody reads them, the lines are not made: the prediction of memory takes CPU time.
        is_logging = world.rank == 0 or cfg.log.log_all_ranks
        summary = ""
        if is_logging:
            summary = startup_log.describe(run, resume, budget, device, stream, held_out, epochs)
        log_startup = partial(
            startup_log.log_startup, run, resume, [*changes, *more], budget, device, corpus
        )
        phases.done("data")
        if parsed.dry_run:
            if is_logging:
                expected = startup_log.describe_prediction(run, budget, device)
                steps = startup_log.describe_steps(run, start.step)
                log.info("\n".join([describe_changes(parsed), summary, *expected, steps]))
                log_startup()
            status.end(FINISHED, "dry run: nothing was written")
            log.info(status.reason)
            runtime.shut_down()
            return status.exit_status

        # 4. Records. Nothing was created so far; from here on the run directory is ours.
        attempt, failed_step = run_on_rank0(partial(run_dir.open, resume.corrupt))
        check_shared(run_dir.folder, world)
        if not run_dir.checkpoints.is_relative_to(run_dir.folder):
            check_shared(run_dir.checkpoints, world)
        status.current_step = lambda: start.step
        if start.step == run.num_steps and not start.evaluation_pending:
            status.open(run_dir.folder, start.step)
            fix = "raise --num_steps or choose another --run_name"
            status.end(FINISHED, f"already finished at step {start.step}; {fix}")
            log.info(status.reason)
            runtime.shut_down()
            return status.exit_status
        status.open(run_dir.folder, start.step)  # on rank 0 before any rank continues
        run_on_rank0(partial(run_dir.write_config, run, attempt))
        at_end.callback(runtime.close_log_files)
        if world.rank == 0:
            runtime.log_to_file(run_dir.log_file)
            log.info("run directory %s (attempt %d)", run_dir.folder, attempt)
        elif cfg.log.log_all_ranks:
            runtime.log_to_file(run_dir.folder / f"log.rank{world.rank}.txt")
        setup.check_failed_step(stream, failed_step, start.step)
        runtime.log_for_files(describe_flags(parsed))
        log.info("%s\n%s", describe_changes(parsed), summary)
        if world.rank == 0:
            startup_log.warn_of_missing_labels(stream)
        if is_logging:
            log_startup()
        phases.done("data")

        # 5. Model, optimizer, weights.
        mesh = Mesh(run.dims, world.rank, device.type, runtime.collective_timeout(cfg.parallel))
        phases.done("group")
        seed, parallel = cfg.training.seed, cfg.parallel.for_rows(run.seq_length)
        model = parallelize(
            run.model, parallel, mesh, device=device, precision=precision, seed=seed
        )
        if run.batch.cuts_micro_steps:
            allow_shapes(run.batch.batch_size)
        compiled = compiles_optimizer(cfg.parallel, model, device)
        optimizers = build_optimizers(cfg.optim, model, precision, seed, compiled=compiled)
        phases.done("model")
        if resume.hf_weights:
            setup.load_hf_weights(resume.hf_weights, model, mesh)
        if resume.checkpoint is not None:
            loaded = None if resume.weights_only else optimizers
            load_checkpoint(
                resume.checkpoint.folder,
                model,
                loaded,
                is_alone=world.size == 1,
                verify=False,  # `find_checkpoint` has
            )
        run_on_rank0(partial(run_dir.rename_own, resume.superseded, "superseded"))
        state = setup.initial_state(run, resume, model, optimizers, stream, device)
        if teacher is not None:
            attach_teacher(teacher, run, device, model, mesh)
        phases.done("load")

        # 6. Training.
        status.current_step, status.is_training = lambda: state.step, True
        timer, folder, root = PhaseTimer(device), run_dir.folder, run_dir.checkpoints
        with ExitStack() as closing:  # closes in reverse; reports an error before peers notice
            metrics = MetricLogger(run, device, mesh, state, attempt, timer, phases)
            closing.callback(metrics.close)
            stacks = folder / "stacks" / f"rank{world.rank}.txt"
            watchdog = Watchdog(cfg.parallel.collective_timeout_s, stacks, status.fail)
            closing.callback(watchdog.close)
            profiler = StepProfiler(cfg.profiler, folder, device, world.rank)
            closing.callback(profiler.close)
            stop = StopControl(
                cfg.training,
                run_dir.stop_file,
                signals,
                mesh.is_main,
                cfg.eval.eval_interval,
                runtime.sum_over_ranks,
            )
            is_stopped = partial(stop.interrupts, state)
            guard = NonFiniteGuard(
                state,
                cfg.training.max_bad_steps,
                root,
                f", with {cfg.keep_name}",
                partial(describe_data, stream, mesh),
                state.loss_scale,
            )
            evaluate_sources = partial(
                evaluate,
                model,
                batch_size=run.batch.batch_size,
                document_mask=cfg.data.document_mask,
                device=device,
                mesh=mesh,
                keep_alive=watchdog.alive,
                is_stopped=is_stopped,
            )
            evaluator = Evaluator(
                cfg.eval,
                evaluate_sources,
                held_out,
                metrics,
                timer.mark,
                setup.tokens_between_evaluations(cfg, corpus),
            )
            sampler = exporter = None
            if prompts is not None:
                sampler = Sampler(
                    cfg, prompts, model, mesh, metrics, watchdog.alive, timer.mark, is_stopped
                )
            save_s, host_bytes = startup_log.save_estimates(run, resume, budget)
            checkpoints = CheckpointManager(
                run,
                root,
                attempt,
                state,
                is_main=mesh.is_main,
                settle=guard.settle,
                alive=watchdog.alive,
                event=metrics.event,
                save_s=save_s,
                host_bytes=host_bytes,
            )
            closing.callback(checkpoints.close)
            if interval := cfg.checkpoint.export_interval:
                from fms_fsdp.run.exports import Exporter

                exporter = Exporter(interval, root, folder / "exports", mesh)
                closing.callback(exporter.close)
            closing.push(lambda kind, error, trace: status.report(error) if error else None)
            closing.enter_context(budget.explaining_out_of_memory(run))
            closing.push(profiler.dump_at_failure)
            recipe = TrainStep(
                mesh,
                device,
                run.schedule,
                run.batch.batch_size,
                cfg.optim.grad_clip,
                cfg.data.document_mask,
                dropout_seed=seed if run.model.has_dropout else None,
                vocab_size=run.model.vocab_size,
                micro_batch_at=run.batch.micro_batch_at,
                gc_interval=cfg.training.gc_interval,
            )
            train(
                recipe,
                state,
                timer,
                watchdog=watchdog,
                profiler=profiler,
                status=status,
                stop=stop,
                guard=guard,
                metrics=metrics,
                evaluator=evaluator,
                sampler=sampler,
                checkpoints=checkpoints,
                exporter=exporter,
            )

        # 7. End.
        if state.is_done and not state.evaluation_pending:
            status.end(FINISHED, f"finished {counted(state.step, 'step')}")
        else:
            reason = f"{state.stop_reason}, at step {state.step}; run the same command to resume"
            status.end(RESUME_ME, reason)
        log.info("%s: %s", status.reason, run_dir.folder)
        runtime.shut_down()
    signals.wait_for_agent()
    return status.exit_status


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
