"""Starts the training of this node and waits for its end: `fms-fsdp train`.

One process runs main_training.py as a child. Several ranks, restarts and several nodes go through
torchrun. Variables of the environment describe the machines:

    NPROC_PER_NODE  ranks on this node (default: one per GPU; one process without GPUs)
    NNODES          number of nodes, or MIN:MAX for as many as there are (default: SLURM's, or 1)
    NODE_RANK       number of this node, from 0; node 0 hosts the rendezvous (default: SLURM's)
    MASTER_ADDR     name of node 0 (default: SLURM's first node)
    MASTER_PORT     port of the rendezvous (default: 12000, plus the number of the SLURM job)
    LOCAL_ADDR      address of this node for the others (default: its name)
    RDZV_CONF       settings of torchrun's rendezvous, such as last_call_timeout=60
    MAX_RESTARTS    restarts of all ranks after failures (default: 0, with MIN:MAX 100)

Standard library only; the child imports torch.
"""

from __future__ import annotations

import os
import re
import runpy
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from fms_fsdp.config import TrainConfig
from fms_fsdp.config.parse import parse_flags
from fms_fsdp.config.values import shown
from fms_fsdp.errors import UserError
from fms_fsdp.files import read_json
from fms_fsdp.process import raise_open_file_limit

SET_BY_TORCHRUN = ("RANK", "WORLD_SIZE", "LOCAL_RANK")
FINISHED, FAILED, BAD_INPUT, STOPPED = 0, 1, 2, 75  # exit statuses
STOPS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1)
POLL_S = 0.1
# A launch removes a STOP that is older than itself, so the file is written again and again.
STOP_INTERVAL_S = 1.0
COLOR = re.compile(rb"\x1b\[[0-9;]*m")


@dataclass(frozen=True)
class Nodes:
    """The nodes of a launch, and the ranks on this one; `rendezvous` is "" for a single node."""

    num_ranks: int
    minimum: int = 1
    maximum: int = 1
    is_elastic: bool = False
    max_restarts: int = 0
    rendezvous: str = ""  # host:port
    is_host: bool = True


def main(argv: Sequence[str]) -> int:
    """Trains with the flags; returns the exit status of main_training.py."""
    if any(name in os.environ for name in SET_BY_TORCHRUN):  # this process is a rank
        sys.argv[1:] = argv
        runpy.run_module("main_training", run_name="__main__")  # ends the process
    try:
        run_dir = Path(parse_flags(TrainConfig, argv).output_dir)
        nodes = read_nodes(os.environ, count_gpus(os.environ))
    except UserError as error:
        say(f"error: {error}")
        return BAD_INPUT
    return train(nodes, argv, run_dir)


def train(nodes: Nodes, flags: Sequence[str], run_dir: Path) -> int:
    """Trains with valid flags; returns the exit status of main_training.py."""
    if nodes.num_ranks > 1 and not os.environ.get("NPROC_PER_NODE"):
        say(f"Starting {nodes.num_ranks} ranks; set NPROC_PER_NODE=1 for one …")
    command = build_command(nodes, os.environ, flags)
    raise_open_file_limit()  # torchrun's store has a socket to every rank
    with tempfile.TemporaryDirectory() as folder:
        outcome_file = Path(folder, "outcome.json")
        child = Child(command, child_variables(os.environ), run_dir, outcome_file)
        returncode = child.run()
        outcome = child.outcome().get("status", "")
        status = exit_status(returncode, outcome)
        reason = child.reason()
        if child.is_stopping and not outcome and status == FAILED:
            # The signal ended processes that do not handle it yet, such as torchrun's imports.
            status = STOPPED
            reason = "a signal ended it before the training began"
        if nodes.is_elastic and status == FAILED and child.lost_rendezvous:
            status = STOPPED
            reason = f"the node that hosts the rendezvous ({nodes.rendezvous}) is gone"
        if status != FINISHED:
            child.explain(status, reason)
    return status


def say(text: str) -> None:
    """Prints a line of the launcher. The exit status matters more than a reader that has ended (`| tee`)."""
    with suppress(OSError):
        print(text, file=sys.stderr, flush=True)


