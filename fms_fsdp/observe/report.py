"""The reporter: on report steps it reads the step's outcome back from the device and tells everyone who watches the run."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from fms_fsdp.config import TrainConfig, as_dict, parse_selective_checkpointing
from fms_fsdp.data.batch import Batch, fingerprint
from fms_fsdp.data.stream import Stream
from fms_fsdp.mesh import Mesh
from fms_fsdp.models.flops import flops_per_token, matmul_flops_per_token, recomputed_flops_per_token
from fms_fsdp.observe.energy import EnergyMeter, find_meter
from fms_fsdp.observe.metrics import (
    Clock,
    Interval,
    MetricsFile,
    Record,
    Result,
    count_zeros,
    memory,
    parameter_norm,
    report_line,
)
from fms_fsdp.observe.trackers import Background, RunInfo, build_trackers
from fms_fsdp.optim.optimizers import Optimizers
from fms_fsdp.parallel.activation import select_blocks
from fms_fsdp.predict.hardware import peak_flops
from fms_fsdp.run.health import SpikeDetector
from fms_fsdp.run.plan import Preflight
from fms_fsdp.runtime import Phases, log, show_progress


@dataclass(frozen=True)
class Utilization:
    """FLOPs of one token by three conventions, and the hardware's FLOP/s, None where they are not known: then there is no MFU."""

    model: int
    matmul: int
    hardware: int
    peak_flops: float | None

    def of(self, tokens_per_sec: float) -> dict[str, float]:
        """The metrics at a rate of tokens of one device."""
        metrics = {"tflops_per_device": tokens_per_sec * self.model / 1e12}
        if self.peak_flops:
            parts = {"mfu": self.model, "mfu_matmul": self.matmul, "hfu": self.hardware}
            metrics |= {name: tokens_per_sec * flops / self.peak_flops for name, flops in parts.items()}
        return metrics


