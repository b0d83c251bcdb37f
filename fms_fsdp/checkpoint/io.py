"""Tensors to and from disk, in the format of torch.distributed.checkpoint (DCP), with checksums.

Write: each file's checksum is computed while the file is written, and the file is synced. Rank 0
then commits: train_state.json, files.json, sync, rename. Read: from any sharding into any other,
because tensors are stored under the model's parameter names, whatever wraps the modules.

`.metadata` is a pickle. A checkpoint that somebody else made must not run code, so only the classes
that DCP itself stores are allowed in it; DCP reads tensors with `weights_only`.
Source: https://docs.pytorch.org/docs/stable/distributed.checkpoint.html
"""

from __future__ import annotations

import gc
import io
import json
import os
import time
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint import (
    DefaultLoadPlanner,
    FileSystemReader,
    FileSystemWriter,
)
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystem
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta
from torch.distributed.checkpoint.planner import LoadPlan, SavePlan, SavePlanner
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future
from torch.utils.serialization import config as torch_serialization

from fms_fsdp.checkpoint.folders import (
    FILES,
    INDEX,
    METADATA,
    STATE,
    CheckpointDeleted,
    Checksum,
    CorruptCheckpoint,
    corrupt_files,
    delete,
    format_files,
    open_file,
    rename_aside,
)
from fms_fsdp.checkpoint.index import build_index, read_index
from fms_fsdp.checkpoint.metadata import unpickle_metadata
from fms_fsdp.checkpoint.plans import CachingPlanner, FinishedPlan, LayoutChanged, SavePlans
from fms_fsdp.config.values import counted, format_bytes, shown
from fms_fsdp.distributed.runtime import gather_objects, min_over_ranks, run_long_on_every_rank
from fms_fsdp.errors import FULL_DISK, StorageError, UserError, read_failed
from fms_fsdp.files import exists, free_bytes, sync_folder, sync_to_disk
from fms_fsdp.logs import log
from fms_fsdp.models.init import clean_name
from fms_fsdp.optim.optimizers import Optimizers
from fms_fsdp.state import TrainMetadata

Tensors = dict[str, torch.Tensor]
_MOST_NAMED = 5  # tensors in a warning

# DCP warns about a single process even with no_dist=True. The filter is global because saves run in
# a thread, where warnings.catch_warnings has no effect.
warnings.filterwarnings("ignore", message="torch.distributed is disabled, unavailable or unin")


class SaveFailed(Exception):
    """A checkpoint could not be written, e.g. the disk is full. Raised on every rank.

    `remedy` says what the user can do about it.
    """

    def __init__(self, reason: str, error: BaseException, root: Path) -> None:
        super().__init__(reason)
        is_full = isinstance(error, StorageError) or getattr(error, "errno", None) in FULL_DISK
        self.remedy = "free disk space" if is_full else f"check the file system of {root}"


def collect_tensors(model: nn.Module, optimizers: Optimizers | None) -> Tensors:
    """Returns all tensors of a checkpoint by their stored names; they share memory."""
    found = {f"model.{clean_name(name)}": p.detach() for name, p in model.named_parameters()}
    state = {} if optimizers is None else optimizers.state_dict()
    return found | {f"optimizer.{name}": value for name, value in state.items()}


def write_checkpoint(
    tensors: Tensors,
    root: Path,
    metadata: TrainMetadata,
    attempt: int = 1,
    *,
    group: dist.ProcessGroup | None = None,
    plans: SavePlans | None = None,
    began: float | None = None,
    on_written: Callable[[], None] = lambda: None,
    on_commit: Callable[[], None] = lambda: None,
) -> None:
    """Writes `root/step_<N>` (collective over `group`; None: this process alone).

    `plans` makes the next save with them cheap. `began`: when the save began, by
    `time.perf_counter`. `on_written` runs on each rank when its own
    files are on disk, `on_commit` on rank 0 after the rename, while the other ranks still wait.

    Raises:
        SaveFailed: it could not be written; `step_<N>.partial-<attempt>` remains.
    """
    partial = root / f"step_{metadata.step}.partial-{attempt}"
    began = time.perf_counter() if began is None else began
    plans = SavePlans() if plans is None else plans

    def save(last: FinishedPlan | None) -> None:
        planner = CachingPlanner(last)
        writer = _Writer(partial, planner, metadata, began, on_written, on_commit)
        dcp.save(
            tensors,
            storage_writer=writer,
            planner=planner,
            process_group=group,
            no_dist=group is None,
        )
        plans.keep(planner.finished)

    try:
        try:
            save(plans.take())
        except CheckpointException as error:
            _, inner = first_failure(error)
            if not isinstance(inner, LayoutChanged):
                raise
            save(None)
    except CheckpointException as error:  # a collection of tracebacks: report the first rank's
        rank, inner = first_failure(error)
        raise SaveFailed(f"rank {rank}: {inner}".splitlines()[0], inner, root) from error
    except OSError as error:
        raise SaveFailed(str(error), error, root) from error


