"""torchrun's agent, and the ranks of one machine. Standard library only, needs no process group."""

from __future__ import annotations

import os
import re
import socket
import time
from pathlib import Path

RUN_ID = "TORCHELASTIC_RUN_ID"
_PRINTED_S = 5.0  # maximum wait of a rank until rank 0 has printed
_LATE_S = 1.0  # how long rank 0 waits for ranks that are not there yet
_POLL_S = 0.02


def agent_pid() -> int:
    """Returns the process id of the torchrun that started this process; 0 if there is none.

    A shell or a container may inherit torchrun's variables. The agent starts each worker as the
    leader of a new session, and gives only the worker the variable; the worker may be a script that
    starts this process.

    Raises:
        OSError: it cannot be found out now, such as with too many open files.
    """
    run_id = os.environ.get(RUN_ID)
    if run_id is None:
        return 0
    if not Path("/proc/self/environ").exists():  # not Linux: the parent is the best guess
        return os.getppid()
    worker = os.getsid(0)
    agent = 0
    try:
        if _run_id(worker) != run_id:
            return 0
        agent = _parent(worker)
        is_python = os.path.basename(os.readlink(f"/proc/{agent}/exe")).startswith("python")
        if is_python and _run_id(agent) != run_id:
            return agent
        return 0
    except PermissionError:  # an agent of another user: nothing else is known of it
        return agent
    except (FileNotFoundError, ProcessLookupError):
        return 0


def launch_pid() -> int:
    """Returns the process with which the launch began: torchrun's agent, which outlives ranks that it
    starts again, or else this process.

    Raises:
        OSError: as `agent_pid`.
    """
    return agent_pid() or os.getpid()


def _parent(pid: int) -> int:
    # The name of the program is in parentheses, and may contain spaces and parentheses.
    # The system cuts it after 15 bytes, maybe within a character.
    content = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    fields = content.rpartition(")")[2].split()
    return int(fields[1])


def _run_id(pid: int) -> str | None:
    """Returns torchrun's variable in the environment that a process was started with."""
    variables = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    for variable in variables:
        name, _, value = variable.partition(b"=")
        if name == RUN_ID.encode():
            return os.fsdecode(value)
    return None


def await_rank0() -> bool:
    """Waits until rank 0 has printed, at most 5 s: the launcher kills all ranks when one ends.

    Returns whether it has. Rank 0 of another machine cannot be heard, so ranks of other machines
    wait 5 s.
    """
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as own:
            own.bind(_address(int(os.environ["RANK"])))
            own.settimeout(_PRINTED_S)
            own.recv(1)
            return True
    except TimeoutError:
        pass
    except OSError:  # e.g. no abstract sockets on this system
        time.sleep(_PRINTED_S)
    return False


def release_ranks() -> None:
    """Lets the other ranks of this machine end: rank 0 has printed. Waits a second for late ones."""
    size = os.environ.get("LOCAL_WORLD_SIZE") or os.environ.get("WORLD_SIZE", "1")
    if not re.fullmatch("[0-9]{1,6}", size):
        return
    waiting = list(range(1, int(size)))
    deadline = time.monotonic() + _LATE_S
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as own:
        while waiting:
            waiting = [rank for rank in waiting if not _send(own, _address(rank))]
            if time.monotonic() > deadline:
                return
            time.sleep(_POLL_S if waiting else 0.0)


def _send(own: socket.socket, address: bytes) -> bool:
    try:
        own.sendto(b".", address)
    except OSError:  # the rank does not listen yet
        return False
    return True


def _address(rank: int) -> bytes:
    """Returns the name of a rank's socket, which is no file: it begins with a null byte."""
    names = ("MASTER_ADDR", "MASTER_PORT", RUN_ID, "TORCHELASTIC_RESTART_COUNT")
    launch = ":".join(os.environ.get(name, "") for name in names)
    return f"\0fms_fsdp:{rank}:{os.getuid()}:{launch}".encode()[:108]  # the limit of the system
