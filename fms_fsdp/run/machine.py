"""What the flags and the environment ask of this machine: the impossible is refused, what has no effect is
logged."""

from __future__ import annotations

import os
from collections.abc import Iterator

import torch

from fms_fsdp import runtime
from fms_fsdp.config import TrainConfig
from fms_fsdp.config.rule import judge
from fms_fsdp.config.rules import notes
from fms_fsdp.config.values import shown
from fms_fsdp.flags import Parsed
from fms_fsdp.mesh import ParallelDims
from fms_fsdp.parallel.compile import missing_compiler
from fms_fsdp.run.rules import MACHINE, Hardware


def check_machine(parsed: Parsed[TrainConfig], device: torch.device, dims: ParallelDims) -> None:
    """Logs a note for each flag that does nothing here.

    Raises:
        UserError: a rule of the machine does not hold.
    """
    cfg = parsed.config
    judge(MACHINE, Hardware(cfg, device, dims), cfg)
    for line in [*notes(cfg, parsed.origins, dims.strategy), *_notes_of_the_machine(cfg, device)]:
        runtime.log.info(line)


def _notes_of_the_machine(cfg: TrainConfig, device: torch.device) -> Iterator[str]:
    if cfg.parallel.matmul_precision != "high" and device.type != "cuda":
        yield f"note: --matmul_precision ({cfg.parallel.matmul_precision}) has no effect without a GPU"
    by_default = device.type == "cuda" and cfg.parallel.use_torch_compile is None
    if by_default and (missing := missing_compiler(device)):
        yield f"note: blocks are not compiled: {missing}"
    job_end = os.environ.get("SLURM_JOB_END_TIME", "")
    if job_end and runtime.job_end() is None:
        yield f"note: SLURM_JOB_END_TIME ({shown(job_end)}) is no time and counts as not set"
