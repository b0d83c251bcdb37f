"""Products in float8 against arithmetic in fp64 that rounds number by number, and training with them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from fms_fsdp.config import OptimConfig, ParallelConfig
from fms_fsdp.config.precision import Precision
from fms_fsdp.distributed.axes import ParallelDims
from fms_fsdp.distributed.mesh import Mesh
from fms_fsdp.models.config import TransformerConfig
from fms_fsdp.optim.optimizers import build_optimizers
from fms_fsdp.parallel.float8 import _Float8Linear, _scaled_matmul
from fms_fsdp.parallel.fsdp import clip_factor
from fms_fsdp.parallel.layout import check_float8
from fms_fsdp.parallel.parallelize import parallelize
from tests.distributed.launch import run_ranks
from tests.parallel.layouts import mesh_of

CPU, ALONE = torch.device("cpu"), Mesh(ParallelDims("none"), 0, "cpu")
CONFIG = TransformerConfig(2, 64, 96, 4, 2, 120, max_seq_len=32, bias=True)
BF16 = Precision(compute="bf16")
E4M3, E5M2 = (
    (3, -6, 448.0),
    (2, -14, 57344.0),
)  # bits of the fraction, lowest exponent, largest number


def rounded(x: torch.Tensor, form: tuple[int, int, float]) -> torch.Tensor:
    """Each number as the nearest of the format, of two nearest the even one; larger ones as its largest."""
    bits, lowest, largest = form
    step = 2.0 ** (x.abs().clamp(min=1e-300).log2().floor().clamp(min=lowest) - bits)
    return ((x / step).round() * step).clamp(-largest, largest)


def through_float8(x: torch.Tensor, form: tuple[int, int, float], dim: int | None) -> torch.Tensor:
    """x in fp64, with the error that float8 makes; `dim`: along which a scale holds, None for all of x."""
    amax = x.float().abs().amax() if dim is None else x.float().abs().amax(dim, keepdim=True)
    scale = amax / form[2]
    return rounded((x.float() / scale).double(), form) * scale.double()


def multiply(
    x: torch.Tensor,
    weight: torch.Tensor,
    grad: torch.Tensor,
    scaling: str,
    function: Any = _Float8Linear.apply,
) -> tuple[torch.Tensor, ...]:
    """The product and the gradients of both operands."""
    x, weight = x.clone().requires_grad_(), weight.clone().requires_grad_()
    y = function(x, weight, scaling)
    y.backward(grad)
    assert x.grad is not None and weight.grad is not None
    return y.detach(), x.grad, weight.grad


def operands(dtype: torch.dtype = torch.float32) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Rows and columns of very different sizes."""
    torch.manual_seed(1)
    rows_N, rows_O, rows_I = (10.0 ** torch.linspace(-3, 3, size)[:, None] for size in (21, 48, 64))
    x = (torch.randn(21, 64) * rows_N).bfloat16().view(3, 7, 64)
    grad = (torch.randn(21, 48) * rows_N).bfloat16().view(3, 7, 48)
    return x, (torch.randn(48, 64) * rows_O * rows_I.T).to(dtype), grad


