"""The checks before any work: what the flags mean on this machine, in this world, with this data. No collective, no process group.

Order: flags (done by parsing) → world and mesh → data → checkpoint → memory → folders to write; the first failure is raised. Every rank reads the same files and so
comes to the same answer. Together with `main_training.py` this is the only module that sees the whole configuration.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

from fms_fsdp import runtime
from fms_fsdp.checkpoint.folders import Checkpoint
from fms_fsdp.checkpoint.retention import parse_schedule
from fms_fsdp.config import BatchPlan, TrainConfig, resolve_batch
from fms_fsdp.data.custom import load_builder
from fms_fsdp.data.held_out import HeldOut, open_held_out
from fms_fsdp.data.stream import build_stream
from fms_fsdp.flags import Parsed
from fms_fsdp.machine_checks import check_machine
from fms_fsdp.mesh import Layout, resolve_layout
from fms_fsdp.models.flops import num_params
from fms_fsdp.models.variants import LlamaConfig, resolve_model
from fms_fsdp.parallel.compile import check_compile
from fms_fsdp.parallel.memory import check_memory, estimate_memory
from fms_fsdp.resume import Start, check_model, differences, find_start, schedule_jump

# tracker → the package it needs, and what pip installs it by
_TRACKER_PACKAGES = {
    "wandb": ("wandb", "'fms_fsdp[track]'"),
    "mlflow": ("mlflow", "'fms_fsdp[track]'"),
    "aim": ("aim", "aim"),
    "codecarbon": ("codecarbon", "codecarbon"),
}
BATCH_FLAGS = ("batch_size", "grad_accum_steps", "global_batch_size")


@dataclass(frozen=True)
class Preflight:
    """What the checks found, alike on every rank. `corpus` is None for synthetic data and streams of the user's own."""

    world: runtime.World
    device: torch.device
    layout: Layout
    batch: BatchPlan
    corpus: Any
    model: LlamaConfig
    mixed_precision: bool
    begin: Start
    num_steps: int
    held_out: tuple[HeldOut, ...] = ()

    @property
    def checkpoint(self) -> Checkpoint | None:
        return self.begin.checkpoint

    @property
    def continues(self) -> bool:
        """Whether step, optimizer and data go on from the checkpoint."""
        return self.checkpoint is not None and self.begin.continues

    @property
    def start(self) -> int:
        """The last step already done."""
        return self.checkpoint.step if self.checkpoint is not None and self.continues else 0

    @property
    def tokens_at_start(self) -> int:
        return int(self.checkpoint.state["tokens_seen"]) if self.checkpoint is not None and self.continues else 0

    def resolved(self) -> dict[str, Any]:
        """What config.json and the log say beyond the flags."""
        return {
            "world_size": self.world.world_size,
            "device": str(self.device.type),
            "layout": asdict(self.layout),
            "batch": asdict(self.batch) | {"global_batch_size": self.batch.global_batch_size},
            "model": asdict(self.model) | {"num_params": num_params(self.model)},
            "mixed_precision": self.mixed_precision,
            "num_steps": self.num_steps,
            "versions": runtime.versions(),
        }

    def summary(self) -> str:
        """What a person wants to know before step 1."""
        batch, model = self.batch, self.model
        tokens = batch.global_batch_size * model.max_seq_len
        held_out = ", ".join(f"{source.group}/{source.name} {source.num_rows} rows" for source in self.held_out)
        return (
            f"model: {num_params(model):,} parameters, {'bf16 compute, fp32 master weights' if self.mixed_precision else 'fp32'}\n"
            f"world: {self.world.world_size} x {self.device.type}, {self.layout.strategy}: "
            f"{self.layout.dp_replicate} replicas x {self.layout.dp_shard} shards\n"
            f"batch: {batch.batch_size} rows x {batch.dp_size} ranks x {batch.grad_accum_steps} micro-steps = "
            f"{batch.global_batch_size} rows = {tokens:,} tokens a step"
            + (f"\nheld out: {held_out}" if held_out else "")
        )


def preflight(parsed: Parsed[TrainConfig], world: runtime.World) -> Preflight:
    """Everything that can be known to be wrong before the first collective.

    Raises:
        ValueError, OSError: the first check that fails, as one line.
    """
    cfg = parsed.config
    resolve_model(cfg.model, seq_length=cfg.data.seq_length)
    parse_schedule(cfg.checkpoint.checkpoint_schedule, cfg.checkpoint.checkpoint_interval)
    _check_trackers(cfg.log.trackers)
    device = runtime.pick_device(world)
    layout = resolve_layout(
        cfg.parallel,
        variant=cfg.model.model_variant,
        world_size=world.world_size,
        local_world_size=world.local_world_size,
    )
    if cfg.parallel.use_torch_compile:
        check_compile(device)
    check_machine(parsed, device, layout)
    batch = resolve_batch(cfg.training, layout.dp_size)
    mixed_precision = runtime.resolve_mixed_precision(cfg.parallel, device, cfg.keep_name)
    corpus = _open_data(cfg)
    vocab_size = corpus.vocab_size if corpus is not None else None
    model = resolve_model(cfg.model, seq_length=cfg.data.seq_length, data_vocab_size=vocab_size)
    rows = cfg.eval.eval_steps * batch.global_batch_size
    held_out = open_held_out(cfg.eval, cfg.data, corpus, vocab_size=model.vocab_size, max_rows=rows)
    found = Preflight(world, device, layout, batch, corpus, model, mixed_precision, Start(None, False, ""), 0, held_out)
    found = start_from(parsed, found, find_start(cfg))
    holder = torch.device("cpu") if cfg.parallel.cpu_offload else device
    estimate = estimate_memory(model, layout, mixed_precision=mixed_precision, batch=batch)
    check_memory(estimate, holder, world.local_world_size, cfg.model.model_variant)
    _make_writable("--output_dir", Path(cfg.output_dir))
    _make_writable("--ckpt_save_path", Path(cfg.ckpt_save_path))
    _check_disk(Path(cfg.ckpt_save_path), 12 * num_params(model))
    return found


