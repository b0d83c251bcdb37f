"""Requests to stop that come from outside: signals, and the death of torchrun's agent. Standard library only.

    before step 1   nothing can be saved: the process ends at once, also while it waits in a collective
    afterwards      `name` is set; the loop saves and ends (limits.py)

A thread reads the signals from a pipe: Python runs handlers only when the main thread is not inside a
library call, and a collective that waits for a dead peer may never return.
"""

from __future__ import annotations

import os
import select
import signal
import termios
import threading
import time
from types import FrameType

from fms_fsdp.run.status import FAILED, RESUME_ME, Launch

_STOPS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGHUP)
_AGENTS_APART_S = 5.0  # they look for newcomers ten times a second
_AGENT_GONE = "the end of torchrun's agent"


class StopSignal:
    """SIGTERM, SIGINT, SIGUSR1 or SIGHUP asks for a stop after the current step; a second SIGINT interrupts
    at once.

    SIGHUP counts unless it was ignored at the start (nohup). `name` is what asked for the stop, "" before
    that. Set `can_save` when the first step is done, and `came_to_peer` when a signal to another rank has
    asked for the stop. Some time after the agent is gone the process ends even if a save hangs: as long as
    torchrun itself would wait."""

    def __init__(self, launch: Launch) -> None:
        self.name = ""
        self.can_save = False
        self.came_to_peer = False
        self._launch = launch
        self._interrupts = 0
        self._agent = os.getppid() if "TORCHELASTIC_RUN_ID" in os.environ else 0
        self._save_limit_s = float(os.environ.get("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", "600"))
        self._deadline = float("inf")
        self._terminals = [descriptor for descriptor in (1, 2) if os.isatty(descriptor)]
        self._pipe, writer = os.pipe()
        os.set_blocking(writer, False)
        signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
        for number in _STOPS:
            if signal.getsignal(number) is not signal.SIG_IGN:
                signal.signal(number, self._interrupt)
        threading.Thread(target=self._listen, name="signals", daemon=True).start()

    def wait_for_agent(self) -> None:
        """Waits a short time for a signal that another rank has got already.

        Where nodes join a launch, torchrun's agents stop their workers one after the other; one that ends
        well before its own agent has asked would count as finished."""
        deadline = time.monotonic() + _AGENTS_APART_S
        while self.came_to_peer and self._agent and not self.name and time.monotonic() < deadline:
            time.sleep(0.05)

    def _interrupt(self, number: int, frame: FrameType | None) -> None:
        """Runs in the main thread, which may be late."""
        self._interrupts += number == signal.SIGINT
        if self._interrupts > 1:
            raise KeyboardInterrupt

    def _listen(self) -> None:
        while True:
            ready, _, _ = select.select([self._pipe], [], [], 1.0)
            for number in os.read(self._pipe, 64) if ready else b"":
                if number == signal.SIGHUP:
                    self._leave_dead_terminals()
                if number in _STOPS:
                    self._ask(signal.Signals(number).name)
            if self._agent and os.getppid() != self._agent:
                self._agent, self._deadline = 0, time.monotonic() + self._save_limit_s
                self._ask(_AGENT_GONE)
            if time.monotonic() > self._deadline:
                self._launch.leave(FAILED, f"no stop within {self._save_limit_s:g} s of {_AGENT_GONE}")

    def _ask(self, name: str) -> None:
        self.name = self.name or name
        if self._launch.has_failed():
            os._exit(1)  # a peer failed and said why; a save would wait for it
        if not self.can_save:
            self._launch.leave(RESUME_ME, f"stopped by {name} before the first step; nothing is saved")

    def _leave_dead_terminals(self) -> None:
        """Sends output to nowhere if its terminal is closed: a failing print would fail the save."""
        for descriptor in self._terminals:
            try:
                termios.tcgetattr(descriptor)
            except (OSError, termios.error):
                os.dup2(os.open(os.devnull, os.O_WRONLY), descriptor)
