"""The results of a run: a checkpoint by the path of a run, and the tokenizer of its model."""

from __future__ import annotations

from pathlib import Path

from fms_fsdp.checkpoint import folders
from fms_fsdp.checkpoint.folders import Checkpoint
from fms_fsdp.data.kept_tokenizer import UsedTokenizer, check_same_tokenizer
from fms_fsdp.data.tokenizer import Tokenizer
from fms_fsdp.errors import UserError, env_rank
from fms_fsdp.run.resume import checkpoint_tokenizer

ORIGINALS = Path("tokenizer") / "original"  # within a run folder that was imported


def find_checkpoint(path: str, step: int | None, name: str = "path") -> Checkpoint:
    """Returns the newest complete checkpoint, or that of `step`, of a run folder or a folder of checkpoints,
    or the one that the path names.

    Raises: UserError, with `name` as the name of the path.
    """
    folder = Path(path).expanduser()
    root = folder / "checkpoints" if (folder / "checkpoints").is_dir() else folder
    found = folders.find_checkpoint(root, step) if path else None
    if found is None:
        which = "" if step is None else f" of step {step}"
        rule = f"must hold a complete checkpoint{which}; see `python -m fms_fsdp ckpt list`"
        raise UserError(f"{name} ({path}) {rule}")
    return found


def is_rank0() -> bool:
    """Returns whether this is the only process of a command, or the first that torchrun started."""
    return env_rank() == 0


def kept_originals(checkpoint: Checkpoint) -> Path | None:
    """The files of text that an import kept as they were, of a checkpoint that was not trained since."""
    folder = checkpoint.folder.parent.parent / ORIGINALS
    is_untrained = checkpoint.step == 0 and bool(checkpoint.metadata.imported_from)
    return folder if is_untrained and folder.is_dir() else None


def recorded_tokenizer(checkpoint: Checkpoint) -> Tokenizer | None:
    """The tokenizer beside the data that the checkpoint was trained on; None if there is none.

    Raises: UserError if there is another one by now.
    """
    used = checkpoint_tokenizer(checkpoint)
    found = used.find()
    if found is not None:
        now = UsedTokenizer("the folder of its data", found.vocabulary.digest, lambda: found)
        check_same_tokenizer(used, now, "put back the data that it was trained on")
    return found
