"""Optimizers whose second moment of a matrix is one number a row and one a column: Adafactor and SM3."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from fms_fsdp.errors import UserError
from fms_fsdp.optim.shards import ShardOptimizer, State
from fms_fsdp.sharded import Tensors, local_part, local_parts, norms_of, reduce_over_parts, zeros_along


class Adafactor(ShardOptimizer):
    """Adam's second moment V of a matrix from the means of its rows r and columns c; no first moment.

        β = 1 − t^beta2_decay      r, c = β r + (1 − β) mean of g² over a row, a column
        V = r cᵀ / mean(r)         of a vector: β V + (1 − β) g²
        u = g / max(√V, eps1)      w = w − max(eps2, RMS(w)) · min(rate, 1/√t) / max(1, RMS(u) / d) · u

    As torch.optim.Adafactor, which cannot work on shards (torch 2.11 to 2.13); its decay is decoupled too.
    Source: Shazeer and Stern, https://arxiv.org/abs/1804.04235.
    """

    def __init__(
        self,
        groups: Any,
        lr: float,
        weight_decay: float,
        beta2_decay: float = -0.8,
        eps1: float = torch.finfo(torch.float32).eps,
        eps2: float = 1e-3,
        d: float = 1.0,
    ) -> None:
        if beta2_decay > 0 or eps1 <= 0 or eps2 < 0 or d < 1:
            raise UserError("needs beta2_decay <= 0, eps1 > 0, eps2 >= 0 and d >= 1")
        settings = {"beta2_decay": beta2_decay, "eps1": eps1, "eps2": eps2, "d": d}
        super().__init__(groups, lr=lr, weight_decay=weight_decay, **settings)

    def new_state(self, parameter: torch.Tensor, group: dict[str, Any]) -> State:
        if parameter.ndim != 2:
            return {"variance": torch.zeros_like(parameter)}
        return {"row_var": zeros_along(parameter, 0), "col_var": zeros_along(parameter, 1)}

    def update(self, group: dict[str, Any], step: int, parameters: Tensors, states: list[State]) -> None:
        weights, updates = local_parts(parameters), local_parts(p.grad for p in parameters)
        sizes = [parameter.numel() ** 0.5 for parameter in parameters]
        lengths, new = norms_of(weights, parameters), step ** group["beta2_decay"]
        means = iter(self._update_factors(new, parameters, states))
        for state, gradient in zip(states, updates, strict=True):
            if "variance" in state:
                estimate = local_part(state["variance"]).lerp_(gradient.square(), new).clone()
            else:
                mean = next(means).clamp(min=group["eps1"])
                estimate = local_part(state["row_var"]) * (local_part(state["col_var"]) / mean)
            gradient.mul_(estimate.clamp_(min=group["eps1"] ** 2).rsqrt_())
        torch._foreach_mul_(weights, 1 - group["lr"] * group["weight_decay"])
        rate = min(group["lr"], step**-0.5)
        norms = norms_of(updates, parameters)
        for weight, update, length, norm, size in zip(weights, updates, lengths, norms, sizes, strict=True):
            factor = (length / size).clamp(min=group["eps2"]) / (norm / (size * group["d"])).clamp(min=1)
            weight.addcmul_(update, factor, value=-rate)

    def _update_factors(self, new: float, parameters: Tensors, states: list[State]) -> Tensors:
        """Lets the share `new` of the means of rows and columns come from these gradients.

        Returns the mean of all, for each matrix.
        """
        matrices = [parameter for parameter in parameters if parameter.ndim == 2]
        kept = [state for state in states if "row_var" in state]
        for dim, name in enumerate(("row_var", "col_var")):
            gradients = local_parts(parameter.grad for parameter in matrices)
            squares = [torch.linalg.vector_norm(g, dim=1 - dim, keepdim=True).square() for g in gradients]
            reduce_over_parts(squares, matrices, 1 - dim)
            for square, parameter, state in zip(squares, matrices, kept, strict=True):
                local_part(state[name]).lerp_(square / parameter.shape[1 - dim], new)
        totals = [local_part(state["row_var"]).sum() for state in kept]
        reduce_over_parts(totals, matrices, 0)
        return [total / matrix.shape[0] for total, matrix in zip(totals, matrices, strict=True)]


class SM3(ShardOptimizer):
    """Adagrad whose sum of squares of an entry is the smaller of a bound on its row and one on its column.

        ν = min(row, column) + g²      row, column = the largest ν in it      of a vector: ν = ν + g²
        m = momentum m + (1 − momentum) g / √ν      w = w − rate · m          0 / √0 is 0

    The decay is decoupled. Source: Anil et al., "Memory-efficient adaptive optimization" (SM3-II),
    https://arxiv.org/abs/1901.11150.
    """

    def __init__(self, groups: Any, lr: float, weight_decay: float, momentum: float = 0.9) -> None:
        super().__init__(groups, lr=lr, momentum=momentum, weight_decay=weight_decay)

    def new_state(self, parameter: torch.Tensor, group: dict[str, Any]) -> State:
        mean = {"exp_avg": torch.zeros_like(parameter)} if group["momentum"] else {}
        if parameter.ndim != 2:
            return mean | {"sum": torch.zeros_like(parameter)}
        return mean | {"row_max": zeros_along(parameter, 0), "col_max": zeros_along(parameter, 1)}

    def update(self, group: dict[str, Any], step: int, parameters: Tensors, states: list[State]) -> None:
        weights, updates = local_parts(parameters), local_parts(p.grad for p in parameters)
        for parameter, state, update in zip(parameters, states, updates, strict=True):
            if "sum" in state:
                bound = local_part(state["sum"]).addcmul_(update, update)
            else:
                row, column = local_part(state["row_max"]), local_part(state["col_max"])
                bound = torch.minimum(row, column).addcmul_(update, update)
                row.copy_(bound.amax(1, keepdim=True))
                # a rank may hold no row; a bound never falls, so the one before stands for it
                column.copy_(bound.amax(0, keepdim=True) if len(bound) else column)
                reduce_over_parts([row], [parameter], 1, dist.ReduceOp.MAX)
                reduce_over_parts([column], [parameter], 0, dist.ReduceOp.MAX)
            update.mul_(bound.clamp(min=torch.finfo(bound.dtype).tiny).rsqrt())
        torch._foreach_mul_(weights, 1 - group["lr"] * group["weight_decay"])
        if group["momentum"]:
            means = local_parts(state["exp_avg"] for state in states)
            torch._foreach_lerp_(means, updates, 1 - group["momentum"])
            updates = means
        torch._foreach_add_(weights, updates, alpha=-group["lr"])
