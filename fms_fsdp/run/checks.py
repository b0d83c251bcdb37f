"""Checks of flags against the machine and the folders. Called before anything is created."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

from fms_fsdp.checkpoint.retention import parse_schedule
from fms_fsdp.config import TrainConfig
from fms_fsdp.config.values import format_bytes, shown
from fms_fsdp.distributed.axes import ParallelDims
from fms_fsdp.distributed.runtime import restarts_in_agent_store
from fms_fsdp.errors import UserError
from fms_fsdp.files import free_bytes
from fms_fsdp.models.config import TransformerConfig
from fms_fsdp.run.machine import Machine
from fms_fsdp.run.stop import job_end

RUN_FILES = ("metrics.jsonl", "status.json", "config.json", "log.txt")  # that a launch writes


def check_machine(cfg: TrainConfig, machine: Machine, dims: ParallelDims) -> None:
    """Raises UserError for a flag that this machine, or this number of ranks, does not support."""
    named = cfg.precision.named
    is_compiled = machine.compiles(cfg.parallel)
    if machine.device_type == "cuda" and named not in ("fp32", "fp16") and not machine.has_bf16:
        raise UserError(
            f"--precision={named or 'bf16'} requires bf16, which {machine.device_name} does not "
            f"support; use --precision=fp16 or fp32, with {cfg.keep_name}"
        )
    for name in cfg.log.trackers:
        if name in machine.missing_packages:
            raise UserError(
                f"--trackers={name} requires the package {name}, which is not installed; "
                f"run: pip install {name}"
            )
    if is_compiled and machine.missing_for_compilation:
        raise UserError(
            "--use_torch_compile=True cannot compile blocks: "
            f"{machine.missing_for_compilation}, or remove the flag"
        )
    _check_device(cfg, dims, is_gpu=machine.device_type == "cuda", is_compiled=is_compiled)
    _check_ranking(cfg)


def _check_device(cfg: TrainConfig, dims: ParallelDims, *, is_gpu: bool, is_compiled: bool) -> None:
    parallel = cfg.parallel
    attn_impl = cfg.model.attn_impl
    if parallel.recomputes == "cheap" and not is_compiled:
        raise UserError(
            "--recompute=cheap requires compiled blocks; set --use_torch_compile=True, or use "
            "--recompute=ops or blocks"
        )
    if parallel.debug_sync_blocks and is_compiled:
        raise UserError(
            "--debug_sync_blocks waits between blocks, which compiled blocks cannot; "
            "set --use_torch_compile=False"
        )
    if parallel.async_tp and not (is_gpu and is_compiled):
        raise UserError("--async_tp requires a GPU and compiled blocks; remove it")
    if parallel.cpu_offload and dims.strategy == "none":
        raise UserError(
            "--cpu_offload requires a sharded model; set --sharding_strategy=fsdp, which one "
            "process can use too"
        )
    if is_gpu and parallel.dist_backend == "gloo" and dims.strategy != "none":
        raise UserError("--dist_backend=gloo cannot reduce gradients on GPUs; use nccl")
    if is_gpu and attn_impl in ("flash", "cudnn") and cfg.precision.named == "fp32":
        raise UserError(f"--attn_impl={attn_impl} requires 16 bits; use --precision=bf16")
    if not is_gpu:
        gpu_flags = {
            f"--attn_impl={attn_impl}": attn_impl in ("cudnn", "efficient"),
            "--dist_backend=nccl": parallel.dist_backend == "nccl",
            "--memory_snapshot": cfg.profiler.memory_snapshot,
        }
        for flag in (flag for flag, is_on in gpu_flags.items() if is_on):
            raise UserError(f"{flag} requires a GPU; remove it")


def check_attention(cfg: TrainConfig, model: TransformerConfig, device_type: str) -> None:
    """Raises UserError for a flag of attention that this shape does not support."""
    is_flash = model.attn_impl == "flash"
    if is_flash and device_type == "cpu" and model.attn_dropout:
        raise UserError(
            "--attn_impl=flash has no dropout on CPUs; use auto, or set --attn_dropout=0"
        )
    if is_flash and device_type == "cuda" and model.pos_emb == "alibi":
        raise UserError(
            "--attn_impl=flash is not supported with --pos_emb=alibi: it takes no bias; use "
            "--attn_impl=auto"
        )
    is_masked = bool(model.attn_window) or cfg.data.document_mask
    if is_flash and device_type == "cuda" and model.attn_dropout and is_masked:
        raise UserError(
            f"--attn_impl=flash is not supported with --attn_dropout={model.attn_dropout:g} and "
            "--attn_window or --document_mask: it takes no mask; use --attn_impl=auto"
        )
    if "attention" in cfg.parallel.recompute_ops and model.attn_dropout:
        raise UserError(
            f"--recompute_ops=attention is not supported with --attn_dropout={model.attn_dropout:g}, "
            "whose mask only recomputed attention repeats; use "
            "--recompute_ops=every_second_matmul, or set --attn_dropout=0"
        )


def _check_ranking(cfg: TrainConfig) -> None:
    """Raises UserError unless some checkpoint before the last has the metric of --keep_best."""
    keep = cfg.checkpoint
    evaluates = cfg.checkpoint.ranks_evaluations
    if not keep.keep_best or (evaluates and cfg.eval.eval_epochs):  # at steps that the data decides
        return
    flag = "--report_interval"
    interval = cfg.log.report_interval
    if evaluates:
        flag = "--eval_interval"
        interval = cfg.eval.eval_interval
    schedule = parse_schedule(keep.checkpoint_schedule, keep.checkpoint_interval)
    if not schedule.meets_multiple_of(interval):
        multiple = interval * -(-keep.checkpoint_interval // interval) or interval
        fix = f"set --checkpoint_interval to a multiple of {interval}, e.g. {multiple}"
        if keep.checkpoint_schedule:
            fix = f"name multiples of {interval} in --checkpoint_schedule"
        raise UserError(
            f"--keep_best={keep.keep_best} has nothing to rank: no checkpoint before the last is at a "
            f"step with {keep.keep_best_metric} ({flag}={interval}); {fix}"
        )


def machine_notes(cfg: TrainConfig, machine: Machine, dims: ParallelDims) -> Iterator[str]:
    """Yields log lines on flags that do little or nothing on this machine."""
    if cfg.parallel.hsdp_shard_size and dims.strategy != "hsdp":
        yield (
            f"--hsdp_shard_size={cfg.parallel.hsdp_shard_size} has no effect with "
            f"--sharding_strategy={dims.strategy}"
        )
    for name in ("tp_size", "cp_size", "pp_size"):
        if getattr(cfg.parallel, name) == 0:
            yield f"--{name}=0 counts as 1"
    if cfg.optim.optimizer == "sm3" and cfg.precision.named == "fp16":
        yield "sm3 sums squared gradients, which may overflow in fp16; prefer bf16 or fp32"
    is_gpu = machine.device_type == "cuda"
    if cfg.parallel.matmul_precision != "high" and not is_gpu:
        yield f"--matmul_precision={cfg.parallel.matmul_precision} has no effect without a GPU"
    if is_gpu and cfg.parallel.use_torch_compile is None and machine.missing_for_compilation:
        yield f"blocks are not compiled: {machine.missing_for_compilation}"
    if restarts_in_agent_store() and os.environ.get("GROUP_WORLD_SIZE", "1") != "1":
        # An agent that has been in a round does not tell newcomers of its store (torch 2.13).
        yield (
            "torchrun restarts the ranks of these nodes, but no other node can take the place of "
            "one; for that, export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 on every node"
        )
    end = os.environ.get("SLURM_JOB_END_TIME", "")
    if end and job_end() is None:
        yield f"SLURM_JOB_END_TIME={shown(end)} is not a time, so it is ignored"


def check_folders(cfg: TrainConfig, checkpoint_bytes: int) -> None:
    """Raises UserError for a folder that cannot be written, or has no space for one checkpoint."""
    folders = {
        "output_dir": cfg.output_dir,
        "profiler_dir": cfg.profiler.profiler_dir or cfg.output_dir,
        "tensorboard_dir": cfg.log.tensorboard_dir or cfg.output_dir,
        "ckpt_save_path": cfg.ckpt_save_path,
    }
    for flag, folder in folders.items():
        nearest = _nearest_existing(folder)
        if not nearest.is_dir():
            raise UserError(
                f"--{flag}={folder} cannot be created: {nearest} is not a folder; choose another"
            )
        is_writable = os.access(nearest, os.W_OK | os.X_OK)
        if is_writable and free_bytes(nearest) is None:
            is_writable = _takes_files(nearest)
        if not is_writable:
            raise UserError(
                f"--{flag}={folder} must be writable; change its permissions, or choose another"
            )
    free = free_bytes(_nearest_existing(cfg.ckpt_save_path))
    if free is not None and checkpoint_bytes > free:
        raise UserError(
            f"--ckpt_save_path={cfg.ckpt_save_path} requires {format_bytes(checkpoint_bytes)} for one "
            f"checkpoint, and {format_bytes(free)} is free; free disk space, or choose another folder"
        )
    for name in RUN_FILES:
        path = Path(cfg.output_dir, name)
        if path.exists() and not path.is_file():
            raise UserError(f"{path} is not a regular file; rename or remove it")


def _nearest_existing(folder: str) -> Path:
    """Returns the folder, or the first of its parents that exists."""
    nearest = Path(folder).absolute()
    while not os.path.lexists(nearest):
        nearest = nearest.parent
    return nearest


def _takes_files(folder: Path) -> bool:
    """Returns whether a file can be created in a folder.

    /proc and /sys report no blocks and let root write by their permissions, but take no file. Some
    FUSE file systems report no blocks too and take files: only trying tells them apart.
    """
    try:
        with tempfile.TemporaryFile(dir=folder):
            return True
    except OSError:
        return False