def load_checkpoint(
    folder: Path,
    model: nn.Module,
    optimizers: Optimizers | None,
    *,
    is_alone: bool,
    verify: bool = True,
) -> None:
    """Fills the model, and the optimizers if given, in place (collective unless `is_alone`).

    With `verify`, a thread compares the checksums meanwhile. It reads ahead of the load, which then
    finds the files in the page cache, so that each byte comes from the disk once.

    Raises (identical on every rank):
        CorruptCheckpoint: a checksum is wrong; the tensors must not be used.
        CheckpointDeleted: the folder vanished. RunFailed: a file cannot be read.
        UserError: the folder does not hold these tensors.
    """
    tensors = collect_tensors(model, optimizers)
    reader = CheckpointReader(folder)
    failure: Exception | None = None
    rank, num_ranks = (0, 1) if is_alone else (dist.get_rank(), dist.get_world_size())
    _on_every_rank(lambda: reader.read_part(tensors), folder, is_alone)
    _warn_of_extra_weights(tensors, reader, is_alone=is_alone)
    with ThreadPoolExecutor(1, thread_name_prefix="checksums") as pool:
        check = pool.submit(corrupt_files, folder, rank, num_ranks) if verify else None
        try:
            _load(tensors, reader)
        except (UserError, OSError, MemoryError, torch.OutOfMemoryError) as error:
            failure = error
        if check is not None and not is_alone:
            # One rank may have written all files, so that one reads them while the others wait.
            run_long_on_every_rank(lambda: wait([check]))
    if check is not None:
        _on_every_rank(lambda: _check(folder, check.result()), folder, is_alone)
    _on_every_rank(lambda: _raise(failure), folder, is_alone)  # although all files are valid
    if optimizers is not None:
        prefix = "optimizer."
        state = {n.removeprefix(prefix): t for n, t in tensors.items() if n.startswith(prefix)}
        optimizers.load_state_dict(state)


def _warn_of_extra_weights(tensors: Tensors, reader: CheckpointReader, *, is_alone: bool) -> None:
    """Names the weights of a checkpoint that the model lacks (collective unless `is_alone`)."""
    prefix = "model."
    names = reader.read_metadata().state_dict_metadata
    stored = [name for name in names if name.startswith(prefix)]
    is_extra = [int(name not in tensors) for name in stored]
    if not is_alone:
        is_extra = min_over_ranks(
            is_extra
        )  # a rank of a pipeline has the weights of its stage alone
        if dist.get_rank() > 0:
            return
    extra = []
    for name, is_missing in zip(stored, is_extra, strict=True):
        if is_missing:
            extra.append(name.removeprefix(prefix))
    if not extra:
        return
    more = f" and {len(extra) - _MOST_NAMED} more" if len(extra) > _MOST_NAMED else ""
    log.warning(
        "skipped %s of %s that the model does not have: %s%s",
        counted(len(extra), "tensor"),
        reader.path,
        shown(", ".join(sorted(extra)[:_MOST_NAMED])),
        more,
    )


def load_tensor(reader: CheckpointReader, name: str) -> torch.Tensor:
    """Returns one unsharded tensor of a checkpoint; raises as `load_checkpoint`."""
    entry: Any = reader.read_metadata().state_dict_metadata[name]
    tensor = torch.empty(entry.size, dtype=entry.properties.dtype)
    _load({name: tensor}, reader)
    return tensor


def _check(folder: Path, corrupt: list[str]) -> None:
    if corrupt:
        raise CorruptCheckpoint(folder, "; ".join(corrupt))


