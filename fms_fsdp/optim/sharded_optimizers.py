"""Optimizers that torch does not have, or whose torch class does not work on DTensors (torch 2.11 to 2.13).

All step on local shards. A value of a full tensor (a norm, the mean of a row) is reduced over the
ranks that hold its shards, for all tensors in one collective. Weight decay is decoupled.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch.optim.rprop import rprop

from fms_fsdp.distributed.dtensor import (
    Tensors,
    local_shard,
    local_shards,
    reduce_over_shards,
    tensor_norms,
    zeros_along,
)
from fms_fsdp.distributed.runtime import HostCopy
from fms_fsdp.errors import UserError

Group = dict[str, Any]
State = dict[str, torch.Tensor]
Pair = tuple[float, float]


class ShardedOptimizer(torch.optim.Optimizer):
    """Base class: creates the state when built, and updates the parameters of a group together.

    `state_names` are the state tensors of the shape of the parameter. Like torch's fused optimizers
    it changes nothing if `found_inf` is set, on the device; the step count is corrected when the
    next step begins.
    """

    state_names: tuple[str, ...] = ()
    skips_on_device = True  # by `found_inf`
    found_inf: torch.Tensor | None = None
    _is_skipped: torch.Tensor | None = None  # of the running step
    _last_found_inf: HostCopy | None = None
    _stepped: list[State] = []  # whose count the last step raised

    def __init__(self, params: Any, **defaults: Any) -> None:
        if not 0 <= defaults.get("momentum", 0.0) < 1:
            raise UserError(f"momentum={defaults['momentum']:g} must be at least 0 and below 1")
        super().__init__(params, defaults)
        for group in self.param_groups:
            for param in group["params"]:
                self.state[param] = {"step": torch.zeros(())} | self.init_state(param, group)

    def init_state(self, param: torch.Tensor, group: Group) -> State:
        """Returns the state before the first step, without the step count."""
        return {name: torch.zeros_like(param) for name in self.state_names}

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Updates the weights (collective)."""
        self._correct_step_count()
        self._is_skipped = None if self.found_inf is None else self.found_inf > 0
        self._stepped = []
        for group in self.param_groups:
            # A weight without a gradient in some steps has a count of its own.
            by_step: dict[int, tuple[Tensors, list[State]]] = {}
            for param in group["params"]:
                if param.grad is None:
                    continue
                state = self.state[param]
                state["step"] += 1
                self._stepped.append(state)
                params, states = by_step.setdefault(int(state["step"]), ([], []))
                params.append(param)
                states.append(state)
            for step, (params, states) in by_step.items():
                self.update(group, step, params, states)
        self._last_found_inf = None if self.found_inf is None else HostCopy(self.found_inf)

    def state_dict(self) -> dict[str, Any]:
        self._correct_step_count()
        return super().state_dict()

    def _correct_step_count(self) -> None:
        """Subtracts the last step from the count if it was skipped.

        Its flag is ready, so nothing waits.
        """
        last = self._last_found_inf
        self._last_found_inf = None
        if last is not None and last.read():
            for state in self._stepped:
                state["step"] -= 1

    def update(self, group: Group, step: int, params: Tensors, states: list[State]) -> None:
        """Updates parameters and states by `assign`; `step` counts from 1."""
        raise NotImplementedError

    def assign(self, target: torch.Tensor, value: torch.Tensor) -> None:
        """Copies `value` to a weight or a state, unless the step is skipped."""
        if self._is_skipped is None:
            target.copy_(value)
        else:
            torch.where(self._is_skipped, target, value, out=target)


def shards_of(params: Tensors, states: list[State], *names: str) -> Iterator[Tensors]:
    """Yields the local shards of each parameter, its gradient, and its state of these names."""
    for param, state in zip(params, states, strict=True):
        yield local_shards([param, param.grad, *(state[name] for name in names)])


