"""How a checkpoint's bytes reach the disk and come back: torch.distributed.checkpoint's file format, with
three promises added.

Written: every file's checksum is taken as it is written and forced to disk; the coordinator then commits:
train_state.json, files.json, fsync, rename. Read: `.metadata` is a pickle, so only the few classes that DCP
itself stores there are let in; tensors are read with `weights_only`.
Source: https://docs.pytorch.org/docs/stable/distributed.checkpoint.html
"""

from __future__ import annotations

import io
import json
import math
import operator
import os
import pickle
import shutil
import time
from collections.abc import Callable
from dataclasses import replace
from enum import Enum
from pathlib import Path
from typing import Any, cast

import torch
from torch.distributed.checkpoint import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.filesystem import FileSystem
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, StorageMeta, TensorStorageMetadata
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future
from torch.utils.serialization import config as torch_settings

from fms_fsdp.checkpoint.folders import (
    FILES,
    METADATA,
    STATE,
    Checksum,
    open_file,
    read_files,
    render_files,
    set_aside,
)
from fms_fsdp.checkpoint.progress import SaveProgress
from fms_fsdp.errors import StorageError, UserError
from fms_fsdp.record import Saved

_PIECE = 16 << 20  # bytes of a large tensor that are written at a time

_METADATA_CLASSES = "BytesStorageMetadata ChunkStorageMetadata TensorStorageMetadata Metadata "
_METADATA_CLASSES += "MetadataIndex StorageMeta TensorProperties _MEM_FORMAT_ENCODING"
_ALLOWED = {  # module → what `.metadata` may name of it; besides that, torch's dtypes
    "torch.distributed.checkpoint.metadata": _METADATA_CLASSES.split(),
    "torch.distributed.checkpoint.filesystem": ["_StorageInfo", "_StoragePrefix"],
    "pathlib": ["PosixPath"],
    "pathlib._local": ["PosixPath"],
    "torch.serialization": ["_get_layout"],
    "torch": ["Size"],
}


class CheckpointWriter(FileSystemWriter):
    """Writes `final` through the folder `partial`; `train_state` goes with it. What all ranks write must be
    free before anything is written.

    `begin`: when the save began, by `time.perf_counter`. `committed()` is called on the coordinator while the
    others still wait.
    """

    def __init__(
        self,
        partial: Path,
        final: Path,
        train_state: Saved,
        progress: SaveProgress,
        begin: float,
        committed: Callable[[], None],
    ) -> None:
        # copying ahead, DCP would wait for all work of the GPU, once for every large tensor, even of the host
        super().__init__(partial, single_file_per_rank=True, sync_files=False, per_thread_copy_ahead=0)
        self._summing = self.fs = _SummingFileSystem(progress)
        self._final, self._train_state = final, train_state
        self._progress, self._begin, self._committed = progress, begin, committed

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """On the coordinator, before any rank writes: refuses a disk that is too small."""
        free, needed = shutil.disk_usage(self.path).free, _planned_bytes(plans)
        if free < needed:
            raise StorageError(f"{needed / 2**20:,.0f} MiB are needed and {free / 2**20:,.0f} MiB are free")
        return super().prepare_global_plan(plans)

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        # torch.save sums each tensor once more for its own zip format; half of its time (torch 2.11 to 2.13)
        with torch_settings.patch("save.compute_crc32", False):  # type: ignore[attr-defined]
            results = _Results(super().write_data(plan, planner).value())
        results.files = dict(self._summing.files)
        future: Future[list[WriteResult]] = Future()
        future.set_result(results)
        return future

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """On the coordinator, when all ranks have written: the commit."""
        super().finish(metadata, results)
        files: dict[str, tuple[int, int]] = {}
        for written in results:
            assert isinstance(written, _Results), type(written)
            files |= written.files
        files[METADATA] = self._summing.files[f"{METADATA}.tmp"]
        folder = Path(self.path)
        state = replace(self._train_state, save_s=round(time.perf_counter() - self._begin, 3))
        with self.fs.create_stream(folder / STATE, "wb") as stream:
            stream.write(json.dumps(state.content, indent=1).encode())
        files[STATE] = self._summing.files[STATE]
        with self.fs.create_stream(folder / FILES, "wb") as stream:
            stream.write(render_files(files).encode())
        self._sync_folder(folder)
        if self._final.exists():
            set_aside(self._final, "damaged")
        os.rename(folder, self._final)
        self._sync_folder(self._final.parent)
        self._committed()

    def _sync_folder(self, folder: Path) -> None:
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            with self._progress.operation():
                os.fsync(descriptor)
        finally:
            os.close(descriptor)


def _planned_bytes(plans: list[SavePlan]) -> int:
    """Bytes of the parts of tensors that all ranks will write; in a pipeline each rank has other tensors."""
    parts = [item.tensor_data for plan in plans for item in plan.items if item.tensor_data is not None]
    return sum(math.prod(part.chunk.sizes) * part.properties.dtype.itemsize for part in parts)


