"""The batch: global batch = batch_size x data-parallel size x grad_accum_steps sequences.

With a ramp this is the batch at its end; before it
    batch = start + increment * floor(sequences_seen * n / num_sequences)    n = (end - start) / increment
rounded down to --rampup_round. Source: Megatron-LM's --rampup-batch-size.

Example: --rampup_batch_size=8,8,100 --global_batch_size=32, so n = 3
    sequences seen  0-33   34-66   67-99   from 100
    batch              8      16      24         32
"""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import NamedTuple

from fms_fsdp.config.training import TrainingConfig
from fms_fsdp.config.values import counted
from fms_fsdp.errors import UserError

DEFAULT_NUM_STEPS = 1000
DEFAULT_BATCH_SIZE = 2
MAX_INCREMENTS = 10_000


class Phase(NamedTuple):
    """Steps with one batch size; `step` steps and `sequence` sequences come before them."""

    step: int
    sequence: int
    batch: int


class Ramp(NamedTuple):
    """A growing batch, in the order of --rampup_batch_size and --rampup_round."""

    start: int  # sequences in the first batch
    increment: int
    num_sequences: int  # after which the global batch is reached
    multiple: int = 1  # each batch is rounded down to a multiple of this

    def round_down(self, batch: int) -> int:
        """Returns the batch as a multiple; at least one multiple, because no step is empty."""
        return max(batch // self.multiple, 1) * self.multiple


@dataclass(frozen=True)
class BatchPlan:
    """The batch of each step.

    `rampup`: start, increment, number of sequences and, unless it is 1, multiple; () without a ramp.
    """

    batch_size: int  # sequences per micro-batch and rank
    grad_accum_steps: int
    dp_size: int
    rampup: tuple[int, ...] = ()
    ramps_micro_batch: bool = False  # --rampup_micro_batch: smaller micro-batches before the end

    @property
    def global_batch_size(self) -> int:
        return self.batch_size * self.dp_size * self.grad_accum_steps

    @property
    def factors(self) -> str:
        """Returns the factors of the global batch for the log."""
        sequences = counted(self.batch_size, "sequence")
        ranks = counted(self.dp_size, "rank")
        steps = counted(self.grad_accum_steps, "accumulation step")
        return f"{sequences} x {ranks} x {steps}"

    @cached_property
    def ramp(self) -> Ramp:
        return Ramp(*self.rampup)

    @cached_property
    def increments(self) -> int:
        return (self.global_batch_size - self.ramp.start) // self.ramp.increment

    def batch_at(self, sequences_seen: int) -> int:
        """Returns the global batch size of the step after `sequences_seen` sequences."""
        if not self.rampup or sequences_seen >= self.ramp.num_sequences:
            return self.global_batch_size
        ramp = self.ramp
        increments_so_far = sequences_seen * self.increments // ramp.num_sequences
        return ramp.round_down(ramp.start + increments_so_far * ramp.increment)

    def micro_batch_at(self, local_batch: int) -> int:
        """Returns the micro-batch size of a step with `local_batch` sequences on this rank."""
        if not self.ramps_micro_batch:
            return self.batch_size
        return max(divisors(local_batch, self.batch_size))

    def micro_batch_sizes(self, most: int = 4096) -> list[int]:
        """Returns the sizes of a micro-batch, up to `most`, that divide every batch of the run.

        They are tried one by one, hence the limit.
        """
        unit = self.batch_size * self.grad_accum_steps
        if self.rampup and not self.ramps_micro_batch:
            ramp = self.ramp
            common = math.gcd(ramp.start, ramp.increment, self.global_batch_size)
            if common % ramp.multiple:
                common = ramp.multiple  # rounding changes batches: only this divides all of them
            unit = common // self.dp_size
        return divisors(max(unit, 1), most)

    def phases(self, sequences_seen: int = 0) -> tuple[Phase, ...]:
        """Returns the phases of the steps after `sequences_seen`, counted from there."""
        return _phases(self, sequences_seen)

    def sequences_in(self, steps: int, sequences_seen: int = 0) -> int:
        """Returns the sequences of the next `steps` steps."""
        phases = self.phases(sequences_seen)
        index = bisect_right(phases, steps, key=lambda phase: phase.step) - 1
        phase = phases[index]  # the last one that begins within these steps
        return phase.sequence + (steps - phase.step) * phase.batch

    def steps_for(self, num_sequences: int, sequences_seen: int = 0) -> int:
        """Returns the minimum number of next steps with at least `num_sequences` sequences."""
        phases = self.phases(sequences_seen)
        index = bisect_left(phases, num_sequences, key=lambda phase: phase.sequence) - 1
        phase = phases[max(0, index)]  # the one in which the last of these sequences is read
        steps = ceil_div(num_sequences - phase.sequence, phase.batch)
        return phase.step + max(0, steps)


@lru_cache(maxsize=16)  # a ramp may have 10,000 phases, and every step asks for its batch
def _phases(plan: BatchPlan, sequences_seen: int) -> tuple[Phase, ...]:
    phases = [Phase(step=0, sequence=0, batch=plan.batch_at(sequences_seen))]
    while phases[-1].batch != plan.global_batch_size:
        last = phases[-1]
        seen = sequences_seen + last.sequence
        # No batch changes within a step: the step that crosses the change is still of this phase.
        steps = ceil_div(_next_change(plan, seen) - seen, last.batch)
        sequence = last.sequence + steps * last.batch
        phases.append(Phase(last.step + steps, sequence, plan.batch_at(sequences_seen + sequence)))
    return tuple(phases)


def _next_change(plan: BatchPlan, seen: int) -> int:
    """Returns the first number of sequences above `seen` at which the batch of a ramp changes."""
    num_sequences = plan.ramp.num_sequences
    n = plan.increments
    batch = plan.batch_at(seen)
    increments_so_far = seen * n // num_sequences
    for i in range(increments_so_far + 1, n):
        at = ceil_div(i * num_sequences, n)
        if plan.batch_at(at) != batch:  # rounding hides some increments
            return at
    return num_sequences


def ceil_div(a: int, b: int) -> int:
    """Returns a / b, rounded up."""
    return -(-a // b)


def divisors(total: int, limit: int) -> list[int]:
    """Returns the divisors of `total` up to `limit`, ascending."""
    return [number for number in range(1, min(total, limit) + 1) if total % number == 0]


def last_step(
    cfg: TrainingConfig,
    batch: BatchPlan,
    seq_length: int,
    step: int = 0,
    sequences_seen: int = 0,
    tokens_seen: int = 0,
) -> int:
    """Returns the last step of a run by its length in steps, tokens or samples.

    `step`, `sequences_seen`, `tokens_seen`: the progress so far.
    """
    if cfg.num_tokens is not None:
        tokens = cfg.num_tokens
    elif cfg.num_samples is not None:
        tokens = cfg.num_samples * seq_length
    elif cfg.num_steps is not None:
        return cfg.num_steps
    else:
        return DEFAULT_NUM_STEPS
    sequences_left = ceil_div(tokens - tokens_seen, seq_length)
    return max(step + batch.steps_for(sequences_left, sequences_seen), 1)


def global_batch(cfg: TrainingConfig, dp_size: int) -> int:
    """Returns the sequences per step of a new run; without flags 2 per rank."""
    if cfg.global_batch_size:
        return cfg.global_batch_size
    batch_size = cfg.micro_batch_size or DEFAULT_BATCH_SIZE
    return batch_size * (cfg.grad_accum_steps or 1) * dp_size


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
        largest = micro or DEFAULT_BATCH_SIZE
    else:
        total = kept.global_batch_size
        micro = None  # without `accum` the flag is only a maximum
        if accum:
            micro = cfg.micro_batch_size
        largest = cfg.micro_batch_size or kept.batch_size

    given = dict[str, int]()
    if micro:
        given["--batch_size"] = micro
    if accum:
        given["--grad_accum_steps"] = accum
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
    factors = f"data-parallel size {dp_size}"
    for name, value in given.items():
        factors += f" x {name}={value}"
    if len(given) == 2:  # with the data-parallel size, every factor is set
        rule = f"must equal {factors} = {unit}"
        valid = [unit]
    else:
        rule = f"must be divisible by {unit} (= {factors})"
        below = total // unit * unit
        valid = [below, below + unit]
        if not below:
            valid = [unit]
    values = " or ".join(map(str, valid))
    if keep_name:
        error = (
            f"the run's global batch={total} {rule}; set --global_batch_size={values} {keep_name}"
        )
    else:
        error = f"--global_batch_size={total} {rule}; closest valid values: {values}"
    if total % dp_size:
        # A large batch has too many divisors to try them all, and to print them all.
        sizes = ", ".join(map(str, divisors(total, 65_536)[:40]))
        error += f"; or a data-parallel size of {sizes}"
    return error


def check_ramp(plan: BatchPlan, *, keeps_steps: bool = False) -> None:
    """Raises UserError unless the ramp ends at the global batch and every batch divides.

    `keeps_steps`: --grad_accum_steps is set, so another batch_size is not a fix.
    """
    ramp = plan.ramp
    end = plan.global_batch_size
    quoted = f"--rampup_batch_size={ramp.start},{ramp.increment},{ramp.num_sequences}"
    if ramp.start >= end:
        raise UserError(
            f"{quoted} must start below --global_batch_size={end}; lower the start, or set a larger "
            "--global_batch_size"
        )
    increments, remainder = divmod(end - ramp.start, ramp.increment)
    if remainder or not 1 <= increments <= MAX_INCREMENTS:
        raise UserError(
            f"{quoted} must reach --global_batch_size={end} in 1 to {MAX_INCREMENTS:,} whole "
            f"increments; choose an increment that divides {end - ramp.start}"
        )
    if end % ramp.multiple:
        near = math.gcd(end, ramp.multiple)
        raise UserError(f"--rampup_round={ramp.multiple} must divide {end}; for example {near}")

    unit = plan.dp_size
    if not plan.ramps_micro_batch:
        unit *= plan.batch_size
    batches = range(ramp.start, end + 1, ramp.increment)
    wrong = [batch for batch in batches if ramp.round_down(batch) % unit]
    if not wrong:
        return
    fixes = []
    if end % unit == 0:
        fixes.append(f"--rampup_round={unit}")
    common = math.gcd(ramp.start, ramp.increment, end)
    if common % plan.dp_size == 0:
        if not keeps_steps:
            fixes.append(f"--batch_size={common // plan.dp_size}")
        fixes.append("--rampup_micro_batch=True")
    raise UserError(
        f"{quoted} must have only batches divisible by {unit} (= data-parallel size x "
        f"batch_size), unlike {', '.join(map(str, wrong[:5]))}; set "
        f"{' or '.join(fixes) or 'another start and increment'}"
    )
