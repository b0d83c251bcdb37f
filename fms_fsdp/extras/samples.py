"""Texts that the model writes while it trains: samples."""

from __future__ import annotations

import textwrap
from collections.abc import Callable
from itertools import takewhile
from pathlib import Path
from typing import cast

import torch
from torch import nn

from fms_fsdp.config import TrainConfig
from fms_fsdp.config.values import one_line
from fms_fsdp.data.kept_tokenizer import find_tokenizer
from fms_fsdp.distributed.mesh import Mesh
from fms_fsdp.distributed.runtime import log
from fms_fsdp.errors import UserError
from fms_fsdp.extras.generate import Sampling, generate, text_after
from fms_fsdp.extras.prompts import Prompts
from fms_fsdp.models.llama import Llama
from fms_fsdp.observe.sinks import Sinks
from fms_fsdp.parallel.fsdp import evaluating
from fms_fsdp.state import TrainState

SAMPLE_TOKENS = 100  # of a text, at most


class Sampler:
    """Lets the model go on with the prompts when it is time: into the log, `samples.txt` and the trackers.

    A forward pass of a sharded model needs every rank, so all draw the same texts, and rank 0 writes them.
    The number of passes depends on no draw: a text that has ended is cut afterwards.
    """

    def __init__(
        self,
        cfg: TrainConfig,
        prompts: Prompts,
        model: nn.Module,
        mesh: Mesh,
        sinks: Sinks,
        alive: Callable[[], None],
        mark: Callable[[str], None],
    ) -> None:
        self._interval, self._file = cfg.eval.sample_interval, Path(cfg.output_dir, "samples.txt")
        self._prompts, self._sinks, self._alive, self._mark = prompts, sinks, alive, mark
        self._model = cast(Llama, model)
        self._tokenizer = find_tokenizer(cfg.data.data_path) if mesh.is_main else None

    def run_if_due(self, state: TrainState) -> None:
        """Draws the texts, if they are due (collective: every rank)."""
        if state.step % self._interval and not state.is_done:
            return
        self._mark("device")
        drawn = self._draw(self._prompts)
        self._mark("eval")
        if self._tokenizer is None:
            return
        texts = []
        for prompt, ids, tokens in zip(self._prompts.texts, self._prompts.ids, drawn, strict=True):
            texts.append(prompt + text_after(self._tokenizer, ids, tokens))
            log.info(
                "sample at step %d · %s", state.step, textwrap.shorten(one_line(texts[-1]), 200)
            )
        self._sinks.text(state, "samples", "\n\n".join(texts))
        try:
            with open(self._file, "a", encoding="utf-8") as file:
                file.writelines(f"--- step {state.step} ---\n{text}\n" for text in texts)
        except OSError as error:
            log.warning("%s cannot be written: %s", self._file, error.strerror)

    def _draw(self, prompts: Prompts) -> list[list[int]]:
        """The tokens of each text, up to its end."""
        drawn, sampling = [list[int]() for _ in prompts.ids], Sampling(temperature=0.8)
        # eager: each length would be compiled
        with evaluating(self._model), torch.compiler.set_stance("force_eager"):
            try:
                for tokens in generate(
                    self._model, prompts.ids, sampling, max_new_tokens=SAMPLE_TOKENS
                ):
                    self._alive()
                    for row, token in zip(drawn, tokens, strict=True):
                        row += [] if token is None else [token]
            except UserError as error:  # logits that are not finite: alike on every rank
                log.warning("no whole sample: %s", error)
        return [list(takewhile(lambda token: token not in prompts.ends, row)) for row in drawn]
