"""The results of a run: a checkpoint by the path of a run, and the tokenizer of its model."""

from __future__ import annotations

import shlex
from pathlib import Path

from fms_fsdp.checkpoint.folders import Checkpoint, checkpoint_root, find_checkpoint
from fms_fsdp.data.kept_tokenizer import folder_tokenizer
from fms_fsdp.errors import UserError
from fms_fsdp.files import exists
from fms_fsdp.process import env_rank
from fms_fsdp.tokenizers.tokenizer import Tokenizer, UsedTokenizer


def require_checkpoint(path: str, step: int | None, name: str = "path") -> Checkpoint:
    """Returns the newest complete checkpoint, or the checkpoint of `step`, of a run directory or a folder of
    checkpoints, or the checkpoint that the path names.

    Raises: UserError, with `name` as the name of the path.
    """
    folder = Path(path).expanduser()
    found = find_checkpoint(checkpoint_root(folder), step) if path else None
    if found is None:
        which = "" if step is None else f" of step {step}"
        rule = f"{name} ({path}) must hold a complete checkpoint{which}"
        if not exists(folder):
            raise UserError(f"{rule}, but does not exist; name a run directory or a checkpoint")
        raise UserError(f"{rule}; see `python -m fms_fsdp ckpt list --path={shlex.quote(path)}`")
    return found


def is_rank0() -> bool:
    """Returns whether this is the only process of a command, or the first that torchrun started."""
    return env_rank() == 0


def recorded_tokenizer(checkpoint: Checkpoint) -> Tokenizer | None:
    """Returns the tokenizer stored with the training data of the checkpoint; None if there is none.

    Raises: UserError if the data has another tokenizer by now.
    """
    used = checkpoint_tokenizer(checkpoint)
    found = used.find()
    if found is not None and used.digest not in ("", found.vocabulary.digest):
        raise UserError(
            f"{used.name} was trained with the tokenizer {used.digest[:12]}, but the folder of its data "
            f"has {found.vocabulary.digest[:12]} now; put back the data that it was trained on"
        )
    return found


def checkpoint_data(checkpoint: Checkpoint) -> str:
    """Returns the folder of the data that a checkpoint was trained on; "" for synthetic data."""
    return checkpoint.metadata.run.located.data.data_path


def checkpoint_tokenizer(checkpoint: Checkpoint) -> UsedTokenizer:
    """Returns the tokenizer of the data that a checkpoint was trained on."""
    digest = checkpoint.metadata.run.tokenizer
    path = checkpoint_data(checkpoint)
    return folder_tokenizer(f"the checkpoint {checkpoint.folder}", digest, path)
