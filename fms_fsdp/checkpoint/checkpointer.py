"""Checkpoints: one folder per step, written through torch.distributed.checkpoint, complete or absent.

    step_<N>.partial-<attempt>/   being written: DCP's shard files, .metadata, train_state.json
    step_<N>/                     complete: the folder is renamed once everything in it is on disk, and never reused

Tensors are stored under the model's own parameter names, whatever wraps the modules, so a checkpoint of any sharding loads into any other.
`train_state.json` holds what is no tensor: step, tokens seen, data state, configuration, versions.
"""

from __future__ import annotations

import json
import os
import re
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn

from fms_fsdp.models.init import clean_name

_STEP = re.compile(r"step_(\d+)")


@dataclass(frozen=True)
class Checkpoint:
    """A complete checkpoint: its folder and what `train_state.json` says."""

    folder: Path
    state: dict[str, Any]

    @property
    def step(self) -> int:
        return int(self.state["step"])


def is_complete(folder: Path) -> bool:
    """The one definition: a folder named step_<N> that holds DCP's metadata and our train state."""
    names = (".metadata", "train_state.json")
    return bool(_STEP.fullmatch(folder.name)) and all((folder / name).is_file() for name in names)


def complete_steps(root: Path) -> list[int]:
    """Steps of the complete checkpoints in `root`, ascending; [] where there is no such folder."""
    if not root.is_dir():
        return []
    return sorted(int(path.name[5:]) for path in root.iterdir() if is_complete(path))


def open_checkpoint(path: Path) -> Checkpoint | None:
    """The checkpoint at `path`: that step folder, or the newest complete one of that root; None without one."""
    if not is_complete(path):
        steps = complete_steps(path)
        if not steps:
            return None
        path = path / f"step_{steps[-1]}"
    return Checkpoint(path, json.loads((path / "train_state.json").read_text()))


def find_start(save_path: str, load_path: str) -> tuple[Checkpoint | None, bool]:
    """The checkpoint to start from, and whether it is this run's own (of `save_path`), which always wins over `load_path`.

    Raises:
        ValueError: `load_path` is given but holds no complete checkpoint.
    """
    own = open_checkpoint(Path(save_path))
    if own is not None or not load_path:
        return own, own is not None
    given = open_checkpoint(Path(load_path))
    if given is None:
        raise ValueError(
            f"--ckpt_load_path ({load_path}) must be a checkpoint root or a complete step_<N> folder; found none there"
        )
    return given, False


def _tensors(model: nn.Module, optimizer: torch.optim.Optimizer | None) -> dict[str, torch.Tensor]:
    """Every tensor to store or load in place, by a name free of wrappers."""
    found: dict[str, torch.Tensor] = {}
    for name, parameter in model.named_parameters():
        name = clean_name(name)
        found[f"model.{name}"] = parameter.detach()
        if optimizer is not None:
            for key, value in optimizer.state[parameter].items():
                found[f"optimizer.{name}.{key}"] = value
    return found


def save_checkpoint(
    root: Path, step: int, model: nn.Module, optimizer: torch.optim.Optimizer, state: dict[str, Any], *, attempt: int
) -> Path:
    """Writes `root/step_<step>` and returns it (collective: every rank). A complete one of that step is kept as it is."""
    final = root / f"step_{step}"
    if is_complete(final):
        return final
    partial = root / f"step_{step}.partial-{attempt}"
    partial.mkdir(parents=True, exist_ok=True)  # by whichever rank comes first; the attempt makes the name its own
    with _quiet_alone():
        dcp.save(_tensors(model, optimizer), checkpoint_id=partial, no_dist=not dist.is_initialized())
    if not dist.is_initialized() or dist.get_rank() == 0:
        with open(partial / "train_state.json", "w") as file:
            json.dump({"step": step, **state}, file, indent=1)
            file.flush()
            os.fsync(file.fileno())
        os.rename(partial, final)
    if dist.is_initialized():
        dist.barrier()
    return final


def load_checkpoint(checkpoint: Checkpoint, model: nn.Module, optimizer: torch.optim.Optimizer | None) -> None:
    """Fills the model, and the optimizer if given, in place from any sharding into any other (collective: every rank)."""
    with _quiet_alone():
        dcp.load(_tensors(model, optimizer), checkpoint_id=checkpoint.folder, no_dist=not dist.is_initialized())


@contextmanager
def _quiet_alone() -> Iterator[None]:
    """DCP warns that it works in a single process even when told so (torch 2.11 to 2.13)."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled, unavailable or uninitialized")
        yield
