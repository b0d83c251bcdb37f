"""The run directory: one writer, numbered attempts, records.

config.json (latest launch) · config.<attempt>.json · status.json · metrics.jsonl · log.txt ·
checkpoints/ · STOP (created by whoever wants the run to stop) · .lock
"""

from __future__ import annotations

import errno
import json
import os
import re
import socket
import sys
import time
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, TextIO

from fms_fsdp.errors import UserError, is_storage_failure
from fms_fsdp.files import UNSUPPORTED, exists, is_folder, read_json, try_lock, write_atomically
from fms_fsdp.process import process_age_s
from fms_fsdp.run.agent import launch_pid

if TYPE_CHECKING:
    from fms_fsdp.config import TrainConfig
    from fms_fsdp.distributed.world import World
    from fms_fsdp.state import RunConfig


# How long a file server keeps the locks of a machine that died: NFSv4 90 s, Lustre about 100 s
_LEASE_S = 120.0


class RunDir:
    """The folders of a run. Only rank 0 calls the methods.

    attempt   number of this launch of the run, from 1; 0 until the folders are open
    """

    def __init__(self, cfg: TrainConfig) -> None:
        self.folder = Path(cfg.output_dir)
        self.checkpoints = Path(cfg.ckpt_save_path)
        self.stop_file = self.folder / "STOP"
        self.log_file = self.folder / "log.txt"
        self.attempt = 0
        self._locks: dict[Path, TextIO] = {}
        self._is_new = False

    def lock(self, *, create: bool = False) -> None:
        """Locks both folders until `close`, or the end of the process; by default existing ones.

        Raises:
            UserError: another process holds a lock, or a folder cannot be created.
        """
        if not create:
            self._is_new = not exists(self.checkpoints)
        for folder in (self.folder, self.checkpoints):
            try:
                if create:
                    folder.mkdir(parents=True, exist_ok=True)
                if exists(folder):
                    real = folder.resolve()
                    if real not in self._locks:
                        self._locks[real] = lock_folder(real, lease_s=_LEASE_S)
            except OSError as error:
                if is_storage_failure(error):  # another folder would be another run
                    raise
                reason = f"cannot be created or written: {error.strerror}"
                raise UserError(f"{folder} {reason}; choose another --output_dir") from error

    def open(self, corrupt: Iterable[Path] = ()) -> tuple[int, int | None]:
        """Creates and locks the folders, and removes an earlier launch's STOP file.

        `corrupt`: checkpoints that were skipped, which are renamed if they belong to this run.
        Returns the attempt, from 1, and the step whose data ended the last attempt.
        """
        self.lock(create=True)
        if self._is_new and any(self.checkpoints.glob("step_*")):
            raise UserError(
                f"another process created {self.checkpoints} at the same moment; if it is not running, "
                "start this command again"
            )
        self.rename_own(corrupt, "damaged")
        now = time.time()
        began = now - process_age_s(launch_pid())
        if exists(self.stop_file) and not began <= self.stop_file.stat().st_mtime <= now + 1:
            self.stop_file.unlink(missing_ok=True)  # for an earlier launch, or from the future
        names = [re.fullmatch(r"config\.(\d+)\.json", path.name) for path in self.folder.iterdir()]
        attempt = max((int(match[1]) for match in names if match), default=0) + 1
        return attempt, read_json(self.folder / "status.json").get("data_step")

    def rename_own(self, folders: Iterable[Path], state: str) -> None:
        """Renames the checkpoints of this run among `folders` to `<name>.<state>-<k>`."""
        for folder in folders:
            # A link to a checkpoint elsewhere is renamed itself: it must not be found again.
            is_own = folder.parent.resolve() == self.checkpoints.resolve()
            if is_own and is_folder(folder):
                _rename(folder, state, "checkpoint")

    def rename_exports(self, start_step: int) -> None:
        """Renames the exports of steps after `start_step`, which are trained again."""
        from fms_fsdp.checkpoint.folders import checkpoint_steps

        exports = self.folder / "exports"
        for step in checkpoint_steps(exports):
            if step > start_step:
                _rename(exports / f"step_{step}", "superseded", "export")

    def write_config(self, run: RunConfig) -> None:
        text = json.dumps(run.content, indent=1) + "\n"
        for name in (f"config.{self.attempt}.json", "config.json"):
            write_atomically(self.folder / name, text)

    def close(self) -> None:
        while self._locks:
            self._locks.popitem()[1].close()


