"""The claim of a launch: rank 0 locks the folders, chooses the checkpoint, and sends it to all.

    folders that exist: locked → origin → broadcast → `resolve` on all ranks → new folders: made, locked

So a refused launch makes no folder, and nobody else writes what the launch read.

config.json (the latest launch) · config.<attempt>.json (each launch) · status.json · metrics.jsonl · log.txt
· tensorboard/ · checkpoints/ · profile_traces/ · stacks/ (of ranks that hung) · slurm_job · STOP (made by
whoever wants the run to stop) · .lock · .shared
"""

from __future__ import annotations

import json
import re
import time
import uuid
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from fms_fsdp.atomic import read_json, write_atomically
from fms_fsdp.checkpoint.checkpointer import DamagedCheckpoint, load_checkpoint
from fms_fsdp.checkpoint.folders import named_steps, set_aside
from fms_fsdp.config import TrainConfig
from fms_fsdp.data.held_out import close_held_out
from fms_fsdp.data.stream import Stream
from fms_fsdp.errors import UserError, checking_input
from fms_fsdp.mesh import Mesh
from fms_fsdp.models.llama import Llama
from fms_fsdp.optim.optimizers import Optimizers
from fms_fsdp.parts import load_part
from fms_fsdp.run.limits import STOP_FILE
from fms_fsdp.run.lock import lock_folders
from fms_fsdp.run.status import Launch
from fms_fsdp.runtime import World, agreed, log, log_to_file, process_age_s
from fms_fsdp.spec.data import Inputs
from fms_fsdp.spec.machine import Machine
from fms_fsdp.spec.origin import Origin, choose_origin, find_origin
from fms_fsdp.spec.resolve import Spec, open_stream, resolve
from fms_fsdp.spec.words import announce
from fms_fsdp.state import Progress, TrainState

_SENTINEL = ".shared"
_SHOWN_WITHIN_S = 30.0  # by a network file system


@dataclass(frozen=True)
class Claim:
    """What a launch holds: its number from 1. `suspect_step`: the last attempt ended because the data of this
    step are wrong."""

    attempt: int
    suspect_step: int | None


def claim(cfg: TrainConfig, machine: Machine, inputs: Inputs, mesh: Mesh) -> tuple[Spec, Claim]:
    """Takes the folders for this run and resolves the launch (collective: every rank). The folders stay
    locked until the launch ends.

    Raises:
        UserError, OSError: another run writes there, or the checkpoint does not fit; alike on every rank.
    """
    folder, root = Path(cfg.output_dir), Path(cfg.ckpt_save_path)
    is_new = not root.exists()

    def choose() -> Origin:
        lock_folders(path for path in (folder, root) if path.exists())
        return find_origin(cfg, inputs.corpus)

    def take() -> tuple[int, int | None]:
        lock_folders([folder, root])
        if is_new and named_steps(root):
            raise UserError(
                f"folder ({root}) must have one writer, and another began this run; start it again"
            )
        _set_aside_own(cfg, origin.checkpoint.passed_over if origin.checkpoint else ())
        return _last_attempt(folder) + 1, read_json(folder / "status.json").get("data_step")

    origin = agreed(choose)
    spec = resolve(cfg, machine, inputs, origin)
    taken = Claim(*agreed(take))
    for shared in [folder] if root.is_relative_to(folder) else [folder, root]:
        _check_shared(shared, machine.world, mesh)
    return spec, taken


def record_launch(launch: Launch, spec: Spec, taken: Claim) -> None:
    """Writes the records of this launch into its folder (collective: every rank)."""
    folder, rank = Path(spec.config.output_dir), spec.world.rank

    def write() -> None:
        text = json.dumps(spec.content, indent=1) + "\n"
        for name in (f"config.{taken.attempt}.json", "config.json"):
            write_atomically(folder / name, text)
        _remove_old_request(folder / STOP_FILE)
        log_to_file(folder / "log.txt")
        launch.claim(folder)
        log.info("run folder %s (attempt %d)", folder, taken.attempt)

    agreed(write)
    if rank > 0:
        launch.claim(folder)
        if spec.config.log.log_all_ranks:
            log_to_file(folder / f"log.rank{rank}.txt")


def look_at_suspect(stream: Stream, spec: Spec, step: int | None) -> None:
    """Reads the data that ended the last attempt, if this attempt needs them too.

    Raises:
        UserError: the data are still wrong.
    """
    if step is None or step <= spec.start:
        return
    with checking_input(on_one_rank=True, data_step=step):
        stream.batch_at(step)


