"""`python -m fms_fsdp generate`: text that a checkpoint writes after a prompt."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from fms_fsdp.config import flag
from fms_fsdp.errors import UserError
from fms_fsdp.extras.generate import Sampling, generate, text_after
from fms_fsdp.extras.prompts import encode_prompts, read_lines
from fms_fsdp.parallel.compile import missing_compiler
from fms_fsdp.tools.loading import TextModel, load
from fms_fsdp.tools.trained_run import is_rank0


@dataclass(frozen=True)
class GenerateConfig:
    """Which checkpoint writes, after which prompts, and how its tokens are drawn."""

    path: str = flag(
        "",
        "a run folder, checkpoints (of several, the newest) or a folder of Hugging Face",
        form="path",
    )
    step: int | None = flag(None, "the checkpoint of this step", min=1)
    prompt: str = flag("", "the text to go on with; without one a new document begins", form="text")
    prompts: str = flag("", "a file with a prompt in each line, in place of --prompt", form="path")
    interactive: bool = flag(
        False, "read prompts from the terminal or a pipe, a line each, and answer each"
    )
    num_samples: int = flag(1, "number of texts for each prompt", min=1)
    max_new_tokens: int = flag(200, "most tokens of a text; a full context ends a text too", min=1)
    temperature: float = flag(
        0.8, "below 1 likely tokens get likelier; 0 takes the likeliest one", min=0
    )
    top_k: int = flag(0, "draw from the k likeliest tokens only; 0 is off", min=0)
    top_p: float = flag(
        1.0, "draw from the likeliest tokens that make up this share", above=0, max=1
    )
    min_p: float = flag(
        0.0, "leave out tokens below this share of the likeliest one", min=0, below=1
    )
    repetition_penalty: float = flag(
        1.0, "above 1 the tokens of the text so far get less likely", above=0
    )
    stop: tuple[str, ...] = flag((), "words before which a text ends", form="text")
    seed: int = flag(0, "seed of the draws; the same seed gives the same text", min=0)
    batch_size: int = flag(16, "number of texts that are written at a time", min=1)
    dtype: str = flag("fp32", "type of weights and computation", choices=("fp32", "bf16"))
    use_torch_compile: bool = flag(False, "compile a step of decoding, for one long text at a time")
    json: bool = flag(False, "print one JSON object for each text")

    def __post_init__(self) -> None:
        given = {"prompt": self.prompt, "prompts": self.prompts, "interactive": self.interactive}
        first, *others = [f"--{name} ({value})" for name, value in given.items() if value] or [""]
        if others:
            raise UserError(f"{first} and {others[0]}: leave out one of the two flags")


def main(config: GenerateConfig) -> None:
    """Prints the texts; a single one appears token by token. With `interactive`, to the end of the input.

    Raises:
        UserError: no checkpoint or no tokenizer is there, or a prompt does not fit the context.
    """
    if not is_rank0():  # under torchrun one process writes
        return None
    prompts = [config.prompt]
    if config.prompts:
        prompts = read_lines(Path(config.prompts).expanduser(), "--prompts")
    if config.use_torch_compile and (missing := missing_compiler(_device())):
        raise UserError(
            f"--use_torch_compile (True) needs a compiler: {missing}, or leave the flag out"
        )
    found = load_with_tokenizer(config.path, config.step)
    if config.dtype == "bf16":
        for weight in found.model.parameters():  # the rotary table stays fp32
            weight.data = weight.data.bfloat16()
    if not config.interactive:
        return _write(config, found, prompts)
    mark = "> " if sys.stdin.isatty() else ""
    while True:
        print(mark, end="", flush=True)
        if not (line := sys.stdin.buffer.readline()):
            return None
        try:
            text = line.removesuffix(b"\n").removesuffix(b"\r").decode(errors="surrogateescape")
            _write(config, found, [text])
        except UserError as error:
            print(f"error: {error}", file=sys.stderr)


def _device() -> torch.device:
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def load_with_tokenizer(path: str, step: int | None) -> TextModel:
    """The model at --path, which has a tokenizer. Raises: UserError."""
    found = load(path, step, _device())
    if found.tokenizer is None:
        rule = "has no tokenizer beside the data of its training, or in a folder of Hugging Face"
        raise UserError(
            f"--path ({path}) {rule}; put the tokenizer back, or use load_model in Python"
        )
    return found


def _write(config: GenerateConfig, found: TextModel, prompts: Sequence[str]) -> None:
    wanted = [prompt for prompt in prompts for _ in range(config.num_samples)]
    if len(wanted) == 1 and not config.json:
        before = wanted[0]
        for (piece,) in _pieces(config, found, wanted, config.seed):
            print(before + piece, end="", flush=True)
            before = ""
        print()
        return
    for first in range(0, len(wanted), config.batch_size):
        batch = wanted[first : first + config.batch_size]
        texts = [""] * len(batch)
        for pieces in _pieces(config, found, batch, config.seed + first):
            texts = [text + piece for text, piece in zip(texts, pieces, strict=True)]
        for number, (prompt, text) in enumerate(zip(batch, texts, strict=True), first + 1):
            shown = json.dumps({"prompt": prompt, "text": text}) if config.json else prompt + text
            print(
                shown if config.json else f"--- {number} of {len(wanted)} ---\n{shown}", flush=True
            )


def _pieces(
    config: GenerateConfig, found: TextModel, prompts: Sequence[str], seed: int
) -> Iterator[list[str]]:
    """The text that each step adds to each row; an unfinished character and a possible stop text wait."""
    model, tokenizer, rules = found
    assert tokenizer is not None
    known = encode_prompts(tokenizer, prompts, model.config, rules)
    encoded = known.ids
    sampling = Sampling(
        config.temperature, config.top_k, config.top_p, config.min_p, config.repetition_penalty
    )
    drawn, given, is_done = (
        [list[int]() for _ in prompts],
        [0] * len(prompts),
        [False] * len(prompts),
    )
    hold = max(map(len, config.stop), default=1) - 1  # characters that may begin a stop text
    steps = generate(
        model,
        encoded,
        sampling,
        max_new_tokens=config.max_new_tokens,
        end_tokens=known.ends,
        seed=seed,
        compiled=config.use_torch_compile,
    )
    for tokens in steps:
        pieces = [""] * len(prompts)
        for row, token in enumerate(tokens):
            if token is None or is_done[row]:
                continue
            drawn[row].append(token)
            text = text_after(tokenizer, encoded[row], drawn[row])
            stops = [place for word in config.stop if (place := text.find(word)) >= 0]
            is_done[row] = bool(stops)
            until = min(stops) if stops else max(given[row], len(text.rstrip("\ufffd")) - hold)
            pieces[row], given[row] = text[given[row] : until], max(given[row], until)
        yield pieces
        if all(is_done):
            return
    yield [
        "" if is_done[row] else text_after(tokenizer, encoded[row], drawn[row])[given[row] :]
        for row in range(len(prompts))
    ]