def read_nodes(variables: Mapping[str, str], num_gpus: int = 0) -> Nodes:
    """Returns the nodes that SLURM, or variables of the environment, describe.

    Raises:
        UserError: a variable is not valid, or one is missing.
    """
    text = variables.get("NNODES", "")
    is_elastic = ":" in text
    if is_elastic:
        minimum, maximum = _read_range(text)
    else:
        # In a SLURM step, SLURM knows the number; a shell's start-up file may have set another
        # NNODES.
        nnodes = read_number(variables, "NNODES", 1, low=1)
        maximum = read_number(variables, "SLURM_STEP_NUM_NODES", nnodes, low=1)
        minimum = maximum
    node_rank = read_node_rank(variables, maximum, is_elastic)
    job = read_number(variables, "SLURM_JOB_ID", 0)
    # The port is below those that Linux gives to programs that ask for any port.
    port = read_number(variables, "MASTER_PORT", 12000 + job % 20000, low=1, high=65535)
    rendezvous = ""
    if is_elastic or maximum > 1:
        rendezvous = f"{find_host(variables)}:{port}"
    return Nodes(
        num_ranks=read_number(variables, "NPROC_PER_NODE", max(num_gpus, 1), low=1),
        minimum=minimum,
        maximum=maximum,
        is_elastic=is_elastic,
        max_restarts=read_number(variables, "MAX_RESTARTS", 100 if is_elastic else 0),
        rendezvous=rendezvous,
        is_host=node_rank == 0,
    )


def _read_range(text: str) -> tuple[int, int]:
    match = re.fullmatch("([0-9]{1,6}):([0-9]{1,6})", text)
    if match is not None:
        minimum, maximum = int(match[1]), int(match[2])
        if 1 <= minimum <= maximum:
            return minimum, maximum
    raise UserError(
        f"NNODES={shown(text)} must be MIN:MAX with 1 <= MIN <= MAX; correct it, e.g. 2:4"
    )


def read_node_rank(variables: Mapping[str, str], num_nodes: int, is_elastic: bool) -> int:
    """Returns the number of this node. In an elastic launch it only says, by 0, who is the host.

    Raises:
        UserError: the number is not valid, or missing.
    """
    if variables.get("SLURM_PROCID"):
        return read_number(variables, "SLURM_PROCID", 0)
    if is_elastic:
        return read_number(variables, "NODE_RANK", 1)
    if num_nodes > 1 and not variables.get("NODE_RANK"):
        raise UserError(
            f"NNODES={num_nodes} requires NODE_RANK, this node's number from 0; set NODE_RANK and "
            "MASTER_ADDR"
        )
    return read_number(variables, "NODE_RANK", 0, high=num_nodes - 1)


def find_host(variables: Mapping[str, str]) -> str:
    """Returns the name of the first node.

    Raises:
        UserError: no variable names it.
    """
    nodes = variables.get("SLURM_STEP_NODELIST", "")
    if nodes:
        command = ["scontrol", "show", "hostnames", nodes]
        with suppress(OSError, subprocess.CalledProcessError):  # a container has no scontrol
            names = subprocess.check_output(command, env=dict(variables), encoding="utf-8")
            return names.split()[0]
    host = variables.get("MASTER_ADDR", "")
    if host:
        return host
    if nodes:
        raise UserError(
            f"SLURM_STEP_NODELIST={shown(nodes)} requires the program scontrol, which does not run "
            "here; set MASTER_ADDR to the name of the first node"
        )
    raise UserError(
        f"NNODES={shown(variables.get('NNODES', ''))} requires MASTER_ADDR, the name of the first "
        "node; set NODE_RANK and MASTER_ADDR"
    )


def read_number(
    variables: Mapping[str, str], name: str, default: int, *, low: int = 0, high: int = 999_999_999
) -> int:
    """Returns the whole number in a variable; the default if it is empty or not set.

    Raises:
        UserError: it holds something else.
    """
    text = variables.get(name, "")
    if not text:
        return default
    if not re.fullmatch("[0-9]{1,9}", text) or not low <= int(text) <= high:
        raise UserError(
            f"{name}={shown(text)} must be a whole number from {low} to {high}; unset or correct it"
        )
    return int(text)


