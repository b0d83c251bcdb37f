"""The chunked loss against the plain one."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch.utils.flop_counter import FlopCounterMode

from fms_fsdp.models import loss as loss_module
from fms_fsdp.models.loss import chunk_rows, linear_cross_entropy


def inputs(dtype: torch.dtype = torch.float32) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    h_BSD = torch.randn(3, 67, 24, generator=generator).to(dtype).requires_grad_()
    weight_VD = torch.randn(501, 24, generator=generator).requires_grad_()
    labels_BS = torch.randint(0, 501, (3, 67), generator=generator)
    labels_BS[torch.rand(3, 67, generator=generator) < 0.3] = -100
    return h_BSD, weight_VD, labels_BS


@pytest.fixture(params=["one chunk", "uneven chunks", "spans of one chunk", "spans of two chunks"])
def chunked(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """201 rows: at once, in chunks of 101, and in spans of a few rows of the weight."""
    chunk = 1 << 30 if request.param == "one chunk" else 64 * 501 * 4
    monkeypatch.setitem(loss_module._CHUNK_BYTES, "cpu", chunk)
    if "spans" in request.param:
        monkeypatch.setattr(loss_module, "chunk_rows", lambda *_: 32)
        monkeypatch.setattr(loss_module, "_SPAN_BYTES", 4 * 501 * (32 if "one" in request.param else 64))
        monkeypatch.setitem(loss_module._SLICE_BYTES, "cpu", 4 * 24 * 100)


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
    expected = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=-100, reduction="sum")
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


def test_no_gradient_is_made_for_evaluation() -> None:
    h, weight, labels = inputs()
    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        loss_sum, _ = linear_cross_entropy(h, weight, labels)
    assert not loss_sum.requires_grad
    assert counter.get_total_flops() == 2 * 3 * 67 * 24 * 501  # the logits, nothing else
    torch.testing.assert_close(loss_sum, linear_cross_entropy(h, weight, labels)[0].detach())


def test_logits_of_a_large_vocabulary_never_exist_at_once() -> None:
    rows = chunk_rows(8192, 128256, "cpu")
    assert rows * 128256 * 4 < 64 << 20
    assert chunk_rows(100, 512, "cpu") == 100
    assert chunk_rows(1000, 12000, "cpu") == 167  # six even chunks, not five of 174 and a rest


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_products_are_added_up_and_none_replaces_another(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(loss_module._SLICE_BYTES, "cpu", 4 * 3 * 2)  # two rows at a time
    torch.manual_seed(0)
    pairs = [(torch.randn(5, 4, dtype=dtype), torch.randn(4, 3, dtype=dtype)) for _ in range(3)]
    total = None
    for left, right in pairs:
        total = loss_module._add_product(total, left, right)
    assert total is not None and total.dtype == torch.float32
    expected = sum((left @ right).float() for left, right in pairs)
    torch.testing.assert_close(total, expected)


@pytest.mark.usefixtures("chunked")
def test_rows_that_are_masked_leave_no_trace_whatever_they_hold() -> None:
    """Of infinite size they would spoil the weight's gradient, unless they are dropped."""
    h, weight, labels = inputs()
    linear_cross_entropy(h, weight, labels)[0].backward()
    expected = weight.grad
    weight.grad = None
    loud = h.detach().clone()
    loud[labels == -100] *= 1e4
    linear_cross_entropy(loud.requires_grad_(), weight, labels)[0].backward()
    torch.testing.assert_close(weight.grad, expected)
