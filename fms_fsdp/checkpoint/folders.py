"""Checkpoint folders: their names, what makes a folder complete, and which folder a run starts from. Works
without torch.

    step_<N>.partial-<attempt>/   being written
    step_<N>/                     complete: renamed once everything in it is on disk; the name is never reused
    step_<N>.damaged-<k>/         set aside: a file is missing, cut or changed
    step_<N>.superseded-<k>/      set aside: --resume_step went back to an earlier one
    step_<N>.deleted/             being deleted

A complete folder holds `files.json`: size and checksum of every other file, and a CRC-32 of that list. It is
written last. `problems` is the one definition of complete, used by save, load and clean-up: without a deep
look the sizes count, and the content of what is small. A file that is missing, of another size or content, or
no regular file is damage; one that cannot be read is not: that raises OSError with its name.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import zlib
from collections.abc import Collection, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from io import FileIO
from pathlib import Path
from typing import Any

import numpy as np

from fms_fsdp.errors import StorageError, UserError
from fms_fsdp.record import Saved, read_saved
from fms_fsdp.safe_names import open_regular, safe_name

FILES, STATE, METADATA = "files.json", "train_state.json", ".metadata"
_PAGE = 4096
_STEP = re.compile(r"step_(0|[1-9][0-9]*)")
_ANY = re.compile(r"step_([0-9]+)(?:\.(partial|damaged|superseded|deleted)(?:-\d+)?)?")
_LARGEST_JSON = 256 << 20


@dataclass(frozen=True)
class Checkpoint:
    """A complete checkpoint: its folder and what `train_state.json` says. `passed_over`: newer ones that are
    damaged, and why."""

    folder: Path
    saved: Saved
    passed_over: dict[Path, str] = field(default_factory=dict)

    @property
    def step(self) -> int:
        return self.saved.step


class Checksum:
    """A checksum at the speed of memory: the CRC-32 of the 64-bit sums of a file's pages of 4 KiB, then of
    the rest.

    A changed byte or word, a lost, zeroed or misplaced page is found (with probability 1 - 2^-32); only an
    exchange within one page that keeps its sum is not. A CRC-32 of every byte took a third of
    the time of a save.
    """

    def __init__(self) -> None:
        self._crc, self._rest = 0, b""

    def update(self, data: bytes | bytearray | memoryview) -> None:
        """Takes in the next bytes of the file."""
        view = memoryview(data).cast("B")
        if self._rest:
            missing = _PAGE - len(self._rest)
            self._rest += view[:missing]
            view = view[missing:]
            if len(self._rest) < _PAGE:
                return
            self._add_pages(memoryview(self._rest))
        whole = len(view) // _PAGE * _PAGE
        self._add_pages(view[:whole])
        self._rest = bytes(view[whole:])

    def _add_pages(self, pages: memoryview) -> None:
        words = np.frombuffer(pages, dtype="<u8").reshape(-1, _PAGE // 8)
        self._crc = zlib.crc32(words.sum(axis=1, dtype=np.uint64).tobytes(), self._crc)

    @property
    def value(self) -> int:
        return zlib.crc32(self._rest, self._crc)


def render_files(files: dict[str, tuple[int, int]]) -> str:
    """The text of files.json for {name: (bytes, checksum)}."""
    listing = {name: [size, f"{value:08x}"] for name, (size, value) in sorted(files.items())}
    content = {"files": listing, "crc32": f"{zlib.crc32(json.dumps(listing).encode()):08x}"}
    return json.dumps(content, indent=1) + "\n"


def read_files(folder: Path) -> dict[str, tuple[int, int]]:
    """{name: (bytes, checksum)} of files.json.

    Raises:
        UserError: it is missing or not, to the last byte, what was written, or names what is no bare file
            name.
        OSError: it cannot be read.
    """
    text, content = _read_json(folder / FILES)
    try:
        files = {name: (int(size), int(value, 16)) for name, (size, value) in content["files"].items()}
    except (ValueError, KeyError, TypeError, AttributeError, OverflowError):
        files = {}
    if render_files(files) != text:
        raise UserError(f"{FILES} is damaged")
    return {safe_name(name, FILES): entry for name, entry in files.items()}


def file_problem(path: Path, size: int, expected: int | None) -> str:
    """Tells the fault of a file that must have `size` bytes and, unless None, this checksum; empty if the
    file has no fault.

    Raises:
        OSError: it cannot be read.
    """
    try:
        with open_file(path) as file:
            actual = os.fstat(file.fileno()).st_size
            if actual != size:
                return f"{path.name} has {actual:,} bytes and must have {size:,}"
            if expected is not None and _checksum(file) != expected:
                return f"{path.name} is damaged: its checksum is wrong"
    except ValueError as error:
        return str(error)
    return ""


def _checksum(file: FileIO) -> int:
    total, buffer = Checksum(), bytearray(4 << 20)
    while count := file.readinto(buffer):
        total.update(memoryview(buffer)[:count])
    return total.value


def open_file(path: Path) -> FileIO:
    """Opens a regular file for reading; never waits for a FIFO or a device. Links are followed.

    Raises:
        UserError: it is missing or no regular file.
        OSError: it cannot be read; the error names it.
    """
    try:
        return FileIO(open_regular(path))
    except (FileNotFoundError, NotADirectoryError):
        raise UserError(f"{path.name} is missing") from None
    except StorageError:
        raise UserError(f"{path.name} is no regular file") from None


def _read_json(path: Path) -> tuple[str, Any]:
    """Text and content of a file. Raises: UserError, OSError as `open_file`; UserError: it is no JSON."""
    with open_file(path) as file:
        raw = file.read(_LARGEST_JSON)
    try:
        text = raw.decode()
        return text, json.loads(text)
    except (ValueError, RecursionError):
        raise UserError(f"{path.name} is damaged") from None


def has_all_files(folder: Path) -> bool:
    """Says whether the files of a folder have the names and sizes of a complete checkpoint."""
    try:
        files = read_files(folder).items()
        return not any(file_problem(folder / name, size, None) for name, (size, _) in files)
    except (OSError, ValueError):
        return False


def problems(folder: Path, *, deep: bool = False) -> list[str]:
    """Tells why `folder` is no complete checkpoint, a line each; [] for a complete one. `deep` reads every
    byte.

    Raises:
        OSError: a file cannot be read, which is no damage.
    """
    small = (STATE, METADATA)
    try:
        files = read_files(folder)

        def problem_of(name: str) -> str:
            size, checksum = files[name]
            return file_problem(folder / name, size, checksum if deep or name in small else None)

        found = [f"{name} is missing" for name in small if name not in files]
        with ThreadPoolExecutor(4 if deep else 1) as pool:
            found += filter(None, pool.map(problem_of, files))
        if not found and folder.name != f"step_{(step := read_state(folder).step)}":
            found = [f"{STATE} is of step {step}"]
        return found
    except ValueError as error:
        return [str(error)]


def complete_steps(root: Path) -> list[int]:
    """Steps of the complete checkpoints in `root`, ascending; [] where there is no such folder."""
    return [step for step in named_steps(root) if not problems(root / f"step_{step}")]


def named_steps(root: Path) -> list[int]:
    """Steps of the folders in `root` that are named as complete checkpoints are, ascending."""
    if not root.is_dir():
        return []
    return sorted(int(match[1]) for path in root.iterdir() if (match := _STEP.fullmatch(path.name)))


def leftovers(root: Path) -> list[tuple[Path, str]]:
    """Returns the folders of unfinished, damaged, superseded or half deleted checkpoints in `root`, each with
    the word of its state."""
    if not root.is_dir():
        return []
    found = []
    for path in sorted(root.iterdir()):
        match = _ANY.fullmatch(path.name)
        if match and match[2]:
            found.append((path, match[2]))
    return found


def open_checkpoint(path: Path, *, skip: Collection[Path] = (), step: int | None = None) -> Checkpoint | None:
    """Returns the checkpoint at `path`, a step folder; of a root the newest sound checkpoint, or that of
    `step`; None where there is no checkpoint.

    `skip`: folders known to be damaged.

    Raises:
        UserError: there are checkpoints, but none that can be used.
        OSError: one that would be used cannot be read.
    """
    if _STEP.fullmatch(path.name) and (step is not None or path.is_dir()):
        candidates = [path]
    else:
        candidates = [
            path / f"step_{found}" for found in reversed(named_steps(path)) if step in (None, found)
        ]
    passed_over: dict[Path, str] = {}
    for folder in candidates:
        wrong = ["damaged"] if folder in skip else problems(folder)
        if not wrong:
            return Checkpoint(folder, read_state(folder), passed_over)
        passed_over[folder] = wrong[0]
    if passed_over:
        listing = "; ".join(f"{folder.name}: {reason}" for folder, reason in passed_over.items())
        raise UserError(
            f"checkpoints in {path} ({listing}) must be sound, and none is sound; remove the checkpoints or "
            "choose another folder"
        )
    return None


def read_state(folder: Path) -> Saved:
    """Returns the content of train_state.json.

    Raises:
        UserError: it is missing, or no record of a checkpoint.
        OSError: it cannot be read.
    """
    _, content = _read_json(folder / STATE)
    return read_saved(content)


def set_aside(folder: Path, word: str) -> Path:
    """Renames a step folder to `<name>.<word>-<k>`, the first k that is free, and returns it."""
    for count in range(1, 10_000):
        target = folder.with_name(f"{folder.name}.{word}-{count}")
        if not target.exists():
            os.rename(folder, target)
            return target
    raise UserError(f"{folder} was set aside 10,000 times; run `python -m fms_fsdp ckpt prune`")


def delete(folder: Path) -> None:
    """Removes a checkpoint folder: renamed first, so that nothing half deleted is taken for complete."""
    doomed = folder.with_name(folder.name.partition(".")[0] + ".deleted")
    if folder != doomed:
        shutil.rmtree(doomed, ignore_errors=True)
        os.rename(folder, doomed)
    shutil.rmtree(doomed)


def clean_up(root: Path) -> Iterable[Path]:
    """Removes what interrupted saves and deletions left behind; yields each folder. Only the owner of `root`
    may."""
    for path, word in leftovers(root):
        if word in ("partial", "deleted"):
            shutil.rmtree(path, ignore_errors=True)
            yield path


def tree_bytes(folder: Path) -> int:
    """Bytes of all files in a folder."""
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
