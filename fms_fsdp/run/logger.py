"""The log line, metrics.jsonl and the trackers.

Between reports nothing is read back from the device. Every rank measures; rank 0 writes.
docs/reference/metrics.md defines each value of a record.
"""

from __future__ import annotations

import json
import os
import statistics
import time
from collections import deque
from collections.abc import Mapping
from contextlib import suppress
from datetime import datetime
from pathlib import Path
from typing import Any

import torch

from fms_fsdp.config.values import short
from fms_fsdp.console import LINE_WIDTH, TIME_WIDTH
from fms_fsdp.data.stream import Consumption
from fms_fsdp.distributed.dtensor import global_norm
from fms_fsdp.distributed.mesh import Mesh
from fms_fsdp.errors import RunFailed
from fms_fsdp.files import finite_json, is_file
from fms_fsdp.logs import log, log_note, show_progress
from fms_fsdp.metrics.hardware import (
    EnergyMeter,
    advice_on_memory,
    diagnostics,
    find_utilization,
    memory_stats,
)
from fms_fsdp.metrics.interval import (
    IntervalMetrics,
    SpikeDetector,
    count_zero_gradients,
    global_fingerprint,
)
from fms_fsdp.metrics.timer import PhaseTimer
from fms_fsdp.metrics.trackers import Record, finite_numbers, open_trackers
from fms_fsdp.run.setup import Launch
from fms_fsdp.state import StepResult, TrainState

_PACE_REPORTS = 20  # number of reports whose mean pace gives the time left
MAX_SOURCES = 64  # with more, two fields of each source would be most of metrics.jsonl
SOURCES_INTERVAL = 10  # reports from one with the fields of so many sources to the next
MAX_ETA_S = 100 * 365.25 * 86400  # beyond, a date says nothing, and after year 9999 there is none
_BLOCK_BYTES = 1 << 16


