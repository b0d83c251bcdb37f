"""The reporter: on report steps it reads the step's outcome back from the device and writes it everywhere a run is watched."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch

from fms_fsdp.data.batch import Batch, fingerprint
from fms_fsdp.guards import SpikeDetector
from fms_fsdp.models.flops import flops_per_token
from fms_fsdp.observe.metrics import Clock, MetricsFile, TensorBoard, peak_memory_gib, report_line
from fms_fsdp.observe.peak import peak_flops
from fms_fsdp.preflight import Preflight
from fms_fsdp.runtime import Phases, log, sum_over_ranks


class Sink(Protocol):
    """Where records go."""

    def write(self, record: dict[str, Any]) -> None: ...
    def close(self) -> None: ...


class Result(Protocol):
    """What a record takes from a step."""

    @property
    def grad_norm(self) -> torch.Tensor: ...
    def loss(self) -> float: ...


@dataclass
class Reporter:
    """Writes a record for the first, the last and every `report_interval`-th step.

    `flops_per_token` and `peak_flops` give MFU: achieved model FLOP/s over the hardware's (`peak_flops` None: no MFU).
    `fingerprint(batch)` is this rank's share of the global batch's fingerprint, summed modulo 2^64 over ranks. `consumption()` gives epochs and tokens
    by source, as of the step just done.
    """

    sinks: list[Sink]
    attempt: int
    start: int
    num_steps: int
    report_interval: int
    tokens_at_start: int
    tokens_per_step: int
    num_devices: int
    device: torch.device
    flops_per_token: float
    peak_flops: float | None
    learning_rate: Callable[[int], float]
    fingerprint: Callable[[Batch], int]
    consumption: Callable[[], dict[str, dict[str, Any]]]
    phases: Phases
    spikes: SpikeDetector

    def tokens_seen(self, step: int) -> int:
        """Tokens trained on by the end of `step`, over all launches of the run."""
        return self.tokens_at_start + (step - self.start) * self.tokens_per_step

    def is_due(self, step: int) -> bool:
        return step in (1, self.start + 1, self.num_steps) or step % self.report_interval == 0

    def report(self, step: int, batch: Batch, result: Result, clock: Clock) -> None:
        """Writes the record of `step` if one is due (collective: every rank)."""
        if not self.is_due(step):
            return
        loss = result.loss()
        fingerprint = self.global_fingerprint(batch)
        step_time_s, data_wait_s = clock.read()
        begin = time.perf_counter()
        rate = self.tokens_per_step / step_time_s / self.num_devices
        record: dict[str, Any] = {
            "attempt": self.attempt,
            "step": step,
            "loss": loss,
            "lr": self.learning_rate(step),
            "grad_norm": result.grad_norm.item(),
            "tokens_seen": self.tokens_seen(step),
            "tokens_per_sec_per_device": rate,
            "mfu": rate * self.flops_per_token / self.peak_flops if self.peak_flops else None,
            "step_time_ms": 1000 * step_time_s,
            "data_wait_ms": 1000 * data_wait_s,
            "peak_mem_gib": peak_memory_gib(self.device),
            "data_fingerprint": fingerprint,
        }
        for source, used in self.consumption().items():
            record |= {f"epoch/{source}": used["epoch"], f"tokens/{source}": used["tokens"]}
        for sink in self.sinks:
            sink.write(record)
        log.info(report_line(record, self.num_steps))
        if step == self.start + 1:
            self.phases.done("first step")
            log.info(self.phases.text())
            self.event("start", step, **{f"{name.replace(' ', '_')}_s": s for name, s in self.phases.seconds.items()})
        if self.spikes.is_spike(loss):
            log.warning(
                "step %d: the loss is a spike; its data: python -m fms_fsdp inspect step --step=%d; to pass over such data, go back "
                "with --resume_step and use --skip_steps=%d:%d",
                *(step, step, step - self.report_interval, step + self.report_interval),
            )
            self.event("spike", step, loss=loss, data_fingerprint=fingerprint)
        clock.pause(time.perf_counter() - begin)

    def evaluation(self, step: int, values: dict[str, float]) -> None:
        """Writes a record without a "loss" of its own: what an evaluation after `step` found."""
        record = {"attempt": self.attempt, "step": step, "tokens_seen": self.tokens_seen(step), **values}
        for sink in self.sinks:
            sink.write(record)

    def global_fingerprint(self, batch: Batch) -> str:
        """The fingerprint of the global batch, of which `batch` is this rank's part (collective: every rank)."""
        total = sum_over_ranks(_as_int64(self.fingerprint(batch)))
        return f"{int(total.item()) % 2**64:016x}"

    def event(self, name: str, step: int, **fields: Any) -> None:
        """Enters something that is no report into metrics.jsonl."""
        for sink in self.sinks:
            if isinstance(sink, MetricsFile):
                sink.write({"event": name, "attempt": self.attempt, "step": step, **fields})

    def close(self) -> None:
        for sink in self.sinks:
            sink.close()


def build_reporter(
    folder: Path,
    found: Preflight,
    *,
    attempt: int,
    phases: Phases,
    report_interval: int,
    spike_threshold: float,
    learning_rate: Callable[[int], float],
    consumption: Callable[[], dict[str, dict[str, Any]]],
) -> Reporter:
    """The reporter of a run; its sinks write on rank 0 alone."""
    rows = found.batch.global_batch_size // found.batch.dp_size
    dtype = torch.bfloat16 if found.mixed_precision else torch.float32
    sinks: list[Sink] = []
    if found.world.rank == 0:
        sinks = [MetricsFile(folder / "metrics.jsonl"), TensorBoard(folder / "tensorboard")]
    return Reporter(
        sinks=sinks,
        attempt=attempt,
        start=found.start,
        num_steps=found.num_steps,
        report_interval=report_interval,
        tokens_at_start=found.tokens_at_start,
        tokens_per_step=found.batch.global_batch_size * found.model.max_seq_len,
        num_devices=found.world.world_size,
        device=found.device,
        flops_per_token=flops_per_token(found.model, found.model.max_seq_len),
        peak_flops=peak_flops(found.device, dtype),
        learning_rate=learning_rate,
        fingerprint=partial(fingerprint, first_row=found.world.rank * rows),
        consumption=consumption,
        phases=phases,
        spikes=SpikeDetector(spike_threshold),
    )


def _as_int64(value: int) -> torch.Tensor:
    """`value` modulo 2^64 as the int64 of the same bits: sums of those wrap around alike."""
    return torch.from_numpy(np.array([value % 2**64], dtype=np.uint64).view(np.int64))
