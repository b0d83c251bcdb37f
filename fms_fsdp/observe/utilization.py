"""How much of the hardware a run uses: FLOPs of a token against what the devices could do at best."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from fms_fsdp.config import ParallelConfig, parse_selective_checkpointing
from fms_fsdp.models.flops import flops_per_token, matmul_flops_per_token, recomputed_flops_per_token
from fms_fsdp.parallel.activation import select_blocks
from fms_fsdp.parallel.precision import DTYPES
from fms_fsdp.predict.hardware import gpu_peak_flops, measure_matmul_flops
from fms_fsdp.run.plan import Plan


@dataclass
class Utilization:
    """FLOPs of one token by three conventions, and the hardware's FLOP/s; without those there is no MFU.

    `measure` gives the peak of a device that no table names, from 0 on. It is asked at the first report, and
    again where more was achieved than it found: something else had the cores at that moment.
    """

    model: int
    matmul: int
    hardware: int
    peak_flops: float | None
    measure: Callable[[], float] | None = None

    def of(self, tokens_per_sec: float) -> dict[str, float]:
        """The metrics at a rate of tokens of one device."""
        metrics = {"tflops_per_device": tokens_per_sec * self.model / 1e12}
        if self.peak_flops is not None:
            parts = {"mfu": self.model, "mfu_matmul": self.matmul, "hfu": self.hardware}
            achieved = {name: tokens_per_sec * flops for name, flops in parts.items()}
            if self.measure is not None and max(achieved.values()) > self.peak_flops:
                self.peak_flops = max(self.peak_flops, self.measure())
            metrics |= {name: flops / self.peak_flops for name, flops in achieved.items()}
        return metrics


def find_utilization(plan: Plan, section: ParallelConfig) -> Utilization:
    """The FLOPs of the plan's model under its recipe, on its device."""
    model, seq_length = plan.model, plan.seq_length
    flops, recomputing, kept = flops_per_token(model, seq_length), 0, tuple[str, ...]()
    if section.recomputes == "blocks":
        share = parse_selective_checkpointing(section.selective_checkpointing)
        recomputing = sum(select_blocks(model.num_layers, share))
    elif section.recomputes == "ops":
        recomputing, kept = model.num_layers, section.recompute_ops
    on_cpu = plan.device.type == "cpu"
    return Utilization(
        model=flops,
        matmul=matmul_flops_per_token(model, seq_length),
        hardware=flops + recomputed_flops_per_token(model, seq_length, recomputing, kept),
        peak_flops=0.0 if on_cpu else gpu_peak_flops(plan.device),
        measure=partial(measure_matmul_flops, DTYPES[plan.precision.compute]) if on_cpu else None,
    )
