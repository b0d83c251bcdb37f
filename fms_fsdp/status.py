"""How a launch ends: `status.json` in the run folder, the exit status, and what is printed for bad input.

`with Launch() as launch:` around everything turns the outcome into all three. Standard library only: a mistyped flag is answered before torch
is imported. Under torchrun, which hides its workers' exit statuses and restarts those that fail, an early stop ends with 0, and bad input is
printed once: by rank 0, and by a restarted attempt only if it is news.
"""

from __future__ import annotations

import json
import os
import sys
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType

RUNNING, FINISHED, RESUME_ME, BAD_INPUT, FAILED = "running", "finished", "resume_me", "bad_input", "failed"
EXIT_STATUS = {FINISHED: 0, FAILED: 1, BAD_INPUT: 2, RESUME_ME: 75}


class BadInput(Exception):
    """What the user gave cannot be used; the text is one line: name (value) rule; remedy.

    `on_one_rank`: only this rank met it (a shard that cannot be read), so this rank must speak.
    """

    def __init__(self, text: str, *, on_one_rank: bool = False) -> None:
        super().__init__(" ".join(text.split()))
        self.on_one_rank = on_one_rank


class RunFailed(Exception):
    """The run cannot go on for a reason that is no fault of the code: told in one line, exit status 1."""


@contextmanager
def checking_input() -> Iterator[None]:
    """Inside, an error about values, files or permissions is the user's to mend: it becomes BadInput, its text one line."""
    try:
        yield
    except (ValueError, OSError) as error:
        raise BadInput(str(error)) from error


def write_atomically(path: Path, text: str) -> None:
    """Replaces the file in one step: a reader sees the old text or the new, never a part."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    temporary.write_text(text)
    os.replace(temporary, path)


class Launch:
    """One launch of one rank: what it reached and how it ended.

    Set `folder` once the run folder is known, `step` as steps are done, `outcome` to FINISHED or RESUME_ME; exceptions give the others.
    """

    def __init__(self) -> None:
        self.rank = int(os.environ.get("RANK", "0"))
        self.restart = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))
        self.folder: Path | None = None
        self.step = 0
        self.outcome = FAILED
        self.reason = ""

    @property
    def exit_status(self) -> int:
        """0 finished, 1 failed, 2 bad input, 75 stopped early (0 under torchrun, which would call it a failure)."""
        if self.outcome == RESUME_ME and "TORCHELASTIC_RUN_ID" in os.environ:
            return 0
        return EXIT_STATUS[self.outcome]

    def write(self, status: str) -> None:
        """Writes status.json, on rank 0 or where a rank failed alone; a folder that cannot be written is no second error."""
        if self.folder is None:
            return
        content = {"status": status, "step": self.step, "reason": self.reason}
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            write_atomically(self.folder / "status.json", json.dumps(content) + "\n")
        except OSError as error:
            print(f"status.json cannot be written: {error}", file=sys.stderr)

    def fail(self, reason: str) -> None:
        """Enters a failure of this rank."""
        self.outcome, self.reason = FAILED, reason
        self.write(FAILED)

    def _last(self) -> dict[str, object]:
        try:
            content = json.loads((self.folder / "status.json").read_text()) if self.folder else {}
        except (OSError, ValueError):
            content = {}
        return content if isinstance(content, dict) else {}

    def __enter__(self) -> Launch:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool:
        if isinstance(error, SystemExit | GeneratorExit):
            return False
        if isinstance(error, BadInput):
            self._end_as_bad_input(str(error), speaks=self.rank == 0 or error.on_one_rank)
        elif isinstance(error, RunFailed):
            if self.rank == 0:
                print(f"failed: {error}", file=sys.stderr)
            self.fail(str(error))
        elif error is not None:
            self.outcome, self.reason = FAILED, f"{type(error).__name__}: {error}".splitlines()[0]
            print(f"[rank {self.rank}] " + "".join(traceback.format_exception(error)), file=sys.stderr)
            self.write(FAILED)
        elif self.rank == 0:
            self.write(self.outcome)
        sys.stdout.flush()
        sys.stderr.flush()
        return True

    def _end_as_bad_input(self, reason: str, *, speaks: bool) -> None:
        """All ranks find the same mistake at once: rank 0 speaks, the others give it the time to (torchrun kills all when one exits)."""
        last = self._last()
        told = self.restart > 0 and (
            self.folder is None or (last.get("status"), last.get("reason")) == (BAD_INPUT, reason)
        )
        self.outcome, self.reason = BAD_INPUT, reason
        if speaks:
            if not told:
                print(f"error: {reason}", file=sys.stderr, flush=True)
            self.step = self.step or int(str(last.get("step", 0)))
            self.write(BAD_INPUT)
        else:
            time.sleep(5)
