"""The batch of a run: global_batch_size = batch_size × data-parallel size × grad_accum_steps rows.

With a ramp that is the batch at its end; before it, steps have fewer micro-steps of as many rows, or, with
--rampup_micro_batch, of fewer rows.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from fms_fsdp.config.ramp import MAX_INCREMENTS, BatchRamp
from fms_fsdp.config.rule import Rule, judge
from fms_fsdp.config.training import TrainingConfig
from fms_fsdp.config.values import joined


@dataclass(frozen=True)
class BatchPlan:
    """Rows of a micro-step on one rank, micro-steps of a step, and data-parallel ranks; `rampup`: the ramp to
    it (`BatchRamp.to`); if `cuts_micro_steps`, its micro-steps may have fewer rows."""

    batch_size: int
    grad_accum_steps: int
    dp_size: int
    rampup: tuple[int, ...] = ()
    cuts_micro_steps: bool = False

    def rows_at_once(self, rows: int) -> int:
        """The rows of a micro-step, in a step of so many rows of a rank."""
        return max(divisors(rows, self.batch_size)) if self.cuts_micro_steps else self.batch_size

    @property
    def global_batch_size(self) -> int:
        return self.batch_size * self.dp_size * self.grad_accum_steps

    @property
    def ramp(self) -> BatchRamp:
        return BatchRamp.to(self.global_batch_size, self.rampup)


@dataclass(frozen=True)
class WantedBatch:
    """A global batch of `total` rows that is to be divided over `dp_size` ranks as the section says.

    `micro_step`: rows of a micro-step on one rank, where they are known. `keep_name`: the flag under which a
    run goes on with another batch.
    """

    section: TrainingConfig
    total: int
    dp_size: int
    micro_step: int = 1
    keep_name: str = ""

    @property
    def given(self) -> dict[str, int]:
        """The factors of the batch that a flag gives."""
        values = {"batch_size": self.section.given_rows, "grad_accum_steps": self.section.grad_accum_steps}
        return {name: value for name, value in values.items() if value is not None}

    @property
    def product(self) -> int:
        """The rows of the given factors on all ranks."""
        return math.prod(self.given.values()) * self.dp_size

    @property
    def keeps_factors(self) -> bool:
        """Whether the given micro-steps, of the given rows at most, make the batch of a run that goes on."""
        if self.section.grad_accum_steps is None:
            return True
        return self.total % self.product == 0 and (len(self.given) == 1 or self.total == self.product)

    @property
    def leads_to_end(self) -> bool:
        """Whether whole increments of the ramp lead to the batch, and not too many."""
        start, increment, _ = self.section.rampup_batch_size
        increments, rest = divmod(self.total - start, increment)
        return 1 <= increments <= MAX_INCREMENTS and not rest


def divisors(total: int, most: int) -> list[int]:
    """The divisors of `total` up to `most`."""
    return [number for number in range(1, min(total, most) + 1) if total % number == 0]


def _facts(wanted: WantedBatch) -> Mapping[str, Any]:
    """The figures of messages on a batch."""
    total, dp_size, given, product = wanted.total, wanted.dp_size, wanted.given, wanted.product
    ranks = f" x {dp_size} data-parallel ranks" if dp_size > 1 else ""
    remedies = [f"--global_batch_size={n * product}" for n in (total // product, total // product + 1) if n]
    if len(given) == 1 and total % dp_size == 0:
        ((name, value),) = given.items()
        remedies.insert(0, f"--{name}={max(divisors(total // dp_size, min(value, 4096)))}")
    return given | {
        "global_batch_size": total,
        "number of data-parallel ranks": dp_size,
        "dp_size": dp_size,
        "ranks": divisors(total, 65536),
        "factors": " x ".join(f"--{name} ({value})" for name, value in given.items()) + ranks,
        "product": product,
        "rows": given.get("batch_size", "batch_size"),
        "remedies": " or ".join(remedies),
        "or_ranks": f", or a number of ranks among {joined(divisors(total, 65536))}"
        if total % dp_size
        else "",
        "another": f"choose another batch with --global_batch_size=ROWS {wanted.keep_name}",
    }


def _facts_of_ramp(wanted: WantedBatch) -> Mapping[str, Any]:
    """The figures of messages on a ramp; the remedies make whole micro-steps of each of its batches."""
    start, increment, samples = wanted.section.rampup_batch_size
    end, dp_size, unit = wanted.total, wanted.dp_size, wanted.micro_step * wanted.dp_size
    remedies = []
    rows, rest = divmod(math.gcd(start, increment, end), dp_size)
    if not rest:
        others = f" --grad_accum_steps={end // (rows * dp_size)}" if wanted.section.grad_accum_steps else ""
        remedies += [f"write --batch_size={rows}{others}", "add --rampup_micro_batch=True"]
    multiple, steps = max(1, start // unit) * unit, (end - start) // increment
    if end % unit == 0:
        remedies.append(f"add --rampup_round={unit}")
    if multiple < end and steps > 0:
        way = (end - multiple) // unit
        fitting = next(each for each in range(min(steps, way), 0, -1) if way % each == 0)
        remedies.append(f"write --rampup_batch_size={multiple},{way // fitting * unit},{samples}")
    rounding = wanted.section.rampup_round
    wrong = [rows for rows in range(start, end + 1, increment) if max(rows // rounding, 1) * rounding % unit]
    return {
        "rampup_batch_size": wanted.section.rampup_batch_size,
        "start": start,
        "end": end,
        "room": max(1, end - start),
        "rampup_round": rounding,
        "divisor": math.gcd(end, rounding),
        "parts": f"data-parallel size ({dp_size})"
        + f" x batch_size ({wanted.micro_step})" * (not wanted.section.rampup_micro_batch),
        "wrong": joined(wrong[:5]) + ",…" * (len(wrong) > 5),
        "remedies": " or ".join([*remedies, "leave the flag out"]),
    }


DIVIDES: tuple[Rule[WantedBatch], ...] = (
    Rule("global_batch_size", lambda wanted: wanted.given or wanted.total % wanted.dp_size == 0,
        "must be a multiple of the number of data-parallel ranks ({dp_size})",
        "choose {remedies}, or a number of ranks among {ranks}", facts=_facts),
    Rule("global_batch_size", lambda wanted: len(wanted.given) != 1 or wanted.total % wanted.product == 0,
        "must be a multiple of {factors}", "choose {remedies}{or_ranks}", "batch_size grad_accum_steps",
        _facts),
    Rule("global_batch_size", lambda wanted: len(wanted.given) != 2 or wanted.total == wanted.product,
        "must be {factors}", "leave the flag out, or choose --global_batch_size={product}",
        "batch_size grad_accum_steps", _facts),
)  # fmt: skip
KEEPS_BATCH: tuple[Rule[WantedBatch], ...] = (
    Rule("number of data-parallel ranks", lambda wanted: wanted.total % wanted.dp_size == 0,
        "must divide the run's global batch ({global_batch_size} rows)",
        "valid numbers: {ranks}; or {another}", "global_batch_size", _facts),
    Rule("grad_accum_steps", lambda wanted: wanted.keeps_factors,
        "must keep the run's global batch ({global_batch_size} rows), and {rows} rows x {dp_size} ranks x "
        "{grad_accum_steps} micro-steps does not",
        "leave the flag out, or {another}", "batch_size global_batch_size", _facts),
)  # fmt: skip
LEADS: tuple[Rule[WantedBatch], ...] = (
    Rule("rampup_batch_size", lambda wanted: len(wanted.section.rampup_batch_size) in (0, 3),
        "must be start,increment,samples", "write 16,16,5_000_000",
        facts=lambda wanted: {"rampup_batch_size": wanted.section.rampup_batch_size}),
    Rule("rampup_batch_size", lambda wanted: not wanted.section.rampup_batch_size or wanted.leads_to_end,
        "must lead from {start} rows to the global batch ({end}) in whole increments, at most "
        f"{MAX_INCREMENTS:,} of them",
        "choose a start below it and an increment that divides {room}", "global_batch_size", _facts_of_ramp),
    Rule("rampup_round",
        lambda wanted: not wanted.section.rampup or wanted.total % wanted.section.rampup_round == 0,
        "must divide the global batch ({end})", "choose --rampup_round={divisor}", "global_batch_size",
        _facts_of_ramp),
    Rule("rampup_batch_size",
        lambda wanted: BatchRamp.to(wanted.total, wanted.section.rampup).unit
        % (wanted.micro_step * wanted.dp_size) == 0,
        "must have only batches that are divisible by {parts}, unlike {wrong}", "{remedies}", "batch_size",
        _facts_of_ramp),
)  # fmt: skip


def check_divides(total: int, dp_size: int) -> None:
    """Raises UserError unless a global batch of `total` rows divides over so many data-parallel ranks."""
    judge(DIVIDES, WantedBatch(TrainingConfig(), total, dp_size), {})


def check_rampup(section: TrainingConfig, end: int) -> None:
    """Raises UserError unless the ramp of the section, if there is one, leads to a batch of `end` rows."""
    judge(LEADS, WantedBatch(section, end, 1), {})


def resolve_batch(section: TrainingConfig, dp_size: int) -> BatchPlan:
    """The three batch sizes from two of them; with fewer, batch_size is 2 and grad_accum_steps is 1.

    A batch_size of `auto` counts as none: of this batch the launch keeps the product (planner/auto.py).

    Raises:
        UserError: the three contradict one another, or the global batch does not divide over the ranks.
    """
    rows, accum, total = section.given_rows, section.grad_accum_steps, section.global_batch_size
    if total is None:
        rows, accum = rows or 2, accum or 1
        total = rows * accum * dp_size
    judge(DIVIDES, WantedBatch(section, total, dp_size), {})
    check_rampup(section, total)
    per_rank = total // dp_size
    if rows is None:
        unit = _unit(section, total)
        rows = per_rank // accum if accum else (2 if unit % (2 * dp_size) == 0 else 1)
    return _with_ramp(section, rows, per_rank // rows, dp_size)


def keep_global_batch(
    section: TrainingConfig, dp_size: int, *, total: int, usual_rows: int, keep_name: str = ""
) -> BatchPlan:
    """The batch of a run that goes on with a global batch of `total` rows on any number of ranks.

    A global batch that is given is the new one. Otherwise `batch_size`, or else `usual_rows`, is the largest
    number of rows in a micro-step.

    Raises:
        UserError: `total` does not divide over the ranks, or the flags give another product.
    """
    rows, accum = section.given_rows, section.grad_accum_steps
    if section.global_batch_size is not None:
        return resolve_batch(section, dp_size)
    judge(KEEPS_BATCH, WantedBatch(section, total, dp_size, keep_name=keep_name), {})
    check_rampup(section, total)
    per_rank = total // dp_size
    if accum is not None:
        return _with_ramp(section, per_rank // accum, accum, dp_size)
    unit = max(1, _unit(section, total) // dp_size)
    most = min(rows or usual_rows, unit)
    fitting = next(size for size in range(most, 0, -1) if unit % size == 0)
    return _with_ramp(section, fitting, per_rank // fitting, dp_size)


def _unit(section: TrainingConfig, total: int) -> int:
    """The batch that micro-steps of equal rows must divide: a divisor of all batches of a ramp."""
    return total if section.rampup_micro_batch else BatchRamp.to(total, section.rampup).unit


def _with_ramp(section: TrainingConfig, rows: int, accum: int, dp_size: int) -> BatchPlan:
    """The batch with the ramp that leads to it.

    Raises:
        UserError: one of the ramp's batches does not divide over the ranks.
    """
    least = 1 if section.rampup_micro_batch else rows
    judge(LEADS, WantedBatch(section, rows * accum * dp_size, dp_size, least), {})
    return BatchPlan(rows, accum, dp_size, section.rampup, section.rampup_micro_batch)
