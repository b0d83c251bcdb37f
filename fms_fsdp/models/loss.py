"""Cross-entropy of a linear head, computed chunk by chunk: the logits of all tokens never exist at once.

    for each span of rows:  for each chunk in it: logits = h W^T  →  log-softmax (fp32), in place
                            loss += …,  dh = (p − onehot) W,  dW += (p − onehot)^T h

The gradients are computed in the forward pass, while the span's logits are at hand, and only scaled in the
backward pass: three matrix products in all, none repeated. fp16 could not hold them so small, and is told
their scale before. A chunk's logits stay in the cache; a span's are few enough to hold and many enough that
dW is seldom added up.
Legend: N rows (tokens), D model, V vocabulary, P rows of a span, C of a chunk.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F

from fms_fsdp.data.batch import IGNORED_LABEL
from fms_fsdp.models.chunks import SLICE_BYTES, chunk_rows, span_rows
from fms_fsdp.models.masks import compiled

_ROW_MULTIPLE = {"cpu": 1, "cuda": 64}  # of numbers, at which a row of logits begins


def empty_rows(like: torch.Tensor, num_rows: int, vocab_size: int) -> torch.Tensor:
    """(num_rows, vocab_size) without values. On a GPU a row begins at a multiple of 128 bytes: products of
    other rows, as of 50,257 bf16 numbers, are slow there."""
    multiple = _ROW_MULTIPLE.get(like.device.type, 64)
    rows = like.new_empty(num_rows, -(-vocab_size // multiple) * multiple)
    rows[:, vocab_size:] = 0  # a product may read these columns: NaN times zero is NaN
    return rows[:, :vocab_size]


Rows = tuple[
    torch.Tensor, ...
]  # of each row, fp32: gradient at its label, loss, and losses beside it
Scale = torch.Tensor | float


class VocabularyPart(NamedTuple):
    """What a rank needs that has a part of the vocabulary: the softmax over all parts, the first token of its
    own part, and the number of tokens of the largest part.

    The softmax takes the indices of the labels from the first token of the part on, and gives the rank that
    does not have a label what the gradient is where `clamp` puts the index.
    """

    softmax_: Callable[..., Rows]
    first: int
    largest: int


def _softmax_(logits_CV: torch.Tensor, index_C1: torch.Tensor, scale: Scale = 1.0) -> Rows:
    """The gradient of each row at its label, and its loss; turns the logits into their gradients elsewhere,
    which are the probabilities, times `scale`, in place. Softmax in fp32."""
    logp_CV = F.log_softmax(logits_CV, dim=-1, dtype=torch.float32)
    label_C1 = logp_CV.gather(1, index_C1)
    p_CV = logp_CV.exp_()
    logits_CV.copy_(p_CV.mul_(scale) if isinstance(scale, torch.Tensor) else p_CV)
    return label_C1.expm1(), -label_C1  # p - 1, exact near p = 1


def _compiled_softmax_(logits_CV: torch.Tensor, index_C1: torch.Tensor, scale: Scale = 1.0) -> Rows:
    """`_softmax_` as one compiled kernel.

    The labels' logits are taken outside of it: code that torch 2.11 compiles reads them after the logits have
    been overwritten.
    """
    label_C1 = compiled(_normalise_)(logits_CV, logits_CV.gather(1, index_C1), scale)
    return label_C1.expm1(), -label_C1


def _normalise_(logits_CV: torch.Tensor, label_C1: torch.Tensor, scale: Scale) -> torch.Tensor:
    top_C1 = logits_CV.float().amax(dim=-1, keepdim=True)
    shifted_CV = logits_CV.float() - top_C1
    total_C1 = shifted_CV.exp().sum(dim=-1, keepdim=True).log()
    logits_CV.copy_((shifted_CV - total_C1).exp() * scale)
    return (label_C1.float() - top_C1) - total_C1


class _LinearCrossEntropy(torch.autograd.Function):
    """Summed loss, and summed losses beside it if there are some, of rows h_ND under head W_VD. The
    gradient of the first output is the gradient of them all. `forward` makes the gradients in the dtype of h,
    summed over spans in fp32, and multiplied by `scale`."""

    @staticmethod
    def forward(
        ctx: Any,
        h_ND: torch.Tensor,
        weight_VD: torch.Tensor,
        labels_N: torch.Tensor,
        softmax_: Callable[[torch.Tensor, torch.Tensor, Scale], Rows],
        num_losses: int,
        scale: Scale,
        vocabulary: VocabularyPart | None,
    ) -> Rows:
        masked_N1 = (labels_N == IGNORED_LABEL).unsqueeze(1)
        index_N = labels_N.masked_fill(labels_N == IGNORED_LABEL, 0)
        head_VD = weight_VD.to(h_ND.dtype)
        num_rows, vocab_size = h_ND.shape[0], weight_VD.shape[0]
        column_N = index_N
        if vocabulary is not None:
            index_N = index_N - vocabulary.first
            column_N = index_N.clamp(0, vocab_size - 1)
        # alike on the ranks of all parts, which exchange sums of each chunk
        rows = chunk_rows(
            num_rows, vocabulary.largest if vocabulary else vocab_size, h_ND.device.type
        )
        span = span_rows(rows, vocab_size, h_ND.device.type)
        need_h, need_weight, *_ = ctx.needs_input_grad
        dh_ND = torch.empty_like(h_ND) if need_h else None
        dweight_VD: torch.Tensor | None = None
        losses = tuple(h_ND.new_zeros((), dtype=torch.float32) for _ in range(num_losses))
        dlogits_PV = empty_rows(h_ND, min(span, num_rows), vocab_size)
        for start in range(0, num_rows, span):
            part = slice(start, start + span)
            # masked rows are dropped before the product, whatever they hold: their logits are 0
            h_PD, index_P = h_ND[part].masked_fill(masked_N1[part], 0), index_N[part]
            dlogits_PV = dlogits_PV[: len(h_PD)]
            label_P1, *losses_P1 = h_ND.new_empty(1 + num_losses, len(h_PD), 1, dtype=torch.float32)
            for first in range(0, len(h_PD), rows):
                chunk = slice(first, first + rows)
                torch.mm(h_PD[chunk], head_VD.T, out=dlogits_PV[chunk])
                found = softmax_(dlogits_PV[chunk], index_P[chunk].unsqueeze(1), scale)
                for kept_P1, of_chunk_C1 in zip((label_P1, *losses_P1), found, strict=True):
                    kept_P1[chunk] = of_chunk_C1
            for loss, loss_P1 in zip(losses, losses_P1, strict=True):
                loss += loss_P1.masked_fill_(masked_N1[part], 0).sum()
            # not scatter_, which copies all of a bf16 tensor (torch 2.13 on CPUs)
            row_P = torch.arange(len(h_PD), device=h_ND.device)
            dlogits_PV[row_P, column_N[part]] = (label_P1 * scale).squeeze(1).to(h_ND.dtype)
            if dh_ND is not None:  # masked rows are dropped here, not in the much larger dlogits
                torch.mm(dlogits_PV, head_VD, out=dh_ND[part]).masked_fill_(masked_N1[part], 0)
            if need_weight:
                if span >= num_rows:  # no sum: the product is left in its own dtype
                    dweight_VD = dlogits_PV.T @ h_PD
                else:
                    dweight_VD = _add_product(dweight_VD, dlogits_PV.T, h_PD)
        kept = (dh_ND, None if dweight_VD is None else dweight_VD.to(weight_VD.dtype))
        ctx.save_for_backward(*kept, scale if isinstance(scale, torch.Tensor) else None)
        ctx.mark_non_differentiable(*losses[1:])
        return losses

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        *gradients, scale = ctx.saved_tensors
        factor = (
            grads[0] if scale is None else grads[0] / scale
        )  # 1 where the loss was multiplied by `scale`
        return *(_scaled(gradient, factor) for gradient in gradients), None, None, None, None, None


def _scaled(gradient: torch.Tensor | None, factor: torch.Tensor) -> torch.Tensor | None:
    """gradient * factor, rounded once: a factor in bf16 would be off by up to 0.4 % everywhere."""
    if gradient is None:
        return None
    # of two dims, so that the product is made in fp32
    return torch.mul(gradient, factor.reshape(1, 1), out=torch.empty_like(gradient))


def _add_product(
    total_VD: torch.Tensor | None, left_VP: torch.Tensor, right_PD: torch.Tensor
) -> torch.Tensor:
    """total + left @ right in fp32, slice by slice where the product has another dtype: neither the
    product nor an fp32 copy of the product exists as a whole."""
    if total_VD is None:
        total_VD = left_VP.new_zeros(left_VP.shape[0], right_PD.shape[1], dtype=torch.float32)
    if left_VP.dtype == torch.float32:
        return total_VD.addmm_(left_VP, right_PD)
    rows = max(1, SLICE_BYTES.get(left_VP.device.type, 256 << 20) // (4 * right_PD.shape[1]))
    for total, left in zip(torch.split(total_VD, rows), torch.split(left_VP, rows), strict=True):
        total.add_(left @ right_PD)
    return total_VD


def linear_cross_entropy(
    h_BSD: torch.Tensor,
    weight_VD: torch.Tensor,
    labels_BS: torch.Tensor,
    *,
    compiled: bool = False,
    z_loss: float = 0.0,
    softcap: float = 0.0,
    scale: torch.Tensor | None = None,
    vocabulary: VocabularyPart | None = None,
    teacher: Callable[..., Rows] | None = None,
) -> tuple[torch.Tensor, ...]:
    """(sum of the loss over unmasked labels, fp32 scalar; their number, int64 scalar). Label -100 is masked,
    and its row has no part in loss or gradient, whatever it holds.

    The loss is the cross-entropy of logits c tanh(logits / c), c the `softcap`; 0 leaves it out. `z_loss` ·
    log(Z)², Z the sum of exp(logits), is summed in a third scalar: it is no part of the loss, but its
    gradient is part of that of the loss. Without cap and z-loss, `compiled` fuses what lies between the
    matrix products with torch.compile. `scale`: what the loss will be multiplied by before the backward pass;
    its gradients are that large from the start, so that fp16 can hold them. With `vocabulary` the weight has
    some tokens of a vocabulary; the loss is that of all tokens, alike on all ranks, and the gradient of h is
    this rank's summand. `teacher`: the softmax in place of these (extras/teacher.py), which gives one more
    loss, summed in a last scalar, and mixes its gradient into that of the loss.
    Source: Chowdhery et al. 2022 (PaLM), section 5, for z_loss; Gemma Team 2024 for the cap.
    """
    softmax_ = _compiled_softmax_ if compiled else _softmax_
    if teacher is not None:
        softmax_ = functools.partial(teacher, compiles=compiled, z_loss=z_loss, softcap=softcap)
    elif vocabulary is not None:
        softmax_ = functools.partial(
            vocabulary.softmax_, compiles=compiled, z_loss=z_loss, softcap=softcap
        )
    elif z_loss or softcap:
        from fms_fsdp.extras.shaped_loss import shaped_softmax_

        softmax_ = functools.partial(shaped_softmax_, z_loss=z_loss, softcap=softcap)
    labels_N = labels_BS.reshape(-1)
    if not torch.is_grad_enabled():
        # else the gradients would be computed all the same
        h_BSD, weight_VD = (h_BSD.detach(), weight_VD.detach())
    h_ND, num_losses = h_BSD.reshape(-1, h_BSD.shape[-1]), 1 + bool(z_loss) + bool(teacher)
    loss_sum, *beside = _LinearCrossEntropy.apply(
        h_ND, weight_VD, labels_N, softmax_, num_losses, 1.0 if scale is None else scale, vocabulary
    )  # type: ignore[no-untyped-call]
    return loss_sum, (labels_N != IGNORED_LABEL).sum(), *beside
