"""Checkpoint folders: names, states, and the choice of the newest one. Works without torch.

    step_<N>.partial-<attempt>   being written
    step_<N>                     complete: renamed after everything in it is on disk
    step_<N>.damaged-<k>         renamed because it is corrupt
    step_<N>.superseded-<k>      renamed because a launch resumed from an earlier step
    step_<N>.deleted             being deleted

A file system that cannot rename a folder (overlayfs, one of a container's image) has instead the
state in the file `quarantined` of step_<N>, which no longer counts as a checkpoint.

`files.json`, written last, lists size and checksum of every other file. The evaluation of the last
step is added later: it replaces train_state.json, then files.json. Three similar cases are
distinguished: a corrupt file (missing, other size or content), a file that cannot be read
(OSError: the storage, not the checkpoint), and a folder that vanished because the run deleted it
(CheckpointDeleted).
"""

from __future__ import annotations

import errno
import json
import math
import os
import re
import shutil
import stat
import zlib
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from io import FileIO
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from fms_fsdp.errors import UserError
from fms_fsdp.files import exists, is_folder, sync_folder, write_atomically
from fms_fsdp.state import TrainMetadata, read_train_metadata

T = TypeVar("T")
FILES = "files.json"
NEXT_FILES = "files.next.json"  # the listing with the next train_state.json, while that is replaced
STATE = "train_state.json"
METADATA = ".metadata"  # of torch.distributed.checkpoint
INDEX = "shards.index"  # a table of the same content
MARK = "quarantined"  # the state of a folder that could not be renamed
_PAGE = 4096  # bytes that one 64-bit sum covers
_STEP = re.compile(r"step_(0|[1-9][0-9]*)")
_LEFTOVER = re.compile(r"step_[0-9]+\.(partial|damaged|superseded|deleted)(?:-\d+)?")


class CheckpointDeleted(UserError):
    """A checkpoint vanished while it was read: the run that owns it deleted or renamed it."""

    def __init__(self, folder: Path) -> None:
        super().__init__(
            f"{folder} was deleted by its run while it was read; read a newer checkpoint, or keep "
            f"this one with --keep_steps={folder.name.removeprefix('step_')}"
        )
        self.folder = folder

    def __reduce__(self) -> tuple[type[CheckpointDeleted], tuple[Path]]:  # sent between ranks
        return type(self), (self.folder,)


class CorruptCheckpoint(UserError):
    """A file of a checkpoint is not the file that was written."""

    def __init__(self, folder: Path, reason: str) -> None:
        super().__init__(f"{folder} is corrupt: {reason}; choose another step")
        self.folder = folder
        self.reason = reason

    def __reduce__(self) -> tuple[type[CorruptCheckpoint], tuple[Path, str]]:
        return type(self), (self.folder, self.reason)


@dataclass(frozen=True)
class Checkpoint:
    """A complete checkpoint. `skipped`: newer ones that are corrupt, or `unhealthy`, and why."""

    folder: Path
    metadata: TrainMetadata
    skipped: Mapping[Path, str] = field(default_factory=dict)
    unhealthy: tuple[Path, ...] = ()

    @property
    def step(self) -> int:
        return self.metadata.step


