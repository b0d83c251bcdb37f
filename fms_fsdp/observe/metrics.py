"""Measurements of a run: sums over steps on the device, the time of the parts of a run, and memory.

docs/metrics.md defines each number. Between reports nothing is read back from the device: `Interval` adds up
there, and the one transfer of a report step brings the host, which on a GPU runs ahead, and the device
together before the clock is read.
"""

from __future__ import annotations

import math
import resource
import time
from collections import deque
from collections.abc import Mapping, Sequence
from datetime import timedelta
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch

from fms_fsdp.config.values import short
from fms_fsdp.distributed.dtensor import local_shard, num_copies
from fms_fsdp.distributed.mesh import Mesh
from fms_fsdp.state import StepResult

Record = dict[str, Any]
_TIMED_STEPS = 64  # of an interval, the last ones, by the events of a GPU
_BESIDE_STEPS = (
    "start",
    "eval",
    "checkpoint",
    "logging",
)  # parts of the run that are no part of a step
_PASSES = (
    "forward",
    "backward",
    "forward_backward",
)  # the last of a pipeline, whose passes take turns
_SHOWN_PARTS = ("forward", "backward", "clip", "optimizer", "eval", "checkpoint", "logging")


class Clock:
    """Splits the time of a run: `mark(part)` says that the time since the last mark belongs to `part`.

    On a GPU the parts of a step are timed by its events, over the last 64 steps of an interval; its host only
    hands out work.
    """

    def __init__(self, device: torch.device) -> None:
        self._cuda = device.type == "cuda"
        self._seconds: dict[str, float] = {}
        self._steps = 0
        self._events: deque[list[tuple[str, torch.cuda.Event]]] = deque(maxlen=_TIMED_STEPS)
        self._last = time.perf_counter()
        self.totals: dict[str, float] = {}

    def mark(self, part: str) -> None:
        """`part`: start, data, forward and backward (of each micro-step; in a pipeline forward_backward),
        clip, optimizer (ends a step), eval, checkpoint, logging; device waits for what the device has to do;
        this and any other part count to the steps."""
        if self._cuda and part == "device":
            torch.cuda.synchronize()
        now = time.perf_counter()
        self._seconds[part] = self._seconds.get(part, 0.0) + now - self._last
        self.totals[part] = self.totals.get(part, 0.0) + now - self._last
        self._last = now
        self._steps += part == "optimizer"
        if self._cuda and part in ("data", *_PASSES, "clip", "optimizer"):
            if part == "data":
                self._events.append([])
            event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
            event.record()
            self._events[-1].append((part, event))

    def read(self) -> dict[str, float]:
        """Milliseconds a step by part, over the steps since the last call, and starts anew. The device must
        have done its work."""
        steps = max(1, self._steps)
        ms = {part: 1000 * seconds / steps for part, seconds in self._seconds.items()}
        timed = [events for events in self._events if events[-1][0] == "optimizer"]
        ms |= dict.fromkeys((*_PASSES, "clip", "optimizer"), 0.0) if timed else {}
        for events in timed:
            for (_, begin), (part, end) in pairwise(events):
                ms[part] += begin.elapsed_time(end) / len(timed)
        host = sum(seconds for part, seconds in self._seconds.items() if part not in _BESIDE_STEPS)
        self._seconds, self._steps = {}, 0
        self._events.clear()
        return {
            "step_time_ms": 1000 * host / steps,
            "data_wait_ms": ms.get("data", 0.0),
            "forward_backward_ms": sum(ms.get(part, 0.0) for part in _PASSES),
            **{f"{part}_ms": ms.get(part, 0.0) for part in _SHOWN_PARTS},
        }


