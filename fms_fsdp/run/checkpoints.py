"""When a run saves, which checkpoints it deletes, and how it learns that a background save failed.

save:     copy to host memory │ thread: write, checksum, sync, rename
delete:   only after a later step was finite, so the newest checkpoint is known to be healthy
failure:  collected at the next step; the training continues, the last good checkpoint is kept
"""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from fms_fsdp.checkpoint import folders
from fms_fsdp.checkpoint.io import SaveFailed, Tensors, collect_tensors, write_checkpoint
from fms_fsdp.checkpoint.plans import SavePlans
from fms_fsdp.checkpoint.retention import KeepPolicy, parse_schedule
from fms_fsdp.config.values import format_bytes
from fms_fsdp.distributed.dtensor import local_shard, sharded_like
from fms_fsdp.distributed.mesh import Mesh
from fms_fsdp.distributed.runtime import run_on_rank0
from fms_fsdp.errors import RunFailed, UserError
from fms_fsdp.files import is_folder
from fms_fsdp.logs import log, rank_log
from fms_fsdp.run.health import NonFiniteGuard, Watchdog
from fms_fsdp.run.logger import MetricLogger
from fms_fsdp.run.run_dir import RunDir
from fms_fsdp.state import RunConfig, TrainMetadata, TrainState

if TYPE_CHECKING:
    from fms_fsdp.hf.exporter import Exporter

SAVE_TIMEOUT_S = 3600.0  # of one save; a rank that waits for another rank's save does not hang


