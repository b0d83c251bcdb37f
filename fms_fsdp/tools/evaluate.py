"""`python -m fms_fsdp evaluate`: loss, perplexity and bits per byte of a checkpoint, also under torchrun."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import nn

from fms_fsdp.checkpoint.folders import Checkpoint, read_checkpoint
from fms_fsdp.checkpoint.io import load_checkpoint
from fms_fsdp.config import ParallelConfig, TrainConfig, flag
from fms_fsdp.config.values import joined
from fms_fsdp.data.validation import HeldOut, close_held_out, open_held_out, scan_held_out
from fms_fsdp.distributed.mesh import Mesh, plan_dims
from fms_fsdp.distributed.runtime import (
    World,
    collective_timeout,
    init_distributed,
    pick_device,
    run_on_rank0,
    set_up_log,
    shut_down,
)
from fms_fsdp.errors import RunFailed, UserError
from fms_fsdp.evaluate import Forward, evaluate
from fms_fsdp.parallel.parallelize import parallelize
from fms_fsdp.run.resume import checkpoint_tokenizer
from fms_fsdp.run.trained_run import find_checkpoint
from fms_fsdp.tools.table import table

# evaluates a model: numbers by name, and a table of them for the screen
Measure = Callable[[Forward], tuple[dict[str, Any], str]]


_TASK_FLAGS = ("task_path", "num_fewshot", "limit")  # have no effect without --tasks
_HELD_OUT_FLAGS = ("eval_data_path", "eval_datasets", "eval_steps", "eval_test")  # nor with it


@dataclass(frozen=True)
class EvaluateConfig:
    """Which checkpoint to evaluate, and on which data. A flag that is left out has the value of the run."""

    path: str = flag(
        "",
        "a run folder, a folder of checkpoints or one checkpoint (of several, the newest)",
        form="path",
    )
    step: int | None = flag(None, "the checkpoint of this step", min=1)
    data_path: str = flag("", "folder of the run's token shards (default: the run's)", form="path")
    eval_data_path: str = flag(
        "", "held-out shards (default: the run's, else validation/ in data_path)", form="path"
    )
    eval_datasets: tuple[str, ...] = flag(
        (), "sources of the held-out shards (default: the run's, else all)"
    )
    eval_steps: int | None = flag(
        None, "number of batches of each source (default: the run's)", min=1
    )
    eval_test: bool = flag(False, "evaluate test/ in data_path too, or the run's test_data_path")
    batch_size: int | None = flag(None, "rows of a pass on each device (default: the run's)", min=1)
    tasks: tuple[str, ...] = flag((), "tasks of lm-evaluation-harness in place of held-out data")
    task_path: str = flag("", "folder of YAML files that describe more tasks", form="path")
    num_fewshot: int | None = flag(
        None, "solved examples before each question (default: the task's)", min=0
    )
    limit: int | None = flag(None, "only the first questions of each task, for a trial", min=1)
    json: bool = flag(False, "print one JSON object")

    def __post_init__(self) -> None:
        useless, how = (_HELD_OUT_FLAGS, "with") if self.tasks else (_TASK_FLAGS, "without")
        for name in useless:
            if value := getattr(self, name):
                fix = "remove it" if self.tasks else "remove it, or set --tasks"
                raise UserError(f"--{name}={joined(value)} has no effect {how} --tasks; {fix}")


def main(config: EvaluateConfig) -> None:
    """The command; also under torchrun, where the checkpoint is sharded over all processes."""
    checkpoint = find_checkpoint(config.path, config.step, "--path")
    cfg, record = _run_config(config, checkpoint), checkpoint.metadata.run
    world = World.from_env()
    set_up_log(world)
    if config.tasks:
        from fms_fsdp.tools.harness import find_measure

        measure = find_measure(config, checkpoint)
    else:
        measure = _find_measure(cfg, checkpoint)
    device = pick_device(world)
    parallel = ParallelConfig(
        collective_timeout_s=cfg.parallel.collective_timeout_s,
        dist_backend=cfg.parallel.dist_backend,
        use_torch_compile=False,
    )
    dims = plan_dims(parallel, "", world)
    init_distributed(parallel, cfg.training, world, device)
    # A run that trains meanwhile may save between the choices of two ranks: take rank 0's.
    checkpoint = run_on_rank0(lambda: checkpoint)
    record = checkpoint.metadata.run
    mesh = Mesh(dims, world.rank, device.type, collective_timeout(parallel))
    model = parallelize(
        record.model,
        parallel,
        mesh,
        device=device,
        precision=record.precision,
        seed=cfg.training.seed,
    )
    batch_size = config.batch_size or record.batch.batch_size
    forward = Forward(model, batch_size, cfg.data.document_mask, device, mesh)
    try:
        checkpoint = _load(config, checkpoint, model, world)
        values, text = measure(forward)
    except RunFailed as error:
        raise UserError(str(error)) from error
    if world.rank == 0:
        place = {"step": checkpoint.step, "tokens_seen": checkpoint.metadata.tokens_seen}
        title = f"{checkpoint.folder}: {checkpoint.metadata.tokens_seen:,} tokens trained on"
        print(json.dumps(place | values) if config.json else f"{title}\n{text}")
    del model, forward, mesh
    shut_down()


def _load(
    config: EvaluateConfig, checkpoint: Checkpoint, model: nn.Module, world: World
) -> Checkpoint:
    """Loads `checkpoint`, or the newest again if its run deletes it, and returns it (collective)."""
    chosen = iter([checkpoint])

    def find() -> Checkpoint:
        first = next(chosen, None)
        return first or run_on_rank0(lambda: find_checkpoint(config.path, config.step, "--path"))

    def load(checkpoint: Checkpoint) -> Checkpoint:
        load_checkpoint(checkpoint.folder, model, None, is_alone=world.size == 1)
        return checkpoint

    return read_checkpoint(find, load)


def _find_measure(cfg: TrainConfig, checkpoint: Checkpoint) -> Measure:
    """What evaluates a model on the held-out data, which are opened here."""
    record, used = checkpoint.metadata.run, checkpoint_tokenizer(checkpoint)
    found = scan_held_out(cfg.eval, cfg.data, None, vocab_size=record.model.vocab_size, used=used)
    sources = open_held_out(cfg.eval, found, record.batch.global_batch_size)

    def measure(forward: Forward) -> tuple[dict[str, Any], str]:
        values = evaluate(forward, sources)
        close_held_out(sources)
        return values, _table(values, sources)

    return measure


def _run_config(config: EvaluateConfig, checkpoint: Checkpoint) -> TrainConfig:
    """The run's configuration, with evaluation on and the flags given here in their places."""
    cfg = checkpoint.metadata.run.located
    names = ("eval_data_path", "eval_datasets", "eval_steps")
    given: dict[str, Any] = {name: value for name in names if (value := getattr(config, name))}
    given |= {"eval_at_start": True, "eval_test": config.eval_test}
    if not config.eval_test:
        given["test_data_path"] = ""
    data = replace(cfg.data, data_path=config.data_path or cfg.data.data_path)
    return replace(cfg, eval=replace(cfg.eval, **given), data=data)


def _table(values: dict[str, float], sources: Sequence[HeldOut]) -> str:
    rows_of = {f"{source.group}/{source.name}": source.num_rows for source in sources}
    rows = []
    for name in (key.removesuffix("/loss") for key in values if key.endswith("/loss")):
        of_group = sum(count for other, count in rows_of.items() if other.startswith(name + "/"))
        bits = values.get(f"{name}/bits_per_byte")
        losses = f"{values[f'{name}/loss']:.4f}", f"{values[f'{name}/ppl']:.2f}"
        shown_bits = "—" if bits is None else f"{bits:.4f}"
        rows.append((name, str(rows_of.get(name) or of_group), *losses, shown_bits))
    return table(("source", "rows", "loss", "perplexity", "bits/byte"), rows)