def restore(
    spec: Spec, stream: Stream, model: Llama, optimizers: Optimizers, mesh: Mesh
) -> tuple[Spec, TrainState]:
    """Loads the weights or the checkpoint that the run starts from; where files of a checkpoint turn out to
    be damaged, the newest sound one before it, which makes another spec (collective: every rank).

    Raises:
        UserError: none is sound.
    """
    cfg, damaged = spec.config, list[Path]()
    if spec.origin.weights:
        with checking_input():
            load_part("hf_folder").load_weights(Path(spec.origin.weights), model, mesh)

    def choose_again() -> Origin:
        _set_aside_own(cfg, damaged[-1:])
        return choose_origin(cfg, damaged)

    while (checkpoint := spec.origin.checkpoint) is not None:
        try:
            load_checkpoint(checkpoint, model, optimizers if spec.origin.continues else None, mesh)
            break
        except DamagedCheckpoint as error:
            log.error("%s; looking for an older one", error)
            damaged.append(error.folder)
        with checking_input():
            stream.close()
            close_held_out(spec.held_out)
            again = resolve(cfg, spec.machine, spec.inputs, agreed(choose_again))
            spec = replace(again, chosen={**spec.chosen, **again.chosen})
            stream = open_stream(spec)
        announce(spec)
    return spec, _begin_state(spec, stream, model, optimizers)


def _begin_state(spec: Spec, stream: Stream, model: Llama, optimizers: Optimizers) -> TrainState:
    """The state before the first step of this launch; fp16 goes on with the loss scale of the checkpoint."""
    timeline, loss_scale = spec.timeline, None
    rows = timeline.rows_at_start
    rows_at_end = rows + timeline.batches.rows_of(spec.num_steps - spec.start)
    progress = Progress(spec.start, spec.num_steps, rows, timeline.tokens_at_start, rows_at_end)
    if spec.precision.compute == "fp16":
        loss_scale = load_part("loss_scale:LossScale")(spec.config.precision, spec.device)
        if saved := spec.origin.saved.loss_scale:
            loss_scale.load_state_dict(saved)
    state = TrainState(model, optimizers, stream, progress, loss_scale)
    if spec.precision.rounded_copy:
        seed = spec.config.training.seed
        state.rounding = load_part("rounded_copy:RoundedCopy")(model, seed).of_step
    return state


def _set_aside_own(cfg: TrainConfig, damaged: Iterable[Path]) -> None:
    """Renames a damaged checkpoint, in the run's own folder only, which this launch has locked."""
    for folder in damaged:
        if folder.resolve().parent == Path(cfg.ckpt_save_path).resolve() and folder.is_dir():
            log.warning("set aside: %s", set_aside(folder, "damaged"))


def _last_attempt(folder: Path) -> int:
    numbers = [re.fullmatch(r"config\.(\d+)\.json", path.name) for path in folder.iterdir()]
    return max((int(match[1]) for match in numbers if match), default=0)


def _remove_old_request(file: Path) -> None:
    """Removes a STOP file that an earlier launch was asked to obey, or that is dated ahead of the clock."""
    now = time.time()
    if file.exists() and not now - process_age_s() <= file.stat().st_mtime <= now + 1:
        file.unlink(missing_ok=True)


def _check_shared(root: Path, world: World, mesh: Mesh) -> None:
    """Every node sees the file that rank 0 writes; network file systems may take some seconds to show it.

    Raises:
        UserError: some node does not.
    """
    if world.world_size <= world.local_world_size:
        return

    def write() -> str:
        text = f"{uuid.uuid4().hex}\n"
        write_atomically(root / _SENTINEL, text)
        return text

    text, sees = agreed(write), world.local_rank > 0  # one rank of a node looks for all
    deadline = time.monotonic() + _SHOWN_WITHIN_S
    while not sees and time.monotonic() < deadline:
        with suppress(OSError):
            sees = (root / _SENTINEL).read_text() == text
        time.sleep(0 if sees else 0.2)
    count = int(mesh.sum(torch.tensor([int(not sees)]), "world").item())
    if count:
        raise UserError(
            f"folder ({root}) must be shared by all nodes, and {count} of them do not see what rank 0 writes "
            "there; choose an --output_dir on a shared file system"
        )
