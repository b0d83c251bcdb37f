"""Launches of the program and its commands as forks of a process that has imported them.

A launch of two tiny steps costs two and a half seconds of a CPU, and the imports are nearly all of them. The
server is the one that ranks of tests are forks of (tests/distributed/launch.py). A fork has the environment,
folder, arguments, standard streams and signals of a launch by a user; nothing but imports ran before it.
"""

from __future__ import annotations

import io
import multiprocessing
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from multiprocessing.connection import wait
from multiprocessing.process import BaseProcess
from pathlib import Path

ROOT = Path(__file__).parent.parent
TIMEOUT_S = 240
TRAINING, COMMANDS = "main_training.py", "fms_fsdp/__main__.py"
multiprocessing.set_forkserver_preload(
    [
        "torch",
        "torch._dynamo",
        "torch.distributed.checkpoint",
        "torch.distributed.fsdp",
        "pytest",
        "main_training",
        "fms_fsdp.__main__",
        "fms_fsdp.train",
        "fms_fsdp.parallel.parallelize",
        "fms_fsdp.run.startup_log",
        "fms_fsdp.generate",
    ]
)


class Ended(subprocess.CompletedProcess[str]):
    """What a launch ended with. `statuses`: of its processes, without those that had to be killed."""

    statuses: list[int]


def launch(
    flags: Sequence[str],
    num_ranks: int = 0,
    *,
    program: str = TRAINING,
    cwd: Path = ROOT,
    stdin: str = "",
    backend: str = "",
    before: Callable[[], None] | None = None,
    timeout_s: float = TIMEOUT_S,
) -> Ended:
    """What `python main_training.py FLAGS` ends with, in this process's environment with one thread.

    `num_ranks`: so many processes meet as ranks of one machine, as under torchrun but without its agent; the
    result has the first exit status that is not 0, and all that they printed. `backend`: what torch.compile
    uses where the program names none; "aot_eager" traces and divides graphs as usual but generates no code.
    `before`: a function of a module that each process calls first.

    Raises: subprocess.TimeoutExpired after `timeout_s`.
    """
    with tempfile.TemporaryDirectory() as folder:
        streams = [Path(folder, name) for name in ("stdin", "stdout", "stderr")]
        for path in streams:
            path.write_text(stdin if path.name == "stdin" else "")
        forks = [
            _fork(program, flags, settings, cwd, streams, backend, before)
            for settings in _environments(num_ranks)
        ]
        for fork in forks:
            fork.start()
        statuses = _statuses(forks, timeout_s)
        stdout, stderr = (path.read_text() for path in streams[1:])
    if not statuses:
        raise subprocess.TimeoutExpired(list(flags), timeout_s, stdout, stderr)
    ended = Ended(list(flags), next(filter(None, statuses), 0), stdout, stderr)
    ended.statuses = statuses
    return ended


def command(*argv: str, cwd: Path = ROOT, stdin: str = "") -> subprocess.CompletedProcess[str]:
    """What `python -m fms_fsdp ARGV` ends with.

    Raises: subprocess.TimeoutExpired after 240 s.
    """
    return launch(argv, program=COMMANDS, cwd=cwd, stdin=stdin)


@contextmanager
def running(
    flags: Sequence[str], *, program: str = TRAINING, output: str | Path = os.devnull
) -> Iterator[BaseProcess]:
    """A launch that goes on while the test does: it has a pid for signals, `exitcode` and `join`. The end of
    the block kills it. `output`: the file that gets what it prints."""
    Path(output).touch()
    (settings,) = _environments(0)
    fork = _fork(program, flags, settings, ROOT, [os.devnull, output, output])
    fork.start()
    try:
        yield fork
    finally:
        fork.kill()
        fork.join()


def start_fork(
    program: str,
    flags: Sequence[str],
    settings: dict[str, str],
    cwd: Path,
    streams: Sequence[str],
    before: Callable[[], None] | None = None,
) -> BaseProcess:
    """Starts a launch or a command with these variables and files as its standard streams."""
    fork = _fork(program, flags, settings, cwd, streams, before=before)
    fork.start()
    return fork


