"""The run folder: everything a run writes, under one path, by one run at a time.

config.json (the latest launch) · config.<attempt>.json (each launch) · status.json · metrics.jsonl · log.txt · tensorboard/ · checkpoints/ · profile_traces/ ·
stacks/ (of ranks that hung) · STOP (made by whoever wants the run to stop) · .lock · .shared
"""

from __future__ import annotations

import json
import re
import time
import uuid
from pathlib import Path
from typing import Any

import torch

from fms_fsdp.folder_lock import FolderLock
from fms_fsdp.runtime import World, agree_on, log, log_to_file, sum_over_ranks
from fms_fsdp.status import write_atomically

_SENTINEL = ".shared"
_held: list[FolderLock] = []  # until the process ends


def open_run_folder(
    folder: Path, checkpoints: Path, config: dict[str, Any], resolved: dict[str, Any], world: World
) -> int:
    """Takes the folders for this run, records this launch and returns its number, from 1 (collective: every rank).

    Raises:
        ValueError: another run writes there, or some node does not see what rank 0 writes.
    """
    roots = [folder] if checkpoints.is_relative_to(folder) else [folder, checkpoints]
    _take_locks(roots, world)
    for root in roots:
        _check_shared(root, world)
    attempt = 0
    if world.rank == 0:
        numbers = [re.fullmatch(r"config\.(\d+)\.json", path.name) for path in folder.iterdir()]
        attempt = 1 + max((int(match[1]) for match in numbers if match), default=0)
        text = json.dumps({**config, "resolved": resolved}, indent=1) + "\n"
        for name in (f"config.{attempt}.json", "config.json"):
            write_atomically(folder / name, text)
        log_to_file(folder / "log.txt")
        log.info("run folder %s (attempt %d)", folder, attempt)
    elif config["log"]["log_all_ranks"]:
        log_to_file(folder / f"log.rank{world.rank}.txt")
    return agree_on(attempt)


def _take_locks(roots: list[Path], world: World) -> None:
    problem = ""
    if world.rank == 0:
        try:
            _held.extend(FolderLock(root).take() for root in roots)
        except ValueError as error:
            problem = str(error)
    if agree_on(1 if problem else 0):
        raise ValueError(problem or f"folder ({roots[0]}) must have one writer; rank 0 says more")


def _check_shared(root: Path, world: World, patience_s: float = 30.0) -> None:
    """Every node sees the file that rank 0 writes; network file systems may take some seconds to show it."""
    if world.world_size <= world.local_world_size:
        return
    token = agree_on(uuid.uuid4().int % 2**60)
    if world.rank == 0:
        write_atomically(root / _SENTINEL, f"{token}\n")
    blind = 0
    if world.local_rank == 0:
        deadline = time.monotonic() + patience_s
        while not _reads(root / _SENTINEL, f"{token}\n"):
            if time.monotonic() > deadline:
                blind = 1
                break
            time.sleep(0.2)
    count = int(sum_over_ranks(torch.tensor([blind])).item())
    if count:
        raise ValueError(
            f"folder ({root}) must be shared by all nodes, and {count} of them do not see what rank 0 writes there; "
            "choose an --output_dir on a shared file system"
        )


def _reads(path: Path, text: str) -> bool:
    try:
        return path.read_text() == text
    except OSError:
        return False
