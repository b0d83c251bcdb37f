"""Muon: momentum whose update of a matrix has all singular values near 1.

torch.optim.Muon computes on DTensors with collectives in every matmul. Here each rank
orthogonalizes full matrices: the shards of a matrix are sent to one rank and the result back, in
two all-to-alls for as many matrices as there are ranks.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from fms_fsdp.distributed.dtensor import (
    Tensors,
    from_shards,
    shard_groups,
    shard_sizes,
    to_group_device,
    to_shards,
)
from fms_fsdp.errors import UserError
from fms_fsdp.optim.sharded_optimizers import Group, ShardedOptimizer, State, shards_of

_QUINTIC = (3.4445, -4.775, 2.0315)  # steepest at 0; maps singular values to between 0.7 and 1.2


class Muon(ShardedOptimizer):
    """Momentum, then orthogonalization, of matrices only; the weight decay is decoupled.

        m = momentum m + (1 − momentum) g
        u = orthogonalized m, with nesterov momentum m + (1 − momentum) g      w = w − lr · scale · u

    `scale`: "rms" is 0.2 √max(rows, columns), which gives the update the RMS of AdamW's, so that
    both share a learning rate; "original" is √max(1, rows / columns).
    Source: Jordan et al., https://kellerjordan.github.io/posts/muon; Liu et al. (rms),
    https://arxiv.org/abs/2502.16982.
    """

    state_names = ("momentum_buffer",)

    def __init__(
        self,
        params: Any,
        lr: float,
        weight_decay: float,
        momentum: float = 0.95,
        nesterov: bool = True,
        ns_steps: int = 5,
        scale: str = "rms",
    ) -> None:
        if scale not in ("rms", "original"):
            raise UserError(f"scale={scale} must be rms or original")
        if not 1 <= ns_steps <= 100:
            raise UserError(f"ns_steps={ns_steps} must be from 1 to 100")
        own = {"momentum": momentum, "nesterov": nesterov, "ns_steps": ns_steps, "scale": scale}
        super().__init__(params, lr=lr, weight_decay=weight_decay, **own)

    def update(self, group: Group, step: int, params: Tensors, states: list[State]) -> None:
        weights = []
        directions = []
        for weight, grad, mean in shards_of(params, states, "momentum_buffer"):
            self.assign(mean, mean.lerp(grad, 1 - group["momentum"]))
            directions.append(grad.lerp(mean, group["momentum"]) if group["nesterov"] else mean)
            weights.append(weight)
        decay = 1 - group["lr"] * group["weight_decay"]

        for ranks, indices in shard_groups(params).items():
            # At a time as many matrices as there are ranks: each orthogonalizes one.
            size = ranks.size() if ranks else 1
            for first in range(0, len(indices), size):
                batch = indices[first : first + size]
                matrices = [params[i] for i in batch]
                shards = [directions[i] for i in batch]
                updates = _orthogonalize(ranks, matrices, shards, group["ns_steps"])
                for i, update in zip(batch, updates, strict=True):
                    rows, columns = params[i].shape
                    if group["scale"] == "rms":
                        scale = 0.2 * max(rows, columns) ** 0.5
                    else:
                        scale = max(1, rows / columns) ** 0.5
                    weight = weights[i].mul(decay).add_(update, alpha=-group["lr"] * scale)
                    self.assign(weights[i], weight)


def _orthogonalize(
    group: dist.ProcessGroup | None, params: Tensors, shards: Tensors, num_steps: int
) -> Tensors:
    """Orthogonalizes full matrices from their shards, and returns the local shards (collective).

    Rank i of the group computes matrix i, if there is one. Without a group the shards are full
    matrices.
    """
    if group is None:
        return [orthogonalize(shard, num_steps) for shard in shards]
    rank = group.rank()
    # Elements of each matrix on each rank; ranks without a matrix receive nothing.
    sizes = [shard_sizes(param) for param in params]
    while len(sizes) < group.size():
        sizes.append([0] * group.size())
    of_my_matrix = sizes[rank]
    of_my_shards = [size[rank] for size in sizes]
    sent = to_group_device(torch.cat([shard.bfloat16().flatten() for shard in shards]), params[0])
    matrix = sent.new_empty(sum(of_my_matrix))
    dist.all_to_all_single(matrix, sent, of_my_matrix, of_my_shards, group)
    if rank < len(params):
        full = orthogonalize(from_shards(matrix, params[rank]), num_steps)
        matrix = to_shards(full, params[rank])
    dist.all_to_all_single(sent, matrix, of_my_shards, of_my_matrix, group)
    received = torch.split(sent.to(shards[0].device), of_my_shards[: len(shards)])
    return list(map(torch.Tensor.view_as, received, shards))


def orthogonalize(matrix: torch.Tensor, num_steps: int) -> torch.Tensor:
    """Returns the matrix with all singular values near 1, in bf16.

    Newton-Schulz steps: X = aX + (bA + cA²)X with A = XXᵀ.
    """
    a, b, c = _QUINTIC
    is_tall = matrix.shape[0] > matrix.shape[1]
    x = matrix.bfloat16().T if is_tall else matrix.bfloat16()
    x = x / x.norm().clamp(min=1e-7)
    for _ in range(num_steps):
        gram = x @ x.T
        x = torch.addmm(x, torch.addmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.T if is_tall else x
