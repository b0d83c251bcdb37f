"""Muon: momentum whose update of a matrix has all singular values near 1.

The parts of a matrix lie on several ranks, and the update needs them together. As many matrices as there are
such ranks are dealt at a time, one a rank: all parts of a matrix travel to its owner, which orthogonalizes
the matrix, and travel back, in two messages.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from fms_fsdp.errors import UserError
from fms_fsdp.optim.shards import ShardOptimizer, State
from fms_fsdp.sharded import Tensors, groups_of, joined, local_parts, on_group_device, part_sizes, taken_apart

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
        weights, gradients = local_parts(parameters), local_parts(p.grad for p in parameters)
        means = local_parts(state["momentum_buffer"] for state in states)
        torch._foreach_lerp_(means, gradients, 1 - group["momentum"])
        if group["nesterov"]:
            torch._foreach_lerp_(gradients, means, group["momentum"])
            means = gradients
        torch._foreach_mul_(weights, 1 - group["lr"] * group["weight_decay"])
        for ranks, indices in groups_of(parameters).items():
            window = ranks.size() if ranks else 1
            for start in range(0, len(indices), window):
                some = indices[start : start + window]
                matrices = [parameters[i] for i in some]
                updates = _orthogonalize(ranks, matrices, [means[i] for i in some], group["ns_steps"])
                for i, update in zip(some, updates, strict=True):
                    rows, columns = parameters[i].shape
                    wide = 0.2 * max(rows, columns) ** 0.5
                    factor = wide if group["scale"] == "rms" else max(1, rows / columns) ** 0.5
                    weights[i].add_(update, alpha=-group["lr"] * factor)


def _orthogonalize(
    group: dist.ProcessGroup | None, parameters: Tensors, parts: Tensors, num_steps: int
) -> Tensors:
    """This rank's part of each matrix, orthogonalized; rank i of the group works on matrix i (collective).

    The ranks of the group hold the parts; None where matrices are whole. Some ranks may have no matrix.
    """
    if group is None:
        return [orthogonalized(part, num_steps) for part in parts]
    rank, ranks = group.rank(), group.size()
    sizes = list(map(part_sizes, parameters)) + [[0] * ranks] * (ranks - len(parameters))
    mine, per_matrix = sizes[rank], [size[rank] for size in sizes]
    sent = on_group_device(torch.cat([part.bfloat16().flatten() for part in parts]), parameters[0])
    entries = sent.new_empty(sum(mine))
    dist.all_to_all_single(entries, sent, mine, per_matrix, group)
    if rank < len(parameters):
        whole = orthogonalized(joined(entries, parameters[rank]), num_steps)
        entries = taken_apart(whole, parameters[rank])
    dist.all_to_all_single(sent, entries, per_matrix, mine, group)
    received = torch.split(sent.to(parts[0].device), per_matrix[: len(parts)])
    return list(map(torch.Tensor.view_as, received, parts))


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
