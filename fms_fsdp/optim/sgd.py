"""SGD, whose momentum can be made before the first step."""

from __future__ import annotations

from typing import Any

import torch


class SGD(torch.optim.SGD):
    """torch's. Its first momentum is the first gradient, without `dampening`; zeros that are made in advance
    would give it with that, so a dampened group counts its steps."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"] if group["momentum"] and group["dampening"] else ():
                if parameter.grad is not None:
                    state = self.state[parameter]
                    if not state.setdefault("step", torch.zeros(())):
                        state["momentum_buffer"] = None  # then torch takes a copy of the gradient
                    state["step"] += 1
        super().step(closure)
