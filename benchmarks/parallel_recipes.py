"""Prints flags for three models on 8 to 4,096 GPUs, with memory and bytes sent per rank and step.

    python benchmarks/parallel_recipes.py     # prints the table of docs/reference/parallelism-tables.md

All values are arithmetic, equal to `python -m fms_fsdp estimate` with the same flags, for steps of 4,194,304
tokens (1,024 rows of 4,096), nodes of 8 GPUs, bf16. Nothing was measured on such machines.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import NamedTuple

sys.path.insert(0, str(Path(__file__).parent.parent))

from fms_fsdp.config import BatchPlan, TrainConfig
from fms_fsdp.config.parse import parse_flags
from fms_fsdp.plan import plan
from fms_fsdp.predict.memory import GIB
from fms_fsdp.predict.speed import sent
from fms_fsdp.run.machine import Machine
from fms_fsdp.run.memory_budget import MemoryBudget

SEQUENCES, GPU_GIB = 1024, 80
RECIPES = (
    ("7b", 8, "--sharding_strategy=zero1 --grad_accum_steps=128"),
    ("7b", 64, "--sharding_strategy=hsdp --grad_accum_steps=8"),
    ("7b", 512, "--sharding_strategy=hsdp --grad_accum_steps=1"),
    ("7b", 4096, "--tp_size=4 --sharding_strategy=hsdp"),
    ("70b", 8, "--tp_size=8 --sharding_strategy=fsdp --recompute=blocks --grad_accum_steps=128"),
    (
        "70b",
        8,
        "--tp_size=2 --sharding_strategy=fsdp --precision=bf16_pure --recompute=blocks "
        "--grad_accum_steps=128",
    ),
    ("70b", 64, "--tp_size=2 --pp_size=8 --sharding_strategy=fsdp --recompute=cheap"),
    ("70b", 512, "--tp_size=4 --pp_size=4 --pp_schedule=interleaved --sharding_strategy=fsdp"),
    ("70b", 4096, "--tp_size=8 --pp_size=2 --pp_schedule=interleaved --sharding_strategy=fsdp"),
    (
        "llama3.1_405b",
        8,
        "--tp_size=8 --sharding_strategy=fsdp --recompute=blocks --grad_accum_steps=128",
    ),
    (
        "llama3.1_405b",
        64,
        "--tp_size=8 --sharding_strategy=fsdp --recompute=blocks --grad_accum_steps=128",
    ),
    (
        "llama3.1_405b",
        64,
        "--tp_size=8 --sharding_strategy=fsdp --precision=bf16_pure --recompute=blocks --grad_accum_steps=16",
    ),
    ("llama3.1_405b", 512, "--tp_size=8 --pp_size=16 --sharding_strategy=fsdp"),
    (
        "llama3.1_405b",
        4096,
        "--tp_size=8 --pp_size=16 --pp_schedule=interleaved --sharding_strategy=fsdp",
    ),
)


class Recipe(NamedTuple):
    """Flags with their batch, the GiB of a rank, and the GiB that it sends per step, by axis."""

    model: str
    gpus: int
    flags: str
    batch: BatchPlan
    gib: float
    sent_gib: dict[str, float]

    @property
    def row(self) -> str:
        """Returns the row of the table."""
        over = self.gib - GPU_GIB
        fits = (
            f"{self.gib:.1f}" if over <= 0 else f"{self.gib:,.1f}: does not fit, by {over:,.1f} GiB"
        )
        sent = ", ".join(f"{axis} {gib:,.1f}" for axis, gib in self.sent_gib.items())
        rows = f"{self.batch.batch_size} × {self.batch.dp_size} × {self.batch.grad_accum_steps}"
        return f"| `{self.model}` | {self.gpus:,} | `{self.flags}` | {rows} | {fits} | {sent} |"


def figures(variant: str, gpus: int, flags: str) -> Recipe:
    """Returns the recipe with the values of `estimate`."""
    given = [f"--model_variant={variant}", f"--global_batch_size={SEQUENCES}", *flags.split()]
    if "--grad_accum_steps" not in flags:
        given.append("--grad_accum_steps=1")
    machine = Machine.of_gpus(GPU_GIB * GIB, gpus)
    run, budget = plan(parse_flags(TrainConfig, given), machine), MemoryBudget(machine)
    need = budget.need(run).by_device("cuda", offload=False)["cuda"]
    by_axis = {axis: num_bytes / GIB for axis, num_bytes in sent(budget.step(run)).items()}
    return Recipe(variant, gpus, flags, run.batch, need.total / GIB, by_axis)


def table(recipes: list[Recipe]) -> str:
    """Returns the table of docs/reference/parallelism-tables.md."""
    head = "| model | GPUs | flags | sequences × dp × accumulation | GiB per rank | GiB sent per rank and step |"
    return "\n".join([head, "|---|---|---|---|---|---|", *(recipe.row for recipe in recipes)])


def main() -> None:
    print(table([figures(*recipe) for recipe in RECIPES]))


if __name__ == "__main__":
    main()
