"""The chunked loss against the plain one."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

from fms_fsdp.models import loss as loss_module
from fms_fsdp.models.loss import chunk_size, linear_cross_entropy


def inputs(dtype: torch.dtype = torch.float32) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    h_BSD = torch.randn(3, 67, 24, generator=generator).to(dtype).requires_grad_()
    weight_VD = torch.randn(501, 24, generator=generator).requires_grad_()
    labels_BS = torch.randint(0, 501, (3, 67), generator=generator)
    labels_BS[torch.rand(3, 67, generator=generator) < 0.3] = -100
    return h_BSD, weight_VD, labels_BS


def padded_logits(like: torch.Tensor, num_tokens: int, vocab_size: int) -> torch.Tensor:
    return like.new_zeros(num_tokens, 512)[:, :vocab_size]


@pytest.fixture(params=["one chunk", "uneven chunks", "many chunks", "padded"])
def chunked(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """201 tokens: at once, in chunks of 101 or 32, and with padded rows as on a GPU."""
    if request.param == "uneven chunks":
        monkeypatch.setattr(loss_module, "chunk_size", lambda *_: 101)
    elif request.param == "many chunks":
        monkeypatch.setattr(loss_module, "chunk_size", lambda *_: 32)
    elif request.param == "padded":
        monkeypatch.setattr(loss_module, "empty_logits", padded_logits)


@pytest.mark.usefixtures("chunked")
def test_loss_and_gradients_equal_plain_cross_entropy() -> None:
    h, weight, labels = inputs()
    loss_sum, num_labels = linear_cross_entropy(h, weight, labels)
    (3.0 * loss_sum).backward()
    ours = h.grad, weight.grad
    h.grad = weight.grad = None
    expected = F.cross_entropy(
        (h @ weight.T).flatten(0, 1), labels.flatten(), ignore_index=-100, reduction="sum"
    )
    (3.0 * expected).backward()
    assert loss_sum.dtype == torch.float32 and loss_sum.ndim == 0
    assert num_labels.dtype == torch.int64 and num_labels.item() == (labels != -100).sum().item()
    torch.testing.assert_close(loss_sum, expected)
    torch.testing.assert_close(ours, (h.grad, weight.grad), rtol=1e-5, atol=1e-4)


@pytest.mark.usefixtures("chunked")
def test_bf16_loss_is_as_exact_as_its_logits() -> None:
    h, weight, labels = inputs(torch.bfloat16)
    loss_sum, _ = linear_cross_entropy(h, weight, labels)
    loss_sum.backward()
    ours = h.grad, weight.grad
    h.grad = weight.grad = None
    logits = (h @ weight.to(torch.bfloat16).T).float()
    expected = F.cross_entropy(
        logits.flatten(0, 1), labels.flatten(), ignore_index=-100, reduction="sum"
    )
    expected.backward()
    torch.testing.assert_close(loss_sum, expected, rtol=1e-6, atol=0)
    assert ours[0].dtype == torch.bfloat16 and ours[1].dtype == torch.float32
    torch.testing.assert_close(ours, (h.grad, weight.grad), rtol=5e-2, atol=5e-2)


def test_all_labels_masked_gives_zero_and_no_gradient() -> None:
    h, weight, labels = inputs()
    loss_sum, num_labels = linear_cross_entropy(h, weight, torch.full_like(labels, -100))
    loss_sum.backward()
    assert loss_sum.item() == 0 and num_labels.item() == 0
    assert h.grad is not None and weight.grad is not None
    assert h.grad.abs().max() == 0 and weight.grad.abs().max() == 0


def test_evaluation_computes_no_gradient() -> None:
    h, weight, labels = inputs()
    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        loss_sum, _ = linear_cross_entropy(h, weight, labels)
    assert not loss_sum.requires_grad
    assert counter.get_total_flops() == 2 * 3 * 67 * 24 * 501  # the logits, nothing else
    torch.testing.assert_close(loss_sum, linear_cross_entropy(h, weight, labels)[0].detach())


def test_chunks_of_logits_are_bounded() -> None:
    rows = chunk_size(8192, 128256, "cpu")
    assert rows * 128256 * 4 < 64 << 20
    assert chunk_size(100, 512, "cpu") == 100
    assert chunk_size(4000, 12000, "cpu") == 1334  # three even chunks


@pytest.mark.usefixtures("chunked")
@pytest.mark.parametrize(
    ("loud", "how"), [(math.nan, {}), (60_000.0, {}), (math.inf, {"z_loss": 1e-2})]
)
def test_non_finite_masked_tokens_change_nothing(loud: float, how: dict[str, float]) -> None:
    """Neither non-finite hidden states, nor finite ones whose matmul overflows, as in fp16."""
    dtype = torch.float16 if math.isfinite(loud) else torch.float32
    found = []
    for value in (0.0, loud):
        h, weight, labels = inputs()
        with torch.no_grad():
            h[labels == -100] = value
        h = h.detach().to(dtype).requires_grad_()
        loss, *_ = losses = linear_cross_entropy(h, weight, labels, **how)
        loss.backward()
        found.append([*losses, h.grad, weight.grad])
    for quiet, other in zip(*found, strict=True):
        assert other.isfinite().all() and torch.equal(quiet, other)


def test_other_negative_label_is_an_error() -> None:
    h, weight, labels = inputs()
    labels[1, 2] = -1
    with pytest.raises(RuntimeError, match="index -1 is out of bounds"):
        linear_cross_entropy(h, weight, labels)


@pytest.mark.usefixtures("traced_alone")
@pytest.mark.parametrize("compiled", [False, True])
def test_fp16_gradient_has_the_loss_scale(compiled: bool) -> None:
    """With peaked logits, fp16 cannot represent most probabilities: rows of the head moved too little."""
    torch.manual_seed(0)
    labels, weight = torch.randint(0, 8000, (1, 64)), torch.randn(8000, 32).half().requires_grad_()
    h = (0.8 * weight.detach()[labels]).requires_grad_()
    factor = torch.tensor(2.0**16 / 64)
    loss, _ = linear_cross_entropy(h, weight, labels, scale=factor, compiled=compiled)
    (loss * factor).backward()
    logits = (h[0] @ weight.T).detach().double().requires_grad_()
    (F.cross_entropy(logits, labels[0], reduction="sum") * factor).backward()
    exact = logits.grad.T @ h[0].double()
    moved = exact.norm(dim=1)
    error = (weight.grad.double() - exact).norm(dim=1) / moved
    assert error[moved.argsort()[:800]].mean() < 0.005


def test_scale_changes_no_gradient() -> None:
    h, weight, labels = inputs()
    found = []
    for scale in (None, torch.tensor(64.0)):
        h.grad = weight.grad = None
        (linear_cross_entropy(h, weight, labels, scale=scale)[0] * 4.0).backward()
        found.append((h.grad, weight.grad))
    torch.testing.assert_close(*found, rtol=0, atol=0)


def test_factor_of_the_loss_is_not_rounded() -> None:
    """1 / 773 in bf16 is off by 0.26 %: the gradients of all parameters, and their norm, would be."""
    h, weight, labels = inputs(torch.bfloat16)
    weight = weight.detach().to(torch.bfloat16).requires_grad_()
    found = []
    for factor in (1.0, 1 / 773):
        h.grad = weight.grad = None
        (linear_cross_entropy(h, weight, labels)[0] * torch.tensor(factor)).backward()
        found.append([h.grad, weight.grad])
    for whole, scaled in zip(*found, strict=True):
        assert scaled.dtype == torch.bfloat16
        assert torch.equal(scaled, (whole.float() * (1 / 773)).to(torch.bfloat16))


def test_matmuls_use_padded_logits_in_place(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loss_module, "empty_logits", padded_logits)
    strides: list[int] = []

    class Matmuls(TorchDispatchMode):
        def __torch_dispatch__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            out = func(*args, **(kwargs or {}))
            if func.overloadpacket is torch.ops.aten.mm:
                logits = [t for t in (*args, out) if sorted(t.shape) == [201, 501]]
                strides.extend(max(tensor.stride()) for tensor in logits)
            return out

    with Matmuls():
        linear_cross_entropy(*inputs())[0].backward()
    assert strides == [512] * 3  # one is written, two are read


@pytest.mark.usefixtures("each_backend")
@pytest.mark.filterwarnings("ignore")  # torch's own compiler warns of deprecated calls it makes
@pytest.mark.parametrize(("dtype", "z_loss"), [(torch.float32, 0.0), (torch.bfloat16, 1e-2)])
def test_compiled_softmax_equals_the_plain_one(dtype: torch.dtype, z_loss: float) -> None:
    """Compiled by torch 2.11, its first form read the labels' logits after overwriting them."""
    index = torch.randint(0, 501, (48, 1), generator=torch.Generator().manual_seed(2))
    logits = torch.randn(48, 501, generator=torch.Generator().manual_seed(1)).to(dtype)
    plain, compiled = logits.clone(), logits.clone()
    expected = loss_module.softmax_(plain, index, z_loss=z_loss)
    found = loss_module.compiled_softmax_(compiled, index, z_loss=z_loss)
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-5)
    torch.testing.assert_close(compiled, plain)
