"""Prints the settings that `--recompute=auto --batch_size=auto` chooses for four models on 1 to 512 GPUs of 80 GiB.

    python benchmarks/settings_by_devices.py     # prints the table of docs/reference/parallelism-tables.md

All figures are arithmetic, by the functions that a launch uses, for steps of 4,194,304 tokens (1,024 rows of
4,096), nodes of 8 GPUs, bf16, compiled blocks. Nothing was measured on such machines.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import NamedTuple

sys.path.insert(0, str(Path(__file__).parent.parent))

from fms_fsdp.config import TrainConfig
from fms_fsdp.config.parse import parse_flags
from fms_fsdp.plan import plan
from fms_fsdp.run.machine import Machine
from fms_fsdp.run.memory_budget import MemoryBudget

GPU_GIB = 80
MODELS, DEVICES = ("7b", "13b", "34b", "70b"), (1, 8, 64, 512)
FLAGS = (
    "--use_dummy_dataset=True --global_batch_size=1024 --use_torch_compile=True --recompute=auto"
)


class Setting(NamedTuple):
    """The settings of a run; `least` and `expected`: GiB of a rank at minimum and in a step."""

    model: str
    devices: int
    strategy: str
    recompute: str
    rows: int
    micro_steps: int
    least: float
    expected: float

    @property
    def row(self) -> str:
        """Returns the row of the table."""
        begin = f"| {self.devices} | `{self.model}` | {self.strategy}"
        if self.least > GPU_GIB:
            return f"{begin} | does not fit: needs at least {self.least:,.1f} GiB | | |"
        fits = "" if self.expected <= GPU_GIB else ": more than there is"
        return f"{begin} | {self.recompute} | {self.rows} × {self.micro_steps} | {self.expected:.1f}{fits} |"


def setting(variant: str, devices: int) -> Setting:
    """Returns the settings of a run of this model on `devices` GPUs."""
    cfg = parse_flags(
        TrainConfig, [f"--model_variant={variant}", "--batch_size=auto", *FLAGS.split()]
    )
    machine = Machine.of_gpus(GPU_GIB * 2**30, devices)
    run = plan(cfg, machine)
    budget = MemoryBudget(machine)
    section = run.config.parallel
    share = section.selective_checkpointing
    part = f", {share}" if section.recomputes == "blocks" and share != "1" else ""
    return Setting(
        variant,
        devices,
        strategy=f"`{run.dims.strategy}`",
        recompute=f"`{section.recomputes}`{part}",
        rows=run.batch.batch_size,
        micro_steps=run.batch.grad_accum_steps,
        least=budget.minimum(run).total / 2**30,
        expected=budget.need(run).total / 2**30,
    )


def table(settings: list[Setting]) -> str:
    """Returns the table of docs/reference/parallelism-tables.md."""
    head = "| devices | model | strategy | recompute | sequences × accumulation | GiB per rank |"
    return "\n".join([head, "|---|---|---|---|---|---|", *(each.row for each in settings)])


def main() -> None:
    print(table([setting(model, devices) for devices in DEVICES for model in MODELS]))


if __name__ == "__main__":
    main()
