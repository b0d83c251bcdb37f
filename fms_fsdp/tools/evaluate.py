"""`python -m fms_fsdp evaluate`: loss, perplexity and bits per byte of a checkpoint, also under torchrun."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from fms_fsdp.checkpoint.checkpointer import DamagedCheckpoint, load_checkpoint
from fms_fsdp.checkpoint.folders import Checkpoint
from fms_fsdp.config import ParallelConfig, TrainConfig, flag
from fms_fsdp.data.held_out import HeldOut, close_held_out, open_held_out, scan_held_out
from fms_fsdp.errors import RunFailed, UserError
from fms_fsdp.evaluate import Forward, evaluate
from fms_fsdp.mesh import Mesh, resolve_dims
from fms_fsdp.parallel.parallelize import parallelize
from fms_fsdp.runtime import World, group_timeout, pick_device, set_up_log, start, stop
from fms_fsdp.spec.origin import trained_with
from fms_fsdp.tools.table import table
from fms_fsdp.tools.trained_run import find_checkpoint


@dataclass(frozen=True)
class EvaluateConfig:
    """Which checkpoint to evaluate, and on which data. A flag that is left out has the value of the run."""

    path: str = flag("", "a run folder, a folder of checkpoints or one checkpoint (of several, the newest)")
    step: int | None = flag(None, "the checkpoint of this step", minimum=1)
    data_path: str = flag("", "folder of the run's token shards (default: the run's)")
    eval_data_path: str = flag("", "held-out shards (default: the run's, else validation/ in data_path)")
    eval_datasets: tuple[str, ...] = flag((), "sources of the held-out shards (default: the run's, else all)")
    eval_steps: int | None = flag(None, "number of batches of each source (default: the run's)", minimum=1)
    eval_test: bool = flag(False, "evaluate test/ in data_path too, or the run's test_data_path")
    json: bool = flag(False, "print one JSON object")


def main(config: EvaluateConfig) -> None:
    """The command; also under torchrun, where the checkpoint is sharded over all processes."""
    checkpoint = find_checkpoint(config.path, config.step, "--path")
    cfg, record = _run_config(config, checkpoint), checkpoint.saved.record
    batch, precision, seed = record.batch, record.precision, cfg.training.seed
    world = World.from_env()
    set_up_log(world)
    device = pick_device(world)
    model_config = record.model
    used = trained_with(checkpoint)
    found = scan_held_out(cfg.eval, cfg.data, None, vocab_size=model_config.vocab_size, used=used)
    sources = open_held_out(cfg.eval, found, batch.global_batch_size)
    parallel = ParallelConfig(
        collective_timeout_s=cfg.parallel.collective_timeout_s,
        dist_backend=cfg.parallel.dist_backend,
        use_torch_compile=False,
    )
    dims = resolve_dims(parallel, "", world)
    start(parallel, cfg.training, world, device, group=dims.strategy != "none")
    mesh = Mesh(dims, world.rank, device.type, group_timeout(parallel))
    model = parallelize(model_config, parallel, mesh, device=device, precision=precision, seed=seed)
    forward = Forward(model, batch.batch_size, cfg.data.document_mask, device, mesh)
    try:
        load_checkpoint(checkpoint, model, None, mesh)
        values = evaluate(forward, sources)
    except (DamagedCheckpoint, RunFailed, UserError) as error:
        raise UserError(str(error)) from error
    close_held_out(sources)
    if world.rank == 0:
        place = {"step": checkpoint.step, "tokens_seen": checkpoint.saved.tokens_seen}
        print(json.dumps(place | values) if config.json else _table(checkpoint, values, sources))
    del model, forward, mesh
    stop()


def _run_config(config: EvaluateConfig, checkpoint: Checkpoint) -> TrainConfig:
    """The run's configuration, with evaluation on and the flags given here in their places."""
    cfg = checkpoint.saved.record.located
    names = ("eval_data_path", "eval_datasets", "eval_steps")
    given: dict[str, Any] = {name: value for name in names if (value := getattr(config, name))}
    given |= {"eval_at_start": True, "eval_test": config.eval_test}
    if not config.eval_test:
        given["test_data_path"] = ""
    data = replace(cfg.data, data_path=config.data_path or cfg.data.data_path)
    return replace(cfg, eval=replace(cfg.eval, **given), data=data)


def _table(checkpoint: Checkpoint, values: dict[str, float], sources: Sequence[HeldOut]) -> str:
    rows_of = {f"{source.group}/{source.name}": source.num_rows for source in sources}
    rows = []
    for name in (key.removesuffix("/loss") for key in values if key.endswith("/loss")):
        of_group = sum(count for other, count in rows_of.items() if other.startswith(name + "/"))
        bits = values.get(f"{name}/bits_per_byte")
        losses = f"{values[f'{name}/loss']:.4f}", f"{values[f'{name}/ppl']:.2f}"
        shown_bits = "—" if bits is None else f"{bits:.4f}"
        rows.append((name, str(rows_of.get(name) or of_group), *losses, shown_bits))
    title = f"{checkpoint.folder}: {checkpoint.saved.tokens_seen:,} tokens trained on"
    return title + "\n" + table(("source", "rows", "loss", "perplexity", "bits/byte"), rows)
