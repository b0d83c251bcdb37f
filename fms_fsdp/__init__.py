"""Lightweight FSDP pretraining of Llama models in plain PyTorch."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

    from fms_fsdp.models.llama import Llama
    from fms_fsdp.tokenizers.tokenizer import Tokenizer


def load_model(
    path: str, *, step: int | None = None, device: str | torch.device = "cpu"
) -> tuple[Llama, Tokenizer | None]:
    """Returns the model of a checkpoint with fp32 weights in eval mode, and the tokenizer of its data or
    None. Needs no process group.

    Example:
        model, tokenizer = fms_fsdp.load_model("runs/quickstart")
        ids = tokenizer.encode(["Once upon a time"])[0]
        tokens = torch.from_numpy(ids.astype("int64"))[None]  # (1, S)
        logits = model(tokens)  # (1, S, vocabulary)

    Args:
        path: a run directory, a folder of checkpoints, one checkpoint of any layout, or a Hugging Face
            checkpoint.
        step: the checkpoint to load of several; the newest by default.
        device: device of the weights, of which fp32 needs 4 bytes per parameter.

    Raises:
        UserError: there is no complete checkpoint, it is corrupt, or its model is not supported.
    """
    from fms_fsdp.generate import load  # imports torch

    found = load(path, step, device)
    return found.model, found.tokenizer
