"""What the flags and the environment ask of this machine: the impossible is refused, what has no effect is
logged."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import torch

from fms_fsdp import runtime
from fms_fsdp.config import TrainConfig
from fms_fsdp.config.effects import notes
from fms_fsdp.config.values import shown
from fms_fsdp.errors import UserError
from fms_fsdp.flags import Parsed
from fms_fsdp.mesh import ParallelDims
from fms_fsdp.parallel.compile import missing_compiler
from fms_fsdp.parallel.parallelize import check_attention

_FILES = ("metrics.jsonl", "status.json", "config.json", "log.txt")  # of a run folder, which a launch writes


def check_machine(parsed: Parsed[TrainConfig], device: torch.device, dims: ParallelDims) -> None:
    """Logs a note for each flag that does nothing here.

    Raises:
        UserError: this machine has no such backend or device, or a file stands where one must be written.
    """
    cfg = parsed.config
    check_attention(cfg.model.attn_impl, device)
    if cfg.model.attn_dropout and cfg.data.document_mask and device.type == "cuda":
        raise UserError(
            f"--attn_dropout ({cfg.model.attn_dropout:g}) has no kernel under --document_mask on GPUs; leave "
            "one of them out"
        )
    if cfg.parallel.dist_backend == "nccl" and device.type != "cuda":
        raise UserError("--dist_backend (nccl) needs a GPU; leave it out, or use gloo")
    if cfg.parallel.dist_backend == "gloo" and device.type == "cuda" and dims.strategy != "none":
        raise UserError("--dist_backend (gloo) cannot reduce gradients on GPUs; leave it out, or use nccl")
    if cfg.profiler.memory_snapshot and device.type != "cuda":
        raise UserError("--memory_snapshot (True) needs a GPU, whose allocator it records; leave it out")
    if cfg.parallel.cpu_offload and dims.strategy == "none":
        raise UserError(
            "--cpu_offload (True) needs a sharded model; add --sharding_strategy=fsdp, which one process "
            "can use too"
        )
    for name in _FILES:
        if (path := Path(cfg.output_dir, name)).exists() and not path.is_file():
            raise UserError(
                f"--output_dir ({cfg.output_dir}) must hold {name} as a file; remove what is there"
            )
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
