"""The batch of a run: global_batch_size = batch_size × data-parallel size × grad_accum_steps rows.

With a ramp that is the batch at its end; before it, steps have fewer micro-steps of as many rows.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from fms_fsdp.config.ramp import MAX_INCREMENTS, BatchRamp
from fms_fsdp.config.training import TrainingConfig
from fms_fsdp.config.values import joined
from fms_fsdp.errors import UserError


@dataclass(frozen=True)
class BatchPlan:
    """Rows of a micro-step on one rank, micro-steps of a step, and data-parallel ranks; `rampup`: start,
    increment and samples of the ramp to it."""

    batch_size: int
    grad_accum_steps: int
    dp_size: int
    rampup: tuple[int, ...] = ()

    @property
    def global_batch_size(self) -> int:
        return self.batch_size * self.dp_size * self.grad_accum_steps

    @property
    def ramp(self) -> BatchRamp:
        return BatchRamp.to(self.global_batch_size, self.rampup)


def divisors(total: int, most: int) -> list[int]:
    """The divisors of `total` up to `most`, for messages."""
    return [number for number in range(1, min(total, most) + 1) if total % number == 0]


def resolve_batch(section: TrainingConfig, dp_size: int) -> BatchPlan:
    """The three batch sizes from two of them; with fewer, batch_size is 2 and grad_accum_steps is 1.

    Raises:
        UserError: the three contradict one another, or the global batch does not divide over the ranks.
    """
    rows, accum, total = section.batch_size, section.grad_accum_steps, section.global_batch_size
    if total is None:
        rows, accum = rows or 2, accum or 1
        total = rows * accum * dp_size
    _check_factors(section, total, dp_size)
    check_rampup(section.rampup_batch_size, total)
    per_rank = total // dp_size
    if rows is None:
        unit = BatchRamp.to(total, section.rampup_batch_size).unit
        rows = per_rank // accum if accum else (2 if unit % (2 * dp_size) == 0 else 1)
    return _with_ramp(section, BatchPlan(rows, per_rank // rows, dp_size))


def check_divides(total: int, dp_size: int) -> None:
    """Raises UserError unless a global batch of `total` rows divides over so many data-parallel ranks."""
    if total % dp_size:
        ranks = joined(divisors(total, max(4096, 2 * dp_size)))
        raise UserError(
            f"--global_batch_size ({total}) must be a multiple of the number of data-parallel ranks "
            f"({dp_size}); choose {_multiples(total, dp_size)}, or a number of ranks among {ranks}"
        )


def _multiples(total: int, unit: int) -> str:
    """The multiples of `unit` around `total`, as the flag that is to be given."""
    return " or ".join(f"--global_batch_size={n * unit}" for n in (total // unit, total // unit + 1) if n)


def _check_factors(section: TrainingConfig, total: int, dp_size: int) -> None:
    """Raises UserError unless the two factors, of which one or both may be left out, make `total` rows."""
    names = ("batch_size", "grad_accum_steps")
    given = {name: value for name in names if (value := getattr(section, name)) is not None}
    if not given:
        return check_divides(total, dp_size)
    product = math.prod(given.values()) * dp_size
    if total == product or (len(given) == 1 and total % product == 0):
        return
    ranks = f" x {dp_size} data-parallel ranks" if dp_size > 1 else ""
    factors = " x ".join(f"--{name} ({value})" for name, value in given.items()) + ranks
    if len(given) == 2:
        rule = f"must be {factors}; leave it out, or choose --global_batch_size={product}"
    else:
        ((name, value),) = given.items()
        other = ""
        if total % dp_size == 0:
            other = f"--{name}={max(divisors(total // dp_size, min(value, 4096)))} or "
        rule = f"must be a multiple of {factors}; choose {other}{_multiples(total, product)}"
    raise UserError(f"--global_batch_size ({total}) {rule}")


def check_rampup(rampup: tuple[int, ...], end: int) -> None:
    """Raises UserError unless start, increment and samples of a ramp lead to a batch of `end` rows."""
    if not rampup:
        return
    if len(rampup) != 3:
        raise UserError(
            f"--rampup_batch_size ({joined(rampup)}) must be start,increment,samples; write 16,16,5_000_000"
        )
    start, increment, _ = rampup
    if start >= end or (end - start) % increment or (end - start) // increment > MAX_INCREMENTS:
        raise UserError(
            f"--rampup_batch_size ({joined(rampup)}) must lead from {start} rows to the global batch ({end}) "
            f"in whole increments, at most {MAX_INCREMENTS:,} of them; choose a start below it and an "
            f"increment that divides {max(1, end - start)}"
        )


def _with_ramp(section: TrainingConfig, batch: BatchPlan) -> BatchPlan:
    """`batch` with the ramp that leads to it.

    Raises:
        UserError: one of the ramp's batches does not divide over the ranks.
    """
    if not section.rampup_batch_size:
        return batch
    start, increment, samples = rampup = section.rampup_batch_size
    micro_step, end = batch.batch_size * batch.dp_size, batch.global_batch_size
    if start % micro_step == 0 and increment % micro_step == 0:
        return replace(batch, rampup=rampup)
    remedies = []
    rows, rest = divmod(math.gcd(start, increment, end), batch.dp_size)
    if not rest:
        others = f" --grad_accum_steps={end // (rows * batch.dp_size)}" if section.grad_accum_steps else ""
        remedies.append(f"write --batch_size={rows}{others}")
    if (multiple := max(1, start // micro_step) * micro_step) < end:
        steps, way = (end - start) // increment, (end - multiple) // micro_step  # at least one, and as before
        fitting = next(each for each in range(min(steps, way), 0, -1) if way % each == 0)
        remedies.append(f"write --rampup_batch_size={multiple},{way // fitting * micro_step},{samples}")
    batches = [start + increment * each for each in range(min(5, (end - start) // increment))]
    shown = f"{joined(batches)}{',…' if batches[-1] + increment < end else ''},{end}"
    raise UserError(
        f"--rampup_batch_size ({joined(rampup)}) must have only batches that are divisible by data-parallel "
        f"size ({batch.dp_size}) x batch_size ({batch.batch_size}), and has {shown}; "
        f"{' or '.join([*remedies, 'leave it out'])}"
    )


def keep_global_batch(
    section: TrainingConfig, dp_size: int, *, total: int, usual_rows: int, keep_name: str = ""
) -> BatchPlan:
    """The batch of a run that goes on with a global batch of `total` rows on any number of ranks.

    A global batch that is given is the new one. Otherwise `batch_size`, or else `usual_rows`, is the largest
    number of rows in a micro-step.

    Raises:
        UserError: `total` does not divide over the ranks, or the flags give another product.
    """
    rows, accum = section.batch_size, section.grad_accum_steps
    if section.global_batch_size is not None:
        return resolve_batch(section, dp_size)
    if total % dp_size:
        valid = divisors(total, 65536)
        raise UserError(
            f"number of data-parallel ranks ({dp_size}) must divide the run's global batch ({total} rows); "
            f"valid numbers: {joined(valid)}; or choose another batch with "
            f"--global_batch_size=ROWS {keep_name}"
        )
    check_rampup(section.rampup_batch_size, total)
    per_rank = total // dp_size
    if accum is None:
        unit = max(1, BatchRamp.to(total, section.rampup_batch_size).unit // dp_size)
        cap = min(rows or usual_rows, unit)
        fitting = next(size for size in range(cap, 0, -1) if unit % size == 0)
        return _with_ramp(section, BatchPlan(fitting, per_rank // fitting, dp_size))
    if per_rank % accum or (rows is not None and rows * accum != per_rank):
        product = f"{rows or 'batch_size'} rows x {dp_size} ranks x {accum} micro-steps"
        raise UserError(
            f"--grad_accum_steps ({accum}) must keep the run's global batch ({total} rows), and {product} "
            f"does not; leave it out, or choose another batch with --global_batch_size=ROWS {keep_name}"
        )
    return _with_ramp(section, BatchPlan(per_rank // accum, accum, dp_size))
