"""Products of blocks in float8: each operand is scaled to the range of 8 bits just before its product.

    y  = x W^T     e4m3 · e4m3
    dx = dy W      "row": e4m3 · e4m3, "tensor": e5m2 · e4m3
    dW = dy^T x    in the dtype of x: it sums over tokens, and errors in weights stay

"row" gives every row of an operand, along which the product sums, a scale of its own; "tensor" gives the
whole operand one. The numbers of a gradient differ in size by more than the 18 powers of two that e4m3 spans,
so under one scale a gradient has e5m2, which spans 32 with one bit less of each number; with scales by row
e4m3 is wide enough. Scales are those of the numbers at hand, so nothing is kept between steps. Weights are
rounded anew in the backward pass, so no copy of them outlives a product; the one scale of "tensor" is kept
for that pass, scales by row hold along the other dim there.

Source: Micikevicius et al. 2022, https://arxiv.org/abs/2209.05433 (formats, scaling by tensor). Which
products are in which format: torchao's recipe `rowwise_with_gw_hp`, and `tensorwise` but for dW, which is in
8 bits there, https://github.com/pytorch/ao/tree/main/torchao/float8.
Legend: N rows (tokens), I in, O out features.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from fms_fsdp.config.precision import Precision
from fms_fsdp.errors import UserError
from fms_fsdp.models.llama import Llama
from fms_fsdp.models.variants import LlamaConfig
from fms_fsdp.parallel.precision import product_in

_E4M3, _E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
_SMALLEST = 1e-30  # of what a scale stands for: a row of zeros gets a finite one
_MULTIPLE = 16  # of sizes that the kernels of GPUs take


def check_float8(
    config: LlamaConfig, precision: Precision, device: torch.device, tp: int = 1
) -> None:
    """Raises UserError for a GPU without the products of `precision`, and for matrices that they do not
    take, of which each of `tp` ranks has a part; nothing to do without float8."""
    if not precision.float8:
        return
    sizes = {
        "hidden_size": config.hidden_size,
        "num_attention_heads x head_dim": config.num_attention_heads // tp * config.head_dim,
        "num_kv_heads x head_dim": max(1, config.num_kv_heads // tp) * config.head_dim,
        "ffn_hidden_size": config.ffn_hidden_size // tp,
    }
    for name, size in sizes.items():
        if size % _MULTIPLE:
            raise UserError(
                f"--precision (float8) needs sizes that are multiples of {_MULTIPLE}, and {name} is {size}"
                f"{' on each rank of tp' if tp > 1 else ''}; "
                "change the size, or use --precision=bf16"
            )
    if device.type != "cuda":
        return
    found, needed = (
        torch.cuda.get_device_capability(device),
        (9, 0) if precision.float8 == "row" else (8, 9),
    )
    if found < needed:
        remedy = "--float8_scaling=tensor" if found >= (8, 9) else "--precision=bf16"
        raise UserError(
            f"--precision (float8) by {precision.float8} needs compute capability {needed[0]}.{needed[1]}, "
            f"and {torch.cuda.get_device_name(device)} has {found[0]}.{found[1]}; use {remedy}"
        )


def apply_float8(model: Llama, scaling: str) -> None:
    """Lets the linear layers of blocks, not embedding and head, multiply in float8, in place.

    Call it after `apply_precision`. `scaling`: "row" or "tensor". What is not a product stays in the dtype of
    x; weights of another dtype are cast to it first.
    """
    for module in model.blocks.modules():
        if isinstance(module, nn.Linear):
            module.__class__ = _RowLinear if scaling == "row" else _TensorLinear


class _TensorLinear(nn.Linear):
    by_row = False

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        multiply: Any = _Float8Product.apply
        product: torch.Tensor = multiply(input, self.weight, self.by_row)
        return product if self.bias is None else product + self.bias.to(input.dtype)


class _RowLinear(_TensorLinear):
    by_row = True


class _Float8Product(torch.autograd.Function):
    """x W^T; keeps x and W as they are for the backward pass."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight_OI: torch.Tensor, by_row: bool) -> torch.Tensor:
        weight = weight_OI.to(x.dtype)
        largest = _largest(weight, by_row)
        # a largest number of each row is of no use to the backward pass, which sums along the other dim
        ctx.save_for_backward(x, weight_OI, None if by_row else largest)
        ctx.by_row = by_row
        y_NO = _product(x.flatten(0, -2), weight, _E4M3, by_row, fast=True, largest_b=largest)
        return y_NO.view(*x.shape[:-1], -1)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        x, weight_OI, largest = ctx.saved_tensors
        grad_NO, dx, dweight = grads[0].flatten(0, -2), None, None
        if ctx.needs_input_grad[0]:
            dtype = _E4M3 if ctx.by_row else _E5M2
            weight_IO = weight_OI.to(x.dtype).t()
            dx_NI = _product(
                grad_NO, weight_IO, dtype, ctx.by_row, fast=ctx.by_row, largest_b=largest
            )
            dx = dx_NI.view(x.shape)
        if ctx.needs_input_grad[1]:
            dweight = product_in(weight_OI.dtype, grad_NO.t(), x.flatten(0, -2))
        return dx, dweight, None


def _product(
    a: torch.Tensor,
    b: torch.Tensor,
    dtype: torch.dtype,
    by_row: bool,
    *,
    fast: bool,
    largest_b: torch.Tensor | None = None,
) -> torch.Tensor:
    """a b^T in the dtype of a: a in the float8 `dtype`, b in e4m3; `largest_b`: what `_largest` says of b,
    where that is known.

    On a CPU the float8 numbers are multiplied in fp32: torch's own kernel there is a thousand times slower
    (seen with 2.13). `fast` lets a GPU sum with fewer bits; its kernels by row are slow without.
    """
    largest_b = _largest(b, by_row) if largest_b is None else largest_b
    (a8, scale_a), (b8, scale_b) = (
        _quantized(a, dtype, _largest(a, by_row)),
        _quantized(b, _E4M3, largest_b),
    )
    if by_row:
        scale_b = scale_b.t()
    if a.device.type == "cpu":
        return (a8.float() @ b8.float().t() * (scale_a * scale_b)).to(a.dtype)
    return torch._scaled_mm(a8, b8.t(), scale_a, scale_b, out_dtype=a.dtype, use_fast_accum=fast)


def _largest(a: torch.Tensor, by_row: bool) -> torch.Tensor:
    """The largest magnitude of each row (rows, 1), or of all numbers, without dims."""
    return a.abs().amax(dim=1, keepdim=True) if by_row else a.abs().amax()


def _quantized(
    a: torch.Tensor, dtype: torch.dtype, largest_a: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """a / scale in the float8 `dtype`, row after row in memory, and the fp32 scale, which has the shape of
    `largest_a`. The largest number becomes the largest of the format; what is not finite stays so."""
    largest = torch.finfo(dtype).max
    scale = largest_a.float().clamp(min=_SMALLEST) / largest
    return (a.float() / scale).clamp(-largest, largest).to(dtype).contiguous(), scale
