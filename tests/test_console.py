"""The lines of rank 0: what a terminal shows, and what a pipe or a file gets."""

from __future__ import annotations

import io
import logging
import os
import re
import select
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from typing import NoReturn

import pytest

from fms_fsdp.console import LINE_WIDTH, TIME_WIDTH, Console, TimedLines, cut, fit
from fms_fsdp.logs import log, show_progress

ERASE = "\r\x1b[K"


class Terminal:
    """A pseudo-terminal of 60 columns: `name` is its device, `shown` what was written to it."""

    def __init__(self) -> None:
        self._master, self._slave = os.openpty()
        os.system(f"stty -F {os.ttyname(self._slave)} columns 60 -opost")
        self.name = os.ttyname(self._slave)
        self.stream = os.fdopen(self._slave, "w", closefd=False)

    def shown(self) -> str:
        self.stream.flush()
        shown = b""  # what was written comes in parts, and later where the machine is busy
        ready = select.poll()
        ready.register(self._master, select.POLLIN)
        while ready.poll(300):
            shown += os.read(self._master, 65536)
        return shown.decode()

    def close(self) -> None:
        self.stream.close()
        os.close(self._slave)
        os.close(self._master)


@pytest.fixture
def terminal() -> Iterator[Terminal]:
    made = Terminal()
    yield made
    made.close()


def line(text: str, level: int = logging.INFO) -> logging.LogRecord:
    return logging.LogRecord("name", level, "", 0, text, None, None)


def test_the_live_line_stands_below_the_lines_of_a_terminal(terminal: Terminal) -> None:
    console = Console(terminal.stream)
    console.show("step 1/9")
    console.show("step 2/9")  # too soon after the other
    console.emit(line("a line"))
    console.show("step 3/9")  # too soon after the line
    console.emit(line("another"))
    assert terminal.shown() == f"{ERASE}step 1/9{ERASE}a line\nanother\n"
    time.sleep(0.3)
    console.show("step 4/9 " + "x" * 99)
    assert terminal.shown() == ERASE + "step 4/9 " + "x" * 50


def test_only_a_terminal_gets_colours(terminal: Terminal, monkeypatch: pytest.MonkeyPatch) -> None:
    console = Console(terminal.stream)
    console.emit(line("step 20/900  loss 4.5000  norm 1.0"))
    console.emit(line("careful", logging.WARNING))
    bold = "\x1b[1;36m{}\x1b[0m".format
    assert terminal.shown() == (
        f"step 20/900  loss {bold('4.5000')}  norm 1.0\n\x1b[33mcareful\x1b[0m\n"
    )
    monkeypatch.setenv("NO_COLOR", "1")
    Console(terminal.stream).emit(line("loss 4.5000"))
    assert terminal.shown() == "loss 4.5000\n"
    pipe = io.StringIO()
    plain = Console(pipe)
    plain.show("step 1/9")
    plain.emit(line("loss 4.5000"))
    assert pipe.getvalue() == "loss 4.5000\n"


def test_the_live_line_reaches_the_terminal_behind_a_pipe(
    terminal: Terminal, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LAUNCH_TERMINAL", terminal.name)
    pipe = io.StringIO()
    monkeypatch.setattr(log, "handlers", [logging.NullHandler(), Console(pipe)])
    show_progress("step 3/9")
    assert terminal.shown() == f"{ERASE}step 3/9"
    log.handlers[1].emit(line("a line"))
    assert terminal.shown() == ERASE and pipe.getvalue() == "a line\n"


def test_a_terminal_that_is_gone_ends_no_run(monkeypatch: pytest.MonkeyPatch) -> None:
    gone = Terminal()
    monkeypatch.setenv("LAUNCH_TERMINAL", gone.name)
    pipe = io.StringIO()
    console = Console(pipe)
    gone.close()
    console.show("step 1/9")
    time.sleep(0.3)
    console.show("step 2/9")
    console.emit(line("a line"))
    assert pipe.getvalue() == "a line\n"
    monkeypatch.setenv("LAUNCH_TERMINAL", "/dev/null")
    Console(pipe).show("step 3/9")  # no terminal
    assert pipe.getvalue() == "a line\n"


def test_interrupted_live_line_blocks_no_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-C left the lock of the log with the main thread."""
    console = Console(io.StringIO())

    def interrupted(text: str) -> NoReturn:
        raise KeyboardInterrupt

    monkeypatch.setattr(console, "_rewrite", interrupted)
    with pytest.raises(KeyboardInterrupt):
        console.show("step 1/9")
    other = threading.Thread(target=console.acquire, daemon=True)
    other.start()
    other.join(10)
    assert not other.is_alive()


def test_time_is_before_a_message_once() -> None:
    pipe = io.StringIO()
    console = Console(pipe)
    console.setFormatter(TimedLines("[rank 1] "))
    console.emit(line("model: tiny\ndevices: 1 CPU rank"))
    assert re.fullmatch(
        r"\d\d:\d\d:\d\d \[rank 1\] model: tiny\n {9}devices: 1 CPU rank\n", pipe.getvalue()
    )
    console.setFormatter(TimedLines(has_time=False))
    console.emit(line("model: tiny\ndevices: 1 CPU rank"))
    assert pipe.getvalue().endswith("\nmodel: tiny\ndevices: 1 CPU rank\n")


def test_long_facts_are_wrapped_between_words() -> None:
    text = "memory estimate: " + ", ".join(f"part {number}.2 GiB" for number in range(20))
    lines = fit(text).splitlines()
    assert len(lines) > 2 and all(len(each) <= LINE_WIDTH - TIME_WIDTH for each in lines)
    assert all(each.startswith("  part") for each in lines[1:])
    assert " ".join(each.strip() for each in lines) == text
    assert cut("a/long/path/of/a/source", 10) == "…/a/source" and cut("short", 10) == "short"


def test_closed_pipe_prints_no_tracebacks(capsys: pytest.CaptureFixture[str]) -> None:
    """As `main_training.py | tee`, whose tee ends with Ctrl-C while the run saves."""
    reading, writing = os.pipe()
    os.close(reading)
    stream = os.fdopen(writing, "w", buffering=1)
    Console(stream).emit(line("saved step_30"))
    assert capsys.readouterr().err == ""
    with suppress(BrokenPipeError):  # of the line, which is still in its buffer
        stream.close()
