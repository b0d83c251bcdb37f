"""The dtypes of the model: weights and optimizer state are fp32, products are bf16 where asked.

    sharded     FSDP gathers bf16 copies of a unit's weights and frees them after use
    unsharded   every module casts its own weight, in the forward and again in the backward pass

Neither way keeps a second copy of all weights. Both give each module weights of the dtype it computes in.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy

from fms_fsdp.config import ParallelConfig
from fms_fsdp.models.llama import Llama


def fsdp_policy(section: ParallelConfig, mixed_precision: bool) -> MixedPrecisionPolicy:
    """bf16 weights for compute and gradients reduced in `reduce_dtype`.

    Inputs are not cast, so the rotary table stays fp32.
    """
    return MixedPrecisionPolicy(
        param_dtype=torch.bfloat16 if mixed_precision else None,
        reduce_dtype=torch.bfloat16 if section.reduce_dtype == "bf16" else torch.float32,
        cast_forward_inputs=False,
    )


def apply_precision(model: Llama, dtype: torch.dtype) -> None:
    """Lets an unsharded model with fp32 weights compute in `dtype`, in place; nothing to do for fp32."""
    if dtype == torch.float32:
        return
    for module in model.modules():
        if type(module) in _CASTING:
            module.__class__ = _CASTING[type(module)]
    if model.embed is not None:
        model.embed.register_forward_hook(lambda module, inputs, output: output.to(dtype))


class _CastProduct(torch.autograd.Function):
    """x W^T in the dtype of x; the backward pass casts W anew, so no copy of it is kept between the two."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x, weight)
        return F.linear(x, weight.to(x.dtype))

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        (grad,) = grads
        x, weight = ctx.saved_tensors
        need_x, need_weight = ctx.needs_input_grad
        dx = grad @ weight.to(x.dtype) if need_x else None
        dweight = grad.flatten(0, -2).T @ x.flatten(0, -2) if need_weight else None
        return dx, None if dweight is None else dweight.to(weight.dtype)


class _CastLinear(nn.Linear):
    def forward(self, input: torch.Tensor) -> torch.Tensor:
        if torch.compiler.is_compiling():  # the compiler casts again by itself where that saves memory
            return F.linear(input, self.weight.to(input.dtype))
        product: torch.Tensor = _CastProduct.apply(input, self.weight)  # type: ignore[no-untyped-call]
        return product


class _CastRMSNorm(nn.RMSNorm):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.rms_norm(x, self.normalized_shape, self.weight.to(x.dtype), self.eps)


class _CastLayerNorm(nn.LayerNorm):
    def forward(self, input: torch.Tensor) -> torch.Tensor:
        weight, bias = self.weight.to(input.dtype), self.bias.to(input.dtype)
        return F.layer_norm(input, self.normalized_shape, weight, bias, self.eps)


_CASTING: dict[type[nn.Module], type[nn.Module]] = {
    nn.Linear: _CastLinear,
    nn.RMSNorm: _CastRMSNorm,
    nn.LayerNorm: _CastLayerNorm,
}