def _fork(
    program: str,
    flags: Sequence[str],
    settings: dict[str, str],
    cwd: Path,
    streams: Sequence[str | Path],
    backend: str = "",
    before: Callable[[], None] | None = None,
) -> BaseProcess:
    paths = [str(path) for path in streams]
    given = (program, list(flags), settings, str(cwd), paths, backend, before)
    return multiprocessing.get_context("forkserver").Process(target=_main, args=given)


def _statuses(forks: Sequence[BaseProcess], timeout_s: float) -> list[int]:
    """Exit statuses in the order in which the processes end; ten seconds after one fails the others are
    killed. Empty if time runs out."""
    running = list(forks)
    statuses = list[int]()
    until = time.monotonic() + timeout_s
    while running and wait([fork.sentinel for fork in running], max(0, until - time.monotonic())):
        for fork in [fork for fork in running if fork.exitcode is not None]:
            running.remove(fork)
            statuses.append(fork.exitcode or 0)
            until = min(until, time.monotonic() + 10) if fork.exitcode else until
    for fork in running:
        fork.kill()
        fork.join()
    return [] if running and not any(statuses) else statuses


def _environments(num_ranks: int) -> list[dict[str, str]]:
    """Of each process; a single launch gets nothing that tells of ranks."""
    common = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}
    if not num_ranks:
        return [common]
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free.getsockname()[1])}
    size = {
        "WORLD_SIZE": str(num_ranks),
        "LOCAL_WORLD_SIZE": str(num_ranks),
        "TORCHELASTIC_RUN_ID": "tests",
    }
    places = [{"RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(num_ranks)]
    return [{**common, **address, **size, **place} for place in places]


def _main(
    program: str,
    flags: list[str],
    settings: dict[str, str],
    cwd: str,
    streams: list[str],
    backend: str,
    before: Callable[[], None] | None,
) -> None:
    """In the fork: becomes a launch of the program, and ends the process as main_training.py does."""
    import torch

    import main_training
    from fms_fsdp import __main__ as commands

    os.environ.clear()
    os.environ.update(settings)
    tell_coverage()
    os.chdir(cwd)
    sys.argv = [str(ROOT / program), *flags]
    _open_streams(*streams)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    torch.set_num_threads(1)
    if backend:
        torch.compile = partial(torch.compile, backend=backend)
    if before is not None:
        before()
    try:
        status = (main_training if program == TRAINING else commands).main(flags)
    except BaseException as error:  # noqa: BLE001 - a bug of a command ends as Python itself ends
        status = _status_of(error)
    sys.stdout.flush()
    os._exit(status)


def tell_coverage() -> None:
    """Names the test of this process to coverage, if that records: the server was of another test."""
    if "coverage" in sys.modules and (running := sys.modules["coverage"].Coverage.current()):
        running.switch_context(os.environ.get("PYTEST_CURRENT_TEST", "").partition(" ")[0])


def _status_of(error: BaseException) -> int:
    """The exit status of a process that ends with this error, whose traceback is printed."""
    if not isinstance(error, SystemExit):
        traceback.print_exception(error)
        return 1
    if isinstance(error.code, str):
        print(error.code, file=sys.stderr)
    return error.code if isinstance(error.code, int) else int(error.code is not None)


def _open_streams(*paths: str) -> None:
    """The standard streams of the process, from input to errors, are these files."""
    for number, path in enumerate(paths):
        file = os.open(path, os.O_WRONLY | os.O_APPEND if number else os.O_RDONLY)
        os.dup2(file, number)
        os.close(file)
    sys.stdin, sys.stdout, sys.stderr = (
        io.TextIOWrapper(open(number, mode, buffering=0, closefd=False), write_through=True)
        for number, mode in enumerate(("rb", "wb", "wb"))
    )
