"""Muon: momentum whose update of a matrix has all singular values near 1.

Rows of a matrix lie on several ranks, and the update needs them together. As many matrices as there are ranks
are dealt at a time, one a rank: all rows of a matrix travel to its owner, which orthogonalizes it, and travel
back, in two messages.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from fms_fsdp.errors import UserError
from fms_fsdp.optim.shards import ShardOptimizer, State, Tensors, shards_of

_QUINTIC = (3.4445, -4.775, 2.0315)  # steepest at 0; takes singular values to between 0.7 and 1.2


class Muon(ShardOptimizer):
    """Momentum, then orthogonalization. Works on matrices alone; the decay is decoupled.

        m = momentum m + (1 − momentum) g
        u = orthogonalized m, with nesterov momentum m + (1 − momentum) g      w = w − rate · scale · u

    `scale`: "rms" is 0.2 √max(rows, columns), which gives the update the size of one of AdamW, so that one
    rate serves both; "original" is √max(1, rows / columns).
    Source: Jordan et al., https://kellerjordan.github.io/posts/muon; Liu et al. (rms),
    https://arxiv.org/abs/2502.16982.
    """

    kept = ("momentum_buffer",)

    def __init__(
        self,
        groups: Any,
        lr: float,
        weight_decay: float,
        momentum: float = 0.95,
        nesterov: bool = True,
        ns_steps: int = 5,
        scale: str = "rms",
    ) -> None:
        if scale not in ("rms", "original"):
            raise UserError(f"scale ({scale}) must be rms or original")
        if not 1 <= ns_steps <= 100:
            raise UserError(f"ns_steps ({ns_steps}) must be from 1 to 100")
        settings = {"momentum": momentum, "nesterov": nesterov, "ns_steps": ns_steps, "scale": scale}
        super().__init__(groups, lr=lr, weight_decay=weight_decay, **settings)

    def update(self, group: dict[str, Any], step: int, parameters: Tensors, states: list[State]) -> None:
        weights, gradients = shards_of(parameters), shards_of(p.grad for p in parameters)
        means = shards_of(state["momentum_buffer"] for state in states)
        torch._foreach_lerp_(means, gradients, 1 - group["momentum"])
        if group["nesterov"]:
            torch._foreach_lerp_(gradients, means, group["momentum"])
            means = gradients
        torch._foreach_mul_(weights, 1 - group["lr"] * group["weight_decay"])
        *_, ranks = _place(parameters[0])
        for start in range(0, len(parameters), ranks):
            window = slice(start, start + ranks)
            updates = _orthogonalize(parameters[window], means[window], group["ns_steps"])
            for parameter, weight, update in zip(parameters[window], weights[window], updates, strict=True):
                rows, columns = parameter.shape
                wide = 0.2 * max(rows, columns) ** 0.5
                factor = wide if group["scale"] == "rms" else max(1, rows / columns) ** 0.5
                weight.add_(update, alpha=-group["lr"] * factor)


def _place(parameter: torch.Tensor) -> tuple[Any, int, int]:
    """The process group whose ranks hold the rows of a matrix, this rank's place in it, and its size."""
    shards = parameter.placements if isinstance(parameter, DTensor) else ()
    axes = [axis for axis, placement in enumerate(shards) if placement.is_shard()]
    if not axes:
        return None, 0, 1
    assert isinstance(parameter, DTensor) and len(axes) == 1 and shards[axes[0]].is_shard(0), shards
    mesh, axis = parameter.device_mesh, axes[0]
    return mesh.get_group(axis), mesh.get_local_rank(axis), mesh.size(axis)


def _orthogonalize(parameters: Tensors, shards: Tensors, num_steps: int) -> Tensors:
    """This rank's rows of each matrix, orthogonalized; rank i does it for matrix i (collective)."""
    group, rank, ranks = _place(parameters[0])
    if group is None:
        return [orthogonalized(shard, num_steps) for shard in shards]
    counts = [_rows_by_rank(p.shape[0], ranks, p.shape[1]) for p in parameters]
    counts += [[0] * ranks] * (ranks - len(counts))  # ranks without a matrix
    mine, per_matrix = counts[rank], [count[rank] for count in counts]
    device = parameters[0].device_mesh.device_type  # type: ignore[attr-defined]
    sent = torch.cat([shard.bfloat16().flatten() for shard in shards]).to(device)
    whole = sent.new_empty(sum(mine))
    dist.all_to_all_single(whole, sent, mine, per_matrix, group)
    if rank < len(parameters):
        whole = orthogonalized(whole.view(parameters[rank].shape), num_steps).flatten()
    dist.all_to_all_single(sent, whole, per_matrix, mine, group)
    parts = torch.split(sent.to(shards[0].device), per_matrix[: len(shards)])
    return [part.view_as(shard) for part, shard in zip(parts, shards, strict=True)]


def _rows_by_rank(rows: int, ranks: int, columns: int) -> list[int]:
    """How many entries of a matrix each rank holds, as `Shard(0)` cuts it."""
    most = -(-rows // ranks)
    return [columns * max(0, min(most, rows - rank * most)) for rank in range(ranks)]


def orthogonalized(matrix: torch.Tensor, num_steps: int) -> torch.Tensor:
    """The matrix with all singular values near 1, in bf16, by Newton-Schulz steps X = aX + (bA + cA²)X with
    A = XXᵀ."""
    a, b, c = _QUINTIC
    x = matrix.bfloat16()
    is_tall = matrix.shape[0] > matrix.shape[1]
    x = x.T if is_tall else x
    x = x / x.norm().clamp(min=1e-7)
    for _ in range(num_steps):
        gram = x @ x.T
        x = torch.addmm(x, torch.addmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.T if is_tall else x