def _raise(error: Exception | None) -> None:
    if error is not None:
        raise error


def _on_every_rank(work: Callable[[], object], folder: Path, is_alone: bool) -> None:
    """Calls `work`, and raises the error of the first rank that failed on every rank."""
    cause: Exception | None = None
    failure: Exception | None = None
    try:
        work()
    except (UserError, OSError, MemoryError, torch.OutOfMemoryError) as error:
        cause = error
        # Before the ranks share their errors: the caches of a file system differ between nodes.
        failure = _explained(error, folder)
    for found in [failure] if is_alone else gather_objects(failure):
        if found is not None:
            raise found from cause


def _explained(error: Exception, folder: Path) -> Exception:
    with suppress(OSError):  # the first error is the reason
        if not exists(folder):
            return CheckpointDeleted(folder)
    if not isinstance(error, OSError) or isinstance(error, UserError):
        return error
    return read_failed(error.filename or folder, error.strerror or error)


def _load(tensors: Tensors, reader: CheckpointReader) -> None:
    """Reads this rank's shards; not collective, because rank 0 would collect the plans of all ranks
    only to send them back."""
    reader.read_metadata()  # DCP would hide an error behind "metadata is None"
    try:
        dcp.load(tensors, storage_reader=reader, planner=_LoadPlanner(), no_dist=True)
    except CheckpointException as error:
        _, inner = first_failure(error)
        if isinstance(inner, (UserError, OSError, MemoryError, torch.OutOfMemoryError)):
            raise inner from error
        reason = f"{type(inner).__name__}: {inner}".splitlines()[0]
        raise UserError(
            f"the checkpoint {reader.path} is of another model ({reason}); choose one of this model, or "
            "set the model flags of its config.json"
        ) from error


def first_failure(error: CheckpointException) -> tuple[int, BaseException]:
    """Returns the first rank that failed, and its error."""
    rank, (inner, _) = min(error.failures.items())
    return rank, inner


