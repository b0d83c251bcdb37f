"""Cross-entropy of a linear head, computed chunk by chunk: the logits of all tokens never exist at once.

    for each span of rows:  for each chunk in it: logits = h W^T  →  log-softmax (fp32), in place
                            loss += …,  dh = (p − onehot) W,  dW += (p − onehot)^T h

The gradients are computed in the forward pass, while the span's logits are at hand, and only scaled in the
backward pass: three matrix products in all, none repeated. A chunk's logits stay in the cache; a span's are
few enough to hold and many enough that dW is seldom added up.
Legend: N rows (tokens), D model, V vocabulary, P rows of a span, C of a chunk.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F

from fms_fsdp.data.batch import IGNORED_LABEL

# fp32 logits of a chunk: within the cache of a CPU, large enough products for a GPU
_CHUNK_BYTES = {"cpu": 8 << 20, "cuda": 1 << 30}
_SPAN_BYTES = 64 << 20  # the same of a span, if a chunk is not more
_SLICE_BYTES = {"cpu": 4 << 20, "cuda": 256 << 20}  # fp32 rows of dW that are added up at a time


def chunk_rows(num_rows: int, vocab_size: int, device_type: str) -> int:
    """Rows per chunk: as many as their fp32 logits fit the device's budget, evened out over the chunks."""
    most = max(128, _CHUNK_BYTES.get(device_type, 1 << 30) // (4 * vocab_size))
    num_chunks = -(-num_rows // most)
    return -(-num_rows // num_chunks)


def _softmax_(logits_CV: torch.Tensor, index_C1: torch.Tensor) -> torch.Tensor:
    """The fp32 log-probability of each row's label; turns the logits into probabilities, in place. Softmax in
    fp32."""
    logp_CV = F.log_softmax(logits_CV, dim=-1, dtype=torch.float32)
    label_C1 = logp_CV.gather(1, index_C1)
    logits_CV.copy_(logp_CV.exp_())
    return label_C1


@functools.cache
def _compiled_softmax_() -> Callable[..., torch.Tensor]:
    compiled: Callable[..., torch.Tensor] = torch.compile(_softmax_, fullgraph=True, dynamic=False)
    return compiled


class _LinearCrossEntropy(torch.autograd.Function):
    """Summed loss of rows h_ND under head W_VD; gradients are made in `forward` in the dtype of h, summed
    over spans in fp32."""

    @staticmethod
    def forward(
        ctx: Any, h_ND: torch.Tensor, weight_VD: torch.Tensor, labels_N: torch.Tensor, compiled: bool
    ) -> torch.Tensor:
        softmax_ = _compiled_softmax_() if compiled else _softmax_
        valid_N1 = (labels_N != IGNORED_LABEL).unsqueeze(1)
        index_N = labels_N.clamp(min=0)
        head_VD = weight_VD.to(h_ND.dtype)
        num_rows, vocab_size = h_ND.shape[0], weight_VD.shape[0]
        rows = chunk_rows(num_rows, vocab_size, h_ND.device.type)
        span = rows * max(1, _SPAN_BYTES // (rows * vocab_size * 4))
        need_h, need_weight, *_ = ctx.needs_input_grad
        dh_ND = torch.empty_like(h_ND) if need_h else None
        dweight_VD: torch.Tensor | None = None
        loss = torch.zeros((), dtype=torch.float32, device=h_ND.device)
        dlogits_PV = h_ND.new_empty(min(span, num_rows), vocab_size)
        for start in range(0, num_rows, span):
            part = slice(start, start + span)
            h_PD, valid_P1, index_P = h_ND[part], valid_N1[part], index_N[part]
            dlogits_PV = dlogits_PV[: len(h_PD)]
            logp_P1 = torch.empty(len(h_PD), 1, dtype=torch.float32, device=h_ND.device)
            for first in range(0, len(h_PD), rows):
                chunk = slice(first, first + rows)
                torch.mm(h_PD[chunk], head_VD.T, out=dlogits_PV[chunk])
                logp_P1[chunk] = softmax_(dlogits_PV[chunk], index_P[chunk].unsqueeze(1))
            loss -= (logp_P1 * valid_P1).sum()
            # p - 1 at the label, exact near p = 1; not scatter_, which copies all of a bf16 tensor (torch
            # 2.13 on CPUs)
            dlogits_PV[torch.arange(len(h_PD), device=h_ND.device), index_P] = (
                logp_P1.expm1().squeeze(1).to(h_ND.dtype)
            )
            if dh_ND is not None:  # masked rows are dropped here and in h, not in the much larger dlogits
                torch.mul(dlogits_PV @ head_VD, valid_P1, out=dh_ND[part])
            if need_weight:
                if span >= num_rows:  # no sum: the product is left in its own dtype
                    dweight_VD = dlogits_PV.T @ (h_PD * valid_P1)
                else:
                    dweight_VD = _add_product(dweight_VD, dlogits_PV.T, h_PD * valid_P1)
        ctx.save_for_backward(dh_ND, None if dweight_VD is None else dweight_VD.to(weight_VD.dtype))
        return loss

    @staticmethod
    def backward(
        ctx: Any, *grads: torch.Tensor
    ) -> tuple[torch.Tensor | None, torch.Tensor | None, None, None]:
        (dloss,) = grads
        dh_ND, dweight_VD = ctx.saved_tensors
        return (
            None if dh_ND is None else dh_ND * dloss.to(dh_ND.dtype),
            None if dweight_VD is None else dweight_VD * dloss.to(dweight_VD.dtype),
            None,
            None,
        )


def _add_product(
    total_VD: torch.Tensor | None, left_VP: torch.Tensor, right_PD: torch.Tensor
) -> torch.Tensor:
    """total + left @ right in fp32, slice by slice where the product has another dtype: neither it nor its
    fp32 copy exists as a whole."""
    if total_VD is None:
        total_VD = torch.zeros(
            left_VP.shape[0], right_PD.shape[1], dtype=torch.float32, device=left_VP.device
        )
    if left_VP.dtype == torch.float32:
        return total_VD.addmm_(left_VP, right_PD)
    rows = max(1, _SLICE_BYTES.get(left_VP.device.type, 256 << 20) // (4 * right_PD.shape[1]))
    for total, left in zip(torch.split(total_VD, rows), torch.split(left_VP, rows), strict=True):
        total.add_(left @ right_PD)
    return total_VD


def linear_cross_entropy(
    h_BSD: torch.Tensor, weight_VD: torch.Tensor, labels_BS: torch.Tensor, *, compiled: bool = False
) -> tuple[torch.Tensor, torch.Tensor]:
    """(sum of the cross-entropy over unmasked labels, fp32 scalar; their number, int64 scalar). Label -100 is
    masked.

    `compiled` fuses what lies between the matrix products with torch.compile.
    """
    labels_N = labels_BS.reshape(-1)
    if not torch.is_grad_enabled():
        # else the gradients would be computed all the same
        h_BSD, weight_VD = (h_BSD.detach(), weight_VD.detach())
    loss_sum: torch.Tensor = _LinearCrossEntropy.apply(
        h_BSD.reshape(-1, h_BSD.shape[-1]), weight_VD, labels_N, compiled
    )  # type: ignore[no-untyped-call]
    return loss_sum, (labels_N != IGNORED_LABEL).sum()