class MetricLogger:
    """Reports the first, the last and every `report_interval`-th step.

    Other components log their measurements with `log`, `log_text` and `event`.
    """

    def __init__(self, launch: Launch, mesh: Mesh, state: TrainState, timer: PhaseTimer) -> None:
        run = launch.run
        cfg = run.config
        device = launch.device
        self._run = run
        self._device = device
        self._mesh = mesh
        self._cfg = cfg.log
        self._state = state
        self._attempt = launch.run_dir.attempt
        self._timer = timer
        self._phases = launch.phases
        self._memory_bytes = launch.memory_bytes
        self._is_compiled = launch.is_compiled
        self._advises_on_memory = device.type == "cuda"
        self._file = MetricsFile(
            Path(cfg.output_dir, "metrics.jsonl") if mesh.is_main else Path(os.devnull)
        )
        self._trackers = open_trackers(cfg, state) if mesh.is_main else []
        extra_losses = ("z_loss", "teacher_kl") if run.model.z_loss else ("teacher_kl",)
        self._interval = IntervalMetrics(mesh, device, extra_losses)
        self._utilization = find_utilization(run, device)
        if device.type == "cuda" and self._utilization.peak_flops is None:
            name = torch.cuda.get_device_name(device)
            log.info("mfu is not reported: no known peak for %s; set --peak_tflops", name)
        self._spikes = SpikeDetector(cfg.training.spike_threshold)
        self._energy = EnergyMeter(device)
        self._energy_j = 0.0
        self._parameters = list(state.model.parameters())
        self._zero_gradients: torch.Tensor | None = None
        if cfg.log.log_num_zeros:
            first = state.optimizers.optimizers[0]
            first.register_step_pre_hook(lambda *_: self._count_zero_gradients())
        self._paces: deque[float] = deque(maxlen=_PACE_REPORTS)  # seconds per sequence
        self._last_report = 0, 0, time.monotonic()  # steps and tokens of this launch, time
        self._last_step = state.step
        self._num_reports = 0
        self._reports_sources = True  # whether the last report has the fields of the sources
        self._sources_at_end: Record = {}

    def after_step(self, state: TrainState, result: StepResult) -> bool:
        """Adds a step, and reports if a report is due (collective: every rank).

        Returns whether it reported, and so waited for the device.
        """
        self._interval.add(result)
        step = state.step
        self._last_step = step
        every = self._cfg.report_interval
        if not self._is_report(state, step):
            following = min(state.num_steps, (step // every + 1) * every)
            show_progress(f"step {step}/{state.num_steps} · next report at step {following}")
            if self._cfg.print_interval and step % self._cfg.print_interval == 0:
                log.info("step %d/%d", step, state.num_steps)
            return False
        masked_rows = state.stream.num_masked_rows
        values = self._interval.read(
            result, self._energy.read_joules(), masked_rows, self._replicated(result)
        )
        self._timer.mark("report")
        record = self.log(state, self._measure(state, values, self._timer.read()))
        num_devices = self._mesh.size("world")
        log.info(report_line(record, state, num_devices, self._memory_bytes))
        if state.steps_in_launch == 1:
            self._phases.done("first step")
            log.info(self._phases.text(compiled=self._is_compiled))
            seconds = {f"{k.replace(' ', '_')}_s": v for k, v in self._phases.seconds.items()}
            self.event("start", step, world_size=num_devices, **seconds)
        elif self._advises_on_memory:  # the first step also tries kernels
            self._advises_on_memory = False
            batch = self._run.batch
            micro_batch = batch.micro_batch_at(state.current.sequences // batch.dp_size)
            peak_gib = record["peak_mem_gib"]
            advice = advice_on_memory(self._run, micro_batch, peak_gib, self._memory_bytes)
            if advice:
                log_note(advice)
        if self._spikes.is_spike(record["loss"]):
            log.warning(
                "step %d: loss spike; list its data with `python -m fms_fsdp inspect step --step=%d`; "
                "to skip such data, resume from an earlier checkpoint with --resume_step and "
                "--skip_steps=%d:%d",
                *(step, step, step - every, step + every),
            )
            self.event(
                "spike", step, loss=record["loss"], data_fingerprint=record["data_fingerprint"]
            )
        return True

    def finish(self) -> None:
        """Ends the reports of this launch.

        Raises:
            RunFailed: metrics.jsonl could not be written.
        """
        if not self._reports_sources:  # the launch was stopped between two reports with them
            self._sources_at_end = _source_values(self._state.stream.consumption())
        if self._file.problem:
            fix = "free space and start the run again: it resumes from the newest checkpoint"
            raise RunFailed(f"{self._file.problem}; {fix}")

    def _is_report(self, state: TrainState, step: int) -> bool:
        always = (1, state.start + 1, state.num_steps)
        return step in always or step % self._cfg.report_interval == 0

    def _count_zero_gradients(self) -> None:
        state = self._state
        if self._is_report(state, state.step + 1):
            self._zero_gradients = count_zero_gradients(self._parameters, self._mesh)

    def _replicated(self, result: StepResult) -> dict[str, torch.Tensor]:
        """Returns the device values that are identical on every rank."""
        values = {} if result.loss_scale is None else {"loss_scale": result.loss_scale}
        if self._cfg.log_param_norm:
            values["param_norm"] = global_norm(self._parameters, self._mesh)
        if self._zero_gradients is not None:
            values["grad_zeros"] = self._zero_gradients
            self._zero_gradients = None  # a step that the host skips counts none
        return values

    def _measure(
        self, state: TrainState, values: dict[str, float], times: dict[str, float]
    ) -> Record:
        """Returns the values of a report: the reduced ones, speed, time left, memory, data."""
        run = self._run
        energy_j = values.pop("energy_j")
        now = time.monotonic()  # the clock may be set back
        steps = state.steps_in_launch
        tokens = state.seen_in_launch[1]
        last_steps, last_tokens, last_time = self._last_report
        self._last_report = steps, tokens, now
        rate = 1000 * (tokens - last_tokens) / (steps - last_steps) / times["step_time_ms"]
        device_rate = rate / self._mesh.size("world")
        between_ms = times["eval_ms"] + times["checkpoint_ms"] + times["logging_ms"]
        pace = (times["step_time_ms"] + between_ms) / 1000 / state.current.sequences
        if steps > 1:  # the first step compiles and warms up
            self._paces.append(pace)
        eta_s = (state.sequences_at_end - state.sequences_seen) * statistics.fmean(
            self._paces or [pace]
        )
        peak_lr = run.config.optim.learning_rate
        record: Record = {
            **values,
            "lr": run.schedule(state.step, state.tokens_seen, peak_lr),
            "batch_rows": state.current.sequences,
            "batch_tokens": state.current.tokens,
            "tokens_per_sec_per_device": device_rate,
            "tokens_per_sec": rate,
            **self._utilization.metrics(device_rate),
            **times,
            **memory_stats(self._device),
            **(diagnostics(self._device) if self._cfg.diagnostics else {}),
            "eta_s": eta_s,
        }
        if eta_s < MAX_ETA_S:
            end = datetime.fromtimestamp(time.time() + eta_s)
            record["finish_at"] = end.strftime("%Y-%m-%d %H:%M")
        if energy_j:
            self._energy_j += energy_j
            record["power_w"] = energy_j / max(1e-9, now - last_time)
            record["energy_kwh"] = self._energy_j / 3.6e6
        assert state.current.batch is not None
        record["data_fingerprint"] = global_fingerprint(state.current.batch, self._mesh)
        consumption = state.stream.consumption()
        is_due = self._num_reports % SOURCES_INTERVAL == 0 or state.is_done
        self._num_reports += 1
        self._reports_sources = is_due or len(consumption) <= MAX_SOURCES
        if self._reports_sources:
            record |= _source_values(consumption)
        return record

    def log(self, state: TrainState, values: Mapping[str, Any]) -> Record:
        """Writes and returns a record of the last step: its counters and the values."""
        record = self._with_counters(state, values)
        state.current.metrics |= finite_numbers(record)
        self._file.write(record)
        state.current.record_error = self._file.problem
        for tracker in self._trackers:
            tracker.write(record)
        return record

    def log_text(self, state: TrainState, name: str, text: str) -> None:
        """Sends a text to the trackers; metrics.jsonl holds none."""
        for tracker in self._trackers:
            tracker.write(self._with_counters(state, {name: text}))

    def _with_counters(self, state: TrainState, values: Mapping[str, Any]) -> Record:
        return {
            "attempt": self._attempt,
            "step": state.step,
            "tokens_seen": state.tokens_seen,
            "samples_seen": state.sequences_seen,
            "time": round(time.time(), 3),
            **values,
        }

    def event(self, name: str, step: int, **fields: Any) -> None:
        """Writes an event to metrics.jsonl."""
        now = round(time.time(), 3)
        event = {"event": name, "attempt": self._attempt, "step": step, "time": now}
        self._file.write(event | fields)

    def close(self) -> None:
        """Closes the trackers, and logs the seconds that this launch spent in each phase."""
        for tracker in self._trackers:
            tracker.close()
        seconds = {f"{phase}_s": round(s, 3) for phase, s in self._timer.totals.items()}
        self.event("end", self._last_step, **seconds, **self._sources_at_end)
        self._file.close()


def _source_values(consumption: Consumption) -> Record:
    values = Record()
    for source, used in consumption.items():
        values[f"epoch/{source}"] = used["epoch"]
        values[f"tokens/{source}"] = used["tokens"]
    return values


class MetricsFile:
    """metrics.jsonl: one flat JSON object per line, append only.

    Opening removes a last line that a crash has cut short. `problem` says why the file cannot be
    written, such as a full disk; the run then saves a checkpoint and ends.
    """

    def __init__(self, path: Path) -> None:
        if is_file(path):
            os.truncate(path, _end_of_lines(path))
        self._file = open(path, "ab", buffering=0)  # noqa: SIM115 - open during the run
        self.problem = ""

    def write(self, record: Record) -> None:
        """Appends a record, unless there is a `problem`. NaN and infinity become null."""
        line = json.dumps(finite_json(record)).encode() + b"\n"
        try:
            while line and not self.problem:
                line = line[self._file.write(line) :]
        except OSError as error:
            self.problem = f"{self._file.name} cannot be written: {error.strerror}"

    def close(self) -> None:
        with suppress(OSError):
            self._file.close()


def _end_of_lines(path: Path) -> int:
    """Returns the bytes of the complete lines of a file, of which it reads only the last blocks."""
    with open(path, "rb") as file:
        stop = file.seek(0, os.SEEK_END)
        while stop > 0:
            start = max(0, stop - _BLOCK_BYTES)
            file.seek(start)
            newline = file.read(stop - start).rfind(b"\n")
            if newline >= 0:
                return start + newline + 1
            stop = start
    return 0


def report_line(record: Record, state: TrainState, num_devices: int, memory_bytes: int) -> str:
    """Returns a report as one line, with the mean loss of the interval.

    The first step of a launch compiles, so its line has no throughput and no time left. A line that
    is too long loses the rate per device first, then the step time, the norm, and so on.

    memory_bytes   those that a rank may use; 0 if unknown
    """
    masked = ""
    if record["masked_rows"]:
        masked = f"{record['masked_rows']:,} masked"
    fields = {
        "step": f"step {state.step}/{state.num_steps}",
        "loss": f"loss {record['loss_mean']:.4f}",
        "lr": f"lr {record['lr']:.2e}",
        "norm": f"norm {_short_norm(record['grad_norm'])}",
        "masked": masked,
    }
    if state.steps_in_launch > 1:
        fields["time"] = _step_time(record["step_time_ms"])
        fields["rate"] = f"{_rate(record['tokens_per_sec'])} tok/s"
        if num_devices > 1:
            fields["device rate"] = f"({_rate(record['tokens_per_sec_per_device'])} each)"
        if "mfu" in record:
            fields["mfu"] = f"mfu {record['mfu']:.0%}"
    fields["memory"] = _used_of(record["peak_mem_gib"], memory_bytes)
    if state.steps_in_launch > 1:
        fields["left"] = f"{_time_left(record['eta_s'])} left"
    for name in ("", "device rate", "time", "norm", "mfu", "memory"):
        fields.pop(name, None)
        line = "  ".join(filter(None, fields.values())).replace("  (", " (")
        if len(line) <= LINE_WIDTH - TIME_WIDTH:
            break
    return line


def _short_norm(norm: float) -> str:
    return f"{norm:.2f}" if 0.1 <= norm < 1000 else f"{norm:.3g}"


def _step_time(ms: float) -> str:
    return f"{ms:.0f} ms" if ms < 9999.5 else f"{ms / 1000:.1f} s"


def _rate(tokens_per_sec: float) -> str:
    return f"{tokens_per_sec:,.0f}" if tokens_per_sec < 99_999.5 else short(tokens_per_sec, 3)


def _used_of(peak_gib: float, available_bytes: int) -> str:
    """Returns the used and the available memory: 131/140 GiB, and 412 MiB/23 GiB below a GiB."""
    used = f"{peak_gib:.1f}" if peak_gib < 10 else f"{peak_gib:.0f}"
    unit = "GiB"
    if peak_gib < 1:
        used = f"{peak_gib * 1024:.0f}"
        unit = "MiB"
    if not available_bytes:
        return f"{used} {unit}"
    available = f"{available_bytes / 2**30:.0f} GiB"
    return f"{used}/{available}" if unit == "GiB" else f"{used} {unit}/{available}"


def _time_left(seconds: float) -> str:
    """Returns a rough time in few characters: 40s, 4m05s, 25m, 5h12m or 12d3h."""
    if seconds < 59.5:
        return f"{seconds:.0f}s"
    if seconds < 599.5:  # otherwise a short run would seem to stand still
        minutes, rest = divmod(round(seconds), 60)
        return f"{minutes}m{rest:02}s"
    hours, minutes = divmod(round(seconds / 60), 60)
    days, hours_of_day = divmod(hours, 24)
    if days:
        return f"{days}d{hours_of_day}h"
    return f"{hours}h{minutes:02}m" if hours else f"{minutes}m"
