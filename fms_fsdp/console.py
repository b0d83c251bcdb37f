"""Output: the lines of rank 0 with a live line on a terminal, and the tables and progress of commands."""

from __future__ import annotations

import errno
import io
import logging
import os
import re
import sys
import textwrap
import time
from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import NoReturn, TextIO

from fms_fsdp.process import env_rank

# how the user called the commands; empty where main_training.py or another script runs
_CALLED = os.path.basename(sys.argv[0].replace("/__main__.py", ""))
PROGRAM = {"fms-fsdp": "fms-fsdp", "fms_fsdp": "python -m fms_fsdp"}.get(_CALLED, "")
LINE_WIDTH = 110  # characters of a line, with its time
_TIME_FORMAT = "%H:%M:%S"
TIME_WIDTH = 9  # characters of the time and the space behind it
_LOSSES = re.compile(r"(?<=\bloss )[0-9.]+")
_COLORS = {logging.WARNING: "33", logging.ERROR: "31", logging.CRITICAL: "31"}


def set_up_streams() -> None:
    """Opens /dev/null in place of a closed stdout or stderr (`>&-`), which Python makes None.

    stdout also prints a character that the locale's encoding lacks as an escape, as stderr does.
    Call it before anything else opens a file, which would get the free descriptor.
    """
    if sys.stdout is None:
        sys.stdout = open(os.devnull, "w", encoding="utf-8")
    if sys.stderr is None:
        sys.stderr = open(os.devnull, "w", encoding="utf-8")
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")


class TimedLines(logging.Formatter):
    """Puts the time before a message, and indents its other lines below it.

    `prefix` names the rank. Without `has_time` the message stays as it is.
    """

    def __init__(self, prefix: str = "", *, has_time: bool = True) -> None:
        time_field = "%(asctime)s " if has_time else ""
        super().__init__(f"{time_field}{prefix}%(message)s", _TIME_FORMAT)
        self._indent = " " * (TIME_WIDTH * has_time)

    def format(self, record: logging.LogRecord) -> str:
        return super().format(record).replace("\n", f"\n{self._indent}")


class Console(logging.StreamHandler[TextIO]):
    """Writes lines to `stream`. If that is a terminal, also colours, and a line that `show` rewrites.

    LAUNCH_TERMINAL names the terminal behind a pipe (scripts/train.sh sets it). Then the live line
    goes straight to it. NO_COLOR turns the colours off (https://no-color.org).
    """

    def __init__(self, stream: TextIO) -> None:
        super().__init__(stream)
        self._terminal = stream.fileno() if stream.isatty() else _terminal_behind()
        self._has_colors = self._terminal is not None and not os.environ.get("NO_COLOR")
        self._wrote_at = 0.0
        self._is_shown = False

    def show(self, text: str) -> None:
        """Rewrites the live line, a quarter of a second after the last line at the earliest."""
        now = time.monotonic()
        if now - self._wrote_at < 0.25:
            return
        self.acquire()  # a save in the background may write a line
        try:
            self._rewrite(text)
            self._wrote_at = now
            self._is_shown = True
        finally:  # Ctrl-C may interrupt this
            self.release()

    def emit(self, record: logging.LogRecord) -> None:
        if self._is_shown:
            self._rewrite("")
            self._is_shown = False
        super().emit(record)
        self._wrote_at = time.monotonic()

    def handleError(self, record: logging.LogRecord) -> None:
        # The reader of a pipe has ended (`| tee`, which Ctrl-C stops too), or the disk of a redirection
        # is full: logging would print a traceback for each line. log.txt has the lines.
        if not isinstance(sys.exc_info()[1], OSError):
            super().handleError(record)

    def format(self, record: logging.LogRecord) -> str:
        text = super().format(record)
        if not self._has_colors:
            return text
        if color := _COLORS.get(record.levelno):
            return f"\x1b[{color}m{text}\x1b[0m"
        return _LOSSES.sub("\x1b[1;36m\\g<0>\x1b[0m", text)

    def _rewrite(self, text: str) -> None:
        if self._terminal is None:
            return
        try:
            columns = os.get_terminal_size(self._terminal).columns or 80
            os.write(self._terminal, f"\r\x1b[K{text[: columns - 1]}".encode())
        except OSError:
            self._terminal = None  # it was closed; the run continues


def _terminal_behind() -> int | None:
    """Opens the terminal that LAUNCH_TERMINAL names; returns None without such a terminal."""
    try:
        # the terminal must not become the one that controls this process
        number = os.open(os.environ.get("LAUNCH_TERMINAL", ""), os.O_WRONLY | os.O_NOCTTY)
    except OSError:
        return None
    return number if os.isatty(number) else None


def table(
    head: Sequence[str], rows: Iterable[Sequence[str]], text_columns: Collection[int] = (0,)
) -> str:
    """Returns the head and the rows in aligned columns: `text_columns` left, all others right."""
    columns = list[list[str]]()
    for number, column in enumerate(zip(*[head, *rows], strict=True)):
        pad = str.ljust if number in text_columns else str.rjust
        width = max(map(len, column))
        columns.append([pad(cell, width) for cell in column])
    return "\n".join("  ".join(cells).rstrip() for cells in zip(*columns, strict=True))


def fit(text: str) -> str:
    """Wraps a text that is longer than a line of the log, and indents its other lines.

    A number stays on the line of its name and its unit.
    """
    wrapped = textwrap.fill(
        re.sub(r"(?<=\d) (?=[a-zA-Z])|(?<=[a-z]) (?=\d)", "\0", text),
        LINE_WIDTH - TIME_WIDTH,
        subsequent_indent="  ",
        break_long_words=False,
        break_on_hyphens=False,
    )
    return wrapped.replace("\0", " ")


def cut(text: str, width: int) -> str:
    """Shortens a text such as a path to its last `width` characters."""
    return text if len(text) <= width else f"…{text[1 - width :]}"


def rewrite_line(text: str) -> None:
    """Rewrites the last line of a command's terminal, if stderr is a terminal."""
    if sys.stderr.isatty():
        print(f"\r\x1b[K{text}", end="", file=sys.stderr, flush=True)


@contextmanager
def printing() -> Iterator[None]:
    """Lets a program that reads the output, such as `head`, stop early without an error here."""
    try:
        yield
        sys.stdout.flush()
    except BrokenPipeError as error:
        # Python uses this class for ESHUTDOWN as well, which a storage may answer for a file.
        if error.errno != errno.EPIPE or error.filename is not None:
            raise
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def print_and_end(text: str) -> NoReturn:
    """Prints `text` on rank 0 and ends the process with exit code 0, for flags such as --help."""
    if env_rank() == 0:
        with printing():
            print(text)
    raise SystemExit(0)