class CheckpointManager:
    """Saves and deletes the checkpoints of a launch. All methods are collective.

    guard        completes the counts of finite steps in the state, which lag a step behind on a GPU
    watchdog     waits longer during a save, because this rank may wait for another rank's
    metrics      metrics.jsonl records a failure
    save_s       duration of the last save, at first an estimate
    host_bytes   host memory that the copies of this rank may take
    """

    def __init__(
        self,
        run: RunConfig,
        run_dir: RunDir,
        mesh: Mesh,
        state: TrainState,
        guard: NonFiniteGuard,
        watchdog: Watchdog,
        metrics: MetricLogger,
        save_s: float = 0.0,
        host_bytes: int = 2**62,
    ) -> None:
        self.run = run
        self.cfg = run.config.checkpoint
        self.root = run_dir.checkpoints
        self.attempt = run_dir.attempt
        self.is_main = mesh.is_main
        self.guard = guard
        self.watchdog = watchdog
        self.metrics = metrics
        self.exporter: Exporter | None = None
        if self.cfg.export_interval:
            from fms_fsdp.hf.exporter import Exporter

            exports = run_dir.folder / "exports"
            interval = self.cfg.export_interval
            self.exporter = Exporter(interval, self.root, exports, state.step, is_main=mesh.is_main)
        self.save_s = save_s
        self.host_bytes = host_bytes
        cfg = self.cfg
        self.schedule = parse_schedule(cfg.checkpoint_schedule, cfg.checkpoint_interval)
        self.policy = KeepPolicy.from_config(cfg)
        self.start = self.newest = self._saving = state.step
        self._lacks_evaluation = state.evaluation_pending  # whether the newest checkpoint does
        self._written: set[int] = set()
        self._complete = folders.CompleteCheckpoints()
        self._has_old = bool(self.policy.last)
        if self.is_main:
            for folder in folders.clean_up(self.root):
                log.info("deleted %s, left by an interrupted save", folder)
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="checkpoint")
        if torch.cuda.is_available():  # a new thread would use the first GPU
            self._pool.submit(torch.cuda.set_device, torch.cuda.current_device())
        else:  # there the steps need the cores; with a GPU they fill its host copies
            self._pool.submit(_use_one_openmp_thread).result()
            torch.set_num_threads(torch.get_num_threads())  # again the default of later threads
        self._group: dist.ProcessGroup | None = None
        if dist.is_initialized():
            timeout = timedelta(seconds=SAVE_TIMEOUT_S)
            self._group = dist.new_group(backend="gloo", timeout=timeout)
        self._plans = SavePlans()
        self.is_committing = False  # this rank has written its files of a save that is under way
        self._background, self._host = cfg.async_checkpoint, Tensors()
        self._work: list[Future[None]] = []
        due = self.schedule.next_after(self.start)
        if self._background and due is not None and due < state.num_steps:
            # Pinning memory takes several times as long as a copy: begin before the first save.
            tensors = collect_tensors(state.model, state.optimizers)
            self._work.append(self._pool.submit(self._allocate, tensors))

    def expected_s(self, step: int) -> float:
        """Returns how long saving may take if the launch ends with `step`, in seconds."""
        return self.save_s * (2 if self._work or self.schedule.is_due(step) else 1)

    def is_due(self, state: TrainState) -> bool:
        is_last = self.cfg.save_last if state.is_done else bool(state.stop_reason)
        return is_last or self.schedule.is_due(state.step)

    def save_if_due(self, state: TrainState) -> None:
        """Saves a due checkpoint, or completes one if the launch ends. Call it after every step.

        Raises:
            RunFailed: the last checkpoint could not be written.
        """
        self._collect(wait=False)
        if not self._work:
            self._delete_if_confirmed(state)
        if self.is_due(state):
            self.save(state, wait=state.is_done or bool(state.stop_reason))

    def save(self, state: TrainState, *, wait: bool) -> None:
        """Starts a save; with `wait`, completes it."""
        self._collect(wait=True)
        self.guard.settle()
        self._delete_if_confirmed(state)
        metadata = TrainMetadata(
            state.step,
            tokens_seen=state.tokens_seen,
            rows_seen=state.sequences_seen,
            validation_loss=state.val_loss,
            metrics=dict(state.current.metrics),
            # A user's stream may return a dictionary that it changes while the thread writes.
            data=json.loads(json.dumps(state.stream.state_dict())),
            loss_scale=None if state.loss_scale is None else state.loss_scale.state_dict(),
            non_finite_steps=state.non_finite_steps,
            evaluation_pending=state.evaluation_pending,
            **self.run.saved_with,
        )
        if not state.evaluation_pending:
            self._warn_if_unranked(metadata)
        self._saving, began = state.step, time.perf_counter()
        tensors = collect_tensors(state.model, state.optimizers)
        if self._background and not wait:
            tensors = self._copy_to_host(tensors)
        self._work.append(self._pool.submit(self._write, tensors, metadata, began))
        if wait or not self._background:
            error = self._collect(wait=True)
            if error is not None and state.is_done:
                raise RunFailed(
                    f"the last checkpoint (step {state.step}) could not be written: {error}; "
                    f"{error.remedy} and run again: the run resumes from step {self.newest}"
                ) from error
            if error is not None and state.stop_reason:
                state.stop_reason += f" (not saved: {error}; the newest is of step {self.newest})"

    def add_evaluation(self, state: TrainState) -> None:
        """Records the evaluation of a step that was saved before it was evaluated."""
        if not self._lacks_evaluation or state.evaluation_pending or self.newest != state.step:
            return
        self._lacks_evaluation = False
        folder = self.root / f"step_{state.step}"
        if not self.is_main:
            return
        try:
            if not is_folder(folder):  # it is in the folder of another run
                return
            saved = folders.read_metadata(folder)
            evaluated = replace(
                saved,
                validation_loss=state.val_loss,
                metrics={**saved.metrics, **state.current.metrics},
                evaluation_pending=False,
            )
            folders.replace_metadata(folder, evaluated)
        except (OSError, UserError) as error:
            log.warning("the evaluation of step %d is not in %s: %s", state.step, folder, error)
            return
        self._warn_if_unranked(evaluated)

    def save_last_step(self, state: TrainState) -> None:
        """Saves the last step unless it is saved, for a launch that cannot read its next batch."""
        self._collect(wait=True)
        if state.step > self.newest:
            self.save(state, wait=True)

    def finish(self, state: TrainState) -> None:
        """Deletes old checkpoints at the end of a run, where no later step confirms the newest."""
        self._collect(wait=True)
        self.guard.settle()
        self._delete_at_end(state)

    def export_if_due(self, state: TrainState) -> None:
        """Begins the export of a checkpoint that is complete."""
        if self.exporter is not None:
            self.exporter.run_if_due(state)

    def finish_exports(self, state: TrainState, is_stopped: Callable[[], bool]) -> None:
        """Completes the exports of the run, unless `is_stopped()`, and deletes the checkpoints that
        only they needed."""
        if self.exporter is not None:
            self.exporter.finish(self.watchdog.alive, is_stopped)
            self._delete_at_end(state)

    @property
    def has_due_exports(self) -> bool:
        """Whether exports are left (collective)."""
        return self.exporter is not None and bool(run_on_rank0(self.exporter.due_steps))

    def close(self) -> None:
        """Drops a running export, and completes the work in flight."""
        try:
            if self.exporter is not None:
                self.exporter.close()
        finally:
            try:
                self._collect(wait=True)
            finally:
                self._pool.shutdown(wait=False)

    def _delete_at_end(self, state: TrainState) -> None:
        if self.policy.last and self.is_main and not state.non_finite_steps:
            self.watchdog.alive(SAVE_TIMEOUT_S)
            self._delete_old()
            self.watchdog.alive()

    def _collect(self, *, wait: bool) -> SaveFailed | None:
        """Takes the result of the background work; a failed save is logged and returned."""
        self.watchdog.alive(SAVE_TIMEOUT_S)
        try:
            while self._work and (wait or self._work[0].done()):
                self._work.pop(0).result()
            return None
        except SaveFailed as error:
            step = self._saving
            text = "the checkpoint of step %d was not written: %s; the newest is of step %d"
            log.error(text, step, error, self.newest)
            self.metrics.event("save_failed", step, reason=str(error))
            if self.is_main:
                shutil.rmtree(self.root / f"step_{step}.partial-{self.attempt}", ignore_errors=True)
            return error
        except KeyboardInterrupt:  # the user does not wait for a save, so `close` must not either
            self._work.clear()
            raise
        finally:
            self.watchdog.alive()

    def _allocate(self, tensors: Tensors) -> None:
        """Allocates the host copies; if there is no memory for them, the loop waits for saves."""
        try:
            self._host = host_copies(tensors, self.host_bytes)
        except (RuntimeError, MemoryError) as error:
            self._background = False
            reason = str(error).partition("\n")[0]
            rank_log.warning("no host memory for background saves (%s): saves block", reason)

    def _copy_to_host(self, tensors: Tensors) -> Tensors:
        if not self._host:
            self._allocate(tensors)
        if not self._background:
            return tensors
        for name, tensor in tensors.items():
            local_shard(self._host[name]).copy_(local_shard(tensor), non_blocking=True)
        if any(tensor.is_cuda for tensor in tensors.values()):
            torch.cuda.current_stream().synchronize()
        return {name: self._host[name] for name in tensors}

    def _write(self, tensors: Tensors, metadata: TrainMetadata, began: float) -> None:
        def on_written() -> None:
            self.is_committing = True

        def on_commit() -> None:  # on rank 0
            self._written.add(metadata.step)
            seconds = time.perf_counter() - began
            log.info("saved %s (%.1f s)", self.root / f"step_{metadata.step}", seconds)

        group = self._group
        try:
            write_checkpoint(
                tensors,
                self.root,
                metadata,
                self.attempt,
                group=group,
                plans=self._plans,
                began=began,
                on_written=on_written,
                on_commit=on_commit,
            )
        finally:
            self.is_committing = False
        self.newest, self.save_s = metadata.step, time.perf_counter() - began
        self._lacks_evaluation = metadata.evaluation_pending
        self._has_old = bool(self.policy.last)

    def _delete_if_confirmed(self, state: TrainState) -> None:
        """Starts to delete old checkpoints, if a step after the newest one was finite."""
        is_confirmed = not state.non_finite_steps and state.last_finite_step > self.newest
        if self.is_main and self._has_old and is_confirmed:
            self._has_old = False
            self._work.append(self._pool.submit(self._delete_old))

    def _delete_old(self) -> None:
        """Deletes checkpoints that this launch wrote or resumed from and the policy does not keep.

        Newer folders that this launch did not write were skipped as corrupt: they do not count.
        """
        try:
            steps = folders.checkpoint_steps(self.root)
        except OSError as error:  # the next save tries again; a run must not end for it
            log.warning("old checkpoints were not deleted: %s", error)
            return
        own = [step for step in steps if step <= self.start or step in self._written]
        delete_old(self.root, own, self.policy, self.exporter, self._complete)

    def _warn_if_unranked(self, metadata: TrainMetadata) -> None:
        is_expected = metadata.validation_loss is not None or not self.cfg.ranks_evaluations
        if self.policy.best and is_expected and metadata.metrics:
            if metadata.metric(self.policy.metric) is None:
                text = "step %d has no --keep_best_metric=%s, so it is not ranked; it has: %s"
                names = ", ".join(metadata.metrics)
                log.warning(text, metadata.step, self.policy.metric, names)


