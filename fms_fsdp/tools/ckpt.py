"""`python -m fms_fsdp ckpt list|verify|prune`: look at, check and thin out the checkpoints of a run."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path

from fms_fsdp.checkpoint import folders
from fms_fsdp.checkpoint.retention import KeepPolicy
from fms_fsdp.config import flag
from fms_fsdp.config.outputs import KeepConfig
from fms_fsdp.errors import UserError
from fms_fsdp.record import Saved
from fms_fsdp.run.lock import lock_folder
from fms_fsdp.tools.table import table

LIST_HEAD = ("checkpoint", "GiB", "tokens", "validation loss", "state")
_WHERE = "a run folder, a folder of checkpoints or one checkpoint"


@dataclass(frozen=True)
class CkptListConfig:
    """Every checkpoint with its size, tokens, validation loss and health."""

    path: str = flag("", _WHERE, positional=True)


@dataclass(frozen=True)
class CkptVerifyConfig:
    """Every byte of every checkpoint against the checksums, and every tensor as a run would load it."""

    path: str = flag("", _WHERE, positional=True)


@dataclass(frozen=True)
class CkptPruneConfig(KeepConfig):
    """Deletes checkpoints; without --yes the command only shows which."""

    path: str = flag("", "a run folder or a folder of checkpoints")
    after: int | None = flag(None, "delete all checkpoints of later steps", minimum=0)
    leftovers: bool = flag(False, "delete also unfinished, damaged and superseded checkpoints")
    yes: bool = flag(False, "delete; without this flag nothing is touched")


def list_checkpoints(config: CkptListConfig) -> None:
    """The command `ckpt list`."""
    print(table(LIST_HEAD, checkpoint_rows(config.path), text_columns=(0, 4)))


def checkpoint_rows(path: str) -> list[tuple[str, ...]]:
    """Of every checkpoint at `path`: its name, GiB, tokens, validation loss and state.

    Raises:
        UserError: there is no such folder.
    """
    rows = list[tuple[str, ...]]()
    for folder in _folders(path):
        wrong = _problems(folder)
        saved = Saved(0) if wrong else folders.read_state(folder)
        loss, tokens = saved.validation_loss, f"{saved.tokens_seen:,}"
        shown_loss = "—" if loss is None else f"{loss:.4f}"
        rows.append((folder.name, _gib(folder), tokens, shown_loss, wrong[0] if wrong else "complete"))
    for folder, word in folders.leftovers(_root(path)):
        rows.append((folder.name, _gib(folder), "", "", word))
    return rows


def verify_checkpoints(config: CkptVerifyConfig) -> None:
    """The command `ckpt verify`. Raises: UserError if any file is not what was written."""
    bad = []
    for folder in _folders(config.path):
        wrong = _problems(folder, deep=True)
        if wrong:
            bad.append(folder.name)
        sound = "" if wrong else f"sound: {len(folders.read_files(folder)) + 1} files, {_gib(folder)} GiB"
        print(f"{folder.name:<16} {'; '.join(wrong) or sound}", flush=True)
    if bad:
        rule = f"holds {len(bad)} damaged checkpoints ({', '.join(bad)})"
        raise UserError(f"--path ({config.path}) {rule}; remove these folders: every run passes over them")


def prune_checkpoints(config: CkptPruneConfig) -> None:
    """The command `ckpt prune`: deletes by the policy among sound checkpoints.

    Damaged ones never count as kept, and go with the leftovers. The newest that is kept is read to its last
    byte before anything is deleted.
    """
    root = _root(config.path)
    complete, ranked, known = folders.complete_steps(root), dict[int, float](), folders.named_steps(root)
    policy = KeepPolicy.of(config)
    for step in complete:
        if (value := folders.read_state(root / f"step_{step}").metric(policy.metric)) is not None:
            ranked[step] = value
    while policy.to_delete(complete, ranked):
        if not (wrong := _problems(root / f"step_{complete[-1]}", deep=True)):
            break
        print(f"step_{complete[-1]} does not count: {wrong[0]}")
        del complete[-1]
    unwanted = set(policy.to_delete(complete, ranked))
    if config.after is not None:
        unwanted |= {step for step in known if step > config.after}
    if config.leftovers:
        unwanted |= set(known) - set(complete)
    doomed = [root / f"step_{step}" for step in sorted(unwanted)]
    if config.leftovers:
        doomed += [folder for folder, _ in folders.leftovers(root)]
    freed = sum(map(folders.tree_bytes, doomed))
    with lock_folder(root) if config.yes else nullcontext():
        for folder in doomed:
            print(f"{'deleted' if config.yes else 'would delete'} {folder}")
            if config.yes:
                folders.delete(folder)
    kept, remedy = len(set(complete) - unwanted), "" if config.yes else "; add --yes to delete"
    print(f"{freed / 2**30:.3f} GiB in {len(doomed)} folders, {kept} checkpoints kept{remedy}")


def _gib(folder: Path) -> str:
    return f"{folders.tree_bytes(folder) / 2**30:.3f}"


def _problems(folder: Path, *, deep: bool = False) -> list[str]:
    """Why a run would not start from the checkpoint; `deep` reads it as the run does."""
    try:
        wrong = folders.problems(folder, deep=deep)
        if deep and not wrong:
            from fms_fsdp.optim.optimizers import build_optimizers
            from fms_fsdp.tools.ckpt_content import content_problems  # torch: not for a list

            section = folders.read_state(folder).record.config.optim
            wrong = content_problems(folder, lambda model: build_optimizers(section, model))
        return wrong
    except OSError as error:
        return [f"{Path(error.filename or folder).name} cannot be read: {error.strerror}"]


def _root(path: str) -> Path:
    if not path:
        raise UserError("--path () must name a run folder or a folder of checkpoints; add --path=runs/NAME")
    given = Path(path)
    root = given / "checkpoints" if (given / "checkpoints").is_dir() else given
    if not root.is_dir():
        raise UserError(f"--path ({path}) must be a folder; found none there")
    return root.parent if root.name.startswith("step_") else root


def _folders(path: str) -> list[Path]:
    """The checkpoints at `path`: the one that it names, or all."""
    root, name = _root(path), Path(path).name
    steps = [root / f"step_{step}" for step in folders.named_steps(root)]
    return [folder for folder in steps if folder.name == name or not name.startswith("step_")]
