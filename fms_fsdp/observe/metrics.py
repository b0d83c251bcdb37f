"""What a run reports: one record a report step, to `metrics.jsonl`, to TensorBoard, and as a line for people.

The clock runs from report to report and leaves out the time spent in checkpoints, so that `step_time_ms` is what a step costs. On a GPU the host
runs ahead of the device; reading the loss back, which only report steps do, brings both together before the clock is read.
"""

from __future__ import annotations

import json
import math
import resource
import time
from collections.abc import Mapping
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from torch.utils.tensorboard import SummaryWriter

Record = dict[str, Any]


class MetricsFile:
    """`metrics.jsonl`: one flat JSON object a line, append only; a line torn by a crash is cut off at the start."""

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.exists():
            content = path.read_bytes()
            whole = content.rfind(b"\n") + 1
            if whole < len(content):
                with open(path, "r+b") as torn:
                    torn.truncate(whole)
        self._file = open(path, "a")  # noqa: SIM115 - lives as long as the run

    def write(self, record: Record) -> None:
        """Appends a record; what is not finite becomes null."""
        self._file.write(json.dumps({key: _finite(value) for key, value in record.items()}) + "\n")
        self._file.flush()

    def close(self) -> None:
        self._file.close()


class TensorBoard:
    """Every number of a record as a scalar over steps, in `tensorboard/` of the run folder."""

    def __init__(self, folder: Path) -> None:
        self._writer = SummaryWriter(str(folder))  # type: ignore[no-untyped-call]

    def write(self, record: Record) -> None:
        for name, value in record.items():
            if name not in ("step", "attempt") and isinstance(value, int | float) and math.isfinite(value):
                tag = name if name.startswith(("eval/", "test/")) else f"train/{name}"
                self._writer.add_scalar(tag, value, record["step"])  # type: ignore[no-untyped-call]

    def close(self) -> None:
        self._writer.close()  # type: ignore[no-untyped-call]


class Clock:
    """Times the steps since the last report: their mean wall time without pauses, and their mean wait for data."""

    def __init__(self) -> None:
        self._begin = time.perf_counter()
        self._steps = 0
        self._wait_s = 0.0

    def step_done(self, data_wait_s: float) -> None:
        self._steps += 1
        self._wait_s += data_wait_s

    def pause(self, seconds: float) -> None:
        """Leaves `seconds` (a checkpoint) out of the step time."""
        self._begin += seconds

    def read(self) -> tuple[float, float]:
        """Mean step time and data wait in seconds since the last call, and starts anew."""
        now = time.perf_counter()
        steps = max(1, self._steps)
        result = (now - self._begin) / steps, self._wait_s / steps
        self._begin, self._steps, self._wait_s = now, 0, 0.0
        return result


def peak_memory_gib(device: torch.device) -> float:
    """The most memory so far: allocated on the GPU, or resident in this process."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 2**30
    try:  # getrusage would count the peak of the process that started this one, until exec
        status = Path("/proc/self/status").read_text()
        return int(status.partition("VmHWM:")[2].split()[0]) / 2**20
    except (OSError, IndexError, ValueError):
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20


def report_line(record: Mapping[str, Any], num_steps: int) -> str:
    """The record as one line for a terminal or a log file."""
    mfu = "" if record["mfu"] is None else f" · mfu {100 * record['mfu']:.1f} %"
    left = timedelta(seconds=round((num_steps - record["step"]) * record["step_time_ms"] / 1000))
    width = len(str(num_steps))
    sources = [name[6:] for name in record if name.startswith("epoch/") and record[name] > 0]
    used = ", ".join(f"{name} {record[f'epoch/{name}']:.3g} ep {_short(record[f'tokens/{name}'])}" for name in sources)
    return (
        f"step {record['step']:>{width}}/{num_steps} · loss {record['loss']:.4f} · lr {record['lr']:.2e} · grad norm {record['grad_norm']:.3f}"
        f" · {_short(record['tokens_seen'])} tokens · {record['tokens_per_sec_per_device']:,.0f} tok/s/device{mfu}"
        f" · step {record['step_time_ms']:.0f} ms (data {record['data_wait_ms']:.1f}) · {record['peak_mem_gib']:.2f} GiB · {left} left{' · ' if used else ''}{used}"
    )


def _short(number: float) -> str:
    for unit in ("", "k", "M", "B"):
        if abs(number) < 1000:
            return f"{number:.3g}{unit}"
        number /= 1000
    return f"{number:.3g}T"


def _finite(value: Any) -> Any:
    return None if isinstance(value, float) and not math.isfinite(value) else value
