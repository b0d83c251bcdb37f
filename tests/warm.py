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
import subprocess
import sys
import tempfile
from collections.abc import Sequence
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


def launch(flags: Sequence[str]) -> subprocess.CompletedProcess[str]:
    """What `python main_training.py FLAGS` ends with, in this process's environment with one thread.

    Raises: subprocess.TimeoutExpired after 240 s.
    """
    settings = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}
    with tempfile.TemporaryDirectory() as folder:
        streams = [Path(folder, name) for name in ("stdout", "stderr")]
        for path in streams:
            path.touch()  # also for a fork that ends before it opens them
        fork = multiprocessing.get_context("forkserver").Process(
            target=_main, args=(list(flags), settings, *map(str, streams))
        )
        fork.start()
        fork.join(TIMEOUT_S)
        if fork.is_alive():
            fork.kill()
            fork.join()
            raise subprocess.TimeoutExpired(list(flags), TIMEOUT_S, *(path.read_bytes() for path in streams))
        stdout, stderr = (path.read_text() for path in streams)
    assert fork.exitcode is not None
    return subprocess.CompletedProcess(list(flags), fork.exitcode, stdout, stderr)


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
        file = os.open(path, os.O_RDWR | os.O_APPEND)
        os.dup2(file, number)
        os.close(file)
    sys.stdin, sys.stdout, sys.stderr = (
        io.TextIOWrapper(open(number, mode, buffering=0, closefd=False), write_through=True)
        for number, mode in enumerate(("rb", "wb", "wb"))
    )
