"""Saving and loading a run's state through torch.distributed.checkpoint, in the background and exactly.

    save:  tensors ─copy to host─→ │ thread: plan, write, sum, fsync ─→ commit (rename) ─→ delete old ones
    load:  files ─┬─ DCP reads what this rank needs, whatever the sharding was
                  └─ checksums, each file by one rank ─→ agreed: sound or DamagedCheckpoint

Tensors are stored under the model's own parameter names, whatever wraps the modules, so a checkpoint of any
sharding loads into any other. `train_state.json` holds what is no tensor: step, tokens seen, data state,
configuration, versions. Nothing random is stored: what is random is a function of seed, step and rank.
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import KW_ONLY, dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import cast

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed._state_dict_utils import _copy_state_dict
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from fms_fsdp.checkpoint.folders import Checkpoint, file_problem, read_files
from fms_fsdp.checkpoint.host_memory import host_copies
from fms_fsdp.checkpoint.progress import SaveProgress
from fms_fsdp.checkpoint.storage import CheckpointReader, CheckpointWriter
from fms_fsdp.errors import RunFailed
from fms_fsdp.mesh import Mesh
from fms_fsdp.models.init import clean_name
from fms_fsdp.optim.optimizers import Optimizers
from fms_fsdp.record import Saved
from fms_fsdp.runtime import own_log

Tensors = dict[str, torch.Tensor]
_ENDLESS = timedelta(days=30)

# DCP warns about a single process even where `no_dist` says so (torch 2.11 to 2.13). The filter is for all
# threads, because saves have a thread of their own
warnings.filterwarnings("ignore", message="torch.distributed is disabled, unavailable or uninitialized")


class DamagedCheckpoint(Exception):
    """A checkpoint whose files are not what was written; raised alike on every rank."""

    def __init__(self, folder: Path, reason: str) -> None:
        super().__init__(f"{folder}: {reason}")
        self.folder = folder


class SaveFailed(Exception):
    """A checkpoint could not be written (a full disk, say); the earlier ones stand. Raised alike on every
    rank."""


@dataclass(eq=False)
class Checkpointer:
    """Writes the checkpoints of one launch into `root`; all methods are collective.

    `in_background`: `save` returns once the tensors are copied to host memory; at most one save is in flight.
    `host_bytes`: what the copies may take of this rank's host memory; if that is too little, `save` waits.
    `committed(step)` is called on rank 0, in the thread that wrote, when `root/step_<step>` is complete; the
    save ends, on every rank, when it returns. `progress` knows whether a save moves; no timeout of the
    process group ends a save.
    """

    root: Path
    _: KW_ONLY
    attempt: int
    in_background: bool
    committed: Callable[[int], None]
    progress: SaveProgress = field(default_factory=SaveProgress)
    host_bytes: int = 2**62
    save_s: float | None = field(default=None, init=False)  # the last save, from the call to its commit

    def __post_init__(self) -> None:
        self._host: Tensors | None = None
        self._in_flight: Future[None] | None = None
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="checkpoint")
        if torch.cuda.is_available():  # a new thread would wait for the copies of the first GPU
            self._pool.submit(torch.cuda.set_device, torch.cuda.current_device())
        self._group = dist.new_group(backend="gloo", timeout=_ENDLESS) if dist.is_initialized() else None

    @property
    def is_busy(self) -> bool:
        """Whether a save is in flight."""
        return self._in_flight is not None and not self._in_flight.done()

    def reserve(self, model: nn.Module, optimizers: Optimizers) -> None:
        """Starts to allocate the host memory of the copies. In the first save it would stop the loop for
        several times as long as a copy."""
        if self.in_background:
            self._in_flight = self._pool.submit(self._allocate, collect_tensors(model, optimizers))

    def save(self, state: Saved, model: nn.Module, optimizers: Optimizers | None, *, now: bool) -> None:
        """Starts a checkpoint of a state, or with `now` completes it; without optimizers, of weights alone.

        Raises:
            SaveFailed: this save with `now`, or the one that was in flight, could not be written.
        """
        self.wait()
        begin = time.perf_counter()
        tensors = collect_tensors(model, optimizers)
        if self.in_background and self._host is None and not now:
            self._allocate(tensors)
        wait = now or not self.in_background
        held = tensors if wait else self._copy_to_host(tensors)
        self._in_flight = self._pool.submit(self._write, held, state, begin)
        if wait:
            self.wait()

    def wait(self) -> None:
        """Returns when no save is in flight.

        Raises:
            SaveFailed: it could not be written.
        """
        if self._in_flight is not None:
            future, self._in_flight = self._in_flight, None
            self.progress.wait(future)

    def close(self) -> None:
        """Completes what is in flight and ends the thread.

        Raises:
            SaveFailed: as `wait`.
        """
        try:
            self.wait()
        finally:
            self._pool.shutdown(wait=False)  # the thread is idle, unless the wait was interrupted

    def _allocate(self, tensors: Tensors) -> None:
        """Allocates the copies; without room for them each save of this rank holds up its loop, and the run
        goes on."""
        try:
            self._host = host_copies(tensors, self.host_bytes)
        except (RuntimeError, MemoryError) as error:
            self.in_background = False
            text = "no host memory for background saves (%s): the loop waits for each save"
            own_log.warning(text, str(error).partition("\n")[0])

    def _copy_to_host(self, tensors: Tensors) -> Tensors:
        assert self._host is not None
        on_gpu = any(tensor.device.type == "cuda" for tensor in tensors.values())
        copied: Tensors = _copy_state_dict(tensors, self._host, non_blocking=on_gpu)
        if on_gpu:
            torch.cuda.current_stream().synchronize()
        return copied

    def _write(self, tensors: Tensors, state: Saved, begin: float) -> None:
        def commit() -> None:
            self.save_s = time.perf_counter() - begin
            self.committed(state.step)

        final = self.root / f"step_{state.step}"
        partial = final.with_name(f"{final.name}.partial-{self.attempt}")
        writer = CheckpointWriter(partial, final, state, self.progress, begin, commit)
        try:
            alone = self._group is None
            dcp.save(tensors, storage_writer=writer, process_group=self._group, no_dist=alone)
        except CheckpointException as error:  # a collection of tracebacks: the first rank's own error
            rank, inner = first_failure(error)
            raise SaveFailed(f"rank {rank}: {inner}".splitlines()[0]) from error
        except OSError as error:
            raise SaveFailed(str(error)) from error
        self.save_s = time.perf_counter() - begin


def collect_tensors(model: nn.Module, optimizers: Optimizers | None) -> Tensors:
    """All tensors to store or to load in place, by their names without wrappers."""
    found = {f"model.{clean_name(name)}": weight.detach() for name, weight in model.named_parameters()}
    state = {} if optimizers is None else optimizers.state_dict()
    return found | {f"optimizer.{name}": value for name, value in state.items()}


def load_checkpoint(
    checkpoint: Checkpoint, model: nn.Module, optimizers: Optimizers | None, mesh: Mesh
) -> None:
    """Fills the model, and the optimizers if given, in place from any sharding into any other (collective:
    every rank).

    Raises:
        DamagedCheckpoint: some file is missing, cut, changed or no tensors; what was filled is then of no
        use. RunFailed: some file cannot be read on some rank, which is no damage.
    """
    folder, found = checkpoint.folder, list[ValueError | OSError]()
    try:
        reader, files = CheckpointReader(folder), sorted(read_files(folder).items())
    except (ValueError, OSError) as error:
        found.append(error)
    _raise_alike(found, folder, mesh)
    failure: CheckpointException | None = None
    tensors = collect_tensors(model, optimizers)
    mine = files[mesh.place("world") :: mesh.size("world")]
    with ThreadPoolExecutor(1, thread_name_prefix="checksums") as pool:
        checks = [pool.submit(file_problem, folder / name, size, crc) for name, (size, crc) in mine]
        try:
            dcp.load(tensors, storage_reader=reader, no_dist=mesh.size("world") == 1)
        except CheckpointException as error:
            failure = error
        for check in checks:
            try:
                found += [ValueError(text) for text in [check.result()] if text]
            except OSError as error:
                found.append(error)
    _raise_alike(found, folder, mesh)
    if failure is not None:
        raise _explained(failure, folder) from failure
    if optimizers is not None:
        state = {name: value for name, value in tensors.items() if name.startswith("optimizer.")}
        optimizers.load_state_dict({name.removeprefix("optimizer."): value for name, value in state.items()})


def _explained(failure: CheckpointException, folder: Path) -> BaseException:
    """The error that a failure to load means: unreadable storage, a fault of ours, or files without such
    tensors."""
    rank, inner = first_failure(failure)
    if isinstance(inner, OSError):
        return RunFailed(f"rank {rank} cannot read {folder}: {inner}; repair the storage and start again")
    out_of_memory = MemoryError | torch.OutOfMemoryError | torch.AcceleratorError
    if not isinstance(inner, Exception) or isinstance(inner, out_of_memory):
        return failure
    reason = f"its files are what was written, but hold no tensors of this model ({type(inner).__name__})"
    return DamagedCheckpoint(folder, reason)


def _raise_alike(found: list[ValueError | OSError], folder: Path, mesh: Mesh) -> None:
    """Raises on every rank the errors that any rank has found (collective: every rank). A ValueError is
    damage, an OSError a file that cannot be read."""
    everyone = [error for errors in mesh.gather(found) for error in errors]
    if damage := [str(error) for error in everyone if isinstance(error, ValueError)]:
        raise DamagedCheckpoint(folder, "; ".join(damage))
    for error in (error for error in everyone if isinstance(error, OSError)):
        text = f"checkpoint file {error.filename or folder}: {error.strerror or error}"
        raise RunFailed(f"{text}; the file is not damaged: repair the storage and start again")


def load_tensor(reader: CheckpointReader, name: str) -> torch.Tensor:
    """One tensor of a checkpoint, whole, in this process."""
    entry = cast(TensorStorageMetadata, reader.metadata.state_dict_metadata[name])
    tensor = torch.empty(entry.size, dtype=entry.properties.dtype)
    dcp.load({name: tensor}, storage_reader=reader, no_dist=True)
    return tensor


def first_failure(error: CheckpointException) -> tuple[int, BaseException]:
    """The first rank that failed, and its error, out of DCP's collection of tracebacks."""
    rank, (inner, _) = min(error.failures.items())
    return rank, inner