class _Writer(FileSystemWriter):
    """Writes the folder `partial`, and renames it to `step_<N>` once it is complete."""

    def __init__(
        self,
        partial: Path,
        planner: CachingPlanner,
        metadata: TrainMetadata,
        began: float,
        on_written: Callable[[], None],
        on_commit: Callable[[], None],
    ) -> None:
        # By default DCP copies ahead, for which it waits for the GPU at each large tensor.
        super().__init__(
            partial, single_file_per_rank=True, sync_files=False, per_thread_copy_ahead=0
        )
        self.files: dict[str, tuple[int, int]] = {}
        self.fs = _SyncedFiles(self.files)
        self._planner = planner
        self._metadata = metadata
        self._began = began
        self._on_written = on_written
        self._on_commit = on_commit

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """Raises StorageError on rank 0, before any rank writes, if the disk is too small."""
        needed = self._planner.finished.num_bytes
        free = free_bytes(self.path)
        if free is not None and free < needed:
            raise StorageError(
                f"it needs {format_bytes(needed)} of disk space, and {format_bytes(free)} is free"
            )
        return super().prepare_global_plan(plans)

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        # torch.save would compute a CRC-32 of each tensor for its zip format: half of its time.
        with torch_serialization.patch("save.compute_crc32", False):  # type: ignore[attr-defined]
            written = super().write_data(plan, planner).value()
        results = _Results(self._planner.changed_results(written))
        results.files = dict(self.files)
        self._on_written()
        future: Future[list[WriteResult]] = Future()
        future.set_result(results)
        return future

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Commits, on rank 0 after all ranks have written; `metadata` is empty."""
        folder = Path(self.path)
        planner = self._planner
        if planner.is_reused:
            planner.update_metadata(results)
            self._write(METADATA, planner.finished.metadata)
        else:
            assert planner.all_metadata is not None
            super().finish(planner.all_metadata, results)
            self.files[METADATA] = self.files.pop(f"{METADATA}.tmp")  # DCP renamed it
            planner.finished.metadata = (folder / METADATA).read_bytes()
            # torch 2.11 records these in a copy of the metadata.
            planner.all_metadata.storage_data = {
                written.index: written.storage_data for part in results for written in part
            }
            planner.finished.index = build_index(planner.all_metadata)
        self._write(INDEX, planner.finished.index)
        for written in results:
            self.files |= getattr(written, "files", {})
        final = folder.with_name(f"step_{self._metadata.step}")
        save_s = round(time.perf_counter() - self._began, 3)
        content = replace(self._metadata, save_s=save_s).content
        self._write(STATE, json.dumps(content, indent=1).encode())
        self._write(FILES, format_files(self.files).encode())
        sync_folder(folder)
        # `exists` does not see a link to a folder that is missing, over which none can be renamed.
        if os.path.lexists(final) and rename_aside(final, "damaged") == final:
            log.warning("deleted %s, which cannot be renamed", final)
            delete(final)
        os.rename(folder, final)
        sync_folder(final.parent)
        self._on_commit()

    def storage_meta(self) -> StorageMeta | None:
        """Returns nothing: DCP records a path and a random number, which no reader needs and which
        would differ in each save."""
        return None

    def _write(self, name: str, content: bytes) -> None:
        with self.fs.create_stream(Path(self.path) / name, "wb") as stream:
            stream.write(content)


class _Results(list[WriteResult]):
    """Write results of a rank, with {file name: (bytes, checksum)}; DCP sends it to rank 0."""

    files: dict[str, tuple[int, int]]


class _SyncedFiles(FileSystem):
    """Local files that are on disk, with size and checksum in `files`, when they are closed."""

    def __init__(self, files: dict[str, tuple[int, int]]) -> None:
        self._files = files

    def create_stream(  # type: ignore[override]
        self, path: str | os.PathLike[str], mode: str
    ) -> _SyncedFile:
        return _SyncedFile(Path(path), self._files)


class _SyncedFile(io.BufferedWriter):
    def __init__(self, path: Path, files: dict[str, tuple[int, int]]) -> None:
        super().__init__(io.FileIO(path, "w"))
        self._path = path
        self._files = files
        self._checksum = Checksum()

    def write(self, data: Any) -> int:
        self._checksum.update(data)
        return super().write(data)

    def close(self) -> None:
        if self.closed:
            return
        try:
            self.flush()
            sync_to_disk(self.fileno(), self._path)
            self._files[self._path.name] = self.tell(), self._checksum.value
        finally:
            self.raw.close()  # super().close() would flush again, and fail again on a full disk


@contextmanager
def _no_collections() -> Iterator[None]:
    """Pauses the garbage collector, which would look through all objects each time that their number
    has grown by a quarter: more than half of the time, where a rank of few makes them by the
    hundred thousand for the shards of many. Not while tensors are read: some could be garbage.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


class _LoadPlanner(DefaultLoadPlanner):
    def create_local_plan(self) -> LoadPlan:
        with _no_collections():
            return super().create_local_plan()


class CheckpointReader(FileSystemReader):
    """DCP's reader; reads `.metadata` without running code that the file asks for."""

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """Raises CorruptCheckpoint if `.metadata` names anything but DCP's own classes."""
        return self._metadata

    def read_part(self, tensors: Tensors) -> None:
        """Reads what this rank needs to load its shards of `tensors`, of a checkpoint of any number
        of ranks.

        Raises:
            CorruptCheckpoint: the files do not describe a checkpoint.
        """
        folder = Path(self.path)
        if not os.path.lexists(folder / INDEX):  # the checkpoint of an earlier version
            self.read_metadata()
            return
        with io.BufferedReader(open_file(folder / INDEX)) as file:
            try:
                with _no_collections():
                    metadata = read_index(file, tensors)
            except (ValueError, KeyError, TypeError, IndexError, EOFError) as error:
                raise CorruptCheckpoint(folder, f"{INDEX}: {error!r}") from None
        metadata.storage_meta = StorageMeta(load_id=self.load_id)
        self._metadata = metadata

    @cached_property
    def _metadata(self) -> Metadata:
        folder = Path(self.path)
        try:
            with open_file(folder / METADATA) as file:
                content = file.readall()
        except CheckpointDeleted:
            raise
        except UserError as error:
            raise CorruptCheckpoint(folder, str(error)) from None
        try:
            metadata = unpickle_metadata(content)
        except Exception as error:  # noqa: BLE001 - a pickle can raise anything
            raise CorruptCheckpoint(folder, f"{METADATA}: {error!r}") from None
        metadata.storage_meta = StorageMeta(load_id=self.load_id)
        return metadata