def delete_old(
    root: Path,
    steps: Iterable[int],
    policy: KeepPolicy,
    exporter: Exporter | None,
    complete: folders.CompleteCheckpoints,
) -> None:
    """Deletes those of a run's checkpoints, of these steps, that neither policy nor exporter needs."""
    found: dict[int, TrainMetadata] = {}
    for step in steps:
        folder = root / f"step_{step}"
        try:
            metadata = complete.read(folder)
        except folders.CheckpointDeleted:  # by hand, after it was listed
            continue
        except (OSError, UserError) as error:
            # The next save tries again; a run must not end for it.
            log.warning("old checkpoints were not deleted: %s: %s", folder, error)
            return
        if metadata is not None:
            found[step] = metadata
    spared = () if exporter is None else exporter.due_steps()
    for step in policy.to_delete(found):
        if step in spared:
            continue
        try:
            folders.delete(root / f"step_{step}")
            log.info("deleted %s", root / f"step_{step}")
        except OSError as error:
            log.warning("step_%d could not be deleted: %s", step, error)


def _use_one_openmp_thread() -> None:
    """Lets parallel operations of this thread run on it alone.

    Otherwise there would be more OpenMP threads than cores. None of them spins then while it waits,
    and a step of a small model takes almost twice as long (benchmarks/LOG.md).
    """
    torch.get_num_threads()  # initializes the thread, which would otherwise undo the next line
    torch.set_num_threads(1)


