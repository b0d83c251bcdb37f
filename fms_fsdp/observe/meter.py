"""The meter, which on report steps reads the outcome of the step from the device, and writes a record to log
and sinks.

Between reports nothing is read back. Every rank measures; the sinks and the log of rank 0 write it.
"""

from __future__ import annotations

import statistics
import time
from collections import deque
from datetime import datetime
from typing import Any

import torch

from fms_fsdp.data.batch import Batch
from fms_fsdp.distributed.dtensor import global_norm
from fms_fsdp.distributed.mesh import Mesh
from fms_fsdp.distributed.runtime import log, show_progress
from fms_fsdp.errors import RunFailed
from fms_fsdp.observe.metrics import Clock, Interval, count_zeros, memory, report_line
from fms_fsdp.observe.sensors import find_meter, read_all
from fms_fsdp.observe.sinks import Sinks
from fms_fsdp.observe.step_data import global_fingerprint
from fms_fsdp.observe.utilization import find_utilization
from fms_fsdp.run.health import SpikeDetector
from fms_fsdp.run.startup_log import Phases
from fms_fsdp.state import RunConfig, StepResult, TrainState


class Meter:
    """Writes a record for the first, the last and every `report_interval`-th step."""

    def __init__(
        self,
        run: RunConfig,
        device: torch.device,
        mesh: Mesh,
        state: TrainState,
        sinks: Sinks,
        clock: Clock,
        phases: Phases,
        local_rank: int = 0,
    ) -> None:
        self._run, self._device = run, device
        self._mesh, self._state, self._sinks = mesh, state, sinks
        self._clock, self._phases, self._section = clock, phases, run.config.log
        self._parameters = list(state.model.parameters())
        self._utilization = find_utilization(run, device)
        if device.type == "cuda" and self._utilization.peak_flops is None:
            name = torch.cuda.get_device_name(device)
            log.info("mfu is not reported: the peak of %s is not known; give --peak_tflops", name)
        self._spikes = SpikeDetector(run.config.training.spike_threshold)
        self._energy = find_meter(device, local_rank)
        self._sensors = {}
        if self._section.diagnostics:
            from fms_fsdp.extras.sensors import find_sensors

            self._sensors = find_sensors(device)
        beside = ("z_loss", "teacher_kl") if run.model.z_loss else ("teacher_kl",)
        self._interval = Interval(mesh, device, beside)
        self._zeros: torch.Tensor | None = None
        self._paces: deque[float] = deque(maxlen=20)  # seconds a row, of the last reports
        self._reported = 0, 0  # steps and tokens of this launch, by the last report
        self._energy_j, self._began = 0.0, time.time()
        if self._section.log_num_zeros:
            first = state.optimizers.optimizers[0]
            first.register_step_pre_hook(lambda *_: self._count_zeros(state))

    def log_if_due(self, state: TrainState, result: StepResult) -> bool:
        """Adds a step, and writes a record if one is due (collective); returns whether it was."""
        step, every = state.step, self._section.report_interval
        self._interval.add(result)
        if not self._is_due(state, step):
            following = min(state.num_steps, (step // every + 1) * every)
            show_progress(f"step {step}/{state.num_steps} · next report at step {following}")
            if self._section.print_interval and step % self._section.print_interval == 0:
                log.info(
                    "step %d/%d at %s",
                    step,
                    state.num_steps,
                    datetime.now().strftime("%H:%M:%S"),
                )
            return False
        assert state.batch is not None
        energy_j, masked_rows = self._energy.read_j(), self._state.stream.num_masked_rows
        values = self._interval.read(
            result, energy_j, masked_rows, self._alike_on_all_ranks(result)
        )
        self._clock.mark("report")
        measured = self._record(state, values, self._clock.read(), state.batch)
        record = self._sinks.write(state, measured)
        state.record_error = self._sinks.problem
        validation = state.validation[1] if state.validation else None
        is_first = state.steps_in_launch == 1
        log.info(report_line(record, state.num_steps, validation, with_pace=not is_first))
        if is_first:
            self._tell_phases(step)
        self._tell_spike(step, record)
        return True

    def finish(self) -> None:
        """Raises RunFailed if the records could not be written."""
        if self._sinks.problem:
            remedy = "make room and start the run again: the run goes on from the newest checkpoint"
            raise RunFailed(f"{self._sinks.problem}; {remedy}")

    def _is_due(self, state: TrainState, step: int) -> bool:
        always = (1, state.start + 1, state.num_steps)
        return step in always or step % self._section.report_interval == 0

    def _alike_on_all_ranks(self, result: StepResult) -> dict[str, torch.Tensor]:
        extra = {} if result.loss_scale is None else {"loss_scale": result.loss_scale}
        if self._section.log_param_norm:
            extra["param_norm"] = global_norm(self._parameters, self._mesh)
        if self._zeros is not None:
            extra["grad_zeros"] = self._zeros
        return extra

    def _count_zeros(self, state: TrainState) -> None:
        """Counts the zeros of the gradient if the step that is being made will be reported (collective: every
        rank)."""
        if self._is_due(state, state.step + 1):
            self._zeros = count_zeros(self._parameters, self._mesh)

    def _record(
        self, state: TrainState, values: dict[str, float], times: dict[str, float], batch: Batch
    ) -> dict[str, Any]:
        run, energy_j = self._run, values.pop("energy_j")
        done = state.steps_in_launch, state.seen_in_launch[1]
        steps, tokens = (now - before for now, before in zip(done, self._reported, strict=True))
        self._reported = done
        rate = 1000 * tokens / steps / times["step_time_ms"]
        beside = times["eval_ms"] + times["checkpoint_ms"] + times["logging_ms"]
        left = state.samples_at_end - state.samples_seen
        pace = (times["step_time_ms"] + beside) / 1000 / state.batch_samples
        if state.steps_in_launch > 1:  # the first step compiles and warms up
            self._paces.append(pace)
        now, eta_s = time.time(), left * statistics.fmean(self._paces or [pace])
        own_rate = rate / self._mesh.size("world")
        record: dict[str, Any] = {
            **values,
            "lr": run.schedule(state.step, state.tokens_seen, run.config.optim.learning_rate),
            "batch_rows": state.batch_samples,
            "batch_tokens": state.batch_tokens,
            "tokens_per_sec_per_device": own_rate,
            "tokens_per_sec": rate,
            **self._utilization.of(own_rate),
            **times,
            **memory(self._device),
            **read_all(self._sensors),
            "eta_s": eta_s,
            "finish_at": datetime.fromtimestamp(now + eta_s).strftime("%Y-%m-%d %H:%M"),
        }
        if energy_j:
            self._energy_j += energy_j
            record["power_w"] = energy_j / max(1e-9, now - self._began)
            record["energy_kwh"] = self._energy_j / 3.6e6
        self._began = now
        record["data_fingerprint"] = global_fingerprint(batch, self._mesh)
        for source, used in self._state.stream.consumption().items():
            record |= {f"epoch/{source}": used["epoch"], f"tokens/{source}": used["tokens"]}
        return record

    def _tell_phases(self, step: int) -> None:
        self._phases.done("first step")
        log.info(self._phases.text())
        seconds = {
            f"{name.replace(' ', '_')}_s": spent for name, spent in self._phases.seconds.items()
        }
        self._sinks.event("start", step, world_size=self._mesh.size("world"), **seconds)

    def _tell_spike(self, step: int, record: dict[str, Any]) -> None:
        if not self._spikes.is_spike(record["loss"]):
            return
        first, stop = step - self._section.report_interval, step + self._section.report_interval
        log.warning(
            "step %d: the loss is a spike; data of the step: python -m fms_fsdp inspect step --step=%d; to "
            "pass over such data, go back with --resume_step and use --skip_steps=%d:%d",
            *(step, step, first, stop),
        )
        self._sinks.event(
            "spike", step, loss=record["loss"], data_fingerprint=record["data_fingerprint"]
        )
