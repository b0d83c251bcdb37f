"""`python -m fms_fsdp ckpt list|verify|prune`: shows, checks and deletes checkpoints of a run."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path

from fms_fsdp.checkpoint import folders
from fms_fsdp.checkpoint.folders import CheckpointDeleted
from fms_fsdp.config import flag
from fms_fsdp.errors import UserError
from fms_fsdp.run.run_dir import lock_folder
from fms_fsdp.state import TrainMetadata
from fms_fsdp.tools.table import table

LIST_HEAD = ("checkpoint", "GiB", "tokens", "validation loss", "state")
_PATH = "run directory, folder of checkpoints, or one checkpoint"


@dataclass(frozen=True)
class CkptListConfig:
    """Lists every checkpoint with its size, tokens, validation loss and state."""

    path: str = flag("", _PATH, positional=True, form="path")


@dataclass(frozen=True)
class CkptVerifyConfig:
    """Compares every byte of every checkpoint with its checksum."""

    path: str = flag("", _PATH, positional=True, form="path")
    weights: bool = flag(False, "also read every weight, and find non-finite and absurd values")


@dataclass(frozen=True)
class CkptPruneConfig:
    """Deletes checkpoints; without --yes the command only shows which."""

    path: str = flag("", "run directory or folder of checkpoints", form="path")
    after: int | None = flag(None, "delete all checkpoints of later steps", min=0)
    leftovers: bool = flag(False, "also delete unfinished, corrupt and superseded checkpoints")
    yes: bool = flag(False, "delete; without this flag nothing is changed")


def list_checkpoints(config: CkptListConfig) -> None:
    print(table(LIST_HEAD, checkpoint_rows(config.path), text_columns=(0, 4)))


def checkpoint_rows(path: str) -> list[tuple[str, ...]]:
    """Returns name, GiB, tokens, validation loss and state of every checkpoint at `path`."""
    rows: list[tuple[str, ...]] = []
    for folder in _step_folders(path):
        try:
            state, gib = _problem(folder), _gib(folder)
            metadata = TrainMetadata(0) if state else folders.read_metadata(folder)
        except (CheckpointDeleted, FileNotFoundError):  # by its run, after it was listed
            continue
        if not state and (health := folders.describe_health(metadata)):
            state = f"complete, {health}"
        loss = metadata.validation_loss
        shown_loss = "—" if loss is None else f"{loss:.4f}"
        shown_tokens = f"{metadata.tokens_seen:,}"
        rows.append((folder.name, gib, shown_tokens, shown_loss, state or "complete"))
    for folder, state in folders.leftovers(_root(path)):
        rows.append((folder.name, _gib(folder), "", "", state))
    return rows


def verify_checkpoints(config: CkptVerifyConfig) -> None:
    """Raises UserError if a checkpoint is corrupt, or with --weights if its weights are useless."""
    bad = []
    for folder in _step_folders(config.path):
        try:
            reason = _problem(folder, deep=True, weights=config.weights)
            num_files = 0 if reason else len(folders.read_files(folder)) + 1
            shown = reason or f"valid: {num_files} files, {_gib(folder)} GiB"
        except (CheckpointDeleted, FileNotFoundError):
            reason, shown = "", "deleted by its run in the meantime"
        if reason:
            bad.append(folder.name)
        print(f"{folder.name:<16} {shown}", flush=True)
    if bad:
        raise UserError(
            f"{config.path} has {len(bad)} bad checkpoints ({', '.join(bad)}); restore or delete them"
        )


def prune_checkpoints(config: CkptPruneConfig) -> None:
    """Deletes the checkpoints after a step, and folders that are not usable checkpoints."""
    root = _root(config.path)
    with lock_folder(root) if config.yes else nullcontext():
        steps = folders.checkpoint_steps(root)
        corrupt = {step for step in steps if config.leftovers and _problem(root / f"step_{step}")}
        later = {step for step in steps if config.after is not None and step > config.after}
        doomed = [root / f"step_{step}" for step in sorted(corrupt | later)]
        if config.leftovers:
            doomed += [folder for folder, _ in folders.leftovers(root)]
        gib = sum(map(folders.folder_bytes, doomed)) / 2**30
        for folder in doomed:
            print(f"{'deleted' if config.yes else 'would delete'} {folder}")
            if config.yes:
                folders.delete(folder)
    kept, hint = len(set(steps) - corrupt - later), "" if config.yes else "; add --yes to delete"
    print(f"{gib:.3f} GiB in {len(doomed)} folders, {kept} checkpoints kept{hint}")


def _problem(folder: Path, *, deep: bool = False, weights: bool = False) -> str:
    try:
        if reason := folders.problem(folder):
            return reason
        if deep:
            from fms_fsdp.checkpoint.io import CheckpointReader
            from fms_fsdp.tools.ckpt_inspect import useless_weights

            found = folders.corrupt_files(folder)
            if not found:
                CheckpointReader(folder).read_metadata()
                found = useless_weights(folder) if weights else []
            return "; ".join(found)
        return ""
    except CheckpointDeleted:
        raise
    except UserError as error:
        return str(error)
    except OSError as error:
        return f"{Path(error.filename or folder).name} cannot be read: {error.strerror}"


def _gib(folder: Path) -> str:
    return f"{folders.folder_bytes(folder) / 2**30:.3f}"


def _root(path: str) -> Path:
    if not path:
        raise UserError("--path is missing; set --path=runs/NAME")
    root = folders.checkpoint_root(Path(path).expanduser())
    if not root.is_dir():
        raise UserError(f"--path={path} is not a folder; set it to a run directory")
    return root.parent if root.name.startswith("step_") else root


def _step_folders(path: str) -> list[Path]:
    """Returns the checkpoint that `path` names, or all."""
    root, name = _root(path), Path(path).name
    steps = [root / f"step_{step}" for step in folders.checkpoint_steps(root)]
    return [folder for folder in steps if folder.name == name or not name.startswith("step_")]