def host_copies(tensors: Tensors, limit_bytes: int = 2**62) -> Tensors:
    """Returns zeros of the same shapes and sharding in host memory, pinned if any is on a GPU.

    Registers one buffer of the exact size: torch's allocator of pinned memory would round each
    tensor up to a power of two (8B with AdamW on one rank: 99 GiB instead of 90).

    Raises:
        MemoryError: they need more than `limit_bytes`. RuntimeError: memory cannot be pinned.
    """
    parts = {name: local_shard(tensor) for name, tensor in tensors.items()}
    num_bytes = sum(-(-part.nbytes // 64) * 64 for part in parts.values())
    if num_bytes > limit_bytes:
        needed = format_bytes(num_bytes)
        free = format_bytes(limit_bytes)
        raise MemoryError(f"they need {needed}, and {free} is free")
    buffer = torch.empty(num_bytes, dtype=torch.uint8).fill_(0)  # touch each page now
    if any(part.is_cuda for part in parts.values()):
        cudart: Any = torch.cuda.cudart()  # type: ignore[no-untyped-call]
        torch.cuda.check_error(int(cudart.cudaHostRegister(buffer.data_ptr(), num_bytes, 0)))
    copies = Tensors()
    begin = 0
    for name, part in parts.items():
        # Not a view: DCP copies a tensor whose storage is larger than itself before it writes it.
        memory = torch.from_numpy(buffer.numpy()[begin : begin + part.nbytes])
        copies[name] = sharded_like(memory.view(part.dtype).view(part.shape), tensors[name])
        begin += -(-part.nbytes // 64) * 64
    return copies
