"""Exit status, status.json, and the one-line report of errors. Works before torch is imported.

finished 0 · failed 1 · bad_input 2 · resume_me 75. torchrun hides the exit statuses of its workers
and restarts workers that fail, so an early stop exits with 0 under torchrun; scripts read the file
that LAUNCH_OUTCOME names, which is also written before there is a run directory.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, NoReturn

from fms_fsdp.errors import RunFailed, UserError, is_for_user, is_storage_failure, read_failed
from fms_fsdp.files import read_json, try_lock, write_atomically
from fms_fsdp.process import env_int, env_rank
from fms_fsdp.run.agent import agent_pid, await_rank0, release_ranks

if TYPE_CHECKING:
    from fms_fsdp.state import TrainState

RUNNING = "running"
FINISHED = "finished"
RESUME_ME = "resume_me"
BAD_INPUT = "bad_input"
FAILED = "failed"
REPORT_S = 10.0  # how long the end of a process may wait for its report
EXIT_STATUS = {FINISHED: 0, FAILED: 1, BAD_INPUT: 2, RESUME_ME: 75}


class RunStatus:
    """How a launch ends. As a context manager, turns exceptions into outcome, file and message."""

    def __init__(self) -> None:
        self.rank = env_rank()
        self.restart = env_int("TORCHELASTIC_RESTART_COUNT", 0)
        self.folder: Path | None = None  # until this rank may write into the run directory
        self.has_agent = agent_pid() != 0
        self._start_step = 0
        # Once the training begins; until then, a file that cannot be used is bad input.
        self._state: TrainState | None = None
        self.is_asked_to_end = False  # by a signal that came after the outcome: another rank ended
        self.outcome = ""
        self.reason = ""
        self._worlds: list[list[int]] = []  # [step, ranks] wherever the number of ranks changes
        self._reported: BaseException | None = None
        self._is_on_all_ranks = False  # whether every rank found the bad input
        self._step_saved = 0.0  # time.monotonic()

    @property
    def exit_status(self) -> int:
        # torchrun would start the ranks again, only for the same end on all of them. The launcher
        # reads the outcome from its file.
        is_final = self._is_on_all_ranks and "LAUNCH_OUTCOME" in os.environ
        if self.has_agent and (self.outcome == RESUME_ME or is_final):
            return 0
        return EXIT_STATUS[self.outcome or FAILED]

    def open(self, folder: Path, start_step: int) -> None:
        """Writes status.json into the run directory from here on: its lock is held."""
        self.folder = folder
        self._start_step = start_step
        if self.rank == 0:
            size = env_int("WORLD_SIZE", 1)
            self._worlds = read_json(folder / "status.json").get("worlds", [])
            if not self._worlds or self._worlds[-1][1] != size:
                self._worlds.append([start_step, size])
            self._write(folder / "status.json", RUNNING)
            job = os.environ.get("SLURM_ARRAY_JOB_ID") or os.environ.get("SLURM_JOB_ID")
            job_file = folder / "slurm_job"  # read by train.slurm and pulse.sh
            with suppress(OSError):
                if job:
                    write_atomically(job_file, f"{job}\n")
                else:  # of an earlier launch, whose job has ended
                    job_file.unlink(missing_ok=True)
        self._write_outcome(RUNNING)

    def follow(self, state: TrainState) -> None:
        """Records the steps of the training from here on, which begins."""
        self._state = state

    def save_step(self) -> None:
        """Writes the current step into status.json of a running launch, at most once a second."""
        if self.rank != 0 or self.folder is None:
            return
        now = time.monotonic()
        if now - self._step_saved < 1.0:
            return
        self._step_saved = now
        with self._exclusive():
            if not self.peer_failed():  # else its reason and the step of its data would be lost
                self._write(self.folder / "status.json", RUNNING)

    def end(self, outcome: str, reason: str) -> None:
        """Sets the end of the launch, which `__exit__` records."""
        self.outcome = outcome
        self.reason = reason

    def report_at_exit(self, _kind: object, error: BaseException | None, _trace: object) -> None:
        """Reports an error as an exit callback of `with`."""
        if error is not None:
            self.report(error)

    def report(self, error: BaseException) -> None:
        """Records and prints the error that ends this rank, once, before anything is closed."""
        if error is self._reported or isinstance(error, SystemExit | GeneratorExit):
            return
        if self._reported is not None:  # closing failed too; the first reason is kept
            self.print(f"[rank {self.rank}] then {type(error).__name__}: {error}")
            return
        self._reported = error
        if self._state is None and is_for_user(error) and not isinstance(error, UserError):
            error = UserError(str(error))
        if isinstance(error, OSError) and is_storage_failure(error) and error.filename is not None:
            error = read_failed(error.filename, error.strerror, on_one_rank=self.rank != 0)
        if isinstance(error, KeyboardInterrupt):
            error = RunFailed("interrupted by a second SIGINT; the last checkpoint stays")
        if "Too many open files" in str(error):  # gloo's errors have no number
            error = RunFailed(
                "this process may not open more files; raise the limit, e.g. ulimit -n 65536, and "
                "run again",
                on_one_rank=True,
            )
        self.reason = " ".join(str(error).split())  # one line
        if isinstance(error, UserError):
            self._report_bad_input(error)
        elif isinstance(error, RunFailed):
            self.fail(self.reason)
            if error.on_one_rank:
                self.print(f"[rank {self.rank}] failed: {error}")
            elif self.rank == 0:
                self.print(f"failed: {error}")
        else:  # a bug: every rank prints its traceback
            self.fail(f"{type(error).__name__}: {str(error).strip()}".splitlines()[0])
            self.print(f"[rank {self.rank}] " + "".join(traceback.format_exception(error)))

    def _report_bad_input(self, error: UserError) -> None:
        self.outcome = BAD_INPUT
        on_one_rank = error.on_one_rank
        is_reported_here = self.rank == 0 or on_one_rank
        if not is_reported_here and not await_rank0() and not self.is_asked_to_end:
            # Rank 0 does not have the error, or is on another machine. Once the ranks are connected,
            # an error that is not said to be of one rank is of all.
            is_near_rank0 = env_int("LOCAL_RANK", 0) == self.rank
            if is_near_rank0 or not _are_connected():
                is_reported_here = self._is_first_to_print()
            on_one_rank = is_near_rank0
        self._is_on_all_ranks = not on_one_rank
        is_repeated = self._is_repeated(self.reason)
        self._record_end(BAD_INPUT, on_one_rank=on_one_rank, data_step=error.data_step)
        if is_reported_here and not is_repeated:
            self.print(f"error: {self.reason}")
        if self.rank == 0 and not on_one_rank:
            release_ranks()  # the agent ends all ranks when one has ended: rank 0 prints first

    def fail(self, reason: str) -> None:
        """Records that the run has failed."""
        self.outcome = FAILED
        self.reason = reason
        self._record_end(FAILED, on_one_rank=True)

    def abort(self, outcome: str, reason: str) -> NoReturn:
        """Ends the process at once, from any thread; saves nothing."""
        self.outcome = outcome
        self.reason = reason

        def report() -> None:
            self._record_end(outcome, on_one_rank=True)
            if self.rank == 0:
                self.print(reason)

        end_process(self.exit_status, report)

    def peer_failed(self) -> bool:
        """Returns whether a rank has recorded an error of this launch."""
        if self.folder is None:
            return False
        content = _read_record(self.folder / "status.json")
        return content.get("status") in (FAILED, BAD_INPUT)

    def __enter__(self) -> RunStatus:
        # torchrun restarts its workers after bad input too. They end at once and print nothing.
        for attempt in range(self.restart):
            final = self._note(f"attempt_{attempt}.final")
            if final is not None and final.exists():
                sys.exit(EXIT_STATUS[BAD_INPUT])
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> bool:
        if isinstance(error, SystemExit | GeneratorExit):
            return False
        if error is not None:
            self.report(error)
        elif self.outcome:
            self._record_end(self.outcome, on_one_rank=False)
        return True

    def print(self, text: str) -> None:
        with suppress(OSError, ValueError):
            print(text, file=sys.stderr, flush=True)
        if self.folder is not None:
            line = f"{time.strftime('%Y-%m-%d %H:%M:%S')} {text.rstrip()}\n"
            # a name of a file may not be UTF-8
            encoded = line.encode(errors="backslashreplace")
            with suppress(OSError), open(self.folder / "log.txt", "ab") as log:
                log.write(encoded)

    def _is_repeated(self, reason: str) -> bool:
        """Records the reason, and finds out whether torchrun's attempt before ended for the same one."""
        before = self._note(f"attempt_{self.restart - 1}.bad_input")
        now = self._note(f"attempt_{self.restart}.bad_input")
        final = self._note(f"attempt_{self.restart}.final")
        if before is None or now is None or final is None:
            return False
        with suppress(OSError):
            if self._is_on_all_ranks:  # a rank alone may find a disk or a node that recovers
                final.touch()
            if self.rank == 0 or not now.exists():
                now.write_text(reason, encoding="utf-8")
            return before.read_text(encoding="utf-8") == reason
        return False

    def _is_first_to_print(self) -> bool:
        """Returns whether no other rank of this torchrun has printed the error of this attempt."""
        note = self._note(f"attempt_{self.restart}.printed")
        if note is None:
            return True
        try:
            note.touch(exist_ok=False)
        except FileExistsError:
            return False
        except OSError:
            pass
        return True

    def _note(self, name: str) -> Path | None:
        """Returns a file that all attempts of this node's torchrun see; None without torchrun."""
        error_file = os.environ.get("TORCHELASTIC_ERROR_FILE", "")
        if not error_file:
            return None
        return Path(error_file).parents[2] / name  # of attempt_<number>/<local rank>/error.json

    def _record_end(self, status: str, *, on_one_rank: bool, data_step: int | None = None) -> None:
        """Writes the end of the launch into both files, unless another rank was first.

        `on_one_rank`: the others may not know it, so this rank writes even if it is not rank 0.
        """
        if self.folder is not None and (on_one_rank or self.rank == 0):
            path = self.folder / "status.json"
            with self._exclusive():
                before = _read_record(path)
                if before.get("status") == RUNNING:
                    self._worlds = self._worlds or before.get("worlds", [])
                    more = {}
                    if data_step:
                        more["data_step"] = data_step
                    self._write(path, status, **more)
        self._write_outcome(status, on_one_rank=on_one_rank)

    @contextmanager
    def _exclusive(self) -> Iterator[None]:
        """Lets one rank at a time read and replace status.json.

        The lock is on log.txt, which is never replaced. A rank that hangs with the lock, or a file
        system without locks, must not keep another rank from its end: it goes on after a second.
        """
        assert self.folder is not None
        deadline = time.monotonic() + 1.0
        with ExitStack() as stack:
            with suppress(OSError):
                log = stack.enter_context(open(self.folder / "log.txt", "ab"))
                while not try_lock(log.fileno()) and time.monotonic() < deadline:
                    time.sleep(0.01)
            yield

    def _write_outcome(self, status: str, *, on_one_rank: bool = False) -> None:
        path = Path(os.environ.get("LAUNCH_OUTCOME", ""))
        if not path.name:  # no launcher reads it
            return
        # An end that all ranks know is written once per machine.
        if not on_one_rank and env_int("LOCAL_RANK", 0) != 0:
            return
        is_claimed = self.folder is not None
        before = _read_record(path)
        has_ended = before.get("attempt") == self.restart and before.get("status") != RUNNING
        # When nodes join, torchrun forms a new group without a restart: the end on record, of ranks that
        # had a run directory, is the old group's. (A rank that is stopped now belongs to either.)
        if before.get("claimed") and not is_claimed and status != RESUME_ME:
            has_ended = False
        if status == RUNNING or not has_ended:
            self._write(path, status, attempt=self.restart, claimed=is_claimed)

    def _write(self, path: Path, status: str, **more: int) -> None:
        content = {
            "status": status,
            "step": self._start_step if self._state is None else self._state.step,
            "reason": self.reason,
            "worlds": self._worlds,
        }
        text = json.dumps(content | more) + "\n"
        try:
            write_atomically(path, text)
        except OSError:  # a full disk: the old file's block still has room
            with suppress(OSError), open(path, "r+", encoding="utf-8") as file:
                file.write(text)
                file.truncate()


def end_process(status: int, report: Callable[[], object]) -> NoReturn:
    """Ends the process after `report()`, which may fail, or wait for a storage or a lock."""
    try:
        thread = threading.Thread(target=report, name="last report", daemon=True)
        thread.start()
        thread.join(REPORT_S)
    finally:
        os._exit(status)


def _are_connected() -> bool:
    """Returns whether the ranks have a process group; imports no torch."""
    distributed = sys.modules.get("torch.distributed")
    return distributed is not None and distributed.is_initialized()


def _read_record(path: Path) -> dict[str, Any]:
    """Returns a record of the launch; {} also if its storage fails, which ends no training."""
    try:
        return read_json(path)
    except OSError:
        return {}
