"""Texts that the model writes while it trains (`--sample_interval`)."""

from __future__ import annotations

import os
from dataclasses import dataclass
from functools import partial
from itertools import takewhile
from pathlib import Path

import torch

from fms_fsdp.config import DataConfig, EvalConfig
from fms_fsdp.config.values import one_line
from fms_fsdp.console import LINE_WIDTH, TIME_WIDTH
from fms_fsdp.data.kept_tokenizer import find_tokenizer, shards_bos_id
from fms_fsdp.distributed.mesh import Mesh
from fms_fsdp.errors import UserError
from fms_fsdp.generate import Sampling, encode_prompts, generate, read_lines, text_after
from fms_fsdp.logs import log
from fms_fsdp.metrics.timer import PhaseTimer
from fms_fsdp.models.config import TransformerConfig
from fms_fsdp.parallel.fsdp import evaluating
from fms_fsdp.run.health import Watchdog
from fms_fsdp.run.logger import MetricLogger
from fms_fsdp.run.setup import Launch
from fms_fsdp.run.stop import StopControl
from fms_fsdp.state import TrainState
from fms_fsdp.tokenizers.tokenizer import TextRules

SAMPLE_TOKENS = 100  # maximum per text
_SHOWN_LINES = 3


@dataclass(frozen=True)
class Prompts:
    """The texts to continue, their tokens, and the token that ends a text."""

    texts: tuple[str, ...]
    ids: tuple[tuple[int, ...], ...]
    end_token: int


def read_prompts(section: EvalConfig, data: DataConfig, model: TransformerConfig) -> Prompts:
    """Reads and encodes `--sample_prompts`, texts or a file with one per line.

    Raises:
        UserError: the data has no tokenizer, or a prompt does not fit the model.
        OSError: the file cannot be read.
    """
    tokenizer = find_tokenizer(data.data_path) if data.data_path else None
    if tokenizer is None:
        raise UserError(
            f"--sample_interval={section.sample_interval} requires a tokenizer in --data_path; "
            "remove the flag, or prepare the data with a tokenizer"
        )
    texts = section.sample_prompts or ("",)
    if len(texts) == 1 and os.path.isfile(texts[0]):  # Path.is_file raises if a text is long
        texts = tuple(read_lines(Path(texts[0]), "--sample_prompts")) or ("",)
    bos_id = shards_bos_id(data.data_path, tokenizer)
    rules = TextRules(() if bos_id is None else (bos_id,))
    ids = encode_prompts(tokenizer, rules, texts, model)
    return Prompts(texts, tuple(map(tuple, ids)), tokenizer.vocabulary.eos_id)


class Sampler:
    """Continues the prompts every `sample_interval` steps: log, `samples.txt` and trackers.

    A forward pass of a sharded model needs every rank, so all ranks sample the same tokens, and
    none stops at an EOS token; rank 0 writes the texts.
    """

    def __init__(
        self,
        launch: Launch,
        mesh: Mesh,
        state: TrainState,
        metrics: MetricLogger,
        watchdog: Watchdog,
        stop: StopControl,
        timer: PhaseTimer,
    ) -> None:
        cfg = launch.run.config
        assert launch.found.prompts is not None
        self._interval = cfg.eval.sample_interval
        self._file = launch.run_dir.folder / "samples.txt"
        self._prompts = launch.found.prompts
        self._metrics = metrics
        self._watchdog = watchdog
        self._timer = timer
        self._model = state.model
        # whether the launch ends, identical on every rank
        self._is_stopped = partial(stop.interrupts, state)
        self._tokenizer = find_tokenizer(cfg.data.data_path) if mesh.is_main else None

    def run_if_due(self, state: TrainState) -> None:
        """Samples the texts if they are due (collective: every rank)."""
        if state.step % self._interval and not state.is_done:
            return
        with self._timer.phase("eval", synchronize=True):
            rows = self._sample()
        if rows is None:
            log.info("sample @%d stopped", state.step)
            return
        if self._tokenizer is None:
            return
        texts = []
        for prompt, ids, tokens in zip(self._prompts.texts, self._prompts.ids, rows, strict=True):
            texts.append(prompt + text_after(self._tokenizer, ids, tokens))
            log.info("sample @%d\n%s", state.step, first_lines(texts[-1]) or "  (no text)")
        self._metrics.log_text(state, "samples", "\n\n".join(texts))
        try:
            with open(self._file, "a", encoding="utf-8") as file:
                file.writelines(f"--- step {state.step} ---\n{text}\n" for text in texts)
        except OSError as error:
            log.warning("cannot write %s: %s", self._file, error.strerror)

    def _sample(self) -> list[list[int]] | None:
        """Returns the new tokens of each prompt up to the EOS token; None if the launch ends first."""
        if self._is_stopped():
            return None
        rows: list[list[int]] = [[] for _ in self._prompts.ids]
        # Eager, because compiled blocks would be compiled for every length.
        with evaluating(self._model), torch.compiler.set_stance("force_eager"):
            steps = generate(
                self._model,
                self._prompts.ids,
                Sampling(temperature=0.8),
                max_new_tokens=SAMPLE_TOKENS,
            )
            try:
                for tokens in steps:
                    self._watchdog.alive()
                    if self._is_stopped():
                        return None
                    for row, token in zip(rows, tokens, strict=True):
                        row += [] if token is None else [token]
            except UserError as error:  # the logits are not finite, on every rank
                log.warning("samples are incomplete: %s", error)
        return [
            list(takewhile(lambda token: token != self._prompts.end_token, row)) for row in rows
        ]


def first_lines(text: str) -> str:
    """Returns the first lines of a text as the log shows them: indented, cut at its width, without
    control characters, which could forge lines."""
    width = LINE_WIDTH - TIME_WIDTH - len("  ")
    shown = []
    for line in text.splitlines():
        content = line.expandtabs(4).rstrip()
        if not content:
            continue
        indentation = len(content) - len(content.lstrip())
        content = " " * indentation + one_line(content)
        shown.append("  " + (content if len(content) <= width else content[: width - 1] + "…"))
    if len(shown) > _SHOWN_LINES:
        shown[_SHOWN_LINES:] = ["  …"]
    return "\n".join(shown)
