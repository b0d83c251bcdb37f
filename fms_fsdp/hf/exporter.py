"""Hugging Face checkpoints of a run, exported during training."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import IO

import torch
import torch.distributed as dist

from fms_fsdp.checkpoint.folders import describe_health, read_metadata
from fms_fsdp.errors import UserError
from fms_fsdp.files import is_folder, read_json, write_json
from fms_fsdp.logs import log
from fms_fsdp.state import TrainState

_TAIL_BYTES = 1 << 16  # of the output, whose last line is logged
_ROOT = str(Path(__file__).parents[2])  # the folder of the package


class Exporter:
    """Exports each checkpoint whose step is due, once it is complete.

    `fms_fsdp export` does it in a separate process of low priority, one at a time; a failure is
    logged.

    A launch that is stopped does not wait: it drops a running export without a trace. The due steps
    are in exports/due.json, so the next launch makes their exports, also of a finished run.
    """

    def __init__(
        self, interval: int, checkpoints: Path, folder: Path, start_step: int, *, is_main: bool
    ) -> None:
        self._interval = interval
        self._checkpoints = checkpoints
        self._folder = folder
        self._is_on = is_main
        self._running: tuple[int, subprocess.Popen[bytes]] | None = None
        self._output: IO[bytes] | None = None  # a file: a full pipe would stop the export
        self._record = folder / "due.json"
        # Replaced, never changed: the thread that deletes checkpoints reads it.
        self._due = self._recorded(start_step) if self._is_on else ()

    def due_steps(self) -> tuple[int, ...]:
        """Returns the steps whose checkpoints an export still needs."""
        return self._due

    def run_if_due(self, state: TrainState) -> None:
        """Records a due step, and begins an export whose checkpoint has become complete."""
        is_due = state.step % self._interval == 0 or state.is_done
        if self._is_on and is_due and state.step not in self._due:
            self._set_due((*self._due, state.step))
        if self._due:
            self._export_next()

    def finish(self, alive: Callable[[], object], is_stopped: Callable[[], bool]) -> None:
        """Completes the due exports at the end of the run, unless the launch is asked to stop
        (collective: every rank).

        All ranks wait for rank 0: some minutes after its first node has ended, SLURM kills a job.
        `alive` tells the watchdog that this rank does not hang.
        """
        has_ended = torch.zeros(1, dtype=torch.uint8)

        def share() -> None:
            alive()
            if dist.is_initialized():
                dist.broadcast(has_ended, src=0)

        if self._is_on:
            self._export_due(share, is_stopped)
            has_ended.fill_(1)
            share()
        while not has_ended:
            share()

    def _export_due(self, alive: Callable[[], object], is_stopped: Callable[[], bool]) -> None:
        while self._export_next():
            assert self._running is not None
            alive()
            if is_stopped():
                return
            with suppress(subprocess.TimeoutExpired):
                self._running[1].wait(timeout=1.0)
        try:
            missing = [step for step in self._due if not is_folder(self._checkpoint_of(step))]
        except OSError as error:  # the next launch asks the storage again
            log.warning("the last exports are not made: %s", error)
            return
        for step in missing:
            log.warning("step %d was not exported: it has no checkpoint", step)
            self._drop(step)

    def close(self) -> None:
        """Drops an export that is under way."""
        if self._running is not None:
            self._running[1].kill()
            self._running[1].wait()
            self._read_last_line()
        if self._due:
            steps = ", ".join(map(str, self._due))
            log.info("not exported yet, the next launch does it: step %s", steps)

    def _checkpoint_of(self, step: int) -> Path:
        return self._checkpoints / f"step_{step}"

    def _recorded(self, start_step: int) -> tuple[int, ...]:
        """Returns the due steps of launches before; steps after `start_step` are trained again."""
        steps = read_json(self._record).get("steps")
        due = []
        for step in steps if isinstance(steps, list) else []:
            if type(step) is not int or not 0 < step <= start_step:
                continue
            # The launch may have been killed between the end of the export and its record.
            if not os.path.isdir(self._folder / f"step_{step}"):
                due.append(step)
        return tuple(due)

    def _set_due(self, steps: tuple[int, ...]) -> None:
        self._due = steps
        try:
            if steps:
                self._folder.mkdir(parents=True, exist_ok=True)
                write_json(self._record, {"steps": steps})
            else:
                self._record.unlink(missing_ok=True)
        except OSError as error:  # matters only if this launch ends before its run
            log.warning("cannot write %s: %s", self._record, error)

    def _drop(self, step: int) -> None:
        self._set_due(tuple(each for each in self._due if each != step))

    def _export_next(self) -> bool:
        """Reads how an export has ended and begins the next; returns whether one is under way."""
        if self._running is not None and self._running[1].poll() is not None:
            step, process = self._running
            self._running = None
            last_line = self._read_last_line()
            if process.returncode:
                log.warning("step %d was not exported: %s", step, last_line)
            else:
                log.info("exported %s", self._folder / f"step_{step}")
            self._drop(step)
        # os.path.isdir: a storage that fails now is asked again after the next step.
        ready = [step for step in self._due if os.path.isdir(self._checkpoint_of(step))]
        if self._running is None and ready:
            step = ready[0]
            problem = self._problem(step)
            if not problem:
                try:
                    self._running = step, self._begin(step)
                except OSError as error:  # such as a limit of processes, or no memory
                    if self._output is not None:
                        self._output.close()
                    problem = f"the export cannot start: {error.strerror}"
            if problem:
                log.warning("step %d was not exported: %s", step, problem)
                self._drop(step)
                return self._export_next()
        return self._running is not None

    def _read_last_line(self) -> str:
        """Returns the last line of an export that has ended, and removes its output."""
        assert self._output is not None
        with self._output as output:
            size = output.seek(0, os.SEEK_END)
            output.seek(max(0, size - _TAIL_BYTES))
            # The names that the export prints may not be UTF-8.
            text = output.read().decode(errors="replace")
        return text.strip().rpartition("\n")[2]

    def _problem(self, step: int) -> str:
        """Returns why the checkpoint of a step cannot be exported; "" if it can."""
        try:
            metadata = read_metadata(self._checkpoint_of(step))
        except (UserError, OSError) as error:  # e.g. deleted since
            return str(error)
        if not metadata.is_healthy:
            return f"it {describe_health(metadata)}"
        return ""

    def _begin(self, step: int) -> subprocess.Popen[bytes]:
        output = self._folder / f"step_{step}"
        paths = os.pathsep.join([_ROOT, *filter(None, sys.path)])
        settings = {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1", "PYTHONPATH": paths}
        command = [sys.executable, "-m", "fms_fsdp", "export", f"--path={self._checkpoints}"]
        command += [f"--step={step}", f"--output={output}"]
        self._output = tempfile.TemporaryFile()  # noqa: SIM115 - read when the export has ended
        process = subprocess.Popen(
            command,
            stdout=self._output,
            stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL,
            env=os.environ | settings,
            start_new_session=True,
        )
        # A training under `nice` may have a lower priority, and nobody but root may raise one.
        niceness = max(10, os.getpriority(os.PRIO_PROCESS, 0))
        os.setpriority(os.PRIO_PROCESS, process.pid, niceness)
        return process
