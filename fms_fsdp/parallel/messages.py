"""Messages between the ranks of tp or cp, with the opposite message in the backward pass.

    message   forward                                  backward
    gather    the parts of all ranks                   scatter
    scatter   the sum over ranks, the own part of it   gather
    copy      nothing is sent                          sum
    sum       the sum over ranks                       copy
    trade     part r of x goes to rank r               trade

The operations are those that torch's compiler knows, so the compiler sees through the messages.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed._functional_collectives  # the operations of `send`

_OPPOSITE = {"gather": "scatter", "scatter": "gather", "copy": "sum", "sum": "copy", "trade": "trade"}


def send(x: torch.Tensor, message: str, group: str, size: int, dim: int = 0) -> torch.Tensor:
    """What a message gives this rank of a named group of so many ranks (collective: every rank). Parts lie
    along `dim`; those of a trade along dim 0."""
    if message == "copy":
        return x.view_as(x)
    operations, x = torch.ops._c10d_functional, x.contiguous()
    if message == "gather":
        parts: torch.Tensor = operations.wait_tensor(operations.all_gather_into_tensor(x, size, group))
        return torch.cat(parts.chunk(size), dim) if dim else parts
    if message == "sum":
        sent = operations.all_reduce(x, "sum", group)
    elif message == "trade":
        sent = operations.all_to_all_single(x, [len(x) // size] * size, [len(x) // size] * size, group)
    else:
        x = torch.cat(x.chunk(size, dim)) if dim else x
        sent = operations.reduce_scatter_tensor(x, "sum", size, group)
    received: torch.Tensor = operations.wait_tensor(sent)
    return received


class _Message(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, message: str, group: str, size: int, dim: int) -> torch.Tensor:
        ctx.how = (_OPPOSITE[message], group, size, dim)
        return send(x, message, group, size, dim)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        return send(grads[0], *ctx.how), None, None, None, None


exchange: Callable[..., torch.Tensor] = _Message.apply  # `send`, and its opposite in the backward pass
