"""Values of steps, summed on the device between reports and reduced over ranks once per report."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from fms_fsdp.data.batch import Batch, fingerprint
from fms_fsdp.data.stream import Stream
from fms_fsdp.distributed.dtensor import local_shard, num_copies
from fms_fsdp.distributed.mesh import Mesh
from fms_fsdp.distributed.runtime import gather_objects
from fms_fsdp.errors import RunFailed, UserError
from fms_fsdp.state import StepResult


class IntervalMetrics:
    """Loss and gradient norm over the steps since the last report.

    `add` does not wait for the device. Skipped steps, whose gradient was not finite, are counted
    and are not in the sums. `extra_losses` names the entries of `StepResult.extra_sums`.
    """

    def __init__(
        self, mesh: Mesh, device: torch.device, extra_losses: Sequence[str] = ("z_loss",)
    ) -> None:
        self._mesh = mesh
        self._device = device
        self._extra_losses = extra_losses
        self._reset()

    def _reset(self) -> None:
        zeros = torch.zeros(5, dtype=torch.float64, device=self._device)
        self._loss, self._labels, self._norms, self._max_norm, self._skipped = zeros
        self._steps = 0

    def add(self, result: StepResult) -> None:
        """Adds one step."""
        finite = torch.isfinite(result.grad_norm)
        norm = torch.where(finite, result.grad_norm, 0.0)
        self._loss += torch.where(finite, result.loss_sum, 0.0)
        self._labels += torch.where(finite, result.num_labels, 0)
        self._norms += norm
        self._max_norm.copy_(torch.maximum(self._max_norm, norm))
        self._skipped += ~finite
        self._steps += 1

    def read(
        self,
        result: StepResult,
        energy_j: float = 0.0,
        masked_rows: int = 0,
        replicated: Mapping[str, torch.Tensor] | None = None,
    ) -> dict[str, float]:
        """Returns the metrics of the last step and of the interval, and resets the sums.

        Collective: every rank. Waits for the device, with one copy to the host. `energy_j` and
        `masked_rows` are summed over ranks; `replicated` values are identical on every rank. A
        mean over no label is NaN.
        """
        mesh = self._mesh
        replicated = replicated or {}

        # Values that differ between ranks are summed over the world.
        losses = self._stack(result.loss_sum, self._loss, *result.extra_sums)
        losses *= mesh.counts_for("dp_cp_pp")
        own_masked = masked_rows * mesh.counts_for("dp")
        host = torch.tensor([energy_j, own_masked], dtype=torch.float64)
        host = host.to(self._device, non_blocking=True)
        sums = mesh.sum(torch.cat([losses, host]), "world")

        # The others are identical on every rank.
        norms = (result.grad_norm, self._norms, self._max_norm, self._skipped)
        shared = self._stack(result.num_labels, self._labels, *norms, *replicated.values())

        values = torch.cat([sums, shared]).tolist()  # the only wait for the device
        loss_sum, loss_total, *extra, energy_j, masked = values[: len(sums)]
        labels, all_labels, norm, norm_sum, max_norm, skipped, *others = values[len(sums) :]
        steps = self._steps - skipped
        self._reset()

        loss = _ratio(loss_sum, labels)
        metrics = {
            "loss": loss,
            "loss_mean": _ratio(loss_total, all_labels),
            "perplexity": math.exp(min(loss, 20.0)),
            "grad_norm": norm,
            "grad_norm_mean": _ratio(norm_sum, steps),
            "grad_norm_max": max_norm if steps else math.nan,
            "skipped_steps": int(skipped),
            "masked_rows": int(masked),
            "energy_j": energy_j,
        }
        for (name, tensor), value in zip(replicated.items(), others, strict=True):
            metrics[name] = value if tensor.is_floating_point() else int(value)
        for name, value in zip(self._extra_losses, extra, strict=False):
            metrics[name] = _ratio(value, labels)
        return metrics

    def _stack(self, *values: torch.Tensor) -> torch.Tensor:
        return torch.stack([value.to(self._device, torch.float64) for value in values])


def _ratio(total: float, count: float) -> float:
    return total / count if count else math.nan


def count_zero_gradients(parameters: Sequence[torch.Tensor], mesh: Mesh) -> torch.Tensor:
    """Counts the elements of the full gradient that are exactly zero (collective: every rank)."""
    count = torch.zeros((), dtype=torch.float64, device=parameters[0].device)
    for parameter in parameters:
        if parameter.grad is not None:
            zeros = (local_shard(parameter.grad) == 0).sum()
            count += zeros / num_copies(parameter.grad, mesh)
    return mesh.sum(count, "replica").round().long()


def global_fingerprint(batch: Batch, mesh: Mesh) -> str:
    """Returns the fingerprint of the global batch as 16 hex digits (collective: every rank).

    `batch` holds this rank's sequences.
    """
    local = fingerprint(batch, first_sequence=mesh.axis_rank("dp") * len(batch.tokens_BS)) % 2**64
    # the sum over ranks wraps around in int64 as it does in uint64
    as_int64 = torch.from_numpy(np.array([local], dtype=np.uint64).view(np.int64))
    return f"{int(mesh.sum(as_int64, 'dp').item()) % 2**64:016x}"


def describe_data(stream: Stream, mesh: Mesh, step: int) -> str:
    """Returns the fingerprint and first documents of a step's global batch, as a sentence.

    Collective: every rank. Reads the batch again; if any rank cannot, the sentence says so.
    """
    batch: Batch | None = None
    documents: Sequence[str] = ()
    failure = ""
    try:
        batch = stream.batch_at(step)
        if batch is not None:
            documents = stream.documents(step)
    except (UserError, RunFailed, OSError) as error:
        failure = " ".join(str(error).split())
    for rank, found in enumerate(gather_objects(failure)):
        if found:
            return f"The data cannot be read again (rank {rank}: {found})."
    if batch is None:
        return "The data come from a custom stream."
    text = f"Data fingerprint {global_fingerprint(batch, mesh)}"
    if not documents:
        return f"{text}; synthetic."
    return f"{text}; documents: {', '.join(documents)}, …"


@dataclass
class SpikeDetector:
    """Finds losses that are `threshold` (0: off) standard deviations above the recent mean.

    Mean and deviation are exponential averages over about 50 reports without the spikes.
    """

    threshold: float
    _mean: float = 0.0
    _variance: float = 0.0
    _count: int = 0

    def is_spike(self, loss: float) -> bool:
        """Returns whether `loss` is a spike, and adds it to the averages. Never before report 20."""
        if not math.isfinite(loss):
            return False
        difference = loss - self._mean
        deviation = max(math.sqrt(self._variance), 0.005 * abs(self._mean))
        is_high = difference > self.threshold * deviation
        if self.threshold and self._count >= 20 and is_high:
            return True
        self._count += 1
        weight = max(1 / self._count, 0.02)  # the plain mean of the first 50 reports
        self._mean += weight * difference
        self._variance = (1 - weight) * (self._variance + weight * difference * difference)
        return False
