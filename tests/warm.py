"""Launches of the program as forks of a process that has imported it.

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
from collections.abc import Sequence
from multiprocessing.connection import wait
from pathlib import Path

ROOT = Path(__file__).parent.parent
TIMEOUT_S = 240
multiprocessing.set_forkserver_preload(
    [
        "torch",
        "torch._dynamo",
        "torch.distributed.checkpoint",
        "torch.distributed.fsdp",
        "pytest",
        "main_training",
    ]
)


def launch(flags: Sequence[str], num_ranks: int = 0) -> subprocess.CompletedProcess[str]:
    """What `python main_training.py FLAGS` ends with, in this process's environment with one thread.

    `num_ranks`: so many processes meet as ranks of one machine, as under torchrun but without its agent; the
    result has the first exit status that is not 0, and all that they printed.

    Raises: subprocess.TimeoutExpired after 240 s.
    """
    context = multiprocessing.get_context("forkserver")
    with tempfile.TemporaryDirectory() as folder:
        streams = [Path(folder, name) for name in ("stdout", "stderr")]
        forks = [
            context.Process(target=_main, args=(list(flags), settings, *map(str, streams)))
            for settings in _environments(num_ranks)
        ]
        for fork in forks:
            fork.start()
        statuses = _statuses(forks)
        stdout, stderr = (path.read_text() if path.exists() else "" for path in streams)
    if not statuses:
        raise subprocess.TimeoutExpired(list(flags), TIMEOUT_S, stdout, stderr)
    return subprocess.CompletedProcess(list(flags), next(filter(None, statuses), 0), stdout, stderr)


def _statuses(forks: Sequence[multiprocessing.process.BaseProcess]) -> list[int]:
    """Exit statuses in the order in which the processes end; ten seconds after one fails the others are
    killed. Empty if time runs out."""
    running, statuses, until = list(forks), list[int](), time.monotonic() + TIMEOUT_S
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
    size = {"WORLD_SIZE": str(num_ranks), "LOCAL_WORLD_SIZE": str(num_ranks), "TORCHELASTIC_RUN_ID": "tests"}
    places = [{"RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(num_ranks)]
    return [{**common, **address, **size, **place} for place in places]


def _main(flags: list[str], settings: dict[str, str], stdout: str, stderr: str) -> None:
    """In the fork: becomes a launch of the program, and ends the process as main_training.py does."""
    import torch

    import main_training

    os.environ.clear()
    os.environ.update(settings)
    os.chdir(ROOT)
    sys.argv = ["main_training.py", *flags]
    _open_streams(stdout, stderr)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    torch.set_num_threads(1)
    status = main_training.main(flags)
    sys.stdout.flush()
    os._exit(status)


def _open_streams(stdout: str, stderr: str) -> None:
    """The standard streams of the process are these files, and no input."""
    for number, path in enumerate((os.devnull, stdout, stderr)):
        file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o600)
        os.dup2(file, number)
        os.close(file)
    sys.stdin, sys.stdout, sys.stderr = (
        io.TextIOWrapper(open(number, mode, buffering=0, closefd=False), write_through=True)
        for number, mode in enumerate(("rb", "wb", "wb"))
    )
