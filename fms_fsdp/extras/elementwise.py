"""MADGRAD, with decoupled decay, Rprop and SGD: every entry by itself."""

from __future__ import annotations

from typing import Any

import torch

from fms_fsdp.errors import UserError
from fms_fsdp.optim.shards import Pair, ShardOptimizer, State
from fms_fsdp.sharded import Tensors, local_parts


class Madgrad(ShardOptimizer):
    """Dual averaging from the first weights w0, with a cube root in place of Adam's square root.

        λ = rate · √t      s = s + λ g      ν = ν + λ g²
        z = w0 − s / (∛ν + ε)      w = momentum · w + (1 − momentum) · z

    Source: Defazio and Jelassi, "Adaptivity without compromise", https://arxiv.org/abs/2101.11075.
    """

    kept = ("grad_sum", "grad_sum_sq", "first_weight")

    def __init__(
        self, groups: Any, lr: float, eps: float, weight_decay: float, momentum: float = 0.9
    ) -> None:
        super().__init__(groups, lr=lr, momentum=momentum, eps=eps, weight_decay=weight_decay)

    def update(self, group: dict[str, Any], step: int, parameters: Tensors, states: list[State]) -> None:
        weights, gradients = local_parts(parameters), local_parts(p.grad for p in parameters)
        sums = local_parts(state["grad_sum"] for state in states)
        squares = local_parts(state["grad_sum_sq"] for state in states)
        first = local_parts(state["first_weight"] for state in states)
        if step == 1:
            torch._foreach_copy_(first, weights)  # not when it is built: weights may be loaded after that
        share = group["lr"] * step**0.5
        torch._foreach_add_(sums, gradients, alpha=share)
        torch._foreach_addcmul_(squares, gradients, gradients, share)
        torch._foreach_copy_(gradients, squares)  # from here on they are z
        torch._foreach_pow_(gradients, 1 / 3)
        torch._foreach_add_(gradients, group["eps"])
        torch._foreach_reciprocal_(gradients)
        torch._foreach_mul_(gradients, sums)
        torch._foreach_neg_(gradients)
        torch._foreach_add_(gradients, first)
        torch._foreach_mul_(weights, 1 - group["lr"] * group["weight_decay"])
        torch._foreach_lerp_(weights, gradients, 1 - group["momentum"])


class Rprop(ShardOptimizer):
    """A step size for each entry, which grows while the sign of its gradient stays and shrinks where not.

        size = size · (larger eta where g · g_before > 0, smaller where < 0), within `step_sizes`
        w = w − size · sign(g)          where the sign has turned, g counts as 0

    The rate is the first size; a schedule of it changes nothing. As torch.optim.Rprop, which cannot work on
    shards (torch 2.11 to 2.13). Source: Riedmiller and Braun, "A direct adaptive method for faster
    backpropagation learning", 1993.
    """

    def __init__(
        self, groups: Any, lr: float, etas: Pair = (0.5, 1.2), step_sizes: Pair = (1e-6, 50.0)
    ) -> None:
        if len(etas) != 2 or not 0 < etas[0] < 1 < etas[1]:
            raise UserError("etas must be two numbers, one between 0 and 1 and one above 1")
        if len(step_sizes) != 2 or not 0 < step_sizes[0] < step_sizes[1]:
            raise UserError("step_sizes must be two numbers above 0, the smaller one first")
        super().__init__(groups, lr=lr, etas=etas, step_sizes=step_sizes)

    def new_state(self, parameter: torch.Tensor, group: dict[str, Any]) -> State:
        return {"prev": torch.zeros_like(parameter), "step_size": torch.full_like(parameter, group["lr"])}

    def update(self, group: dict[str, Any], step: int, parameters: Tensors, states: list[State]) -> None:
        smaller, larger = group["etas"]
        for parameter, state in zip(parameters, states, strict=True):
            weight, gradient, before, size = local_parts(
                (parameter, parameter.grad, state["prev"], state["step_size"])
            )
            turned = gradient * before
            size.mul_(torch.where(turned > 0, larger, torch.where(turned < 0, smaller, 1.0)))
            size.clamp_(*group["step_sizes"])
            before.copy_(gradient.masked_fill_(turned < 0, 0.0))
            weight.addcmul_(gradient.sign(), size, value=-1)


class SGD(torch.optim.SGD):
    """SGD of torch, whose momentum can be made before the first step.

    The first momentum of torch is the first gradient, without `dampening`; zeros that are made in advance
    would dampen the first gradient too, so a dampened group counts its steps.
    """

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"] if group["momentum"] and group["dampening"] else ():
                if parameter.grad is not None:
                    state = self.state[parameter]
                    if not state.setdefault("step", torch.zeros(())):
                        state["momentum_buffer"] = None  # then torch takes a copy of the gradient
                    state["step"] += 1
        super().step(closure)
