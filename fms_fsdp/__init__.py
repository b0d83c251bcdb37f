"""Lightweight FSDP pretraining of Llama models in plain PyTorch."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

    from fms_fsdp.data.tokenizer import Tokenizer
    from fms_fsdp.models.llama import Llama


def load_model(
    path: str, *, step: int | None = None, device: str | torch.device = "cpu"
) -> tuple[Llama, Tokenizer | None]:
    """The model of a checkpoint with fp32 weights, ready to compute logits, and the tokenizer of its data.

    `path`: a run folder, a folder of checkpoints, or one checkpoint; of several the newest, or that of
    `step`. Or a folder of Hugging Face, which is read in place. The tokenizer is None where the data, or the
    folder, have none. No process group is needed: a
    checkpoint of any sharding loads.

        model, tokenizer = fms_fsdp.load_model("runs/quickstart")
        tokens = torch.from_numpy(tokenizer.encode(["Once upon a time"])[0].astype("int64"))[None]
        logits = model(tokens)

    Raises:
        UserError: no complete checkpoint is there, or a damaged one; or a folder of Hugging Face that is not
            whole, or of a model that there is not here.
    """
    from fms_fsdp.generate import load  # imports torch

    found = load(path, step, device)
    return found.model, found.tokenizer
