"""When the loop saves, what goes with the tensors, and what happens to a save that fails."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Collection
from dataclasses import dataclass
from pathlib import Path

from fms_fsdp.checkpoint.checkpointer import Checkpointer, SaveFailed
from fms_fsdp.checkpoint.folders import clean_up, delete, has_all_files, named_steps, read_state, set_aside
from fms_fsdp.checkpoint.progress import SaveProgress, estimate_save_s
from fms_fsdp.checkpoint.retention import KeepPolicy, parse_schedule
from fms_fsdp.config import CheckpointConfig
from fms_fsdp.errors import RunFailed
from fms_fsdp.mesh import Mesh
from fms_fsdp.record import Record, Saved
from fms_fsdp.runtime import log
from fms_fsdp.state import Hook, Progress, StepResult, TrainState


@dataclass(frozen=True)
class SavePlan:
    """Where to save, and what is known before the first save.

    `superseded`: later checkpoints of the run, which it leaves behind. `save_s`: seconds that a save took in
    an earlier launch, None if not known. `node_bytes`: what a node writes in one. `record`: the launch,
    kept beside the tensors. `patience_s`: how often a save that moves is
    said to be alive. `host_bytes`: what this rank may use of host memory."""

    root: Path
    attempt: int
    superseded: tuple[Path, ...]
    save_s: float | None
    node_bytes: int
    record: Record
    patience_s: float
    host_bytes: int = 2**62


@dataclass(eq=False)
class Checkpoints(Hook):
    """Saves what is due, and at a stop. A save that fails (a full disk) is logged; the last good checkpoint
    stays.

    `alive()` tells the watchdog, while this rank waits, that a save moves. `event` writes a failure into
    metrics.jsonl. `mark(part)` tells the clock what the time went into.
    """

    part = "checkpoint"
    tells = ("expected_save_s",)
    hears = ("stop", "validation")

    section: CheckpointConfig
    plan: SavePlan
    state: TrainState
    mesh: Mesh
    alive: Callable[[], None]
    event: Callable[..., None]
    mark: Callable[[str], None]

    def __post_init__(self) -> None:
        section, plan, state = self.section, self.plan, self.state
        self._root = plan.root
        self._schedule = parse_schedule(section.checkpoint_schedule, section.checkpoint_interval)
        self._keep = KeepPolicy.of(section)
        self._start = self._newest = state.progress.start
        self._written: set[int] = set()
        self._pending_step = 0
        if self.mesh.is_main:
            for folder in plan.superseded:
                set_aside(folder, "superseded")
            for folder in clean_up(self._root):
                log.info("removed %s, left by an interrupted save", folder)
        self._progress = SaveProgress(self.alive, plan.patience_s)
        self._checkpointer = Checkpointer(
            self._root,
            attempt=plan.attempt,
            in_background=section.async_checkpoint,
            committed=self._committed,
            progress=self._progress,
            host_bytes=plan.host_bytes,
        )
        self._checkpointer.save_s = plan.save_s
        due = self._schedule.next_after(self._start)
        if due is not None and due < state.progress.num_steps:  # the last step is saved on the spot
            self._checkpointer.reserve(state.model, state.optimizers)
        state.progress.expected_save_s = self._expected_s

    def after_step(self, progress: Progress, result: StepResult) -> None:
        """Saves if a checkpoint is due, or the launch ends (collective: every rank).

        Raises:
            RunFailed: the last checkpoint of the run could not be written.
        """
        now, last = bool(progress.stop) and not progress.is_done, progress.is_done and self.section.save_last
        if now or last or self._schedule.is_due(progress.step):
            self._save(progress, at_once=now or last, last=last)

    def close(self) -> None:
        """Completes the save in flight (collective: every rank)."""
        self._settle()
        self._checkpointer.close()

    def _expected_s(self, step: int) -> float:
        """Seconds that saving may take if the launch ends with `step`; another save may be under way then.

        By the last save, else by one of an earlier launch, else by a measured write.
        """
        if self._checkpointer.save_s is None:
            self._checkpointer.save_s = estimate_save_s(self._root, self.plan.node_bytes)
        overlap = self._checkpointer.is_busy or self._schedule.is_due(step)
        return self._checkpointer.save_s * (2 if overlap else 1)

    def _save(self, progress: Progress, *, at_once: bool, last: bool) -> None:
        self.mark("device")  # a copy waits for the steps: that is no time of the save
        self._settle()
        evaluated, step = progress.validation, progress.step
        is_evaluated, metric = evaluated is not None and evaluated[0] == step, self._keep.metric
        has_value = is_evaluated if self.section.ranks_evaluations else progress.metrics
        if self._keep.best and has_value and metric not in progress.metrics:
            text = "step %d has no --keep_best_metric (%s), so its checkpoint is not ranked; its metrics: %s"
            log.warning(text, step, metric, ", ".join(progress.metrics))
        scale = self.state.loss_scale
        state = Saved(
            step,
            tokens_seen=progress.tokens_seen,
            rows_seen=progress.rows_seen,
            validation_loss=evaluated[1] if evaluated and is_evaluated else None,
            metrics=dict(progress.metrics),
            data=self.state.stream.state_dict(),
            loss_scale=scale.state_dict() if scale is not None else None,
            **self.plan.record.saved_with,
        )
        try:
            self._pending_step = step
            self._checkpointer.save(state, self.state.model, self.state.optimizers, now=at_once)
        except SaveFailed as error:
            self._failed(error)
            if last:
                raise RunFailed(
                    f"the last checkpoint (step {step}) could not be written: {error}; make room and start "
                    f"again: the run goes on from step {self._newest}"
                ) from error

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
        self.event("save_failed", step, reason=str(error))
        if self.mesh.is_main:
            for folder in self._root.glob(f"step_{step}.partial-*"):
                shutil.rmtree(folder, ignore_errors=True)

    def _committed(self, step: int) -> None:
        """Runs on rank 0, in the thread that wrote, while the others wait for the end of the save."""
        self._newest = step
        self._written.add(step)
        log.info("saved %s (%.1f s)", self._root / f"step_{step}", self._checkpointer.save_s)
        for old in to_delete(self._root, self._keep, self._start, self._written):
            try:
                with self._progress.operation():
                    delete(self._root / f"step_{old}")
                log.info("deleted %s", self._root / f"step_{old}")
            except OSError as error:
                log.warning("step_%d could not be deleted: %s", old, error)


def to_delete(root: Path, policy: KeepPolicy, start: int, written: Collection[int]) -> list[int]:
    """Steps in `root` that need not be kept. What counts is what this launch loaded (`start`) and has
    `written`, and what is older, by size.

    Newer steps that this launch did not write were passed over as damaged: they do not count, and are not
    deleted.
    """
    complete, ranked = list[int](), dict[int, float]()
    for step in named_steps(root):
        folder = root / f"step_{step}"
        if (step <= start or step in written) and has_all_files(folder):
            complete.append(step)
            if policy.best and (value := read_state(folder).metric(policy.metric)) is not None:
                ranked[step] = value
    return policy.to_delete(complete, ranked)