class _Results(list[WriteResult]):
    """The tensors that a rank wrote, with {file name: (bytes, checksum)}; travels to the coordinator."""

    files: dict[str, tuple[int, int]]


class _SummingFileSystem(FileSystem):
    """Local files whose size and checksum are known when they are closed, and which are on disk then."""

    def __init__(self, progress: SaveProgress) -> None:
        self.files: dict[str, tuple[int, int]] = {}
        self._progress = progress

    def create_stream(  # type: ignore[override]
        self, path: str | os.PathLike[str], mode: str
    ) -> _SummingFile:
        return _SummingFile(Path(path), self.files, self._progress)


class _SummingFile(io.BufferedWriter):
    """A new file, summed as it is written front to back; closing it forces it to disk and enters it in
    `files`."""

    def __init__(self, path: Path, files: dict[str, tuple[int, int]], progress: SaveProgress) -> None:
        super().__init__(io.FileIO(path, "w"))
        self._name, self._files, self._checksum, self._progress = path.name, files, Checksum(), progress

    def write(self, data: Any) -> int:
        view = memoryview(data).cast("B")
        for start in range(0, len(view), _PIECE):
            piece = view[start : start + _PIECE]
            self._checksum.update(piece)
            super().write(piece)
            self._progress.alive()
        return len(view)

    def close(self) -> None:
        if self.closed:
            return
        try:
            self.flush()
            with self._progress.operation():
                os.fsync(self.fileno())
            self._files[self._name] = self.tell(), self._checksum.value
        finally:
            self.raw.close()  # not super().close(): on a full disk that would try, and fail, once more


class CheckpointReader(FileSystemReader):
    """DCP's reader of files; `.metadata` may name nothing but DCP's own classes, and places within the files.

    `prefix`: of another program's checkpoint, which has no files.json, only tensors of such names are seen.

    Raises:
        UserError: there is no such `.metadata`.
        OSError: it cannot be read.
    """

    def __init__(self, folder: Path, prefix: str = "") -> None:
        super().__init__(folder)
        self.metadata = _read_metadata(folder, prefix)
        self.metadata.storage_meta = StorageMeta(load_id=self.load_id)

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        return self.metadata


def _read_metadata(folder: Path, prefix: str) -> Metadata:
    with open_file(folder / METADATA) as file:
        content = io.BytesIO(file.read())
    if prefix:
        sizes = {file.name: file.stat().st_size for file in folder.iterdir()}
    else:
        sizes = {name: size for name, (size, _) in read_files(folder).items()}
    try:
        metadata = _MetadataUnpickler(content).load()
        for table in (metadata.state_dict_metadata, metadata.storage_data):
            for key in [key for key in table if not getattr(key, "fqn", key).startswith(prefix)]:
                del table[key]
        problem = "" if _is_whole(metadata, sizes) else "it describes no whole tensors in these files"
    except Exception as error:  # noqa: BLE001 - a pickle of anything may raise anything
        problem = " ".join(str(error).split()) or type(error).__name__
    if problem:
        raise UserError(f"{METADATA} is damaged: {problem}")
    return cast(Metadata, metadata)


def _is_whole(metadata: Any, sizes: dict[str, int]) -> bool:
    """Whether this is metadata of tensors alone, all chunks of each at known places within the files of these
    sizes."""
    if not isinstance(metadata, Metadata):
        return False
    for info in metadata.storage_data.values():
        end = info.offset + info.length
        is_inside = 0 <= info.offset <= end <= sizes[info.relative_path]
        if not is_inside or getattr(info, "transform_descriptors", None):
            return False
    for name, entry in metadata.state_dict_metadata.items():
        if not isinstance(entry, TensorStorageMetadata):
            return False
        for chunk in entry.chunks:
            ends = [start + length for start, length in zip(chunk.offsets, chunk.sizes, strict=True)]
            inside = min(chunk.offsets, default=0) >= 0 and all(map(operator.le, ends, entry.size))
            if not inside or MetadataIndex(name, chunk.offsets) not in metadata.storage_data:
                return False
        if sum(math.prod(chunk.sizes) for chunk in entry.chunks) != math.prod(entry.size):
            return False
    return True


def _member_of_enum(kind: Any, name: str) -> Enum:
    """The member of an enum by its name; attributes of other objects are refused."""
    if not (isinstance(kind, type) and issubclass(kind, Enum) and name in kind.__members__):
        raise pickle.UnpicklingError(f"{METADATA} asks for an attribute, which no checkpoint of ours holds")
    return kind.__members__[name]


class _MetadataUnpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if (module, name) == ("builtins", "getattr"):  # so Python 3.11.2 writes members of enums
            return _member_of_enum
        is_dtype = module == "torch" and isinstance(getattr(torch, name, None), torch.dtype)
        if not is_dtype and name not in _ALLOWED.get(module, ()):
            raise pickle.UnpicklingError(
                f"{METADATA} asks for {module}.{name}, which no checkpoint of ours holds"
            )
        return super().find_class(module, name)