class Lamb(ShardedOptimizer):
    """Adam's update of each tensor, with decay, scaled to the norm of the tensor.

        m = β1 m + (1 − β1) g      v = β2 v + (1 − β2) g²      both with bias correction
        u = m / (√v + ε) + decay · w      w = w − lr · ‖w‖/‖u‖ · u      ratio 1 if a norm is 0

    Source: You et al., "Large batch optimization for deep learning",
    https://arxiv.org/abs/1904.00962.
    """

    state_names = ("exp_avg", "exp_avg_sq")

    def __init__(
        self, params: Any, lr: float, betas: Pair, eps: float, weight_decay: float
    ) -> None:
        super().__init__(params, lr=lr, betas=betas, eps=eps, weight_decay=weight_decay)

    def update(self, group: Group, step: int, params: Tensors, states: list[State]) -> None:
        beta1, beta2 = group["betas"]
        bias1 = 1 - beta1**step
        bias2 = 1 - beta2**step
        weights = local_shards(params)
        updates = []
        for weight, grad, mean, square in shards_of(params, states, *self.state_names):
            self.assign(mean, mean.lerp(grad, 1 - beta1))
            self.assign(square, square.mul(beta2).addcmul_(grad, grad, value=1 - beta2))
            # In one buffer: 1 / (√v + ε), times m, plus the decay.
            update = square.sqrt().div_(math.sqrt(bias2)).add_(group["eps"]).reciprocal_()
            update.mul_(mean).div_(bias1)
            update.add_(weight, alpha=group["weight_decay"])
            updates.append(update)
        # Both kinds of norms in one collective.
        norms = tensor_norms([*weights, *updates], [*params, *params])
        weight_norms = norms[: len(weights)]
        update_norms = norms[len(weights) :]
        for weight, update, weight_norm, update_norm in zip(
            weights, updates, weight_norms, update_norms, strict=True
        ):
            has_ratio = (weight_norm > 0) & (update_norm > 0)
            ratio = torch.where(has_ratio, weight_norm / update_norm, 1.0)
            self.assign(weight, weight.addcmul(update, ratio, value=-group["lr"]))


class NovoGrad(ShardedOptimizer):
    """Momentum over gradients that are normalized per tensor.

        v = β2 v + (1 − β2) ‖g‖², one number per tensor (initially ‖g‖²)
        m = β1 m + g / (√v + ε) + decay · w      w = w − lr · m

    Source: Ginsburg et al., "Stochastic gradient methods with layer-wise adaptive moments",
    https://arxiv.org/abs/1905.11286.
    """

    def __init__(
        self, params: Any, lr: float, betas: Pair, eps: float, weight_decay: float
    ) -> None:
        super().__init__(params, lr=lr, betas=betas, eps=eps, weight_decay=weight_decay)

    def init_state(self, param: torch.Tensor, group: Group) -> State:
        return {"exp_avg": torch.zeros_like(param), "norm_sq": torch.zeros((), device=param.device)}

    def update(self, group: Group, step: int, params: Tensors, states: list[State]) -> None:
        beta1, beta2 = group["betas"]
        one_minus_beta2 = 1 - beta2 if step > 1 else 1.0  # v begins with ‖g‖², not with 0
        norms = tensor_norms(local_shards(param.grad for param in params), params)
        shards = shards_of(params, states, "exp_avg", "norm_sq")
        for norm, (weight, grad, mean, norm_sq) in zip(norms, shards, strict=True):
            self.assign(norm_sq, norm_sq.lerp(norm.square(), one_minus_beta2))
            new_mean = mean.mul(beta1).add_(grad / (norm_sq.sqrt() + group["eps"]))
            self.assign(mean, new_mean.add_(weight, alpha=group["weight_decay"]))
            self.assign(weight, weight.add(mean, alpha=-group["lr"]))


class Madgrad(ShardedOptimizer):
    """Dual averaging from the initial weights w0, with a cube root in place of Adam's square root.

        λ = lr · √t      s = s + λ g      ν = ν + λ g²
        z = w0 − s / (∛ν + ε)      w = momentum · w + (1 − momentum) · z − lr · decay · w

    Without momentum nothing of w is left in z, so that w0 decays with it.
    Source: Defazio and Jelassi, "Adaptivity without compromise", https://arxiv.org/abs/2101.11075;
    the decay as `decouple_decay` of https://github.com/facebookresearch/madgrad.
    """

    state_names = ("grad_sum", "grad_sum_sq", "first_weight")

    def __init__(
        self, params: Any, lr: float, eps: float, weight_decay: float, momentum: float = 0.9
    ) -> None:
        super().__init__(params, lr=lr, momentum=momentum, eps=eps, weight_decay=weight_decay)

    def update(self, group: Group, step: int, params: Tensors, states: list[State]) -> None:
        lr = group["lr"]
        decay = lr * group["weight_decay"]
        scale = lr * step**0.5  # λ
        for weight, grad, total, square, first in shards_of(params, states, *self.state_names):
            if step == 1:
                self.assign(first, weight)  # weights may be loaded after the optimizer is built
            self.assign(total, total.add(grad, alpha=scale))
            self.assign(square, square.addcmul(grad, grad, value=scale))
            # In one buffer: 1 / (∛ν + ε), times s, subtracted from w0.
            z = square.pow(1 / 3).add_(group["eps"]).reciprocal_()
            z.mul_(total).neg_().add_(first)
            if group["momentum"] == 0:
                self.assign(first, first.sub(weight, alpha=decay))
            updated = weight.lerp(z, 1 - group["momentum"]).sub_(weight, alpha=decay)
            self.assign(weight, updated)


