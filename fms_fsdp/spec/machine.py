"""What the flags mean on this machine, in this world: devices, axes, batch and precision. Reads no data."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass

import torch

from fms_fsdp import runtime
from fms_fsdp.config import BatchPlan, Precision, TrainConfig, resolve_batch
from fms_fsdp.config.axes import ParallelDims
from fms_fsdp.config.flag import flag_values
from fms_fsdp.config.rule import judge
from fms_fsdp.config.rules import notes
from fms_fsdp.config.values import shown
from fms_fsdp.flags import Parsed
from fms_fsdp.mesh import resolve_dims
from fms_fsdp.models.variants import resolve_model
from fms_fsdp.optim.optimizers import state_of_stand_in
from fms_fsdp.parallel.compile import missing_compiler
from fms_fsdp.spec.rules import MACHINE, Hardware


@dataclass(frozen=True)
class Machine:
    """The process in its world, its device, the axes, the batch and the dtypes.

    `why_strategy`: a sentence, where memory decided the strategy and not its default.
    """

    world: runtime.World
    device: torch.device
    dims: ParallelDims
    batch: BatchPlan
    precision: Precision
    why_strategy: str = ""


def find_machine(parsed: Parsed[TrainConfig], world: runtime.World) -> Machine:
    """What follows from the flags and the hardware; logs a note for each flag that does nothing here.

    Raises:
        UserError: the first rule that does not hold, as one line.
    """
    cfg = parsed.config
    resolve_model(cfg.model, seq_length=cfg.data.seq_length)
    device = runtime.pick_device(world)
    dims = resolve_dims(cfg.parallel, cfg.model.name, world)
    judge(MACHINE, Hardware(cfg, device, dims), flag_values(cfg))
    for line in [*notes(cfg, parsed.origins, dims.strategy), *_notes_of_the_machine(cfg, device)]:
        runtime.log.info(line)
    batch = resolve_batch(cfg.training, dims.size("dp"))
    precision = runtime.resolve_precision(cfg.precision, device)
    state_of_stand_in(cfg.optim, precision)
    return Machine(world, device, dims, batch, precision)


def _notes_of_the_machine(cfg: TrainConfig, device: torch.device) -> Iterator[str]:
    for name in ("tp_size", "cp_size", "pp_size"):
        if getattr(cfg.parallel, name) == 0:
            yield f"note: --{name} (0) counts as 1"
    if cfg.optim.optimizer == "sm3" and cfg.precision.named == "fp16":
        yield "note: sm3 adds up squares of gradients, which fp16 holds badly; bf16 or fp32 is safer"
    if cfg.parallel.matmul_precision != "high" and device.type != "cuda":
        yield f"note: --matmul_precision ({cfg.parallel.matmul_precision}) has no effect without a GPU"
    by_default = device.type == "cuda" and cfg.parallel.use_torch_compile is None
    if by_default and (missing := missing_compiler(device)):
        yield f"note: blocks are not compiled: {missing}"
    job_end = os.environ.get("SLURM_JOB_END_TIME", "")
    if job_end and runtime.job_end() is None:
        yield f"note: SLURM_JOB_END_TIME ({shown(job_end)}) is no time and counts as not set"
