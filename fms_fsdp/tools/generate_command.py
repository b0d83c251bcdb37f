"""`python -m fms_fsdp generate`: text that a checkpoint writes after a prompt."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path

import torch

from fms_fsdp.checkpoint.run_results import is_rank0
from fms_fsdp.errors import UserError
from fms_fsdp.generate import Sampling, TextModel, load, read_lines, stream_text
from fms_fsdp.tools.tool_flags import GenerateConfig


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
        if not prompts:
            raise UserError(f"--prompts={config.prompts} is empty; write one prompt per line")
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
        raise missing_tokenizer(path)
    return loaded


def missing_tokenizer(path: str) -> UserError:
    return UserError(f"--path={path} has no tokenizer; put the tokenizer of its training data back")


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
