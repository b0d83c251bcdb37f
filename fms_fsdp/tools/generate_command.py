"""`python -m fms_fsdp generate`: text that a checkpoint writes after a prompt."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from fms_fsdp.checkpoint.run_results import is_rank0
from fms_fsdp.config import flag
from fms_fsdp.config.flag import only_one
from fms_fsdp.errors import UserError
from fms_fsdp.generate import Sampling, TextModel, load, read_lines, stream_text


@dataclass(frozen=True)
class GenerateConfig:
    """Checkpoint, prompts and sampling."""

    path: str = flag(
        "",
        "run, checkpoint folder (its newest checkpoint) or Hugging Face checkpoint",
        form="path",
        required=True,
    )
    step: int | None = flag(None, "step of the checkpoint", min=1)
    prompt: str = flag("", "text to continue (default: a new document)", form="text")
    prompts: str = flag("", "file with one prompt per line, instead of --prompt", form="path")
    interactive: bool = flag(False, "read prompts from stdin, one per line, and answer each")
    num_samples: int = flag(1, "texts per prompt", min=1)
    max_new_tokens: int = flag(200, "maximum tokens per text", min=1)
    temperature: float = flag(0.8, "sampling temperature; 0 takes the most likely token", min=0)
    top_k: int = flag(0, "sample from the k most likely tokens; 0 is off", min=0)
    top_p: float = flag(
        1.0, "sample from the most likely tokens that have this probability", above=0, max=1
    )
    seed: int = flag(0, "sampling seed; the same seed gives the same text", min=0)
    batch_size: int = flag(16, "texts per forward pass", min=1)
    dtype: str = flag("fp32", "dtype of weights and computation", choices=("fp32", "bf16"))
    json: bool = flag(False, "print one JSON object per text")

    def __post_init__(self) -> None:
        only_one(self, "prompt", "prompts", "interactive")


def main(config: GenerateConfig) -> None:
    """Prints the texts; a single text appears token by token.

    Raises:
        UserError: there is no checkpoint or no tokenizer, or a prompt does not fit the model.
    """
    if not is_rank0():  # under torchrun one process writes
        return None
    prompts = [config.prompt]
    if config.prompts:
        prompts = read_lines(Path(config.prompts).expanduser(), "--prompts")
    loaded = load_with_tokenizer(config.path, config.step)
    if config.dtype == "bf16":
        loaded.model.bfloat16()
    if not config.interactive:
        return _write(config, loaded, prompts)
    mark = "> " if sys.stdin.isatty() else ""
    print(mark, end="", flush=True)
    for line in sys.stdin.buffer:
        try:
            text = line.removesuffix(b"\n").removesuffix(b"\r").decode(errors="surrogateescape")
            _write(config, loaded, [text])
        except UserError as error:
            print(f"error: {error}", file=sys.stderr)
        print(mark, end="", flush=True)
    return None


def load_with_tokenizer(path: str, step: int | None) -> TextModel:
    """Loads a model that has a tokenizer, onto the GPU if there is one."""
    loaded = load(path, step, "cuda" if torch.cuda.is_available() else "cpu", "--path")
    if loaded.tokenizer is None:
        raise UserError(
            f"--path={path} has no tokenizer; put the tokenizer of its training data back"
        )
    return loaded


def _write(config: GenerateConfig, loaded: TextModel, prompts: Sequence[str]) -> None:
    sampling = Sampling(config.temperature, config.top_k, config.top_p)
    wanted = [prompt for prompt in prompts for _ in range(config.num_samples)]
    for first in range(0, len(wanted), config.batch_size):
        batch = wanted[first : first + config.batch_size]
        texts = list(batch)
        streams = len(wanted) == 1 and not config.json
        shown = batch[0]  # with the first piece, once the prompt is known to fit
        for pieces in stream_text(
            loaded, batch, sampling, max_new_tokens=config.max_new_tokens, seed=config.seed + first
        ):
            texts = [text + piece for text, piece in zip(texts, pieces, strict=True)]
            if streams:
                print(shown + pieces[0], end="", flush=True)
                shown = ""
        if streams:
            print()
            return
        for number, (prompt, text) in enumerate(zip(batch, texts, strict=True), first + 1):
            if config.json:
                print(json.dumps({"prompt": prompt, "text": text[len(prompt) :]}), flush=True)
            else:
                print(f"--- {number} of {len(wanted)} ---\n{text}", flush=True)
