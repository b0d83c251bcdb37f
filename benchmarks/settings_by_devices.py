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

import torch

from fms_fsdp.config import BF16, TrainConfig
from fms_fsdp.config.parse import parse_flags
from fms_fsdp.distributed.mesh import plan_dims
from fms_fsdp.distributed.runtime import World
from fms_fsdp.models.variants import resolve_model
from fms_fsdp.run.memory import MemoryBudget
from fms_fsdp.run.setup import draft_run

NODE, GPU_GIB = 8, 80
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
            return f"{begin} | rejected: needs at least {self.least:,.1f} GiB | | |"
        fits = "" if self.expected <= GPU_GIB else ": more than there is"
        return f"{begin} | {self.recompute} | {self.rows} × {self.micro_steps} | {self.expected:.1f}{fits} |"


def setting(variant: str, devices: int) -> Setting:
    """Returns the settings of a run of this model on `devices` GPUs."""
    cfg = parse_flags(
        TrainConfig, [f"--model_variant={variant}", "--batch_size=auto", *FLAGS.split()]
    )
    world = World(0, 0, devices, min(devices, NODE))
    dims = plan_dims(cfg.parallel, variant, world)
    model = resolve_model(cfg.model, seq_length=cfg.data.seq_length)
    budget = MemoryBudget(world, {"cuda": GPU_GIB * 2**30, "cpu": 2**62})
    draft = draft_run(cfg, world, torch.device("cuda", 0), dims, BF16, model)
    run = budget.choose(draft, None)
    section, need = run.config.parallel, budget.need(run)
    share = section.selective_checkpointing
    part = f", {share}" if section.recomputes == "blocks" and share != "1" else ""
    kind, plan = f"`{section.recomputes}`{part}", run.batch
    sizes = budget.minimum(run).total / 2**30, need.total / 2**30
    strategy = f"`{run.dims.strategy}`"
    return Setting(variant, devices, strategy, kind, plan.batch_size, plan.grad_accum_steps, *sizes)


def table(settings: list[Setting]) -> str:
    """Returns the table of docs/reference/parallelism-tables.md."""
    head = "| devices | model | strategy | recompute | sequences × accumulation | GiB per rank |"
    return "\n".join([head, "|---|---|---|---|---|---|", *(each.row for each in settings)])


def main() -> None:
    print(table([setting(model, devices) for devices in DEVICES for model in MODELS]))


if __name__ == "__main__":
    main()
