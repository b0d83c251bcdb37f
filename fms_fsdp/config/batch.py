"""The batch: global batch = batch_size x data-parallel size x grad_accum_steps sequences.

With a ramp this is the batch at its end; before it
    batch = start + increment * floor(samples_seen * n / samples)    n = (end - start) / increment
rounded down to --rampup_round. Source: Megatron-LM's --rampup-batch-size.
"""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

from fms_fsdp.config.training import TrainingConfig
from fms_fsdp.config.values import counted
from fms_fsdp.errors import UserError

MAX_INCREMENTS = 10_000


class Phase(NamedTuple):
    """Steps with one batch size; `step` steps and `sample` sequences come before them."""

    step: int
    sample: int
    batch: int


@dataclass(frozen=True)
class BatchPlan:
    """The batch of each step.

    `rampup`: start, increment, samples and, unless it is 1, multiple; () without a ramp.
    """

    batch_size: int  # sequences per micro-batch and rank
    grad_accum_steps: int
    dp_size: int
    rampup: tuple[int, ...] = ()
    cuts_micro_steps: bool = False  # --rampup_micro_batch: smaller micro-batches before the end

    @property
    def global_batch_size(self) -> int:
        return self.batch_size * self.dp_size * self.grad_accum_steps

    @property
    def factors(self) -> str:
        """Returns the factors of the global batch for the log."""
        factors = {
            "sequence": self.batch_size,
            "rank": self.dp_size,
            "accumulation step": self.grad_accum_steps,
        }
        return " x ".join(counted(number, noun) for noun, number in factors.items())

    @property
    def increments(self) -> int:
        return (self.global_batch_size - self.rampup[0]) // self.rampup[1]

    def batch_at(self, samples_seen: int) -> int:
        """Returns the global batch size of the step after `samples_seen` sequences."""
        if not self.rampup or samples_seen >= self.rampup[2]:
            return self.global_batch_size
        start, increment, samples, *rounding = self.rampup
        multiple = rounding[0] if rounding else 1
        batch = start + increment * (samples_seen * self.increments // samples)
        return max(batch // multiple, 1) * multiple

    def micro_batch_at(self, local_batch: int) -> int:
        """Returns the micro-batch size of a step with `local_batch` sequences on this rank."""
        if not self.cuts_micro_steps:
            return self.batch_size
        return max(divisors(local_batch, self.batch_size))

    def micro_batch_sizes(self, most: int = 4096) -> list[int]:
        """Returns the sizes of a micro-batch, up to `most`, that divide every batch of the run.

        They are tried one by one, hence the limit.
        """
        unit = self.batch_size * self.grad_accum_steps
        if self.rampup and not self.cuts_micro_steps:
            start, increment, _, *rounding = self.rampup
            common = math.gcd(start, increment, self.global_batch_size)
            multiple = rounding[0] if rounding else 1
            unit = (multiple if common % multiple else common) // self.dp_size
        return divisors(max(unit, 1), most)

    def phases(self, samples_seen: int = 0) -> tuple[Phase, ...]:
        """Returns the phases of the steps after `samples_seen`, counted from there."""
        return _phases(self, samples_seen)

    def samples_in(self, steps: int, samples_seen: int = 0) -> int:
        """Returns the sequences of the next `steps` steps."""
        phases = self.phases(samples_seen)
        phase = phases[bisect_right(phases, steps, key=lambda each: each.step) - 1]
        return phase.sample + (steps - phase.step) * phase.batch

    def steps_for(self, samples: int, samples_seen: int = 0) -> int:
        """Returns the minimum number of next steps with at least `samples` sequences."""
        phases = self.phases(samples_seen)
        phase = phases[max(0, bisect_left(phases, samples, key=lambda each: each.sample) - 1)]
        return phase.step + max(0, -(-(samples - phase.sample) // phase.batch))


@lru_cache(maxsize=16)  # a ramp may have 10,000 phases, and every step asks for its batch
def _phases(plan: BatchPlan, samples_seen: int) -> tuple[Phase, ...]:
    found = [Phase(0, 0, plan.batch_at(samples_seen))]
    while (last := found[-1]).batch != plan.global_batch_size:
        seen, samples, n = samples_seen + last.sample, plan.rampup[2], plan.increments
        changes = (-(-i * samples // n) for i in range(seen * n // samples + 1, n + 1))
        change = next(at for at in changes if plan.batch_at(at) != last.batch)
        steps = -(-(change - seen) // last.batch)
        sample = last.sample + steps * last.batch
        found.append(Phase(last.step + steps, sample, plan.batch_at(samples_seen + sample)))
    return tuple(found)


def divisors(total: int, most: int) -> list[int]:
    return [number for number in range(1, min(total, most) + 1) if total % number == 0]


def last_step(
    cfg: TrainingConfig,
    batch: BatchPlan,
    seq_length: int,
    step: int = 0,
    samples_seen: int = 0,
    tokens_seen: int = 0,
) -> int:
    """Returns the last step of a run by its length in steps, tokens or samples.

    `step`, `samples_seen`, `tokens_seen`: the progress so far.
    """
    if cfg.num_tokens is None and cfg.num_samples is None:
        return 1000 if cfg.num_steps is None else cfg.num_steps
    tokens = (cfg.num_samples or 0) * seq_length if cfg.num_tokens is None else cfg.num_tokens
    samples = -(-(tokens - tokens_seen) // seq_length)
    return max(step + batch.steps_for(samples, samples_seen), 1)


def global_batch(cfg: TrainingConfig, dp_size: int) -> int:
    """Returns the sequences per step of a new run; without flags 2 per rank."""
    factors = (cfg.micro_batch_size or 2) * (cfg.grad_accum_steps or 1)
    return cfg.global_batch_size or factors * dp_size


def plan_batch(
    cfg: TrainingConfig, dp_size: int, kept: BatchPlan | None = None, keep_name: str = ""
) -> BatchPlan:
    """Returns the batch of the run: two of three factors give the third.

    kept   the batch of the checkpoint whose global batch a resumed run keeps on any number of ranks;
           its micro-batch, or --batch_size, is then a maximum

    Raises:
        UserError: the factors contradict each other, or do not divide; with valid values.
    """
    accum = cfg.grad_accum_steps
    if kept is None:
        total = global_batch(cfg, dp_size)
        micro = cfg.micro_batch_size
        largest = micro or 2
    else:
        total = kept.global_batch_size
        micro = cfg.micro_batch_size if accum else None
        largest = cfg.micro_batch_size or kept.batch_size

    factors = {"--batch_size": micro, "--grad_accum_steps": accum}
    given = {name: value for name, value in factors.items() if value}
    unit = dp_size * math.prod(given.values())
    if total % unit or (len(given) == 2 and total != unit):
        raise UserError(_batch_error(total, dp_size, given, unit, keep_name if kept else ""))

    per_rank = total // dp_size
    if accum:
        size = per_rank // accum
    elif micro:
        size = micro
    else:
        whole = BatchPlan(per_rank, 1, dp_size, cfg.rampup, cfg.rampup_micro_batch)
        size = whole.micro_batch_sizes(largest)[-1]
    plan = BatchPlan(size, per_rank // size, dp_size, cfg.rampup, cfg.rampup_micro_batch)
    if plan.rampup:
        check_ramp(plan, keeps_steps=accum is not None)
    return plan


def _batch_error(total: int, dp_size: int, given: dict[str, int], unit: int, keep_name: str) -> str:
    terms = " x ".join([f"data-parallel size {dp_size}", *(f"{n}={v}" for n, v in given.items())])
    name = "the run's global batch" if keep_name else "--global_batch_size"
    if len(given) == 2:
        rule, closest = f"must equal {terms} = {unit}", [unit]
    else:
        rule = f"must be divisible by {unit} (= {terms})"
        closest = [n for n in (total // unit * unit, (total // unit + 1) * unit) if n]
    fix = " or ".join(map(str, closest))
    fix = (
        f"set --global_batch_size={fix} {keep_name}"
        if keep_name
        else f"closest valid values: {fix}"
    )
    if total % dp_size:
        ranks = ", ".join(map(str, divisors(total, 65_536)[:40]))
        fix += f"; or a data-parallel size of {ranks}"
    return f"{name}={total} {rule}; {fix}"


def check_ramp(plan: BatchPlan, *, keeps_steps: bool = False) -> None:
    """Raises UserError unless the ramp ends at the global batch and every batch divides.

    `keeps_steps`: --grad_accum_steps is set, so another batch_size is not a fix.
    """
    (start, increment, samples, *rounding), end = plan.rampup, plan.global_batch_size
    multiple = rounding[0] if rounding else 1
    quoted = f"--rampup_batch_size={start},{increment},{samples}"
    if start >= end:
        raise UserError(
            f"{quoted} must start below --global_batch_size={end}; lower the start, or set a larger "
            "--global_batch_size"
        )
    increments, rest = divmod(end - start, increment)
    if rest or not 1 <= increments <= MAX_INCREMENTS:
        raise UserError(
            f"{quoted} must reach --global_batch_size={end} in 1 to {MAX_INCREMENTS:,} whole "
            f"increments; choose an increment that divides {end - start}"
        )
    if end % multiple:
        near = math.gcd(end, multiple)
        raise UserError(f"--rampup_round={multiple} must divide {end}; for example {near}")
    unit = plan.dp_size * (1 if plan.cuts_micro_steps else plan.batch_size)
    batches = [start + i * increment for i in range(increments + 1)]
    wrong = [b for b in batches if max(b // multiple, 1) * multiple % unit]
    if wrong:
        fixes = [f"--rampup_round={unit}"] if end % unit == 0 else []
        common = math.gcd(start, increment, end)
        if common % plan.dp_size == 0:
            fixes += [f"--batch_size={common // plan.dp_size}"] * (not keeps_steps)
            fixes.append("--rampup_micro_batch=True")
        raise UserError(
            f"{quoted} must have only batches divisible by {unit} (= data-parallel size x "
            f"batch_size), unlike {', '.join(map(str, wrong[:5]))}; set "
            f"{' or '.join(fixes) or 'another start and increment'}"
        )
