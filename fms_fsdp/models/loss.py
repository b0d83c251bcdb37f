"""Cross-entropy of a linear head, computed chunk by chunk: the logits of all tokens never exist at once.

    for each chunk of rows:  logits = h W^T  →  log-softmax (fp32)  →  loss += …,  dh = (p − onehot) W,  dW += (p − onehot)^T h

The gradients are computed in the forward pass, while the chunk's logits are at hand, and only scaled in the backward pass: three matrix
products in all, none repeated. Legend: N rows (tokens), D model, V vocabulary, C rows of a chunk.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F

IGNORE_INDEX = -100
# fp32 logits of a chunk: within the cache of a CPU, large enough products for a GPU
_CHUNK_BYTES = {"cpu": 8 << 20, "cuda": 1 << 30}


def chunk_rows(num_rows: int, vocab_size: int, device_type: str) -> int:
    """Rows per chunk: as many as their fp32 logits fit the device's budget, evened out over the chunks."""
    most = max(128, _CHUNK_BYTES.get(device_type, 1 << 30) // (4 * vocab_size))
    num_chunks = -(-num_rows // most)
    return -(-num_rows // num_chunks)


def _softmax(logits_CV: torch.Tensor, index_C1: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(fp32 log-probability of each row's label, all probabilities in the dtype of the logits); softmax in fp32."""
    logp_CV = F.log_softmax(logits_CV, dim=-1, dtype=torch.float32)
    return logp_CV.gather(1, index_C1), logp_CV.exp_().to(logits_CV.dtype)


@functools.cache
def _compiled_softmax() -> Callable[..., tuple[torch.Tensor, torch.Tensor]]:
    compiled: Callable[..., tuple[torch.Tensor, torch.Tensor]] = torch.compile(_softmax, fullgraph=True, dynamic=False)
    return compiled


class _LinearCrossEntropy(torch.autograd.Function):
    """Summed loss of rows h_ND under head W_VD; gradients are made in `forward` in the dtype of h, summed over chunks in fp32."""

    @staticmethod
    def forward(
        ctx: Any, h_ND: torch.Tensor, weight_VD: torch.Tensor, labels_N: torch.Tensor, compiled: bool
    ) -> torch.Tensor:
        softmax = _compiled_softmax() if compiled else _softmax
        valid_N1 = (labels_N != IGNORE_INDEX).unsqueeze(1)
        index_N1 = labels_N.clamp(min=0).unsqueeze(1)
        head_VD = weight_VD.to(h_ND.dtype)
        rows = chunk_rows(h_ND.shape[0], weight_VD.shape[0], h_ND.device.type)
        need_h, need_weight, *_ = ctx.needs_input_grad
        dh_ND = torch.empty_like(h_ND) if need_h else None
        dweight_VD: torch.Tensor | None = None
        loss = torch.zeros((), dtype=torch.float32, device=h_ND.device)
        for start in range(0, h_ND.shape[0], rows):
            chunk = slice(start, start + rows)
            h_CD, valid_C1, index_C1 = h_ND[chunk], valid_N1[chunk], index_N1[chunk]
            logp_C1, dlogits_CV = softmax(h_CD @ head_VD.T, index_C1)
            loss -= (logp_C1 * valid_C1).sum()
            dlogits_CV.scatter_(
                1, index_C1, logp_C1.expm1().to(dlogits_CV.dtype)
            )  # p - 1 at the label, exact near p = 1
            if dh_ND is not None:  # masked rows are dropped here and in h, not in the much larger dlogits
                torch.mul(dlogits_CV @ head_VD, valid_C1, out=dh_ND[chunk])
            if need_weight:
                only = rows >= h_ND.shape[0]
                dweight_VD = _add_product(dweight_VD, dlogits_CV.T, h_CD * valid_C1, only=only)
        ctx.save_for_backward(dh_ND, None if dweight_VD is None else dweight_VD.to(weight_VD.dtype))
        return loss

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, torch.Tensor | None, None, None]:
        (dloss,) = grads
        dh_ND, dweight_VD = ctx.saved_tensors
        return (
            None if dh_ND is None else dh_ND * dloss.to(dh_ND.dtype),
            None if dweight_VD is None else dweight_VD * dloss.to(dweight_VD.dtype),
            None,
            None,
        )


def _add_product(total: torch.Tensor | None, left: torch.Tensor, right: torch.Tensor, *, only: bool) -> torch.Tensor:
    """total + left @ right in fp32; a single product is left in its own dtype."""
    if total is None:
        product = left @ right
        return product if only else product.float()
    return total.addmm_(left, right) if left.dtype == torch.float32 else total.add_(left @ right)


def linear_cross_entropy(
    h_BSD: torch.Tensor, weight_VD: torch.Tensor, labels_BS: torch.Tensor, *, compiled: bool = False
) -> tuple[torch.Tensor, torch.Tensor]:
    """(sum of the cross-entropy over unmasked labels, fp32 scalar; their number, int64 scalar). Label -100 is masked.

    `compiled` fuses what lies between the matrix products with torch.compile.
    """
    labels_N = labels_BS.reshape(-1)
    if not torch.is_grad_enabled():
        h_BSD, weight_VD = h_BSD.detach(), weight_VD.detach()  # else the gradients would be computed all the same
    loss_sum: torch.Tensor = _LinearCrossEntropy.apply(
        h_BSD.reshape(-1, h_BSD.shape[-1]), weight_VD, labels_N, compiled
    )  # type: ignore[no-untyped-call]
    return loss_sum, (labels_N != IGNORE_INDEX).sum()