def start_from(parsed: Parsed[TrainConfig], found: Preflight, begin: Start) -> Preflight:
    """`found` with that start, and the number of steps that follows from it.

    Raises:
        ValueError: the checkpoint is of another model or batch, or already past the end.
    """
    training, batch = parsed.config.training, found.batch
    found = replace(found, begin=begin)
    num_steps = training.steps_at(batch.global_batch_size, found.model.max_seq_len, found.start, found.tokens_at_start)
    parsed.config.optim.warmup(num_steps)
    if begin.checkpoint is not None:
        check_model(found.model, begin.checkpoint)
        _check_continuation(parsed, found, begin.checkpoint, num_steps)
    return replace(found, num_steps=num_steps)


def announce(cfg: TrainConfig, found: Preflight) -> None:
    """Logs what the run starts from, and what this launch changes in it."""
    runtime.log.info(found.begin.why)
    if found.continues:
        for line in differences(cfg, found.resolved(), found.begin):
            runtime.log.info(line)
        if jump := schedule_jump(cfg, found.num_steps, found.begin):
            runtime.log.warning(jump)


def _check_trackers(names: tuple[str, ...]) -> None:
    for name in set(names) & set(_TRACKER_PACKAGES):
        package, wanted = _TRACKER_PACKAGES[name]
        if find_spec(package) is None:
            raise ValueError(
                f"--trackers ({name}) needs the package {package}, which is not installed; pip install {wanted}"
            )


def _check_disk(folder: Path, needed: int) -> None:
    free = shutil.disk_usage(folder).free
    if free < needed:
        raise ValueError(
            f"--ckpt_save_path ({folder}) must have room for one checkpoint: {needed / 2**30:.1f} GiB, and {free / 2**30:.1f} GiB are free; "
            "free some or choose another folder"
        )


def _make_writable(flag: str, folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ValueError(
            f"{flag} ({folder}) must be a folder that can be made: {error.strerror}; choose another"
        ) from None
    if not os.access(folder, os.W_OK):
        raise ValueError(f"{flag} ({folder}) must be writable; choose another or change its permissions")


def _open_data(cfg: TrainConfig) -> Any:
    if cfg.data.dataset_builder:
        load_builder(cfg.data)
        return None
    if cfg.data.use_dummy_dataset:
        return None
    from fms_fsdp.data.manifest import open_corpus  # pyarrow: only where there are shards to read

    return open_corpus(cfg.data)


def _check_continuation(parsed: Parsed[TrainConfig], found: Preflight, checkpoint: Checkpoint, num_steps: int) -> None:
    if found.continues and num_steps < checkpoint.step:
        raise ValueError(
            f"--num_steps ({num_steps}) must not lie below the newest checkpoint (step {checkpoint.step} in {checkpoint.folder.parent}); "
            f"raise it or choose another --run_name"
        )
    rows = checkpoint.state["resolved"]["batch"]["global_batch_size"]
    if found.continues and rows != found.batch.global_batch_size and not any(f in parsed.origins for f in BATCH_FLAGS):
        raise ValueError(
            f"--global_batch_size ({found.batch.global_batch_size}) must stay that of the checkpoint ({rows}) unless a batch flag is given; "
            f"add --global_batch_size={rows} {parsed.config.keep_name} to keep it"
        )


def open_stream(cfg: TrainConfig, found: Preflight) -> Any:
    """This rank's rows, from the step after the checkpoint's; says what the flags change in a run that goes on.

    Raises:
        ValueError, OSError: the checkpoint's data state is of other data, or the batch or the length do not fit the data.
    """
    build: Callable[..., Any] = (
        load_builder(cfg.data) if cfg.data.dataset_builder else partial(build_stream, corpus=found.corpus)
    )
    stream = build(
        cfg.data,
        seed=cfg.training.seed,
        vocab_size=found.model.vocab_size,
        global_batch_size=found.batch.global_batch_size,
        dp_rank=found.world.rank,
        dp_size=found.layout.dp_size,
        pin_memory=found.device.type == "cuda",
    )
    if found.begin.fresh_data:
        stream.begin_after(found.start)
    elif found.checkpoint is not None and found.continues:
        try:
            changes = stream.load_state_dict(found.checkpoint.state["data"], found.start) or ()
        except (ValueError, FileNotFoundError) as error:
            raise ValueError(f"{error}; for other data choose another --run_name") from error
        for change in changes:
            runtime.log.info("from step %d on, %s", found.start + 1, change)
    last_step = getattr(stream, "last_step", None)
    if last_step is not None and found.num_steps > last_step:
        raise ValueError(
            f"--num_steps ({found.num_steps}) must not exceed {last_step}, the last step that --max_epochs ({cfg.data.max_epochs:g}) "
            f"leaves the shortest source; lower it or raise --max_epochs"
        )
    return stream