class Adafactor(ShardedOptimizer):
    """Adam's second moment V of a matrix from the means of its rows r and columns c; no first moment.

        β = 1 − t^beta2_decay      r, c = β r + (1 − β) mean of g² over a row, a column
        V = r cᵀ / mean(r)         of a vector: β V + (1 − β) g²
        u = g / max(√V, eps1)      w = w − max(eps2, RMS(w)) · min(lr, 1/√t) / max(1, RMS(u) / d) · u

    As torch.optim.Adafactor. Source: Shazeer and Stern, https://arxiv.org/abs/1804.04235.
    """

    def __init__(
        self,
        params: Any,
        lr: float,
        weight_decay: float,
        beta2_decay: float = -0.8,
        eps1: float = torch.finfo(torch.float32).eps,
        eps2: float = 1e-3,
        d: float = 1.0,
    ) -> None:
        if beta2_decay > 0:
            raise UserError(
                f"beta2_decay={beta2_decay:g} must be at most 0; write beta2_decay=-0.8"
            )
        if eps1 <= 0:
            raise UserError(f"eps1={eps1:g} must be above 0; write eps1=1e-7")
        if eps2 < 0:
            raise UserError(f"eps2={eps2:g} must be at least 0; write eps2=1e-3")
        if d < 1:
            raise UserError(f"d={d:g} must be at least 1; write d=1")
        own = {"beta2_decay": beta2_decay, "eps1": eps1, "eps2": eps2, "d": d}
        super().__init__(params, lr=lr, weight_decay=weight_decay, **own)

    def init_state(self, param: torch.Tensor, group: Group) -> State:
        if param.ndim != 2:
            return {"variance": torch.zeros_like(param)}
        return {"row_var": zeros_along(param, 0), "col_var": zeros_along(param, 1)}

    def update(self, group: Group, step: int, params: Tensors, states: list[State]) -> None:
        one_minus_beta = step ** group["beta2_decay"]
        weights = local_shards(params)
        updates = []
        for param, state in zip(params, states, strict=True):
            (grad,) = local_shards([param.grad])
            if "variance" in state:
                variance = local_shard(state["variance"])
                self.assign(variance, variance.lerp(grad.square(), one_minus_beta))
            else:
                variance = self._matrix_variance(param, grad, state, one_minus_beta, group["eps1"])
            update = variance.clamp(min=group["eps1"] ** 2).rsqrt_()
            updates.append(update.mul_(grad))
        weight_norms = tensor_norms(weights, params)
        update_norms = tensor_norms(updates, params)
        decay = 1 - group["lr"] * group["weight_decay"]
        lr = min(group["lr"], step**-0.5)
        for i, (weight, update) in enumerate(zip(weights, updates, strict=True)):
            root = params[i].numel() ** 0.5  # RMS = norm / root
            factor = (weight_norms[i] / root).clamp(min=group["eps2"])
            factor /= (update_norms[i] / (root * group["d"])).clamp(min=1)
            self.assign(weight, weight.mul(decay).addcmul_(update, factor, value=-lr))

    def _matrix_variance(
        self,
        param: torch.Tensor,
        grad: torch.Tensor,
        state: State,
        one_minus_beta: float,
        eps: float,
    ) -> torch.Tensor:
        """Updates the means of rows and columns, and returns this rank's shard of V."""
        row = local_shard(state["row_var"])  # (rows, 1)
        column = local_shard(state["col_var"])  # (1, columns)
        for dim, mean in ((1, row), (0, column)):
            square = torch.linalg.vector_norm(grad, dim=dim, keepdim=True).square()
            reduce_over_shards([square], [param], dim)
            self.assign(mean, mean.lerp(square / param.shape[dim], one_minus_beta))
        total = row.sum()
        reduce_over_shards([total], [param], 0)
        mean_of_rows = total / param.shape[0]
        return row * (column / mean_of_rows.clamp(min=eps))


