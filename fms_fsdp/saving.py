"""When the loop saves, what goes with the tensors, and what happens to a save that fails."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any, Protocol

from torch import nn

from fms_fsdp.checkpoint.checkpointer import Checkpointer, OptimizerState, SaveFailed
from fms_fsdp.checkpoint.folders import clean_up, delete, named_steps, read_state, set_aside, size_problems
from fms_fsdp.checkpoint.progress import SaveProgress, estimate_save_s
from fms_fsdp.checkpoint.retention import KeepPolicy, parse_schedule
from fms_fsdp.config import TrainConfig, as_dict
from fms_fsdp.data.stream import Stream
from fms_fsdp.errors import RunFailed
from fms_fsdp.models.flops import num_params
from fms_fsdp.run.plan import Preflight
from fms_fsdp.run.status import Launch
from fms_fsdp.runtime import log


class Counter(Protocol):
    """What a saver needs of the reporter."""

    def tokens_seen(self, step: int) -> int: ...
    def event(self, name: str, step: int, **fields: Any) -> None: ...


class Saver:
    """The loop's `save` hook. A save that fails (a full disk) is told and counted; the run goes on, the last good checkpoint stands.

    `alive()` tells the watchdog, while this rank waits for a save, that one moves. `evaluated`: the last step that was, and its validation
    loss, which the checkpoint of that step records and `--keep_best` compares.
    """

    def __init__(
        self,
        cfg: TrainConfig,
        found: Preflight,
        model: nn.Module,
        optimizers: OptimizerState,
        stream: Stream,
        reporter: Counter,
        launch: Launch,
        attempt: int,
        alive: Callable[[], None],
    ) -> None:
        section = cfg.checkpoint
        self._cfg, self._found, self._stream, self._reporter, self._launch = (
            cfg,
            found,
            stream,
            reporter,
            launch,
        )
        self._model, self._optimizers = model, optimizers
        self._root = Path(cfg.ckpt_save_path)
        self._schedule = parse_schedule(section.checkpoint_schedule, section.checkpoint_interval)
        self._keep = KeepPolicy(
            section.keep_last_n, section.keep_every, section.keep_best, section.keep_steps
        )
        self._is_main = found.world.rank == 0
        self.evaluated: tuple[int, float] | None = None
        self._newest = found.start
        self._written: set[int] = set()
        self._pending_step = 0
        if self._is_main:
            for folder in found.begin.superseded:
                set_aside(folder, "superseded")
            for folder in clean_up(self._root):
                log.info("removed %s, left by an interrupted save", folder)
        self._progress = SaveProgress(alive, min(5.0, cfg.parallel.collective_timeout_s / 4))
        self._checkpointer = Checkpointer(
            self._root,
            attempt=attempt,
            in_background=section.async_checkpoint,
            committed=self._committed,
            progress=self._progress,
        )
        due = self._schedule.next_after(found.start)
        if due is not None and due < found.num_steps:  # the last step is saved on the spot
            self._checkpointer.reserve(model, optimizers)

    def expected_s(self, step: int) -> float:
        """Seconds that saving may take if the launch ends with the step after `step`; another save may be under way then.

        By the last save, else by that of the checkpoint this launch began with, else by a measured write.
        """
        if self._checkpointer.save_s is None:
            loaded, world = self._found.checkpoint, self._found.world
            num_bytes = 12 * num_params(self._found.model) * world.local_world_size // world.world_size
            known = loaded.state.get("save_s") if loaded is not None else None
            self._checkpointer.save_s = known or estimate_save_s(self._root, num_bytes)
        return self._checkpointer.save_s * (
            2 if self._checkpointer.is_busy or self._schedule.is_due(step) else 1
        )

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
            "validation_loss": self.evaluated[1] if self.evaluated and self.evaluated[0] == step else None,
            "data": self._stream.state_dict(),
            "config": as_dict(self._cfg),
            "resolved": self._found.resolved(),
        }
        try:
            self._pending_step = step
            self._checkpointer.save(step, self._model, self._optimizers, state, now=now or last)
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
        log.error(
            "checkpoint of step %d was not written: %s; the newest is of step %d", step, error, self._newest
        )
        self._reporter.event("save_failed", step, reason=str(error))
        if self._is_main:
            for folder in self._root.glob(f"step_{step}.partial-*"):
                shutil.rmtree(folder, ignore_errors=True)

    def _committed(self, step: int) -> None:
        """On rank 0, in the thread that wrote, while the others wait for the end of the save."""
        self._newest = step
        self._written.add(step)
        log.info("saved %s (%.1f s)", self._root / f"step_{step}", self._checkpointer.save_s)
        for old in to_delete(self._root, self._keep, self._found.start, self._written):
            try:
                with self._progress.operation():
                    delete(self._root / f"step_{old}")
                log.info("deleted %s", self._root / f"step_{old}")
            except OSError as error:
                log.warning("step_%d could not be deleted: %s", old, error)


def to_delete(root: Path, policy: KeepPolicy, start: int, written: Collection[int]) -> list[int]:
    """Steps in `root` that need not be kept. What counts is what this launch loaded (`start`) and has `written`, and what is older, by size.

    What lies between and was not written by this launch was passed over: it keeps nothing from being kept, and is not deleted.
    """
    steps = [step for step in named_steps(root) if step <= start or step in written]
    steps = [step for step in steps if not size_problems(root / f"step_{step}")]
    losses = {step: read_state(root / f"step_{step}").get("validation_loss") for step in steps if policy.best}
    return policy.to_delete(steps, {step: loss for step, loss in losses.items() if loss is not None})