class Checksum:
    """A checksum at memory speed: the CRC-32 of the 64-bit sums of 4 KiB pages, then of the rest.

    It finds changed bytes and lost, zeroed or misplaced pages; only an exchange within a page that
    keeps the page's sum goes unnoticed. A CRC-32 of every byte took a third of the time of a save.
    """

    def __init__(self) -> None:
        self._crc = 0
        self._rest = b""  # bytes after the last full page

    def update(self, data: bytes | bytearray | memoryview) -> None:
        view = memoryview(data).cast("B")
        if self._rest:  # fill the page that the data before began
            missing = _PAGE - len(self._rest)
            self._rest += view[:missing]
            view = view[missing:]
            if len(self._rest) < _PAGE:
                return
            self._add_pages(memoryview(self._rest))
        end = len(view) // _PAGE * _PAGE
        self._add_pages(view[:end])
        self._rest = bytes(view[end:])

    def _add_pages(self, pages: memoryview) -> None:
        words = np.frombuffer(pages, dtype="<u8").reshape(-1, _PAGE // 8)
        sums = words.sum(axis=1, dtype=np.uint64)
        self._crc = zlib.crc32(sums.tobytes(), self._crc)

    @property
    def value(self) -> int:
        return zlib.crc32(self._rest, self._crc)


def format_files(files: Mapping[str, tuple[int, int]]) -> str:
    """Returns the text of files.json for {name: (bytes, checksum)}; it ends in its own CRC-32."""
    listing = {name: [size, f"{value:08x}"] for name, (size, value) in sorted(files.items())}
    crc = zlib.crc32(json.dumps(listing).encode())
    return json.dumps({"files": listing, "crc32": f"{crc:08x}"}, indent=1) + "\n"


def read_files(folder: Path) -> dict[str, tuple[int, int]]:
    """Returns {name: (bytes, checksum)} of files.json.

    Raises:
        UserError: it is missing or corrupt, or names a file outside of the folder.
    """
    if exists(folder / NEXT_FILES):  # a kill ended `replace_metadata`
        with suppress(UserError):
            files = _read_listing(folder / NEXT_FILES)
            if STATE in files and not _file_problem(folder / STATE, *files[STATE]):
                return files
    return _read_listing(folder / FILES)


def replace_metadata(folder: Path, metadata: TrainMetadata) -> None:
    """Replaces train_state.json of a complete checkpoint, which is valid after a kill at any time.

    Raises:
        UserError: the listing is corrupt. OSError: a file cannot be written.
    """
    text = json.dumps(metadata.content, indent=1).encode()
    checksum = Checksum()
    checksum.update(text)
    files = read_files(folder) | {STATE: (len(text), checksum.value)}
    # The new listing is on disk before the file that it describes, and its rename comes last.
    write_atomically(folder / NEXT_FILES, format_files(files), sync=True)
    sync_folder(folder)
    write_atomically(folder / STATE, text, sync=True)
    sync_folder(folder)
    os.replace(folder / NEXT_FILES, folder / FILES)


def _read_listing(path: Path) -> dict[str, tuple[int, int]]:
    content, text = _read_json(path)
    files = dict[str, tuple[int, int]]()
    try:
        for name, (size, checksum) in content["files"].items():
            files[name] = (int(size), int(checksum, 16))
        is_valid = format_files(files) == text  # the CRC-32 and every other byte
    except (ValueError, KeyError, TypeError, AttributeError, OverflowError):
        is_valid = False
    # A name with a folder could lead anywhere.
    if not is_valid or any("/" in name for name in files):
        raise UserError(f"{path.name} is corrupt")
    return files


def read_metadata(folder: Path) -> TrainMetadata:
    """Returns the content of train_state.json.

    Raises:
        UserError: it is missing or corrupt.
    """
    content, _ = _read_json(folder / STATE)
    return read_train_metadata(content)


def _read_json(path: Path) -> tuple[Any, str]:
    with open_file(path) as file:
        raw = file.readall()
    try:
        return json.loads(raw), raw.decode()
    except (ValueError, RecursionError):
        raise UserError(f"{path.name} is corrupt") from None


def open_file(path: Path) -> FileIO:
    """Opens a file of a checkpoint; never waits for a FIFO or device.

    Raises:
        UserError: it is missing, or not a regular file. CheckpointDeleted: its folder is gone.
        OSError: it cannot be read, which says nothing about its content.
    """
    try:
        if not stat.S_ISREG(os.stat(path).st_mode):
            raise UserError(f"{path.name} is not a regular file")
        return FileIO(path)
    except (FileNotFoundError, NotADirectoryError):
        # A link to a folder that is missing, such as on a disk that is not mounted, was not deleted.
        if not exists(path.parent) and not path.parent.is_symlink():
            raise CheckpointDeleted(path.parent) from None
        raise UserError(f"{path.name} is missing") from None


def _file_problem(path: Path, size: int, checksum: int | None) -> str:
    """Returns why a file is corrupt, or ""; without `checksum`, by its size alone."""
    try:
        with open_file(path) as file:
            actual = os.fstat(file.fileno()).st_size
            if actual != size:
                return f"{path.name} has {actual:,} bytes instead of {size:,}"
            if checksum is not None and _read_checksum(file) != checksum:
                return f"{path.name} is corrupt: its checksum is wrong"
    except CheckpointDeleted:
        raise
    except ValueError as error:
        return str(error)
    return ""


def _read_checksum(file: FileIO) -> int:
    total = Checksum()
    buffer = bytearray(4 << 20)
    while count := file.readinto(buffer):
        total.update(memoryview(buffer)[:count])
    return total.value


def problem(folder: Path) -> str:
    """Returns why `folder` is not a complete checkpoint, or "": by sizes and by the small files.

    Raises:
        OSError: a file cannot be read. CheckpointDeleted: the folder is gone.
    """
    try:
        files = read_files(folder)
        for name in (STATE, METADATA):
            if name not in files:
                return f"{name} is missing"
        for name, (size, checksum) in files.items():
            is_small = name in (STATE, METADATA)  # checksums of the others read all weights
            why = _file_problem(folder / name, size, checksum if is_small else None)
            if why:
                # The run may have replaced train_state.json and the listing meanwhile.
                return problem(folder) if read_files(folder) != files else why
        step = read_metadata(folder).step
        if folder.name != f"step_{step}":
            return f"{STATE} is of step {step}"
        return ""
    except CheckpointDeleted:
        raise
    except ValueError as error:
        return str(error)


def corrupt_files(folder: Path, rank: int = 0, num_ranks: int = 1) -> list[str]:
    """Returns the files with a wrong checksum, each with the reason.

    Each rank reads the files that the ranks of its number wrote, which it will most likely load.
    """
    files = read_files(folder)
    mine = []
    for name in sorted(files):
        writer = re.match(r"__(\d+)_", name)  # torch names its files __<rank>_<number>.distcp
        writer_rank = int(writer[1]) if writer else 0
        if writer_rank % num_ranks == rank:
            mine.append(name)
    with ThreadPoolExecutor(4) as pool:
        reasons = pool.map(lambda name: _file_problem(folder / name, *files[name]), mine)
        corrupt = [reason for reason in reasons if reason]
    if corrupt and read_files(folder) != files:  # the run replaced train_state.json meanwhile
        return corrupt_files(folder, rank, num_ranks)
    return corrupt


def checkpoint_root(path: Path) -> Path:
    """Returns the folder of checkpoints of a run directory; any other path is returned unchanged."""
    inside = path / "checkpoints"
    return inside if is_folder(inside) else path


def is_step_name(name: str) -> bool:
    """Returns whether a folder is named as a complete checkpoint; a run may be named step_decay."""
    return _STEP.fullmatch(name) is not None


def checkpoint_steps(root: Path) -> list[int]:
    """Returns the steps of the folders that are named as complete checkpoints, ascending."""
    if not is_folder(root):
        return []
    steps = []
    for path in root.iterdir():
        match = _STEP.fullmatch(path.name)
        if match and not exists(path / MARK):
            steps.append(int(match[1]))
    return sorted(steps)


def is_complete(folder: Path) -> bool:
    try:
        return not problem(folder)
    except (OSError, CheckpointDeleted):
        return False


class CompleteCheckpoints:
    """Reads the metadata of complete checkpoints, and remembers it until a folder changes.

    Whether a checkpoint is complete needs the size of each file, and a run asks after every save. A
    folder has changed if a file was added, replaced or removed, or a small file has another time or
    size.
    """

    def __init__(self) -> None:
        self._read: dict[Path, tuple[tuple[int, ...], TrainMetadata]] = {}

    def read(self, folder: Path) -> TrainMetadata | None:
        """Returns the metadata; None: the checkpoint is not complete.

        Raises:
            UserError, OSError: the folder vanished, or cannot be read.
        """
        state = _folder_state(folder)
        known = self._read.pop(folder, None)
        if known is None or known[0] != state:
            if not is_complete(folder):
                return None
            known = state, read_metadata(folder)
        self._read[folder] = known
        return known[1]


def _folder_state(folder: Path) -> tuple[int, ...]:
    """Returns times and sizes that change whenever a file is added, replaced or removed."""
    state = []
    for path in (folder, folder / FILES, folder / STATE, folder / METADATA):
        try:
            found = os.stat(path)
        except (FileNotFoundError, NotADirectoryError):  # `problem` says so
            continue
        state += [found.st_ino, found.st_mtime_ns, found.st_size]
    return tuple(state)


def complete_steps(root: Path) -> list[int]:
    return [step for step in checkpoint_steps(root) if is_complete(root / f"step_{step}")]


def newest_healthy_step(root: Path) -> int | None:
    """Returns the step of the newest complete checkpoint that ends in a finite step."""
    for step in reversed(complete_steps(root)):
        with suppress(UserError, OSError):  # its run may delete it meanwhile
            if not read_metadata(root / f"step_{step}").non_finite_steps:
                return step
    return None


def leftovers(root: Path) -> list[tuple[Path, str]]:
    """Returns the folders that are not complete checkpoints, each with its state."""
    if not is_folder(root):
        return []
    found = []
    for path in sorted(root.iterdir()):
        match = _LEFTOVER.fullmatch(path.name)
        if match:
            found.append((path, match[1]))
        elif _STEP.fullmatch(path.name) and exists(path / MARK):
            found.append((path, (path / MARK).read_text(encoding="utf-8").strip()))
    return found


def find_checkpoint(
    path: Path, step: int | None = None, *, corrupt: Mapping[Path, str] | None = None
) -> Checkpoint | None:
    """Returns the checkpoint at `path`, a step folder, or the newest usable one in `path`, a root.

    Skips corrupt folders, and unless `path` or `step` names them, checkpoints that end in two or
    more non-finite steps. One that was saved earlier in the same series of non-finite steps is
    skipped too. `corrupt`: folders already known to be corrupt. None: there is no checkpoint.

    Raises:
        UserError: there are checkpoints, but all are skipped. OSError: one cannot be read.
    """
    is_step_folder = is_step_name(path.name) and is_folder(path)
    is_named = is_step_folder or step is not None
    if is_step_folder:
        if step is not None and path.name != f"step_{step}":
            raise UserError(
                f"{path} is not the checkpoint of step {step}; name the folder that holds all "
                "checkpoints, or no step"
            )
        folders = [path]
    else:
        steps = reversed(checkpoint_steps(path))
        folders = [path / f"step_{each}" for each in steps if step in (None, each)]
    if not folders:
        return None

    skipped = dict[Path, str]()
    unhealthy = list[Path]()
    # Example: step_100 ends in 3 non-finite steps. step_98 ends in one of them, which alone would
    # be healthy; the newest checkpoint that may be used is step_97.
    last_finite_step = math.inf
    for folder in folders:
        try:
            # `corrupt` comes first: `problem` finds no wrong checksum of a large file.
            why = (corrupt or {}).get(folder) or problem(folder)
            if why:
                skipped[folder] = why
                continue
            metadata = read_metadata(folder)
        except CheckpointDeleted:
            if is_named:
                raise
            continue  # its run deleted it after the folders were listed, so a newer one was saved
        is_healthy = metadata.is_healthy and metadata.step <= last_finite_step
        if is_healthy or is_named:
            return Checkpoint(folder, metadata, skipped, tuple(unhealthy))
        skipped[folder] = describe_health(metadata)
        unhealthy.append(folder)
        last_finite_step = metadata.step - metadata.non_finite_steps

    if not skipped:  # all were deleted meanwhile
        return find_checkpoint(path, step, corrupt=corrupt)
    reasons = "; ".join(f"{folder.name}: {why}" for folder, why in skipped.items())
    fix = "choose another folder"
    if unhealthy:
        fix += f", or one of its checkpoints, e.g. {unhealthy[0]}"
    raise UserError(f"{path} has no usable checkpoint ({reasons}); {fix}")


def describe_health(metadata: TrainMetadata) -> str:
    """Returns that a checkpoint ends in non-finite steps, or ""."""
    count = metadata.non_finite_steps
    if count == 0:
        return ""
    steps = "step" if count == 1 else "steps"
    return f"ends in {count} non-finite {steps}"


def read_checkpoint(find: Callable[[], Checkpoint], use: Callable[[Checkpoint], T]) -> T:
    """Returns `use(find())`; again if the run deletes the checkpoint in the meantime.

    Raises:
        CheckpointDeleted: it was deleted, and `find` returns no other one.
    """
    deleted: CheckpointDeleted | None = None
    for _ in range(5):  # a fast run may delete several, one after the other
        try:
            checkpoint = find()
        except UserError as error:
            raise deleted or error from None  # the deletion is the reason
        try:
            return use(checkpoint)
        except CheckpointDeleted as error:
            deleted = error
        except Exception:  # any error, if its cause is that the folder is gone
            if exists(checkpoint.folder):
                raise
            deleted = CheckpointDeleted(checkpoint.folder)
    assert deleted is not None
    raise deleted


def rename_aside(folder: Path, state: str) -> Path:
    """Renames a step folder to `<name>.<state>-<k>`, the first free k, and returns it.

    A folder that cannot be renamed gets the state in a file, and is returned itself.
    """
    name = f"{folder.name}.{state}"
    k = 1
    while os.path.lexists(folder.with_name(f"{name}-{k}")):
        k += 1
    target = folder.with_name(f"{name}-{k}")
    return target if _rename_or_mark(folder, target, state) else folder


def _rename_or_mark(folder: Path, target: Path, state: str) -> bool:
    """Renames a folder; returns False if its file system cannot, and the folder is marked."""
    try:
        os.rename(folder, target)
    except OSError as error:
        if error.errno != errno.EXDEV:
            raise
        write_atomically(folder / MARK, f"{state}\n", sync=True)
        return False
    return True


def delete(folder: Path) -> None:
    """Deletes a checkpoint; renames it first, so that nothing half deleted looks complete."""
    step_name, _, _ = folder.name.partition(".")
    doomed = folder.with_name(f"{step_name}.deleted")
    if folder != doomed:
        # An interrupted deletion may have left a folder of this name.
        shutil.rmtree(doomed, ignore_errors=True)
        if not _rename_or_mark(folder, doomed, "deleted"):
            doomed = folder
            (folder / FILES).unlink(missing_ok=True)  # the mark may be the first file to go
    if doomed.is_symlink():  # the user moved the folder to another disk, where it stays
        doomed.unlink()
    else:
        shutil.rmtree(doomed)


def clean_up(root: Path) -> Iterator[Path]:
    """Deletes the remains of interrupted saves and deletions, and yields each folder. Owner only."""
    for path, state in leftovers(root):
        if state in ("partial", "deleted"):
            shutil.rmtree(path, ignore_errors=True)
            yield path


def folder_bytes(folder: Path) -> int:
    """Returns the bytes of the files that exist: a run may rename or delete some meanwhile."""
    size = 0
    with suppress(FileNotFoundError):  # of a folder
        for path in folder.rglob("*"):
            with suppress(FileNotFoundError):
                if path.is_file():
                    size += path.stat().st_size
    return size
