"""The claim of a launch: rank 0 locks the folders, chooses and checks the checkpoint, and sends it to all.

    plan (every rank, nothing written) ─→ claim: lock → choose the start → broadcast → the same checks by all
                                           → only now the folder is made and written to

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
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from fms_fsdp.atomic import read_json, write_atomically
from fms_fsdp.checkpoint.checkpointer import DamagedCheckpoint, load_checkpoint
from fms_fsdp.checkpoint.folders import set_aside
from fms_fsdp.config import TrainConfig, as_dict
from fms_fsdp.data.kept_tokenizer import check_same_tokenizer, of_folder
from fms_fsdp.data.shards.manifest import Corpus
from fms_fsdp.data.stream import Stream
from fms_fsdp.errors import UserError, checking_input
from fms_fsdp.flags import Parsed
from fms_fsdp.mesh import Mesh
from fms_fsdp.models.llama import Llama
from fms_fsdp.optim.optimizers import Optimizers
from fms_fsdp.parts import load_part
from fms_fsdp.run.describe import announce, resolved
from fms_fsdp.run.limits import STOP_FILE
from fms_fsdp.run.lock import lock_folders
from fms_fsdp.run.plan import Plan, open_stream, start_from
from fms_fsdp.run.recorded import trained_with
from fms_fsdp.run.resume import Start, find_start
from fms_fsdp.run.status import Launch
from fms_fsdp.runtime import World, agreed, log, log_to_file, process_age_s

_SENTINEL = ".shared"


@dataclass(frozen=True)
class Claim:
    """What a launch holds: its number from 1, and the plan with its start. `suspect_step`: the last attempt
    ended because the data of this step are wrong."""

    attempt: int
    plan: Plan
    suspect_step: int | None


def claim(parsed: Parsed[TrainConfig], plan: Plan, mesh: Mesh) -> Claim:
    """Takes the folders for this run and chooses its start (collective: every rank). They stay locked until
    the launch ends.

    Raises:
        UserError, OSError: another run writes there, or the checkpoint does not fit; alike on every rank.
    """
    cfg, world = parsed.config, plan.world
    folder, root = Path(cfg.output_dir), Path(cfg.ckpt_save_path)

    def take() -> tuple[Start, dict[str, Any]]:
        if not folder.exists() and not root.exists():  # a new run is checked before its folder is made
            start_from(parsed, plan, _find_start(cfg, plan.corpus))
        lock_folders([folder, root])
        begin = _find_start(cfg, plan.corpus)
        _set_aside_own(cfg, begin.checkpoint.passed_over if begin.checkpoint else ())
        return begin, read_json(folder / "status.json")

    begin, last = agreed(take)
    plan = start_from(parsed, plan, begin)
    for shared in [folder] if root.is_relative_to(folder) else [folder, root]:
        _check_shared(shared, world, mesh)
    attempt = agreed(lambda: _last_attempt(folder) + 1)
    return Claim(attempt, plan, last.get("data_step"))


def _find_start(cfg: TrainConfig, corpus: Corpus | None) -> Start:
    """The start, whose weights of Hugging Face were looked at, and which is of the data's tokenizer."""
    begin = find_start(cfg)
    used = trained_with(begin.checkpoint) if begin.checkpoint is not None else None
    if begin.weights:
        folder, part = Path(begin.weights), load_part("hf_folder")
        part.open_folder(folder, "--init_from_hf")
        used = part.hf_tokenizer(folder, f"--init_from_hf ({folder})")
    if corpus is not None and used is not None:
        path = cfg.data.data_path
        remedy = "prepare the data with the tokenizer of the weights, or choose other weights"
        check_same_tokenizer(of_folder(f"--data_path ({path})", corpus.tokenizer, path), used, remedy)
    return begin


def restore(
    parsed: Parsed[TrainConfig], plan: Plan, stream: Stream, model: Llama, optimizers: Optimizers, mesh: Mesh
) -> tuple[Plan, Stream]:
    """Loads the weights or the checkpoint that the plan names; where files of a checkpoint turn out to be
    damaged, the newest sound one before it, which makes another plan (collective: every rank).

    Raises:
        UserError: none is sound.
    """
    if plan.begin.weights:
        with checking_input():
            load_part("hf_folder").load_weights(Path(plan.begin.weights), model, mesh)
    damaged: list[Path] = []

    def choose_again() -> Start:
        _set_aside_own(parsed.config, damaged[-1:])
        return find_start(parsed.config, damaged)

    while plan.checkpoint is not None:
        try:
            load_checkpoint(plan.checkpoint, model, optimizers if plan.continues else None, mesh)
            break
        except DamagedCheckpoint as error:
            log.error("%s; looking for an older one", error)
            damaged.append(error.folder)
        with checking_input():
            stream.close()
            plan = start_from(parsed, plan, agreed(choose_again))
            stream = open_stream(parsed.config, plan)
        announce(parsed.config, plan)
    return plan, stream


def look_at_suspect(stream: Stream, taken: Claim) -> None:
    """Reads the data that ended the last attempt, if this attempt needs them too.

    Raises:
        UserError: the data are still wrong.
    """
    step = taken.suspect_step
    if step is None or step <= taken.plan.start:
        return
    with checking_input(on_one_rank=True, data_step=step):
        stream.batch_at(step)


def _set_aside_own(cfg: TrainConfig, damaged: Iterable[Path]) -> None:
    """Renames a damaged checkpoint, in the run's own folder only, which this launch has locked."""
    for folder in damaged:
        if folder.resolve().parent == Path(cfg.ckpt_save_path).resolve() and folder.is_dir():
            log.warning("set aside: %s", set_aside(folder, "damaged"))


def record_launch(launch: Launch, cfg: TrainConfig, taken: Claim) -> None:
    """Writes the records of this launch into its folder (collective: every rank)."""
    folder, rank = Path(cfg.output_dir), taken.plan.world.rank

    def write() -> None:
        text = json.dumps({**as_dict(cfg), "resolved": resolved(taken.plan)}, indent=1) + "\n"
        for name in (f"config.{taken.attempt}.json", "config.json"):
            write_atomically(folder / name, text)
        _remove_old_request(folder / STOP_FILE)
        log_to_file(folder / "log.txt")
        launch.claim(folder)
        log.info("run folder %s (attempt %d)", folder, taken.attempt)

    agreed(write)
    if rank > 0:
        launch.claim(folder)
        if cfg.log.log_all_ranks:
            log_to_file(folder / f"log.rank{rank}.txt")


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
    deadline = time.monotonic() + 30.0
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