class Interval:
    """Loss and gradient norms over the steps since the last report, summed on the device.

    Steps that were skipped, because their gradient was not finite, are counted and left out of the sums.
    `beside`: names of the losses beside the loss, of as many as a step has.
    """

    def __init__(
        self, mesh: Mesh, device: torch.device, beside: Sequence[str] = ("z_loss",)
    ) -> None:
        self._mesh, self._device, self._beside = mesh, device, beside
        self._clear()

    def _clear(self) -> None:
        zeros = torch.zeros(5, dtype=torch.float64, device=self._device)
        self._loss, self._labels, self._norms, self._largest, self._skipped = zeros
        self._steps = 0

    def add(self, result: StepResult) -> None:
        """Takes in a step; waits for nothing."""
        done = torch.isfinite(result.grad_norm)
        norm = torch.where(done, result.grad_norm, 0.0)
        self._loss += torch.where(done, result.loss_sum, 0.0)
        self._labels += torch.where(done, result.num_labels, 0)
        self._norms += norm
        self._largest.copy_(torch.maximum(self._largest, norm))
        self._skipped += ~done
        self._steps += 1

    def read(
        self,
        result: StepResult,
        energy_j: float,
        masked_rows: int,
        extra: Mapping[str, torch.Tensor],
    ) -> dict[str, float]:
        """The metrics of the step and of the interval by name, and starts anew (collective: every rank; waits
        for the device). The loss of no label at all is NaN.

        `energy_j` and `masked_rows` are summed over ranks; `extra` are scalars alike on all ranks.
        """
        mesh = self._mesh
        losses = self._column(result.loss_sum, self._loss, *result.extra_sums)
        rows = masked_rows * mesh.counts_for("dp")
        own = torch.tensor([energy_j, rows], dtype=torch.float64).to(
            self._device, non_blocking=True
        )
        sums = mesh.sum(torch.cat([losses * mesh.counts_for("losses"), own]), "world")
        gradients = result.grad_norm, self._norms, self._largest, self._skipped
        alike = self._column(result.num_labels, self._labels, *gradients, *extra.values())
        sums, alike = torch.split(torch.cat([sums, alike]).cpu(), [len(sums), len(alike)])
        loss, loss_sum, *beside, energy_j, masked = sums.tolist()
        labels, all_labels, norm, norms, largest, skipped, *others = alike.tolist()
        done = self._steps - skipped
        self._clear()
        loss = loss / labels if labels else math.nan
        values = {
            "loss": loss,
            "loss_mean": loss_sum / all_labels if all_labels else math.nan,
            "perplexity": math.exp(min(loss, 20.0)),
            "grad_norm": norm,
            "grad_norm_mean": norms / done if done else math.nan,
            "grad_norm_max": largest if done else math.nan,
            "skipped_steps": int(skipped),
            "masked_rows": int(masked),
            "energy_j": energy_j,
        }
        for name, value in zip(extra, others, strict=True):
            values[name] = value if extra[name].is_floating_point() else int(value)
        per_label = (value / max(labels, 1) for value in beside)
        return values | dict(zip(self._beside, per_label, strict=False))

    def _column(self, *values: torch.Tensor) -> torch.Tensor:
        return torch.stack([value.to(self._device, torch.float64) for value in values])


def count_zeros(parameters: Sequence[torch.Tensor], mesh: Mesh) -> torch.Tensor:
    """How many entries of the gradient are exactly zero (collective: every rank)."""
    count = torch.zeros((), dtype=torch.float64, device=parameters[0].device)
    for parameter in parameters:
        if parameter.grad is not None:
            count += (local_shard(parameter.grad) == 0).sum() / num_copies(parameter.grad, mesh)
    return mesh.sum(count, "replica").round().long()


def memory(device: torch.device) -> dict[str, float]:
    """Memory of this rank: on a GPU the memory of torch's allocator, else the resident memory of the
    process."""
    if device.type == "cuda":
        stats = torch.cuda.memory_stats(device)
        return {
            "mem_gib": stats["allocated_bytes.all.current"] / 2**30,
            "reserved_mem_gib": stats["reserved_bytes.all.current"] / 2**30,
            "peak_mem_gib": stats["allocated_bytes.all.peak"] / 2**30,
            "alloc_retries": stats["num_alloc_retries"],
        }
    try:  # getrusage would count the peak of the process that started this one, until exec
        status = Path("/proc/self/status").read_text()
        now, peak = (
            int(status.partition(name)[2].split()[0]) / 2**20 for name in ("VmRSS:", "VmHWM:")
        )
        return {"mem_gib": now, "peak_mem_gib": peak}
    except (OSError, IndexError, ValueError):
        return {"peak_mem_gib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20}


def report_line(
    record: Mapping[str, Any],
    num_steps: int,
    validation: float | None = None,
    *,
    with_pace: bool = True,
) -> str:
    """The record as one line of at most 110 characters, with the mean loss since the last one.

    `validation` is the latest validation loss. Without `with_pace` the line has no rate and no time left:
    the first step of a launch, which compiles, says nothing of the others. What matters least is left out
    where the line is too long.
    """
    parts = {
        "step": f"step {record['step']:>{len(str(num_steps))}}/{num_steps}",
        "loss": f"loss {record['loss_mean']:.4f}",
        "masked": f"{record['masked_rows']} rows masked" if record.get("masked_rows") else "",
        "validation": "" if validation is None else f"val {validation:.4f}",
        "lr": f"lr {record['lr']:.2e}",
        "norm": f"norm {record['grad_norm']:.3f}",
        "tokens": f"{short(record['tokens_seen'], 3)} tokens",
        "rate": f"{record['tokens_per_sec_per_device']:,.0f} tok/s/device",
        "mfu": f"mfu {100 * record['mfu']:.0f} %" if "mfu" in record else "",
        "memory": f"{record['peak_mem_gib']:.1f} GiB",
        "left": f"{timedelta(seconds=round(record['eta_s']))} left",
    }
    if not with_pace:
        parts |= dict.fromkeys(("rate", "mfu", "left"), "")
    for least in ("memory", "mfu", "tokens", "lr", "norm", "rate"):
        if len("  ".join(filter(None, parts.values()))) > 110:
            del parts[least]
    return "  ".join(filter(None, parts.values()))
