"""How long a whole run takes: the time of its steps, and what saves, validations and restarts add."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache
from typing import TYPE_CHECKING

from fms_fsdp.checkpoint.retention import parse_schedule
from fms_fsdp.config import TrainConfig
from fms_fsdp.config.ramp import BatchIntervals
from fms_fsdp.predict.speed import step_time

if TYPE_CHECKING:
    from fms_fsdp.planner.plan import Plan

DAY_S = 86400.0


@dataclass(frozen=True)
class Stops:
    """What interrupts a run: seconds of a save, of a validation and of a restart, and restarts a week."""

    save_s: float
    eval_s: float
    restarts_a_week: float
    restart_s: float


@dataclass(frozen=True)
class Estimate:
    """Days of a training: computing, without and with recomputation, and what interruptions add."""

    plain_days: float
    recomputing_days: float
    save_days: float
    eval_days: float
    restart_days: float

    @property
    def worst_days(self) -> float:
        return self.recomputing_days + self.save_days + self.eval_days + self.restart_days


def with_stops(config: TrainConfig, stops: Stops, steps: int, plain_s: float, longest_s: float) -> Estimate:
    """The days of a run whose steps take between `plain_s` and `longest_s` seconds in all. A launch that ends
    early loses half of what lies between two saves."""
    section, every = config.checkpoint, config.eval.eval_interval
    saves = parse_schedule(section.checkpoint_schedule, section.checkpoint_interval).count(1, steps)
    between: float = section.checkpoint_interval or steps
    if section.checkpoint_schedule:
        between = steps / max(1, saves)
    lost_s = stops.restart_s + min(between, steps) / 2 * longest_s / steps
    return Estimate(
        plain_days=plain_s / DAY_S,
        recomputing_days=longest_s / DAY_S,
        save_days=saves * stops.save_s / DAY_S,
        eval_days=(steps // every if every else 0) * stops.eval_s / DAY_S,
        restart_days=stops.restarts_a_week * longest_s / (7 * DAY_S) * lost_s / DAY_S,
    )


@dataclass(frozen=True)
class WholeRun:
    """The run of a plan: its steps and tokens, its days, and the energy of its devices."""

    steps: int
    tokens: int
    days: Estimate
    kwh: float


def whole_run(plan: Plan, stops: Stops) -> WholeRun:
    """The run of a plan. Each batch of a ramp has the time of its own, smaller number of micro-steps."""
    batch, work, cluster = plan.batch, plan.work, plan.cluster
    batches = BatchIntervals(batch.ramp)
    steps = plan.config.training.steps_at(batches, work.seq_length)

    @cache
    def seconds_of(rows: int) -> float:
        at_once = batch.rows_at_once(rows // batch.dp_size)
        own = replace(batch, batch_size=at_once, grad_accum_steps=rows // batch.dp_size // at_once)
        return step_time(replace(work, batch=own)).total

    ends = [interval.step for interval in batches.intervals[1:]] + [steps]
    seconds = 0.0
    for interval, end in zip(batches.intervals, ends, strict=True):
        if (number := min(end, steps) - interval.step) > 0:
            seconds += number * seconds_of(interval.batch)
    days = with_stops(plan.config, stops, steps, seconds, seconds)
    kwh = cluster.hardware.watts * cluster.num_devices * days.worst_days * 24 / 1000
    return WholeRun(steps, batches.rows_of(steps) * work.seq_length, days, kwh)