def _rename(folder: Path, state: str, kind: str) -> None:
    from fms_fsdp.checkpoint.folders import rename_aside
    from fms_fsdp.logs import log

    target = rename_aside(folder, state)
    if target == folder:
        log.warning("marked %s as %s: it cannot be renamed", folder, state)
    else:
        log.warning("renamed %s to %s", kind, target)


def check_shared(folder: Path, world: World, timeout_s: float = 30.0) -> None:
    """Raises UserError if a rank does not see the run directory of rank 0 (collective).

    Network file systems may take some seconds to show a new file.
    """
    from fms_fsdp.distributed.runtime import gather_objects, run_on_rank0

    if world.size == world.local_size:
        return
    file = folder / run_on_rank0(lambda: f".shared-{os.getpid()}-{time.time_ns()}")
    run_on_rank0(file.touch)
    deadline = time.monotonic() + timeout_s
    # An error of one rank alone, such as a folder that it may not search, means the same.
    is_visible = os.path.exists(file)
    while not is_visible and time.monotonic() < deadline:
        time.sleep(0.2)
        is_visible = os.path.exists(file)
    missing = gather_objects(is_visible).count(False)
    run_on_rank0(file.unlink)
    if missing:
        raise UserError(
            f"{folder} must be shared by all nodes, but {missing} of {world.size} ranks do "
            "not see it; set --output_dir to a folder of a shared file system"
        )


def lock_folder(
    folder: Path,
    patience_s: float = 10.0,
    remedy: str = "stop it, or choose another --run_name",
    lease_s: float = 0.0,
) -> TextIO:
    """Locks `folder/.lock` until the returned file is closed or the process ends.

    Waits `patience_s` for a process that is about to end, and `lease_s` for one of another machine,
    which may have died: the launch that replaces it must not end for its lock. A file system
    without locks protects nothing; a line on stderr says so.

    Raises:
        UserError: another process holds the lock. OSError: the file cannot be written or locked.
    """
    file = open(folder / ".lock", "a+", encoding="utf-8")
    deadline = time.monotonic() + patience_s
    while not _try_lock(file, folder):
        if time.monotonic() > deadline:
            owner = _lock_owner(file)
            is_known = owner.startswith("process ")
            is_near = owner.endswith(f" on {socket.gethostname()}")
            if lease_s and is_known and not is_near:
                print(f"{folder} is in use by {owner}: waiting {lease_s:g} s", file=sys.stderr)
                deadline = time.monotonic() + lease_s
                lease_s = 0.0
                continue
            file.close()
            raise UserError(f"{folder} is in use by {owner}; {remedy}")
        time.sleep(0.2)
    file.truncate(0)
    print(f"process {os.getpid()} on {socket.gethostname()}", file=file, flush=True)
    return file


def _try_lock(file: TextIO, folder: Path) -> bool:
    """Locks an open file; returns False if another process holds the lock."""
    try:
        return try_lock(file.fileno())
    except OSError as error:
        # Any other code, such as EIO, does not say that there are no locks.
        if error.errno not in {errno.ENOLCK, *UNSUPPORTED}:
            file.close()
            raise
        print(f"{folder}: the file system has no locks ({error.strerror})", file=sys.stderr)
    return True


def _lock_owner(file: TextIO) -> str:
    """Returns who holds the lock, as its file says."""
    try:
        file.seek(0)
        owner = file.read().strip()
    except OSError:  # CIFS lets nobody else read a locked file
        owner = ""
    return owner or "another process"
