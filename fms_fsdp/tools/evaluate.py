"""`python -m fms_fsdp evaluate`: loss, perplexity and bits per byte of a checkpoint, also under torchrun."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from fms_fsdp.checkpoint.checkpointer import DamagedCheckpoint, load_checkpoint
from fms_fsdp.checkpoint.folders import Checkpoint
from fms_fsdp.config import ParallelConfig, TrainConfig, flag
from fms_fsdp.config.flag import flag_values
from fms_fsdp.config.rule import Rule, judge
from fms_fsdp.data.held_out import HeldOut, close_held_out, open_held_out, scan_held_out
from fms_fsdp.errors import RunFailed, UserError
from fms_fsdp.evaluate import Forward, evaluate
from fms_fsdp.mesh import Mesh, resolve_dims
from fms_fsdp.parallel.parallelize import parallelize
from fms_fsdp.parts import load_part
from fms_fsdp.runtime import World, group_timeout, pick_device, set_up_log, start, stop
from fms_fsdp.spec.origin import trained_with
from fms_fsdp.tools.table import table
from fms_fsdp.tools.trained_run import find_checkpoint

# evaluates a model: numbers by name, and a table of them for the screen
Measure = Callable[[Forward], tuple[dict[str, Any], str]]


def _needs(name: str, tasks: bool) -> Rule[EvaluateConfig]:
    """The rule that a flag is given beside --tasks alone, or alone without."""
    text = "has no effect without --tasks" if tasks else "has no effect beside --tasks"
    return Rule(
        name, lambda c: not getattr(c, name) or bool(c.tasks) == tasks, text, "leave one flag out", "tasks"
    )


_RULES = (
    *(_needs(name, True) for name in ("task_path", "num_fewshot", "limit")),
    *(_needs(name, False) for name in ("eval_data_path", "eval_datasets", "eval_steps", "eval_test")),
)


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
    batch_size: int | None = flag(None, "rows of a pass on each device (default: the run's)", minimum=1)
    tasks: tuple[str, ...] = flag((), "tasks of lm-evaluation-harness in place of held-out data")
    task_path: str = flag("", "folder of YAML files that describe more tasks")
    num_fewshot: int | None = flag(
        None, "solved examples before each question (default: the task's)", minimum=0
    )
    limit: int | None = flag(None, "only the first questions of each task, for a trial", minimum=1)
    json: bool = flag(False, "print one JSON object")

    def __post_init__(self) -> None:
        judge(_RULES, self, flag_values(self))


def main(config: EvaluateConfig) -> None:
    """The command; also under torchrun, where the checkpoint is sharded over all processes."""
    checkpoint = find_checkpoint(config.path, config.step, "--path")
    cfg, record = _run_config(config, checkpoint), checkpoint.saved.record
    world = World.from_env()
    set_up_log(world)
    if config.tasks:
        measure = load_part("harness:find_measure", folder="tools")(config, checkpoint)
    else:
        measure = _find_measure(cfg, checkpoint)
    device = pick_device(world)
    parallel = ParallelConfig(
        collective_timeout_s=cfg.parallel.collective_timeout_s,
        dist_backend=cfg.parallel.dist_backend,
        use_torch_compile=False,
    )
    dims = resolve_dims(parallel, "", world)
    start(parallel, cfg.training, world, device, group=dims.strategy != "none")
    mesh = Mesh(dims, world.rank, device.type, group_timeout(parallel))
    model = parallelize(
        record.model, parallel, mesh, device=device, precision=record.precision, seed=cfg.training.seed
    )
    batch_size = config.batch_size or record.batch.batch_size
    forward = Forward(model, batch_size, cfg.data.document_mask, device, mesh)
    try:
        load_checkpoint(checkpoint, model, None, mesh)
        values, text = measure(forward)
    except (DamagedCheckpoint, RunFailed, UserError) as error:
        raise UserError(str(error)) from error
    if world.rank == 0:
        place = {"step": checkpoint.step, "tokens_seen": checkpoint.saved.tokens_seen}
        title = f"{checkpoint.folder}: {checkpoint.saved.tokens_seen:,} tokens trained on"
        print(json.dumps(place | values) if config.json else f"{title}\n{text}")
    del model, forward, mesh
    stop()


def _find_measure(cfg: TrainConfig, checkpoint: Checkpoint) -> Measure:
    """What evaluates a model on the held-out data, which are opened here."""
    record, used = checkpoint.saved.record, trained_with(checkpoint)
    found = scan_held_out(cfg.eval, cfg.data, None, vocab_size=record.model.vocab_size, used=used)
    sources = open_held_out(cfg.eval, found, record.batch.global_batch_size)

    def measure(forward: Forward) -> tuple[dict[str, Any], str]:
        values = evaluate(forward, sources)
        close_held_out(sources)
        return values, _table(values, sources)

    return measure


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
