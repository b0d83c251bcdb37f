"""Trains a Llama: the whole flow, once.

flags → config → preflight (world, mesh, data, memory) → process group → model (meta → AC → compile → FSDP → init)
      → data stream → optimizer → resume → loop → reports, checkpoints, traces

torchrun --nproc_per_node=8 main_training.py --model_variant=7b --sharding_strategy=hsdp --data_path=DIR
"""

from __future__ import annotations

import os
import sys
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from fms_fsdp.config import TrainConfig, as_dict
from fms_fsdp.flags import Parsed, describe, parse_with_origins
from fms_fsdp.status import FINISHED, RESUME_ME, RUNNING, Launch, checking_input

if TYPE_CHECKING:
    import torch

    from fms_fsdp.models.llama import Llama
    from fms_fsdp.preflight import Preflight


def main(argv: list[str]) -> int:
    """One launch; returns its exit status: 0 finished, 1 failed, 2 bad input, 75 stopped early."""
    # before torch is imported: CPU threads that spin while they wait starve each other on a busy machine
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    with Launch() as launch:
        with checking_input():
            parsed = parse_with_origins(TrainConfig, argv)
            launch.folder = Path(parsed.config.output_dir)
            from fms_fsdp import runtime  # torch: not before the flags are known to be good
            from fms_fsdp.preflight import preflight

            world = runtime.World.from_env()
            runtime.set_up_log(world)
            found = preflight(parsed, world)
        launch.step = found.start
        if found.start == parsed.config.training.num_steps:
            launch.reason = f"already finished at step {found.start}; raise --num_steps or choose another --run_name"
            launch.outcome = FINISHED
            runtime.log.info(launch.reason)
        else:
            launch.outcome = run(parsed, found, launch)
            runtime.stop()
    return launch.exit_status


def run(parsed: Parsed[TrainConfig], found: Preflight, launch: Launch) -> str:
    """Builds everything and trains (collective: every rank); returns FINISHED or RESUME_ME."""
    from fms_fsdp import runtime
    from fms_fsdp.checkpoint.checkpointer import save_checkpoint
    from fms_fsdp.observe.profiler import build_profiler
    from fms_fsdp.observe.report import build_reporter
    from fms_fsdp.observe.run_folder import open_run_folder
    from fms_fsdp.optim.schedules import cosine_with_warmup
    from fms_fsdp.preflight import open_stream
    from fms_fsdp.train import Hooks, Recipe, train

    cfg, world, device, num_steps = parsed.config, found.world, found.device, parsed.config.training.num_steps
    folder = Path(cfg.output_dir)
    with checking_input():
        stream = open_stream(cfg, found)
    runtime.start(cfg.parallel, cfg.training, world, device, group=found.layout.strategy != "none")
    attempt = open_run_folder(folder, as_dict(cfg), found.resolved(), world.rank)
    if world.rank == 0:
        launch.write(RUNNING)
    runtime.log.info("%s\n%s", describe(parsed), found.summary())

    model, optimizer = build(cfg, found)
    learning_rate = partial(
        cosine_with_warmup,
        peak=cfg.optim.learning_rate,
        warmup_steps=cfg.warmup_steps,
        num_steps=num_steps,
        min_ratio=cfg.optim.min_lr_ratio,
    )
    reporter = build_reporter(
        folder,
        found,
        attempt=attempt,
        num_steps=num_steps,
        report_interval=cfg.log.report_interval,
        learning_rate=learning_rate,
        consumption=getattr(stream, "consumption", dict),
    )

    def save(step: int, now: bool) -> None:
        launch.step = step
        interval = cfg.checkpoint.checkpoint_interval
        if now or step == num_steps or (interval and step % interval == 0):
            state = {
                "tokens_seen": reporter.tokens_seen(step),
                "data": stream.state_dict(),
                "config": as_dict(cfg),
                "resolved": found.resolved(),
            }
            path = save_checkpoint(Path(cfg.ckpt_save_path), step, model, optimizer, state, attempt=attempt)
            runtime.log.info("saved %s", path)

    recipe = Recipe(
        model, optimizer, device, found.layout, found.batch, cfg.optim.grad_clip, cfg.data.document_mask, learning_rate
    )
    signals = runtime.StopSignal()
    try:
        with build_profiler(cfg.log, folder / "profile_traces", device, world.rank) as profiler:
            hooks = Hooks(reporter.report, save, profiler.step, signals.agreed)
            launch.step = train(recipe, stream, hooks, found.start, num_steps)
    finally:
        stream.close()
        reporter.close()
    if launch.step < num_steps:
        launch.reason = f"stopped by {signals.name or 'another rank'} at step {launch.step}; start it again to go on"
        runtime.log.info(launch.reason)
        return RESUME_ME
    launch.reason = f"finished {num_steps} steps"
    runtime.log.info("%s: %s", launch.reason, folder)
    return FINISHED


def build(cfg: TrainConfig, found: Preflight) -> tuple[Llama, torch.optim.AdamW]:
    """Model and optimizer with the weights and moments they start from (collective: every rank)."""
    from fms_fsdp.checkpoint.checkpointer import load_checkpoint
    from fms_fsdp.mesh import build_mesh
    from fms_fsdp.optim.optimizers import build_optimizer
    from fms_fsdp.parallel.parallelize import parallelize
    from fms_fsdp.runtime import log

    model = parallelize(
        found.model,
        cfg.parallel,
        found.layout,
        build_mesh(found.layout, found.device.type),
        device=found.device,
        mixed_precision=found.mixed_precision,
        seed=cfg.training.seed,
    )
    optimizer = build_optimizer(cfg.optim, model)
    if found.checkpoint is not None:
        load_checkpoint(found.checkpoint, model, optimizer if found.continues else None)
        log.info("%s from %s", "resumed" if found.continues else "took weights", found.checkpoint.folder)
    return model, optimizer


if __name__ == "__main__":
    status = main(sys.argv[1:])
    if status in (1, 2):
        os._exit(status)  # peers may hang in a collective: torch's own clean-up would wait for them
    sys.exit(status)
