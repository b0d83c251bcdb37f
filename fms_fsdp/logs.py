"""The log of a run: on the terminal, and in the files of a rank. Standard library only."""

from __future__ import annotations

import logging
import sys
from contextlib import suppress
from pathlib import Path

from fms_fsdp.console import Console, TimedLines

log = logging.getLogger("fms_fsdp")  # lines that are the same on every rank: rank 0 prints them
rank_log = logging.getLogger("fms_fsdp.rank")  # lines of one rank, which it prints itself


def set_up_log(rank: int, *, has_time: bool = True) -> None:
    """Makes rank 0 print lines, and the other ranks their own warnings, with their rank."""
    handler = Console(sys.stdout)
    prefix = "" if rank == 0 else f"[rank {rank}] "
    handler.setFormatter(TimedLines(prefix, has_time=has_time))
    handler.addFilter(lambda record: not hasattr(record, "for_files"))
    log.handlers[:] = [handler]
    log.propagate = False
    log.setLevel(logging.INFO if rank == 0 else logging.WARNING)
    if rank > 0:
        handler.addFilter(lambda record: record.name != log.name)


def log_to_file(path: Path) -> None:
    """Also appends this rank's lines to `path`, with the time."""
    # a name of a file may not be UTF-8
    handler = logging.FileHandler(path, encoding="utf-8", errors="backslashreplace")
    handler.handleError = lambda record: None  # type: ignore[method-assign]  # metrics.jsonl reports it
    handler.setFormatter(logging.Formatter("%(asctime)s %(message)s", "%Y-%m-%d %H:%M:%S"))
    log.addHandler(handler)
    log.setLevel(logging.INFO)


def close_log_files() -> None:
    """Closes the files of `log_to_file`."""
    for handler in [each for each in log.handlers if isinstance(each, logging.FileHandler)]:
        log.removeHandler(handler)
        with suppress(OSError):  # the disk may be full
            handler.close()


def log_for_files(text: str) -> None:
    """Appends a long text to log.txt, not to the terminal."""
    log.info(text, extra={"for_files": True})


def log_note(text: str) -> None:
    """Logs a line of advice, or that a flag has no effect: neither is an error."""
    log.info("note: %s", text)


def show_progress(text: str) -> None:
    """Rewrites the live line of a terminal; does nothing without one."""
    for handler in log.handlers:
        if isinstance(handler, Console):
            handler.show(text)