def count_gpus(variables: Mapping[str, str]) -> int:
    """Returns the number of GPUs of the SLURM job on this node, or of the machine."""
    if variables.get("SLURM_GPUS_ON_NODE"):
        return read_number(variables, "SLURM_GPUS_ON_NODE", 0)
    if not shutil.which("nvidia-smi") and not os.path.exists("/dev/kfd"):
        return 0
    count = [sys.executable, "-c", "import torch; print(torch.cuda.device_count())"]
    return int(subprocess.check_output(count, encoding="utf-8"))


def build_command(nodes: Nodes, variables: Mapping[str, str], flags: Sequence[str]) -> list[str]:
    """Returns the command of this node: Python for one process, otherwise torchrun."""
    training = ["-m", "main_training", *flags]
    is_single = not nodes.rendezvous
    if is_single and nodes.num_ranks == 1 and nodes.max_restarts == 0:
        return [sys.executable, *training]
    command = [sys.executable, "-m", "torch.distributed.run"]
    command += [f"--nproc_per_node={nodes.num_ranks}", f"--max_restarts={nodes.max_restarts}"]
    command += ["--signals_to_handle=SIGTERM,SIGINT,SIGHUP,SIGQUIT,SIGUSR1"]
    if is_single:
        # The name of a machine need not resolve.
        return [*command, "--standalone", "--local-addr=127.0.0.1", *training]
    count = f"{nodes.minimum}:{nodes.maximum}" if nodes.is_elastic else str(nodes.maximum)
    settings = f"is_host={int(nodes.is_host)},read_timeout=600"
    if variables.get("RDZV_CONF"):
        settings += f",{variables['RDZV_CONF']}"
    command += [f"--nnodes={count}", f"--rdzv_id={variables.get('SLURM_JOB_ID') or 'run'}"]
    command += ["--rdzv_backend=c10d", f"--rdzv_endpoint={nodes.rendezvous}"]
    command += [f"--rdzv_conf={settings}"]
    if variables.get("LOCAL_ADDR"):
        command.append(f"--local-addr={variables['LOCAL_ADDR']}")
    return [*command, *training]


def child_variables(variables: Mapping[str, str]) -> dict[str, str]:
    """Returns the environment of the command."""
    defaults = {
        "NCCL_DEBUG": "WARN",
        # torchrun waits 10 minutes for a save after a signal (its default is 30 s).
        "TORCH_ELASTIC_SHUTDOWN_TIMEOUT": "600",
    }
    fixed = {
        "PYTHONUNBUFFERED": "1",
        # Rank 0 of each attempt opens a store of its own. The store of torchrun's agent keeps the
        # keys of the last attempt, and an agent that has been in a round does not tell newcomers
        # of it (torch 2.13; https://github.com/pytorch/pytorch/issues/135712).
        "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
        "LAUNCH_TERMINAL": _terminal(),
    }
    return {**defaults, **variables, **fixed}


def _terminal() -> str:
    """Returns the terminal on which the child shows its live line, past the pipe; "" without one."""
    with suppress(OSError):
        if os.isatty(1):
            return os.ttyname(1)
    return ""


def exit_status(returncode: int, outcome: str) -> int:
    """Returns the status of a launch from its command's and from the outcome that it wrote.

    torchrun ends with 0 or 1, whatever its ranks end with.
    """
    if outcome == "resume_me":
        return STOPPED
    if outcome == "bad_input":
        return BAD_INPUT
    if outcome == "failed" and returncode == FINISHED:  # ranks end with 0 to prevent a restart
        return FAILED
    return returncode if returncode in (FINISHED, BAD_INPUT, STOPPED) else FAILED