class SM3(ShardedOptimizer):
    """Adagrad that bounds the sum of squares of an element by one number per row and per column.

        ν = min(row, column) + g²      row, column = the largest ν in it      of a vector: ν = ν + g²
        m = momentum m + (1 − momentum) g / √ν      w = w − lr · m          0 / √0 is 0

    Source: Anil et al., "Memory-efficient adaptive optimization" (SM3-II),
    https://arxiv.org/abs/1901.11150.
    """

    def __init__(self, params: Any, lr: float, weight_decay: float, momentum: float = 0.9) -> None:
        super().__init__(params, lr=lr, momentum=momentum, weight_decay=weight_decay)

    def init_state(self, param: torch.Tensor, group: Group) -> State:
        mean = {"exp_avg": torch.zeros_like(param)} if group["momentum"] else {}
        if param.ndim != 2:
            return mean | {"sum": torch.zeros_like(param)}
        return mean | {"row_max": zeros_along(param, 0), "col_max": zeros_along(param, 1)}

    def update(self, group: Group, step: int, params: Tensors, states: list[State]) -> None:
        lr = group["lr"]
        momentum = group["momentum"]
        decay = 1 - lr * group["weight_decay"]
        for param, state in zip(params, states, strict=True):
            weight, grad = local_shards((param, param.grad))
            if "sum" in state:
                bound = local_shard(state["sum"])
                self.assign(bound, bound.addcmul(grad, grad))
            else:
                row = local_shard(state["row_max"])  # (rows, 1)
                column = local_shard(state["col_max"])  # (1, columns)
                bound = torch.minimum(row, column).addcmul_(grad, grad)
                new_row = bound.amax(1, keepdim=True)
                new_column = column.clone()
                if len(bound):  # a rank without rows keeps the old bound, which never falls
                    new_column = bound.amax(0, keepdim=True)
                reduce_over_shards([new_row], [param], 1, dist.ReduceOp.MAX)
                reduce_over_shards([new_column], [param], 0, dist.ReduceOp.MAX)
                self.assign(row, new_row)
                self.assign(column, new_column)
            tiny = torch.finfo(bound.dtype).tiny  # makes 0 / √0 zero
            update = grad * bound.clamp(min=tiny).rsqrt()
            if momentum:
                mean = local_shard(state["exp_avg"])
                self.assign(mean, mean.lerp(update, 1 - momentum))
                update = mean
            self.assign(weight, weight.mul(decay).add_(update, alpha=-lr))


class Rprop(torch.optim.Rprop):
    """torch's Rprop on local shards: its operations have no sharding rules.

    It does not read `found_inf`: the host skips the step.
    """

    def __init__(
        self, params: Any, lr: float, etas: Pair = (0.5, 1.2), step_sizes: Pair = (1e-6, 50.0)
    ) -> None:
        if len(etas) != 2 or not 0 < etas[0] < 1 < etas[1]:
            value = ":".join(f"{eta:g}" for eta in etas)
            raise UserError(f"etas={value} must be a:b with 0 < a < 1 < b; write etas=0.5:1.2")
        if len(step_sizes) != 2 or not 0 < step_sizes[0] < step_sizes[1]:
            value = ":".join(f"{size:g}" for size in step_sizes)
            raise UserError(
                f"step_sizes={value} must be a:b with 0 < a < b; write step_sizes=1e-6:50"
            )
        super().__init__(params, lr, etas, step_sizes, foreach=True)

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            params = [param for param in group["params"] if param.grad is not None]
            states = [self._state_of(param, group) for param in params]
            lower, higher = group["etas"]
            smallest, largest = group["step_sizes"]
            rprop(
                local_shards(params),
                local_shards(param.grad for param in params),
                local_shards(state["prev"] for state in states),
                local_shards(state["step_size"] for state in states),
                [state["step"] for state in states],
                foreach=True,
                step_size_min=smallest,
                step_size_max=largest,
                etaminus=lower,
                etaplus=higher,
            )

    def _state_of(self, param: torch.Tensor, group: Group) -> State:
        """Returns the state of a parameter, which its first step creates."""
        state: State = self.state[param]
        if not state:
            state["step"] = torch.zeros(())
            state["prev"] = torch.zeros_like(param)
            state["step_size"] = torch.full_like(param, float(group["lr"]))
        return state
