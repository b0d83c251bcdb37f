"""The base of our own optimizers: the state exists as soon as an optimizer is built, so that a checkpoint can
be loaded into the state, and a step works on the shards of this rank.

Elementwise arithmetic needs no more. What is of the whole tensor (a norm, a mean of a row) is reduced over
the ranks that hold its shards (`sharded.py`), for all tensors in one message; replicas hold equal shards, and
so compute the same.
"""

from __future__ import annotations

from typing import Any

import torch

from fms_fsdp.errors import UserError
from fms_fsdp.sharded import Tensors

State = dict[str, torch.Tensor]
Pair = tuple[float, float]


class ShardOptimizer(torch.optim.Optimizer):
    """An optimizer whose `update` works on this rank's shards. `kept`: names of state
    tensors of the shape of the parameter."""

    kept: tuple[str, ...] = ()

    def __init__(self, groups: Any, **settings: Any) -> None:
        if not 0 <= settings.get("momentum", 0.0) < 1:
            raise UserError(f"momentum ({settings['momentum']:g}) must be at least 0 and below 1")
        super().__init__(groups, settings)
        for group in self.param_groups:
            for parameter in group["params"]:
                self.state[parameter] = {"step": torch.zeros(())} | self.new_state(parameter, group)

    def new_state(self, parameter: torch.Tensor, group: dict[str, Any]) -> State:
        """The state of a parameter before the first step, beside the count of steps."""
        return {name: torch.zeros_like(parameter) for name in self.kept}

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """One step (collective: every rank); the gradients are of no use afterwards."""
        for group in self.param_groups:
            parameters = [parameter for parameter in group["params"] if parameter.grad is not None]
            states = [self.state[parameter] for parameter in parameters]
            for state in states:
                state["step"] += 1
            if parameters:
                self.update(group, int(states[0]["step"]), parameters, states)

    def update(self, group: dict[str, Any], step: int, parameters: Tensors, states: list[State]) -> None:
        """Changes the parameters and states in place; `step` counts from 1."""
        raise NotImplementedError