class Child:
    """The command of this node, in a session of its own: signals of a terminal or of SLURM reach
    only the launcher."""

    def __init__(
        self, command: Sequence[str], variables: Mapping[str, str], run_dir: Path, outcome: Path
    ) -> None:
        self.command = command
        self.is_torchrun = "torch.distributed.run" in command
        self.variables = {**variables, "LAUNCH_OUTCOME": str(outcome)}
        self.run_dir = run_dir
        self.outcome_file = outcome
        self.lost_rendezvous = False  # no rank failed, but the rendezvous did not answer
        self.is_stopping = False  # a signal has asked for the end
        self._signals: list[int] = []  # not handled yet

    def run(self) -> int:
        """Runs the command with its output on the terminal and in console.txt; returns its status."""
        before = {number: signal.getsignal(number) for number in STOPS}
        for number, handler in before.items():
            if handler is not signal.SIG_IGN:  # nohup ignores SIGHUP
                signal.signal(number, lambda number, frame: self._signals.append(number))
        process = subprocess.Popen(
            self.command,
            env=self.variables,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        assert process.stdout is not None
        reader = threading.Thread(target=self._copy_output, args=[process.stdout], daemon=True)
        reader.start()
        self._wait(process)
        # Other signals have no effect any more: SLURM repeats them, and the status is known.
        signal.signal(signal.SIGINT, before[signal.SIGINT])
        reader.join()  # ranks may outlive torchrun, to save
        return process.returncode

    def outcome(self) -> dict[str, Any]:
        with suppress(OSError):  # the output of the training must be read on
            return read_json(self.outcome_file)
        return {}

    def reason(self) -> str:
        """Returns why the launch ended, and where to read more."""
        outcome = self.outcome()
        reasons = [outcome.get("reason", "")]
        if outcome.get("claimed"):
            reasons.append(f"see {self.run_dir / 'console.txt'}")
        return "; ".join(filter(None, reasons))

    def explain(self, status: int, reason: str) -> None:
        """Prints how the launch ended. One process that gave a reason has printed it itself."""
        if not self.is_torchrun and self.outcome().get("reason"):
            return
        if status == BAD_INPUT:
            say(f"bad input: {reason}")
        elif status == STOPPED:
            say(f"stopped early, the same command resumes the run: {reason}")
        else:
            say(f"failed: {reason or 'no process gave a reason; see the output above'}")

    def _wait(self, process: subprocess.Popen[bytes]) -> None:
        """Waits for the end of the command, and asks it once to stop after a signal.

        SLURM and terminals repeat their signals. A torchrun whose ranks train gets no signal: its
        agent would end while the other nodes wait for it, so all ranks see the file STOP instead.
        """
        stop_file = self.run_dir / "STOP"
        writes_stop = False
        written_at = 0.0
        while process.poll() is None:
            while self._signals:
                number = self._signals.pop(0)
                if self.is_stopping:
                    if number == signal.SIGINT:
                        process.send_signal(signal.SIGINT)
                    continue
                self.is_stopping = True
                writes_stop = self.is_torchrun and bool(self.outcome().get("claimed"))
                if not writes_stop:
                    process.send_signal(signal.SIGTERM if self.is_torchrun else number)
            if writes_stop and time.monotonic() - written_at > STOP_INTERVAL_S:
                with suppress(OSError):
                    stop_file.touch()
                written_at = time.monotonic()
            time.sleep(POLL_S)
        if writes_stop:
            # A file that stays stops no later launch, and an error here would hide the outcome.
            with suppress(OSError):
                stop_file.unlink(missing_ok=True)

    def _copy_output(self, output: BinaryIO) -> None:
        """Copies the output to stdout, and to console.txt once the launch owns the run directory."""
        console: BinaryIO | None = None
        waiting = b""  # not in console.txt yet
        has_failed_rank = False
        has_lost_rendezvous = False
        while data := os.read(output.fileno(), 65536):
            _write(1, data)
            waiting += data
            has_failed_rank |= b"ChildFailedError" in waiting
            has_lost_rendezvous |= b"RendezvousConnectionError" in waiting
            console = console or self._open_console()
            if console is not None:
                # Whole lines, so that no colour is cut in two.
                lines, end, waiting = waiting.rpartition(b"\n")
                _write(console.fileno(), COLOR.sub(b"", lines + end))
        self.lost_rendezvous = has_lost_rendezvous and not has_failed_rank
        console = console or self._open_console()
        if console is not None:
            _write(console.fileno(), COLOR.sub(b"", waiting))
            console.close()

    def _open_console(self) -> BinaryIO | None:
        if not self.outcome().get("claimed"):
            return None
        try:
            return open(self.run_dir / "console.txt", "ab", buffering=0)
        except OSError:  # the terminal still has the output, which is not kept for a later try
            return open(os.devnull, "ab", buffering=0)


def _write(descriptor: int, data: bytes) -> None:
    """Writes all of the data; a closed terminal or a full disk does not end the training."""
    view = memoryview(data)
    with suppress(OSError):
        while view:
            view = view[os.write(descriptor, view) :]
