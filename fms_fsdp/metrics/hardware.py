"""Memory, energy and utilization of the hardware of a rank."""

from __future__ import annotations

import resource
import shutil
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import torch

from fms_fsdp.models.flops import (
    flops_per_token,
    matmul_flops_per_token,
    recomputed_flops_per_token,
)
from fms_fsdp.parallel.activation_checkpointing import select_blocks
from fms_fsdp.state import RunConfig

_USABLE = 0.9  # fraction of a GPU's memory; fragments and NCCL take the rest


@dataclass(frozen=True)
class Utilization:
    """FLOPs per token by three conventions, and the peak of the device in FLOP/s, if known."""

    model: int
    matmul: int
    hardware: int
    peak_flops: float | None

    def metrics(self, tokens_per_sec: float) -> dict[str, float]:
        """Returns TFLOP/s, and MFU and HFU where the peak is known, at a rate per device."""
        metrics = {"tflops_per_device": tokens_per_sec * self.model / 1e12}
        if self.peak_flops is not None:
            flops = {"mfu": self.model, "mfu_matmul": self.matmul, "hfu": self.hardware}
            metrics |= {name: tokens_per_sec * n / self.peak_flops for name, n in flops.items()}
        return metrics


def find_utilization(run: RunConfig, device: torch.device) -> Utilization:
    """Returns the FLOPs per token of a run. The peak is --peak_tflops, or the GPU's by name."""
    cfg = run.config
    model = run.model
    seq_length = run.seq_length
    parallel = run.config.parallel
    fraction = parallel.recomputed_share
    segment = parallel.segment
    chosen = select_blocks(model.num_layers, fraction, segment) if fraction else []
    segments = len({layer // segment for layer, is_chosen in enumerate(chosen) if is_chosen})
    recomputed = recomputed_flops_per_token(
        model, seq_length, sum(chosen), parallel.kept_ops(seq_length), segments
    )
    peak_flops = None
    if cfg.log.peak_tflops is not None:
        peak_flops = cfg.log.peak_tflops * 1e12
    elif device.type == "cuda":
        from fms_fsdp.predict.devices import peak_16bit_flops

        peak_flops = peak_16bit_flops(torch.cuda.get_device_name(device))
    flops = flops_per_token(model, seq_length)
    matmul = matmul_flops_per_token(model, seq_length)
    return Utilization(flops, matmul, flops + recomputed, peak_flops)


def memory_stats(device: torch.device) -> dict[str, float]:
    """Returns GiB of this rank: of torch's allocator on a GPU, else of the process."""
    if device.type == "cuda":
        stats = torch.cuda.memory_stats(device)
        return {
            "mem_gib": stats["allocated_bytes.all.current"] / 2**30,
            "reserved_mem_gib": stats["reserved_bytes.all.current"] / 2**30,
            "peak_mem_gib": stats["allocated_bytes.all.peak"] / 2**30,
            "alloc_retries": stats["num_alloc_retries"],
        }
    try:  # getrusage includes the peak of the parent process before exec
        status = Path("/proc/self/status").read_text(encoding="utf-8")
        rss, peak = (status.partition(name)[2].split()[0] for name in ("VmRSS:", "VmHWM:"))
        return {"mem_gib": int(rss) / 2**20, "peak_mem_gib": int(peak) / 2**20}
    except (OSError, IndexError, ValueError):
        return {"peak_mem_gib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20}


def advice_on_memory(
    run: RunConfig, micro_batch: int, peak_gib: float, available_bytes: int
) -> str:
    """Returns advice if a step with `micro_batch` sequences uses less than a third of a GPU's memory;
    else "".

    Twice the micro-batch takes at most twice the memory, because weights and optimizer state stay.
    """
    available = available_bytes / 2**30
    if 3 * peak_gib >= available:
        return ""
    largest = int(_USABLE * available / peak_gib) * micro_batch
    if run.config.training.global_batch_size:  # a larger micro-batch takes accumulation steps
        largest = min(largest, run.batch.batch_size * run.batch.grad_accum_steps)
    if largest <= run.batch.batch_size:  # a ramp of micro-batches reaches it by itself
        return ""
    return (
        f"a step uses {peak_gib:.1f} of {available:.1f} GiB of the GPU; micro-batches up to "
        f"--batch_size={largest} would fit and are often faster"
    )


def diagnostics(device: torch.device) -> dict[str, float]:
    """Returns shared and resident memory, GPU temperature and clock; omits unreadable values."""
    sensors: dict[str, Callable[[], float]] = {
        "shm_gib": lambda: shutil.disk_usage("/dev/shm").used / 2**30,
        "host_rss_gib": lambda: memory_stats(torch.device("cpu"))["mem_gib"],
    }
    if device.type == "cuda":
        sensors["gpu_temperature_c"] = lambda: torch.cuda.temperature(device)
        sensors["gpu_clock_mhz"] = lambda: torch.cuda.clock_rate(device)
    values = {}
    for name, read in sensors.items():
        with suppress(Exception):  # drivers raise anything
            values[name] = read()
    return values


class EnergyMeter:
    """Energy of this rank's GPU in joules, from the counter of NVML (package nvidia-ml-py)."""

    def __init__(self, device: torch.device, counter: Callable[[], float] | None = None) -> None:
        self._counter = counter or _gpu_energy_counter(device)
        self._last: float | None = None
        self.read_joules()

    def read_joules(self) -> float:
        """Returns joules since the last call; 0 if the counter cannot be read."""
        last, self._last = self._last, None
        if self._counter is not None:
            with suppress(Exception):  # drivers raise anything
                self._last = self._counter()
        return 0.0 if last is None or self._last is None else self._last - last


def _gpu_energy_counter(device: torch.device) -> Callable[[], float] | None:
    if device.type == "cuda":
        with suppress(Exception):  # no package, no driver, no NVIDIA GPU
            import pynvml

            pynvml.nvmlInit()
            uuid = torch.cuda.get_device_properties(device).uuid
            handle = pynvml.nvmlDeviceGetHandleByUUID(f"GPU-{uuid}")
            return lambda: pynvml.nvmlDeviceGetTotalEnergyConsumption(handle) / 1000
    return None
