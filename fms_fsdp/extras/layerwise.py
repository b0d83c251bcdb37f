"""Optimizers that scale by the norm of a whole tensor: LAMB and NovoGrad. Their decay is decoupled."""

from __future__ import annotations

import math
from typing import Any

import torch

from fms_fsdp.optim.shards import Pair, ShardOptimizer, State
from fms_fsdp.sharded import Tensors, local_parts, norms_of


class Lamb(ShardOptimizer):
    """Adam's direction, with decay, of each tensor at the length of the tensor itself.

        m = β1 m + (1 − β1) g      v = β2 v + (1 − β2) g²      both corrected for their start at 0
        u = m / (√v + ε) + decay·w      w = w − rate · ‖w‖/‖u‖ · u          the ratio is 1 where a norm is 0

    Source: You et al., "Large batch optimization for deep learning", https://arxiv.org/abs/1904.00962.
    """

    kept = ("exp_avg", "exp_avg_sq")

    def __init__(self, groups: Any, lr: float, betas: Pair, eps: float, weight_decay: float) -> None:
        super().__init__(groups, lr=lr, betas=betas, eps=eps, weight_decay=weight_decay)

    def update(self, group: dict[str, Any], step: int, parameters: Tensors, states: list[State]) -> None:
        beta1, beta2 = group["betas"]
        weights, updates = local_parts(parameters), local_parts(p.grad for p in parameters)
        means = local_parts(state["exp_avg"] for state in states)
        squares = local_parts(state["exp_avg_sq"] for state in states)
        torch._foreach_lerp_(means, updates, 1 - beta1)
        torch._foreach_mul_(squares, beta2)
        torch._foreach_addcmul_(squares, updates, updates, 1 - beta2)
        torch._foreach_copy_(updates, squares)  # from here on the update takes the place of the gradient
        torch._foreach_sqrt_(updates)
        torch._foreach_div_(updates, math.sqrt(1 - beta2**step))
        torch._foreach_add_(updates, group["eps"])
        torch._foreach_reciprocal_(updates)
        torch._foreach_mul_(updates, means)
        torch._foreach_div_(updates, 1 - beta1**step)
        torch._foreach_add_(updates, weights, alpha=group["weight_decay"])
        norms = norms_of([*weights, *updates], [*parameters, *parameters])
        lengths, steps = norms[: len(weights)], norms[len(weights) :]
        for weight, update, length, taken in zip(weights, updates, lengths, steps, strict=True):
            ratio = torch.where((length > 0) & (taken > 0), length / taken, 1.0)
            weight.addcmul_(update, ratio, value=-group["lr"])


class NovoGrad(ShardOptimizer):
    """Momentum over gradients that are normalized tensor by tensor.

        v = β2 v + (1 − β2) ‖g‖², one number a tensor (at first ‖g‖²)
        m = β1 m + g / (√v + ε) + decay·w      w = w − rate · m

    Source: Ginsburg et al., "Stochastic gradient methods with layer-wise adaptive moments",
    https://arxiv.org/abs/1905.11286.
    """

    kept = ("exp_avg",)

    def __init__(self, groups: Any, lr: float, betas: Pair, eps: float, weight_decay: float) -> None:
        super().__init__(groups, lr=lr, betas=betas, eps=eps, weight_decay=weight_decay)

    def new_state(self, parameter: torch.Tensor, group: dict[str, Any]) -> State:
        norm = {"norm_sq": torch.zeros((), device=parameter.device)}
        return super().new_state(parameter, group) | norm

    def update(self, group: dict[str, Any], step: int, parameters: Tensors, states: list[State]) -> None:
        beta1, beta2 = group["betas"]
        weights, gradients = local_parts(parameters), local_parts(p.grad for p in parameters)
        for state, norm, gradient in zip(states, norms_of(gradients, parameters), gradients, strict=True):
            state["norm_sq"].lerp_(norm.square(), 1 - beta2 if step > 1 else 1.0)
            gradient.div_(state["norm_sq"].sqrt() + group["eps"])
        means = local_parts(state["exp_avg"] for state in states)
        torch._foreach_mul_(means, beta1)
        torch._foreach_add_(means, gradients)
        torch._foreach_add_(means, weights, alpha=group["weight_decay"])
        torch._foreach_add_(weights, means, alpha=-group["lr"])
