"""The batch of a run: global_batch_size = batch_size × data-parallel size × grad_accum_steps rows."""

from __future__ import annotations

from dataclasses import dataclass

from fms_fsdp.config.training import TrainingConfig
from fms_fsdp.config.values import joined


@dataclass(frozen=True)
class BatchPlan:
    """Rows of a micro-step on one rank, micro-steps of a step, and data-parallel ranks."""

    batch_size: int
    grad_accum_steps: int
    dp_size: int

    @property
    def global_batch_size(self) -> int:
        return self.batch_size * self.dp_size * self.grad_accum_steps


def divisors(total: int, most: int) -> list[int]:
    """The divisors of `total` up to `most`, for messages."""
    return [number for number in range(1, min(total, most) + 1) if total % number == 0]


def resolve_batch(section: TrainingConfig, dp_size: int) -> BatchPlan:
    """The three batch sizes from two of them; with fewer, batch_size is 2 and grad_accum_steps is 1.

    Raises:
        ValueError: the three contradict one another, or the global batch does not divide over the ranks.
    """
    rows, accum, total = section.batch_size, section.grad_accum_steps, section.global_batch_size
    if total is None:
        return BatchPlan(rows or 2, accum or 1, dp_size)
    if total % dp_size:
        valid = divisors(total, max(4096, 2 * dp_size))
        raise ValueError(
            f"--global_batch_size ({total}) must be divisible by the data-parallel size ({dp_size}); "
            f"valid sizes: {joined(valid)}"
        )
    per_rank = total // dp_size
    if rows is None:
        rows = per_rank // accum if accum else (2 if per_rank % 2 == 0 else 1)
    if accum is None and rows:
        accum = per_rank // rows
    if not rows or not accum or rows * accum * dp_size != total:
        raise ValueError(
            f"--global_batch_size ({total}) must equal batch_size ({section.batch_size or rows}) x "
            f"data-parallel size ({dp_size}) x grad_accum_steps ({section.grad_accum_steps or accum}); "
            f"give two of the three, e.g. --batch_size=1"
        )
    return BatchPlan(rows, accum, dp_size)


def keep_global_batch(
    section: TrainingConfig, dp_size: int, *, total: int, usual_rows: int, keep_name: str = ""
) -> BatchPlan:
    """The batch of a run that goes on with a global batch of `total` rows on any number of ranks.

    A global batch that is given is the new one. Otherwise `batch_size`, or else `usual_rows`, is the largest
    number of rows in a micro-step.

    Raises:
        ValueError: `total` does not divide over the ranks, or the flags give another product.
    """
    rows, accum = section.batch_size, section.grad_accum_steps
    if section.global_batch_size is not None:
        return resolve_batch(section, dp_size)
    if total % dp_size:
        valid = divisors(total, 65536)
        raise ValueError(
            f"number of data-parallel ranks ({dp_size}) must divide the run's global batch ({total} rows); "
            f"valid numbers: {joined(valid)}; or choose another batch with "
            f"--global_batch_size=ROWS {keep_name}"
        )
    per_rank = total // dp_size
    if accum is None:
        cap = min(rows or usual_rows, per_rank)
        fitting = next(size for size in range(cap, 0, -1) if per_rank % size == 0)
        return BatchPlan(fitting, per_rank // fitting, dp_size)
    if per_rank % accum or (rows is not None and rows * accum != per_rank):
        product = f"{rows or 'batch_size'} rows x {dp_size} ranks x {accum} micro-steps"
        raise ValueError(
            f"--grad_accum_steps ({accum}) must keep the run's global batch ({total} rows), and {product} "
            f"does not; leave it out, or choose another batch with --global_batch_size=ROWS {keep_name}"
        )
    return BatchPlan(per_rank // accum, accum, dp_size)
