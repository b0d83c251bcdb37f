"""`python -m fms_fsdp ckpt list|verify|prune`: lists, checks and deletes checkpoints of a run."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path

from fms_fsdp.checkpoint import folders
from fms_fsdp.checkpoint.folders import CheckpointDeleted
from fms_fsdp.config.values import counted
from fms_fsdp.console import table
from fms_fsdp.errors import UserError
from fms_fsdp.run.run_dir import lock_folder
from fms_fsdp.state import TrainMetadata
from fms_fsdp.tools.tool_flags import (
    CkptListConfig,
    CkptPruneConfig,
    CkptVerifyConfig,
)

LIST_HEAD = ("checkpoint", "GiB", "tokens", "validation loss", "state")


class Unreadable(Exception):
    """A file of a checkpoint cannot be read, which says nothing about its content."""


def list_checkpoints(config: CkptListConfig) -> None:
    rows = checkpoint_rows(config.path)
    if rows:
        print(table(LIST_HEAD, rows, text_columns=(0, 4)))
    else:
        print(f"no checkpoint in {config.path}")


def checkpoint_rows(path: str) -> list[tuple[str, ...]]:
    """Returns name, GiB, tokens, validation loss and state of every checkpoint at `path`."""
    rows: list[tuple[str, ...]] = []
    for folder in _step_folders(path):
        metadata = TrainMetadata(0)
        try:
            gib = _gib(folder)
            state = _problem(folder)
            if not state:
                metadata = folders.read_metadata(folder)
                health = folders.describe_health(metadata)
                state = f"complete, {health}" if health else "complete"
        except Unreadable as error:
            state = str(error)
        except (CheckpointDeleted, FileNotFoundError):  # by its run, after it was listed
            continue
        loss = metadata.validation_loss
        shown_loss = "—" if loss is None else f"{loss:.4f}"
        rows.append((folder.name, gib, f"{metadata.tokens_seen:,}", shown_loss, state))
    for folder, state in folders.leftovers(_root(path)):
        rows.append((folder.name, _gib(folder), "", "", state))
    return rows


def verify_checkpoints(config: CkptVerifyConfig) -> None:
    """Raises UserError if a checkpoint is corrupt, or with --weights if its weights are useless."""
    bad = []
    unreadable = []
    step_folders = _step_folders(config.path)
    if not step_folders:
        raise UserError(f"--path={config.path} has no checkpoint to verify; check the path")
    for folder in step_folders:
        try:
            reason = _problem(folder, deep=True, weights=config.weights)
            shown = reason
            if not reason:
                num_files = len(folders.read_files(folder)) + 1  # the list of files, too
                shown = f"valid: {num_files} files, {_gib(folder)} GiB"
        except (CheckpointDeleted, FileNotFoundError):
            reason = ""
            shown = "deleted by its run in the meantime"
        except Unreadable as error:
            reason = ""
            shown = str(error)
            unreadable.append(folder.name)
        if reason:
            bad.append(folder.name)
        print(f"{folder.name:<16} {shown}", flush=True)
    if bad:
        raise UserError(
            f"{config.path} has {counted(len(bad), 'bad checkpoint')} ({', '.join(bad)}); restore "
            "or delete them"
        )
    if unreadable:  # they may be valid
        raise UserError(
            f"{config.path} has {counted(len(unreadable), 'checkpoint')} that cannot be read "
            f"({', '.join(unreadable)}); repair the storage, and verify again"
        )


def prune_checkpoints(config: CkptPruneConfig) -> None:
    """Deletes the checkpoints after a step, and folders that are not usable checkpoints."""
    root = _root(config.path)
    with lock_folder(root) if config.yes else nullcontext():
        steps = folders.checkpoint_steps(root)
        corrupt = set[int]()
        if config.leftovers:
            corrupt = {step for step in steps if _is_corrupt(root / f"step_{step}")}
        later = {step for step in steps if config.after is not None and step > config.after}
        doomed = [root / f"step_{step}" for step in sorted(corrupt | later)]
        if config.leftovers:
            doomed += [folder for folder, _ in folders.leftovers(root)]
        gib = sum(map(folders.folder_bytes, doomed)) / 2**30
        for folder in doomed:
            print(f"{'deleted' if config.yes else 'would delete'} {folder}")
            if config.yes:
                folders.delete(folder)
    kept = len(set(steps) - corrupt - later)
    hint = "" if config.yes else "; add --yes to delete"
    noun = "folder" if len(doomed) == 1 else "folders"
    print(f"{gib:.3f} GiB in {len(doomed)} {noun}, {kept} checkpoints kept{hint}")


def _is_corrupt(folder: Path) -> bool:
    """Returns whether a checkpoint is corrupt; one that cannot be read now may be valid."""
    try:
        return bool(_problem(folder))
    except Unreadable as error:
        print(f"kept {folder}: {error}")
        return False


def _problem(folder: Path, *, deep: bool = False, weights: bool = False) -> str:
    """Returns why a checkpoint is not usable, or "".

    Raises:
        CheckpointDeleted: the folder is gone. Unreadable: a file cannot be read.
    """
    try:
        reason = folders.problem(folder)
        if reason or not deep:
            return reason
        corrupt = folders.corrupt_files(folder)
        if corrupt:
            return "; ".join(corrupt)
        # Only the whole check needs torch.
        from fms_fsdp.checkpoint.io import CheckpointReader
        from fms_fsdp.tools.tensor_stats import useless_weights

        CheckpointReader(folder).read_metadata()
        CheckpointReader(folder).read_part({})  # which resumes need
        if weights:
            return "; ".join(useless_weights(folder))
        return ""
    except CheckpointDeleted:
        raise
    except UserError as error:
        return str(error)
    except OSError as error:
        name = Path(error.filename or folder).name
        raise Unreadable(f"{name} cannot be read: {error.strerror}") from error


def _gib(folder: Path) -> str:
    return f"{folders.folder_bytes(folder) / 2**30:.3f}"


def _root(path: str) -> Path:
    if not path:
        raise UserError("--path is missing; set --path=runs/NAME")
    root = folders.checkpoint_root(Path(path).expanduser())
    if not root.is_dir():
        raise UserError(f"--path={path} is not a folder; set it to a run directory")
    return root.parent if folders.is_step_name(root.name) else root


def _step_folders(path: str) -> list[Path]:
    """Returns the checkpoint that `path` names, or all."""
    root = _root(path)
    name = Path(path).name
    steps = [root / f"step_{step}" for step in folders.checkpoint_steps(root)]
    if not folders.is_step_name(name):
        return steps
    return [folder for folder in steps if folder.name == name]
