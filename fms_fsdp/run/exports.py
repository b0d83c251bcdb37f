"""Hugging Face checkpoints of a run, exported during training."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from fms_fsdp.checkpoint.folders import describe_health, read_metadata
from fms_fsdp.distributed.mesh import Mesh
from fms_fsdp.distributed.runtime import log
from fms_fsdp.errors import UserError
from fms_fsdp.state import TrainState

_ROOT = str(Path(__file__).parents[2])  # the folder of the package


class Exporter:
    """Exports each checkpoint whose step is due, once it is complete, by `fms_fsdp export` in a
    separate process of low priority. One at a time; a failure is logged.

    A launch that ends before its run does not wait: a running export is dropped without a trace.
    """

    def __init__(self, interval: int, checkpoints: Path, folder: Path, mesh: Mesh) -> None:
        self._interval, self._checkpoints, self._folder = interval, checkpoints, folder
        self._is_on = mesh.is_main
        self._due: list[int] = []
        self._running: tuple[int, subprocess.Popen[str]] | None = None

    def run_if_due(self, state: TrainState) -> None:
        """Records a due step, and begins an export whose checkpoint has become complete."""
        if self._is_on and (state.step % self._interval == 0 or state.is_done):
            self._due.append(state.step)
        if self._due or self._running:
            self._go_on()

    def finish(self) -> None:
        """Completes the due exports at the end of the run."""
        while self._running or self._go_on():
            assert self._running is not None
            self._running[1].wait()
            self._go_on()

    def close(self) -> None:
        """Drops an export that is under way."""
        if self._running is not None:
            self._running[1].kill()
            self._running[1].communicate()

    def _go_on(self) -> bool:
        """Reads how an export has ended and begins the next; returns whether one is under way."""
        if self._running is not None and self._running[1].poll() is not None:
            (step, process), self._running = self._running, None
            last = (process.communicate()[0].strip().splitlines() or [""])[-1]
            if process.returncode:
                log.warning("step %d was not exported: %s", step, last)
            else:
                log.info("exported %s", self._folder / f"step_{step}")
        # os.path.isdir: a storage that fails now is asked again after the next step.
        ready = [step for step in self._due if os.path.isdir(self._checkpoints / f"step_{step}")]
        if self._running is None and ready:
            self._due.remove(ready[0])
            folder = self._checkpoints / f"step_{ready[0]}"
            try:
                metadata = read_metadata(folder)
            except (UserError, OSError) as error:  # e.g. deleted since
                log.warning("step %d was not exported: %s", ready[0], error)
                return self._go_on()
            if not metadata.is_healthy:
                log.warning("step %d was not exported: it %s", ready[0], describe_health(metadata))
                return self._go_on()
            self._running = ready[0], self._begin(ready[0])
        return self._running is not None

    def _begin(self, step: int) -> subprocess.Popen[str]:
        output, paths = (
            self._folder / f"step_{step}",
            os.pathsep.join([_ROOT, *filter(None, sys.path)]),
        )
        command = [sys.executable, "-m", "fms_fsdp", "export", f"--path={self._checkpoints}"]
        process = subprocess.Popen(
            [*command, f"--step={step}", f"--output={output}"],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL,
            encoding="utf-8",
            errors="replace",  # the names that it prints may not be UTF-8
            env=os.environ
            | {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1", "PYTHONPATH": paths},
            start_new_session=True,
        )
        os.setpriority(os.PRIO_PROCESS, process.pid, 10)
        return process