@pytest.mark.parametrize("kept", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("scaling", ["row", "tensor"])
def test_matmul_equals_exactly_rounded_operands(scaling: str, kept: torch.dtype) -> None:
    x, weight, grad = operands(kept)
    x_NI, grad_NO, weight_OI = x.flatten(0, 1), grad.flatten(0, 1), weight.bfloat16()
    of_row, of_column, of_grad = (1, 0, E4M3) if scaling == "row" else (None, None, E5M2)
    factors = (
        (through_float8(x_NI, E4M3, of_row), through_float8(weight_OI, E4M3, of_row).T),
        (through_float8(grad_NO, of_grad, of_row), through_float8(weight_OI, E4M3, of_column)),
        (grad_NO.double().T, x_NI.double()),
    )
    found = multiply(x, weight, grad, scaling)
    assert found[0].dtype == found[1].dtype == torch.bfloat16 and found[2].dtype == kept
    for one, (left, right) in zip(found, factors, strict=True):
        exact, in_fp32 = left @ right, 1e-5 * left.abs() @ right.abs()
        error = (one.double().view(exact.shape) - exact).abs()
        assert (error <= 2**-8 * exact.abs() + in_fp32).all()
    in_bf16 = x_NI.double() @ weight_OI.double().T
    assert 1e-3 < (found[0].view(in_bf16.shape) - in_bf16).norm() / in_bf16.norm() < 0.1


@pytest.mark.parametrize("scaling", ["row", "tensor"])
@pytest.mark.parametrize("size", [0.0, 1e-38, 1e-25, 1e16, 3e38])
def test_values_of_any_size_stay_finite(scaling: str, size: float) -> None:
    x, weight, grad = (
        torch.randn(5, 32).clamp(-1, 1),
        torch.randn(16, 32) / 64,
        torch.randn(5, 16) / 64,
    )
    results = multiply((x * size).bfloat16(), weight, grad.bfloat16(), scaling)
    assert all(result.isfinite().all() for result in results)
    if 1e-29 < size < 1e20:
        wanted = multiply(x.bfloat16(), weight, grad.bfloat16(), scaling)[0] * size
        torch.testing.assert_close(results[0], wanted, rtol=0.1, atol=0.1 * size)


@pytest.mark.parametrize("scaling", ["row", "tensor"])
def test_non_finite_values_stay_non_finite(scaling: str) -> None:
    x, weight, grad = (torch.ones(size, 16).bfloat16() for size in (4, 16, 4))
    for bad in (float("inf"), float("nan")):
        grad[2, 3] = bad
        assert not multiply(x, weight, grad, scaling)[1][2].isfinite().any()


@pytest.mark.usefixtures("each_backend")
@pytest.mark.filterwarnings("ignore")  # torch 2.13's own compiler calls what is deprecated
def test_compiled_matmul_equals_eager() -> None:
    compiled = torch.compile(
        lambda *given: _Float8Linear.apply(*given), fullgraph=True, dynamic=False
    )
    given = operands(torch.bfloat16)
    for one, other in zip(multiply(*given, "row", compiled), multiply(*given, "row"), strict=True):
        torch.testing.assert_close(one, other, rtol=2**-8, atol=1e-5 * other.norm().item())


@pytest.mark.parametrize("scaling", ["row", "tensor"])
def test_gpu_kernels_accept_shapes_and_strides(scaling: str) -> None:
    """By torch's own rules, which need no GPU."""
    a, b, b_IO = (
        torch.empty(size, dtype=torch.bfloat16, device="meta")
        for size in ((21, 64), (48, 64), (64, 48))
    )
    for right in (b, b_IO.t()):
        y = _scaled_matmul(a, right, torch.float8_e4m3fn, scaling, fast=True)
        assert y.shape == (21, 48) and y.dtype == torch.bfloat16
    with pytest.raises(RuntimeError, match="divisible by 16"):
        _scaled_matmul(a[:, :56], b[:, :56], torch.float8_e4m3fn, scaling, fast=True)


def losses(nproc: int, precision: Precision) -> list[float]:
    """Of 20 steps on 4 rows, the same for any number of ranks."""
    section = ParallelConfig(sharding_strategy="fsdp" if nproc > 1 else "none")
    mesh = mesh_of(section)
    rank = mesh.axis_rank("dp")
    model = parallelize(CONFIG, section, mesh, device=CPU, precision=precision, seed=1)
    optimizers = build_optimizers(OptimConfig(), model)
    rows = (torch.arange(4 * 33) ** 2 % 119).view(4, 33).chunk(nproc)[rank]
    found = []
    for _ in range(20):
        loss_sum, _ = model(rows[:, :-1], rows[:, 1:])
        (loss_sum * nproc / 128).backward()
        norm, factor = clip_factor(model.parameters(), 1.0, mesh)
        optimizers.step(lambda base: 3e-4, norm, factor)
        optimizers.zero_grad()
        found.append(mesh.sum(loss_sum.detach().clone(), "world").item() / 128)
    return found


def losses_of_both() -> list[list[float]]:
    return [losses(2, replace(BF16, float8=scaling)) for scaling in ("row", "tensor")]


@pytest.mark.slow
def test_float8_losses_are_close_to_bf16() -> None:
    wanted, found = losses(1, BF16), run_ranks(losses_of_both, 2)
    assert wanted[-1] < 0.95 * wanted[0] and found[0] == found[1]
    alone = [losses(1, replace(BF16, float8=scaling)) for scaling in ("row", "tensor")]
    for some in found[0] + alone:
        assert some != wanted and some == pytest.approx(wanted, rel=1e-3)


def test_only_linear_layers_of_blocks_are_float8() -> None:
    precision = replace(BF16, float8="row")
    model = parallelize(CONFIG, ParallelConfig(), ALONE, device=CPU, precision=precision, seed=1)
    named = [name for name, module in model.named_modules() if hasattr(module, "scaling")]
    assert len(named) == 14 and all(name.startswith("blocks.") for name in named)


@pytest.mark.parametrize(
    ("capability", "scaling", "text"),
    [
        ((8, 0), "row", "capability 9.0, and Old has 8.0; use --precision=bf16"),
        ((8, 9), "row", "capability 9.0, and Old has 8.9; use --float8_scaling=tensor"),
        ((8, 6), "tensor", "capability 8.9, and Old has 8.6; use --precision=bf16"),
        ((8, 9), "tensor", ""),
        ((9, 0), "row", ""),
        ((10, 0), "row", ""),
        ((8, 0), "", ""),
    ],
)
def test_older_gpus_are_rejected(capability: tuple[int, int], scaling: str, text: str) -> None:
    precision = replace(BF16, float8=scaling)
    check_float8(CONFIG, precision)  # on a CPU
    if not text:
        return check_float8(CONFIG, precision, 1, capability, "Old")
    with pytest.raises(ValueError, match=text):
        check_float8(CONFIG, precision, 1, capability, "Old")


@pytest.mark.parametrize(
    ("sizes", "text"),
    [
        (dict(hidden_size=72, head_dim=16), "hidden_size is 72"),
        (dict(ffn_hidden_size=100), "ffn_hidden_size is 100"),
        (dict(head_dim=4, num_kv_heads=1), "num_kv_heads x head_dim is 4"),
    ],
)
def test_sizes_kernels_cannot_use_are_rejected(sizes: dict[str, int], text: str) -> None:
    config = replace(CONFIG, **sizes)  # type: ignore[arg-type]
    check_float8(config, BF16)
    with pytest.raises(ValueError, match=f"multiples of 16, and {text}; change the size"):
        check_float8(config, replace(BF16, float8="row"))
