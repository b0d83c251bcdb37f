"""Programs for the PATH of a shell whose starts of this project are forks of a process that has imported it.

A block of commands starts the program a dozen times, and each start imports torch for seconds. `warm_programs`
writes a `python` and a `fms-fsdp` into a folder. They take the same words, streams, folder and variables as the
real ones, and end with the same exit status. Any other script or module runs in the real Python.
"""

from __future__ import annotations

import json
import shlex
import socket
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

from tests.warm import COMMANDS, TRAINING, start_fork

# Without site and the variables of Python it starts in a hundredth of the time that torch takes.
CLIENT = """#!{python} -IS
import json, os, socket, sys
words = sys.argv[1:]
if {is_command}:
    words = ["-m", "fms_fsdp", *words]
if words[:1] == ["main_training.py"]:
    program, flags = {training!r}, words[1:]
elif words[:2] == ["-m", "fms_fsdp"]:
    program, flags = {commands!r}, words[2:]
else:
    os.execv({real!r}, [{real!r}, *words])
asked = dict(program=program, flags=flags, cwd=os.getcwd(), pid=os.getpid(), environment=dict(os.environ))
with socket.socket(socket.AF_UNIX) as server:
    server.connect({address!r})
    server.sendall(json.dumps(asked).encode() + b"\\n")
    answer = server.makefile().readline()
sys.exit(int(answer))
"""


@contextmanager
def warm_programs(folder: Path, real: Path) -> Iterator[None]:
    """Writes the programs into the folder, and answers them until the block ends; `real`: another Python.

    A start is a fork of the server of tests/warm.py, so it imports this project from the checkout of the tests,
    not from the folder of the shell.
    """
    folder.mkdir()
    address = str(folder / "server")
    for name in ("python", "fms-fsdp"):
        text = CLIENT.format(
            python=sys.executable,
            is_command=name == "fms-fsdp",
            training=TRAINING,
            commands=COMMANDS,
            real=str(real),
            address=address,
        )
        (folder / name).write_text(text)
        (folder / name).chmod(0o755)
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(address)
        server.listen()
        threading.Thread(target=_accept, args=(server,), daemon=True).start()
        yield
        # `close` alone does not wake the thread that waits for a client
        server.shutdown(socket.SHUT_RDWR)


def _accept(server: socket.socket) -> None:
    while True:
        try:
            client, _ = server.accept()
        except OSError:  # the server is closed
            return
        threading.Thread(target=_answer, args=(client,), daemon=True).start()


def _answer(client: socket.socket) -> None:
    """Runs a fork with the streams of the client, and sends its exit status."""
    with client:
        asked: dict[str, Any] = json.loads(client.makefile().readline())
        streams = [f"/proc/{asked['pid']}/fd/{number}" for number in range(3)]
        fork = start_fork(
            asked["program"],
            asked["flags"],
            asked["environment"],
            Path(asked["cwd"]),
            streams,
            before=partial(look_in, asked["cwd"]),
        )
        fork.join()
        client.sendall(f"{fork.exitcode}\n".encode())


def look_in(folder: str) -> None:
    """In a fork: looks for modules in this folder first, as Python does in the folder of its script."""
    sys.path.insert(0, folder)


def on_path(folder: Path) -> str:
    """Returns the line of shell that puts the programs first."""
    return f"PATH={shlex.quote(str(folder))}:$PATH"