@dataclass
class Reporter:
    """Writes a record for the first, the last and every `report_interval`-th step.

    `fingerprint(batch)` is this rank's share of the global batch's fingerprint, summed modulo 2^64 over ranks. `stream` knows epochs and tokens
    by source and the rows it masked, as of the step just done. `norms` are the parameters whose norm is reported, none of them if it is not.
    """

    file: MetricsFile | None
    trackers: list[Background]
    attempt: int
    start: int
    num_steps: int
    report_interval: int
    tokens_at_start: int
    rows_per_step: int
    seq_length: int
    mesh: Mesh
    device: torch.device
    utilization: Utilization
    learning_rate: Callable[[int], float]
    fingerprint: Callable[[Batch], int]
    stream: Stream
    phases: Phases
    spikes: SpikeDetector
    norms: Sequence[torch.Tensor]
    meter: EnergyMeter
    clock: Clock
    interval: Interval
    zeros: torch.Tensor | None = None
    step: int = 0
    energy_j: float = 0.0
    began: float = field(default_factory=time.time)

    @property
    def tokens_per_step(self) -> int:
        return self.rows_per_step * self.seq_length

    def tokens_seen(self, step: int) -> int:
        """Tokens trained on by the end of `step`, over all launches of the run."""
        return self.tokens_at_start + (step - self.start) * self.tokens_per_step

    def problem(self) -> str:
        """Why the records cannot be written; empty if they can, and on ranks that write none."""
        return self.file.problem if self.file is not None else ""

    def is_due(self, step: int) -> bool:
        return step in (1, self.start + 1, self.num_steps) or step % self.report_interval == 0

    def report(self, step: int, batch: Batch, result: Result) -> None:
        """Takes in `step`, and writes a record if one is due (collective: every rank)."""
        self.clock.mark("hooks")
        self.step = step
        self.interval.add(result)
        if not self.is_due(step):
            show_progress(f"step {step}/{self.num_steps} · next report at step {self._next_report(step)}")
            self.clock.mark("logging")
            return
        extra = {"param_norm": parameter_norm(self.norms, self.mesh)} if self.norms else {}
        if self.zeros is not None:
            extra["grad_zeros"] = self.zeros
        masked_rows = self.stream.num_masked_rows
        values = self.interval.read(result, self.meter.read_j(), masked_rows, extra)
        self.clock.mark("device")
        record = self._record(step, values, self.clock.read())
        record["data_fingerprint"] = self.global_fingerprint(batch)
        for source, used in self.stream.consumption().items():
            record |= {f"epoch/{source}": used["epoch"], f"tokens/{source}": used["tokens"]}
        if self.file is not None:
            self.file.write(record)
        for tracker in self.trackers:
            tracker.write(record)
        log.info(report_line(record, self.num_steps))
        if step == self.start + 1:
            self.phases.done("first step")
            log.info(self.phases.text())
            self.event(
                "start", step, **{f"{name.replace(' ', '_')}_s": s for name, s in self.phases.seconds.items()}
            )
        if self.spikes.is_spike(record["loss"]):
            log.warning(
                "step %d: the loss is a spike; its data: python -m fms_fsdp inspect step --step=%d; to pass over such data, go back "
                "with --resume_step and use --skip_steps=%d:%d",
                *(step, step, step - self.report_interval, step + self.report_interval),
            )
            self.event("spike", step, loss=record["loss"], data_fingerprint=record["data_fingerprint"])
        self.clock.mark("logging")

    def _next_report(self, step: int) -> int:
        return min(self.num_steps, (step // self.report_interval + 1) * self.report_interval)

    def _record(self, step: int, values: dict[str, float], times: dict[str, float]) -> Record:
        energy_j = values.pop("energy_j")
        rate = 1000 * self.tokens_per_step / times["step_time_ms"]
        wall_ms = times["step_time_ms"] + times["eval_ms"] + times["checkpoint_ms"] + times["logging_ms"]
        now, eta_s = time.time(), (self.num_steps - step) * wall_ms / 1000
        record: Record = {
            "attempt": self.attempt,
            "step": step,
            "tokens_seen": self.tokens_seen(step),
            "samples_seen": self.tokens_seen(step) // self.seq_length,
            "time": round(now, 3),
            **values,
            "lr": self.learning_rate(step),
            "batch_rows": self.rows_per_step,
            "batch_tokens": self.tokens_per_step,
            "tokens_per_sec_per_device": rate / self.mesh.size("world"),
            "tokens_per_sec": rate,
            **self.utilization.of(rate / self.mesh.size("world")),
            **times,
            **memory(self.device),
            "eta_s": eta_s,
            "finish_at": datetime.fromtimestamp(now + eta_s).strftime("%Y-%m-%d %H:%M"),
        }
        if energy_j:
            self.energy_j += energy_j
            record |= {"power_w": energy_j / max(1e-9, now - self.began), "energy_kwh": self.energy_j / 3.6e6}
        self.began = now
        return record

    def count_zeros(self, parameters: Sequence[torch.Tensor]) -> None:
        """Counts the zeros of the gradient if the step that is being made will be reported (collective: every rank)."""
        if self.is_due(self.step + 1):
            self.zeros = count_zeros(parameters, self.mesh)

    def evaluation(self, step: int, values: dict[str, float]) -> None:
        """Writes a record without a "loss" of its own: what an evaluation after `step` found."""
        record: Record = {"attempt": self.attempt, "step": step, "tokens_seen": self.tokens_seen(step)}
        record |= {"time": round(time.time(), 3), **values}
        if self.file is not None:
            self.file.write(record)
        for tracker in self.trackers:
            tracker.write(record)

    def global_fingerprint(self, batch: Batch) -> str:
        """The fingerprint of the global batch, of which `batch` is this rank's part (collective: every rank)."""
        total = self.mesh.sum(_as_int64(self.fingerprint(batch)), "dp")
        return f"{int(total.item()) % 2**64:016x}"

    def event(self, name: str, step: int, **fields: Any) -> None:
        """Enters something that is no report into metrics.jsonl."""
        if self.file is not None:
            now = round(time.time(), 3)
            self.file.write({"event": name, "attempt": self.attempt, "step": step, "time": now, **fields})

    def close(self) -> None:
        """Lets the trackers finish, and enters what this launch spent its time on."""
        for tracker in self.trackers:
            tracker.close()
        if self.file is not None:
            seconds = {f"{part}_s": round(spent, 3) for part, spent in self.clock.totals.items()}
            cpu_s = round(sum(tracker.cpu_s for tracker in self.trackers), 3)
            self.event("end", self.step, **seconds, trackers_cpu_s=cpu_s)
            self.file.close()


def build_reporter(
    cfg: TrainConfig,
    found: Preflight,
    mesh: Mesh,
    model: torch.nn.Module,
    optimizers: Optimizers,
    *,
    attempt: int,
    phases: Phases,
    learning_rate: Callable[[int], float],
    stream: Stream,
) -> Reporter:
    """The reporter of a run; it writes on rank 0 alone."""
    folder, parameters = Path(cfg.output_dir), list(model.parameters())
    is_main = mesh.is_main
    utilization = _utilization(cfg, found)
    if utilization.peak_flops is None:
        log.info("mfu is not reported: the peak of %s is not known", torch.cuda.get_device_name(found.device))
    reporter = Reporter(
        file=MetricsFile(folder / "metrics.jsonl") if is_main else None,
        trackers=build_trackers(cfg.log, RunInfo(cfg.run_name, folder, as_dict(cfg))) if is_main else [],
        attempt=attempt,
        start=found.start,
        num_steps=found.num_steps,
        report_interval=cfg.log.report_interval,
        tokens_at_start=found.tokens_at_start,
        rows_per_step=found.batch.global_batch_size,
        seq_length=found.model.max_seq_len,
        mesh=mesh,
        device=found.device,
        utilization=utilization,
        learning_rate=learning_rate,
        fingerprint=partial(
            fingerprint, first_row=mesh.place("dp") * found.batch.global_batch_size // mesh.size("dp")
        ),
        stream=stream,
        phases=phases,
        spikes=SpikeDetector(cfg.training.spike_threshold),
        norms=parameters if cfg.log.log_param_norm else [],
        meter=find_meter(found.device, found.world.local_rank),
        clock=Clock(found.device),
        interval=Interval(mesh, found.device),
        step=found.start,
    )
    if cfg.log.log_num_zeros:
        optimizers.before_step(lambda: reporter.count_zeros(parameters))
    return reporter


def _utilization(cfg: TrainConfig, found: Preflight) -> Utilization:
    model, seq_length = found.model, found.model.max_seq_len
    flops, recomputing = flops_per_token(model, seq_length), 0
    if cfg.parallel.fsdp_activation_checkpointing:
        share = parse_selective_checkpointing(cfg.parallel.selective_checkpointing)
        recomputing = sum(select_blocks(model.num_layers, share))
    return Utilization(
        model=flops,
        matmul=matmul_flops_per_token(model, seq_length),
        hardware=flops + recomputed_flops_per_token(model, seq_length, recomputing),
        peak_flops=peak_flops(found.device, torch.bfloat16 if found.mixed_precision else torch.float32),
    )


def _as_int64(value: int) -> torch.Tensor:
    """`value` modulo 2^64 as the int64 of the same bits: sums of those wrap around alike."""
    return torch.from_numpy(np.array([value % 2**64], dtype=np.uint64).view(np.int64))
