"""Operations whose gradients sum over tokens: on CPUs, in fp32.

torch's CPU kernels for the gradients of LayerNorm and of lookups add the tokens in the dtype of the
activations. In 16 bits such a sum stops growing once an addend is below half a unit in its last
place: 10,000 ones give 256 in bf16. CUDA's kernels sum in fp32. No public issue was found; a test
fails once torch does the same on CPUs (tests/parallel/test_precision.py).
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import nn


def _sums_in_16_bits(x: torch.Tensor) -> bool:
    return x.device.type == "cpu" and x.dtype.itemsize < 4


def layer_norm(
    x: torch.Tensor,
    shape: tuple[int, ...],
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    eps: float,
) -> torch.Tensor:
    """Computes F.layer_norm; the gradients of weight and bias are sums in fp32."""
    if not _sums_in_16_bits(x):
        return F.layer_norm(x, shape, weight, bias, eps)
    y = F.layer_norm(x, shape, eps=eps) * weight
    return y if bias is None else y + bias


class LayerNorm(nn.LayerNorm):
    """torch's LayerNorm with `layer_norm`."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return layer_norm(input, self.normalized_shape, self.weight, self.bias, self.eps)


def look_up(index: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Returns the rows of `weight`, as F.embedding; their gradients are sums in fp32."""
    if not _sums_in_16_bits(weight):
        return F.embedding(index, weight)
    rows: torch.Tensor = _LookUp.apply(index, weight)  # type: ignore[no-untyped-call]
    return rows


class _LookUp(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, index: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(index)
        ctx.num_rows = len(weight)
        return F.embedding(index, weight)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[None, torch.Tensor]:
        grad = grads[0]
        (index,) = ctx.saved_tensors
        sums = torch.ops.aten.embedding_dense_backward(
            grad.float(), index, ctx.num_rows, padding_idx=-1, scale_grad_by_freq=False
        )
        return None, sums.to(grad.dtype)
