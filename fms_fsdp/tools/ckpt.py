"""`python -m fms_fsdp ckpt list|verify|prune`: look at, check and thin out the checkpoints of a run."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path

from fms_fsdp.checkpoint.folders import (
    complete_steps,
    delete,
    leftovers,
    named_steps,
    problems,
    read_files,
    read_state,
    tree_bytes,
)
from fms_fsdp.checkpoint.retention import KeepPolicy
from fms_fsdp.config import flag
from fms_fsdp.run.lock import FolderLock

_GIB = 2**30


@dataclass(frozen=True)
class ListConfig:
    """Every checkpoint with its size, tokens, validation loss and health."""

    path: str = flag("", "a run folder, a folder of checkpoints or one checkpoint")


@dataclass(frozen=True)
class VerifyConfig:
    """Every byte of every checkpoint against the checksums, and every tensor as a run would load it."""

    path: str = flag("", "a run folder, a folder of checkpoints or one checkpoint")


@dataclass(frozen=True)
class PruneConfig:
    """Deletes checkpoints; only shows which, unless told --yes."""

    path: str = flag("", "a run folder or a folder of checkpoints")
    keep_last_n: int = flag(0, "keep the newest N; 0 keeps all", minimum=0)
    keep_every: int = flag(0, "of the others keep the multiples of this", minimum=0)
    keep_best: int = flag(0, "and the N of the lowest validation loss", minimum=0)
    keep_steps: tuple[int, ...] = flag((), "and these")
    after: int | None = flag(None, "delete all checkpoints past this step", minimum=0)
    leftovers: bool = flag(False, "delete unfinished, damaged and superseded ones too")
    yes: bool = flag(False, "delete; without it nothing is touched")


def run_list(config: ListConfig) -> None:
    for folder in _folders(config.path):
        wrong = _problems(folder)
        state = {} if wrong else read_state(folder)
        loss = state.get("validation_loss")
        print(
            f"{folder.name:<16} {tree_bytes(folder) / _GIB:9.3f} GiB  tokens {state.get('tokens_seen', 0):>16,}  "
            f"validation loss {'—' if loss is None else format(loss, '.4f'):>8}  {wrong[0] if wrong else 'complete'}"
        )
    for folder, word in leftovers(_root(config.path)):
        print(f"{folder.name:<28} {tree_bytes(folder) / _GIB:9.3f} GiB  {word}")


def run_verify(config: VerifyConfig) -> None:
    """Raises ValueError if any file is not what was written."""
    bad = []
    for folder in _folders(config.path):
        wrong = _problems(folder, deep=True)
        sound = (
            ""
            if wrong
            else f"sound: {len(read_files(folder)) + 1} files, {tree_bytes(folder) / _GIB:.3f} GiB"
        )
        print(f"{folder.name:<16} {'; '.join(wrong) or sound}", flush=True)
        bad += [folder] if wrong else []
    if bad:
        raise ValueError(
            f"--path ({config.path}) holds {len(bad)} damaged checkpoints ({', '.join(folder.name for folder in bad)}); "
            "remove them: a run passes over them by itself"
        )


def run_prune(config: PruneConfig) -> None:
    """Deletes by the policy among sound checkpoints; damaged ones never count as kept, and go with the leftovers.

    The newest that is kept is read to its last byte before anything is deleted.
    """
    root = _root(config.path)
    complete, named = complete_steps(root), named_steps(root)
    losses = {
        s: loss
        for s in complete
        if (loss := read_state(root / f"step_{s}").get("validation_loss")) is not None
    }
    policy = KeepPolicy(config.keep_last_n, config.keep_every, config.keep_best, config.keep_steps)
    while policy.to_delete(complete, losses) and (
        wrong := _problems(root / f"step_{complete[-1]}", deep=True)
    ):
        print(f"step_{complete[-1]} does not count: {wrong[0]}")
        del complete[-1]
    doomed = set(policy.to_delete(complete, losses)) | {
        s for s in named if config.after is not None and s > config.after
    }
    if config.leftovers:
        doomed |= set(named) - set(complete)
    folders = [root / f"step_{step}" for step in sorted(doomed)]
    folders += [folder for folder, _ in leftovers(root)] if config.leftovers else []
    freed = sum(tree_bytes(folder) for folder in folders)
    with FolderLock(root) if config.yes else nullcontext():
        for folder in folders:
            print(f"{'deleted' if config.yes else 'would delete'} {folder}")
            if config.yes:
                delete(folder)
    kept = len(set(complete) - doomed)
    print(
        f"{freed / _GIB:.3f} GiB in {len(folders)} folders, {kept} checkpoints kept{'' if config.yes else '; add --yes to delete'}"
    )


def _problems(folder: Path, *, deep: bool = False) -> list[str]:
    """Why a run would not start from the checkpoint; `deep` reads it as the run does."""
    try:
        wrong = problems(folder, deep=deep)
        if deep and not wrong:
            from fms_fsdp.checkpoint.checkpointer import content_problems  # torch: not for a list
            from fms_fsdp.optim.optimizers import state_sizes

            wrong = content_problems(folder, state_sizes)
        return wrong
    except OSError as error:
        return [f"{Path(error.filename or folder).name} cannot be read: {error.strerror}"]


def _root(path: str) -> Path:
    if not path:
        raise ValueError("--path () must name a run folder or a folder of checkpoints; add --path=runs/NAME")
    given = Path(path)
    root = given / "checkpoints" if (given / "checkpoints").is_dir() else given
    if not root.is_dir():
        raise ValueError(f"--path ({path}) must be a folder; found none there")
    return root.parent if root.name.startswith("step_") else root


def _folders(path: str) -> Iterator[Path]:
    root, given = _root(path), Path(path)
    steps = [root / f"step_{step}" for step in named_steps(root)]
    yield from [folder for folder in steps if not given.name.startswith("step_") or folder.name == given.name]


def main(config: ListConfig | VerifyConfig | PruneConfig) -> None:
    """Runs the command that the config belongs to."""
    if isinstance(config, ListConfig):
        run_list(config)
    elif isinstance(config, VerifyConfig):
        run_verify(config)
    else:
        run_prune(config)
