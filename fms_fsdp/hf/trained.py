"""A trained model by its path: a run, a checkpoint of a run, or a Hugging Face checkpoint."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from fms_fsdp.checkpoint.folders import Checkpoint
from fms_fsdp.checkpoint.run_results import checkpoint_tokenizer, require_checkpoint
from fms_fsdp.errors import UserError
from fms_fsdp.hf.hf_tokenizer import hf_used_tokenizer
from fms_fsdp.hf.weights import is_hf_checkpoint, open_checkpoint
from fms_fsdp.models.config import TransformerConfig
from fms_fsdp.tokenizers.tokenizer import UsedTokenizer


@dataclass(frozen=True)
class Trained:
    """A trained model, of which only metadata is read. `checkpoint`: None of a Hugging Face checkpoint."""

    folder: Path
    model: TransformerConfig
    checkpoint: Checkpoint | None = None

    def used_tokenizer(self, name: str) -> UsedTokenizer:
        """Returns the tokenizer of its training; errors call the model `name`."""
        if self.checkpoint is not None:
            return checkpoint_tokenizer(self.checkpoint)
        return hf_used_tokenizer(self.folder, name)


def open_trained(path: str, step: int | None, name: str) -> Trained:
    """Opens the model of a path: of a run the newest complete checkpoint, or that of `step`.

    Raises:
        UserError: there is none; the text calls the path `name`.
    """
    folder = Path(path).expanduser()
    if not is_hf_checkpoint(folder):
        return trained(require_checkpoint(path, step, name))
    check_no_step(step)
    return Trained(folder, open_checkpoint(folder, name).config)


def trained(checkpoint: Checkpoint) -> Trained:
    """Returns the model of a checkpoint."""
    return Trained(checkpoint.folder, checkpoint.metadata.run.model, checkpoint)


def check_no_step(step: int | None) -> None:
    """Raises UserError if a step of a Hugging Face checkpoint is asked for."""
    if step is not None:
        raise UserError(f"--step={step} is not supported with a Hugging Face checkpoint; remove it")
