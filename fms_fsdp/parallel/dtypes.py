"""The dtype of the weights, and the dtype of the computations.

    sharded     FSDP gathers copies of a unit's weights in the compute dtype, and frees them after use
    unsharded   each module casts its own weight, in the forward and again in the backward pass

Neither way keeps a second copy of all weights on a GPU. On a CPU, where casts are slow and memory
is not scarce, an unsharded model keeps its cast weights from the forward to the backward pass.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy

from fms_fsdp.config import Precision
from fms_fsdp.models.llama import Llama
from fms_fsdp.models.token_sums import LayerNorm, layer_norm

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def cpu_has_bf16() -> bool:
    """Returns whether this CPU multiplies bf16 natively (AMX, AVX512-BF16 or ARM bf16)."""
    try:
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8")
    except OSError:
        return False
    return bool(re.search(r"(?im)^(flags|features)\s.*\b(amx_bf16|avx512_bf16|bf16)\b", text))


def fsdp_policy(precision: Precision) -> MixedPrecisionPolicy:
    """Returns FSDP's policy. Inputs are not cast, so that the rotary table stays fp32."""
    cast_to = None
    if precision.compute != precision.weights:
        cast_to = DTYPES[precision.compute]
    return MixedPrecisionPolicy(
        param_dtype=cast_to,
        reduce_dtype=DTYPES[precision.reduce],
        cast_forward_inputs=False,
    )


def cast_weights(model: nn.Module, precision: Precision) -> None:
    """Casts the parameters, not the buffers, to the dtype of the weights, in place."""
    dtype = DTYPES[precision.weights]
    for parameter in model.parameters():
        if parameter.dtype != dtype:
            parameter.data = parameter.data.to(dtype)


def accumulate_in_fp32(model: nn.Module) -> None:
    """Makes gradients of bf16 weights accumulate in fp32 over micro-batches.

    The model must be ready to train.
    FSDP still rounds the gradient of each micro-batch to bf16 once. Gradients that it accumulates
    unsharded (hsdp over replicas, `sync_each_micro_step` off) are in `reduce_dtype`.
    """
    for parameter in model.parameters():
        if not parameter.requires_grad:  # frozen by a user's builder
            continue
        parameter.grad_dtype = None  # any dtype
        parameter.register_post_accumulate_grad_hook(_widen_gradient)  # type: ignore[no-untyped-call]


def _widen_gradient(parameter: torch.Tensor) -> None:
    assert parameter.grad is not None
    if parameter.grad.device.type == "cpu" and torch.cuda.is_available():
        # Under CPU offload the copy to the host may not have finished (torch 2.11;
        # https://github.com/pytorch/pytorch/pull/180666).
        torch.cuda.current_stream().synchronize()
    parameter.grad = parameter.grad.float()


def apply_precision(model: Llama, precision: Precision) -> None:
    """Makes an unsharded model compute in the compute dtype, whatever the dtype of its weights.

    Other modules of a user's blocks need `compute_with_casts`.
    """
    if precision.compute == precision.weights:
        return
    for module in model.modules():
        casting = _CASTING.get(type(module))
        if casting is not None:
            module.__class__ = casting
    if model.embed is not None:
        dtype = DTYPES[precision.compute]
        model.embed.register_forward_hook(lambda module, inputs, output: output.to(dtype))


def compute_with_casts(model: Llama, precision: Precision) -> None:
    """Lets the modules of a user's blocks that do not cast their weights read casts of them, as they
    would from FSDP.

    A compiled block needs this before its compiled code, which cannot have the hooks.
    """
    if precision.compute == precision.weights or not model.config.model_builder:
        return
    dtype = DTYPES[precision.compute]

    def cast(module: nn.Module, name: str, parameter: torch.Tensor) -> torch.Tensor:
        return parameter.to(dtype) if parameter.is_floating_point() else parameter

    for block in model.blocks.values():
        others = [each for each in block.modules() if not hasattr(each, "casts_its_weight")]
        replace_parameters(block, others, cast)


def replace_parameters(
    part: nn.Module,
    modules: Sequence[nn.Module],
    read: Callable[[nn.Module, str, nn.Parameter], torch.Tensor],
) -> None:
    """Lets the modules read other tensors in place of their parameters during the forward pass of the
    part of the model that they belong to.

    An attribute of the module hides the parameter meanwhile. The parameter stays one, so that FSDP,
    initialization and checkpoints find it.
    """

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def show_tensors(*_: Any) -> None:
        for module in modules:
            for name, parameter in module.named_parameters(recurse=False):
                module.__dict__[name] = read(module, name, parameter)

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def show_parameters(*_: Any) -> None:
        for module in modules:
            for name, _parameter in module.named_parameters(recurse=False):
                module.__dict__.pop(name, None)

    part.register_forward_pre_hook(show_tensors)
    part.register_forward_hook(show_parameters, always_call=True)


def matmul(a: torch.Tensor, b: torch.Tensor, out_dtype: torch.dtype) -> torch.Tensor:
    """Returns a b in `out_dtype`; NVIDIA GPUs write fp32 directly, without rounding to bf16 first."""
    if a.is_cuda and torch.version.cuda and a.dtype != out_dtype == torch.float32:
        return torch.mm(a, b, out_dtype=out_dtype)
    return (a @ b).to(out_dtype)


class _CastLinear(torch.autograd.Function):
    """x W^T in the dtype of x. Except on a CPU the backward pass casts W again, and no copy is kept."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        cast = weight.to(x.dtype)
        ctx.weight_dtype = weight.dtype
        ctx.save_for_backward(x, cast if x.device.type == "cpu" else weight)
        return F.linear(x, cast)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        grad = grads[0]
        x, weight = ctx.saved_tensors
        dx = dweight = None
        if ctx.needs_input_grad[0]:
            # The cast of the transpose: the compiler would merge two equal casts and keep the
            # result.
            dx = grad @ weight.T.to(x.dtype).T
        if ctx.needs_input_grad[1]:
            dweight = matmul(grad.flatten(0, -2).T, x.flatten(0, -2), out_dtype=ctx.weight_dtype)
        return dx, dweight


class CastingLinear(nn.Linear):
    casts_its_weight = True

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = _CastLinear.apply(input, self.weight)  # type: ignore[no-untyped-call]
        return y if self.bias is None else y + self.bias.to(input.dtype)


class _RMSNorm(nn.RMSNorm):
    casts_its_weight = True

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.rms_norm(x, self.normalized_shape, self.weight.to(x.dtype), self.eps)


class _LayerNorm(LayerNorm):
    casts_its_weight = True

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        weight = self.weight.to(input.dtype)
        bias = None if self.bias is None else self.bias.to(input.dtype)
        return layer_norm(input, self.normalized_shape, weight, bias, self.eps)


_CASTING: dict[type[nn.Module], type[nn.Module]] = {
    nn.Linear: CastingLinear,
    nn.RMSNorm: _RMSNorm,
    nn.LayerNorm: _LayerNorm,
    LayerNorm: _LayerNorm,
}
