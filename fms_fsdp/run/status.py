"""How a launch ends: `status.json` in the run folder, the exit status, and what is printed for bad input.

`with Launch() as launch:` around everything turns the outcome into all three. Standard library only: a
mistyped flag is answered before torch is imported. Under torchrun, which hides its workers' exit statuses and
restarts those that fail, an early stop ends with 0, and bad input is printed once: by rank 0, and by a
restarted attempt only if its text is another.

`worlds` of status.json lists the steps from which on the run had another number of ranks, with that number.

A launch writes into the run folder only after `claim`: until then the folder may be another's. What a script
must know of any launch is written to the file that the environment variable LAUNCH_OUTCOME names.
"""

from __future__ import annotations

import json
import os
import sys
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any, NoReturn

from fms_fsdp.atomic import read_json, write_atomically
from fms_fsdp.cpu_tuning import positive_number
from fms_fsdp.errors import RunFailed, UserError

RUNNING, FINISHED, RESUME_ME, BAD_INPUT, FAILED = "running", "finished", "resume_me", "bad_input", "failed"
EXIT_STATUS = {FINISHED: 0, FAILED: 1, BAD_INPUT: 2, RESUME_ME: 75}


class Launch:
    """One launch of one rank: what it reached and how it ended.

    Set `steps_done` once the loop counts them; call `end` with FINISHED or RESUME_ME. Exceptions give the
    others.
    """

    def __init__(self) -> None:
        # torchrun sets these; what is no number is refused later with the other input
        self.rank = positive_number("RANK", 0)
        self.restart = positive_number("TORCHELASTIC_RESTART_COUNT", 0)
        self.speaks_for_node = positive_number("LOCAL_RANK", 0) == 0
        self.folder: Path | None = None  # once it is claimed
        self._worlds: list[list[int]] = []
        self.steps_done: Callable[[], int] = lambda: 0
        self.outcome = ""  # until it ends
        self.reason = ""
        self._told: BaseException | None = None
        self._is_found_by_all = False  # bad input

    @property
    def exit_status(self) -> int:
        """0 finished, 1 failed, 2 bad input, 75 stopped early. Under torchrun, which would start it again, 0
        for an early stop and, where a script reads the outcome, for bad input that all ranks have found."""
        is_told = "LAUNCH_OUTCOME" in os.environ and self._is_found_by_all
        if (self.outcome == RESUME_ME or is_told) and "TORCHELASTIC_RUN_ID" in os.environ:
            return 0
        return EXIT_STATUS[self.outcome or FAILED]

    def claim(self, folder: Path) -> None:
        """From here on the run folder is this launch's: its lock is held. Rank 0 calls it first, then the
        others."""
        self.folder = folder
        if self.rank == 0:
            before, size = read_json(folder / "status.json").get("worlds"), positive_number("WORLD_SIZE", 1)
            self._worlds = before if isinstance(before, list) else []
            if not self._worlds or self._worlds[-1][-1:] != [size]:
                self._worlds.append([self.steps_done(), size])
            self._write(folder / "status.json", self._content(RUNNING))
            if job := os.environ.get("SLURM_ARRAY_JOB_ID") or os.environ.get("SLURM_JOB_ID"):
                with suppress(OSError):
                    write_atomically(folder / "slurm_job", f"{job}\n")  # for the scripts
        if self.speaks_for_node:
            self._write_outcome(RUNNING)

    def has_failed(self) -> bool:
        """Whether some rank of this launch has recorded a failure."""
        content = read_json(self.folder / "status.json") if self.folder is not None else {}
        return content.get("status") in (FAILED, BAD_INPUT)

    def tell(self, error: BaseException | None) -> None:
        """Records and prints the error that ends this rank, once, before anything is closed: so no error of a
        peer comes first."""
        if error is None or error is self._told or isinstance(error, SystemExit | GeneratorExit):
            return
        if self._told is not None:  # what failed while things were closed; the first reason stays
            self._print(f"[rank {self.rank}] then {type(error).__name__}: {error}")
            return
        self._told = error
        self.reason = " ".join(str(error).split())
        if isinstance(error, UserError):
            self.outcome = BAD_INPUT
            self._tell_bad_input(error)
        elif isinstance(error, RunFailed):
            self.fail(self.reason)
            if self.rank == 0 or error.on_one_rank:
                rank = f"[rank {self.rank}] " if error.on_one_rank else ""
                self._print(f"{rank}failed: {error}")
        else:
            self.fail(f"{type(error).__name__}: {error}".splitlines()[0])
            self._print(f"[rank {self.rank}] " + "".join(traceback.format_exception(error)))

    def end(self, outcome: str, reason: str) -> None:
        """Sets how the launch ends."""
        self.outcome, self.reason = outcome, reason

    def fail(self, reason: str) -> None:
        """Records a failure of this rank."""
        self.outcome, self.reason = FAILED, reason
        self._enter(FAILED, alone=True)

    def leave(self, outcome: str, reason: str) -> NoReturn:
        """Ends the process at once, from any thread; nothing is closed or saved."""
        self.outcome, self.reason = outcome, reason
        self._enter(outcome, alone=True)
        if self.rank == 0:
            self._print(reason)
        with suppress(OSError, ValueError):
            sys.stdout.flush()
        os._exit(self.exit_status)

    def __enter__(self) -> Launch:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool:
        if isinstance(error, SystemExit | GeneratorExit):
            return False
        if error is not None:
            self.tell(error)
        elif self.outcome:
            self._enter(self.outcome, alone=False)
        for stream, descriptor in ((sys.stdout, 1), (sys.stderr, 2)):
            try:
                stream.flush()
            except (OSError, ValueError):  # a terminal that is gone is no failure of the run
                os.dup2(os.open(os.devnull, os.O_WRONLY), descriptor)
        return True

    def _tell_bad_input(self, error: UserError) -> None:
        """Rank 0 prints a mistake that all ranks find at once; the others wait for that, because torchrun
        kills all when one exits."""
        known, self._is_found_by_all = self._told_before(self.reason), not error.on_one_rank
        self._enter(BAD_INPUT, alone=error.on_one_rank, data_step=error.data_step)
        if self.rank == 0 or error.on_one_rank:
            if not known:
                self._print(f"error: {self.reason}")
        else:
            time.sleep(5)

    def _told_before(self, reason: str) -> bool:
        """Whether the attempt before this one, of the same torchrun, ended for the same reason; notes it for
        the next."""
        file = os.environ.get("TORCHELASTIC_ERROR_FILE", "")
        if not file:
            return False
        attempts = Path(file).parents[2]
        names = [attempts / f"attempt_{attempt}.bad_input" for attempt in (self.restart - 1, self.restart)]
        with suppress(OSError):
            if self.rank == 0 or not names[1].exists():
                names[1].write_text(reason)
            return names[0].read_text() == reason
        return False

    def _enter(self, status: str, *, alone: bool, data_step: int | None = None) -> None:
        """Writes status.json and the outcome file; `alone`: this rank writes for itself, not rank 0 for all.
        The first end stays."""
        content = self._content(status) | ({} if data_step is None else {"data_step": data_step})
        if self.folder is not None and (alone or self.rank == 0):
            path = self.folder / "status.json"
            if (before := read_json(path)).get("status") == RUNNING:
                self._write(path, content | {"worlds": before.get("worlds", [])})
        if alone or self.speaks_for_node:
            self._write_outcome(status)

    def _write_outcome(self, status: str) -> None:
        name = os.environ.get("LAUNCH_OUTCOME", "")
        before = read_json(Path(name)) if name else {}
        is_over = before.get("attempt") == self.restart and before.get("status") != RUNNING
        if name and (status == RUNNING or not is_over):
            claimed = self.folder is not None
            self._write(Path(name), self._content(status) | {"attempt": self.restart, "claimed": claimed})

    def _content(self, status: str) -> dict[str, Any]:
        place = {"status": status, "step": self.steps_done(), "reason": self.reason}
        return place | ({"worlds": self._worlds} if self._worlds else {})

    def _write(self, path: Path, content: dict[str, Any]) -> None:
        """Writes the file, if it can be written; on a full disk the block of the old file still has room."""
        text = json.dumps(content) + "\n"
        try:
            write_atomically(path, text)
        except OSError as error:
            try:
                with open(path, "r+") as file:
                    file.write(text)
                    file.truncate()
            except OSError:
                self._print(f"{path.name} cannot be written: {error}")

    def _print(self, text: str) -> None:
        """Prints to stderr and, in a run folder that is this launch's, to log.txt: there a bug is found when
        the terminal is gone."""
        with suppress(OSError, ValueError):
            print(text, file=sys.stderr, flush=True)
        if self.folder is not None:
            with suppress(OSError), open(self.folder / "log.txt", "a", encoding="utf-8") as log:
                log.write(f"{time.strftime('%Y-%m-%d %H:%M:%S')} {text.rstrip()}\n")
