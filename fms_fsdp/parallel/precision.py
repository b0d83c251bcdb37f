"""The dtype of the weights of a model, and the dtype of the computations.

    sharded     FSDP gathers copies of a unit's weights in the dtype of products, and frees them after use
    unsharded   every module casts its own weight, in the forward and again in the backward pass

Neither way keeps a second copy of all weights. Both give each module weights of the dtype it computes in.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy

from fms_fsdp.config import Precision, PrecisionConfig
from fms_fsdp.distributed.runtime import log
from fms_fsdp.models.llama import Llama

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def cpu_has_bf16() -> bool:
    """Returns whether this CPU multiplies bf16 natively (AMX, AVX512-BF16 or ARM bf16)."""
    try:
        text = Path("/proc/cpuinfo").read_text()
    except OSError:
        return False
    return bool(re.search(r"(?im)^(flags|features)\s.*\b(amx_bf16|avx512_bf16|bf16)\b", text))


def resolve_precision(section: PrecisionConfig, device: torch.device) -> Precision:
    """Returns the precision of the flags, by default bf16 where the hardware computes it natively.

    Logs what was chosen and why.
    """
    wanted = section.named
    if device.type == "cuda":
        return section.resolve(wanted or "bf16")
    native = cpu_has_bf16()
    if wanted in ("fp16", "float8"):
        log.warning("--precision=%s is slow on a CPU, and here for tests", wanted)
    elif wanted not in (None, "fp32") and not native:
        log.warning(
            "--precision=%s: this CPU has no native bf16, so bf16 is emulated and slow", wanted
        )
    if wanted is None:
        wanted = "bf16" if native else "fp32"
        log.info("precision: %s (this CPU %s native bf16)", wanted, "has" if native else "has no")
    return section.resolve(wanted)


def fsdp_policy(precision: Precision) -> MixedPrecisionPolicy:
    """The policy of FSDP: gathered weights in the dtype of products, reductions in the dtype of reductions.

    Inputs are not cast, so the rotary table stays fp32.
    """
    return MixedPrecisionPolicy(
        param_dtype=None if precision.compute == precision.weights else DTYPES[precision.compute],
        reduce_dtype=DTYPES[precision.reduce],
        cast_forward_inputs=False,
    )


def sum_gradients_in_fp32(model: nn.Module) -> None:
    """Lets the gradients of bf16 weights add up in fp32 over micro-steps, in a model that is ready to train.

    FSDP rounds the gradient of each micro-step to bf16 once. What it adds up itself, before it sends it
    (hsdp over replicas, `sync_each_micro_step` off), is in `reduce_dtype`, and rounded once a step.
    """
    for parameter in model.parameters():
        parameter.grad_dtype = None  # of any type
        parameter.register_post_accumulate_grad_hook(_widen_gradient)  # type: ignore[no-untyped-call]


def _widen_gradient(parameter: torch.Tensor) -> None:
    assert parameter.grad is not None
    if parameter.grad.device.type == "cpu" and torch.cuda.is_available():
        torch.cuda.current_stream().synchronize()  # under CPU offload it may still be on its way (torch 2.11)
    parameter.grad = parameter.grad.float()


def cast_weights(model: nn.Module, precision: Precision) -> None:
    """Lets the model keep its weights in their dtype, in place; buffers, as the rotary table, stay."""
    for parameter in model.parameters():
        parameter.data = parameter.data.to(DTYPES[precision.weights])


def apply_precision(model: Llama, precision: Precision) -> None:
    """Lets an unsharded model compute in another dtype than that of its weights, in place."""
    dtype = DTYPES[precision.compute]
    if precision.compute == precision.weights:
        return
    for module in model.modules():
        if type(module) in _CASTING:
            module.__class__ = _CASTING[type(module)]
        elif hasattr(module, "bias_dtype"):
            module.bias_dtype = dtype  # type: ignore[assignment]
    if model.embed is not None:
        model.embed.register_forward_hook(lambda module, inputs, output: output.to(dtype))


class _CastProduct(torch.autograd.Function):
    """x W^T in the dtype of x; the backward pass casts W anew, so that no copy of W is kept until then.

    It casts the transpose: the compiler would take two equal casts for one, and keep its result.
    """

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x, weight)
        return F.linear(x, weight.to(x.dtype))

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        (grad,) = grads
        x, weight = ctx.saved_tensors
        need_x, need_weight = ctx.needs_input_grad
        dx = grad @ weight.T.to(x.dtype).T if need_x else None
        dweight = (
            product_in(weight.dtype, grad.flatten(0, -2).T, x.flatten(0, -2))
            if need_weight
            else None
        )
        return dx, dweight


def product_in(dtype: torch.dtype, left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    """The product in another dtype than that of its factors; a GPU of NVIDIA writes the product in that dtype
    at once, neither rounded nor cast."""
    if left.is_cuda and torch.version.cuda and left.dtype != dtype == torch.float32:
        return torch.mm(left, right, out_dtype=dtype)
    return (left @ right).to(dtype)


class _CastLinear(nn.Linear):
    def forward(self, input: torch.Tensor) -> torch.Tensor:
        product: torch.Tensor = _CastProduct.apply(input, self.weight)  # type: ignore[no-untyped-call]
        return product if self.bias is None else product + self.bias.to(input.dtype)


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
