"""The hooks of a training, in the order in which they are called around each step."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path

from fms_fsdp.checkpoint.checkpoints import Checkpoints
from fms_fsdp.evaluate import Evaluator, Forward
from fms_fsdp.mesh import Mesh
from fms_fsdp.observe.meter import Meter
from fms_fsdp.observe.metrics import Clock
from fms_fsdp.observe.profiler import StepProfiler
from fms_fsdp.observe.sinks import open_sinks
from fms_fsdp.observe.step_data import describe_data
from fms_fsdp.parts import load_part
from fms_fsdp.run.garbage import GarbageCollector
from fms_fsdp.run.health import BadSteps, Watchdog
from fms_fsdp.run.limits import Limits
from fms_fsdp.run.status import Launch
from fms_fsdp.run.stop_signal import StopSignal
from fms_fsdp.runtime import Phases
from fms_fsdp.spec.advice import explaining_out_of_memory
from fms_fsdp.spec.resolve import Spec
from fms_fsdp.spec.words import plan_saves
from fms_fsdp.state import Hook, TrainState, check_order


def tokens_between_evaluations(spec: Spec) -> int:
    """The tokens of `--eval_epochs` passes over the data; 0 without them."""
    sources = () if spec.inputs.corpus is None else spec.inputs.corpus.sources
    return round(spec.config.eval.eval_epochs * sum(source.num_tokens for source in sources))


@contextmanager
def open_hooks(
    spec: Spec,
    attempt: int,
    mesh: Mesh,
    state: TrainState,
    launch: Launch,
    signals: StopSignal,
    phases: Phases,
    clock: Clock,
) -> Iterator[list[Hook]]:
    """Makes the hooks of a run, and closes them from the last to the first, also when a step fails
    (collective: every rank)."""
    cfg, folder, device = spec.config, Path(spec.config.output_dir), spec.device
    with ExitStack() as stack:
        sinks = open_sinks(cfg, mesh, attempt, clock.totals)
        stack.callback(sinks.close)
        stack.callback(state.stream.close)
        stacks, rank = folder / "stacks", spec.world.rank
        watchdog = Watchdog(cfg.parallel.collective_timeout_s, stacks, rank, launch.fail)
        alive, mark, mask = watchdog.alive, clock.mark, cfg.data.document_mask
        forward = Forward(state.model, spec.batch.batch_size, mask, device, mesh, alive)
        profiler = StepProfiler(cfg.profiler, folder, device, rank)
        saves, describe_step = plan_saves(spec, attempt), partial(describe_data, state.stream, mesh)
        exports = (cfg.checkpoint.export_interval, saves.root, folder / "exports", mesh)
        samples = (cfg, spec.prompts, state.model, mesh, sinks, alive, mark)
        hooks: list[Hook] = [
            watchdog,
            BadSteps(cfg.training.max_bad_steps, describe_step, cfg.keep_name, state.loss_scale),
            Meter(spec, mesh, state, sinks, clock, phases),
            profiler,
            Limits(cfg.training, folder, mesh.is_main, signals, clock.totals, cfg.eval.eval_interval),
            Evaluator(cfg.eval, forward, spec.held_out, sinks, mark, tokens_between_evaluations(spec)),
            *([load_part("samples:Sampler")(*samples)] if spec.prompts else []),
            Checkpoints(cfg.checkpoint, saves, state, mesh, alive, sinks.event, mark),
            *([load_part("exports:Exporter")(*exports)] if cfg.checkpoint.export_interval else []),
            GarbageCollector(cfg.training.gc_interval),
        ]
        check_order(hooks)
        for hook in hooks:
            stack.callback(hook.close)
        stack.push(lambda kind, error, trace: launch.tell(error))
        stack.enter_context(explaining_out_of_memory(spec))
        stack.push(profiler.dump_at_failure)
        yield hooks
