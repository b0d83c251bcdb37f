"""When the loop saves, what goes with the tensors, and what happens to a save that fails."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import nn

from fms_fsdp.checkpoint.checkpointer import Checkpointer, SaveFailed
from fms_fsdp.checkpoint.folders import clean_up, complete_steps, delete, read_state, set_aside
from fms_fsdp.checkpoint.retention import KeepPolicy, parse_schedule
from fms_fsdp.config import TrainConfig, as_dict
from fms_fsdp.preflight import Preflight
from fms_fsdp.runtime import log
from fms_fsdp.status import Launch, RunFailed


class Counter(Protocol):
    """What a saver needs of the reporter."""

    def tokens_seen(self, step: int) -> int: ...
    def event(self, name: str, step: int, **fields: Any) -> None: ...


class Saver:
    """The loop's `save` hook. A save that fails (a full disk) is told and counted; the run goes on, the last good checkpoint stands.

    `validation_loss` is what the next checkpoint, and that one alone, records, and what `--keep_best` compares.
    """

    def __init__(
        self,
        cfg: TrainConfig,
        found: Preflight,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        stream: Any,
        reporter: Counter,
        launch: Launch,
        attempt: int,
    ) -> None:
        section = cfg.checkpoint
        self._cfg, self._found, self._stream, self._reporter, self._launch = cfg, found, stream, reporter, launch
        self._model, self._optimizer = model, optimizer
        self._root = Path(cfg.ckpt_save_path)
        self._schedule = parse_schedule(section.checkpoint_schedule, section.checkpoint_interval)
        self._keep = KeepPolicy(section.keep_last_n, section.keep_every, section.keep_best, section.keep_steps)
        self._is_main = found.world.rank == 0
        self.validation_loss: float | None = None
        self._newest = found.start
        self._pending_step = 0
        if self._is_main:
            for folder in found.begin.superseded:
                set_aside(folder, "superseded")
            for folder in clean_up(self._root):
                log.info("removed %s, left by an interrupted save", folder)
        self._checkpointer = Checkpointer(
            self._root, attempt=attempt, in_background=section.async_checkpoint, committed=self._committed
        )
        due = self._schedule.next_after(found.start)
        if due is not None and due < found.num_steps:  # the last step is saved on the spot
            self._checkpointer.reserve(model, optimizer)

    def save_s(self) -> float:
        """Seconds that the last checkpoint took, from the copy to the commit."""
        return self._checkpointer.save_s

    def save(self, step: int, now: bool) -> None:
        """After `step`: saves if one is due, or `now` (collective: every rank).

        Raises:
            RunFailed: the last checkpoint of the run could not be written.
        """
        self._launch.step = step
        last = step == self._found.num_steps and self._cfg.checkpoint.save_last
        if not (now or last or self._schedule.is_due(step)):
            return
        self._settle()
        state = {
            "tokens_seen": self._reporter.tokens_seen(step),
            "validation_loss": self.validation_loss,
            "data": self._stream.state_dict(),
            "config": as_dict(self._cfg),
            "resolved": self._found.resolved(),
        }
        self.validation_loss = None
        try:
            self._pending_step = step
            self._checkpointer.save(step, self._model, self._optimizer, state, now=now or last)
        except SaveFailed as error:
            self._failed(error)
            if last:
                raise RunFailed(
                    f"the last checkpoint (step {step}) could not be written: {error}; make room and start it again: "
                    f"it goes on from step {self._newest}"
                ) from error

    def close(self) -> None:
        """Completes the save in flight (collective: every rank)."""
        self._settle()
        self._checkpointer.close()

    def _settle(self) -> None:
        try:
            self._checkpointer.wait()
        except SaveFailed as error:
            self._failed(error)

    def _failed(self, error: SaveFailed) -> None:
        step = self._pending_step
        log.error("checkpoint of step %d was not written: %s; the newest is of step %d", step, error, self._newest)
        self._reporter.event("save_failed", step, reason=str(error))
        if self._is_main:
            for folder in self._root.glob(f"step_{step}.partial-*"):
                shutil.rmtree(folder, ignore_errors=True)

    def _committed(self, step: int) -> None:
        """On rank 0, in the thread that wrote."""
        self._newest = step
        log.info("saved %s (%.1f s)", self._root / f"step_{step}", self.save_s())
        losses = {}
        steps = complete_steps(self._root)
        if self._keep.best:
            states = {found: read_state(self._root / f"step_{found}") for found in steps}
            losses = {
                found: loss for found, state in states.items() if (loss := state.get("validation_loss")) is not None
            }
        for old in self._keep.to_delete(steps, losses):
            try:
                delete(self._root / f"step_{old}")
                log.info("deleted %s", self._root / f"step_{old}")
            except OSError as error:
                log.warning("step_%d could not be deleted: %s", old, error)
